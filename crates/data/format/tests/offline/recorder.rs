//! A medium that remembers every change in order, so that a test can stop the world after any of them.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use tapio_format::Medium;
use tapio_types::Span;

use crate::build::Random;

#[derive(Clone, Debug)]
pub enum Change {
    Write { at: u64, bytes: Vec<u8> },
    SetLen(u64),
    Flush,
}

/// Memory that remembers.
#[derive(Clone, Debug)]
pub struct Recorder {
    now: Vec<u8>,
    before: Vec<u8>,
    device: bool,
    /// Which of the media that share a log this is.
    index: usize,
    log: Log,
}

/// Changes of all media in the order in which they happened.
type Log = Rc<RefCell<Vec<(usize, Change)>>>;

impl Recorder {
    pub fn new(bytes: Vec<u8>, device: bool) -> Self {
        Self { now: bytes.clone(), before: bytes, device, index: 0, log: Rc::default() }
    }

    /// Another medium in the same world: one stop stops both.
    pub fn beside(&self, bytes: Vec<u8>, device: bool) -> Self {
        Self { index: self.index + 1, log: Rc::clone(&self.log), ..Self::new(bytes, device) }
    }

    /// What happened to this medium, to be asked after it was given away.
    pub fn history(&self) -> History {
        History::of(&[self])
    }

    fn note(&self, change: Change) {
        self.log.borrow_mut().push((self.index, change));
    }
}

impl Medium for Recorder {
    fn len(&self) -> io::Result<u64> {
        Medium::len(&self.now)
    }
    fn is_device(&self) -> bool {
        self.device
    }
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.now.read_at(at, into)
    }
    fn write_at(&mut self, at: u64, from: &[u8]) -> io::Result<()> {
        if self.device && at + from.len() as u64 > Vec::len(&self.now) as u64 {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.note(Change::Write { at, bytes: from.to_vec() });
        self.now.write_at(at, from)
    }
    fn set_len(&mut self, len: u64) -> io::Result<()> {
        assert!(!self.device, "a device keeps its length");
        self.note(Change::SetLen(len));
        Medium::set_len(&mut self.now, len)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.note(Change::Flush);
        Ok(())
    }
    fn zero(&mut self, span: Span) -> io::Result<()> {
        self.write_at(span.start, &vec![0; span.len as usize])
    }
    fn reserve(&mut self, span: Span) -> io::Result<()> {
        self.zero(span)
    }
}

pub struct History {
    before: Vec<(Vec<u8>, bool)>,
    log: Log,
}

impl History {
    /// Of media that share a log, in their order.
    pub fn of(media: &[&Recorder]) -> Self {
        let before = media.iter().map(|medium| (medium.before.clone(), medium.device)).collect();
        Self { before, log: Rc::clone(&media[0].log) }
    }

    /// How many changes there were.
    pub fn len(&self) -> usize {
        self.log.borrow().len()
    }

    /// What a kill of the process after `count` changes leaves: the system still writes all of them.
    pub fn all_killed_after(&self, count: usize) -> Vec<Recorder> {
        let mut bytes: Vec<_> = self.before.iter().map(|(bytes, _)| bytes.clone()).collect();
        for (index, change) in &self.log.borrow()[..count] {
            apply(&mut bytes[*index], change);
        }
        self.recorders(bytes)
    }

    /// What a power cut after `count` changes leaves: everything flushed, and of the rest any sectors in any order.
    pub fn all_cut_after(&self, count: usize, random: &mut Random) -> Vec<Recorder> {
        let log = self.log.borrow();
        let mut bytes: Vec<_> = self.before.iter().map(|(bytes, _)| bytes.clone()).collect();
        let is_flush =
            |index| move |entry: &(usize, Change)| entry.0 == index && matches!(entry.1, Change::Flush);
        let flushed: Vec<_> = (0..bytes.len())
            .map(|index| log[..count].iter().rposition(is_flush(index)).unwrap_or(0))
            .collect();
        for (at, (index, change)) in log[..count].iter().enumerate() {
            let bytes = &mut bytes[*index];
            match change {
                _ if at < flushed[*index] => apply(bytes, change),
                Change::Write { at, bytes: data } => {
                    for (sector, data) in data.chunks(512).enumerate() {
                        if random.below(2) == 0 {
                            bytes.write_at(at + sector as u64 * 512, data).unwrap();
                        }
                    }
                }
                _ if random.below(2) == 0 => apply(bytes, change),
                _ => {}
            }
        }
        self.recorders(bytes)
    }

    pub fn killed_after(&self, count: usize) -> Recorder {
        self.all_killed_after(count).remove(0)
    }

    pub fn cut_after(&self, count: usize, random: &mut Random) -> Recorder {
        self.all_cut_after(count, random).remove(0)
    }

    fn recorders(&self, bytes: Vec<Vec<u8>>) -> Vec<Recorder> {
        let mut media: Vec<Recorder> = Vec::new();
        for (bytes, (_, device)) in bytes.into_iter().zip(&self.before) {
            media.push(match media.last() {
                Some(last) => last.beside(bytes, *device),
                None => Recorder::new(bytes, *device),
            });
        }
        media
    }
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    match change {
        Change::Write { at, bytes: data } => bytes.write_at(*at, data).unwrap(),
        Change::SetLen(len) => Medium::set_len(bytes, *len).unwrap(),
        Change::Flush => {}
    }
}
