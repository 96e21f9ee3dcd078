//! Disks and VMs that come and go over HTTP: the session, the task, and its end.
//!
//! The data take a socket of their own between the server of the API and the worker of the SR; no call of the API holds
//! a thread for them. A task that a client gave ends with the transfer, whatever became of that.

use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use tapio_model::{ApiError, Asked, Begun, OtherHost, Role, Transfer, TransferPlace, Type, Value};

use crate::call::Call;
use crate::caller::Caller;
use crate::progress::Progress;
use crate::sessions::Session;
use crate::storage::transfer as storage;
use crate::tasks::{Owner, Running, check_owner};
use crate::vms::archive;
use crate::{Toolstack, backup, roles};

/// What a transfer needs.
const LEAST: Role = Role::VmAdmin;

/// The key of `task.other_config` for the byte with which an import of a raw disk can go on after its connection ended.
const RECEIVED: &str = "received";

/// What a transfer needs. A database has the secrets of all SRs, a backup of a host its key and its accounts, and both
/// decide over everything.
fn least(transfer: &Transfer) -> Role {
    match transfer.asked {
        Ok(
            Asked::ExportDatabase
            | Asked::ImportDatabase { .. }
            | Asked::ExportHost
            | Asked::ImportHost { .. },
        ) => Role::PoolAdmin,
        _ => LEAST,
    }
}

fn one(made: &[String]) -> Value {
    made.first().map_or(Value::Void, Value::string)
}

impl Toolstack {
    /// Does a transfer over `data`, and ends its task. `begun` is called once it was accepted, before any data;
    /// `is_taken` waits until the client has taken an export, all but what is held back for the end of the transfer,
    /// and says whether it has.
    ///
    /// # Errors
    /// What was asked for wrongly, `SESSION_INVALID`, `RBAC_PERMISSION_DENIED`, those of the storage.
    pub fn transfer(
        self: &Arc<Self>,
        transfer: &Transfer,
        data: OwnedFd,
        begun: &mut dyn FnMut(Begun),
        is_taken: &dyn Fn() -> bool,
    ) -> Result<(), ApiError> {
        let sent = match &transfer.asked {
            // A look, behind which the transfer itself comes.
            Ok(Asked::Probe { .. }) if self.sessions.lent.has(&transfer.session) => return Ok(()),
            _ => self.sessions.lent.take(&transfer.session),
        };
        let (caller, of_other) = match sent {
            Some(sent) => (sent.caller, sent.task),
            None => {
                let session = self.session_of(&transfer.session)?;
                if let Some(motion) = session.motion() {
                    crate::motion::may_send(&self.db, motion, &transfer.asked)?;
                }
                (session.caller(), None)
            }
        };
        if let Ok(Asked::Probe { vdi }) = &transfer.asked {
            roles::check(&caller, LEAST, "http/put_import_raw_vdi")?;
            return storage::probe(&self.storage, vdi.as_deref());
        }
        let task = self.task_of(transfer, &caller, of_other.as_deref())?;
        // A defect must not leave the task pending.
        let work = AssertUnwindSafe(|| self.run_transfer(transfer, caller, &task, (data, begun, is_taken)));
        let done = std::panic::catch_unwind(work).unwrap_or_else(|_| {
            Err(ApiError::internal("a transfer ended in a defect of ours; the daemon's log has more"))
        });
        let done = done.map_err(|error| self.without_place(&task, error));
        let (value, ty) = match &transfer.asked {
            Ok(Asked::Import { .. }) => (done.as_ref().map(|made| one(made)), Type::Ref("VDI")),
            Ok(Asked::ImportVm { .. } | Asked::ImportMetadata { .. }) => {
                (done.as_ref().map(Value::strings), Type::Set(&Type::Ref("VM")))
            }
            _ => (done.as_ref().map(|_| Value::Void), Type::Void),
        };
        self.tasks.finish(&task, &value.map_err(Clone::clone), ty);
        let is_restore = matches!(
            &transfer.asked,
            Ok(Asked::ImportDatabase { dry_run: false, .. } | Asked::ImportHost { dry_run: false, .. })
        );
        if is_restore && done.is_ok() {
            self.backups.restart();
        }
        done.map(drop)
    }

    /// A session that is open here, and may do transfers.
    fn session_of(&self, session: &str) -> Result<Arc<Session>, ApiError> {
        let reviewed = self.sessions.review();
        let session = self.sessions.enter(session)?;
        session.admit(reviewed)?;
        if session.is_plugins() {
            return Err(ApiError::new("SESSION_INVALID", [session.reference.as_str()]));
        }
        Ok(session)
    }

    /// Whether this host knows others that may have to do a transfer.
    pub fn has_others(&self) -> bool {
        self.pool.is_member()
    }

    /// The host that has to do a transfer, and what the client is to name there as its session; none: this one, which
    /// says then what is wrong with the session, if something is.
    ///
    /// # Errors
    /// `RBAC_PERMISSION_DENIED`, also for a task of another account; the other host's.
    pub fn elsewhere(
        &self,
        session: &str,
        place: &TransferPlace,
        task: Option<&str>,
    ) -> Result<Option<OtherHost>, ApiError> {
        // A client that another host has sent is not sent on: the two see different places for one object.
        if !self.pool.is_member() || self.sessions.lent.has(session) {
            return Ok(None);
        }
        let Ok(session) = self.session_of(session) else { return Ok(None) };
        // A host that sends a VM has named the host that receives it.
        if session.motion().is_some() {
            return Ok(None);
        }
        let caller = session.caller();
        roles::check(&caller, LEAST, "http/elsewhere")?;
        if let Some(task) = task {
            check_owner(&self.tasks, &caller, "task", task)?;
        }
        self.pool.elsewhere(&caller, place, task)
    }

    /// The client's task, or one of ours. The owner of the task `of_other` was looked at by the host that sent the
    /// client.
    fn task_of(
        &self,
        transfer: &Transfer,
        caller: &Caller,
        of_other: Option<&str>,
    ) -> Result<Arc<Running>, ApiError> {
        let account = caller.credential.map(|credential| (caller.user.clone(), credential));
        let owner = Owner { account, needs: least(transfer), visit: None };
        match &transfer.task {
            Some(task) if of_other == Some(task.as_str()) => self.tasks.take_up(task, owner),
            Some(task) => self.tasks.adopt(caller, task, owner),
            None => {
                let label = match transfer.asked {
                    Ok(Asked::Export { .. }) => "VDI export",
                    Ok(Asked::ExportVm { .. }) => "Export of VM",
                    Ok(Asked::ImportVm { .. }) => "VM import",
                    Ok(Asked::ExportMetadata { .. }) => "Export of VM records",
                    Ok(Asked::ImportMetadata { .. }) => "Import of VM records",
                    Ok(Asked::Memory { .. }) => "Memory of a VM",
                    Ok(Asked::ExportDatabase) => "Dump of the database",
                    Ok(Asked::ImportDatabase { .. }) => "Restore of the database",
                    Ok(Asked::ExportHost) => "Backup of the host",
                    Ok(Asked::ImportHost { .. }) => "Restore of the host",
                    _ => "VDI import",
                };
                self.tasks.begin(label, owner, true)
            }
        }
    }

    fn run_transfer(
        self: &Arc<Self>,
        transfer: &Transfer,
        caller: Caller,
        task: &Arc<Running>,
        (data, begun, is_taken): (OwnedFd, &mut dyn FnMut(Begun), &dyn Fn() -> bool),
    ) -> Result<Vec<String>, ApiError> {
        let asked = transfer.asked.as_ref().map_err(Clone::clone)?;
        let name = match asked {
            Asked::Export { .. } => "get_export_raw_vdi",
            Asked::ExportVm { .. } => "get_export",
            Asked::ImportVm { .. } => "put_import",
            Asked::ExportMetadata { .. } => "get_export_metadata",
            Asked::ImportMetadata { .. } => "put_import_metadata",
            Asked::Memory { .. } => "put_receive_memory",
            Asked::ExportDatabase => "get_pool_xml_db_sync",
            Asked::ImportDatabase { .. } => "put_pool_xml_db_sync",
            Asked::ExportHost => "get_host_backup",
            Asked::ImportHost { .. } => "put_host_restore",
            Asked::Import { .. } | Asked::Probe { .. } => "put_import_raw_vdi",
        };
        roles::check(&caller, least(transfer), &format!("http/{name}"))?;
        self.wait_until_recovered();
        if least(transfer) != Role::PoolAdmin {
            self.backups.check()?;
        }
        let part = Arc::clone(&self.storage);
        let call = Call { part, caller, progress: Arc::clone(task) as Arc<dyn Progress> };
        let vms = call.to(&self.vms);
        let reference = task.task().unwrap_or_default().to_owned();
        let mut begun = |vdi: Option<String>| begun(Begun { task: reference.clone(), vdi });
        let done = match asked {
            Asked::Export { .. } => {
                storage::export(&call, asked, data, &mut begun, is_taken).map(|vdi| vec![vdi])
            }
            Asked::Import { .. } => storage::import(&call, asked, data, &mut begun).map(|vdi| vec![vdi]),
            Asked::ExportVm { .. } => {
                archive::export(&vms, asked, data, &mut begun, is_taken).map(|vm| vec![vm])
            }
            Asked::ImportVm { .. } => archive::import(&vms, asked, data, &mut begun),
            Asked::ExportMetadata { vm } => {
                archive::export_metadata(&vms, vm.as_deref(), (data, &mut begun), is_taken)
            }
            Asked::ImportMetadata { .. } => archive::import_metadata(&vms, asked, data, &mut begun),
            Asked::Memory { vm } => {
                begun(None);
                crate::motion::read_memory(&call.to(&self.motions), vm, data).map(|()| Vec::new())
            }
            Asked::ExportDatabase => {
                backup::export(&call.to(&self.backups), (data, &mut begun), is_taken).map(|()| Vec::new())
            }
            Asked::ImportDatabase { dry_run, force } => {
                let how = (*dry_run, *force);
                backup::import(&call.to(&self.backups), how, (data, &mut begun)).map(|()| Vec::new())
            }
            Asked::ExportHost => {
                let call = call.to(&self.backups);
                backup::host::export(&call, (data, &mut begun), is_taken).map(|()| Vec::new())
            }
            Asked::ImportHost { dry_run, force } => {
                let (call, how) = (call.to(&self.backups), (*dry_run, *force));
                backup::host::import(&call, how, (data, &mut begun)).map(|()| Vec::new())
            }
            Asked::Probe { .. } => Ok(Vec::new()),
        };
        done.map_err(|error| match &*error.code {
            // The storage stops for a client that went away as for one that cancels.
            "TASK_CANCELLED" if !call.progress.is_cancelled() => ApiError::internal(
                "the client ended the connection, or took nothing for too long, before the transfer was over",
            ),
            _ => error,
        })
    }

    /// Moves the place at which an import ended from the error to the task.
    fn without_place(&self, task: &Running, error: ApiError) -> ApiError {
        let (Some(place), "IMPORT_ERROR_PREMATURE_EOF") = (error.params.first(), &*error.code) else {
            return error;
        };
        let reference = task.task().unwrap_or_default();
        let noted = self.db.change(|change| {
            let mut config = change.get("task", reference)?.map("other_config");
            config.insert(RECEIVED.to_owned(), place.clone());
            change.set("task", reference, "other_config", Value::string_map(config))
        });
        if let Err(error) = noted {
            tracing::debug!(task = reference, %error, "an interrupted import begins anew");
        }
        ApiError::bare("IMPORT_ERROR_PREMATURE_EOF")
    }
}
