//! VDIs become others: their records, and what leads to them.

use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF, Value};
use tapio_sm::VdiInfo;
use tapio_types::Access;
use uuid::Uuid;

use super::super::attached::Attached;
use super::super::notes::{Move, Note};
use super::super::vdi::Subject;
use super::super::work::Work;
use super::super::{Call, allowed, records, this_host};
use crate::db::{Change, Object, reference_of};

/// What of a VDI's record belongs to the disk and not to its image.
const KEPT: &[&str] = &[
    "name_label",
    "name_description",
    "type",
    "sharable",
    "read_only",
    "other_config",
    "xenstore_data",
    "is_a_snapshot",
    "snapshot_of",
    "snapshot_time",
    "tags",
    "allow_caching",
    "on_boot",
    "metadata_of_pool",
    "metadata_latest",
    "is_tools_iso",
];

/// Keys of `sm_config` that say how an image is open or was made; those of the driver come with the new image.
fn is_of_image(key: &str) -> bool {
    records::is_storage_key(key) || key.starts_with("host_") || key == "allocation"
}

/// Makes the records of members that are elsewhere now, and leads everything to them; answers the notes by which their
/// old images go. `note` no longer has them then, and goes when it has none.
///
/// # Errors
/// The driver's, the store's; then nothing was changed.
pub(super) fn records(
    call: &Call,
    (from, to): (&Arc<Attached>, &Arc<Attached>),
    note: &mut Move,
    members: &[&Subject],
    bases: &[Uuid],
) -> Result<Vec<Note>, ApiError> {
    let work = Work::new(call);
    let info = |image: Uuid| to.with(|sr| sr.vdi(&work, image));
    let of = |member: &Subject| note.members.iter().find(|moving| moving.vdi == member.reference());
    let mut pairs: Vec<(&Subject, VdiInfo)> = Vec::new();
    for member in members {
        let moving =
            of(member).ok_or_else(|| ApiError::internal("a VDI is moved that its note does not name"))?;
        pairs.push((member, info(moving.image)?));
    }
    // One that is not there any more was not needed.
    let bases: Vec<VdiInfo> = bases.iter().filter_map(|base| info(*base).ok()).collect();
    let mut after = note.clone();
    after.switching = None;
    after.members.retain(|moving| !members.iter().any(|member| member.reference() == moving.vdi));
    after.images.retain(|image| !pairs.iter().any(|(_, info)| info.uuid == *image));
    let old: Vec<Note> = members
        .iter()
        .map(|member| Note::VdiDestroy { sr: from.reference.clone(), vdi: member.reference().to_owned() })
        .collect();
    let _changing = to.changing();
    let (sizes, host) = (to.measure(&work), this_host(&call.part.db));
    let holders = take_over(call, &pairs);
    let written = call.part.db.change(|change| {
        let mut more = 0_i64;
        for base in &bases {
            more = more.saturating_add(records::put(change, &to.reference, base)?);
            allowed::refresh(&call.part, change, "VDI", &reference_of(base.uuid))?;
        }
        for (member, info) in &pairs {
            let new = one(change, to, member, info)?;
            more = more.saturating_add(i64::try_from(info.virtual_size).unwrap_or(i64::MAX));
            for (_, holder, access) in holders.iter().filter(|(vdi, ..)| vdi == member.reference()) {
                let (holder, access) = (holder.clone(), *access);
                let before =
                    Note::Holder { vdi: member.reference().to_owned(), holder: holder.clone(), access };
                before.drop_from(change);
                Note::Holder { vdi: new.clone(), holder, access }.put(change)?;
            }
            call.part.tag(&host, change, &new)?;
        }
        to.record(change, sizes, more)?;
        for note in &old {
            note.put(change)?;
        }
        let after = Note::Move(after.clone());
        match &after {
            Note::Move(moving) if moving.members.is_empty() => after.drop_from(change),
            _ => after.put(change)?,
        }
        Ok(())
    });
    if let Err(error) = written {
        give_back(call, &pairs, &holders);
        return Err(error);
    }
    *note = after;
    let mut state = call.part.state();
    for (member, info) in &pairs {
        state.moved.insert(member.reference().to_owned(), reference_of(info.uuid));
    }
    drop(state);
    Ok(old)
}

/// Holders are those of the new VDIs from now on; answers them with the old ones.
fn take_over(call: &Call, pairs: &[(&Subject, VdiInfo)]) -> Vec<(String, String, Access)> {
    let mut state = call.part.state();
    let mut all = Vec::new();
    for (member, info) in pairs {
        let Some(holders) = state.holders.remove(member.reference()) else { continue };
        let old = member.reference();
        all.extend(holders.iter().map(|(holder, access)| (old.to_owned(), holder.clone(), *access)));
        state.holders.insert(reference_of(info.uuid), holders);
    }
    all
}

fn give_back(call: &Call, pairs: &[(&Subject, VdiInfo)], holders: &[(String, String, Access)]) {
    for (_, info) in pairs {
        call.part.state().holders.remove(&reference_of(info.uuid));
    }
    for (vdi, holder, access) in holders {
        call.part.put_holder(vdi, holder, Some(*access));
    }
}

/// Makes the record of one, and leads to it what led to the old one; answers its reference.
fn one(change: &mut Change<'_>, to: &Attached, member: &Subject, info: &VdiInfo) -> Result<String, ApiError> {
    let vdi = member.reference();
    let old: Arc<Object> = change.get("VDI", vdi)?;
    let mut sm_config = old.map("sm_config");
    sm_config.retain(|key, _| !is_of_image(key));
    sm_config.extend(info.sm_config.clone());
    let mut fields: Vec<(&'static str, Value)> =
        KEPT.iter().map(|field| (*field, old.get(field).clone())).collect();
    fields.push(("sm_config", Value::string_map(sm_config)));
    // An image that is copied is not read-only; its disk may be.
    let mut info = info.clone();
    info.read_only = false;
    let new = records::create(change, &to.reference, &info, fields)?;
    lead(change, &old, &new)?;
    Ok(new)
}

/// What leads to a VDI leads to another one from now on.
fn lead(change: &mut Change<'_>, old: &Object, new: &str) -> Result<(), ApiError> {
    for (class, field) in
        [("VBD", "VDI"), ("VDI", "snapshot_of"), ("VM", "suspend_VDI"), ("crashdump", "VDI")]
    {
        for leads in change.find(class, field, &old.reference) {
            change.set(class, &leads.reference, field, new)?;
        }
    }
    if !old.is_null("snapshot_of") {
        change.set("VDI", &old.reference, "snapshot_of", NULL_REF)?;
    }
    Ok(())
}

/// A VDI becomes another one, which is on an SR of another host and has a record already.
///
/// # Errors
/// `HANDLE_INVALID`; the store's.
pub(crate) fn becomes(change: &mut Change<'_>, vdi: &str, new: &str) -> Result<(), ApiError> {
    let (old, made) = (change.get("VDI", vdi)?, change.get("VDI", new)?);
    let mut sm_config = old.map("sm_config");
    sm_config.retain(|key, _| !is_of_image(key));
    sm_config.extend(made.map("sm_config"));
    for field in KEPT {
        change.set("VDI", new, field, old.get(field).clone())?;
    }
    change.set("VDI", new, "sm_config", Value::string_map(sm_config))?;
    lead(change, &old, new)
}
