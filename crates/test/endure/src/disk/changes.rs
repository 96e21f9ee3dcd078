//! Changes of the images of a disk: while it is used, while it is killed, and while it is closed.

use std::fs::File;
use std::time::Duration;

use tapio_e2e::disk::text;
use tapio_e2e::process::{Finished, poll_until};

use super::storage::Storage;
use super::subject::{COMMAND_LIMIT, Image, Outcome, Subject};

/// Images of a chain, at most.
const DEPTH_MAX: usize = 6;

/// Bytes that a disk grows to, at most.
const LEN_MAX: u64 = 160 << 20;

const MIB: u64 = 1 << 20;

/// A busy host may not manage to hold requests back for so short a time: then nothing has changed.
const TIMED_OUT: i32 = libc::ETIMEDOUT;

pub fn snapshot(subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
    if subject.chain.len() >= DEPTH_MAX {
        return Ok(());
    }
    let leaf = subject.fresh("vhd");
    let taken = subject.disk(&["snapshot"], &[text(&leaf)]);
    if subject.judge("live snapshot", &taken, storage.allowed(&[TIMED_OUT]))? {
        subject.chain.insert(0, Image::vhd(leaf));
    }
    subject.assert_leaf()
}

/// Whether a commit was done. One that failed for a reason that may come now has changed nothing.
fn committed(
    subject: &mut Subject<'_>,
    action: &str,
    finished: &Finished,
    storage: &Storage,
) -> Outcome<bool> {
    // The end of a job is EIO, whatever its reason, which stands in what is said.
    let late = finished.stderr.contains("timed out") || finished.stderr.contains("did not end within");
    let full = storage.is_small() && finished.stderr.contains("No space left");
    // Documented limits: a parent that is smaller than its child and has no room to grow while it is used.
    let small = finished.stderr.contains("a fixed VHD grows only while it is paused")
        || finished.stderr.contains("pause the disk, use 'vhd-util resize");
    let allowed: &[i32] = if late || full || small { &[libc::EIO, TIMED_OUT, libc::ENOSPC] } else { &[] };
    let allowed = [allowed, storage.allowed(&[])].concat();
    subject.judge(action, finished, &allowed)
}

pub fn commit_inner(subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
    if subject.chain.len() < 3 {
        return Ok(());
    }
    let index = 1 + subject.random.below(subject.chain.len() as u64 - 2) as usize;
    let image = subject.chain[index].clone();
    let finished = subject.disk(&["commit"], &[text(&image.path)]);
    if committed(subject, "commit of an inner image", &finished, storage)? {
        subject.chain.remove(index);
        subject.remove(&[image]);
    }
    subject.assert_leaf()
}

pub fn commit_leaf(subject: &mut Subject<'_>, storage: &Storage) -> Outcome {
    if subject.chain.len() < 2 {
        return Ok(());
    }
    let image = subject.leaf().clone();
    let finished = subject.disk(&["commit"], &[text(&image.path)]);
    if committed(subject, "commit of the leaf", &finished, storage)? {
        subject.chain.remove(0);
        subject.assert_leaf()?;
        subject.remove(&[image]);
    }
    subject.assert_leaf()
}

/// An empty image as long as the disk.
fn empty(subject: &mut Subject<'_>) -> Outcome<Image> {
    let len = subject.len();
    if len.is_multiple_of(2 * MIB) && subject.random.once_in(2) {
        let path = subject.fresh("vhd");
        subject.vhd_util(&["create", "-n", text(&path), "-s", &(len / MIB).to_string()])?;
        return Ok(Image::vhd(path));
    }
    let path = subject.fresh("raw");
    let made = File::create(&path).and_then(|file| file.set_len(len));
    made.map_err(|error| subject.finding(format!("{}: {error}", path.display())))?;
    Ok(Image::raw(path))
}

/// The disk moves to another image, or stays after all.
pub fn mirror(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    let target = empty(subject)?;
    let started = subject.disk(&["mirror", "start"], &["--target", &target.name(), "--wait"]);
    if !started.status.success() {
        return Err(subject.finding(started.to_string()));
    }
    subject.report.done("mirror in sync");
    subject.moment(300);
    if subject.random.once_in(3) {
        let cancelled = subject.disk(&["mirror", "cancel"], &[]);
        subject.judge("mirror cancelled", &cancelled, &[])?;
        subject.remove(&[target]);
        return subject.assert_leaf();
    }
    // A pivot is refused for as long as a discard is on its way to the second side.
    let mut last = None;
    let moved = poll_until(COMMAND_LIMIT, || {
        let pivot = subject.disk(&["mirror", "pivot"], &[]);
        let is_over = pivot.status.success() || !pivot.stderr.contains("wait until the mirror is in sync");
        last = Some(pivot);
        is_over.then_some(())
    });
    let pivot = last.expect("it was asked at least once");
    if moved.is_none() {
        return Err(subject.finding(format!("no pivot within {COMMAND_LIMIT:?}: {pivot}")));
    }
    subject.judge("mirror pivoted", &pivot, &[])?;
    let old = std::mem::replace(&mut subject.chain, vec![target]);
    subject.assert_leaf()?;
    subject.remove(&old);
    Ok(())
}

pub fn grow(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    let len = subject.len() + 2 * MIB * (1 + subject.random.below(4));
    if len > LEN_MAX {
        return Ok(());
    }
    let grown = subject.disk_grow(len);
    if subject.judge("grow", &grown, &[TIMED_OUT])? {
        larger(subject, len);
    }
    subject.assert_leaf()
}

/// The disk has another size now, for its clients too.
fn larger(subject: &Subject<'_>, len: u64) {
    subject.target.model.lock().expect("no holder panics").grow(len);
    subject.target.sizes.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
}

/// The process is killed at some moment of a snapshot: the disk is on the old leaf or on the new one.
pub fn kill_in_snapshot(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    if subject.chain.len() >= DEPTH_MAX {
        return Ok(());
    }
    let leaf = Image::vhd(subject.fresh("vhd"));
    let mut command = subject.disk_beside(&["snapshot"], &[text(&leaf.path)]);
    subject.moment(60);
    subject.kill();
    let was_taken = command.wait(COMMAND_LIMIT).success();
    let old = subject.chain.clone();
    let new = [std::slice::from_ref(&leaf), &old].concat();
    subject.start_among(if was_taken { vec![new] } else { vec![old, new] })?;
    if *subject.leaf() != leaf {
        subject.remove(&[leaf]);
    }
    subject.report.done(if was_taken { "kill after a snapshot" } else { "kill in a snapshot" });
    Ok(())
}

/// The process is killed at some moment of a commit, which is begun again by a later step.
pub fn kill_in_commit(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    if subject.chain.len() < 2 {
        return Ok(());
    }
    // The last image has no parent; the first is the leaf.
    let index = subject.random.below(subject.chain.len() as u64 - 1) as usize;
    let image = subject.chain[index].clone();
    let slow = subject.random.once_in(2);
    let rate: &[&str] = if slow { &["--rate", "4M"] } else { &[] };
    let mut command = subject.disk_beside(&["commit"], &[&[text(&image.path)], rate].concat());
    subject.moment(400);
    subject.kill();
    let was_done = command.wait(COMMAND_LIMIT).success();
    let old = subject.chain.clone();
    let mut new = old.clone();
    new.remove(index);
    subject.start_among(match (was_done, index) {
        (true, _) => vec![new],
        (false, 0) => vec![old.clone(), new],
        (false, _) => vec![old.clone()],
    })?;
    // It may have been done before the command was told. Asked only now: the kernel ends the writes of a process
    // that was killed a little later, and what it still owed is put in place by the next.
    if !was_done && index > 0 && !has_parent(subject, &old[index - 1], &image)? {
        subject.chain.remove(index);
    }
    if !subject.chain.contains(&image) {
        subject.remove(&[image]);
    }
    subject.report.done(if was_done { "kill after a commit" } else { "kill in a commit" });
    Ok(())
}

/// Whether a child names this parent.
fn has_parent(subject: &Subject<'_>, child: &Image, parent: &Image) -> Outcome<bool> {
    let said = subject.vhd_util(&["query", "-n", text(&child.path), "-p"])?;
    let name = parent.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    Ok(said.trim_end().rsplit('/').next() == Some(name))
}

/// The process is killed while it copies: the first side has everything.
pub fn kill_in_mirror(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    let target = empty(subject)?;
    let started = subject.disk(&["mirror", "start"], &["--target", &target.name()]);
    subject.judge("mirror started", &started, &[])?;
    subject.moment(300);
    subject.kill();
    subject.start()?;
    subject.remove(&[target]);
    subject.report.done("kill in a mirror");
    Ok(())
}

/// The process is killed at some moment of the switch-over: the disk is on one side or on the other.
pub fn kill_in_pivot(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    let target = empty(subject)?;
    let started = subject.disk(&["mirror", "start"], &["--target", &target.name(), "--wait"]);
    if !started.status.success() {
        return Err(subject.finding(started.to_string()));
    }
    let mut command = subject.disk_beside(&["mirror", "pivot"], &[]);
    subject.moment(60);
    subject.kill();
    let was_done = command.wait(COMMAND_LIMIT).success();
    let (old, new) = (subject.chain.clone(), vec![target.clone()]);
    subject.start_among(if was_done { vec![new] } else { vec![old.clone(), new] })?;
    let left = if *subject.leaf() == target { old } else { vec![target] };
    subject.remove(&left);
    subject.report.done(if was_done { "kill after a pivot" } else { "kill in a pivot" });
    Ok(())
}

/// The process is killed at some moment of growing: the disk has the old size or the new one.
pub fn kill_in_grow(subject: &mut Subject<'_>, _: &Storage) -> Outcome {
    let (old, new) = (subject.len(), subject.len() + 2 * MIB);
    if new > LEN_MAX {
        return Ok(());
    }
    let mut command = subject.tapio_beside(&["disk", "grow", "0", &new.to_string()]);
    subject.moment(60);
    subject.kill();
    let was_grown = command.wait(COMMAND_LIMIT).success();
    subject.start()?;
    let client = crate::load::connect(&subject.target.socket);
    let found =
        client.map(|client| client.export().len).map_err(|error| subject.finding(error.to_string()))?;
    if found != new && (was_grown || found != old) {
        let said = format!("a disk of {old} bytes that grew to {new} when it was killed has {found} bytes");
        return Err(subject.finding(said));
    }
    if found == new {
        larger(subject, new);
    }
    subject.report.done("kill in growing");
    Ok(())
}

/// `vhd-util snapshot` of a closed disk.
pub fn offline_snapshot(subject: &mut Subject<'_>) -> Outcome {
    if subject.chain.len() >= DEPTH_MAX || subject.target.name == "encrypted" {
        return Ok(());
    }
    let path = subject.fresh("vhd");
    let parent = subject.leaf().clone();
    let raw: &[&str] = if parent.kind == "vhd" { &[] } else { &["-m"] };
    subject.vhd_util(&[&["snapshot", "-n", text(&path), "-p", text(&parent.path)], raw].concat())?;
    let (leaf, parent) = (Image::vhd(path), subject.chain[0].clone());
    if !has_parent(subject, &leaf, &parent)? {
        // An empty one is passed over, as XenServer's program does unless it is told '-e'.
        subject.chain.remove(0);
        subject.remove(&[parent]);
    }
    subject.chain.insert(0, leaf);
    subject.report.done("offline snapshot");
    Ok(())
}

/// `vhd-util coalesce` of an image of a closed disk; a child of it gets its parent.
pub fn offline_coalesce(subject: &mut Subject<'_>) -> Outcome {
    if subject.chain.len() < 2 {
        return Ok(());
    }
    let index = subject.random.below(subject.chain.len() as u64 - 1) as usize;
    let image = subject.chain[index].clone();
    let merged = subject.tapio(&["vhd-util", "coalesce", "-n", text(&image.path)]);
    // A documented limit: a parent that is smaller and has no room. This command says so on standard output, as
    // XenServer's does.
    let is_small = merged.stdout.contains("not enough metadata space reserved");
    let small: &[i32] = if is_small { &[libc::EINVAL] } else { &[] };
    if !subject.judge("offline coalesce", &merged, small)? {
        return subject.check_images();
    }
    if index > 0 {
        let (child, parent) = (subject.chain[index - 1].clone(), subject.chain[index + 1].clone());
        let raw: &[&str] = if parent.kind == "vhd" { &[] } else { &["-m"] };
        subject.vhd_util(&[&["modify", "-n", text(&child.path), "-p", text(&parent.path)], raw].concat())?;
    }
    subject.chain.remove(index);
    subject.check_images()?;
    subject.remove(&[image]);
    // Putting the parent of a leaf into its place means to remove the note that leads to the leaf, as the refusal says.
    let leaf = &subject.leaf().path;
    if let (Some(dir), Some(name)) = (leaf.parent(), leaf.file_name().and_then(|name| name.to_str())) {
        subject.remove(&[Image::raw(dir.join(format!(".{name}.continued")))]);
    }
    Ok(())
}

/// How long jobs of a fault may take to be over.
pub const SETTLE_LIMIT: Duration = Duration::from_secs(120);
