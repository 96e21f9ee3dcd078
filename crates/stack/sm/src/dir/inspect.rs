//! What is wrong with the files of an SR: looked at, never changed.

use std::collections::{BTreeSet, HashMap};

use tapio_format::vhd::offline::{CheckOptions, Report, check_path};
use tapio_types::ApiError;
use uuid::Uuid;

use super::facts::{Facts, FileKind};
use super::index::Listing;
use super::journal::{Leftover, leftover};
use super::{ImageDir, recover};
use crate::errors;
use crate::lock::Share;
use crate::traits::{Ctx, Oddity, OddityKind};

/// Oddities that one inspection lists: what is beyond is found once these are dealt with.
const ODDITIES_MAX: usize = 10_000;

impl ImageDir {
    pub(super) fn inspect_files(&self, ctx: &dyn Ctx) -> Result<Vec<Oddity>, ApiError> {
        if let Some(kept) = self.locks.kept() {
            let file = kept.place.display().to_string();
            return Ok(vec![Oddity { kind: OddityKind::LockKept, image: None, file, detail: kept.detail }]);
        }
        let held = self.lock(ctx, Share::Shared)?;
        let listing = self.list()?;
        let mut found = self.leftovers(&listing);
        drop(held);
        let children = listing.children();
        let count = listing.images.len().max(1);
        for (at, (vdi, facts)) in listing.images.iter().enumerate() {
            if ctx.is_cancelled() {
                return Err(errors::cancelled());
            }
            ctx.progress(at as f64 / count as f64);
            found.extend(self.inspect_image(ctx, &listing, &children, (*vdi, facts)));
            if found.len() >= ODDITIES_MAX {
                break;
            }
        }
        Ok(found)
    }

    fn leftovers(&self, listing: &Listing) -> Vec<Oddity> {
        let foreign = recover::foreign(&self.path, listing);
        let of = |name: &String| {
            let (kind, image, detail) = match leftover(name)? {
                Leftover::Merge(vdi) if foreign.contains_key(&vdi) => {
                    (OddityKind::JournalForeign, Some(vdi), "a merge that another storage manager began")
                }
                Leftover::Clone => (OddityKind::JournalLeft, None, "a snapshot or clone was broken off"),
                Leftover::Merge(vdi) => (OddityKind::JournalLeft, Some(vdi), "a merge was broken off"),
                Leftover::Resize(vdi) => (OddityKind::JournalLeft, Some(vdi), "a resize was broken off"),
                Leftover::Cbt(vdi) => (
                    OddityKind::JournalLeft,
                    Some(vdi),
                    "a change of its log of changed blocks was broken off",
                ),
                Leftover::Partial(process) if recover::is_running(process) => return None,
                Leftover::NewLeaf(vdi) => {
                    (OddityKind::FileUnfinished, Some(vdi), "the new image of a snapshot that was not made")
                }
                Leftover::NewLog | Leftover::PartialRaw | Leftover::Partial(_) => {
                    (OddityKind::FileUnfinished, None, "its process ended before it was whole")
                }
            };
            Some(Oddity { kind, image, file: name.clone(), detail: detail.to_owned() })
        };
        listing.leftovers.iter().filter_map(of).collect()
    }

    /// The first thing that is wrong with an image: the others often follow from it.
    fn inspect_image(
        &self,
        ctx: &dyn Ctx,
        listing: &Listing,
        children: &HashMap<Uuid, u32>,
        (vdi, facts): (Uuid, &Facts),
    ) -> Option<Oddity> {
        let odd = |kind, detail: String| {
            Some(Oddity { kind, image: Some(vdi), file: facts.kind.file_name(vdi), detail })
        };
        if let Some(parent) = listing.parent_of(facts) {
            let Some(below) = listing.images.get(&parent) else {
                return odd(
                    OddityKind::ParentMissing,
                    format!("it is based on {parent}, which is not there"),
                );
            };
            let recorded = facts.parent.as_ref().map_or(Uuid::nil(), |parent| parent.uuid);
            if below.kind == FileKind::Vhd && below.damage.is_none() && recorded != below.footer_uuid {
                let detail = format!(
                    "it was made on an image {recorded}, and {parent} is image {} now",
                    below.footer_uuid
                );
                return odd(OddityKind::ParentReplaced, detail);
            }
            if is_loop(listing, vdi) {
                return odd(OddityKind::ParentLoop, "its parents lead back to itself".to_owned());
            }
        }
        if facts.hidden && facts.damage.is_none() && !children.contains_key(&vdi) {
            return odd(OddityKind::BaseUnused, "it is a base copy, and no image is based on it".to_owned());
        }
        if let Some(damage) = &facts.damage {
            return odd(OddityKind::ImageDamaged, damage.clone());
        }
        // A disk that writes changes the image between two reads.
        if facts.kind == FileKind::Raw || ctx.live(vdi).is_some() {
            return None;
        }
        let refused = self.refused(vdi)?;
        // A merge may have made it longer meanwhile: what stays wrong is.
        (self.refused(vdi)? == refused).then_some(())?;
        odd(OddityKind::ImageDamaged, refused)
    }

    /// What `vhd-util check` says of an image that it refuses.
    fn refused(&self, vdi: Uuid) -> Option<String> {
        let options =
            CheckOptions { ignore_parent_uuid: true, ignore_timestamps: true, ..CheckOptions::default() };
        match check_path(&self.file(FileKind::Vhd, vdi), &options) {
            Ok(reports) if reports.iter().all(Report::is_valid) => None,
            Ok(reports) => {
                let first = reports.iter().flat_map(|report| &report.findings).next();
                Some(first.map_or_else(|| "is refused".to_owned(), ToString::to_string))
            }
            // It went meanwhile.
            Err(error) if error.errno() == libc::ENOENT => None,
            Err(error) => Some(error.to_string()),
        }
    }
}

/// Whether the parents of an image lead back to it.
pub(crate) fn is_loop(listing: &Listing, vdi: Uuid) -> bool {
    let mut met = BTreeSet::new();
    let mut next = Some(vdi);
    while let Some(image) = next {
        if !met.insert(image) {
            return image == vdi;
        }
        next = listing.images.get(&image).and_then(|facts| listing.parent_of(facts));
    }
    false
}
