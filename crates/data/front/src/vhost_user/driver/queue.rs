//! One queue as a driver uses it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_load::Ring;

use super::super::blk::{RANGES_MAX, SEG_MAX, feature};
use super::super::chain::{DESC_F_WRITE, Descriptor};
use super::ring::{DriverRing, Parts};
use super::{CONTROL_LEN, DriverOptions, Layout, Memory};

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
    ring: DriverRing,
    buffer_len: u32,
    piece_len: u32,
    indirect: bool,
    free: Vec<u16>,
    /// Answers so far.
    seen: u16,
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
        let kind = (features & feature::RING_PACKED != 0, features & feature::EVENT_IDX != 0);
        Self {
            ring: DriverRing::new(Arc::clone(&memory), layout, options.queue_size, stride, kind),
            memory,
            layout,
            guest_base,
            buffer_len: options.buffer_len,
            piece_len: options.piece_len,
            indirect,
            free: (0..depth).rev().collect(),
            seen: 0,
            kick: kick.into(),
            call: call.into(),
            err: err.into(),
            kicks: 0,
        }
    }

    pub(super) fn descriptors(&self) -> (BorrowedFd<'_>, BorrowedFd<'_>, BorrowedFd<'_>) {
        (self.kick.as_fd(), self.call.as_fd(), self.err.as_fd())
    }

    /// Slots that are free.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Where a back end that knows nothing else reads on, as messages carry it: after the last answer seen.
    pub fn base(&self) -> u32 {
        self.ring.base()
    }

    /// The answers seen so far, modulo 65536.
    pub fn seen_used(&self) -> u16 {
        self.seen
    }

    /// The slot that the next [`DriverQueue::submit`] takes.
    pub fn next_slot(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// What the device calls the request in a slot: the head of its chain in a split ring, the buffer's id in a packed
    /// one.
    pub const fn head_of(&self, slot: u16) -> u16 {
        self.ring.head_of(slot)
    }

    /// The buffer of a slot. Not to be touched while the slot's request is in flight.
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

    fn put_chain(&mut self, slot: u16, control: u64, data_at: u64, len: u32, write: u16) {
        let guest = |offset: u64| self.guest_base + offset;
        let piece = if self.piece_len == 0 || len / SEG_MAX >= self.piece_len { len } else { self.piece_len };
        let data = (guest(data_at), len, piece.max(1));
        let parts = Parts::new(guest(control), data, write, guest(control + STATUS_AT));
        if !self.indirect {
            self.ring.put(slot, parts);
            return;
        }
        let table = control + TABLE_AT;
        let mut count = 0;
        for (at, len, flags) in parts {
            let entry = self.ring.table_entry(count, at, len, flags);
            self.write_bytes(table + 16 * u64::from(count), &entry);
            count += 1;
        }
        self.ring.put(slot, std::iter::once(Parts::table(guest(table), count)));
    }

    /// Writes a descriptor of a split ring's table: for tests that play a hostile guest.
    pub fn put_descriptor(&self, index: u16, descriptor: Descriptor) {
        self.ring.put_descriptor(index, descriptor);
    }

    /// Makes a chain of a split ring available, whatever it is.
    pub fn put_avail(&mut self, head: u16) {
        self.ring.put_avail(head);
    }

    /// Moves the available index of a split ring by `step` without putting anything into the ring.
    pub fn jump_avail(&mut self, step: u16) {
        self.ring.jump(step);
    }

    /// Makes descriptors of a packed ring available as they are, whatever that means.
    pub fn put_packed(&mut self, list: &[Descriptor]) {
        self.ring.put_packed(0, list.iter().copied());
    }

    /// The guest address of a slot's buffer.
    pub fn buffer_guest(&self, slot: u16) -> u64 {
        self.guest_base + self.buffer_at(slot)
    }

    /// Wakes the device if it asks for that. Tells whether it did.
    pub fn kick(&mut self) -> io::Result<bool> {
        if self.ring.wants_kick() {
            self.kicks += 1;
            self.kick.write_all(&1u64.to_ne_bytes())?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Kicks whether the device asks for it or not.
    pub fn kick_always(&mut self) -> io::Result<()> {
        self.ring.wants_kick();
        self.kick.write_all(&1u64.to_ne_bytes())
    }

    /// Whether an answer is there: one load.
    pub fn has_answers(&self) -> bool {
        self.ring.has_answers()
    }

    /// Takes the answers that are there.
    pub fn reap(&mut self, into: &mut Vec<Completion>) -> usize {
        self.reap_each(|completion| into.push(completion))
    }

    fn reap_each(&mut self, mut take: impl FnMut(Completion)) -> usize {
        let mut count = 0;
        while let Some((slot, written)) = self.ring.next_answer() {
            let status = self.memory.at(self.control_at(slot) + STATUS_AT, 1);
            // SAFETY: `at` checked the range; the device wrote the byte before the answer.
            let status = unsafe { status.read_volatile() };
            self.seen = self.seen.wrapping_add(1);
            self.free.push(slot);
            take(Completion { slot, status, written });
            count += 1;
        }
        count
    }

    /// Waits for an answer, sleeping; false when none came in time.
    pub fn wait(&mut self, within: Duration) -> io::Result<bool> {
        self.ring.enable_interrupts();
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

    /// Turns interrupts by the device on or off.
    pub fn want_interrupts(&self, wanted: bool) {
        self.ring.want_interrupts(wanted);
    }

    /// Waits until the device says that the queue is broken; false when it does not in time.
    pub fn wait_broken(&self, within: Duration) -> io::Result<bool> {
        readable(&self.err, within)
    }
}

impl Ring for DriverQueue {
    fn room(&self) -> usize {
        Self::room(self)
    }

    fn submit(&mut self, write: bool, at: u64, len: u32) -> io::Result<Option<u32>> {
        let command = if write { Command::Write { at, len } } else { Command::Read { at, len } };
        Ok(Self::submit(self, &command).map(u32::from))
    }

    fn kick(&mut self) -> io::Result<()> {
        Self::kick(self).map(drop)
    }

    fn has_answers(&self) -> bool {
        Self::has_answers(self)
    }

    fn wait(&mut self, time: Duration) -> io::Result<bool> {
        Self::wait(self, time)
    }

    fn reap(&mut self, into: &mut Vec<(u32, bool)>) -> io::Result<()> {
        self.reap_each(|one| into.push((one.slot.into(), one.status == 0)));
        Ok(())
    }

    fn want_wakes(&mut self, wanted: bool) {
        self.want_interrupts(wanted);
    }

    fn notified(&self) -> (u64, u64) {
        (self.kicks, 0)
    }

    fn name_of(&self, slot: u32) -> u32 {
        u16::try_from(slot).map_or(slot, |slot| self.head_of(slot).into())
    }
}

fn readable(file: &File, within: Duration) -> io::Result<bool> {
    tapio_sys::poll::is_readable(file, within)
}

fn drain(mut file: &File) -> io::Result<()> {
    let mut value = [0; 8];
    match file.read(&mut value) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        result => result.map(drop),
    }
}
