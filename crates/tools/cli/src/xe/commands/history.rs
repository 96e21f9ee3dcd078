//! What is measured of VMs, SRs and hosts: listed, read, dropped, recorded again.

use serde_json::Value;

use super::select::{each, host, machines_and_host};
use super::{Command, command};
use crate::xe::error::Result;
use crate::xe::printer::Cell;
use crate::xe::session::Session;

const SOURCE: &str = "data-source";

pub(super) static COMMANDS: &[Command] = &[
    command("vm-data-source-list", &[], &["vm", "multiple"], "Lists what is measured of VMs", |s| {
        each(&vms(s)?, |vm| list(s, "VM", vm))
    }),
    command(
        "vm-data-source-query",
        &[SOURCE],
        &["vm", "multiple"],
        "Prints the latest figure of a data source of VMs",
        |s| each(&vms(s)?, |vm| query(s, "VM", vm)),
    ),
    command(
        "vm-data-source-record",
        &[SOURCE],
        &["vm", "multiple"],
        "Records a data source of VMs again that was forgotten",
        |s| each(&vms(s)?, |vm| tell(s, "VM.record_data_source", vm)),
    ),
    command(
        "vm-data-source-forget",
        &[SOURCE],
        &["vm", "multiple"],
        "Drops what was recorded of a data source of VMs, and records it no more",
        |s| each(&vms(s)?, |vm| tell(s, "VM.forget_data_source_archives", vm)),
    ),
    command("sr-data-source-list", &["uuid"], &[], "Lists what is measured of an SR", |s| {
        list(s, "SR", &s.reference("SR", "uuid")?)
    }),
    command(
        "sr-data-source-query",
        &["uuid", SOURCE],
        &[],
        "Prints the latest figure of a data source of an SR",
        |s| query(s, "SR", &s.reference("SR", "uuid")?),
    ),
    command(
        "sr-data-source-record",
        &["uuid", SOURCE],
        &[],
        "Records a data source of an SR again that was forgotten",
        |s| tell(s, "SR.record_data_source", &s.reference("SR", "uuid")?),
    ),
    command(
        "sr-data-source-forget",
        &["uuid", SOURCE],
        &[],
        "Drops what was recorded of a data source of an SR, and records it no more",
        |s| tell(s, "SR.forget_data_source_archives", &s.reference("SR", "uuid")?),
    ),
    command(
        "host-data-source-list",
        &[],
        &["host", "host-uuid"],
        "Lists what is measured of a host, sums of its SRs among it",
        |s| list(s, "host", &host(s)?),
    ),
    command(
        "host-data-source-query",
        &[SOURCE],
        &["host", "host-uuid"],
        "Prints the latest figure of a data source of a host",
        |s| query(s, "host", &host(s)?),
    ),
    command(
        "host-data-source-record",
        &[SOURCE],
        &["host", "host-uuid"],
        "Records a data source of a host again that was forgotten",
        |s| tell(s, "host.record_data_source", &host(s)?),
    ),
    command(
        "host-data-source-forget",
        &[SOURCE],
        &["host", "host-uuid"],
        "Drops what was recorded of a data source of a host, and records it no more",
        |s| tell(s, "host.forget_data_source_archives", &host(s)?),
    ),
];

/// Members of a record, in the order in which they are shown.
const MEMBERS: [&str; 8] =
    ["name_label", "name_description", "enabled", "standard", "units", "min", "max", "value"];

fn vms(session: &Session) -> Result<Vec<String>> {
    machines_and_host(session, &[SOURCE])
}

/// A number with the digits that XenServer shows; what is unknown or unlimited is a text in JSON.
fn number(value: &Value, digits: usize) -> String {
    match value.as_f64() {
        Some(number) => format!("{number:.digits$}"),
        None => value.as_str().unwrap_or_default().to_lowercase(),
    }
}

fn cell(name: &str, value: &Value) -> Cell {
    let text = match value {
        Value::Bool(is) => is.to_string(),
        Value::Number(_) => number(value, 3),
        _ if matches!(name, "min" | "max" | "value") => number(value, 3),
        _ => value.as_str().unwrap_or_default().to_owned(),
    };
    Cell { name: name.to_owned(), qualifier: "", text, value: value.clone() }
}

fn list(session: &Session, class: &str, object: &str) -> Result<()> {
    let sources = session.call(&format!("{class}.get_data_sources"), &[object.into()])?;
    let sources = sources.as_array().cloned().unwrap_or_default();
    let records: Vec<Vec<Cell>> =
        sources.iter().map(|source| MEMBERS.map(|name| cell(name, &source[name])).into()).collect();
    session.print_records(&records)
}

fn query(session: &Session, class: &str, object: &str) -> Result<()> {
    let params = [object.into(), session.need(SOURCE)?.into()];
    let value = session.call(&format!("{class}.query_data_source"), &params)?;
    session.print_values(&[&number(&value, 6)])
}

fn tell(session: &Session, method: &str, object: &str) -> Result<()> {
    session.call(method, &[object.into(), session.need(SOURCE)?.into()]).map(drop)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_shown_as_xenserver_shows_them() {
        assert_eq!((number(&json!(1.5), 6), number(&json!(0), 3)), ("1.500000".into(), "0.000".into()));
        assert_eq!((number(&json!("NaN"), 6), number(&json!("inf"), 3)), ("nan".into(), "inf".into()));
        assert_eq!(cell("max", &json!("inf")).text, "inf");
        assert_eq!(cell("units", &json!("B/s")).text, "B/s");
        assert_eq!(cell("enabled", &json!(true)).text, "true");
    }
}
