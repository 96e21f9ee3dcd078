//! A guest's screen: pictures by QMP's `screendump`, keys and pointer by `input-send-event`.
//!
//! The emulator has no display of its own. A picture is written into a file in memory that the daemon made and of which
//! the emulator holds a descriptor, so no name is followed that a guest's emulator could have put there.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};
use tapio_types::ApiError;

use super::qmp::QmpError;
use super::{DriverVm, soon};
use crate::errors::{failed, too_many_viewers};
use crate::screen::{Key, Motion, PIXELS_MAX, Screen, serve};
use crate::supervise::{STACK_LEN, Stop};

/// Viewers of one screen, and of all screens of this host.
const VIEWERS_MAX: usize = 8;
const ALL_VIEWERS_MAX: usize = 64;

/// How long it is believed whether the guest's pointer goes to places: a guest takes over a tablet when it starts.
const POINTER_INTERVAL: Duration = Duration::from_secs(1);

/// Bits of RFC 6143, 7.5.5, from the lowest on.
const BUTTONS: [&str; 7] = ["left", "middle", "right", "wheel-up", "wheel-down", "wheel-left", "wheel-right"];

/// Counts a viewer for as long as it is there.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn one(of: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let more = |count| (count < most).then_some(count + 1);
        of.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok().map(|_| Self(Arc::clone(of)))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The screen of a VM, for one viewer.
struct Qmp {
    guest: Arc<DriverVm>,
    /// Where the picture is read, and where the emulator writes it: its place in the file is this one's.
    read: File,
    write: File,
    /// The emulator's number for it.
    set: u64,
    has_places: bool,
    asked_at: Option<Instant>,
}

impl Qmp {
    fn new(guest: &Arc<DriverVm>) -> io::Result<Self> {
        let read = File::from(memfd_create(c"screen", MemfdFlags::CLOEXEC)?);
        // The emulator opens a descriptor that it was given only in the very way that it was opened in.
        let write = OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", read.as_raw_fd()))?;
        let qmp = guest.qmp().map_err(|error| io::Error::other(error.to_string()))?;
        let added = qmp.run_with("add-fd", json!({ "opaque": "screen" }), Some(write.as_fd()), soon());
        let set = added.map_err(|error| io::Error::other(error.to_string()))?["fdset-id"].as_u64();
        let set = set.ok_or_else(|| io::Error::other("its emulator does not number a descriptor"))?;
        Ok(Self { guest: Arc::clone(guest), read, write, set, has_places: false, asked_at: None })
    }

    fn run(&self, command: &str, arguments: Value) -> io::Result<Value> {
        let qmp = self.guest.qmp().map_err(|error| io::Error::other(error.to_string()))?;
        qmp.run(command, arguments, soon()).map_err(|error| match error {
            QmpError::Refused(..) => {
                io::Error::new(io::ErrorKind::Unsupported, format!("{command}: {error}"))
            }
            _ => io::Error::other(format!("{command}: {error}")),
        })
    }

    /// Sends events; those that nothing takes are lost, as those of a VM that is paused.
    fn send(&self, events: &[Value]) -> io::Result<()> {
        match self.run("input-send-event", json!({ "events": events })) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            sent => sent.map(drop),
        }
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        // An emulator that has ended has closed it.
        let _ = self.run("remove-fd", json!({ "fdset-id": self.set }));
    }
}

fn button(bit: u8, is_down: bool) -> Option<Value> {
    let name = BUTTONS.get(usize::from(bit))?;
    Some(json!({ "type": "btn", "data": { "button": name, "down": is_down } }))
}

fn stroke((key, is_down): &(Key, bool)) -> Value {
    let key = match key {
        Key::Named(name) => json!({ "type": "qcode", "data": name }),
        Key::Code(code) => json!({ "type": "number", "data": code }),
    };
    json!({ "type": "key", "data": { "key": key, "down": is_down } })
}

fn motions(motion: Motion) -> [Value; 2] {
    let of = |kind: &str, axis: &str, value: i64| json!({ "type": kind, "data": { "axis": axis, "value": value } });
    match motion {
        Motion::To(x, y) => [of("abs", "x", x.into()), of("abs", "y", y.into())],
        Motion::By(x, y) => [of("rel", "x", x.into()), of("rel", "y", y.into())],
    }
}

impl Screen for Qmp {
    fn is_there(&self) -> bool {
        self.guest.process().is_some_and(|process| !process.has_ended())
    }

    fn picture(&mut self) -> io::Result<Box<dyn Read + '_>> {
        self.write.rewind()?;
        self.run("screendump", json!({ "filename": format!("/dev/fdset/{}", self.set) }))?;
        self.read.rewind()?;
        let most = PIXELS_MAX as u64 * 3 + 64;
        Ok(Box::new(BufReader::with_capacity(64 << 10, &self.read).take(most)))
    }

    fn keys(&mut self, strokes: &[(Key, bool)]) -> io::Result<()> {
        self.send(&strokes.iter().map(stroke).collect::<Vec<_>>())
    }

    fn has_places(&mut self) -> bool {
        if self.asked_at.is_none_or(|at| at.elapsed() >= POINTER_INTERVAL) {
            self.asked_at = Some(Instant::now());
            let mice = self.run("query-mice", json!({})).unwrap_or_default();
            let current = mice.as_array().into_iter().flatten().find(|mouse| mouse["current"] == true);
            self.has_places = current.is_some_and(|mouse| mouse["absolute"] == true);
        }
        self.has_places
    }

    fn pointer(&mut self, motion: Option<Motion>, buttons: &[(u8, bool)]) -> io::Result<()> {
        let moved = motion.map(motions).into_iter().flatten();
        let pressed = buttons.iter().filter_map(|(bit, is_down)| button(*bit, *is_down));
        self.send(&moved.chain(pressed).collect::<Vec<_>>())
    }
}

/// Starts to serve a viewer; the viewer's end of the connection.
///
/// # Errors
/// There are [`VIEWERS_MAX`] viewers, or [`ALL_VIEWERS_MAX`] of all screens; the emulator's.
pub(super) fn open(
    guest: &Arc<DriverVm>,
    all: &Arc<AtomicUsize>,
    stop: Arc<Stop>,
) -> Result<OwnedFd, ApiError> {
    let vm = guest.vm;
    let own = Counted::one(&guest.own.viewers, VIEWERS_MAX);
    let own = own.ok_or_else(|| too_many_viewers(vm, "of this screen", VIEWERS_MAX))?;
    let of_all = Counted::one(all, ALL_VIEWERS_MAX);
    let of_all = of_all.ok_or_else(|| too_many_viewers(vm, "of screens of this host", ALL_VIEWERS_MAX))?;
    let told = |error: io::Error| failed(vm, "its screen cannot be shown", error);
    let (ours, theirs) = UnixStream::pair().map_err(told)?;
    ours.set_nonblocking(true).map_err(told)?;
    let mut screen = Qmp::new(guest).map_err(told)?;
    let name = guest.saved().spec.name;
    let serving = move || {
        let _counted = (own, of_all);
        if let Err(error) = serve(ours, &name, &stop, &mut screen) {
            tracing::info!(%vm, "the viewer of a screen is disconnected: {error}");
        }
    };
    thread::Builder::new().name("screen".into()).stack_size(STACK_LEN).spawn(serving).map_err(told)?;
    Ok(theirs.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_emulators() {
        assert_eq!(
            stroke(&(Key::Named("spc"), true)),
            json!({"type": "key", "data": {"key": {"type": "qcode", "data": "spc"}, "down": true}})
        );
        assert_eq!(motions(Motion::By(-2, 3))[0], json!({"type": "rel", "data": {"axis": "x", "value": -2}}));
        assert_eq!(button(0, true).unwrap()["data"]["button"], "left");
        assert!(button(7, true).is_none());
    }

    #[test]
    fn viewers_are_counted() {
        let count = Arc::new(AtomicUsize::new(0));
        let first = Counted::one(&count, 1);
        assert!(first.is_some() && Counted::one(&count, 1).is_none());
        drop(first);
        assert!(Counted::one(&count, 1).is_some());
    }
}
