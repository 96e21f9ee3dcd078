//! The terminal: keys as they are pressed, a frame at a time, and everything as it was at the end.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};

static ENDED: AtomicBool = AtomicBool::new(false);

extern "C" fn end(_: libc::c_int) {
    ENDED.store(true, Ordering::Relaxed);
}

/// A new size needs no more than that the wait ends.
extern "C" fn resized(_: libc::c_int) {}

fn handle(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) {
    // SAFETY: the handlers store an atomic at most, which a signal handler may.
    unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
}

/// What a wait ended with.
pub enum Event {
    Key(u8),
    /// Time is over.
    Due,
    /// Something to draw again for.
    Redraw,
    /// A signal, or the terminal is gone.
    End,
}

/// A terminal in single-key mode, on its other screen, until this is dropped.
pub struct Screen {
    before: Termios,
}

impl Screen {
    pub fn open() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut settings = before.clone();
        // Signals stay: control-C is one.
        settings.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        settings.special_codes[SpecialCodeIndex::VMIN] = 1;
        settings.special_codes[SpecialCodeIndex::VTIME] = 0;
        // Stopping (control-Z) and control-backslash would leave the terminal as it is now: 0 is no key.
        settings.special_codes[SpecialCodeIndex::VSUSP] = 0;
        settings.special_codes[SpecialCodeIndex::VQUIT] = 0;
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            handle(signal, end);
        }
        handle(libc::SIGWINCH, resized);
        tcsetattr(io::stdin(), OptionalActions::Flush, &settings)?;
        let screen = Self { before };
        write("\x1b[?1049h\x1b[?25l")?;
        Ok(screen)
    }

    /// Columns and rows.
    pub fn size(&self) -> (usize, usize) {
        match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
            _ => (80, 24),
        }
    }

    pub fn draw(&self, lines: &[String]) -> io::Result<()> {
        write(&format!("\x1b[H{}\x1b[K\x1b[J", lines.join("\x1b[K\r\n")))
    }

    /// Waits for a key, a signal or the end of `left`.
    pub fn wait(&self, left: Duration) -> Event {
        // A signal just before the wait is seen after this long.
        let slice = left.min(Duration::from_millis(250));
        let timeout = Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() };
        let stdin = io::stdin();
        let ready = poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&timeout));
        if ENDED.load(Ordering::Relaxed) {
            return Event::End;
        }
        match ready {
            Ok(0) if slice == left => Event::Due,
            Ok(0) | Err(Errno::INTR) => Event::Redraw,
            Ok(_) => {
                let mut key = [0];
                match rustix::io::read(&stdin, &mut key) {
                    Ok(1) => Event::Key(key[0]),
                    Err(Errno::INTR) => Event::Redraw,
                    _ => Event::End,
                }
            }
            Err(_) => Event::End,
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = write("\x1b[?25h\x1b[?1049l");
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.before);
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
