//! Disks and drives of VMs.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tapio_model::NULL_REF;

use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::Session;

/// Pause between two tries to unplug from a guest that refuses.
const RETRY: Duration = Duration::from_millis(500);

pub(super) static COMMANDS: &[Command] = &[
    command(
        "vbd-create",
        &["vm-uuid", "device"],
        &[
            "vdi-uuid",
            "bootable",
            "type",
            "mode",
            "unpluggable",
            "qos_algorithm_type",
            "qos_algorithm_params:",
            "other-config:",
        ],
        "Attaches a disk or a drive to a VM; 'device' is a place from 0, or autodetect",
        create,
    ),
    command("vbd-destroy", &["uuid"], &[], "Detaches a disk or a drive from a VM", |s| {
        on_drive(s, "VBD.destroy")
    }),
    command("vbd-plug", &["uuid"], &[], "Plugs a disk into the running VM", |s| on_drive(s, "VBD.plug")),
    command(
        "vbd-unplug",
        &["uuid"],
        &["timeout", "force"],
        "Unplugs a disk from the running VM; tries again for 'timeout' seconds when the guest refuses",
        unplug,
    ),
    command(
        "vbd-pause",
        &["uuid"],
        &[],
        "Closes the images of a plugged disk while the guest's requests wait; prints the token for vbd-unpause",
        |s| {
            let vbd = s.reference("VBD", "uuid")?;
            s.print_values(&[&s.text("VBD.pause", &[vbd.into()])?])
        },
    ),
    command(
        "vbd-unpause",
        &["uuid"],
        &["token"],
        "Lets a paused disk go on; a token that is given must be that of the pause",
        |s| {
            let vbd = s.reference("VBD", "uuid")?;
            s.long("VBD.unpause", &[vbd.into(), s.or("token", "").into()]).map(drop)
        },
    ),
    command("vbd-eject", &["uuid"], &[], "Takes the medium out of a drive", |s| on_drive(s, "VBD.eject")),
    command("vbd-insert", &["uuid", "vdi-uuid"], &[], "Puts a medium into a drive", insert),
];

fn on_drive(session: &Session, method: &str) -> Result<()> {
    let vbd = session.reference("VBD", "uuid")?;
    session.long(method, &[vbd.into()]).map(drop)
}

/// The key of a VBD's `other_config` that says: the disk is destroyed with the VM when that is uninstalled.
pub(super) const OWNER: &str = "owner";

/// Makes a VBD; `kind` is `Disk` or `CD`. `own` are keys of its `other_config` in addition to those of the parameters.
pub(super) fn make(
    session: &Session,
    vm: &str,
    vdi: &str,
    device: &str,
    kind: &str,
    mode: &str,
    own: &[&str],
) -> Result<String> {
    let mut config = session.arguments.map("other-config");
    config.extend(own.iter().map(|key| ((*key).to_owned(), String::new())));
    let record = json!({
        "VM": vm,
        "VDI": vdi,
        "userdevice": device,
        "bootable": session.truth("bootable", false)?,
        "mode": mode,
        "type": kind,
        "unpluggable": session.truth("unpluggable", true)?,
        "empty": vdi == NULL_REF,
        "other_config": config,
        "qos_algorithm_type": session.or("qos_algorithm_type", ""),
        "qos_algorithm_params": session.map("qos_algorithm_params"),
    });
    session.text("VBD.create", &[record])
}

fn create(session: &Session) -> Result<()> {
    let vm = session.reference("VM", "vm-uuid")?;
    let vdi = session.optional("VDI", "vdi-uuid")?;
    let kind = match session.or("type", "Disk").to_ascii_lowercase().as_str() {
        "disk" => "Disk",
        "cd" => "CD",
        "floppy" => "Floppy",
        other => return Err(Failure::other(format!("type: '{other}' is none of Disk, CD, Floppy"))),
    };
    let mode = session.or("mode", if kind == "CD" { "RO" } else { "RW" }).to_ascii_uppercase();
    let vbd = make(session, &vm, &vdi, session.need("device")?, kind, &mode, &[])?;
    session.print_uuid("VBD", &vbd)
}

fn insert(session: &Session) -> Result<()> {
    let params: [Value; 2] =
        [session.reference("VBD", "uuid")?.into(), session.reference("VDI", "vdi-uuid")?.into()];
    session.long("VBD.insert", &params).map(drop)
}

fn unplug(session: &Session) -> Result<()> {
    let vbd = session.reference("VBD", "uuid")?;
    if session.truth("force", false)? {
        return session.long("VBD.unplug_force", &[vbd.into()]).map(drop);
    }
    let seconds = session.or("timeout", "0");
    let seconds: u64 = seconds
        .parse()
        .map_err(|_| Failure::other(format!("timeout: '{seconds}' is no number of seconds")))?;
    let until = Instant::now() + Duration::from_secs(seconds.min(86_400));
    loop {
        let left = until.saturating_duration_since(Instant::now()).as_secs_f64().ceil() as u64;
        let mut params = vec![Value::from(vbd.as_str())];
        // The toolstack's own limit holds where none was chosen.
        params.extend((seconds > 0).then(|| left.max(1).into()));
        match session.long("VBD.unplug", &params) {
            Err(Failure::Api(code, _)) if code == "DEVICE_DETACH_REJECTED" && Instant::now() < until => {
                std::thread::sleep(RETRY);
            }
            Err(Failure::Api(code, params)) if code == "DEVICE_DETACH_REJECTED" && seconds > 0 => {
                let mut timeout = params;
                timeout.truncate(2);
                return Err(Failure::Api("DEVICE_DETACH_TIMEOUT".into(), timeout));
            }
            other => return other.map(drop),
        }
    }
}
