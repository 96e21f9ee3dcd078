//! Disks on their way to another host: in which order their images are sent, and how those here go when all are there.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use tapio_model::ApiError;
use tapio_sm::worker::is_unfinished;
use tapio_sm::{Export, StreamFormat};
use tapio_types::{ChainSpec, LayerSpec};
use uuid::Uuid;

use super::archive::Sources;
use super::attached::Attached;
use super::collect::HeldOff;
use super::half_done;
use super::notes::Note;
use super::relocate::plan::{Facts, Plan, Source, plan};
use super::work::Work;
use super::{Call, Storage};
use crate::db::{Change, Object};

/// VDIs that have images in common, and all that is to be made and filled for them elsewhere.
pub(crate) struct Tree {
    /// The SR that they go to, as the other host knows it.
    pub(crate) to: String,
    /// The VDIs, in the order of the plan's places.
    pub(crate) members: Vec<String>,
    pub(crate) plan: Plan,
    from: Arc<Attached>,
}

/// The trees of disks that are held, each VDI with the SR that it goes to.
///
/// # Errors
/// A disk that is held goes nowhere: a defect.
pub(crate) fn trees(
    call: &Call,
    sources: &Sources<'_>,
    to: &BTreeMap<String, String>,
) -> Result<Vec<Tree>, ApiError> {
    let mut groups: BTreeMap<(String, PathBuf), Vec<usize>> = BTreeMap::new();
    for (at, disk) in sources.disks.iter().enumerate() {
        let vdi = disk.subject.reference();
        let there = to.get(vdi).ok_or_else(|| ApiError::new("VDI_NOT_IN_MAP", [vdi]))?;
        let root = disk.chain.layers.last().map(|layer| layer.path.clone()).unwrap_or_default();
        groups.entry((there.clone(), root)).or_default().push(at);
    }
    let mut trees = Vec::new();
    for ((there, _), members) in groups {
        let disks: Vec<_> = members.iter().map(|at| &sources.disks[*at]).collect();
        let sizes = disks.iter().map(|disk| disk.subject.vdi.int("virtual_size"));
        let sizes: Vec<u64> = sizes.map(|size| u64::try_from(size).unwrap_or_default()).collect();
        let each = disks.iter().zip(sizes).map(|(disk, size)| Source {
            layers: disk.chain.layers.clone(),
            size,
            is_live: false,
        });
        let each: Vec<Source> = each.collect();
        let Some(from) = disks.first().map(|disk| Arc::clone(&disk.subject.sr)) else { continue };
        let plan = plan(&each, &|layer| facts(call, &from.reference, layer));
        let members = disks.iter().map(|disk| disk.subject.reference().to_owned()).collect();
        trees.push(Tree { to: there, members, plan, from });
    }
    Ok(trees)
}

/// What the records know of an image.
fn facts(call: &Call, sr: &str, layer: &LayerSpec) -> Option<Facts> {
    let name = layer.path.file_stem()?.to_str()?;
    let uuid =
        Uuid::parse_str(name.strip_prefix("VHD-").or_else(|| name.strip_prefix("LV-")).unwrap_or(name));
    let vdi = call.part.db.get("VDI", &crate::db::reference_of(uuid.ok()?)).ok()?;
    let size = |field: &str| u64::try_from(vdi.int(field)).unwrap_or_default();
    (vdi.text("SR") == sr).then(|| (size("virtual_size"), size("physical_utilisation")))
}

impl Tree {
    /// Sends what the images of `from` hold and those of `base` do not, in pieces, from byte `start` of the disk on.
    ///
    /// # Errors
    /// Those of the images, `TASK_CANCELLED`: also of a reader that has gone away.
    pub(crate) fn send(
        &self,
        call: &Call,
        (from, base): (&ChainSpec, Option<&ChainSpec>),
        start: u64,
        to: OwnedFd,
    ) -> Result<(), ApiError> {
        let base = base.map(|base| (base.clone(), Uuid::nil()));
        let format = StreamFormat::Chunked;
        let what = Export { chain: from.clone(), uuid: Uuid::nil(), base, format, start };
        self.from.with(|sr| sr.export(&Work::new(call), &what, to))
    }

    /// The SR here, with the collection of its garbage put off until this goes.
    pub(crate) fn hold_off<'a>(&self, storage: &'a Arc<Storage>) -> Idle<'a> {
        hold_off(storage, &self.from.reference)
    }
}

/// Puts the collection of an SR's garbage off until this goes.
pub(crate) fn hold_off<'a>(storage: &'a Arc<Storage>, sr: &str) -> Idle<'a> {
    Idle { _held: storage.hold_off(sr) }
}

/// While it is there, nothing changes the chains of an SR but operations of clients.
pub(crate) struct Idle<'a> {
    _held: HeldOff<'a>,
}

/// With this change a VDI goes, image and record; [`remove`] does that, or the next attach of its SR.
///
/// # Errors
/// The note cannot be written: a defect.
pub(crate) fn leaves(change: &mut Change<'_>, vdi: &Object) -> Result<(), ApiError> {
    Note::VdiDestroy { sr: vdi.text("SR").to_owned(), vdi: vdi.reference.clone() }.put(change)
}

/// [`remove`] of those of these VDIs that a change of before said go.
pub(crate) fn remove_noted<'a>(call: &Call, vdis: impl Iterator<Item = &'a String>) {
    let known = vdis.filter_map(|vdi| call.part.db.get("VDI", vdi).ok());
    let goes = |vdi: &Arc<Object>| {
        let note = Note::VdiDestroy { sr: vdi.text("SR").to_owned(), vdi: vdi.reference.clone() };
        !call.part.db.notes(&note.key()).is_empty()
    };
    remove(call, &known.filter(goes).collect::<Vec<_>>());
}

/// Removes VDIs that [`leaves`] said go.
pub(crate) fn remove(call: &Call, vdis: &[Arc<Object>]) {
    for vdi in vdis {
        let note = Note::VdiDestroy { sr: vdi.text("SR").to_owned(), vdi: vdi.reference.clone() };
        let Ok(attached) = call.part.attached(vdi.text("SR")) else { continue };
        if let Err(error) = half_done::image(call, &attached, &note) {
            let vdi = vdi.text("uuid");
            tracing::warn!(vdi, %error, "the image of a disk that is elsewhere stays until its SR is attached again");
            if is_unfinished(&error) {
                attached.owe(note);
            }
        }
        call.part.collect_later(vdi.text("SR"));
    }
}

/// Bytes that an SR has free, by its record; none if its size is not known.
pub(crate) fn free(sr: &Object) -> Option<u64> {
    let size = u64::try_from(sr.int("physical_size")).ok().filter(|size| *size > 0)?;
    Some(size.saturating_sub(u64::try_from(sr.int("physical_utilisation")).unwrap_or_default()))
}
