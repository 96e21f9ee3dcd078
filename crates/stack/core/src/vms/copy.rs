//! VMs made from VMs: clones, copies, snapshots, and templates that become VMs.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF, Value};
use tapio_sm::ForkKind;

use super::allowed::{bad_power_state, is_kept, refresh, with};
use super::made::remove_unused;
use super::running::Running;

use super::{Call, Handlers, Vms, fields, lookup, vbd, vif, vm};
use crate::args::Args;
use crate::db::{Change, Object};
use crate::plan::steps::step;
use crate::plan::{Permits, Plan};
use crate::storage::vdi::{MADE_NOTES, made_note};
use crate::storage::{self, Copy};

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VM.clone", clone);
    handlers.on("VM.copy", copy);
    handlers.on("VM.snapshot", snapshot);
    handlers.on("VM.provision", provision);
}

/// How the disks are made.
#[derive(Clone, Debug, PartialEq, Eq)]
enum How {
    Clone,
    /// Into this SR; each into its own where there is none.
    Copy(Option<String>),
    /// Without these VDIs.
    Snapshot(Vec<String>),
}

fn clone(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (_running, source) = Running::begin(call, "VM", args.text(0)?, "clone", |change, vm| {
        refuse_running(vm)?;
        change.get("VM", &vm.reference)
    })?;
    make(call, &source, args.text(1)?, &How::Clone, |made| memory_of(call, &source, &How::Clone, made))
}

fn copy(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let sr = Some(args.text(2)?).filter(|sr| *sr != NULL_REF && !sr.is_empty()).map(ToOwned::to_owned);
    let (_running, source) = Running::begin(call, "VM", args.text(0)?, "copy", |change, vm| {
        refuse_running(vm)?;
        sr.as_ref().map_or(Ok(()), |sr| change.get("SR", sr).map(drop))?;
        change.get("VM", &vm.reference)
    })?;
    let how = How::Copy(sr);
    make(call, &source, args.text(1)?, &how, |made| memory_of(call, &source, &how, made))
}

fn refuse_running(vm: &Object) -> Result<(), ApiError> {
    if vm.bool("is_control_domain") {
        let why = format!("{} is the host itself", vm.text("name_label"));
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    if vm.text("power_state") == "Halted" || is_kept(vm) {
        return Ok(());
    }
    Err(bad_power_state(vm, "Halted"))
}

/// The memory for what is made of a checkpoint, or of a template that was made of one: a VDI that nothing leads to,
/// with a note of that. None for all that has no memory.
fn memory_of(call: &Call, source: &Object, how: &How, made: &str) -> Result<Option<String>, ApiError> {
    if source.text("power_state") != "Suspended" || source.is_null("suspend_VDI") {
        return Ok(None);
    }
    let image = copy_of(call, source.text("suspend_VDI"), how, made)?;
    step("vm-clone:memory-made");
    Ok(Some(image))
}

fn snapshot(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let ignored = args.value(2).ok().and_then(Value::as_set).unwrap_or_default();
    let ignored = ignored.iter().filter_map(|vdi| Some(vdi.as_str()?.to_owned())).collect();
    let (_running, source) = Running::begin(call, "VM", args.text(0)?, "snapshot", |change, vm| {
        super::allowed::refuse_special(vm)?;
        change.get("VM", &vm.reference)
    })?;
    make(call, &source, args.text(1)?, &How::Snapshot(ignored), |_| Ok(None))
}

/// Makes a snapshot that has the memory image which `memory` makes, with a note that nothing leads to it.
///
/// # Errors
/// Those of a snapshot, and of `memory`; nothing is left.
pub(super) fn make_with_memory(
    call: &Call,
    source: &Arc<Object>,
    name: &str,
    memory: impl FnOnce() -> Result<String, ApiError>,
) -> Result<Value, ApiError> {
    make(call, source, name, &How::Snapshot(Vec::new()), |_| memory().map(Some))
}

/// Makes a snapshot of a guest that holds still until `quiet` is called: when all disks are made.
///
/// # Errors
/// Those of a snapshot, and of `quiet`; nothing is left.
pub(super) fn make_quiet(
    call: &Call,
    source: &Arc<Object>,
    name: &str,
    quiet: impl FnOnce() -> Result<(), ApiError>,
) -> Result<Value, ApiError> {
    let made = make(call, source, name, &How::Snapshot(Vec::new()), |_| quiet().map(|()| None))?;
    call.part.db.change(|change| {
        let reference = made.as_str().unwrap_or_default();
        let info = change.get("VM", reference)?.map("snapshot_info");
        change.set("VM", reference, "snapshot_info", with(&info, "disk-snapshot-type", "quiesced"))
    })?;
    Ok(made)
}

/// Makes a VM like `source`: the record first, with a note that it is not finished, then disk by disk.
/// `memory` makes a memory image for it in the end.
fn make(
    call: &Call,
    source: &Arc<Object>,
    name: &str,
    how: &How,
    memory: impl FnOnce(&str) -> Result<Option<String>, ApiError>,
) -> Result<Value, ApiError> {
    let is_snapshot = matches!(how, How::Snapshot(_));
    let db = &call.part.db;
    let made = db.change(|change| {
        let made = vm::create_in(change, fields::of_new(source, name, is_snapshot))?;
        fields::copy_guest_metrics(change, source, &made)?;
        for vif in change.find("VIF", "VM", &source.reference) {
            vif::copy_in(change, &made, &vif, is_snapshot)?;
        }
        change.put_note(format!("machines/make/{made}"), &source.reference);
        Ok(made)
    })?;
    step("vm-clone:recorded");
    let result = disks(call, source, &made, how).and_then(|()| memory(&made));
    if result.is_err() {
        // The plan has undone the disks, if one of them failed.
        for vbd in db.find("VBD", "VM", &made) {
            remove(call, &made, vbd.text("userdevice"))?;
        }
        db.change(|change| {
            let new = change.get("VM", &made)?;
            change.drop_note(format!("machines/make/{made}"));
            vm::remove_in(change, &new)
        })?;
    }
    let image = result?;
    db.change(|change| {
        change.drop_note(format!("machines/make/{made}"));
        if let Some(image) = &image {
            change.drop_note(made_note(image));
            change.set("VM", &made, "suspend_VDI", Value::string(image))?;
            change.set("VM", &made, "power_state", Value::string("Suspended"))?;
        }
        if is_snapshot && change.get("VM", &source.reference).is_ok() {
            // The line of snapshots: each is the child of the one before, and the VM that of the last.
            change.set("VM", &source.reference, "parent", Value::string(&made))?;
        }
        refresh(change, "VM", &made)
    })?;
    Ok(Value::string(made))
}

fn disks(call: &Call, source: &Object, made: &str, how: &How) -> Result<(), ApiError> {
    lookup::apply_limits(call);
    let db = &call.part.db;
    let mut plans = Vec::new();
    for old in db.find("VBD", "VM", &source.reference) {
        let is_cd = old.text("type") == "CD";
        let vdi = if old.is_null("VDI") { None } else { Some(db.get("VDI", old.text("VDI"))?) };
        if let (How::Snapshot(ignored), Some(vdi)) = (how, &vdi)
            && ignored.contains(&vdi.reference)
        {
            continue;
        }
        let permits = Permits {
            vm: Some(source.reference.as_str().into()),
            sr: vdi.as_ref().map(|vdi| vdi.text("SR").into()),
        };
        let (this, how, made, new) = (call.clone(), how.clone(), made.to_owned(), Arc::clone(&old));
        let (that, undone, place) = (call.clone(), made.clone(), old.text("userdevice").to_owned());
        let disk = vdi.filter(|_| !is_cd).map(|vdi| vdi.reference.clone());
        let subject = format!("VBD {}", old.text("uuid"));
        let plan = Plan::leaf("make the disk", subject, permits, move |_| {
            match &disk {
                Some(vdi) => {
                    let make = || copy_of(&this, vdi, &how, &made);
                    make_disk(&this, make, |change, vdi| add(change, &made, &new, vdi))?;
                }
                None => this.part.db.change(|change| add(change, &made, &new, new.text("VDI")))?,
            }
            step("vm-clone:disk-made");
            Ok(())
        });
        plans.push(plan.undone_by(move |_| remove(&that, &undone, &place)));
    }
    let operation = match how {
        How::Clone => "VM.clone",
        How::Copy(_) => "VM.copy",
        How::Snapshot(_) => "VM.snapshot",
    };
    call.part.plans.run(operation, Plan::Parallel(plans), &call.progress)
}

/// Makes a VDI like another, for this VM.
fn copy_of(call: &Call, vdi: &str, how: &How, vm: &str) -> Result<String, ApiError> {
    let storage = lookup::to_storage(call);
    let fork = |kind| storage::fork_vdi(&storage, vdi, &BTreeMap::new(), kind, Some(vm));
    match how {
        How::Clone => fork(ForkKind::Clone),
        How::Snapshot(_) => fork(ForkKind::Snapshot),
        How::Copy(sr) => {
            let own = call.part.db.get("VDI", vdi)?.text("SR").to_owned();
            let to = Copy { sr: Some(sr.as_ref().unwrap_or(&own)), ..Copy::default() };
            storage::copy_vdi(&storage, vdi, &to, Some(vm))
        }
    }
}

/// The key of a VBD's `other_config` by which clients know that its disk goes with its VM.
const OWNER: &str = "owner";

/// Gives a VM a VBD like another's; a disk that was made for it goes with it.
///
/// # Errors
/// The store's.
pub(super) fn add(change: &mut Change<'_>, vm: &str, like: &Object, vdi: &str) -> Result<(), ApiError> {
    let same = ["userdevice", "bootable", "mode", "type", "unpluggable", "empty", "other_config"];
    let qos = ["qos_algorithm_type", "qos_algorithm_params"];
    let mut fields: Vec<(&str, Value)> =
        same.into_iter().chain(qos).map(|name| (name, like.get(name).clone())).collect();
    fields.extend([("VM", Value::string(vm)), ("VDI", Value::string(vdi))]);
    if like.text("type") == "Disk" {
        let mut config = like.map("other_config");
        config.entry(OWNER.to_owned()).or_default();
        fields.retain(|(name, _)| *name != "other_config");
        fields.push(("other_config", Value::string_map(config)));
    }
    vbd::create_in(change, fields).map(drop)
}

/// Makes a VDI for a VM and a VBD that leads to it; both or none, whenever the daemon ends.
fn make_disk(
    call: &Call,
    make: impl FnOnce() -> Result<String, ApiError>,
    record: impl FnOnce(&mut Change<'_>, &str) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    let vdi = make()?;
    step("vm-clone:disk-alone");
    let recorded = call.part.db.change(|change| {
        change.drop_note(made_note(&vdi));
        record(change, &vdi)
    });
    if recorded.is_err() {
        remove_unused(call, &vdi)?;
    }
    recorded
}

/// Removes the disk in a place of a new VM, VBD and VDI.
fn remove(call: &Call, vm: &str, place: &str) -> Result<(), ApiError> {
    let vbds = call.part.db.find("VBD", "VM", vm);
    let Some(vbd) = vbds.into_iter().find(|vbd| vbd.text("userdevice") == place) else { return Ok(()) };
    call.part.db.change(|change| vbd::remove_in(change, &vbd))?;
    if vbd.text("type") != "CD" && !vbd.is_null("VDI") {
        storage::vdi::destroy(&lookup::to_storage(call), vbd.text("VDI"))?;
    }
    Ok(())
}

/// What a disk was made for that another host sends begins so; see [`crate::storage::vdi::made_note`].
pub(crate) const MOTION: &str = "motion/";

/// Removes what an earlier daemon began to make and did not finish.
pub fn recover(vms: &Arc<Vms>) {
    let call = Call::own(vms);
    for (key, vm) in vms.db.notes(MADE_NOTES) {
        // Another host sends them, and may go on with that.
        if vm.starts_with(MOTION) {
            continue;
        }
        let vdi = key.trim_start_matches(MADE_NOTES);
        match remove_unused(&call, vdi) {
            Ok(()) => tracing::info!(vdi, "a disk that was made for no VM is removed"),
            Err(error) => tracing::warn!(vdi, %error, "a disk that was made for no VM stays"),
        }
    }
    for (key, _) in vms.db.notes("machines/make/") {
        let reference = key.trim_start_matches("machines/make/").to_owned();
        let removed = (|| {
            for vbd in vms.db.find("VBD", "VM", &reference) {
                remove(&call, &reference, vbd.text("userdevice"))?;
            }
            vms.db.change(|change| {
                change.drop_note(&key);
                let Ok(half) = change.get("VM", &reference) else { return Ok(()) };
                vm::remove_in(change, &half)
            })
        })();
        match removed {
            Ok(()) => tracing::info!(vm = reference, "a VM that was half made is removed"),
            Err(error) => tracing::warn!(vm = reference, %error, "a VM that was half made stays"),
        }
    }
}

/// A disk that a template wants: `other_config:disks`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedDisk {
    place: String,
    bytes: i64,
    /// UUID; the pool's default without.
    sr: String,
    bootable: bool,
    /// `VDI.type`.
    kind: String,
}

/// Kinds of disks that a template may ask for.
const KINDS: [&str; 3] = ["system", "user", "ephemeral"];

/// Reads `<provision><disk device="0" size="8589934592" sr="" bootable="true" type="system"/></provision>`.
///
/// # Errors
/// `INVALID_VALUE` with what is wrong.
pub fn wanted_disks(text: &str) -> Result<Vec<WantedDisk>, ApiError> {
    let bad = |why: String| ApiError::new("INVALID_VALUE", ["other_config:disks".to_owned(), why]);
    if text.len() > 64 << 10 {
        return Err(bad("it is longer than 64 KiB".into()));
    }
    let mut disks = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find("<disk") {
        rest = &rest[start + "<disk".len()..];
        let end = rest.find('>').ok_or_else(|| bad("a <disk does not end".into()))?;
        let (inside, after) = rest.split_at(end);
        let mut disk = WantedDisk { kind: "system".to_owned(), ..WantedDisk::default() };
        let mut attributes = inside.trim_end_matches('/').trim();
        while !attributes.is_empty() {
            let unread = || bad(format!("'{attributes}' are no attributes"));
            let (name, tail) = attributes.split_once('=').ok_or_else(unread)?;
            let tail = tail.trim_start();
            let quote = tail.chars().next().filter(|quote| ['"', '\''].contains(quote)).ok_or_else(unread)?;
            let (value, tail) = tail[1..].split_once(quote).ok_or_else(unread)?;
            match name.trim() {
                "device" => value.clone_into(&mut disk.place),
                "size" => {
                    let bytes = value.parse().ok().filter(|bytes| *bytes > 0);
                    disk.bytes = bytes.ok_or_else(|| bad(format!("'{value}' is no size in bytes")))?;
                }
                "sr" => value.clone_into(&mut disk.sr),
                "bootable" => disk.bootable = value == "true",
                "type" if KINDS.contains(&value) => value.clone_into(&mut disk.kind),
                // A kind that is none of these, and sources, are of no use here.
                _ => {}
            }
            attributes = tail.trim_start();
        }
        if disk.bytes == 0 {
            return Err(bad("a disk has no size".into()));
        }
        disks.push(disk);
        rest = after;
    }
    Ok(disks)
}

fn provision(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let (_running, template) = Running::begin(call, "VM", reference, "provision", |change, vm| {
        if !vm.bool("is_a_template") {
            return Err(ApiError::bare("PROVISION_ONLY_ALLOWED_ON_TEMPLATE"));
        }
        if vm.bool("is_default_template") {
            let why =
                format!("{} is the template itself: clone it and provision that", vm.text("name_label"));
            return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        }
        change.put_note(format!("machines/provision/{}", vm.reference), "");
        change.get("VM", &vm.reference)
    })?;
    let wanted = wanted_disks(template.map("other_config").get("disks").map_or("", String::as_str));
    let made = wanted.and_then(|wanted| provision_disks(call, &template, wanted));
    let note = format!("machines/provision/{reference}");
    if let Err(error) = made {
        call.part.db.change(|change| {
            change.drop_note(&note);
            Ok(())
        })?;
        return Err(error);
    }
    call.part.db.change(|change| {
        change.drop_note(&note);
        let mut config = change.get("VM", reference)?.map("other_config");
        config.retain(|key, _| !["disks", "postinstall"].contains(&key.as_str()));
        change.set("VM", reference, "other_config", with(&config, "provisioned", "true"))?;
        change.set("VM", reference, "is_a_template", false)?;
        refresh(change, "VM", reference)
    })?;
    Ok(Value::Void)
}

fn provision_disks(call: &Call, template: &Object, wanted: Vec<WantedDisk>) -> Result<(), ApiError> {
    lookup::apply_limits(call);
    let db = &call.part.db;
    let mut plans = Vec::new();
    for disk in wanted {
        let sr = if disk.sr.is_empty() {
            let pool = db.all("pool");
            let default = pool.first().map(|pool| pool.text("default_SR").to_owned()).unwrap_or_default();
            db.get("SR", &default).map_err(|_| ApiError::new("DEFAULT_SR_NOT_FOUND", [default.as_str()]))?
        } else {
            db.by_uuid("SR", &disk.sr)?
        };
        let permits =
            Permits { vm: Some(template.reference.as_str().into()), sr: Some(sr.reference.as_str().into()) };
        let (this, vm, label) =
            (call.clone(), template.reference.clone(), template.text("name_label").to_owned());
        let (that, of, place) = (call.clone(), vm.clone(), disk.place.clone());
        let plan = Plan::leaf("make the disk", format!("disk {}", disk.place), permits, move |_| {
            let record = [
                ("name_label", Value::string(format!("{label} {}", disk.place))),
                ("name_description", Value::string("Created by template provisioner")),
                ("SR", Value::string(&sr.reference)),
                ("virtual_size", Value::Int(disk.bytes)),
                ("type", Value::string(&disk.kind)),
            ];
            let record = record.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            let make = || storage::vdi::create(&lookup::to_storage(&this), &record, Some(&vm));
            make_disk(&this, make, |change, vdi| {
                let fields = vec![
                    ("VM", Value::string(&vm)),
                    ("VDI", Value::string(vdi)),
                    ("userdevice", Value::string(&disk.place)),
                    ("bootable", Value::Bool(disk.bootable)),
                    ("mode", Value::string("RW")),
                    ("type", Value::string("Disk")),
                    ("unpluggable", Value::Bool(true)),
                    ("other_config", Value::string_map([(OWNER, "")])),
                ];
                vbd::create_in(change, fields).map(drop)
            })
        });
        plans.push(plan.undone_by(move |_| remove(&that, &of, &place)));
    }
    call.part.plans.run("VM.provision", Plan::Parallel(plans), &call.progress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_says_which_disks_it_wants() {
        let text = r#"<provision><disk device="0" size="8589934592" sr="" bootable="true" type="system"/>
            <disk size='1048576' device='3' sr='0e7c' bootable='false'></disk></provision>"#;
        let disks = wanted_disks(text).expect("two disks");
        assert_eq!(disks.len(), 2);
        assert_eq!((disks[0].place.as_str(), disks[0].bytes, disks[0].bootable), ("0", 8 << 30, true));
        assert_eq!((disks[1].place.as_str(), disks[1].bytes, disks[1].sr.as_str()), ("3", 1 << 20, "0e7c"));
        assert_eq!((disks[0].kind.as_str(), disks[1].kind.as_str()), ("system", "system"));
        let user = wanted_disks("<disk device='0' size='1' type='user'/>").expect("a disk");
        assert_eq!(user[0].kind, "user");
        assert_eq!(wanted_disks(""), Ok(Vec::new()));
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            "<disk",
            "<disk/>",
            "<disk size=\"0\"/>",
            "<disk size=\"-1\"/>",
            "<disk size=\"many\"/>",
            "<disk size=8/>",
            "<disk size=\"8/>",
            "<disk size/>",
        ] {
            assert_eq!(wanted_disks(bad).expect_err(bad).code, "INVALID_VALUE");
        }
    }
}
