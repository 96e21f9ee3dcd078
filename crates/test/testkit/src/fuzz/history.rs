//! Files of histories, and thresholds that clients write into `other-config:perfmon`.

use tapio_history::alarm::{self, Watch};
use tapio_history::{History, Kind, Sample, Source, file, json, xml};

/// Bytes as a file, and as what lies behind its magic number and before its checksum: refused, or a history that is the
/// same after another write, goes on, and is told in documents that are well-formed.
pub(super) fn history_file(bytes: &[u8]) {
    // The checksum protects from accidents alone.
    let body = bytes.get(8..bytes.len().saturating_sub(4)).unwrap_or_default();
    for decoded in [file::decode(bytes), file::decode_body(body)] {
        let Ok(history) = decoded else { continue };
        let again = file::decode(&file::encode(&history)).expect("what was read can be written");
        assert_eq!(file::encode(&again), file::encode(&history));
        goes_on(history);
    }
}

fn goes_on(mut history: History) {
    let source = Source {
        name: "new".into(),
        doc: "A figure".into(),
        units: "".into(),
        kind: Kind::Gauge,
        min: 0.0,
        max: f64::INFINITY,
    };
    let later = history.updated_ms() + 7_777;
    history.update(later, &[Sample { source, value: 1.0, begins: false }]).expect("later");
    history.set_back(later / 2);
    let figures = history.figures();
    if figures <= 100_000 {
        let parsed: Result<serde_json::Value, _> = serde_json::from_str(&json::dump(&history));
        assert!(parsed.is_ok(), "{parsed:?}");
        assert!(xml::dump(&history).ends_with("</rrd>\n"));
    }
    let limit = history.count() * (4 * history.layout().source_len_max() + 4096) + (1 << 16);
    assert!(history.held_len() <= limit, "{} bytes of {} sources", history.held_len(), history.count());
}

/// A document of thresholds: refused with a sentence, or thresholds whose messages are documents again.
pub(super) fn perfmon(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let variables = match alarm::parse(&text) {
        Ok(variables) => variables,
        Err(wrong) => {
            assert!(!wrong.to_string().is_empty());
            return;
        }
    };
    let history = History::new(tapio_history::Layout::new(5, false), 0);
    for variable in variables {
        assert!(variable.value(&history).is_nan() && !variable.is_crossed(f64::NAN));
        let body = variable.body(0.5);
        let (_, config) = body.split_once("config:\n").expect("its second line");
        let read = alarm::parse(&format!("<config>{config}</config>")).expect("our own document");
        assert_eq!((read[0].name.as_str(), read[0].level), (variable.name.as_str(), variable.level));
        let mut watch = Watch::told(1);
        assert!(!watch.is_due(&variable, f64::NAN, i64::MAX));
    }
}
