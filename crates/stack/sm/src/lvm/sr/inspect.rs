//! What is wrong with the volumes of an SR: looked at, never changed.

use tapio_format::vhd::offline::{CheckOptions, check_image};
use tapio_format::{FileMedium, FormatError};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::VolumeSr;
use crate::dir::facts::FileKind;
use crate::dir::inspect::is_loop;
use crate::errors;
use crate::lock::Share;
use crate::lvm::journal;
use crate::lvm::names::{self, Role};
use crate::traits::{Ctx, Oddity, OddityKind};

impl VolumeSr {
    pub(super) fn inspect_volumes(&self, ctx: &dyn Ctx) -> Result<Vec<Oddity>, ApiError> {
        if let Some(kept) = self.locks.kept() {
            let file = kept.place.display().to_string();
            return Ok(vec![Oddity { kind: OddityKind::LockKept, image: None, file, detail: kept.detail }]);
        }
        let held = self.lock(ctx, Share::Shared)?;
        let found = self.found()?;
        let journals = journal::all(&self.group, &found.listed)?;
        drop(held);
        let mut odd: Vec<Oddity> = journals
            .iter()
            .map(|journal| Oddity {
                kind: OddityKind::JournalLeft,
                image: Some(journal.image),
                file: format!("{}_{}", journal.kind.word(), journal.image),
                detail: format!("a change of several steps ('{}') was broken off", journal.kind.word()),
            })
            .collect();
        for name in found.listed.volumes.keys() {
            if let Role::New(vdi) | Role::NewLog(vdi) | Role::Old(vdi) = names::role(name) {
                let detail = "a volume that did not get, or lost, the name of an image".to_owned();
                odd.push(Oddity {
                    kind: OddityKind::FileUnfinished,
                    image: Some(vdi),
                    file: name.clone(),
                    detail,
                });
            }
        }
        let children = found.listing.children();
        let count = found.listing.images.len().max(1);
        for (at, (vdi, facts)) in found.listing.images.iter().enumerate() {
            if ctx.is_cancelled() {
                return Err(errors::cancelled());
            }
            ctx.progress(at as f64 / count as f64);
            let file = names::volume(facts.kind, *vdi);
            let before = odd.len();
            let mut add = |kind, detail: String| {
                odd.push(Oddity { kind, image: Some(*vdi), file: file.clone(), detail });
            };
            if let Some(damage) = &facts.damage {
                add(OddityKind::ImageDamaged, damage.clone());
            } else if let Some(parent) = found.listing.parent_of(facts) {
                match found.listing.images.get(&parent) {
                    None => {
                        add(
                            OddityKind::ParentMissing,
                            format!("it is based on {parent}, which is not there"),
                        );
                    }
                    Some(below) => {
                        let recorded =
                            facts.parent.as_ref().map_or_else(Default::default, |parent| parent.uuid);
                        if below.damage.is_none() && recorded != below.footer_uuid {
                            let detail =
                                format!("it was made on an image {recorded}, and {parent} is another now");
                            add(OddityKind::ParentReplaced, detail);
                        } else if is_loop(&found.listing, *vdi) {
                            add(OddityKind::ParentLoop, "its parents lead back to itself".to_owned());
                        }
                    }
                }
            }
            if facts.hidden && facts.damage.is_none() && !children.contains_key(vdi) {
                add(OddityKind::BaseUnused, "it is a base copy, and no image is based on it".to_owned());
            }
            // The first thing that is wrong: the others often follow from it.
            if odd.len() == before
                && let Some(refused) = self.refused_twice(ctx, *vdi)
            {
                odd.push(Oddity { kind: OddityKind::ImageDamaged, image: Some(*vdi), file, detail: refused });
            }
        }
        Ok(odd)
    }

    /// What `vhd-util check` says of an image that it refuses, and that no disk writes.
    fn refused_twice(&self, ctx: &dyn Ctx, vdi: Uuid) -> Option<String> {
        if ctx.live(vdi).is_some() || ctx.elsewhere(vdi).is_some() {
            return None;
        }
        let refused = self.refused(ctx, vdi)?;
        // A merge may have been at work on it: what stays wrong is.
        (self.refused(ctx, vdi)? == refused).then_some(refused)
    }

    /// With the lock, because a volume that is open here cannot be taken away. One that cannot be looked at now, or is
    /// gone, is not refused.
    fn refused(&self, ctx: &dyn Ctx, vdi: Uuid) -> Option<String> {
        let _held = self.lock(ctx, Share::Exclusive).ok()?;
        let listed = self.group.list().ok()?;
        let (volume, kind) = listed.image(vdi)?;
        if kind == FileKind::Raw {
            return None;
        }
        let pin = self.pin([volume.name.clone()]);
        self.reach(&listed, [volume.name.as_str()]).ok()?;
        let options =
            CheckOptions { ignore_parent_uuid: true, ignore_timestamps: true, ..CheckOptions::default() };
        let path = self.path(kind, vdi);
        let checked = FileMedium::open(&path, Access::ReadOnly).and_then(|medium| {
            let (report, _) = check_image(&medium, &path, &options)?;
            let first = report.findings.first().map(ToString::to_string);
            Ok::<_, FormatError>(
                (!report.is_valid()).then(|| first.unwrap_or_else(|| "is refused".to_owned())),
            )
        });
        drop(pin);
        self.unreach();
        checked.unwrap_or_else(|error| Some(error.to_string()))
    }
}
