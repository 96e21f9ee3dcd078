//! The one place that runs LVM's programs: without a shell, each with a time limit, tables as JSON.
//!
//! Once an SR is attached, they look at its devices alone. Others of the host may be disks of guests that wait until
//! this change of the SR is over, and so would the program.
//!
//! One that runs while an SR is locked has the lock too: when its worker is killed, the next one waits for its end, and
//! finds what it did.
//!
//! None of them is given a secret. Names of groups and volumes are ours or were read from LVM, and none begins with a
//! dash.

mod script;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use serde::Deserialize;

use crate::command::{self, Failure};
use crate::lock;

/// How long one of them may take: each looks at all devices of the host.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How much longer one may take for each of several.
const LINE_TIMEOUT: Duration = Duration::from_secs(10);
/// Where udev listens, on hosts that have it.
const UDEV: &str = "/run/udev/control";
/// Without udev LVM makes its device nodes itself, and looks for devices in `/dev`.
const WITHOUT_UDEV: [&str; 2] = [
    "activation { udev_sync=0 udev_rules=0 }",
    "obtain_device_list_from_udev=0 external_device_info_source=\"none\"",
];

/// One row of a table: what LVM calls a field, and its value.
pub type Row = BTreeMap<String, String>;

#[derive(Deserialize)]
struct Document {
    report: Vec<BTreeMap<String, Vec<Row>>>,
}

/// The setting by which a program looks at these devices alone.
fn filter(devices: &[String]) -> String {
    // A pattern; what means something in one stands for any character.
    let plain = |name: &String| -> String {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '-' | ':');
        name.chars().map(|c| if is_plain(c) { c } else { '.' }).collect()
    };
    let taken: String = devices.iter().map(|name| format!("\"a|^{}$|\",", plain(name))).collect();
    format!("filter=[{taken}\"r|.*|\"]")
}

/// The settings that every program gets on this host; `devices` are those that it looks at, all where there are none.
fn settings(devices: &[String]) -> Option<String> {
    let has_udev = Path::new(UDEV).exists();
    let mut of_devices = if has_udev { String::new() } else { WITHOUT_UDEV[1].to_owned() };
    if !devices.is_empty() {
        of_devices += &format!(" {}", filter(devices));
    }
    match (has_udev, of_devices.is_empty()) {
        (true, true) => None,
        (true, false) => Some(format!("devices {{ {of_devices} }}")),
        (false, _) => Some(format!("{} devices {{ {of_devices} }}", WITHOUT_UDEV[0])),
    }
}

/// Runs one of LVM's programs, which looks at all devices of the host.
///
/// # Errors
/// It is not installed, does not end in time, or fails: a sentence with what it said.
pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<String, Failure> {
    run_on(&[], program, arguments)
}

/// The same, which looks at these devices alone.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_on(devices: &[String], program: &str, arguments: &[&str]) -> Result<String, Failure> {
    #[cfg(feature = "doubles")]
    if let Some(done) = super::double::run(program, arguments) {
        return done.map_err(|why| Failure::new(format!("'{program}' failed: {why}")));
    }
    let settings = settings(devices);
    let settings = settings.as_deref().map_or_else(Vec::new, |settings| vec!["--config", settings]);
    command::run_holding(program, &[&settings, arguments].concat(), None, lock::of_this_thread(), TIMEOUT)
}

/// Runs several of LVM's programs, each a line of words, one after the other, until one fails: in one process if the
/// lines fit in a script of LVM. They look at these devices alone.
///
/// # Errors
/// As [`run`]: those before the one that failed have done their work, and those after it were not run.
pub(crate) fn run_all(devices: &[String], lines: &[Vec<String>]) -> Result<(), Failure> {
    #[cfg(feature = "doubles")]
    let lines_of = if super::double::is_there() { None } else { script::text(devices, lines) };
    #[cfg(not(feature = "doubles"))]
    let lines_of = script::text(devices, lines);
    match lines_of.filter(|_| lines.len() > 1) {
        Some(text) => script::run(&text, TIMEOUT + LINE_TIMEOUT * lines.len() as u32),
        None => lines.iter().try_for_each(|line| {
            let words: Vec<&str> = line.iter().map(String::as_str).collect();
            run_on(devices, words[0], &words[1..]).map(drop)
        }),
    }
}

/// The rows of a table: `program` is `lvs`, `vgs` or `pvs`, `fields` are as `lv_name,lv_size`. Sizes are in bytes.
///
/// # Errors
/// As [`run`]; what it printed is no such table.
pub(crate) fn table(
    devices: &[String],
    program: &str,
    fields: &str,
    more: &[&str],
) -> Result<Vec<Row>, String> {
    let settings = settings(devices);
    let mut arguments = settings.as_deref().map_or_else(Vec::new, |settings| vec!["--config", settings]);
    arguments.extend(["--reportformat", "json", "--units", "b", "--nosuffix", "-o", fields]);
    arguments.extend(more);
    let printed = printed(program, &arguments).map_err(|failure| failure.to_string())?;
    rows(&printed).map_err(|error| format!("'{program}' printed what cannot be read: {error}"))
}

fn printed(program: &str, arguments: &[&str]) -> Result<String, Failure> {
    #[cfg(feature = "doubles")]
    if let Some(done) = super::double::run(program, arguments) {
        return done.map_err(|why| Failure::new(format!("'{program}' failed: {why}")));
    }
    command::run_for_table(program, arguments, TIMEOUT)
}

/// The directory of the paths of a group's volumes.
pub(crate) fn directory_of(group: &str) -> PathBuf {
    #[cfg(feature = "doubles")]
    if let Some(directory) = super::double::directory_of(group) {
        return directory;
    }
    Path::new("/dev").join(group)
}

/// The rows of what LVM prints with `--reportformat json`.
///
/// # Errors
/// It is no such document.
pub fn rows(printed: &str) -> Result<Vec<Row>, String> {
    let document: Document = serde_json::from_str(printed).map_err(|error| error.to_string())?;
    Ok(document.report.into_iter().flat_map(|tables| tables.into_values().flatten()).collect())
}

/// Whether this host can do it: the kernel's device-mapper and the tools.
pub(crate) fn is_there() -> bool {
    static TOOLS: OnceLock<()> = OnceLock::new();
    #[cfg(feature = "doubles")]
    if super::double::is_there() {
        return true;
    }
    // Opening loads the kernel's module where it is one. The node alone says nothing: LVM's programs make it
    // wherever they run.
    let opened = OpenOptions::new().read(true).write(true).open("/dev/mapper/control");
    if opened.is_err() {
        return false;
    }
    if TOOLS.get().is_none() && command::run_well("lvm", &["version"], TIMEOUT).is_ok() {
        let _ = TOOLS.set(());
    }
    TOOLS.get().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_lvm_is_read() {
        let printed = r#"
  {
      "report": [
          {
              "lv": [
                  {"lv_name":"MGT", "lv_size":"4194304", "lv_tags":""},
                  {"lv_name":"VHD-1", "lv_size":"8388608", "lv_tags":"a,b"}
              ]
          }
      ]
  }
"#;
        let found = rows(printed).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[1]["lv_tags"], "a,b");
        assert!(rows(r#"{"report":[{"lv":[]}]}"#).unwrap().is_empty());
        for bad in ["", "{}", "[]", r#"{"report":[{"lv":[{"lv_size":4}]}]}"#, "  WARNING: no\n{"] {
            assert!(rows(bad).is_err(), "{bad}");
        }
    }
}
