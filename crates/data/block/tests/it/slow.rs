//! A leaf is committed while what the kernel does for it takes long: the client is served, and what is said is true.
//!
//! Calls of `ftruncate` by the disk's threads wait in the kernel until the test lets them go (seccomp's notifications),
//! so that nothing here depends on how fast a file system is.

use std::collections::HashSet;
use std::fs::read_link;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tapio_block::{CoreOptions, Disk, DiskOptions, Notes};
use tapio_format::continuation::Move;
use tapio_format::vhd::offline::{Shape, SnapshotOptions, create, resolve_chain, snapshot};
use tapio_types::{Access, ImageKind};

use crate::rig::{TIMEOUT, directory, read, write, write_at_the_gate};

const MIB: u64 = 1 << 20;

/// What the disks of these tests said.
static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn say(line: &str) {
    SAID.lock().unwrap().push(line.to_string());
}

/// How long the guest waited for the commit of `leaf`, by what was said.
fn said_to_have_waited(leaf: &Path) -> Duration {
    let said = SAID.lock().unwrap();
    let begin = format!("{} is in its parent; the guest waited ", leaf.display());
    let line = said.iter().find_map(|line| line.strip_prefix(&begin)).expect("it says so");
    Duration::from_micros(line.strip_suffix(" us").unwrap().parse().unwrap())
}

fn options(notes: Notes) -> DiskOptions {
    DiskOptions {
        core: CoreOptions { notes, report: say, ..CoreOptions::default() },
        ..DiskOptions::default()
    }
}

/// Calls of `ftruncate` that wait to be let go.
struct Truncations {
    waiting: Arc<Mutex<Vec<(u64, PathBuf)>>>,
    let_go: Arc<Mutex<HashSet<u64>>>,
    held_back: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Truncations {
    /// Starts a disk whose threads wait in their calls of `ftruncate`, once [`Truncations::hold_back`] was called.
    fn around(start: impl FnOnce() -> Disk + Send + 'static) -> (Disk, Self) {
        let (waiting, let_go) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(HashSet::new())));
        let (held_back, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (send, listener) = channel();
        let (seen, gone, all, end) =
            (Arc::clone(&waiting), Arc::clone(&let_go), Arc::clone(&held_back), Arc::clone(&ended));
        let thread = std::thread::spawn(move || {
            let listener: OwnedFd = listener.recv().unwrap();
            while !end.load(Ordering::SeqCst) {
                if let Some((id, path)) = next(&listener) {
                    seen.lock().unwrap().push((id, path));
                }
                seen.lock().unwrap().retain(|(id, _)| {
                    let goes = !all.load(Ordering::SeqCst) || gone.lock().unwrap().remove(id);
                    if goes {
                        go_on(&listener, *id);
                    }
                    !goes
                });
            }
        });
        // A filter is inherited by the threads that one starts; this thread has no other use.
        let started = std::thread::spawn(move || {
            send.send(filter()).unwrap();
            start()
        });
        let disk = started.join().unwrap();
        (disk, Self { waiting, let_go, held_back, ended, thread: Some(thread) })
    }

    fn hold_back(&self) {
        self.held_back.store(true, Ordering::SeqCst);
    }

    /// The call that waits the longest, and for which file.
    fn first(&self) -> Option<(u64, PathBuf)> {
        self.waiting.lock().unwrap().first().cloned()
    }

    fn is_waiting(&self, id: u64) -> bool {
        self.waiting.lock().unwrap().iter().any(|(other, _)| *other == id)
    }

    fn let_go(&self, id: u64) {
        self.let_go.lock().unwrap().insert(id);
        let deadline = Instant::now() + TIMEOUT;
        while self.is_waiting(id) {
            assert!(Instant::now() < deadline, "it does not go on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Truncations {
    fn drop(&mut self) {
        self.held_back.store(false, Ordering::SeqCst);
        let deadline = Instant::now() + TIMEOUT;
        while self.first().is_some() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.ended.store(true, Ordering::SeqCst);
        let _ = self.thread.take().unwrap().join();
    }
}

/// Lets this thread, and those that it starts, ask before each `ftruncate`.
fn filter() -> OwnedFd {
    const fn word(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt, jf, k }
    }
    // The call's number is the first word that a filter sees.
    let program = [
        word(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        word(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_ftruncate as u32),
        word(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
        word(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    // SAFETY: prctl takes integers here.
    let set = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(set, 0);
    // SAFETY: the program is valid and lives until the call has ended; the kernel copies it.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

/// The next call that waits, within a moment.
fn next(listener: &OwnedFd) -> Option<(u64, PathBuf)> {
    let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid entry.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 5) };
    if ready != 1 || poll.revents & libc::POLLIN == 0 {
        return None;
    }
    // SAFETY: an all-zero notification is what the kernel wants, and fills.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let got = unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) };
    let link = format!("/proc/self/fd/{}", call.data.args[0]);
    (got == 0).then(|| (call.id, read_link(link).unwrap_or_default()))
}

/// Lets the call happen.
fn go_on(listener: &OwnedFd, id: u64) {
    const CONTINUE: u32 = 1;
    let answer = libc::seccomp_notif_resp { id, val: 0, error: 0, flags: CONTINUE };
    // SAFETY: a valid answer, which the kernel reads.
    let done = unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_SEND, &raw const answer) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// `_IOWR('!', 0, struct seccomp_notif)` and `_IOWR('!', 1, struct seccomp_notif_resp)`.
const SECCOMP_IOCTL_NOTIF_RECV: libc::Ioctl = 0xc050_2100_u32 as libc::Ioctl;
const SECCOMP_IOCTL_NOTIF_SEND: libc::Ioctl = 0xc018_2101_u32 as libc::Ioctl;

/// Begins to commit `leaf`; its number.
fn commit(disk: &Disk, leaf: &Path) -> u32 {
    let leaf = leaf.to_path_buf();
    let begun = disk
        .remote()
        .call(TIMEOUT, move |data_thread| data_thread.core().commit(&leaf, 0).map(|job| job.id()));
    begun.unwrap().unwrap()
}

fn state(disk: &Disk, job: u32) -> String {
    let asked = disk
        .remote()
        .call(TIMEOUT, move |data_thread| data_thread.core().jobs().get(job).unwrap().info().state);
    asked.unwrap().to_string()
}

fn wait_for_end(disk: &Disk, job: u32) -> String {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let state = state(disk, job);
        if state != "running" {
            return state;
        }
        assert!(Instant::now() < deadline, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn leaf_of(disk: &Disk) -> PathBuf {
    disk.status(TIMEOUT).unwrap().spec.unwrap().layers[0].path.clone()
}

#[test]
fn requests_are_answered_while_a_commit_of_the_leaf_waits_for_truncations() {
    let directory = directory();
    let (base, leaf) = (directory.path().join("base.raw"), directory.path().join("leaf.vhd"));
    // A parent that has to grow, and a leaf that is cut to its length at the end.
    std::fs::write(&base, vec![1; 5 << 20]).unwrap();
    snapshot(&leaf, &base, &SnapshotOptions { raw_parent: true, len_max: 64 * MIB, ..Default::default() })
        .unwrap();
    let spec = resolve_chain(&leaf, Access::ReadWrite).unwrap();
    assert_eq!(spec.layers[1].kind, ImageKind::Raw);
    let (disk, truncations) =
        Truncations::around(move || Disk::start(spec, options(Notes::default())).unwrap());
    assert_eq!(disk.grow(8 * MIB, TIMEOUT).unwrap().len, 8 * MIB);
    for mib in 0..8 {
        write(&disk, mib * MIB, vec![2; 65536], false).unwrap();
    }
    truncations.hold_back();
    let job = commit(&disk, &leaf);
    let (mut seen, mut stamp) = (Vec::new(), 10);
    let deadline = Instant::now() + TIMEOUT;
    while state(&disk, job) == "running" {
        assert!(Instant::now() < deadline, "it does not end; truncated were {seen:?}");
        let Some((id, path)) = truncations.first() else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        stamp += 1;
        write(&disk, 3 * MIB, vec![stamp; 4096], true).unwrap();
        assert_eq!(read(&disk, 3 * MIB, 8192).unwrap(), [vec![stamp; 4096], vec![2; 4096]].concat());
        assert_eq!(state(&disk, job), "running", "it has ended before {}", path.display());
        assert!(truncations.is_waiting(id));
        seen.push(path);
        truncations.let_go(id);
    }
    assert_eq!(state(&disk, job), "done");
    assert!(seen.contains(&base) && seen.contains(&leaf), "{seen:?}");
    assert_eq!(leaf_of(&disk), base);
    assert_eq!(read(&disk, 3 * MIB, 4096).unwrap(), vec![stamp; 4096]);
    said_to_have_waited(&leaf);
    drop(truncations);
    disk.close(TIMEOUT).unwrap();
}

#[test]
fn the_time_that_a_guest_is_said_to_have_waited_is_that_of_the_closed_gate() {
    let directory = directory();
    let (base, leaf) = (directory.path().join("base.vhd"), directory.path().join("leaf.vhd"));
    create(&base, &Shape::Dynamic, 8 * MIB, 0).unwrap();
    snapshot(&leaf, &base, &SnapshotOptions { keep_empty: true, ..Default::default() }).unwrap();
    // The note that the disk is on its parent is written while requests are held back.
    let (at, noting) = sync_channel(1);
    let (go, may_go) = sync_channel::<()>(1);
    let may_go = Mutex::new(may_go);
    let notes = Notes::new(move |change| {
        if matches!(change, Move::Down { .. }) {
            at.send(()).unwrap();
            may_go.lock().unwrap().recv().unwrap();
        }
        Ok(())
    });
    let spec = resolve_chain(&leaf, Access::ReadWrite).unwrap();
    let disk = Disk::start(spec, options(notes)).unwrap();
    write(&disk, MIB, vec![3; 65536], true).unwrap();
    let job = commit(&disk, &leaf);
    noting.recv_timeout(TIMEOUT).unwrap();
    let closed = Instant::now();
    let mut at_least = Duration::ZERO;
    write_at_the_gate(&disk, MIB, vec![4; 4096], || {
        assert_eq!((state(&disk, job).as_str(), leaf_of(&disk)), ("running", leaf.clone()));
        // Long beside what the rest of the commit takes. However long it is: what is said is no less.
        std::thread::sleep(Duration::from_millis(300));
        at_least = closed.elapsed();
        go.send(()).unwrap();
    });
    assert_eq!(wait_for_end(&disk, job), "done");
    let said = said_to_have_waited(&leaf);
    assert!(said >= at_least, "{said:?} are less than {at_least:?}");
    assert_eq!(leaf_of(&disk), base);
    assert_eq!(read(&disk, MIB, 8192).unwrap(), [vec![4; 4096], vec![3; 4096]].concat());
    disk.close(TIMEOUT).unwrap();
}
