//! At start: drivers get their records, what a killed daemon left half done is finished or undone, and SRs that were
//! attached are attached again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};
use tapio_sm::worker::is_unfinished;
use uuid::Uuid;

use super::attached::Attached;
use super::notes::{self, Note};
use super::records::{self, Alert};
use super::vdi::{Subject, gone_bases, remove_image, remove_records};
use super::work::{Work, is_missing};
use super::{Storage, allowed, copy, own_call, plug, sr, this_host};
use crate::Toolstack;
use crate::call::Call;
use crate::db::reference_of;

/// How long an SR whose storage hung is left alone before it is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// SRs that are not in order yet; see [`recover`].
#[derive(Debug, Default)]
pub(super) struct Recovering {
    /// Their references.
    left: Mutex<BTreeSet<String>>,
    changed: Condvar,
}

impl Recovering {
    fn left(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self, sr: &str) {
        self.left().remove(sr);
        self.changed.notify_all();
    }

    /// Waits until `are_over` of those that are left; answers whether that came in time.
    fn wait(&self, until: Option<Instant>, are_over: impl Fn(&BTreeSet<String>) -> bool) -> bool {
        let mut left = self.left();
        while !are_over(&left) {
            let patience = until.map_or(AGAIN, |until| until.saturating_duration_since(Instant::now()));
            if patience.is_zero() {
                return false;
            }
            left = self.changed.wait_timeout(left, patience).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Storage {
    /// Whether the SR is still to be attached after this start.
    pub fn is_recovering(&self, sr: &str) -> bool {
        self.recovering.left().contains(sr)
    }

    /// Waits until the start has attached an SR, or given up.
    pub fn wait_until_recovered(&self, sr: &str) {
        self.recovering.wait(None, |left| !left.contains(sr));
    }
}

/// Makes the records true before the first call: drivers are known, so is who has VDIs open, and no SR is attached yet.
/// Touches no storage. Disk processes that run must be known by now.
///
/// # Errors
/// The store's.
pub fn open(stack: &Arc<Toolstack>) -> Result<(), ApiError> {
    let (db, storage, call) = (&stack.db, &stack.storage, own_call(stack));
    storage.record_drivers(db)?;
    let notes = notes::all(db);
    for note in &notes {
        if let Note::Holder { vdi, holder, access } = note {
            storage.put_holder(vdi, holder, Some(*access));
        }
    }
    let mut wanted = wanted(&call, &notes);
    wanted.retain(|pbd| {
        let sr = db.get("PBD", pbd).map(|pbd| pbd.text("SR").to_owned());
        sr.is_ok_and(|sr| !storage.gate.state().attached.contains_key(&sr))
    });
    db.change(|change| {
        for pbd in &wanted {
            Note::PbdWanted { pbd: pbd.clone() }.put(change)?;
            change.set("PBD", pbd, "currently_attached", false)?;
        }
        for known in change.all("SR") {
            allowed::refresh_all(storage, change, &known.reference)?;
        }
        Ok(())
    })
}

/// Brings storage into the state that the database says, after [`open`]: each SR on a thread of its own, because any of
/// them may hang. Returns when all are in order, and at `until` with those that are not yet left to their threads.
/// An SR that cannot be attached is a message to the administrator, and is tried again at the next start; one that
/// hangs, and one that was being made, unplugged or destroyed, is tried again until that is done.
///
/// # Errors
/// The store's.
pub fn recover(stack: &Arc<Toolstack>, until: Instant) -> Result<(), ApiError> {
    let (db, storage, call) = (&stack.db, &stack.storage, own_call(stack));
    let notes = notes::all(db);
    let mut jobs: BTreeMap<String, Vec<Job>> = BTreeMap::new();
    let sr_of =
        |pbd: &str| db.get("PBD", pbd).map_or_else(|_| pbd.to_owned(), |pbd| pbd.text("SR").to_owned());
    for note in &notes {
        let (sr, job) = match note {
            Note::SrCreate(new) => (reference_of(new.uuid), Job::Create(new.clone())),
            Note::SrDestroy { sr } => (sr.clone(), Job::Destroy(sr.clone())),
            Note::PbdUnplug { pbd } => (sr_of(pbd), Job::Unplug(note.clone(), pbd.clone())),
            _ => continue,
        };
        jobs.entry(sr).or_default().push(job);
    }
    for pbd in wanted(&call, &notes) {
        jobs.entry(sr_of(&pbd)).or_default().push(Job::Plug(pbd));
    }
    storage.recovering.left().extend(jobs.keys().cloned());
    for (sr, jobs) in jobs {
        spawn(stack, sr, move |call| jobs.iter().for_each(|job| until_done(call, job)));
    }
    let is_all = storage.recovering.wait(Some(until), BTreeSet::is_empty);
    if !is_all {
        let left: Vec<_> = storage.recovering.left().iter().cloned().collect();
        tracing::warn!(?left, "some SRs are not attached yet; all else goes on without them");
    }
    forget_notes_of_gone_srs(&call)?;
    // Last, because source and target may be on different SRs.
    for note in notes.into_iter().filter(|note| matches!(note, Note::CopyInto { .. })) {
        if is_all {
            copy::resume(stack, &note);
            continue;
        }
        let stack = Arc::clone(stack);
        let later = move || {
            stack.storage.recovering.wait(None, BTreeSet::is_empty);
            copy::resume(&stack, &note);
        };
        if let Err(error) = std::thread::Builder::new().name("copy-later".to_owned()).spawn(later) {
            tracing::error!(%error, "a copy that was interrupted waits for the next start");
        }
    }
    db.change(|change| {
        for known in change.all("SR") {
            allowed::refresh_all(storage, change, &known.reference)?;
        }
        Ok(())
    })
}

/// Works on an SR that is among those that are left.
fn spawn(stack: &Arc<Toolstack>, sr: String, work: impl FnOnce(&Call) + Send + 'static) {
    let (of, same) = (sr.clone(), Arc::clone(stack));
    let working = std::thread::Builder::new().name("sr-recovery".to_owned()).spawn(move || {
        work(&own_call(&same));
        same.storage.recovering.is_over(&of);
    });
    if let Err(error) = working {
        tracing::error!(sr, %error, "no thread to put an SR in order: it waits for the next start");
        stack.storage.recovering.is_over(&sr);
    }
}

/// What is to be done with one SR; each may wait for its storage.
pub(super) enum Job {
    Create(notes::NewSr),
    Destroy(String),
    Unplug(Note, String),
    Plug(String),
}

impl Job {
    /// Whether it is not done at once where it fails, but stays noted until it is.
    fn note(&self) -> Option<Note> {
        match self {
            Self::Create(new) => Some(Note::SrCreate(new.clone())),
            Self::Destroy(sr) => Some(Note::SrDestroy { sr: sr.clone() }),
            Self::Unplug(note, _) => Some(note.clone()),
            Self::Plug(_) => None,
        }
    }

    fn run(&self, call: &Call) -> Result<(), ApiError> {
        match self {
            Self::Create(new) => sr::finish_create(call, new),
            Self::Destroy(sr) => sr::finish_destroy(call, sr),
            Self::Unplug(note, pbd) => finish_unplug(call, note, pbd),
            Self::Plug(pbd) => {
                plug_until_answered(call, pbd);
                Ok(())
            }
        }
    }
}

/// Does a job again and again, until it is done or what it is about is gone.
fn until_done(call: &Call, job: &Job) {
    let mut is_told = false;
    while let Err(error) = job.run(call) {
        if !is_told {
            tracing::error!(note = ?job.note(), %error, "what was half done with an SR is tried until it is done");
            is_told = true;
        }
        std::thread::sleep(AGAIN);
        if job.note().is_some_and(|note| !notes::all(&call.stack.db).contains(&note)) {
            return;
        }
    }
}

/// Does a job of an operation that was broken off, from a moment later on, until it is done.
pub(super) fn later(call: &Call, sr: &str, job: Job) {
    if call.stack.storage.recovering.left().insert(sr.to_owned()) {
        spawn(&call.stack, sr.to_owned(), move |call| {
            std::thread::sleep(AGAIN);
            until_done(call, &job);
        });
    }
}

/// Plugs a PBD; where its storage hangs, again and again, until it answers or the PBD is not wanted any more.
fn plug_until_answered(call: &Call, pbd: &str) {
    let note = Note::PbdWanted { pbd: pbd.to_owned() };
    let mut is_told = false;
    loop {
        // It may have gone with an SR that was being destroyed.
        if call.stack.db.get("PBD", pbd).is_err() {
            return;
        }
        let Err(error) = plug::plug(call, pbd) else { return };
        if !is_told {
            tell(call, pbd, &error);
            is_told = true;
        }
        if !is_unfinished(&error) {
            return;
        }
        std::thread::sleep(AGAIN);
        if !notes::all(&call.stack.db).contains(&note) {
            return;
        }
    }
}

/// PBDs of this host that were attached, or were about to be.
fn wanted(call: &Call, notes: &[Note]) -> Vec<String> {
    let host = this_host(&call.stack.db);
    let noted = |reference: &str| {
        notes.iter().any(|note| match note {
            Note::PbdPlug { pbd } | Note::PbdWanted { pbd } => pbd == reference,
            _ => false,
        })
    };
    let here = call.stack.db.all("PBD").into_iter().filter(|pbd| pbd.text("host") == host);
    let wanted = here.filter(|pbd| pbd.bool("currently_attached") || noted(&pbd.reference));
    wanted.map(|pbd| pbd.reference.clone()).collect()
}

/// Tells the administrator of an SR that is not attached; the note that it is wanted stays.
fn tell(call: &Call, pbd: &str, error: &ApiError) {
    let db = &call.stack.db;
    let sr = db.get("PBD", pbd).and_then(|pbd| db.get("SR", pbd.text("SR")));
    let (uuid, name) =
        sr.map(|sr| (sr.text("uuid").to_owned(), sr.text("name_label").to_owned())).unwrap_or_default();
    let body = format!(
        "SR '{name}' ({uuid}) could not be attached at start: {error}. Its disks cannot be used; see to the storage, \
         then pbd-plug. The next start tries again; a storage that hangs is tried until it answers."
    );
    Alert { name: "PBD_PLUG_FAILED_ON_SERVER_START", priority: 3, class: "SR", about: &uuid }
        .post(&call.stack, &body);
}

/// The SR may still be mounted, or not any more: afterwards it is not.
fn finish_unplug(call: &Call, note: &Note, pbd: &str) -> Result<(), ApiError> {
    let db = &call.stack.db;
    let Ok(record) = db.get("PBD", pbd) else { return drop_note(call, note) };
    let known = db.get("SR", record.text("SR"))?;
    let driver = call.stack.storage.driver(known.text("type"))?;
    let config = record.map("device_config");
    match plug::attach(call, &driver, known.uuid()?, &known.reference, &config) {
        Ok(attached) => plug::detach(call, &attached)?,
        Err(error) if is_unfinished(&error) => return Err(error),
        Err(error) => tracing::info!(pbd, %error, "an SR that was being detached is gone"),
    }
    db.change(|change| {
        note.drop_from(change);
        change.set("PBD", pbd, "currently_attached", false)
    })
}

/// Finishes or undoes what was half done with images of an SR that is attached now.
pub(super) fn images(call: &Call, attached: &Attached) {
    let here = notes::all(&call.stack.db).into_iter();
    for note in here.filter(|note| note.sr() == Some(attached.reference.as_str())) {
        if let Err(error) = image(call, attached, &note) {
            tracing::error!(?note, %error, "what was half done stays so until the SR is attached again");
        }
    }
}

pub(super) fn image(call: &Call, attached: &Attached, note: &Note) -> Result<(), ApiError> {
    let db = &call.stack.db;
    let _changing = attached.changing();
    match note {
        // Something of this daemon's own that runs.
        Note::ImageMade { image, .. } if attached.is_building(*image) => Ok(()),
        Note::ImageMade { image, .. } => {
            if db.get("VDI", &reference_of(*image)).is_err() {
                remove_image(call, attached, *image)?;
            }
            drop_note(call, note)
        }
        Note::VdiDestroy { vdi, .. } => {
            let Ok(record) = db.get("VDI", vdi) else { return drop_note(call, note) };
            remove_image(call, attached, record.uuid()?)?;
            let subject = Subject::find_at_all(call, vdi)?;
            let gone = gone_bases(call, &subject);
            let sizes = attached.measure(&Work::new(call));
            db.change(|change| {
                note.drop_from(change);
                remove_records(change, &subject, &gone, sizes)
            })
        }
        Note::Introduce { image, fields, .. } => introduced(call, attached, note, *image, fields),
        _ => Ok(()),
    }
}

fn introduced(
    call: &Call,
    attached: &Attached,
    note: &Note,
    image: Uuid,
    fields: &BTreeMap<String, String>,
) -> Result<(), ApiError> {
    let db = &call.stack.db;
    let info = match attached.with(|sr| sr.vdi(&Work::new(call), image)) {
        Ok(info) => info,
        Err(error) if is_missing(&error) => return drop_note(call, note),
        Err(error) => return Err(error),
    };
    db.change(|change| {
        note.drop_from(change);
        if change.get("VDI", &reference_of(image)).is_ok() {
            return Ok(());
        }
        let text = |field: &str| Value::string(fields.get(field).cloned().unwrap_or_default());
        let names = vec![("name_label", text("name_label")), ("name_description", text("name_description"))];
        records::create(change, &attached.reference, &info, names).map(drop)
    })
}

fn drop_note(call: &Call, note: &Note) -> Result<(), ApiError> {
    call.stack.db.change(|change| {
        note.drop_from(change);
        Ok(())
    })
}

/// Notes about images of an SR that has no record any more can say nothing.
fn forget_notes_of_gone_srs(call: &Call) -> Result<(), ApiError> {
    let db = &call.stack.db;
    let known = notes::all(db);
    let gone = known.iter().filter(|note| note.sr().is_some_and(|sr| db.get("SR", sr).is_err()));
    let gone: Vec<_> = gone.collect();
    db.change(|change| {
        gone.iter().for_each(|note| note.drop_from(change));
        Ok(())
    })
}
