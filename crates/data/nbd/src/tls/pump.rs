//! Carries a connection between TLS on the network and plain bytes on a socket pair, on a thread of its own.
//!
//! The data path stays what it is: its socket is one end of the pair, and io_uring moves bytes there as on any socket.
//! What TLS costs, a copy and the cipher, happens on another processor; a disk without TLS has neither the thread nor a
//! branch for it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::session::{Heard, Session};

/// Read at a time, in either direction.
const PIECE_LEN: usize = 64 << 10;
/// Stack of the thread: checking a chain of certificates takes the most of it.
const STACK_LEN: usize = 1 << 20;
/// How long the last bytes may take when one side has gone.
const LAST_TIME: Duration = Duration::from_secs(5);

/// What became of a connection, for its owner to report why the socket ended.
#[derive(Clone, Debug, Default)]
pub struct Status(Arc<Mutex<Option<String>>>);

impl Status {
    /// Why TLS gave up, if it did.
    pub fn failure(&self) -> Option<String> {
        self.0.lock().clone()
    }

    fn set(&self, why: &str) {
        *self.0.lock() = Some(why.to_owned());
    }
}

/// Starts the thread; gives the plain end. The session must be open by `deadline`. `failed` gets why it never was, or
/// ended badly.
pub fn start(
    session: Session,
    wire: Vec<u8>,
    net: OwnedFd,
    deadline: Instant,
    failed: impl FnOnce(&str) + Send + 'static,
) -> io::Result<(OwnedFd, Status)> {
    let (ours, theirs) = UnixStream::pair()?;
    let status = Status::default();
    let told = status.clone();
    std::thread::Builder::new().name("tapio-nbd-tls".into()).stack_size(STACK_LEN).spawn(move || {
        let mut pump = Pump {
            session,
            net,
            plain_end: ours.into(),
            wire: Outgoing { bytes: wire, sent: 0 },
            plain: Outgoing::default(),
            piece: vec![0; PIECE_LEN],
            net_ended: false,
            plain_ended: false,
            plain_hung: false,
            deadline: Some(deadline),
        };
        if let Err(why) = pump.run() {
            told.set(&why);
            failed(&why);
        }
    })?;
    Ok((theirs.into(), status))
}

/// Bytes on their way to a socket.
#[derive(Debug, Default)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
}

impl Outgoing {
    fn is_empty(&self) -> bool {
        self.sent == self.bytes.len()
    }

    /// Sends what the socket takes.
    fn send(&mut self, fd: &OwnedFd) -> io::Result<()> {
        while !self.is_empty() {
            match send(fd, &self.bytes[self.sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(len) => self.sent += len,
                Err(Errno::WOULDBLOCK) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.bytes.clear();
        self.sent = 0;
        Ok(())
    }
}

struct Pump {
    session: Session,
    net: OwnedFd,
    plain_end: OwnedFd,
    wire: Outgoing,
    plain: Outgoing,
    piece: Vec<u8>,
    /// Nothing more comes from there.
    net_ended: bool,
    plain_ended: bool,
    /// It was closed, and bytes of it may wait until the network takes what is before them.
    plain_hung: bool,
    /// Until when the present stage must be over.
    deadline: Option<Instant>,
}

/// What a reception brought.
enum Got {
    Bytes(usize),
    Nothing,
    End,
}

fn receive(fd: &OwnedFd, into: &mut [u8]) -> io::Result<Got> {
    match retry_on_intr(|| recv(fd, &mut *into, RecvFlags::DONTWAIT)) {
        Ok((0, _)) => Ok(Got::End),
        Ok((len, _)) => Ok(Got::Bytes(len)),
        Err(Errno::WOULDBLOCK) => Ok(Got::Nothing),
        Err(error) => Err(error.into()),
    }
}

impl Pump {
    /// Runs until either side has ended and got what there was for it.
    fn run(&mut self) -> Result<(), String> {
        let network = |error: io::Error| format!("the network: {error}");
        let mut failure = None;
        self.session.flush(&mut self.wire.bytes);
        loop {
            if self.session.is_open() && self.deadline.is_some() && !self.is_ending() && failure.is_none() {
                self.deadline = None;
            }
            self.wire.send(&self.net).map_err(network)?;
            // A plain end that is closed takes no bytes.
            let gone = self.plain.send(&self.plain_end).is_err();
            self.plain_ended |= gone;
            if let Some(why) = failure.take_if(|_| self.wire.is_empty()) {
                return Err(why);
            }
            if (self.plain_ended && self.wire.is_empty()) || (self.net_ended && self.plain.is_empty()) || gone
            {
                return Ok(());
            }
            let (net_ready, plain_ready, plain_hung) = self.wait()?;
            if plain_hung && !self.plain_hung {
                // A client that does not read may not keep this thread.
                self.plain_hung = true;
                self.deadline = Some(Instant::now() + LAST_TIME);
            }
            if net_ready && failure.is_none() && !self.net_ended {
                match receive(&self.net, &mut self.piece).map_err(network)? {
                    Got::Bytes(len) => {
                        let piece = &self.piece[..len];
                        let heard = self.session.receive(piece, &mut self.plain.bytes, &mut self.wire.bytes);
                        match heard {
                            Ok(Heard::More) => {}
                            Ok(Heard::End) => self.end_of_net(),
                            // The peer shall read it before the socket closes.
                            Err(why) => {
                                failure = Some(why);
                                self.deadline.get_or_insert_with(|| Instant::now() + LAST_TIME);
                            }
                        }
                    }
                    Got::Nothing => {}
                    Got::End if !self.session.is_open() => {
                        return Err(
                            "the other side closed the connection in the middle of the TLS handshake".into(),
                        );
                    }
                    Got::End => self.end_of_net(),
                }
            }
            if plain_ready && failure.is_none() && !self.plain_ended {
                match receive(&self.plain_end, &mut self.piece) {
                    Ok(Got::Bytes(len)) => self.session.send(&self.piece[..len], &mut self.wire.bytes)?,
                    Ok(Got::Nothing) => {}
                    Ok(Got::End) | Err(_) => {
                        self.plain_ended = true;
                        self.session.close(&mut self.wire.bytes);
                        self.deadline = Some(Instant::now() + LAST_TIME);
                    }
                }
            }
        }
    }

    fn is_ending(&self) -> bool {
        self.net_ended || self.plain_ended || self.plain_hung
    }

    fn end_of_net(&mut self) {
        self.net_ended = true;
        self.deadline = Some(Instant::now() + LAST_TIME);
    }

    /// Waits until a side can take or give something. Nothing is read for a side that has not taken what was read
    /// before.
    fn wait(&self) -> Result<(bool, bool, bool), String> {
        let mut events = [0; 2];
        if !self.wire.is_empty() {
            events[0] |= libc::POLLOUT;
        }
        if self.plain.is_empty() && !self.net_ended {
            events[0] |= libc::POLLIN;
        }
        if !self.plain.is_empty() {
            events[1] |= libc::POLLOUT;
        }
        if self.wire.is_empty() && self.session.is_open() && !self.plain_ended {
            events[1] |= libc::POLLIN;
        }
        // A side that is asked nothing would still report its end, again and again.
        let fd = |is_asked, fd: &OwnedFd| if is_asked { fd.as_raw_fd() } else { -1 };
        // The end of the plain side is noticed also while it is asked nothing, once.
        let asks_plain = events[1] != 0 || !(self.plain_ended || self.plain_hung);
        let mut entries = [
            libc::pollfd { fd: fd(events[0] != 0, &self.net), events: events[0], revents: 0 },
            libc::pollfd { fd: fd(asks_plain, &self.plain_end), events: events[1], revents: 0 },
        ];
        let timeout = match self.deadline {
            None => -1,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err("the other side was silent for too long".into());
                }
                i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX)
            }
        };
        // SAFETY: the table is valid for its length.
        let result = unsafe { libc::poll(entries.as_mut_ptr(), 2, timeout) };
        if result < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error.to_string());
            }
            return Ok((false, false, false));
        }
        let ready = |index: usize| {
            let [asked, got] = [events[index], entries[index].revents];
            asked & libc::POLLIN != 0 && got & !libc::POLLOUT != 0
        };
        let hung = entries[1].revents & (libc::POLLHUP | libc::POLLERR) != 0;
        Ok((ready(0), ready(1), hung))
    }
}
