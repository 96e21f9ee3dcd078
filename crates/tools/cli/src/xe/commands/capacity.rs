//! How full an SR is, what it has promised, and how many more VMs of a template it has room for.

use serde_json::{Value, json};

use super::select::drives;
use super::{Command, command};
use crate::xe::error::Result;
use crate::xe::objects::find;
use crate::xe::printer::Cell;
use crate::xe::session::Session;

pub(super) static COMMANDS: &[Command] = &[command(
    "sr-capacity",
    &["uuid"],
    &["template"],
    "Shows what an SR holds and has promised, when it will be full, and how many more VMs of a template fit",
    run,
)];

/// The figures of an SR, in bytes.
#[derive(Clone, Copy, Debug)]
struct Space {
    size: i64,
    used: i64,
    promised: i64,
}

impl Space {
    fn free(self) -> i64 {
        (self.size - self.used).max(0)
    }

    /// Bytes that would be missing if every disk were written full.
    fn missing(self) -> i64 {
        (self.promised - self.size).max(0)
    }

    /// How often disks of so many bytes have room, in the space that is free, and in that which is not promised.
    fn fits(self, bytes: i64) -> (Option<i64>, Option<i64>) {
        (self.free().checked_div(bytes), (self.size - self.promised).max(0).checked_div(bytes))
    }
}

/// What an SR's forecast says: bytes a day, and how long that can go on.
fn grows(forecast: &Value) -> Vec<Cell> {
    let number = |name: &str| forecast.get(name).and_then(Value::as_str)?.parse::<i64>().ok();
    let growth = number("bytes-per-day");
    let days =
        number("seconds-until-full").map(|seconds| format!("in {:.1} days", seconds as f64 / 86_400.0));
    let full = match (growth, days) {
        (None, _) => "unknown".to_owned(),
        (Some(_), None) => "never".to_owned(),
        (Some(_), Some(days)) => days,
    };
    let growth = growth.map_or_else(|| json!("unknown"), |growth| json!(growth));
    vec![cell("growth-per-day", growth), cell("full-at-the-present-rate", json!(full))]
}

fn percent(part: i64, whole: i64) -> String {
    if whole <= 0 { "unknown".to_owned() } else { format!("{:.1} %", part as f64 * 100.0 / whole as f64) }
}

fn cell(name: &str, value: Value) -> Cell {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    Cell { name: name.to_owned(), qualifier: " ( RO)", text, value }
}

/// Sizes of the disks that a template's `other_config:disks` asks for; they are attributes of XML elements.
fn asked(disks: &str) -> i64 {
    let sizes = disks.split(" size=").skip(1).filter_map(|rest| {
        let quote = rest.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
        rest[1..].split(quote).next()?.parse::<i64>().ok()
    });
    sizes.fold(0, i64::saturating_add)
}

/// Bytes that a VM of the template gets as disks of its own, when all of them are written.
fn wanted(session: &Session, template: &str) -> Result<i64> {
    let config = session.call("VM.get_other_config", &[template.into()])?;
    let mut bytes = config.get("disks").and_then(Value::as_str).map_or(0, asked);
    for (_, record) in drives(session, template, "Disk")?.into_values() {
        let vdi = record.get("VDI").cloned().unwrap_or_default();
        if vdi.as_str().is_some_and(|vdi| vdi != tapio_model::NULL_REF) {
            let size = session.call("VDI.get_virtual_size", &[vdi])?;
            bytes = bytes.saturating_add(size.as_i64().unwrap_or_default());
        }
    }
    Ok(bytes)
}

fn run(session: &Session) -> Result<()> {
    let sr = session.reference("SR", "uuid")?;
    session.long("SR.update", &[sr.as_str().into()])?;
    let record = session.call("SR.get_record", &[sr.as_str().into()])?;
    let number = |name: &str| record.get(name).and_then(Value::as_i64).unwrap_or_default();
    let space = Space {
        size: number("physical_size"),
        used: number("physical_utilisation"),
        promised: number("virtual_allocation"),
    };
    let mut cells = vec![
        cell("uuid", record["uuid"].clone()),
        cell("name-label", record["name_label"].clone()),
        cell("physical-size", json!(space.size)),
        cell("physical-utilisation", json!(space.used)),
        cell("used", json!(percent(space.used, space.size))),
        cell("free", json!(space.free())),
        cell("virtual-allocation", json!(space.promised)),
        cell("promised", json!(percent(space.promised, space.size))),
        cell("missing-if-all-is-written", json!(space.missing())),
    ];
    let forecast = session.call("SR.get_forecast", &[sr.as_str().into()])?;
    cells.extend(grows(&forecast));
    if let Some(name) = session.arguments.get("template") {
        let template = find(&session.client, "VM", name)?;
        let bytes = wanted(session, &template)?;
        let (now, full) = space.fits(bytes);
        let count = |count: Option<i64>| count.map_or_else(|| json!("unlimited"), |count| json!(count));
        cells.push(cell("template-size", json!(bytes)));
        cells.push(cell("vms-that-fit-the-free-space", count(now)));
        cells.push(cell("vms-that-fit-if-all-is-written", count(full)));
    }
    session.print_records(&[cells])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_is_counted_in_both_ways() {
        let space = Space { size: 100, used: 40, promised: 75 };
        assert_eq!((space.free(), space.missing()), (60, 0));
        assert_eq!(space.fits(20), (Some(3), Some(1)));
        assert_eq!(space.fits(0), (None, None));
        let over = Space { size: 100, used: 90, promised: 250 };
        assert_eq!((over.free(), over.missing()), (10, 150));
        assert_eq!(over.fits(5), (Some(2), Some(0)));
        assert_eq!(percent(40, 100), "40.0 %");
        assert_eq!(percent(0, 0), "unknown");
    }

    #[test]
    fn a_forecast_is_told_in_days() {
        let told = |forecast: Value| grows(&forecast).into_iter().map(|cell| cell.text).collect::<Vec<_>>();
        assert_eq!(told(json!({})), ["unknown", "unknown"]);
        assert_eq!(told(json!({ "bytes-per-day": "-5" })), ["-5", "never"]);
        let grows = json!({ "bytes-per-day": "240", "seconds-until-full": "129600" });
        assert_eq!(told(grows), ["240", "in 1.5 days"]);
    }

    #[test]
    fn disks_that_a_template_asks_for_are_summed() {
        let text = r#"<provision><disk device="0" size="1024" sr="" bootable="true"/><disk device="1" size='2048'/></provision>"#;
        assert_eq!(asked(text), 3072);
        assert_eq!(asked("<provision/>"), 0);
        assert_eq!(asked(" size=x size=\"y\" size="), 0);
    }
}
