//! Files of histories and documents of thresholds.

use tapio_history::{History, Kind, Layout, Sample, Source, file};

use super::Shelf;

fn history(has_all: bool) -> Vec<u8> {
    let begin = 1_700_006_400_000;
    let mut history = History::new(Layout::new(5, has_all), begin);
    for turn in 1..=30_u64 {
        let kinds = [("gauge", Kind::Gauge), ("derive", Kind::Derive), ("absolute", Kind::Absolute)];
        let sample = |(name, kind): (&'static str, Kind)| Sample {
            source: Source {
                name: name.into(),
                doc: "A figure".into(),
                units: "B/s".into(),
                kind,
                min: 0.0,
                max: f64::INFINITY,
            },
            value: turn as f64,
            begins: turn == 7,
        };
        history.update(begin + turn * 5_100, &kinds.map(sample)).expect("later");
    }
    history.forget("gauge");
    file::encode(&history)
}

const CONFIG: &str = "<config><variable><name value=\"cpu_usage\"/><alarm_trigger_level value=\"0.9\"/>\
    <alarm_trigger_period value=\"60\"/><alarm_auto_inhibit_period value=\"3600\"/></variable><variable>\
    <name value=\"a&amp;b\"/><alarm_trigger_level value=\"-1e3\"/><alarm_trigger_sense value=\"low\"/>\
    <consolidation_fn value=\"sum\"/><rrd_regex value=\"vbd_(xvda|hd[a-d])_.*\"/><alarm_priority value=\"1\"/>\
    </variable></config>";

/// Puts all of them there.
pub(super) fn put_into(shelf: &mut Shelf) {
    shelf.put("history_file", "means", history(false));
    shelf.put("history_file", "functions", history(true));
    shelf.put("perfmon", "two", CONFIG);
    shelf.put("perfmon", "entity", "<!DOCTYPE a [<!ENTITY b 'c'>]><config>&b;</config>");
    let pattern = "(a{1000}){1000}";
    let greedy = format!(
        "<config><variable><name value='x'/><alarm_trigger_level value='1'/><rrd_regex value='{pattern}'/>\
         </variable></config>"
    );
    shelf.put("perfmon", "greedy", greedy);
}
