//! `tapio doctor`: what is wrong with this host, an SR or the disks of a VM, and what repairs it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _, stdout};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::Value;
use tapio_model::findings::FINDINGS;

use crate::xe::{Client, Failure, XeArguments, find};
use tapio_report::failure;

/// How long what a repair began may take.
const REPAIR_TIMEOUT: Duration = Duration::from_secs(600);
/// How often that is looked at.
const TURN: Duration = Duration::from_millis(200);
/// Nothing could be looked at, or a repair failed.
const FAILED: u8 = 2;

/// Options of `tapio doctor`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Exit status: 0 nothing was found, or notes alone; 1 something was; 2 it failed.

Repairs are operations of the daemon, which finishes or undoes them when it is killed; those of one SR are done once. \
What a person has to decide is never repaired.")]
pub struct DoctorArguments {
    /// UUID or name of an SR, a VM or a host; everything on this host unless given
    object: Option<String>,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Print the kinds of findings with what they mean, and end
    #[arg(long, conflicts_with_all = ["object", "repair"])]
    list: bool,
    /// Say what would be repaired
    #[arg(long)]
    repair: bool,
    /// With --repair: repair it
    #[arg(long, requires = "repair")]
    yes: bool,
    /// Where to connect, as 'xe' takes it: -s SERVER, -u USER, --socket PATH ...
    #[arg(last = true, value_name = "XE OPTION")]
    xe: Vec<String>,
}

pub fn run(arguments: &DoctorArguments) -> ExitCode {
    let done = match arguments.list {
        true => print(&list(arguments.json)).map(|()| ExitCode::SUCCESS),
        false => examine(arguments),
    };
    done.unwrap_or_else(|error| {
        error.report();
        ExitCode::from(FAILED)
    })
}

fn print(text: &str) -> Result<(), Failure> {
    failure::print(text).map_err(|error| Failure::other(error.to_string()))
}

fn list(json: bool) -> String {
    if json {
        let row = |kind: &tapio_model::findings::FindingKind| {
            serde_json::json!({"kind": kind.id, "severity": kind.severity.name(), "looks_at": kind.looks_at,
                "means": kind.means, "suggests": kind.suggests,
                "repair": kind.repair.map(tapio_model::findings::Repair::message)})
        };
        return format!("{:#}\n", Value::from(FINDINGS.iter().map(row).collect::<Vec<_>>()));
    }
    let mut text = String::new();
    for kind in FINDINGS {
        let repair = kind.repair.map_or("a person decides", tapio_model::findings::Repair::message);
        let _ = write!(
            text,
            "{} ({})\n  looks at: {}\n  means:    {}\n  next:     {}\n  repair:   {repair}\n",
            kind.id,
            kind.severity.name(),
            kind.looks_at,
            kind.means,
            kind.suggests
        );
    }
    text
}

fn examine(arguments: &DoctorArguments) -> Result<ExitCode, Failure> {
    let xe = XeArguments::read(&arguments.xe)?;
    let client = Client::connect(&xe.connection)?;
    let done = examine_with(&client, arguments);
    client.end();
    done
}

fn examine_with(client: &Client, arguments: &DoctorArguments) -> Result<ExitCode, Failure> {
    let of = Examined::find(client, arguments.object.as_deref())?;
    let mut found = of.findings(client)?;
    if arguments.repair {
        let repairs = repairs(&found);
        for repair in &repairs {
            let verb = if arguments.yes { "repairs" } else { "would repair" };
            if !arguments.json {
                print(&format!("{verb}: {} {}\n", repair.message, repair.object))?;
            }
            if arguments.yes {
                repair.run(client)?;
            }
        }
        if arguments.yes && !repairs.is_empty() {
            found = settled(client, &of, &repairs)?;
        }
    }
    let colours = stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let text = match arguments.json {
        true => format!("{:#}\n", Value::from(found.clone())),
        false => text(&found, colours),
    };
    if colours && !arguments.json {
        // What others named is harmless by now, and the colours are ours.
        let written = stdout().write_all(text.as_bytes());
        written.map_err(|error| Failure::other(error.to_string()))?;
    } else {
        print(&text)?;
    }
    let is_clean = found.iter().all(|finding| word(finding, "severity") == "note");
    Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// The findings once what was begun has ended: a garbage collection goes on after its call.
fn settled(client: &Client, of: &Examined, repairs: &BTreeSet<Repair>) -> Result<Vec<Value>, Failure> {
    let until = Instant::now() + REPAIR_TIMEOUT;
    loop {
        let found = of.findings(client)?;
        let is_left = repairs
            .iter()
            .any(|repair| repair.message == "SR.collect_garbage" && self::repairs(&found).contains(repair));
        if !is_left || Instant::now() > until {
            return Ok(found);
        }
        std::thread::sleep(TURN);
    }
}

/// What is examined.
enum Examined {
    Host(String),
    Srs(Vec<String>),
}

impl Examined {
    fn find(client: &Client, object: Option<&str>) -> Result<Self, Failure> {
        let Some(object) = object else {
            let hosts = client.call("host.get_all", &[])?;
            let host = hosts.as_array().and_then(|hosts| hosts.first()?.as_str()).unwrap_or_default();
            return Ok(Self::Host(host.to_owned()));
        };
        if let Ok(sr) = find(client, "SR", object) {
            return Ok(Self::Srs(vec![sr]));
        }
        if let Ok(host) = find(client, "host", object) {
            return Ok(Self::Host(host));
        }
        let Ok(vm) = find(client, "VM", object) else {
            return Err(Failure::other(format!(
                "'{object}' is no SR, VM or host: give its UUID or its name, as 'xe sr-list' prints it"
            )));
        };
        let texts = |value: &Value| -> Vec<String> {
            value.as_array().into_iter().flatten().filter_map(|one| Some(one.as_str()?.to_owned())).collect()
        };
        let mut srs = BTreeSet::new();
        for vbd in texts(&client.call("VM.get_VBDs", &[vm.into()])?) {
            let vdi = client.call("VBD.get_VDI", &[vbd.into()])?;
            if vdi != tapio_model::NULL_REF {
                let sr = client.call("VDI.get_SR", &[vdi])?;
                srs.extend(sr.as_str().map(str::to_owned));
            }
        }
        Ok(Self::Srs(srs.into_iter().collect()))
    }

    fn findings(&self, client: &Client) -> Result<Vec<Value>, Failure> {
        let ask = |message: &str, reference: &str| -> Result<Vec<Value>, Failure> {
            let answer = crate::xe::long(client, message, &[reference.into()])?;
            serde_json::from_str(&answer).map_err(|error| {
                Failure::other(format!("the answer of {message} is not understood: {error}"))
            })
        };
        match self {
            Self::Host(host) => ask("host.diagnose", host),
            Self::Srs(srs) => {
                let mut found = Vec::new();
                for sr in srs {
                    found.extend(ask("SR.diagnose", sr)?);
                }
                Ok(found)
            }
        }
    }
}

/// One call that repairs findings: an SR's, a VDI's, or a process's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Repair {
    message: String,
    object: String,
}

/// What repairs these findings, each call once.
fn repairs(found: &[Value]) -> BTreeSet<Repair> {
    let of = |finding: &Value| {
        let message = finding.get("repair")?.as_str()?.to_owned();
        let is_of_vdi = message.starts_with("VDI.");
        let sr = finding.get("sr").and_then(Value::as_str).filter(|_| !is_of_vdi);
        Some(Repair { message, object: sr.unwrap_or_else(|| word(finding, "object")).to_owned() })
    };
    found.iter().filter_map(of).collect()
}

impl Repair {
    fn run(&self, client: &Client) -> Result<(), Failure> {
        let sr = || client.call("SR.get_by_uuid", &[self.object.as_str().into()]);
        match self.message.as_str() {
            "SR.scan" => crate::xe::long(client, "SR.scan", &[sr()?]).map(drop),
            "SR.collect_garbage" => client.call("SR.collect_garbage", &[sr()?, false.into()]).map(drop),
            "VDI.release" => {
                let vdi = client.call("VDI.get_by_uuid", &[self.object.as_str().into()])?;
                client.call("VDI.release", &[vdi]).map(drop)
            }
            "host.end_stray_disk" => {
                let hosts = client.call("host.get_all", &[])?;
                let host = hosts.get(0).cloned().unwrap_or_default();
                let pid: i64 = self.object.parse().unwrap_or_default();
                client.call("host.end_stray_disk", &[host, pid.into()]).map(drop)
            }
            other => {
                Err(Failure::other(format!("the daemon names the repair '{other}', which is not known here")))
            }
        }
    }
}

fn word<'a>(finding: &'a Value, key: &str) -> &'a str {
    finding.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn text(found: &[Value], colours: bool) -> String {
    if found.is_empty() {
        return "nothing is wrong\n".to_owned();
    }
    let mut text = String::new();
    for finding in found {
        let severity = word(finding, "severity");
        let (begin, end) = match severity {
            _ if !colours => ("", ""),
            "error" => ("\x1b[1;31m", "\x1b[0m"),
            "warning" => ("\x1b[33m", "\x1b[0m"),
            _ => ("\x1b[2m", "\x1b[0m"),
        };
        let sr = match word(finding, "sr") {
            "" => String::new(),
            sr => format!(" (SR {sr})"),
        };
        // Names of files are others', and a terminal obeys what it is sent.
        let safe = |key: &str| failure::harmless(word(finding, key)).into_owned();
        let _ = write!(
            text,
            "{begin}{severity}: {}{end} {}{sr}\n  {}\n  {}\n  next: {}\n",
            safe("kind"),
            safe("object"),
            safe("detail"),
            safe("means"),
            safe("suggests")
        );
    }
    let repairs = repairs(found).len();
    if repairs > 0 {
        let _ = writeln!(
            text,
            "{repairs} repairs are safe: 'tapio doctor --repair' shows them, '--repair --yes' does them"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found() -> Vec<Value> {
        let finding = |kind: &str, object: &str, repair: Value| {
            serde_json::json!({"kind": kind, "severity": "warning", "sr": "s", "object": object, "detail": "d\u{1b}[2J",
                "means": "m", "suggests": "n", "repair": repair})
        };
        vec![
            finding("journal-left", "clone_a", "SR.scan".into()),
            finding("file-unfinished", "b", "SR.scan".into()),
            finding("image-damaged", "c", Value::Null),
        ]
    }

    #[test]
    fn repairs_of_an_sr_are_done_once_and_decisions_are_left() {
        let one = Repair { message: "SR.scan".into(), object: "s".into() };
        assert_eq!(repairs(&found()), BTreeSet::from([one]));
    }

    #[test]
    fn a_vdi_is_released_by_its_own_name() {
        let held = serde_json::json!({"kind": "vdi-held", "sr": "s", "object": "v", "repair": "VDI.release"});
        let one = Repair { message: "VDI.release".into(), object: "v".into() };
        assert_eq!(repairs(&[held]), BTreeSet::from([one]));
    }

    #[test]
    fn a_terminal_gets_colours_and_no_orders_of_others() {
        assert_eq!(text(&[], true), "nothing is wrong\n");
        let plain = text(&found(), false);
        assert!(
            plain.starts_with("warning: journal-left clone_a (SR s)\n") && !plain.contains('\x1b'),
            "{plain}"
        );
        let coloured = text(&found(), true);
        assert!(coloured.starts_with("\x1b[33mwarning") && !coloured.contains("[2J\n\x1b"), "{coloured}");
        assert!(!coloured.contains("\x1b[2J"), "{coloured}");
    }

    #[test]
    fn every_kind_is_listed() {
        let (text, json) = (list(false), list(true));
        for kind in FINDINGS {
            assert!(text.contains(kind.id) && json.contains(kind.id), "{}", kind.id);
        }
    }
}
