//! One queue as a driver uses it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::time::{Duration, Instant};

use super::super::blk::{RANGES_MAX, SEG_MAX, feature};
use super::super::vring::{Descriptor, need_event};
use super::{CONTROL_LEN, DriverOptions, Layout, Memory};

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;
const DESC_F_INDIRECT: u16 = 4;
/// The status byte of a slot before its answer.
const STATUS_NONE: u8 = 0xff;
const STATUS_AT: u64 = 16;
const RANGES_AT: u64 = 32;
const TABLE_AT: u64 = 1024;

/// What to ask of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// Fill the first `len` bytes of the slot's buffer from byte `at` of the disk.
    Read { at: u64, len: u32 },
    /// Write them there.
    Write { at: u64, len: u32 },
    /// Make everything durable.
    Flush,
    /// Forget ranges: `(byte, bytes)`.
    Discard(&'a [(u64, u64)]),
    /// Make ranges read as zero; `unmap`: their space may be given back.
    WriteZeroes { ranges: &'a [(u64, u64)], unmap: bool },
    /// Put the identity into the buffer.
    Identity,
    /// A request of any type, with nothing but a header and a status byte.
    Raw { kind: u32, sector: u64 },
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The slot that is free again.
    pub slot: u16,
    /// 0: done; 1: failed; 2: unsupported.
    pub status: u8,
    /// Bytes that the device says to have written.
    pub written: u32,
}

/// A queue: slots to fill, a ring to put them into. Belongs to one thread at a time.
#[derive(Debug)]
pub struct DriverQueue {
    memory: Arc<Memory>,
    layout: Layout,
    guest_base: u64,
    size: u16,
    buffer_len: u32,
    piece_len: u32,
    event_index: bool,
    indirect: bool,
    /// Descriptors that each slot owns.
    stride: u16,
    free: Vec<u16>,
    next_avail: u16,
    kicked_avail: u16,
    seen_used: u16,
    kick: File,
    call: File,
    err: File,
    /// How often the device had to be kicked.
    pub kicks: u64,
}

impl DriverQueue {
    pub(super) fn new(
        memory: Arc<Memory>,
        layout: Layout,
        options: &DriverOptions,
        features: u64,
        guest_base: u64,
        (kick, call, err): (OwnedFd, OwnedFd, OwnedFd),
    ) -> Self {
        let indirect = features & feature::INDIRECT_DESC != 0;
        let pieces = if options.piece_len == 0 { 1 } else { options.buffer_len.div_ceil(options.piece_len) };
        let pieces = u16::try_from(pieces.min(SEG_MAX)).unwrap_or(1);
        let stride = if indirect { 1 } else { 2 + pieces };
        let depth = options.depth.min(options.queue_size / stride);
        Self {
            memory,
            layout,
            guest_base,
            size: options.queue_size,
            buffer_len: options.buffer_len,
            piece_len: options.piece_len,
            event_index: features & feature::EVENT_IDX != 0,
            indirect,
            stride,
            free: (0..depth).rev().collect(),
            next_avail: 0,
            kicked_avail: 0,
            seen_used: 0,
            kick: kick.into(),
            call: call.into(),
            err: err.into(),
            kicks: 0,
        }
    }

    pub(super) fn descriptors(&self) -> (RawFd, RawFd, RawFd) {
        (self.kick.as_raw_fd(), self.call.as_raw_fd(), self.err.as_raw_fd())
    }

    /// Slots that are free.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Where the ring is to be read on, as far as the driver knows.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// The answers seen so far, as the ring counts them.
    pub fn seen_used(&self) -> u16 {
        self.seen_used
    }

    /// The slot that the next [`DriverQueue::submit`] takes.
    pub fn next_slot(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// The buffer of a slot. Not to be touched while the slot's request is under way.
    pub fn buffer(&mut self, slot: u16) -> &mut [u8] {
        let (offset, len) = (self.buffer_at(slot), self.buffer_len as usize);
        // SAFETY: the buffer lies inside this queue's part of the memory, which `self` alone hands out.
        unsafe { std::slice::from_raw_parts_mut(self.memory.at(offset, len as u64), len) }
    }

    fn buffer_at(&self, slot: u16) -> u64 {
        self.layout.buffers + u64::from(self.buffer_len).next_multiple_of(4096) * u64::from(slot)
    }

    fn control_at(&self, slot: u16) -> u64 {
        self.layout.control + CONTROL_LEN * u64::from(slot)
    }

    fn write_bytes(&self, offset: u64, bytes: &[u8]) {
        let to = self.memory.at(offset, bytes.len() as u64);
        // SAFETY: `at` checked the range; the device does not write to what it is about to read.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn word(&self, offset: u64) -> &AtomicU16 {
        // SAFETY: `at` checked the range, callers give even offsets; only atomic operations touch ring words.
        unsafe { AtomicU16::from_ptr(self.memory.at(offset, 2).cast()) }
    }

    /// Puts a request into the ring, in a free slot; `None` when there is none. The device sees it at once, but is
    /// woken only by [`DriverQueue::kick`].
    pub fn submit(&mut self, command: &Command<'_>) -> Option<u16> {
        let slot = self.free.pop()?;
        let control = self.control_at(slot);
        let (kind, sector, to_device, from_device) = match *command {
            Command::Read { at, len } => (0u32, at / 512, 0, len),
            Command::Write { at, len } => (1, at / 512, len, 0),
            Command::Flush => (4, 0, 0, 0),
            Command::Identity => (8, 0, 0, 20),
            Command::Discard(ranges) => (11, 0, self.put_ranges(control, ranges, false), 0),
            Command::WriteZeroes { ranges, unmap } => (13, 0, self.put_ranges(control, ranges, unmap), 0),
            Command::Raw { kind, sector } => (kind, sector, 0, 0),
        };
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.write_bytes(control, &header);
        self.write_bytes(control + STATUS_AT, &[STATUS_NONE]);
        let data_at = if matches!(command, Command::Discard(_) | Command::WriteZeroes { .. }) {
            control + RANGES_AT
        } else {
            self.buffer_at(slot)
        };
        let (len, write) = if to_device > 0 { (to_device, 0) } else { (from_device, DESC_F_WRITE) };
        self.put_chain(slot, control, data_at, len, write);
        self.put_avail(slot * self.stride);
        Some(slot)
    }

    fn put_ranges(&self, control: u64, ranges: &[(u64, u64)], unmap: bool) -> u32 {
        assert!(ranges.len() <= RANGES_MAX, "a request has at most {RANGES_MAX} ranges");
        for (index, (at, len)) in ranges.iter().enumerate() {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&(at / 512).to_le_bytes());
            bytes[8..12].copy_from_slice(&((len / 512) as u32).to_le_bytes());
            bytes[12] = u8::from(unmap);
            self.write_bytes(control + RANGES_AT + 16 * index as u64, &bytes);
        }
        16 * ranges.len() as u32
    }

    fn put_chain(&self, slot: u16, control: u64, data_at: u64, len: u32, write: u16) {
        let (table, first) = if self.indirect {
            (control + TABLE_AT, 0)
        } else {
            (self.layout.desc + 16 * u64::from(slot * self.stride), slot * self.stride)
        };
        let mut count = 0;
        let mut put = |at: u64, len: u32, flags: u16| {
            let next = first + count + 1;
            let descriptor = Descriptor { at: self.guest_base + at, len, flags, next };
            self.write_bytes(table + 16 * u64::from(count), &descriptor.to_bytes());
            count += 1;
        };
        put(control, 16, DESC_F_NEXT);
        let piece = if self.piece_len == 0 || len / SEG_MAX >= self.piece_len { len } else { self.piece_len };
        let mut done = 0;
        while done < len {
            let piece = piece.min(len - done);
            put(data_at + u64::from(done), piece, DESC_F_NEXT | write);
            done += piece;
        }
        put(control + STATUS_AT, 1, DESC_F_WRITE);
        if self.indirect {
            let at = self.guest_base + table;
            self.put_descriptor(
                slot,
                Descriptor { at, len: u32::from(count) * 16, flags: DESC_F_INDIRECT, next: 0 },
            );
        }
    }

    /// Writes a descriptor of the table: for tests that play a hostile guest.
    pub fn put_descriptor(&self, index: u16, descriptor: Descriptor) {
        self.write_bytes(self.layout.desc + 16 * u64::from(index), &descriptor.to_bytes());
    }

    /// Makes a chain available, whatever it is.
    pub fn put_avail(&mut self, head: u16) {
        let place = u64::from(self.next_avail & (self.size - 1));
        self.word(self.layout.avail + 4 + 2 * place).store(head.to_le(), Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
        self.word(self.layout.avail + 2).store(self.next_avail.to_le(), Ordering::Release);
    }

    /// Moves the available index by `step` without putting anything into the ring.
    pub fn jump_avail(&mut self, step: u16) {
        self.next_avail = self.next_avail.wrapping_add(step);
        self.word(self.layout.avail + 2).store(self.next_avail.to_le(), Ordering::Release);
    }

    /// The guest address of a slot's buffer.
    pub fn buffer_guest(&self, slot: u16) -> u64 {
        self.guest_base + self.buffer_at(slot)
    }

    /// Wakes the device if it asks for that. Tells whether it did.
    pub fn kick(&mut self) -> io::Result<bool> {
        fence(Ordering::SeqCst);
        let old = std::mem::replace(&mut self.kicked_avail, self.next_avail);
        let wanted = if self.event_index {
            let event = self.word(self.layout.used + 4 + 8 * u64::from(self.size)).load(Ordering::Relaxed);
            need_event(u16::from_le(event), self.next_avail, old)
        } else {
            u16::from_le(self.word(self.layout.used).load(Ordering::Relaxed)) & 1 == 0
        };
        if wanted && old != self.next_avail {
            self.kicks += 1;
            self.kick.write_all(&1u64.to_ne_bytes())?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Kicks whether the device asks for it or not.
    pub fn kick_always(&mut self) -> io::Result<()> {
        self.kicked_avail = self.next_avail;
        self.kick.write_all(&1u64.to_ne_bytes())
    }

    /// Whether an answer is there: one load.
    pub fn has_answers(&self) -> bool {
        u16::from_le(self.word(self.layout.used + 2).load(Ordering::Acquire)) != self.seen_used
    }

    /// Takes the answers that are there.
    pub fn reap(&mut self, into: &mut Vec<Completion>) -> usize {
        let until = u16::from_le(self.word(self.layout.used + 2).load(Ordering::Acquire));
        let mut count = 0;
        while self.seen_used != until {
            let place = u64::from(self.seen_used & (self.size - 1));
            let entry = self.memory.at(self.layout.used + 4 + 8 * place, 8).cast::<u32>();
            // SAFETY: the entry lies inside the used ring, is aligned, and was published before the index.
            let (head, written) = unsafe { (entry.read_volatile(), entry.add(1).read_volatile()) };
            let slot = (u32::from_le(head) / u32::from(self.stride)) as u16;
            let status = self.memory.at(self.control_at(slot) + STATUS_AT, 1);
            // SAFETY: `at` checked the range; the device wrote the byte before the answer.
            let status = unsafe { status.read_volatile() };
            self.seen_used = self.seen_used.wrapping_add(1);
            self.free.push(slot);
            into.push(Completion { slot, status, written: u32::from_le(written) });
            count += 1;
        }
        count
    }

    /// Waits for an answer, sleeping; false when none came in time.
    pub fn wait(&mut self, within: Duration) -> io::Result<bool> {
        if self.event_index {
            let event = self.word(self.layout.avail + 4 + 2 * u64::from(self.size));
            event.store(self.seen_used.to_le(), Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        let deadline = Instant::now() + within;
        // A signal may belong to answers that were seen already: then there are none, and the wait goes on.
        while !self.has_answers() {
            if !readable(&self.call, deadline.saturating_duration_since(Instant::now()))? {
                return Ok(self.has_answers());
            }
            drain(&self.call)?;
        }
        Ok(true)
    }

    /// Tells a device without the event index whether interrupts are wanted.
    pub fn want_interrupts(&self, wanted: bool) {
        self.word(self.layout.avail).store(u16::from(!wanted).to_le(), Ordering::Relaxed);
        if self.event_index && !wanted {
            // An index that lies half the ring's numbers behind is not passed for a long time.
            let event = self.word(self.layout.avail + 4 + 2 * u64::from(self.size));
            event.store(self.seen_used.wrapping_sub(0x8000).to_le(), Ordering::Relaxed);
        }
    }

    /// Waits until the device says that the queue is broken; false when it does not in time.
    pub fn wait_broken(&self, within: Duration) -> io::Result<bool> {
        readable(&self.err, within)
    }
}

fn readable(file: &File, within: Duration) -> io::Result<bool> {
    let mut polled = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let timeout = i32::try_from(within.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one valid entry.
    match unsafe { libc::poll(&raw mut polled, 1, timeout) } {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(io::Error::last_os_error()),
    }
}

fn drain(mut file: &File) -> io::Result<()> {
    let mut value = [0; 8];
    match file.read(&mut value) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        result => result.map(drop),
    }
}
