//! Shared SRs are attached on every host; what a host that died left half done on them is finished by another.

use std::collections::BTreeSet;
use std::sync::Arc;

use tapio_model::{ApiError, Value};
use uuid::Uuid;

use super::Pool;
use crate::storage;

/// The note of a host that has just joined.
pub(super) const JOINED: &str = "pool/joined";

impl Pool {
    /// Attaches shared SRs that are new to this host: those that were made since it looked, and all of them when it has
    /// joined. A PBD that an administrator destroyed is not made again.
    pub(super) fn reach_shared_srs(self: &Arc<Self>) {
        let Some(own) = self.db.own_host() else { return };
        let all: BTreeSet<String> =
            self.db.all("SR").iter().filter(|sr| sr.bool("shared")).map(|sr| sr.reference.clone()).collect();
        let has_joined = !self.db.notes(JOINED).is_empty();
        let known = self.known_srs.lock().replace(all.clone());
        let known = known.unwrap_or_else(|| if has_joined { BTreeSet::new() } else { all.clone() });
        for sr in all.difference(&known) {
            let pbds = self.db.find("PBD", "SR", sr);
            if pbds.iter().any(|pbd| pbd.text("host") == own) {
                continue;
            }
            // One that no host has attached is not made completely yet, or not to be attached.
            let Some(other) = pbds.iter().find(|pbd| pbd.bool("currently_attached")) else {
                self.known_srs.lock().get_or_insert_default().remove(sr);
                continue;
            };
            let made = self.db.create(
                "PBD",
                &[
                    ("host", Value::string(own)),
                    ("SR", Value::string(sr.as_str())),
                    ("device_config", other.get("device_config").clone()),
                ],
            );
            match made {
                Ok(pbd) => {
                    let storage = Arc::clone(&self.storage);
                    let plugging = move || {
                        if let Err(error) = storage::plug_pbd(&storage, &pbd) {
                            tracing::warn!(%error, "a shared SR of the pool is not attached here: see to it, then pbd-plug");
                        }
                    };
                    if let Err(error) = std::thread::Builder::new().name("pool-plug".into()).spawn(plugging) {
                        tracing::error!(%error, "no thread attaches a shared SR");
                    }
                }
                Err(error) => tracing::warn!(%error, "a shared SR has no PBD here"),
            }
        }
        if has_joined {
            let done = self.db.change(|change| {
                change.drop_note(JOINED);
                Ok(())
            });
            if let Err(error) = done {
                tracing::warn!(%error, "shared SRs are looked for again");
            }
        }
    }

    /// What a host that died left half done on SRs that are attached here: its journal of them becomes this host's, and
    /// is worked off.
    pub(super) fn finish_for(&self, dead: &Uuid) -> Result<(), ApiError> {
        let is_attached = |sr: &str| self.storage.has_attached(sr);
        let taken = self.db.take_notes_of(*dead, "storage/", |text| {
            storage::sr_of_note(text).is_some_and(|sr| is_attached(&sr))
        })?;
        let srs: BTreeSet<String> = taken.iter().filter_map(|text| storage::sr_of_note(text)).collect();
        for sr in &srs {
            tracing::info!(sr, "what a host that died left half done is finished or undone");
            storage::finish_half_done(&self.storage, sr);
        }
        Ok(())
    }
}
