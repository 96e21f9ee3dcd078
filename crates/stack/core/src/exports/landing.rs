//! Disks of a guest that comes from another host of the pool: its disk process mirrors them onto exports of this host.
//!
//! An export of this kind is written by one client, over TLS with a pre-shared key that only that client is told. Its
//! process is never replaced: what it answered and had not made durable would be lost, and only [`Exports::landed`],
//! which asks this very process, says that all is durable.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use tapio_model::ApiError;
use tapio_types::Access;
use tapio_vm::DiskSpec;
use uuid::Uuid;

use super::Exports;
use super::serve::{START, clear, holder};
use crate::call::Call;
use crate::db::Object;
use crate::disks::{ExportNote, Note, Place, Rights, Tuning};
use crate::storage::relocate::make_whole;
use crate::storage::{self, Storage};

impl Exports {
    /// Exports a VDI that nothing uses for a client that has the key, of hexadecimal digits; the TCP port.
    ///
    /// # Errors
    /// The storage's, the process's; all ports are taken. What there is of it goes by [`Self::end_landing`].
    pub(crate) fn land(
        self: &Arc<Self>,
        call: &Call<Storage>,
        vdi: &Arc<Object>,
        address: IpAddr,
        key: &str,
    ) -> Result<u16, ApiError> {
        let (disks, id, until) = (&self.disks, Uuid::new_v4(), Instant::now() + START);
        let file = disks.key_file(id, key)?;
        let export = ExportNote {
            places: vec![Place { address, secure: true }],
            port: 0,
            tls: file.dir().to_owned(),
            is_written: true,
            client_time_s: 0,
            fronts: Vec::new(),
        };
        let spec = DiskSpec { vbd: id, position: 0, read_only: false, is_cd: false, is_bootable: false };
        let sr = self.db.get("SR", vdi.text("SR"))?;
        let of = (vdi.reference.as_str(), vdi.uuid()?);
        let note = Note::starting(spec, (Uuid::nil(), ""), of, sr.uuid()?, Tuning::default());
        disks.note(Note { export: Some(export), ..note })?;
        disks.start(id, Rights::of(sr.text("type"), false), until)?;
        let opening = storage::activate(call, vdi, &holder(id), Access::ReadWrite)?;
        make_whole(call, &sr.reference, vdi.uuid()?)?;
        disks.open(id, &opening.with, until)?;
        drop(opening);
        let ports = self.options().ports;
        let note = disks.export(id, ports.0..=ports.1, until)?;
        disks.is_running(id)?;
        let port = note.export.map(|export| export.port);
        port.ok_or_else(|| ApiError::internal("an export that is none"))
    }

    /// The client is done: the images are closed, with all that it has written durable, and the export goes.
    ///
    /// # Errors
    /// The VDI has no export, or its process has died since it was made: what it has answered may be lost.
    pub(crate) fn landed(self: &Arc<Self>, vdi: &str) -> Result<(), ApiError> {
        let gone =
            || ApiError::internal(format!("the disk that came as VDI {vdi} has no disk process any more"));
        let id = self.landings(vdi).first().copied().ok_or_else(gone)?;
        self.disks.seal(id, Instant::now() + START)?;
        clear(self, id, vdi)
    }

    /// Ends what there is of such an export; that there is none is fine.
    ///
    /// # Errors
    /// A process does not end, the storage does not answer.
    pub(crate) fn end_landing(self: &Arc<Self>, vdi: &str) -> Result<(), ApiError> {
        self.landings(vdi).into_iter().try_for_each(|id| clear(self, id, vdi))
    }

    fn landings(&self, vdi: &str) -> Vec<Uuid> {
        let is_of =
            |note: &Note| note.vdi == vdi && note.export.as_ref().is_some_and(|export| export.is_written);
        self.disks.exports().iter().filter(|note| is_of(note)).map(|note| note.spec.vbd).collect()
    }
}
