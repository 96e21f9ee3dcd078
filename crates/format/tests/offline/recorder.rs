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
    log: Rc<RefCell<Vec<Change>>>,
}

impl Recorder {
    pub fn new(bytes: Vec<u8>, device: bool) -> Self {
        Self { now: bytes.clone(), before: bytes, device, log: Rc::default() }
    }

    /// What happened, to be asked after the medium itself was given away.
    pub fn history(&self) -> History {
        History { before: self.before.clone(), device: self.device, log: Rc::clone(&self.log) }
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
        self.log.borrow_mut().push(Change::Write { at, bytes: from.to_vec() });
        self.now.write_at(at, from)
    }
    fn set_len(&mut self, len: u64) -> io::Result<()> {
        assert!(!self.device, "a device keeps its length");
        self.log.borrow_mut().push(Change::SetLen(len));
        Medium::set_len(&mut self.now, len)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.log.borrow_mut().push(Change::Flush);
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
    before: Vec<u8>,
    device: bool,
    log: Rc<RefCell<Vec<Change>>>,
}

impl History {
    /// How many changes there were.
    pub fn len(&self) -> usize {
        self.log.borrow().len()
    }

    /// What a kill of the process after `count` changes leaves: the system still writes all of them.
    pub fn killed_after(&self, count: usize) -> Recorder {
        let mut bytes = self.before.clone();
        for change in &self.log.borrow()[..count] {
            apply(&mut bytes, change);
        }
        Recorder::new(bytes, self.device)
    }

    /// What a power cut after `count` changes leaves: everything flushed, and of the rest any sectors in any order.
    pub fn cut_after(&self, count: usize, random: &mut Random) -> Recorder {
        let log = self.log.borrow();
        let flushed =
            log[..count].iter().rposition(|change| matches!(change, Change::Flush)).map_or(0, |at| at + 1);
        let mut bytes = self.before.clone();
        for change in &log[..flushed] {
            apply(&mut bytes, change);
        }
        for change in &log[flushed..count] {
            match change {
                Change::Write { at, bytes: data } => {
                    for (index, sector) in data.chunks(512).enumerate() {
                        if random.below(2) == 0 {
                            bytes.write_at(at + index as u64 * 512, sector).unwrap();
                        }
                    }
                }
                _ if random.below(2) == 0 => apply(&mut bytes, change),
                _ => {}
            }
        }
        Recorder::new(bytes, self.device)
    }
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    match change {
        Change::Write { at, bytes: data } => bytes.write_at(*at, data).unwrap(),
        Change::SetLen(len) => Medium::set_len(bytes, *len).unwrap(),
        Change::Flush => {}
    }
}
