//! The end of a motion at the host that sends, also after a kill: the VM is at one host, and what is left goes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tapio_model::ApiError;

use super::check::OP;
use super::notes::{In, Out};
use super::remote::{Remote, is_passing};
use super::{Call, Motions};
use crate::db::Db;
use crate::operations::{Held, on_vdi};
use crate::plan::steps::step;
use crate::progress::{Progress, Unwatched};
use crate::storage::outgoing;
use crate::vms::running::Running;
use crate::vms::vm;

/// How long the receiver is asked at once.
const AT_ONCE: Duration = Duration::from_secs(3);

/// How often it is asked later.
const LATER: Duration = Duration::from_secs(5);

/// Where a VM is in the end.
pub(super) enum Ended {
    /// At the receiver; the VM's reference there.
    There(String),
    /// Here, because the receiver refused it.
    Here(ApiError),
}

/// Whether the receiver says that it has no such motion.
fn is_unknown(error: &ApiError) -> bool {
    error.code == "HANDLE_INVALID" && error.params.first().is_some_and(|class| class == "motion")
}

fn remote(motions: &Motions, out: &Out, timeout: Duration) -> Result<Remote, ApiError> {
    // What is decided is not cancelled, and what is given up is not given up twice.
    let progress: Arc<dyn Progress> = Arc::new(Unwatched::default());
    Ok(Remote::new(motions.pool.link()?, (out.id, &out.to), timeout, &progress))
}

/// Has the receiver make the VM.
///
/// # Errors
/// The receiver does not answer: nothing is known, and the same is to be done again.
pub(super) fn commit(motions: &Arc<Motions>, out: &Out, timeout: Duration) -> Result<Ended, ApiError> {
    let remote = remote(motions, out, timeout)?;
    match remote.ask("commit", &[]) {
        Ok(answer) => Ok(Ended::There(answer.get("vm").cloned().unwrap_or_default())),
        Err(error) if is_passing(&error) => Err(error),
        // An administrator has ended it there: it was not committed, or it would be known.
        Err(error) if is_unknown(&error) => {
            forget(motions, out)?;
            Ok(Ended::Here(error))
        }
        // It has changed nothing, and does nothing that it is not asked for: it may be asked to forget all of it.
        Err(error) => match remote.ask("abort", &[])?.get("vm") {
            Some(there) => Ok(Ended::There(there.clone())),
            None => {
                tracing::error!(motion = %out.id, %error, "the receiver refuses a VM that it had agreed to");
                forget(motions, out)?;
                Ok(Ended::Here(error))
            }
        },
    }
}

/// Lets a VM go that the receiver has made.
///
/// # Errors
/// The store's: nothing has changed, and the same is to be done again.
pub(super) fn depart(motions: &Arc<Motions>, out: &Out) -> Result<(), ApiError> {
    step("motion-out:committed");
    leave(motions, out)?;
    step("motion-out:left");
    if let Err(error) = end(motions, out, AT_ONCE) {
        tracing::info!(motion = %out.id, %error, "the receiver does not know yet that all is over");
        end_later(motions, out.clone());
    }
    Ok(())
}

fn complete(motions: &Arc<Motions>, out: &Out, timeout: Duration) -> Result<Ended, ApiError> {
    let ended = commit(motions, out, timeout)?;
    if let Ended::There(_) = &ended {
        depart(motions, out)?;
    }
    Ok(ended)
}

/// Has the receiver forget a motion that is over.
fn end(motions: &Motions, out: &Out, timeout: Duration) -> Result<(), ApiError> {
    match remote(motions, out, timeout)?.ask("end", &[]) {
        Ok(_) => forget(motions, out),
        // It has forgotten it.
        Err(error) if is_unknown(&error) => forget(motions, out),
        Err(error) => Err(error),
    }
}

fn end_later(motions: &Arc<Motions>, out: Out) {
    let motions = Arc::downgrade(motions);
    spawn(move || {
        loop {
            std::thread::sleep(LATER);
            let Some(motions) = motions.upgrade() else { return };
            if end(&motions, &out, AT_ONCE).is_ok() {
                return;
            }
        }
    });
}

fn forget(motions: &Motions, out: &Out) -> Result<(), ApiError> {
    motions.db.change(|change| {
        out.drop_from(change);
        Ok(())
    })
}

/// Removes the VM, its snapshots and its disks here, unless it was copied.
fn leave(motions: &Arc<Motions>, out: &Out) -> Result<(), ApiError> {
    let db = &motions.db;
    let stays = out.copy;
    let disks = out.vdis.iter().filter(|_| !stays).filter_map(|vdi| db.get("VDI", vdi).ok());
    let disks: Vec<_> = disks.collect();
    db.change(|change| {
        for reference in out.vms.iter().filter(|_| !stays) {
            if let Ok(vm) = change.get("VM", reference) {
                vm::remove_in(change, &vm)?;
            }
        }
        for vdi in &disks {
            outgoing::leaves(change, vdi)?;
        }
        Out { is_left: true, ..out.clone() }.put(change)
    })?;
    vm::keep_only_known(&motions.vms);
    let call = Call::own(motions).to(&motions.storage);
    outgoing::remove(&call, &disks);
    Ok(())
}

/// The VM stays here: the receiver removes what came. Where it does not answer it is told later.
pub(super) fn give_up(motions: &Arc<Motions>, out: &Out) {
    // It may say decided in the store, if that change was refused.
    if let Err(error) = abort(motions, out, AT_ONCE) {
        tracing::warn!(motion = %out.id, %error, "what was sent stays at the receiver until it answers");
        let (motions, out) = (Arc::downgrade(motions), out.clone());
        spawn(move || {
            loop {
                std::thread::sleep(LATER);
                let Some(motions) = motions.upgrade() else { return };
                if !out.is_noted(&motions.db) || abort(&motions, &out, AT_ONCE).is_ok() {
                    return;
                }
            }
        });
    }
}

/// A motion is over before it has begun.
pub(super) fn refuse(motions: &Arc<Motions>, out: &Out) {
    if let Err(error) = abort(motions, out, AT_ONCE) {
        tracing::info!(motion = %out.id, %error, "the receiver waits for a motion that does not come");
    }
}

fn abort(motions: &Arc<Motions>, out: &Out, timeout: Duration) -> Result<(), ApiError> {
    match remote(motions, out, timeout)?.ask("abort", &[]) {
        Ok(answer) => {
            if answer.contains_key("vm") {
                tell_of_two(motions, out);
            }
            forget(motions, out)
        }
        Err(error) if is_unknown(&error) => forget(motions, out),
        Err(error) => Err(error),
    }
}

/// The receiver has the VM although this host did not decide so: an administrator did, there.
fn tell_of_two(motions: &Motions, out: &Out) {
    let vm = out.vms.first().and_then(|vm| motions.db.get("VM", vm).ok());
    let (uuid, name) =
        vm.map(|vm| (vm.text("uuid").to_owned(), vm.text("name_label").to_owned())).unwrap_or_default();
    let body = format!(
        "VM '{name}' was made at {} by an administrator (host-motion-end) while this host was away, and is here too. Use \
         one of them alone, and destroy the other",
        out.to.address
    );
    tracing::error!(motion = %out.id, "{body}");
    if let Err(error) = crate::tell(&motions.db, "VM_AT_TWO_HOSTS", 1, "VM", &uuid, &body) {
        tracing::warn!(%error, "the message VM_AT_TWO_HOSTS could not be kept");
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) {
    if let Err(error) = std::thread::Builder::new().name("motion".to_owned()).spawn(work) {
        tracing::error!(%error, "no thread: a motion waits for the next start");
    }
}

/// Completes a motion that is decided, for as long as it takes; the VM cannot be used meanwhile.
pub(super) fn later(motions: &Arc<Motions>, out: Out, held: Vec<Running>) {
    let disks = hold_disks(motions, &out);
    let motions = Arc::downgrade(motions);
    spawn(move || {
        let _held = (held, disks);
        loop {
            let Some(motions) = motions.upgrade() else { return };
            match complete(&motions, &out, AT_ONCE) {
                Ok(Ended::There(_)) => {
                    tracing::info!(motion = %out.id, "a VM that was switched over is at its new host");
                    return;
                }
                Ok(Ended::Here(error)) => {
                    tracing::warn!(motion = %out.id, %error, "a VM that was switched over is refused, and stays here");
                    return;
                }
                Err(error) => {
                    tracing::warn!(motion = %out.id, %error, "the new host of a VM does not answer");
                }
            }
            drop(motions);
            std::thread::sleep(LATER);
        }
    });
}

/// Nothing else uses the disks of a VM that is decided.
fn hold_disks(motions: &Motions, out: &Out) -> Option<Held> {
    if out.copy {
        return None;
    }
    let targets: Vec<_> = out.vdis.iter().map(|vdi| on_vdi(vdi, "destroy")).collect();
    let held = motions.operations.enter(&Unwatched::default(), &targets, || Ok(()));
    held.inspect_err(|error| tracing::warn!(motion = %out.id, %error, "disks of a VM that goes are in use"))
        .ok()
}

/// Goes on with the motions of an earlier daemon: what is decided is completed, the rest is given up.
///
/// # Errors
/// The store's.
pub(super) fn recover(motions: &Arc<Motions>) -> Result<(), ApiError> {
    for out in Out::all(&motions.db) {
        if out.is_left {
            end_later(motions, out);
            continue;
        }
        if !out.is_decided {
            let motions = Arc::clone(motions);
            spawn(move || give_up(&motions, &out));
            continue;
        }
        let vms = Call::own(motions).to(&motions.vms);
        let known = out.vms.iter().filter(|vm| !out.copy && motions.db.get("VM", vm).is_ok());
        let held: Result<Vec<_>, ApiError> =
            known.map(|vm| Ok(Running::begin(&vms, "VM", vm, OP, |_, _| Ok(()))?.0)).collect();
        later(motions, out, held?);
    }
    Ok(())
}

/// The motions that this host knows of.
pub(super) fn told(db: &Db) -> BTreeMap<String, String> {
    let out = Out::all(db).into_iter().map(|out| {
        let name = out.vms.first().and_then(|vm| db.get("VM", vm).ok());
        let name = name.map(|vm| vm.text("name_label").to_owned()).unwrap_or_default();
        let phase = match (out.is_decided, out.is_left) {
            (_, true) => "over",
            (true, _) => "decided",
            _ => "sending",
        };
        (out.id.to_string(), format!("to {}: {phase}, VM {name}", out.to.address))
    });
    let came = In::all(db).into_iter().map(|came| {
        let phase = format!("{:?}", came.phase).to_lowercase();
        (came.id.to_string(), format!("to this host: {phase}"))
    });
    out.chain(came).collect()
}
