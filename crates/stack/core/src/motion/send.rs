//! The host that has the VM: it sends what the VM has, decides, and lets go.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use tapio_model::ApiError;
use tapio_types::ChainSpec;
use uuid::Uuid;

use super::check::{self, Goes, OP, Wish};
use super::notes::{Out, Place};
use super::records::{self, Places};
use super::remote::{self, Remote};
use super::stream::{Rate, Stream};
use super::{Call, finish};
use crate::basics::this_host;
use crate::plan::steps::step;
use crate::storage::archive::{Sources, hold};
use crate::storage::outgoing::{Tree, trees};
use crate::storage::relocate::plan::Op;
use crate::vms::running::Running;

/// Disks that are sent at a time.
const STREAMS: usize = 4;

/// `VM.assert_can_migrate`.
///
/// # Errors
/// Those of [`send`] that are known before anything is sent.
pub(super) fn check(call: &Call, wish: &Wish) -> Result<(), ApiError> {
    is_elsewhere(call, wish)?;
    let (id, place) = remote::place(&wish.dest)?;
    let goes = check::goes(&call.part.db, wish)?;
    let timeout = Duration::from_secs(wish.timeout);
    let remote = Remote::new(call.part.pool.link()?, (id, &place), timeout, &call.progress);
    ask(call, wish, &goes, &remote).map(drop)
}

/// A VM goes to a host that shares no objects with this one.
fn is_elsewhere(call: &Call, wish: &Wish) -> Result<(), ApiError> {
    let host = wish.dest.get("host").map(String::as_str).unwrap_or_default();
    match call.part.db.get("host", host) {
        Err(_) => Ok(()),
        Ok(host) => {
            let why = format!(
                "host {} belongs to this pool: a VM goes there when its disks are on shared SRs, by VM.start_on",
                host.text("name_label")
            );
            Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]))
        }
    }
}

/// Asks the receiver whether it takes the VM; the SRs of all disks.
fn ask(call: &Call, wish: &Wish, goes: &Goes, remote: &Remote) -> Result<BTreeMap<String, String>, ApiError> {
    let question = goes.question(&call.part.db, wish)?;
    let question = serde_json::to_string(&question).map_err(|why| ApiError::internal(why.to_string()))?;
    goes.srs(&remote.ask("check", &[("question", &question)])?)
}

/// `VM.migrate_send` to a host of another pool; the reference of the VM there.
///
/// # Errors
/// What forbids it at either end, what fails on the way: then the VM is here as it was. `VM_MIGRATE_FAILED` of one that
/// is decided and not finished yet.
pub(super) fn send(call: &Call, wish: &Wish) -> Result<String, ApiError> {
    is_elsewhere(call, wish)?;
    let (id, place) = remote::place(&wish.dest)?;
    let mut out = unbegun(id, place, wish.copy, wish.timeout);
    let begun = begin(call, wish, &mut out);
    let (held, goes) = begun.inspect_err(|_| finish::refuse(&call.part, &out))?;
    step("motion-out:noted");
    let timeout = Duration::from_secs(wish.timeout);
    let remote = Remote::new(call.part.pool.link()?, (id, &out.to), timeout, &call.progress);
    let storage = call.to(&call.part.storage);
    let prepared = (|| {
        let srs = ask(call, wish, &goes, &remote)?;
        step("motion-out:checked");
        let disks: Vec<String> = goes.disks.keys().cloned().collect();
        let sources = hold(&storage, &disks)?;
        let images = Copying { call, wish, remote: &remote }.all(&storage, &sources, &srs)?;
        step("motion-out:copied");
        let places = Places { images, networks: goes.networks.clone() };
        let records = records::of_vms(&call.part.db, &goes.vms, &places, wish.copy)?;
        let records = serde_json::to_string(&records).map_err(|why| ApiError::internal(why.to_string()))?;
        remote.ask("prepare", &[("records", &records)])?;
        step("motion-out:prepared");
        if call.progress.is_cancelled() {
            return Err(ApiError::new("TASK_CANCELLED", [call.progress.task().unwrap_or_default()]));
        }
        out.is_decided = true;
        call.part.db.change(|change| out.put(change))?;
        Ok(sources)
    })();
    let mut sources: Sources<'_> = prepared.map_err(|error| {
        out.is_decided = false;
        finish::give_up(&call.part, &out);
        told(call, wish, error)
    })?;
    step("motion-out:decided");
    call.progress.set(0.99);
    let done = finish::commit(&call.part, &out, timeout).and_then(|ended| {
        if let finish::Ended::There(_) = &ended {
            // Until here nothing could write to them.
            sources.close();
            finish::depart(&call.part, &out)?;
        }
        Ok(ended)
    });
    drop(sources);
    match done {
        Ok(finish::Ended::There(vm)) => Ok(vm),
        Ok(finish::Ended::Here(error)) => Err(told(call, wish, error)),
        Err(error) => {
            let name = wish.vm.text("name_label");
            let why = format!(
                "VM {name} is switched over, and {} cannot be told: {error}. It is told when it answers; until then the \
                 VM can be used at neither host",
                out.to.address
            );
            finish::later(&call.part, out, held);
            Err(failed(call, wish, why))
        }
    }
}

/// The note of a motion of which nothing is known yet but its name.
fn unbegun(id: Uuid, to: Place, copy: bool, timeout: u64) -> Out {
    let (vms, vdis) = (Vec::new(), Vec::new());
    Out { id, vms, vdis, to, copy, is_decided: false, is_left: false, timeout }
}

/// Tells a receiver that nothing comes.
pub(super) fn refuse(call: &Call, dest: &BTreeMap<String, String>) {
    if let Ok((id, place)) = remote::place(dest) {
        finish::refuse(&call.part, &unbegun(id, place, false, 1));
    }
}

/// Holds the VM and its snapshots, finds what goes with them, and writes that down.
fn begin(call: &Call, wish: &Wish, out: &mut Out) -> Result<(Vec<Running>, Goes), ApiError> {
    let vms = call.to(&call.part.vms);
    let begun = Running::begin(&vms, "VM", &wish.vm.reference, OP, |_, vm| check::may_go(vm, wish))?;
    let mut held = vec![begun.0];
    let goes = check::goes(&call.part.db, wish)?;
    for snapshot in &goes.vms[1..] {
        held.push(Running::begin(&vms, "VM", snapshot, OP, |_, _| Ok(()))?.0);
    }
    (out.vms, out.vdis) = (goes.vms.clone(), goes.disks.keys().cloned().collect());
    call.part.db.change(|change| out.put(change))?;
    Ok((held, goes))
}

fn failed(call: &Call, wish: &Wish, why: String) -> ApiError {
    let there = wish.dest.get("host").cloned().unwrap_or_default();
    ApiError::new("VM_MIGRATE_FAILED", [wish.vm.reference.clone(), this_host(&call.part.db), there, why])
}

/// Errors of the receiver that mean nothing here name the VM.
fn told(call: &Call, wish: &Wish, error: ApiError) -> ApiError {
    match &*error.code {
        "HANDLE_INVALID" if error.params.first().is_some_and(|class| class == "motion") => failed(
            call,
            wish,
            "the receiver has given it up: it had no word of this host for too long".to_owned(),
        ),
        "INTERNAL_ERROR" | "SESSION_AUTHENTICATION_FAILED" => failed(call, wish, error.to_string()),
        _ => error,
    }
}

/// The copy of all disks.
struct Copying<'a> {
    call: &'a Call,
    wish: &'a Wish,
    remote: &'a Remote,
}

impl Copying<'_> {
    /// Copies all trees, some at a time; the images that the disks have become.
    fn all(
        &self,
        storage: &crate::call::Call<crate::storage::Storage>,
        sources: &Sources<'_>,
        srs: &BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, Uuid>, ApiError> {
        let trees = trees(storage, sources, srs)?;
        let _idle: Vec<_> = trees.iter().map(|tree| tree.hold_off(&self.call.part.storage)).collect();
        let rate = Rate::new(self.wish.rate);
        let all = trees.iter().map(|tree| tree.plan.bytes).sum::<u64>().max(1);
        let parts = Mutex::new(vec![0.0_f64; trees.len()]);
        let told = |at: usize, bytes: f64| {
            let mut parts = parts.lock();
            parts[at] = bytes;
            self.call.progress.set((parts.iter().sum::<f64>() / all as f64).min(1.0) * 0.97);
        };
        let (next, first) = (AtomicUsize::new(0), Mutex::new(None));
        let images = Mutex::new(BTreeMap::new());
        thread::scope(|scope| {
            for _ in 0..STREAMS.min(trees.len()) {
                scope.spawn(|| {
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        let Some(tree) = trees.get(at).filter(|_| first.lock().is_none()) else { return };
                        match self.tree(storage, tree, &rate, &|bytes| told(at, bytes)) {
                            Ok(made) => images.lock().extend(made),
                            Err(error) => {
                                let _ = first.lock().get_or_insert(error);
                            }
                        }
                    }
                });
            }
        });
        match first.into_inner() {
            Some(error) => Err(error),
            None => Ok(images.into_inner()),
        }
    }

    /// Makes and fills the images of a tree.
    fn tree(
        &self,
        storage: &crate::call::Call<crate::storage::Storage>,
        tree: &Tree,
        rate: &Rate,
        told: &(dyn Fn(f64) + Sync),
    ) -> Result<BTreeMap<String, Uuid>, ApiError> {
        // The plan draws names; the receiver draws its own.
        let mut known: BTreeMap<Uuid, String> = BTreeMap::new();
        let of = |known: &BTreeMap<Uuid, String>, image: &Uuid| {
            known.get(image).cloned().ok_or_else(|| ApiError::internal("an image is used before it is made"))
        };
        let name = tree.members.first().and_then(|vdi| self.call.part.db.get("VDI", vdi).ok());
        let name = name.map(|vdi| vdi.text("name_label").to_owned()).unwrap_or_default();
        let mut done = 0.0;
        for op in &tree.plan.ops {
            if self.call.progress.is_cancelled() {
                let task = self.call.progress.task().unwrap_or_default();
                return Err(ApiError::new("TASK_CANCELLED", [task]));
            }
            match op {
                Op::Create { image, size, is_raw } => {
                    let kind = if *is_raw { "raw" } else { "" };
                    let size = size.to_string();
                    let args = [("sr", tree.to.as_str()), ("size", &size), ("kind", kind), ("name", &name)];
                    known.insert(*image, made(&self.remote.ask("create", &args)?)?);
                }
                Op::Grow { image, size } => {
                    let (vdi, size) = (of(&known, image)?, size.to_string());
                    self.remote.ask("grow", &[("vdi", &vdi), ("size", &size)])?;
                }
                Op::Fork { image, new } => {
                    let vdi = of(&known, image)?;
                    known.insert(*new, made(&self.remote.ask("fork", &[("vdi", &vdi)])?)?);
                }
                Op::Fill { image, from, base, bytes } => {
                    let (vdi, bytes) = (of(&known, image)?, *bytes as f64);
                    let here = |fraction: f64| told(done + bytes * fraction);
                    let from: (&ChainSpec, Option<&ChainSpec>) = (from, base.as_ref());
                    let stream = Stream {
                        call: storage,
                        remote: self.remote,
                        rate,
                        tree,
                        from,
                        vdi: &vdi,
                        told: &here,
                    };
                    stream.send()?;
                    done += bytes;
                    told(done);
                }
            }
        }
        let each = tree.members.iter().zip(&tree.plan.places).map(|(vdi, place)| {
            let image = of(&known, &place.image)?;
            let image =
                Uuid::parse_str(&image).map_err(|_| ApiError::internal("a disk has no UUID there"))?;
            Ok((vdi.clone(), image))
        });
        each.collect()
    }
}

/// The disk that the receiver made.
fn made(answer: &BTreeMap<String, String>) -> Result<String, ApiError> {
    answer.get("vdi").cloned().ok_or_else(|| ApiError::internal("the receiver names no disk that it made"))
}
