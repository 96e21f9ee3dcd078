//! The control socket: tapdisk's messages and our own lines, both directions.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use tapio_control::command::{self, Call, Command, DiskCommand, Done, Handle};
use tapio_control::{
    Blkif, Body, ControlError, DiskEntry, DiskHost, DiskInfo, DiskReport, DiskReports, Errno, Hello, Limits,
    MESSAGE_LEN, Message, OwnClient, PATH_LEN, Reply, Result, VbdState, VbdStats, converse_once,
    decode_log_path, encode_log_path, parse_request,
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

macro_rules! handles {
    ($($command:ident: $run:expr;)*) => {
        $(impl Handle<command::$command> for One {
            fn handle(
                &self,
                command: command::$command,
                call: &mut Call<'_>,
            ) -> Result<<command::$command as DiskCommand>::Reply> {
                // What reaches a disk has been looked at.
                command.check(call.fds.len()).expect("a command that was not checked");
                let run: fn(command::$command) -> _ = $run;
                let _ = call.caller.gone();
                run(command)
            }
        })*
    };
}

const INFO: DiskInfo = DiskInfo { sectors: 1, sector_size: 512, info: 0 };

fn done(minor: u16) -> Result<Done> {
    missing(minor).map(|()| Done {})
}

fn busy<T>(minor: u16) -> Result<T> {
    missing(minor)?;
    Err(ControlError::new(Errno::EBUSY, "no more"))
}

fn report(minor: u16) -> Result<DiskReport> {
    missing(minor)?;
    let (state, images) = (VbdState::Running, Vec::new());
    Ok(DiskReport {
        minor,
        state,
        counters: None,
        in_flight: 0,
        stuck: 0,
        dropped: 0,
        requests: Vec::new(),
        images,
        beside: Vec::new(),
        blkif: Vec::new(),
        room: None,
    })
}

handles! {
    List: |_| {
        let state = VbdState::Running;
        Ok(vec![DiskEntry { minor: 0, state, image: None, read_only: false, fronts: Vec::new() }])
    };
    Stats: |command| match command.minor {
        Some(minor) => report(minor).map(|report| DiskReports::One(Box::new(report))),
        None => report(0).map(|report| DiskReports::All(vec![report])),
    };
    Attach: |_| Ok(Done {});
    Detach: |command| done(command.minor);
    Grow: |command| missing(command.minor).map(|()| INFO);
    Close: |command| done(command.minor);
    Pause: |command| done(command.minor);
    Resume: |command| done(command.minor);
    DiskInfo: |command| missing(command.minor).map(|()| INFO);
    Quit: |_| Ok(Done {});
    FrontAdd: |command| busy(command.minor);
    FrontRemove: |command| done(command.minor);
    FrontFollow: |command| missing(command.minor).map(|()| INFO);
    FrontAdmit: |command| missing(command.minor).map(|()| command::Done {});
    FrontList: |command| missing(command.minor).map(|()| Vec::new());
    SetPolling: |command| done(command.minor);
    SetLimits: |command| done(command.minor);
    SetShare: |command| done(command.minor);
    SetTransfers: |command| done(command.minor);
    Limits: |command| busy(command.minor);
    TraceStart: |command| busy(command.minor);
    TraceStop: |command| busy(command.minor);
    MirrorStart: |command| busy(command.minor);
    MirrorStatus: |command| missing(command.minor).map(|()| None);
    MirrorResume: |command| done(command.minor);
    MirrorRate: |command| done(command.minor);
    MirrorPivot: |command| busy(command.minor);
    MirrorCancel: |command| done(command.minor);
    Snapshot: |command| busy(command.minor);
    SwapLeaf: |command| busy(command.minor);
    Commit: |command| busy(command.minor);
    JobList: |command| missing(command.minor).map(|()| Vec::new());
    JobCancel: |command| busy(command.minor);
    JobRate: |command| busy(command.minor);
    LookForRoom: |command| missing(command.minor).map(|()| None);
    Shorten: |command| busy(command.minor);
}

impl Handle<command::Open> for One {
    fn handle(&self, command: command::Open, _: &mut Call<'_>) -> Result<DiskInfo> {
        // Its key was taken already.
        command.image.check().expect("an image that was not checked");
        missing(command.minor).map(|()| INFO)
    }
}

impl DiskHost for One {
    fn stats(&self, minor: u16) -> Result<VbdStats> {
        missing(minor).map(|()| VbdStats::default())
    }

    fn connect_ring(&self, minor: u16, _ring: &Blkif) -> Result<()> {
        busy(minor)
    }

    fn disconnect_ring(&self, minor: u16, _ring: &Blkif) -> Result<()> {
        missing(minor)
    }

    fn is_empty(&self) -> bool {
        false
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
            let _ = (request.command.check(0), request.command.check(8), request.command.is_concurrent());
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
    let _ = client.call(&command::List {}, &[], Some(Duration::from_millis(200)));
    let _ = client.call(&command::Stats { minor: None }, &[], Some(Duration::from_millis(200)));
}
