//! Storages that are full, fail and hang, and for how long they do.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::Duration;

use tapio_e2e::faulty::Faulty;
use tapio_e2e::process::poll_until;

use super::MIB;
use super::changes::{SETTLE_LIMIT, commit_inner, snapshot};
use super::storage::Storage;
use super::subject::{Outcome, Subject};
use crate::load::Trouble;

/// Takes the space of a file system but for `rest` bytes.
fn fill_up(path: &Path, rest: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    let block = vec![1; 256 << 10];
    let mut len: u64 = 0;
    loop {
        match file.write(&block) {
            Ok(written) => len += written as u64,
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => break,
            Err(error) => return Err(error),
        }
    }
    file.set_len(len.saturating_sub(rest))
}

/// Bytes that a file system has left.
fn room(path: &Path) -> std::io::Result<u64> {
    let facts = rustix::fs::statfs(path)?;
    Ok(facts.f_bavail * facts.f_bsize as u64)
}

/// The file system is full for a while, and has space again.
pub fn full(subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
    let Storage::Small(small) = storage else { return Ok(()) };
    let ballast = small.path().join("ballast");
    subject.target.troubles.begin(Trouble::NoSpace);
    let rest = subject.random.below(4 * MIB);
    fill_up(&ballast, rest).map_err(|error| subject.finding(format!("the ballast: {error}")))?;
    subject.moment(1500);
    match subject.random.below(4) {
        0 => snapshot(subject, storage)?,
        1 => commit_inner(subject, storage)?,
        2 => {
            subject.kill();
            subject.start()?;
            subject.report.done("kill on a full storage");
        }
        _ => {}
    }
    subject.moment(500);
    // Without requests, so that nothing but the ballast changes how much room there is.
    let gate = subject.target.gate.write().expect("no holder panics");
    let wrong = |what: &str, error: std::io::Error| subject.finding(format!("{what}: {error}"));
    let free = |subject: &Subject<'_>| room(small.path()).map_err(|error| subject.finding(error.to_string()));
    let before = free(subject)?;
    let taken = fs::metadata(&ballast).map_err(|error| wrong("the ballast", error))?.len();
    fs::remove_file(&ballast).map_err(|error| wrong("the ballast", error))?;
    // The kernel gives the pages back after the file has gone. What the disk process takes meanwhile for what it was
    // told before is less than a block or two.
    let enough = before + taken.saturating_sub(4 * MIB);
    if poll_until(SETTLE_LIMIT, || room(small.path()).ok().filter(|free| *free >= enough)).is_none() {
        return Err(
            subject.finding(format!("no {enough} bytes are free, {SETTLE_LIMIT:?} after the ballast went"))
        );
    }
    works_again(subject, "the file system was full")?;
    subject.target.troubles.end(Trouble::NoSpace);
    drop(gate);
    subject.report.done("full storage");
    Ok(())
}

/// Waits until the kernel has nothing more of the requests of a fault, and has clients expect success again.
fn settle(subject: &mut Subject<'_>) -> Outcome {
    let gate = subject.target.gate.write().expect("no holder panics");
    let settled = poll_until(SETTLE_LIMIT, || (subject.counter("reqs_outstanding") == Some(0)).then_some(()));
    if settled.is_none() {
        return Err(subject.finding(format!("requests of a fault are not over after {SETTLE_LIMIT:?}")));
    }
    works_again(subject, "a fault")?;
    subject.target.troubles.end(Trouble::Fault);
    drop(gate);
    Ok(())
}

/// A flush that fails once more is the last echo of a trouble: what it could not write is written by the next. Until
/// one works, the trouble is not over.
fn works_again(subject: &Subject<'_>, trouble: &str) -> Outcome {
    let flushed = poll_until(SETTLE_LIMIT, || {
        let mut client = crate::load::connect(&subject.target.socket).ok()?;
        client.flush().ok()
    });
    flushed.ok_or_else(|| subject.finding(format!("no flush works for {SETTLE_LIMIT:?} after {trouble}")))
}

/// Reads and writes fail for a while.
pub fn errors(subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
    let Storage::Faulty(faulty, _) = storage else { return Ok(()) };
    subject.target.troubles.begin(Trouble::Fault);
    faulty.fail(true);
    subject.moment(1500);
    faulty.fail(false);
    settle(subject)?;
    subject.report.done("EIO of the storage");
    Ok(())
}

/// Flushes fail for a while.
pub fn flush_errors(subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
    let Storage::Faulty(faulty, _) = storage else { return Ok(()) };
    subject.target.troubles.begin(Trouble::Fault);
    faulty.fail_flushes(true);
    subject.moment(1500);
    faulty.fail_flushes(false);
    settle(subject)?;
    subject.report.done("EIO of flushes");
    Ok(())
}

/// A storage that hangs until this is dropped, so that nothing waits for ever for a process that the kernel holds.
struct Hang<'a>(&'a Faulty);

impl<'a> Hang<'a> {
    fn begin(faulty: &'a Faulty) -> Self {
        faulty.hang(true);
        Self(faulty)
    }
}

impl Drop for Hang<'_> {
    fn drop(&mut self) {
        self.0.hang(false);
    }
}

/// The process is killed while its storage hangs; its successor comes when the storage answers again, or before.
pub fn kill_in_hang(subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
    let Storage::Faulty(faulty, _) = storage else { return Ok(()) };
    subject.target.troubles.begin(Trouble::Fault);
    let hang = Hang::begin(faulty);
    subject.moment(4000);
    let rest = subject.random.once_in(2).then(|| Duration::from_millis(subject.random.below(2000)));
    let mut hang = Some(hang);
    subject.kill_while(|subject, process| {
        subject.moment(1000);
        // A process that the kernel does not let go has no successor yet.
        if rest.is_none() || process.is_running() {
            hang = None;
        }
    });
    let early = hang.is_some();
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(rest.unwrap_or_default());
            drop(hang);
        });
        subject.start()
    })?;
    settle(subject)?;
    subject.report.done(if early { "start on a storage that hangs" } else { "kill while the storage hangs" });
    Ok(())
}

/// Nothing is answered for longer than a request may take, or for a little less.
pub fn hang(subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
    let Storage::Faulty(faulty, _) = storage else { return Ok(()) };
    subject.target.troubles.begin(Trouble::Fault);
    let hang = Hang::begin(faulty);
    thread::sleep(Duration::from_millis(500 + subject.random.below(6000)));
    // Questions are answered meanwhile.
    if subject.counter("reqs_outstanding").is_none() {
        return Err(subject.finding("no counters while the storage hangs"));
    }
    drop(hang);
    settle(subject)?;
    subject.report.done("storage that hangs");
    Ok(())
}
