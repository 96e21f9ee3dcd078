//! A whole history as JSON: the members of the XML document, with the same names.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::figure::{Short, comma, number, text};
use crate::history::History;
use crate::layout::{HEARTBEAT_S, XFF};

fn exact(value: f64) -> Value {
    serde_json::Number::from_f64(value).map_or_else(|| Short(value).to_string().into(), Value::Number)
}

/// The whole history.
pub fn dump(history: &History) -> String {
    let mut json = String::new();
    // A string takes everything.
    let _ = write(history, &mut json);
    json
}

/// Written piece by piece: a tree of values would be many times as large as the text.
fn write(history: &History, json: &mut String) -> std::fmt::Result {
    let (step, updated) = (history.layout().step_s(), history.updated_ms() / 1000);
    write!(json, "{{\"version\":\"0003\",\"step\":{step},\"lastupdate\":{updated},\"ds\":[")?;
    for (at, column) in history.columns.iter().enumerate() {
        let source = json!({
            "name": column.source.name, "type": column.source.kind.name(),
            "minimal_heartbeat": HEARTBEAT_S,
            "min": exact(column.source.min), "max": exact(column.source.max),
            "last_ds": exact(column.step.last), "value": exact(column.step.sum),
            "unknown_sec": exact(column.step.unknown_s.floor()),
        });
        write!(json, "{}{source}", comma(at))?;
    }
    json.push_str("],\"rra\":[");
    for (at, (function, span)) in history.layout().archives().enumerate() {
        let (function, steps) = (text(function.name()), span.steps);
        write!(json, "{}{{\"cf\":{function},\"pdp_per_row\":{steps},", comma(at))?;
        write!(json, "\"params\":{{\"xff\":{XFF}}},\"cdp_prep\":{{\"ds\":[")?;
        for (nth, column) in history.columns.iter().enumerate() {
            let archive = &column.archives[at];
            let (value, unknown) = (exact(archive.value), archive.unknown);
            write!(json, "{}{{\"primary_value\":{},", comma(nth), number(archive.row(0)))?;
            write!(json, "\"secondary_value\":\"NaN\",\"value\":{value},\"unknown_datapoints\":{unknown}}}")?;
        }
        json.push_str("]},\"database\":[");
        for age in (0..u64::from(span.rows)).rev() {
            json.push_str(if age + 1 == u64::from(span.rows) { "[" } else { ",[" });
            for (nth, column) in history.columns.iter().enumerate() {
                write!(json, "{}{}", comma(nth), number(column.archives[at].row(age)))?;
            }
            json.push(']');
        }
        json.push_str("]}");
    }
    json.push_str("]}\n");
    Ok(())
}
