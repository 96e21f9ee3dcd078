//! A whole history as JSON: the members of the XML document, with the same names.

use serde_json::{Value, json};

use crate::history::History;
use crate::layout::{HEARTBEAT_S, XFF};
use crate::updates::Short;

/// A text in quotes.
pub(crate) fn text(text: &str) -> String {
    Value::from(text).to_string()
}

/// A number; JSON has none for what is unknown or unlimited, so these are texts.
pub(crate) fn number(value: f64) -> String {
    let short = Short(value).to_string();
    if value.is_finite() { short } else { text(&short) }
}

fn exact(value: f64) -> Value {
    serde_json::Number::from_f64(value).map_or_else(|| Short(value).to_string().into(), Value::Number)
}

fn stored(value: f64) -> Value {
    // By the text, so that the precision of 4 bytes does not show as digits of 8.
    serde_json::from_str(&number(value)).unwrap_or(Value::Null)
}

/// The whole history.
pub fn dump(history: &History) -> String {
    let sources = history.columns.iter().map(|column| {
        json!({
            "name": column.source.name, "type": column.source.kind.name(),
            "minimal_heartbeat": HEARTBEAT_S,
            "min": exact(column.source.min), "max": exact(column.source.max),
            "last_ds": exact(column.step.last), "value": exact(column.step.sum),
            "unknown_sec": exact(column.step.unknown_s.floor()),
        })
    });
    let archives = history.layout().archives().enumerate().map(|(at, (function, span))| {
        let prepared = history.columns.iter().map(|column| {
            let archive = &column.archives[at];
            json!({
                "primary_value": stored(archive.row(0)), "secondary_value": "NaN",
                "value": exact(archive.value), "unknown_datapoints": archive.unknown,
            })
        });
        let rows = (0..u64::from(span.rows)).rev().map(|age| {
            history.columns.iter().map(|column| stored(column.archives[at].row(age))).collect::<Value>()
        });
        json!({
            "cf": function.name(), "pdp_per_row": span.steps, "params": {"xff": XFF},
            "cdp_prep": {"ds": prepared.collect::<Value>()}, "database": rows.collect::<Value>(),
        })
    });
    let whole = json!({
        "version": "0003", "step": history.layout().step_s(), "lastupdate": history.updated_ms() / 1000,
        "ds": sources.collect::<Value>(), "rra": archives.collect::<Value>(),
    });
    whole.to_string() + "\n"
}
