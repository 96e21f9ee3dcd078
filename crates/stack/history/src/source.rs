//! A source of values, and the rate during the step that has begun.

use std::borrow::Cow;

/// What the values of a source are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The figure itself.
    Gauge,
    /// A counter, whose rate per second is recorded; one that decreases may do so.
    Derive,
    /// An amount since the last sample, whose rate per second is recorded.
    Absolute,
}

impl Kind {
    /// As rrdtool writes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gauge => "GAUGE",
            Self::Derive => "DERIVE",
            Self::Absolute => "ABSOLUTE",
        }
    }
}

/// A source of values.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// As `vbd_xvda_read`. A text that is no constant is shared by all that have the same.
    pub name: Cow<'static, str>,
    /// For people.
    pub doc: Cow<'static, str>,
    /// As `B/s`.
    pub units: Cow<'static, str>,
    /// What its values are.
    pub kind: Kind,
    /// A rate below is unknown.
    pub min: f64,
    /// A rate above is unknown.
    pub max: f64,
}

/// What happened since the last step ended, in rrdtool's terms a primary data point in preparation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Step {
    /// The last value; NaN if it is not known.
    pub(crate) last: f64,
    /// Rate times seconds of what is known of this step; NaN as long as nothing is.
    pub(crate) sum: f64,
    /// Seconds of this step of which nothing is known.
    pub(crate) unknown_s: f64,
}

/// What a sample ended: one or more whole steps, all of one rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ended {
    /// The rate of these steps; NaN if it is not known.
    pub(crate) rate: f64,
    /// How many.
    pub(crate) steps: u64,
}

/// Where a sample lies in relation to steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    /// Seconds since the last sample.
    pub(crate) interval_s: f64,
    /// Of these, seconds of the last step that ended and before: up to its end.
    pub(crate) before_s: f64,
    /// The rest: seconds of the step that goes on.
    pub(crate) after_s: f64,
    /// Steps that ended since the last sample.
    pub(crate) steps: u64,
    /// Seconds of a step.
    pub(crate) step_s: f64,
    /// Longest interval of which something is known.
    pub(crate) heartbeat_s: f64,
}

/// A value that a source has now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// NaN: not known.
    pub(crate) value: f64,
    /// The counter is not the one of the last sample.
    pub(crate) begins: bool,
}

impl Reading {
    /// Of a source that was not sampled.
    pub(crate) const NONE: Self = Self { value: f64::NAN, begins: false };
}

impl Step {
    /// Nothing is known; so many seconds of the step have passed.
    pub(crate) fn unknown(passed_s: f64) -> Self {
        Self { last: f64::NAN, sum: f64::NAN, unknown_s: passed_s }
    }

    /// Rate times seconds of the interval that a value ends; NaN if it is not known.
    fn amount(&mut self, source: &Source, reading: Reading, moment: &Moment) -> f64 {
        let value = reading.value;
        let last = std::mem::replace(&mut self.last, value);
        if moment.interval_s > moment.heartbeat_s || (reading.begins && source.kind != Kind::Gauge) {
            return f64::NAN;
        }
        let amount = match source.kind {
            Kind::Gauge => value * moment.interval_s,
            Kind::Absolute => value,
            Kind::Derive => value - last,
        };
        let rate = amount / moment.interval_s;
        if rate >= source.min && rate <= source.max { amount } else { f64::NAN }
    }

    /// Takes a value; answers the steps that it ended.
    pub(crate) fn take(&mut self, source: &Source, reading: Reading, moment: &Moment) -> Option<Ended> {
        let amount = self.amount(source, reading, moment);
        if moment.steps == 0 {
            match (amount.is_nan(), self.sum.is_nan()) {
                (true, _) => self.unknown_s += moment.interval_s,
                (false, true) => self.sum = amount,
                (false, false) => self.sum += amount,
            }
            return None;
        }
        let mut unknown_before_s = 0.0;
        if amount.is_nan() {
            unknown_before_s = moment.before_s;
        } else {
            let known = if self.sum.is_nan() { 0.0 } else { self.sum };
            self.sum = known + amount / moment.interval_s * moment.before_s;
        }
        let is_lost = moment.interval_s > moment.heartbeat_s || self.unknown_s > moment.step_s / 2.0;
        let known_s = moment.steps as f64 * moment.step_s - self.unknown_s - unknown_before_s;
        let rate = if is_lost || known_s <= 0.0 { f64::NAN } else { self.sum / known_s };
        if amount.is_nan() {
            (self.sum, self.unknown_s) = (f64::NAN, moment.after_s);
        } else {
            (self.sum, self.unknown_s) = (amount / moment.interval_s * moment.after_s, 0.0);
        }
        Some(Ended { rate, steps: moment.steps })
    }
}
