//! How steps become rows.

/// How the steps of a row become one figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consolidation {
    /// Their mean.
    Average,
    /// The least.
    Min,
    /// The greatest.
    Max,
    /// That of the last step.
    Last,
}

impl Consolidation {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Average, Self::Min, Self::Max, Self::Last];

    /// As rrdtool writes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Average => "AVERAGE",
            Self::Min => "MIN",
            Self::Max => "MAX",
            Self::Last => "LAST",
        }
    }

    /// What a row begins with.
    pub(crate) const fn first(self) -> f64 {
        match self {
            Self::Average => 0.0,
            Self::Min => f64::INFINITY,
            Self::Max => f64::NEG_INFINITY,
            Self::Last => f64::NAN,
        }
    }

    /// With `steps` more steps of this rate.
    pub(crate) fn with(self, before: f64, rate: f64, steps: u64) -> f64 {
        match self {
            _ if rate.is_nan() || steps == 0 => before,
            Self::Average => before + rate * steps as f64,
            Self::Min => before.min(rate),
            Self::Max => before.max(rate),
            Self::Last => rate,
        }
    }
}
