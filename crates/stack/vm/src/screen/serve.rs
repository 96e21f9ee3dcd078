//! A viewer's connection.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::Screen;
use super::canvas::Picture;
use super::keyboard::Keyboard;
use super::pointer::Pointer;
use super::session::{Event, Session};
use crate::poll::{poll, polled};
use crate::supervise::Stop;

/// Between two pictures while the screen changes, and while it does not.
const FRAME_MIN: Duration = Duration::from_millis(50);
const FRAME_MAX: Duration = Duration::from_millis(500);

/// A picture may take one part in so many of the emulator's time.
const SHARE: u32 = 4;

/// How long a viewer may take nothing of what it has asked for.
const WRITE_LIMIT: Duration = Duration::from_secs(60);

/// How often a viewer that asks for nothing is looked after: it is disconnected when the emulator has ended.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Bytes that are read at a time.
const PIECE_LEN: usize = 4 << 10;

/// When the next picture is taken.
struct Pace {
    next: Instant,
    interval: Duration,
}

impl Pace {
    /// Soon: something will change.
    fn hurry(&mut self) {
        self.interval = FRAME_MIN;
        self.next = self.next.min(Instant::now() + FRAME_MIN);
    }

    /// After a picture that took so long.
    fn after(&mut self, took: Duration, has_changed: bool) {
        self.interval = if has_changed { FRAME_MIN } else { (2 * self.interval).min(FRAME_MAX) };
        self.next = Instant::now() + self.interval.max(took * SHARE);
    }
}

fn bad(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Takes out motions that the next one makes old.
fn settled(events: Vec<Event>) -> Vec<Event> {
    let is_old = |one: &Event, next: Option<&Event>| match (one, next) {
        (Event::Pointer { buttons, .. }, Some(Event::Pointer { buttons: then, .. })) => buttons == then,
        _ => false,
    };
    let kept = events.iter().enumerate().filter(|(at, one)| !is_old(one, events.get(at + 1)));
    kept.map(|(_, one)| *one).collect()
}

fn act(
    event: Event,
    size: (u16, u16),
    keyboard: &mut Keyboard,
    pointer: &mut Pointer,
    screen: &mut dyn Screen,
) -> io::Result<()> {
    let strokes = match event {
        Event::Symbol(symbol, is_down) => keyboard.symbol(symbol, is_down),
        Event::Code(code, is_down) => keyboard.code(code, is_down),
        Event::Pointer { buttons, x, y } => {
            let (motion, buttons) = pointer.change(buttons, (x, y), size, screen.has_places());
            if motion.is_none() && buttons.is_empty() {
                return Ok(());
            }
            return screen.pointer(motion, &buttons);
        }
    };
    if strokes.is_empty() { Ok(()) } else { screen.keys(&strokes) }
}

/// Serves a viewer until it goes away, the emulator ends or `stop` is set. `socket` does not block.
///
/// # Errors
/// What the viewer sent is no RFB, it takes nothing, or the emulator's end.
pub(crate) fn serve(
    mut socket: UnixStream,
    name: &str,
    stop: &Stop,
    screen: &mut dyn Screen,
) -> io::Result<()> {
    let (mut keyboard, mut pointer) = (Keyboard::default(), Pointer::default());
    let served = talk(&mut socket, name, stop, screen, (&mut keyboard, &mut pointer));
    // Keys that stay pressed would repeat for ever.
    let (strokes, buttons) = (keyboard.release(), pointer.release());
    if !strokes.is_empty() {
        screen.keys(&strokes)?;
    }
    if !buttons.is_empty() {
        screen.pointer(None, &buttons)?;
    }
    served
}

fn talk(
    socket: &mut UnixStream,
    name: &str,
    stop: &Stop,
    screen: &mut dyn Screen,
    (keyboard, pointer): (&mut Keyboard, &mut Pointer),
) -> io::Result<()> {
    let mut session = Session::new(name, Picture::open(screen.picture()?)?.size());
    let mut pace = Pace { next: Instant::now(), interval: FRAME_MIN };
    let mut taken_at = Instant::now();
    let mut bytes = [0; PIECE_LEN];
    loop {
        let waits = !session.pending().is_empty();
        let until = match () {
            () if waits => taken_at + WRITE_LIMIT,
            () if session.wants_picture() => pace.next,
            () => Instant::now() + LOOK_INTERVAL,
        };
        let events = if waits { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
        let mut fds = [polled(socket.as_raw_fd(), events), polled(stop.fd(), libc::POLLIN)];
        poll(&mut fds, until);
        if fds[1].revents != 0 || !screen.is_there() {
            return Ok(());
        }
        if waits {
            match socket.write(session.pending()) {
                Ok(len) => {
                    session.sent(len);
                    taken_at = Instant::now();
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) if taken_at.elapsed() >= WRITE_LIMIT => {
                    return Err(bad(format!("the viewer has taken nothing for {WRITE_LIMIT:?}")));
                }
                Err(_) => {}
            }
        }
        if fds[0].revents & !libc::POLLOUT != 0 {
            match socket.read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(len) => {
                    let mut events = Vec::new();
                    session.receive(&bytes[..len], &mut events).map_err(bad)?;
                    for event in settled(events) {
                        act(event, session.size(), keyboard, pointer, screen)?;
                        pace.hurry();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        if session.pending().is_empty() {
            taken_at = Instant::now();
            if session.wants_picture() && pace.next <= Instant::now() {
                let begun = Instant::now();
                let has_changed = session.show(Picture::open(screen.picture()?)?)?;
                pace.after(begun.elapsed(), has_changed);
            }
        }
    }
}
