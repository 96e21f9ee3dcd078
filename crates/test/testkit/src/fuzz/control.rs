//! The control socket: tapdisk's messages and our own lines, both directions.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use tapio_control::{
    Body, Caller, Command, ControlError, DiskEntry, DiskHost, DiskInfo, DiskReport, Errno, FrontEntry,
    FrontRequest, Hello, ImageAnswer, ImageWork, Limits, MESSAGE_LEN, Message, OpenRequest, OwnClient,
    PATH_LEN, Polling, Reply, Result, ResumeRequest, VbdState, VbdStats, converse_once, decode_log_path,
    encode_log_path, parse_request,
};

use super::take;

/// Lines and bytes of one input that go through a conversation: what is answered must fit the socket's buffer.
const LINES_MAX: usize = 32;

/// A disk process with one disk, number 0, that has nothing open.
#[derive(Debug)]
struct One;

fn missing(minor: u16) -> Result<()> {
    match minor {
        0 => Ok(()),
        _ => {
            Err(ControlError::new(Errno::ENODEV, format!("there is no disk {minor}")).next("attach it first"))
        }
    }
}

impl DiskHost for One {
    fn image_work(&self, minor: u16, _work: &ImageWork) -> Result<ImageAnswer> {
        missing(minor)?;
        Ok(ImageAnswer::Jobs(Vec::new()))
    }

    fn list(&self) -> Vec<DiskEntry> {
        let state = VbdState::Running;
        vec![DiskEntry { minor: 0, state, image: None, read_only: false, fronts: Vec::new() }]
    }
    fn stats(&self, minor: u16) -> Result<VbdStats> {
        missing(minor).map(|()| VbdStats::default())
    }
    fn report(&self, minor: u16) -> Result<DiskReport> {
        missing(minor)?;
        let (state, images) = (VbdState::Running, Vec::new());
        Ok(DiskReport {
            minor,
            state,
            counters: None,
            in_flight: 0,
            stuck: 0,
            images,
            beside: Vec::new(),
            blkif: Vec::new(),
        })
    }
    fn fronts(&self, minor: u16) -> Result<Vec<FrontEntry>> {
        missing(minor).map(|()| Vec::new())
    }
    fn attach(&self, _minor: u16) -> Result<()> {
        Ok(())
    }
    fn detach(&self, minor: u16) -> Result<()> {
        missing(minor)
    }
    fn is_empty(&self) -> bool {
        false
    }
    fn open(&self, minor: u16, request: &OpenRequest) -> Result<DiskInfo> {
        // What reaches a disk has been looked at.
        request.image.check().expect("an image that was not checked");
        missing(minor).map(|()| DiskInfo { sectors: 1, sector_size: 512, info: 0 })
    }
    fn close(&self, minor: u16, _force: bool, caller: &dyn Caller) -> Result<()> {
        let _ = caller.gone();
        missing(minor)
    }
    fn pause(&self, minor: u16, _caller: &dyn Caller) -> Result<()> {
        missing(minor)
    }
    fn resume(&self, minor: u16, request: &ResumeRequest) -> Result<()> {
        if let Some(image) = &request.image {
            image.check().expect("an image that was not checked");
        }
        missing(minor)
    }
    fn disk_info(&self, minor: u16) -> Result<DiskInfo> {
        missing(minor).map(|()| DiskInfo { sectors: 1, sector_size: 512, info: 0 })
    }

    fn grow(&self, minor: u16, _len: u64) -> Result<DiskInfo> {
        self.disk_info(minor)
    }
    fn front_add(&self, minor: u16, request: FrontRequest) -> Result<FrontEntry> {
        request.front.check(request.fds.len()).expect("a front end that was not checked");
        missing(minor)?;
        Err(ControlError::new(Errno::EBUSY, "no more"))
    }
    fn front_remove(&self, minor: u16, _id: u32, _force: bool) -> Result<()> {
        missing(minor)
    }
    fn set_polling(&self, minor: u16, _polling: Polling) -> Result<()> {
        missing(minor)
    }
    fn quit(&self, _force: bool) -> Result<()> {
        Ok(())
    }
}

/// A stream on which the other side has said `bytes` and will say nothing more.
fn said(bytes: &[u8]) -> Option<(UnixStream, UnixStream)> {
    let (ours, mut theirs) = UnixStream::pair().ok()?;
    theirs.set_nonblocking(true).and_then(|()| theirs.write_all(bytes)).ok()?;
    theirs.shutdown(Shutdown::Write).ok()?;
    Some((ours, theirs))
}

fn converse(bytes: &[u8]) {
    let Some((ours, _theirs)) = said(bytes) else { return };
    let short = Duration::from_millis(200);
    let limits = Limits { read: short, write: short, idle: short, ..Limits::default() };
    converse_once(ours, &One, limits).expect("two event descriptors");
}

/// A message of 544 bytes and what may follow it, decoded and answered.
pub fn tapdisk_message(bytes: &[u8]) {
    let mut rest = bytes;
    let whole = take::<MESSAGE_LEN>(&mut rest);
    match Message::decode(&whole) {
        Ok(message) => round_trip(&message),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let path = take::<PATH_LEN>(&mut rest);
    if let Ok(path) = decode_log_path(&path) {
        let again = encode_log_path(&path).expect("what was read can be written");
        assert_eq!(decode_log_path(&again), Ok(path));
    }
    // A line of ours would begin with a brace; that is the other target.
    if !bytes.starts_with(b"{") {
        converse(bytes);
    }
}

fn round_trip(message: &Message) {
    match message.encode() {
        Ok(bytes) => assert_eq!(Message::decode(&bytes).as_ref(), Ok(message)),
        // Only the text of a foreign answer is taken as it comes, and may be longer than its field when it is whole.
        Err(error) => {
            let lossy = matches!(message.body, Body::Response(_) | Body::List(_));
            assert!(lossy, "a request that was read cannot be written: {error}");
        }
    }
}

/// Lines of JSON: requests to a disk process, and answers to a client.
pub fn own_protocol(bytes: &[u8]) {
    for line in bytes.split(|byte| *byte == b'\n').take(LINES_MAX) {
        request(line);
        answer(line);
    }
    let lines: Vec<u8> =
        bytes.split_inclusive(|byte| *byte == b'\n').take(LINES_MAX).flatten().copied().collect();
    if lines.starts_with(b"{") {
        converse(&lines);
    }
    client(&lines);
}

fn request(line: &[u8]) {
    match parse_request(line) {
        Ok(request) => {
            let _ = (request.command.check(0), request.command.check(8), request.command.is_reentrant());
            let text = serde_json::to_vec(&request.command).expect("a command can be written");
            let again: Command = serde_json::from_slice(&text).expect("what was written can be read");
            assert_eq!(again, request.command);
        }
        Err((_, error)) => assert!(!error.to_string().is_empty()),
    }
}

fn answer(line: &[u8]) {
    let Ok(reply) = serde_json::from_slice::<Reply>(line) else { return };
    let text = reply.line();
    assert!(text.ends_with('\n') && !text.trim_end().contains('\n'), "an answer is one line");
    if let Some(error) = reply.error {
        assert!(!ControlError::from(error).to_string().is_empty());
    }
}

/// What a client makes of these lines when a disk process answers with them.
fn client(bytes: &[u8]) {
    let Some((ours, _theirs)) = said(bytes) else { return };
    let Ok(mut client) = OwnClient::over(ours, PathBuf::from("/fuzz")) else { return };
    let _: &Hello = client.hello();
    let _ = client.call::<serde_json::Value>(&Command::List {}, &[], Some(Duration::from_millis(200)));
    let _ = client.call::<Vec<u64>>(&Command::Stats { minor: None }, &[], Some(Duration::from_millis(200)));
}
