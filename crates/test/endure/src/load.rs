//! The clients of a disk: each has a connection of its own, reads and writes at random, and compares what it reads
//! with the model.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use tapio_nbd::client::{Address, Client, ClientError, ClientOptions};

use crate::model::{Model, Range, SECTOR_LEN, fill};
use crate::random::Random;
use crate::report::{Finding, Report};

/// How long a request may take. What hangs longer than this is a finding, unless a fault was made.
const REQUEST_LIMIT: Duration = Duration::from_secs(150);

/// How long a client may need to find the successor of a disk process.
const RECONNECT_LIMIT: Duration = Duration::from_secs(120);

/// Longest request, in sectors.
const REQUEST_SECTORS_MAX: u64 = 512;

/// What the schedule does to a disk that its clients notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Its process ends.
    Down,
    /// Its storage is full.
    NoSpace,
    /// Its storage fails, or does not answer in time.
    Fault,
}

/// Which trouble is, or was while a request was in flight.
#[derive(Debug, Default)]
pub struct Troubles {
    active: [AtomicBool; 3],
    begun: [AtomicU64; 3],
}

/// What there was when a request began.
#[derive(Clone, Copy, Debug)]
pub struct Before([(bool, u64); 3]);

impl Troubles {
    /// A trouble begins.
    pub fn begin(&self, trouble: Trouble) {
        self.active[trouble as usize].store(true, Ordering::SeqCst);
        self.begun[trouble as usize].fetch_add(1, Ordering::SeqCst);
    }

    /// It is over: what requests before did is settled, and every request that begins from now on has to succeed.
    pub fn end(&self, trouble: Trouble) {
        self.active[trouble as usize].store(false, Ordering::SeqCst);
    }

    /// For a request that begins now.
    pub fn before(&self) -> Before {
        let look = |index: usize| {
            (self.active[index].load(Ordering::SeqCst), self.begun[index].load(Ordering::SeqCst))
        };
        Before([look(0), look(1), look(2)])
    }

    /// Whether it is there.
    pub fn is_active(&self, trouble: Trouble) -> bool {
        self.active[trouble as usize].load(Ordering::SeqCst)
    }

    /// Whether there was such a trouble while the request was in flight.
    pub fn excuse(&self, before: Before, trouble: Trouble) -> bool {
        let (active, begun) = before.0[trouble as usize];
        active || self.begun[trouble as usize].load(Ordering::SeqCst) != begun
    }
}

/// A disk as its clients know it.
#[derive(Debug)]
pub struct Target {
    /// The name of the leg.
    pub name: String,
    /// Its NBD socket.
    pub socket: PathBuf,
    /// What it has to hold.
    pub model: Mutex<Model>,
    /// Held by every request; a holder for writing has a disk without requests.
    pub gate: RwLock<()>,
    /// What clients have to bear.
    pub troubles: Troubles,
    /// Counts changes of the size: clients connect anew.
    pub sizes: AtomicU64,
    /// The step of the schedule.
    pub step: AtomicU64,
    /// A client waits this long after each request.
    pub rest: Duration,
    /// Whether the disk takes zeroes and discards.
    pub discards: bool,
    /// Number of the disk in what it holds.
    pub disk: u16,
}

impl Target {
    /// What is wrong, with the step.
    pub fn finding(&self, what: impl Into<String>) -> Finding {
        Finding { leg: self.name.clone(), step: self.step.load(Ordering::Relaxed), what: what.into() }
    }
}

/// A connection, for anything that needs one.
pub fn connect(socket: &Path) -> Result<Client, ClientError> {
    Client::connect(&Address::Unix(socket.to_path_buf()), &ClientOptions::all(""), REQUEST_LIMIT)
}

/// What a client does next.
#[derive(Clone, Copy, Debug)]
enum Act {
    Read(Range),
    Write(Range, bool),
    Zero(Range),
    Trim(Range),
    Flush,
}

impl Act {
    const fn range(self) -> Option<Range> {
        match self {
            Self::Read(range) | Self::Write(range, _) | Self::Zero(range) | Self::Trim(range) => Some(range),
            Self::Flush => None,
        }
    }
}

/// A client of a disk.
#[derive(Debug)]
pub struct Worker<'a> {
    target: &'a Target,
    report: &'a Report,
    random: Random,
    buffer: Vec<u8>,
}

impl<'a> Worker<'a> {
    /// The client `number` of a disk.
    pub fn new(target: &'a Target, report: &'a Report, number: u32) -> Self {
        let random = Random::new(report.seed, &format!("{}/client {number}", target.name));
        let buffer = vec![0; (REQUEST_SECTORS_MAX * SECTOR_LEN) as usize];
        Self { target, report, random, buffer }
    }

    /// Works until the run ends.
    pub fn run(mut self) {
        let mut client = None;
        let mut sizes = 0;
        while !self.report.is_ending() {
            let now = self.target.sizes.load(Ordering::SeqCst);
            // Some connections are short, and end without a farewell.
            if now != sizes || self.random.once_in(2000) {
                (client, sizes) = (None, now);
            }
            let Some(mut open) = client.take().or_else(|| self.connect()) else { continue };
            match self.act(&mut open) {
                Ok(true) => client = Some(open),
                Ok(false) => {}
                Err(finding) => return self.report.found(finding),
            }
            if !self.target.rest.is_zero() {
                thread::sleep(self.target.rest);
            }
        }
    }

    /// Connects to whichever process serves the disk now.
    fn connect(&self) -> Option<(Client, Before)> {
        let began = Instant::now();
        loop {
            let before = self.target.troubles.before();
            match connect(&self.target.socket) {
                Ok(client) => {
                    self.report.load.connections.fetch_add(1, Ordering::Relaxed);
                    return Some((client, before));
                }
                Err(error) if began.elapsed() > RECONNECT_LIMIT => {
                    let said = format!("no connection within {RECONNECT_LIMIT:?}: {error}");
                    self.report.found(self.target.finding(said));
                    return None;
                }
                Err(_) if self.report.is_ending() => return None,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    fn choose(&mut self, count: u64) -> Act {
        let random = &mut self.random;
        let whole = random.once_in(3);
        // Mostly small requests; some are blocks of 4 KiB, some meet the ends of blocks and of the disk.
        let longest = [8, 8, 64, REQUEST_SECTORS_MAX][random.below(4) as usize];
        let mut len = (1 + random.below(longest)).min(count);
        let mut first = match random.below(8) {
            0 => count - len,
            1 => (random.below(count) / 4096 * 4096).saturating_sub(len / 2),
            // Where much is written again and again.
            2..=4 => random.below(count.min(8192)),
            _ => random.below(count),
        };
        if whole {
            (first, len) = (first / 8 * 8, len.div_ceil(8) * 8);
        }
        let range = Range { first, count: len.min(count - first) };
        match random.below(32) {
            0..=11 => Act::Read(range),
            12 => Act::Flush,
            13 if self.target.discards => Act::Zero(range),
            14 if self.target.discards => Act::Trim(self.longer(range, count)),
            number => Act::Write(range, number == 15),
        }
    }

    /// Whole blocks are given back only when all of them is discarded.
    fn longer(&mut self, range: Range, count: u64) -> Range {
        if self.random.once_in(2) {
            return range;
        }
        let first = range.first / 4096 * 4096;
        Range { first, count: 4096.min(count - first) }
    }

    /// One request. `Ok(false)`: the connection is of no more use.
    fn act(&mut self, (client, connected): &mut (Client, Before)) -> Result<bool, Finding> {
        let connected = *connected;
        let target = self.target;
        let gate = target.gate.read().expect("no holder panics");
        let (act, number) = {
            let mut model = target.model.lock().expect("no holder panics");
            // A connection does not learn that the disk has grown.
            let count = model.count().min(client.export().len / SECTOR_LEN);
            let act = self.choose(count);
            if act.range().is_some_and(|range| !model.take(range)) {
                return Ok(true);
            }
            let number = match act {
                Act::Write(..) | Act::Zero(_) | Act::Trim(_) => model.begin_write(),
                Act::Flush => model.begin_flush(),
                Act::Read(_) => 0,
            };
            (act, number)
        };
        let before = target.troubles.before();
        let answer = self.ask(client, act, number);
        let mut model = target.model.lock().expect("no holder panics");
        let answer = match answer {
            Ok(bytes) => {
                self.count(act);
                let range = act.range();
                let result = match act {
                    Act::Read(range) => model.read(range, &bytes),
                    Act::Write(range, _) => {
                        model.wrote(range, number, false);
                        Ok(())
                    }
                    Act::Zero(range) => {
                        model.wrote(range, number, true);
                        Ok(())
                    }
                    Act::Trim(range) => {
                        model.discarded(range, number);
                        Ok(())
                    }
                    Act::Flush => {
                        model.flush(number);
                        Ok(())
                    }
                };
                if let Some(range) = range {
                    model.release(range);
                }
                return result.map(|()| true).map_err(|what| target.finding(what));
            }
            Err(error) => error,
        };
        let excused = self.excused(connected, before, &answer);
        match act {
            Act::Write(range, _) | Act::Zero(range) => {
                model.maybe_wrote(range, number, matches!(act, Act::Zero(_)));
            }
            Act::Trim(range) => model.discarded(range, number),
            Act::Read(_) | Act::Flush => {}
        }
        drop(model);
        drop(gate);
        let Some(trouble) = excused else {
            return Err(target.finding(format!("{act:?} failed without a reason: {answer}")));
        };
        self.report.load.failed.fetch_add(1, Ordering::Relaxed);
        // What has no answer may still reach the storage: no other client uses the range before that is settled.
        if trouble != Trouble::NoSpace {
            self.wait_until_settled(trouble);
        }
        if let Some(range) = act.range() {
            target.model.lock().expect("no holder panics").release(range);
        }
        Ok(matches!(answer, ClientError::Request { .. }))
    }

    fn wait_until_settled(&self, trouble: Trouble) {
        while self.target.troubles.is_active(trouble) && !self.report.is_ending() {
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn ask(&mut self, client: &mut Client, act: Act, number: u32) -> Result<Vec<u8>, ClientError> {
        match act {
            Act::Read(range) => return client.read(range.offset(), range.len()),
            Act::Write(range, durable) => {
                let bytes = &mut self.buffer[..range.len() as usize];
                let sectors = range.first..range.first + range.count;
                for (sector, into) in sectors.zip(bytes.chunks_exact_mut(SECTOR_LEN as usize)) {
                    fill(self.target.disk, number, sector, into);
                }
                client.write(range.offset(), bytes, durable)?;
            }
            Act::Zero(range) => {
                let flags = if number.is_multiple_of(2) { 0 } else { tapio_nbd::wire::command_flag::NO_HOLE };
                client.zero(range.offset(), range.len(), flags)?;
            }
            Act::Trim(range) => client.trim(range.offset(), range.len())?,
            Act::Flush => client.flush()?,
        }
        Ok(Vec::new())
    }

    fn count(&self, act: Act) {
        let load = &self.report.load;
        load.answered.fetch_add(1, Ordering::Relaxed);
        match act {
            Act::Read(range) => load.verified.fetch_add(range.len(), Ordering::Relaxed),
            Act::Write(range, _) => load.written.fetch_add(range.len(), Ordering::Relaxed),
            _ => 0,
        };
    }

    /// The trouble that explains an error, if there is one.
    fn excused(&self, connected: Before, before: Before, error: &ClientError) -> Option<Trouble> {
        let excuse = |trouble| self.target.troubles.excuse(before, trouble).then_some(trouble);
        match error {
            // NBD has no number of its own for a storage that is late: it is EIO on the wire.
            ClientError::Request { error, .. } => match i32::try_from(*error) {
                Ok(libc::ENOSPC) => excuse(Trouble::NoSpace),
                Ok(libc::EIO | libc::ETIMEDOUT) => excuse(Trouble::Fault),
                Ok(libc::ESHUTDOWN) => excuse(Trouble::Down),
                _ => None,
            },
            // The process may have ended while the client rested.
            ClientError::Io(_) => {
                self.target.troubles.excuse(connected, Trouble::Down).then_some(Trouble::Down)
            }
            _ => None,
        }
    }
}

/// Reads the whole disk and compares it. Only while no client has a request in flight.
pub fn verify(target: &Target, report: &Report) -> Result<(), Finding> {
    const STEP: u64 = 2048;
    let wrong = |error: &dyn std::fmt::Display| target.finding(format!("reading the whole disk: {error}"));
    let mut client = connect(&target.socket).map_err(|error| wrong(&error))?;
    let mut model = target.model.lock().expect("no holder panics");
    let count = model.count();
    let exported = client.export().len;
    if exported != count * SECTOR_LEN {
        return Err(
            target.finding(format!("the disk has {exported} bytes instead of {}", count * SECTOR_LEN))
        );
    }
    let mut first = 0;
    while first < count {
        let range = Range { first, count: STEP.min(count - first) };
        let bytes = client.read(range.offset(), range.len()).map_err(|error| wrong(&error))?;
        model.read(range, &bytes).map_err(|what| target.finding(what))?;
        report.load.verified.fetch_add(range.len(), Ordering::Relaxed);
        first += range.count;
    }
    client.disconnect().map_err(|error| wrong(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_excused_by_trouble_that_was_there_at_any_time_of_it() {
        let troubles = Troubles::default();
        let early = troubles.before();
        assert!(!troubles.excuse(early, Trouble::Down));
        troubles.begin(Trouble::Down);
        let within = troubles.before();
        troubles.end(Trouble::Down);
        // It began before, and was told of the error after.
        assert!(troubles.excuse(early, Trouble::Down) && troubles.excuse(within, Trouble::Down));
        assert!(!troubles.excuse(troubles.before(), Trouble::Down));
        assert!(!troubles.excuse(early, Trouble::NoSpace));
    }
}
