//! Thresholds of sources, as XenServer's `other-config:perfmon` has them, and when a crossing is reported.
//!
//! ```text
//! <config><variable>
//!   <name value="cpu_usage"/>                          required
//!   <alarm_trigger_level value="0.9"/>                 required; `inf` never alarms
//!   <alarm_trigger_period value="60"/>                 seconds of the mean that is compared; 0: the last step
//!   <alarm_auto_inhibit_period value="3600"/>          seconds between two messages at least
//!   <alarm_trigger_sense value="high"/>                or low
//!   <alarm_priority value="3"/>                        of the message
//!   <consolidation_fn value="average"/>                of several sources: or sum, max, min
//!   <rrd_regex value="cpu[0-9]+"/>                     which sources, in full; the name if it is missing
//! </variable></config>
//! ```

use std::fmt;

use quick_xml::Reader;
use quick_xml::escape::{escape, unescape};
use quick_xml::events::{BytesStart, Event};
use regex_lite::{Regex, RegexBuilder};

use crate::history::History;

/// Longest document, in bytes.
const TEXT_LEN_MAX: usize = 64 << 10;
/// Most variables of a document.
const VARIABLES_MAX: usize = 64;
/// Longest name or pattern, in bytes.
const NAME_LEN_MAX: usize = 256;
/// Most memory of a pattern that is ready for use, in bytes.
const PATTERN_LEN_MAX: usize = 64 << 10;
/// Seconds of the mean if none are named.
const PERIOD_S: u32 = 60;
/// Seconds between messages if none are named.
const INHIBIT_S: u32 = 3600;
/// Priority of messages if none is named.
const PRIORITY: i64 = 3;

/// Which values alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sense {
    /// Those above the level.
    High,
    /// Those below.
    Low,
}

/// What several sources come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// Their mean.
    Average,
    /// Their sum.
    Sum,
    /// The greatest.
    Max,
    /// The least.
    Min,
}

/// A threshold.
#[derive(Clone, Debug)]
pub struct Variable {
    /// As `cpu_usage`, or a source.
    pub name: String,
    /// What is crossed.
    pub level: f64,
    /// Seconds of the mean that is compared; 0: the last step alone.
    pub period_s: u32,
    /// Seconds between two messages at least.
    pub inhibit_s: u32,
    /// In which direction.
    pub sense: Sense,
    /// Of the message, 1 (most urgent) to 5.
    pub priority: i64,
    combine: Combine,
    pattern: Option<Regex>,
}

/// Why a document is none of thresholds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong(String);

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Wrong {}

fn wrong(what: impl Into<String>) -> Wrong {
    Wrong(what.into())
}

fn pattern(text: &str) -> Result<Regex, Wrong> {
    if text.len() > NAME_LEN_MAX {
        return Err(wrong(format!("rrd_regex: {} bytes, more than {NAME_LEN_MAX}", text.len())));
    }
    let whole = format!("^(?:{text})$");
    let built = RegexBuilder::new(&whole).size_limit(PATTERN_LEN_MAX).build();
    built.map_err(|error| wrong(format!("rrd_regex '{text}': {error}")))
}

/// The variables that XenServer's clients name, which are several sources: pattern, combination, sense.
fn known(name: &str) -> (Option<&'static str>, Combine, Sense) {
    match name {
        "cpu_usage" => (Some("cpu[0-9]+"), Combine::Average, Sense::High),
        "network_usage" => (Some("(vif_[0-9]+|pif_.*)_[rt]x"), Combine::Sum, Sense::High),
        "disk_usage" => (Some("vbd_[a-z0-9]+_(read|write)"), Combine::Sum, Sense::High),
        "memory_free_kib" => (None, Combine::Average, Sense::Low),
        _ => (None, Combine::Average, Sense::High),
    }
}

impl Variable {
    /// With everything that is not required as it is if none is named.
    pub fn new(name: &str, level: f64) -> Self {
        let (sources, combine, sense) = known(name);
        Self {
            name: name.to_owned(),
            level,
            period_s: PERIOD_S,
            inhibit_s: INHIBIT_S,
            sense,
            priority: PRIORITY,
            combine,
            pattern: sources.and_then(|text| pattern(text).ok()),
        }
    }

    /// The mean over its period of the sources that it names; NaN if nothing is known of them.
    pub fn value(&self, history: &History) -> f64 {
        let is_wanted = |name: &str| match &self.pattern {
            Some(pattern) => pattern.is_match(name),
            None => self.name == name,
        };
        let names: Vec<&str> =
            history.sources().map(|source| source.name.as_ref()).filter(|name| is_wanted(name)).collect();
        let means = names.into_iter().map(|name| history.mean(name, self.period_s));
        let known: Vec<f64> = means.filter(|mean| !mean.is_nan()).collect();
        match self.combine {
            _ if known.is_empty() => f64::NAN,
            Combine::Average => known.iter().sum::<f64>() / known.len() as f64,
            Combine::Sum => known.iter().sum(),
            Combine::Max => known.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            Combine::Min => known.iter().copied().fold(f64::INFINITY, f64::min),
        }
    }

    /// Whether a value is beyond the level; what is not known is not.
    pub fn is_crossed(&self, value: f64) -> bool {
        match self.sense {
            Sense::High => value > self.level,
            Sense::Low => value < self.level,
        }
    }

    /// The body of a message, as XenServer's clients read it: two lines, and the variable.
    pub fn body(&self, value: f64) -> String {
        let (period, inhibit) = (self.period_s, self.inhibit_s);
        format!(
            "value: {value:.6}\nconfig:\n<variable>\n    {}\n    <alarm_trigger_level value=\"{}\"/>\n    \
             <alarm_trigger_period value=\"{period}\"/>\n    <alarm_auto_inhibit_period value=\"{inhibit}\"/>\n\
             </variable>\n",
            self.mark(),
            self.level
        )
    }

    /// What the body of its messages has, and of no other variable's.
    pub fn mark(&self) -> String {
        format!("<name value=\"{}\"/>", escape(self.name.as_str()))
    }
}

/// Elements of one variable.
#[derive(Default)]
struct Given(Vec<(String, String)>);

impl Given {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.trim())
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, Wrong> {
        let Some(text) = self.get(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| wrong(format!("{name} '{text}' is no number")))
    }

    fn seconds(&self, name: &str, default: u32) -> Result<u32, Wrong> {
        let given: Option<f64> = self.number(name)?;
        let fits = |seconds: f64| (0.0..=f64::from(u32::MAX)).contains(&seconds).then_some(seconds as u32);
        given.map_or(Ok(default), |seconds| {
            fits(seconds).ok_or_else(|| wrong(format!("{name} '{seconds}' is no number of seconds")))
        })
    }

    fn variable(&self) -> Result<Variable, Wrong> {
        let name = self.get("name").unwrap_or_default();
        if name.is_empty() || name.len() > NAME_LEN_MAX {
            return Err(wrong(format!("a variable needs a name of 1 to {NAME_LEN_MAX} bytes")));
        }
        let level: Option<f64> = self.number("alarm_trigger_level")?;
        let level = level.filter(|level| !level.is_nan());
        let level = level.ok_or_else(|| wrong(format!("variable '{name}' needs an alarm_trigger_level")))?;
        let mut variable = Variable::new(name, level);
        variable.period_s = self.seconds("alarm_trigger_period", PERIOD_S)?;
        variable.inhibit_s = self.seconds("alarm_auto_inhibit_period", INHIBIT_S)?;
        variable.priority = self.number("alarm_priority")?.unwrap_or(PRIORITY);
        if !(0..=5).contains(&variable.priority) {
            return Err(wrong(format!("alarm_priority {} is not from 0 to 5", variable.priority)));
        }
        variable.sense = match self.get("alarm_trigger_sense") {
            None => variable.sense,
            Some("high") => Sense::High,
            Some("low") => Sense::Low,
            Some(other) => return Err(wrong(format!("alarm_trigger_sense '{other}' is not high or low"))),
        };
        variable.combine = match self.get("consolidation_fn") {
            None => variable.combine,
            // The last is what XenServer names for the room of SRs.
            Some("average" | "get_percent_sr_usage") => Combine::Average,
            Some("sum") => Combine::Sum,
            Some("max") => Combine::Max,
            Some("min") => Combine::Min,
            Some(other) => return Err(wrong(format!("consolidation_fn '{other}' is not known"))),
        };
        if let Some(text) = self.get("rrd_regex") {
            variable.pattern = Some(pattern(text)?);
        }
        Ok(variable)
    }
}

fn value_of(element: &BytesStart<'_>) -> Result<String, Wrong> {
    let found = element.try_get_attribute("value").map_err(|error| wrong(error.to_string()))?;
    let Some(found) = found else { return Ok(String::new()) };
    unescape(&found.value).map(std::borrow::Cow::into_owned).map_err(|error| wrong(error.to_string()))
}

/// Reads a document. Elements that are not known are passed over.
///
/// # Errors
/// It is no XML of this form, or a value of it is none.
pub fn parse(text: &str) -> Result<Vec<Variable>, Wrong> {
    if text.len() > TEXT_LEN_MAX {
        return Err(wrong(format!("{} bytes, more than {TEXT_LEN_MAX}", text.len())));
    }
    let mut reader = Reader::from_str(text);
    reader.config_mut().expand_empty_elements = true;
    let (mut path, mut variables, mut given) = (Vec::new(), Vec::new(), Given::default());
    loop {
        match reader.read_event().map_err(|error| wrong(error.to_string()))? {
            Event::Start(element) => {
                let name = element.local_name().into_inner().to_owned();
                match path.len() {
                    0 if name != "config" => return Err(wrong(format!("<{name}> is no <config>"))),
                    1 if name == "variable" => given = Given::default(),
                    2 => given.0.push((name.clone(), value_of(&element)?)),
                    0 | 1 => {}
                    _ => return Err(wrong(format!("<{name}> is too deep"))),
                }
                path.push(name);
            }
            Event::End(_) => {
                let ended = path.pop();
                if path.len() == 1 && ended.as_deref() == Some("variable") {
                    variables.push(given.variable()?);
                }
            }
            Event::DocType(_) => return Err(wrong("a document type is not read")),
            Event::Eof if path.is_empty() => return Ok(variables),
            Event::Eof => return Err(wrong("it ends in its middle")),
            _ => {}
        }
        if variables.len() > VARIABLES_MAX || given.0.len() > VARIABLES_MAX {
            return Err(wrong(format!("more than {VARIABLES_MAX} variables, or elements of one")));
        }
    }
}

/// Whether a variable of one object is beyond its level, and when that was last reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    is_told: bool,
    told_s: Option<i64>,
}

impl Watch {
    /// One that was reported at this time, seconds since 1970, perhaps by an earlier daemon.
    pub const fn told(at_s: i64) -> Self {
        Self { is_told: true, told_s: Some(at_s) }
    }

    /// Whether a crossing has to be reported now: once until the value is back, and not within the inhibit period of
    /// the last report.
    pub fn is_due(&mut self, variable: &Variable, value: f64, now_s: i64) -> bool {
        if !variable.is_crossed(value) {
            self.is_told = false;
            return false;
        }
        // A clock that was set back ends the period.
        let since = self.told_s.map(|told_s| now_s - told_s).filter(|since_s| *since_s >= 0);
        !self.is_told && since.is_none_or(|since_s| since_s >= i64::from(variable.inhibit_s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, Layout, Sample, Source};

    const BEGIN: u64 = 1_700_006_400_000;

    fn history(values: &[(&'static str, f64)], turns: u64) -> History {
        let mut history = History::new(Layout::new(5, false), BEGIN);
        for turn in 1..=turns {
            let samples: Vec<Sample> = values
                .iter()
                .map(|(name, value)| Sample {
                    source: Source {
                        name: (*name).into(),
                        doc: "A figure".into(),
                        units: "".into(),
                        kind: Kind::Gauge,
                        min: f64::NEG_INFINITY,
                        max: f64::INFINITY,
                    },
                    value: value * turn as f64,
                    begins: false,
                })
                .collect();
            history.update(BEGIN + turn * 5000, &samples).expect("later");
        }
        history
    }

    #[test]
    fn documents_of_xenserver_are_read() {
        let text = "<?xml version=\"1.0\"?><config><variable><name value=\"cpu_usage\" /><alarm_trigger_level \
            value=\"0.5\" /><alarm_trigger_period value=\"120\"/><alarm_auto_inhibit_period value=\"600\"/>\
            </variable><variable><name value='a&amp;b'/><alarm_trigger_level value=\"2\"/><alarm_trigger_sense \
            value=\"low\"/><rrd_regex value=\"vbd_(xvda|xvdb)_latency\"/><consolidation_fn value=\"max\"/>\
            <alarm_priority value=\"1\"/><other value=\"x\"/></variable></config>";
        let read = parse(text).expect("a document");
        let [cpu, other] = read.as_slice() else { panic!("{read:?}") };
        assert_eq!((cpu.name.as_str(), cpu.level, cpu.period_s, cpu.inhibit_s), ("cpu_usage", 0.5, 120, 600));
        assert_eq!((cpu.sense, cpu.combine, cpu.priority), (Sense::High, Combine::Average, 3));
        assert_eq!((other.name.as_str(), other.sense, other.priority), ("a&b", Sense::Low, 1));
        assert_eq!((other.period_s, other.inhibit_s, other.combine), (60, 3600, Combine::Max));
        assert!(parse("<config/>").expect("none").is_empty());
        for (text, why) in [
            ("", ""),
            ("<variable/>", "is no <config>"),
            ("<config><variable>", "ends in its middle"),
            ("<config><variable/></config>", "needs a name"),
            ("<config><variable><name value='a'/></variable></config>", "needs an alarm_trigger_level"),
            (
                "<config><variable><name value='a'/><alarm_trigger_level value='x'/></variable></config>",
                "'x' is no number",
            ),
            (
                "<config><variable><name value='a'/><alarm_trigger_level value='1'/><rrd_regex value='('/>\
                 </variable></config>",
                "rrd_regex '('",
            ),
            (
                "<config><variable><name value='a'/><alarm_trigger_level value='1'/><alarm_trigger_period \
                 value='-1'/></variable></config>",
                "no number of seconds",
            ),
            ("<!DOCTYPE x><config/>", "document type"),
        ] {
            match parse(text) {
                Ok(read) => assert!(text.is_empty() && read.is_empty(), "{text}"),
                Err(wrong) => assert!(!why.is_empty() && wrong.to_string().contains(why), "{text}: {wrong}"),
            }
        }
        assert!(parse(&format!("<config>{}</config>", " ".repeat(TEXT_LEN_MAX))).is_err());
    }

    #[test]
    fn values_are_means_over_the_period_of_all_sources_that_fit() {
        let history = history(&[("cpu0", 1.0), ("cpu1", 3.0), ("cpu_avg", 100.0), ("m", -1.0)], 24);
        let mut cpu = Variable::new("cpu_usage", 40.0);
        cpu.period_s = 10;
        // The last two steps are 23 and 24.
        assert!((cpu.value(&history) - 2.0 * 23.5).abs() < 1e-4, "{}", cpu.value(&history));
        assert!(cpu.is_crossed(cpu.value(&history)) && !cpu.is_crossed(f64::NAN));
        cpu.period_s = 0;
        assert!((cpu.value(&history) - 48.0).abs() < 1e-4);
        // More than steps go back: minutes.
        cpu.period_s = 700;
        assert!((cpu.value(&history) - 2.0 * 12.5).abs() < 0.1, "{}", cpu.value(&history));
        assert!(Variable::new("nothing", 0.0).value(&history).is_nan());
        let low = Variable { sense: Sense::Low, ..Variable::new("m", 0.0) };
        assert!(low.is_crossed(low.value(&history)));
        let body = cpu.body(0.5);
        assert!(body.starts_with("value: 0.500000\nconfig:\n<variable>\n"), "{body}");
        let read = parse(&format!("<config>{}</config>", body.split_once("config:").expect("it").1));
        assert_eq!(read.expect("a variable")[0].level, 40.0);
    }

    #[test]
    fn a_crossing_is_reported_once_and_not_within_the_inhibit_period() {
        let variable = Variable { inhibit_s: 100, ..Variable::new("a", 1.0) };
        let mut watch = Watch::default();
        let mut told = Vec::new();
        let values =
            [(0, 0.5), (10, 2.0), (20, 2.0), (300, 2.0), (310, 0.0), (320, 2.0), (350, 0.0), (360, 2.0)];
        for (now, value) in
            values.into_iter().chain([(400, f64::NAN), (500, 3.0), (560, 0.0), (590, 3.0), (601, 3.0)])
        {
            if watch.is_due(&variable, value, now) {
                told.push(now);
                watch = Watch::told(now);
            }
        }
        // At 590 the crossing is within the period of the report at 500; it is reported when that ends.
        assert_eq!(told, [10, 320, 500, 601]);
        assert!(!Watch::told(1000).is_due(&variable, 2.0, 2000), "an earlier daemon told it");
    }
}
