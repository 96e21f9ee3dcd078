//! Disks that are exported by NBD: their front ends, their clients, their names.

use std::time::Instant;

use tapio_control::command::SecretName;
use tapio_model::ApiError;
use tapio_vm::FrontSpec;
use uuid::Uuid;

use super::place::ExportNote;
use super::{Disks, Note, Table, ids, noted, watch};

impl Table {
    pub(super) fn watch_of(&self, note: &Note) -> &watch::Watch {
        if note.export.is_some() { &self.watch_exports } else { &self.watch }
    }

    /// Its process may end.
    pub(super) fn unwatch(&self, vbd: Uuid) {
        self.watch.remove(vbd);
        self.watch_exports.remove(vbd);
    }
}

impl Disks {
    /// The disks that are exported.
    pub(crate) fn exports(&self) -> Vec<Note> {
        self.0.lock().values().filter(|note| note.export.is_some()).cloned().collect()
    }

    /// Exports an open disk as its note says, at the first of `ports` that no other program has; no name is valid yet.
    ///
    /// # Errors
    /// A place cannot be listened on, all ports are taken.
    pub(crate) fn export(
        &self,
        id: Uuid,
        ports: impl Iterator<Item = u16>,
        until: Instant,
    ) -> Result<Note, ApiError> {
        let note = noted(&self.0.lock(), id)?;
        let (process, minor) = ids(&note)?;
        let export = note.export.ok_or_else(|| ApiError::internal(format!("disk {id} is no export")))?;
        let others = self.exports();
        let is_ours =
            |port: u16| others.iter().any(|other| other.export.as_ref().is_some_and(|e| e.port == port));
        for port in ports.filter(|port| !is_ours(*port)) {
            let with = ExportNote { port, ..export.clone() };
            let name = note.vdi_uuid.to_string();
            let Some(fronts) = self.0.backend.export(process, minor, &name, &with, until)? else { continue };
            return self.0.update_of(id, process, |note| {
                note.front = Some(FrontSpec::Nothing);
                note.export = Some(ExportNote { fronts, ..with });
            });
        }
        let why = "no TCP port is free to export a disk; end exports that are not needed, or set nbd-ports of tapiod";
        Err(ApiError::internal(why))
    }

    /// The same for the process that takes the place of one that died: clients know the port.
    pub(super) fn export_again(&self, id: Uuid, export: &ExportNote, until: Instant) -> Result<(), ApiError> {
        let note = noted(&self.0.lock(), id)?;
        let (process, minor) = ids(&note)?;
        let name = note.vdi_uuid.to_string();
        let Some(fronts) = self.0.backend.export(process, minor, &name, export, until)? else {
            return Err(ApiError::internal(format!("another program has taken port {}", export.port)));
        };
        self.0
            .update_of(id, process, |note| note.export = Some(ExportNote { fronts, ..export.clone() }))
            .map(drop)
    }

    /// Says by which names clients may connect from now on; clients that came by a name of `cut` are disconnected.
    ///
    /// # Errors
    /// The process does not answer.
    pub(crate) fn admit(
        &self,
        id: Uuid,
        names: &[SecretName],
        cut: &[SecretName],
        until: Instant,
    ) -> Result<(), ApiError> {
        let note = noted(&self.0.lock(), id)?;
        let (process, minor) = ids(&note)?;
        let fronts = note.export.map(|export| export.fronts).unwrap_or_default();
        self.0.backend.admit(process, minor, &fronts, (names, cut), until)
    }

    /// Closes the images of an export that a client has written: all that was answered is durable then. Only the
    /// process that has answered can say so.
    ///
    /// # Errors
    /// It has died, or does not end its requests: what was answered may be lost.
    pub(crate) fn seal(&self, id: Uuid, until: Instant) -> Result<(), ApiError> {
        let (process, minor) = ids(&noted(&self.0.lock(), id)?)?;
        self.0.backend.pause(process, minor, until)
    }

    /// How many clients an export has.
    ///
    /// # Errors
    /// The process does not answer.
    pub(crate) fn clients(&self, id: Uuid, until: Instant) -> Result<u32, ApiError> {
        let (process, minor) = ids(&noted(&self.0.lock(), id)?)?;
        self.0.backend.clients(process, minor, until)
    }

    /// Waits until the process of an export has ended, at most until `until`, if there is one; none if the wait was
    /// ended by [`Self::look_at_exports`].
    pub(crate) fn wait_for_death_of_export(&self, until: Option<Instant>) -> Option<Uuid> {
        self.0.watch_exports.wait(until)
    }

    /// Ends the wait for the death of one.
    pub(crate) fn look_at_exports(&self) {
        self.0.watch_exports.wake();
    }
}
