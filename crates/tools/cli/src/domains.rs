//! `tapio domains`: Xen's domains and their devices, as xenstore has them.

use std::fmt::Write;
use std::path::PathBuf;

use serde_json::{Value, json};
use tapio_control::{ControlError, Errno};
use tapio_xenstore::domains::{self, Device, DeviceKind, Domain, Named};
use tapio_xenstore::{Client, XenbusState, XsError};

use tapio_report::failure::{Result, print, print_json};

/// Options of `tapio domains`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Examples:
  tapio domains                   all domains, their disks and network interfaces
  tapio domains 5                 one of them
  tapio domains --json            everything that was read, as JSON

A device's two words are the states of its front end, which the guest writes, and of its back end.")]
pub struct DomainsArguments {
    /// Number or name of a domain; all without
    domain: Option<String>,
    /// As XenServer's list_domains: id, uuid, state; xenstore does not know the state, so that column is empty
    #[arg(long, conflicts_with = "json")]
    list: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Socket or device of xenstored; otherwise XENSTORED_PATH, /run/xenstored/socket, /dev/xen/xenbus
    #[arg(long, value_name = "PATH")]
    xenstored: Option<PathBuf>,
}

pub fn run(arguments: &DomainsArguments) -> Result<()> {
    let mut client =
        arguments.xenstored.as_deref().map_or_else(Client::open, Client::connect).map_err(failed)?;
    let found = match arguments.domain.as_ref().map(|text| (text, text.parse::<u32>())) {
        Some((text, Ok(domid))) => {
            let domain = domains::one(&mut client, domid).map_err(failed)?;
            vec![domain.ok_or_else(|| missing(text))?]
        }
        Some((text, Err(_))) => {
            let mut all = domains::all(&mut client).map_err(failed)?;
            all.retain(|domain| domain.name() == Some(text));
            if all.is_empty() {
                return Err(missing(text));
            }
            all
        }
        None => domains::all(&mut client).map_err(failed)?,
    };
    if arguments.json {
        return print_json(&found.iter().map(domain_json).collect::<Vec<_>>());
    }
    print(&if arguments.list { list(&found) } else { text(&found) })
}

/// Columns are as wide as their widest cell, aligned to the right. States are six characters.
fn list(found: &[Domain]) -> String {
    let row = |domain: &Domain| [domain.domid.to_string(), shown(domain.uuid().unwrap_or("-"), 36)];
    let mut rows = vec![["id".to_owned(), "uuid".to_owned()]];
    rows.extend(found.iter().map(row));
    let wide = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let (id, uuid) = (wide(0), wide(1));
    let state = |index: usize| if index == 0 { " state" } else { "      " };
    let line = |(index, row): (usize, &[String; 2])| {
        format!("{:>id$} | {:>uuid$} | {}\n", row[0], row[1], state(index))
    };
    rows.iter().enumerate().map(line).collect()
}

fn failed(error: XsError) -> ControlError {
    let errno = match &error {
        XsError::Refused { errno, .. } => Errno::new(errno.number()),
        XsError::Missing { .. } => Errno::ENOENT,
        XsError::Io { error, .. } => error.raw_os_error().map_or(Errno::EIO, Errno::new),
        XsError::Timeout { .. } => Errno::ETIMEDOUT,
        XsError::Contended { .. } => Errno::EAGAIN,
        XsError::Nonsense(_) | XsError::Value { .. } => Errno::EPROTO,
    };
    ControlError::new(errno, error.to_string())
}

fn missing(text: &str) -> ControlError {
    ControlError::new(Errno::ENOENT, format!("there is no domain '{}'", text.escape_default()))
        .next("'tapio domains' shows those there are")
}

fn domain_json(domain: &Domain) -> Value {
    let devices = |kind| domain.devices(kind).map(device_json).collect::<Vec<_>>();
    json!({
        "domid": domain.domid,
        "name": domain.name(),
        "uuid": domain.uuid(),
        "nodes": named_json(&domain.nodes),
        "vbds": devices(DeviceKind::Vbd),
        "vifs": devices(DeviceKind::Vif),
    })
}

fn device_json(device: &Device) -> Value {
    let state = |state: Option<XenbusState>| state.map(XenbusState::name);
    json!({
        "devid": device.devid,
        "name": device_name(device),
        "backend": device.backend,
        "front_state": state(device.front_state()),
        "back_state": state(device.back_state()),
        "front": named_json(&device.front),
        "back": named_json(&device.back),
    })
}

fn named_json(named: &Named) -> Value {
    named.iter().map(|(name, value)| ((*name).to_owned(), Value::from(value.as_str()))).collect()
}

fn text(found: &[Domain]) -> String {
    let mut text = format!("{:>5} {:<24} {:>10} {:>5} {:>5}\n", "ID", "NAME", "MEMORY", "VBDS", "VIFS");
    for domain in found {
        let memory = domain.value("memory/target").and_then(|kib| kib.parse::<u64>().ok());
        let memory = memory.map_or_else(|| "-".to_owned(), |kib| format!("{} MiB", kib / 1024));
        let name = domain.name().map_or_else(|| "-".to_owned(), |name| shown(name, 24));
        let count = |kind| domain.devices(kind).count();
        let (vbds, vifs) = (count(DeviceKind::Vbd), count(DeviceKind::Vif));
        // What cannot be written is what print() would not write either.
        let _ = writeln!(text, "{:>5} {name:<24} {memory:>10} {vbds:>5} {vifs:>5}", domain.domid);
        for device in &domain.devices {
            text.push_str(&device_line(device));
        }
    }
    text
}

fn device_line(device: &Device) -> String {
    let state = |state: Option<XenbusState>| state.map_or("-", XenbusState::name);
    let mut line = format!(
        "      {} {:<8} {:>12}/{:<12} {:<6}",
        device.kind.name(),
        device_name(device),
        state(device.front_state()),
        state(device.back_state()),
        device.backend_kind().unwrap_or("-"),
    );
    let mut add = |label: &str, value: Option<&str>| {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            let _ = write!(line, " {label}{}", shown(value, 80));
        }
    };
    match device.kind {
        DeviceKind::Vbd => {
            add("", device.back("mode"));
            let sectors = device.back("sectors").and_then(|sectors| sectors.parse::<u64>().ok());
            add("", sectors.map(|sectors| format!("{} MiB", sectors / 2048)).as_deref());
            add("pid ", device.back("kthread-pid"));
            add("", device.back("params").or(device.back("physical-device-path")));
        }
        DeviceKind::Vif => {
            add("", device.front("mac").or(device.back("mac")));
            add("", device.back("bridge"));
        }
    }
    line.push('\n');
    line
}

/// Guests choose some of what is shown here.
fn shown(text: &str, len: usize) -> String {
    let shown = text.escape_default().to_string();
    if shown.len() <= len { shown } else { format!("{}…", &shown[..len - 1]) }
}

/// What a guest calls a disk of this number (`xen-vbd-interface(7)`); others are their numbers.
fn device_name(device: &Device) -> String {
    if device.kind == DeviceKind::Vif {
        return device.devid.to_string();
    }
    let number = device.devid;
    let (disk, partition) = match number >> 8 {
        202 => ((number >> 4) & 0xf, number & 0xf),
        _ if number >> 28 == 1 => ((number >> 8) & 0xf_ffff, number & 0xff),
        _ => return number.to_string(),
    };
    let mut letters = Vec::new();
    let mut rest = disk + 1;
    while rest > 0 {
        letters.push(char::from(b'a' + ((rest - 1) % 26) as u8));
        rest = (rest - 1) / 26;
    }
    let letters: String = letters.into_iter().rev().collect();
    if partition == 0 { format!("xvd{letters}") } else { format!("xvd{letters}{partition}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vbd(devid: u32) -> Device {
        Device { kind: DeviceKind::Vbd, devid, backend: None, front: Vec::new(), back: Vec::new() }
    }

    #[test]
    fn disks_have_the_names_of_the_guest() {
        for (number, name) in [
            (51712, "xvda"),
            (51728, "xvdb"),
            (51729, "xvdb1"),
            (51952, "xvdp"),
            ((1 << 28) | (16 << 8), "xvdq"),
            ((1 << 28) | (26 << 8), "xvdaa"),
            ((1 << 28) | (254 << 8) | 2, "xvdiu2"),
            (768, "768"),
            (u32::MAX, "4294967295"),
        ] {
            assert_eq!(device_name(&vbd(number)), name, "{number}");
        }
    }

    #[test]
    fn domains_are_listed_as_list_domains_does() {
        let domain = |domid: u32, vm: &str| Domain {
            domid,
            nodes: vec![("vm", format!("/vm/{vm}"))],
            devices: Vec::new(),
        };
        let uuid = "164d3080-00a6-2b08-69f7-8c3fc75cba07";
        let text = list(&[domain(0, uuid), domain(12, uuid)]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], format!("id | {:>36} |  state", "uuid"));
        assert_eq!(lines[2], format!("12 | {uuid} |       "));
    }

    #[test]
    fn what_a_guest_writes_is_shown_with_care() {
        let mut disk = vbd(51712);
        disk.backend = Some("/local/domain/0/backend/vbd3/5/51712".into());
        disk.front = vec![("state", "4".into())];
        disk.back =
            vec![("state", "99".into()), ("mode", "\u{1b}[31mw".into()), ("sectors", "2097152".into())];
        let domain = Domain { domid: 5, nodes: vec![("name", "a\nb".into())], devices: vec![disk] };
        let text = text(&[domain]);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(!text.contains('\u{1b}') && text.contains("a\\nb"), "{text}");
        assert!(text.contains("Connected/-") && text.contains("1024 MiB") && text.contains("vbd3"), "{text}");
        assert!(shown(&"ä".repeat(100), 24).len() <= 27);
    }
}
