//! vhost-user: messages of a front end, taken apart and obeyed by a session whose data side only checks.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::EventfdFlags;
use rustix::fs::{MemfdFlags, memfd_create};
use tapio_block::{Geometry, Gone};
use tapio_front::vhost_user::foreign::{
    DataSide, GuestMemory, HEADER_LEN, Kick, Logging, Notifier, PAYLOAD_MAX, QueueSetup, Ring, RingError,
    RingSetup, Session, SessionConfig, id,
};
use tapio_front::vhost_user::{Header, Message, feature};

use super::take;

/// Messages of one input that are obeyed.
const MESSAGES_MAX: usize = 64;
/// Bytes of the files that a front end of ours shares.
pub const FILE_LEN: u64 = 64 << 10;

/// A file in memory, as front ends share them.
pub fn memfd(len: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create(c"fuzz", flags).expect("a file in memory"));
    file.set_len(len).expect("room");
    file.into()
}

fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an event descriptor")
}

/// Starts a queue as the data thread does, as far as memory and ring go.
#[derive(Debug)]
struct Rings;

impl DataSide for Rings {
    fn geometry(&self) -> Result<Geometry, Gone> {
        Ok(Geometry {
            len: 1 << 20,
            logical_block_len: 512,
            physical_block_len: 4096,
            read_only: false,
            transfer_max: 1 << 20,
        })
    }
    fn start(&self, setup: QueueSetup, _kick: Kick) -> Result<Result<(), RingError>, Gone> {
        if let Some(logging) = &setup.logging {
            log(logging);
        }
        let size = setup.size;
        let ring = Ring::new(RingSetup {
            memory: &setup.memory,
            size,
            addresses: &setup.addresses,
            base: setup.base,
            event_index: true,
            indirect: true,
            packed: setup.features & feature::RING_PACKED != 0,
            inflight: setup.inflight,
        });
        let (mut ring, marks) = match ring {
            Ok(found) => found,
            Err(error) => return Ok(Err(error)),
        };
        assert!(marks.iter().all(|mark| *mark < size));
        let _ = (ring.look(), ring.has_next(), ring.base());
        Ok(Ok(()))
    }
    fn stop(&self, _index: usize) -> Result<Option<u32>, Gone> {
        Ok(Some(7))
    }
    fn set_memory(&self, _memory: Arc<GuestMemory>, _drain: bool) -> Result<(), Gone> {
        Ok(())
    }
    fn set_enabled(&self, _index: usize, _enabled: bool) -> Result<(), Gone> {
        Ok(())
    }
    fn set_call(&self, _index: usize, _call: Option<Arc<Notifier>>) -> Result<(), Gone> {
        Ok(())
    }
    fn set_err(&self, _index: usize, _err: Option<Arc<Notifier>>) -> Result<(), Gone> {
        Ok(())
    }
    fn set_kick(&self, _index: usize, _kick: Kick) -> Result<(), Gone> {
        Ok(())
    }
    fn set_writeback(&self, _writeback: bool) -> Result<(), Gone> {
        Ok(())
    }
    fn set_logging(&self, _index: usize, logging: Option<Logging>) -> Result<(), Gone> {
        logging.iter().for_each(log);
        Ok(())
    }
}

/// Marks what a queue would.
fn log(logging: &Logging) {
    for at in [Some(0), logging.ring, logging.desc].into_iter().flatten() {
        logging.log.mark(at, 8192);
    }
    logging.log.tell();
}

/// Messages one after the other. The highest byte of a message's flags, which the protocol does not use, says how many
/// descriptors come along and of which kind.
pub fn vhost_user_message(bytes: &[u8]) {
    let config = SessionConfig { queues: 2, queue_size_max: 256, read_only: false, serial: [0; 20] };
    let mut session = Session::new(Rings, config);
    let mut rest = bytes;
    for _ in 0..MESSAGES_MAX {
        if rest.is_empty() {
            return;
        }
        let head = take::<HEADER_LEN>(&mut rest);
        let header = match Header::parse(&head) {
            Ok(header) => header,
            Err(error) => return assert!(!error.to_string().is_empty()),
        };
        assert!(header.len as usize <= PAYLOAD_MAX);
        let _ = (header.needs_reply(), header.is_reply());
        let Some((payload, behind)) = rest.split_at_checked(header.len as usize) else { return };
        rest = behind;
        let message = match Message::parse(header.request, payload) {
            Ok(message) => message,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                continue;
            }
        };
        let fds = descriptors(header.request, header.flags >> 24, &message);
        if let Err(error) = message.check_fds(header.request, fds.len()) {
            assert!(!error.to_string().is_empty());
            continue;
        }
        match session.handle(message, fds) {
            Ok(Some(reply)) => assert!(reply.payload.len() <= PAYLOAD_MAX, "a reply longer than a message"),
            Ok(None) => {}
            Err(refusal) => assert!(!refusal.to_string().is_empty()),
        }
        assert!(session.running() <= 2);
        drop(session.take_backend());
    }
}

/// Descriptors as the message wants them, unless `choice` asks for other ones.
fn descriptors(request: u32, choice: u32, message: &Message) -> Vec<OwnedFd> {
    let fitting = (0..=8).find(|count| message.check_fds(request, *count).is_ok()).unwrap_or(0);
    let count = if choice & 0x80 == 0 { fitting } else { (choice & 0xf) as usize };
    let events =
        matches!(request, id::SET_VRING_KICK | id::SET_VRING_CALL | id::SET_VRING_ERR | id::SET_LOG_FD);
    let events = events != (choice & 0x40 != 0);
    (0..count).map(|_| if events { eventfd() } else { memfd(FILE_LEN) }).collect()
}
