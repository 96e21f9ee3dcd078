//! What is wrong with the volumes of an SR: looked at, never changed.

use tapio_types::ApiError;

use super::VolumeSr;
use crate::lock::Share;
use crate::lvm::journal;
use crate::lvm::names::{self, Role};
use crate::traits::{Ctx, Oddity, OddityKind};

impl VolumeSr {
    pub(super) fn inspect_volumes(&self, ctx: &dyn Ctx) -> Result<Vec<Oddity>, ApiError> {
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
        for (vdi, facts) in &found.listing.images {
            let file = names::volume(facts.kind, *vdi);
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
                        }
                    }
                }
            }
            if facts.hidden && facts.damage.is_none() && !children.contains_key(vdi) {
                add(OddityKind::BaseUnused, "it is a base copy, and no image is based on it".to_owned());
            }
        }
        Ok(odd)
    }
}
