//! A load generator: some connections, each with some requests in flight, for some time.
//!
//! Each connection is a thread that receives what has come and answers every reply with a new request. It sends all of
//! these at once, so that it costs less than any server it measures, or each by a call of its own, as most clients do.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;
use tapio_load::{Load, LoadReport, Places, thread_cpu};
use tapio_nbd::socket::write_all;

use super::client::{Address, Client, ClientError, ClientOptions};
use super::wire::{
    ReplyHeader, RequestHeader, Style, chunk, command, command_flag, error, parse_reply, put_request,
};

/// How requests that are made at the same time are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sending {
    /// By one call.
    Together,
    /// Each by a call of its own, as libnbd and the kernel's client do: a server finds fewer of them at a time.
    Singly,
}

/// Runs `load` against an export on some connections at once, each with a load of its own, and waits for its end. A
/// span of 0 bytes is the whole export. Sockets are slept on, whatever the load says.
///
/// # Errors
/// A connection that cannot be made or breaks, an answer that is none, or an export smaller than a request.
pub fn run(
    address: &Address,
    options: &ClientOptions,
    load: &Load,
    connections: usize,
) -> Result<LoadReport, ClientError> {
    run_sending(address, options, load, connections, Sending::Together)
}

/// The same with requests sent as `sending` says.
///
/// # Errors
/// As of [`run`].
pub fn run_sending(
    address: &Address,
    options: &ClientOptions,
    load: &Load,
    connections: usize,
    sending: Sending,
) -> Result<LoadReport, ClientError> {
    let mut threads = Vec::with_capacity(connections);
    for index in 0..connections.max(1) {
        let client = Client::connect(address, options, Duration::from_secs(10))?;
        let load = Load { seed: load.seed.wrapping_add(index as u64 * 0x9e37_79b9), ..*load };
        threads.push(std::thread::spawn(move || drive(client, load, sending)));
    }
    let mut report = LoadReport::default();
    for thread in threads {
        report.add(&thread.join().map_err(|_| ClientError::Protocol("a load thread panicked"))??);
    }
    Ok(report)
}

struct Driver {
    load: Load,
    sending: Sending,
    style: Style,
    places: Places,
    payload: Vec<u8>,
    out: Vec<u8>,
    started: Vec<Instant>,
    issued: u64,
    report: LoadReport,
}

fn drive(client: Client, mut load: Load, sending: Sending) -> Result<LoadReport, ClientError> {
    let len = client.export().len;
    load.span_len = if load.span_len == 0 { len } else { load.span_len.min(len) };
    if load.span_len < load.block_len.max(1).into() || load.depth == 0 {
        return Err(ClientError::Protocol("the export is smaller than one block of the load"));
    }
    let (begin, cpu) = (Instant::now(), thread_cpu());
    let mut driver = Driver {
        load,
        sending,
        style: client.style(),
        places: load.places(),
        payload: if load.mix.writes() { vec![0xa5; load.block_len as usize] } else { Vec::new() },
        out: Vec::new(),
        started: vec![begin; load.depth as usize],
        issued: 0,
        report: LoadReport::default(),
    };
    let fd = client.into_fd();
    for slot in 0..load.depth as usize {
        driver.issue(fd.as_fd(), slot, begin)?;
    }
    if !driver.out.is_empty() {
        driver.send(fd.as_fd())?;
    }
    driver.pump(&fd, begin)?;
    driver.report.time = begin.elapsed();
    driver.report.cpu = thread_cpu().saturating_sub(cpu);
    Ok(driver.report)
}

impl Driver {
    fn issue(&mut self, fd: BorrowedFd<'_>, slot: usize, now: Instant) -> io::Result<()> {
        let write = self.load.mix.writes();
        let extended_write = write && self.style == Style::Extended;
        let header = RequestHeader {
            flags: if extended_write { command_flag::PAYLOAD_LEN } else { 0 },
            command: if write { command::WRITE } else { command::READ },
            cookie: slot as u64,
            offset: self.places.take(),
            len: u64::from(self.load.block_len),
        };
        put_request(self.style, &header, &mut self.out);
        self.out.extend_from_slice(&self.payload);
        self.started[slot] = now;
        self.issued += 1;
        if self.sending == Sending::Singly { self.send(fd) } else { Ok(()) }
    }

    fn send(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let result = write_all(fd, &self.out, Instant::now() + Duration::from_secs(30));
        self.out.clear();
        result
    }

    /// Receives replies until the time is over and nothing is in flight any more.
    fn pump(&mut self, fd: &OwnedFd, begin: Instant) -> Result<(), ClientError> {
        let mut buffer = vec![0; 256 << 10];
        let (mut len, mut skip, mut running) = (0, 0u64, self.load.depth as usize);
        let mut done_after_skip = None;
        while running > 0 {
            let got = receive(fd, &mut buffer[len..])?;
            let now = Instant::now();
            let going_on = now.duration_since(begin) < self.load.time;
            let (mut at, end) = (0, len + got);
            loop {
                let here = skip.min((end - at) as u64);
                at += here as usize;
                skip -= here;
                if skip > 0 {
                    break;
                }
                if let Some(slot) = done_after_skip.take() {
                    self.finish(slot, now)?;
                    if going_on && self.issued < self.load.requests_max {
                        self.issue(fd.as_fd(), slot, now)?;
                    } else {
                        running -= 1;
                    }
                }
                let wrong = |_| ClientError::Protocol("what should be a reply is none");
                let Some((header, header_len)) = parse_reply(self.style, &buffer[at..end]).map_err(wrong)?
                else {
                    break;
                };
                at += header_len;
                (skip, done_after_skip) = self.take(&header);
            }
            buffer.copy_within(at..end, 0);
            len = end - at;
            if !self.out.is_empty() {
                self.send(fd.as_fd())?;
            }
        }
        Ok(())
    }

    /// Bytes that follow a header, and the request that is answered when they have passed.
    fn take(&mut self, header: &ReplyHeader) -> (u64, Option<usize>) {
        match *header {
            ReplyHeader::Simple { error, cookie } => {
                self.report.errors += u64::from(error != error::NONE);
                let data =
                    if self.load.mix.writes() || error != error::NONE { 0 } else { self.load.block_len };
                (u64::from(data), Some(cookie as usize))
            }
            ReplyHeader::Chunk { flags, kind, cookie, len, .. } => {
                self.report.errors += u64::from(kind & chunk::ERROR_BIT != 0);
                (len, (flags & chunk::DONE != 0).then_some(cookie as usize))
            }
        }
    }

    fn finish(&mut self, slot: usize, now: Instant) -> Result<(), ClientError> {
        let started =
            self.started.get(slot).ok_or(ClientError::Protocol("a reply to a request that was not made"))?;
        // Errors are counted where they arrive, which may be before the end of the answer.
        self.report.note(*started, now, true);
        Ok(())
    }
}

fn receive(fd: &OwnedFd, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::net::recv(fd, &mut *into, RecvFlags::empty()) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((len, _)) => return Ok(len),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
