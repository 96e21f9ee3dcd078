//! The asking side of the tapdisk protocol. Works with our disk process and with a foreign tapdisk.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use crate::disk_info::DiskInfo;
use crate::key::Key;
use crate::message::{Blkif, Body, MESSAGE_LEN, Message, MessageKind, Params, encode_log_path, flags};
use crate::paths::RunDir;
use crate::socket::{Deadline, read_exact, send_all};
use crate::{ControlError, Errno, Result};

/// LIST, STATS and PID are answered at once or not at all.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// More than any statistics: an honest process has a kilobyte or two per disk.
const STATS_LEN_MAX: u64 = 64 * 1024 * 1024;
/// More disks than a process can have.
const LIST_MAX: usize = 65_536;

/// A disk process by its number. Each request is a connection of its own.
#[derive(Clone, Debug)]
pub struct Client {
    id: i32,
    socket: PathBuf,
}

/// Arguments of OPEN.
#[derive(Clone, Debug, Default)]
pub struct OpenArguments {
    /// `type:/path`.
    pub image: String,
    /// See [`flags`]; those of the fields below are added.
    pub flags: u32,
    /// Minor whose parents to share.
    pub parent_minor: Option<u32>,
    /// Second image.
    pub secondary: Option<String>,
    /// Seconds after which a request fails; 0 for the default.
    pub request_timeout_s: u16,
    /// Log of changed blocks.
    pub log_path: Option<String>,
    /// Key of 32 or 64 bytes.
    pub key: Option<Key>,
}

/// Arguments of RESUME.
#[derive(Clone, Debug, Default)]
pub struct ResumeArguments {
    /// Another image, `type:/path`.
    pub image: Option<String>,
    /// Second image.
    pub secondary: Option<String>,
    /// Log of changed blocks.
    pub log_path: Option<String>,
}

impl Client {
    /// The process with that number.
    pub fn new(run: &RunDir, id: i32) -> Self {
        Self { id, socket: run.socket(id) }
    }

    /// Its number.
    pub fn id(&self) -> i32 {
        self.id
    }

    /// The number the process gives itself.
    ///
    /// # Errors
    /// No process listens, or the answer is not one.
    pub fn pid(&self) -> Result<i32> {
        let reply = self.ask(&Message::bare(MessageKind::Pid, 0), &[], Some(ASK_TIMEOUT))?;
        match reply.body {
            Body::Pid(pid) => Ok(pid),
            _ => Err(self.unexpected(&reply)),
        }
    }

    /// The disks of the process.
    ///
    /// # Errors
    /// No process listens, or the answer is not one.
    pub fn list(&self) -> Result<Vec<crate::message::List>> {
        let deadline = Deadline::after(Some(ASK_TIMEOUT));
        let stream = self.connect()?;
        self.send(&stream, &Message::bare(MessageKind::List, u16::MAX), &[], deadline)?;
        let mut disks = Vec::new();
        while disks.len() < LIST_MAX {
            let reply = self.receive(&stream, deadline)?;
            match reply.body {
                Body::List(list) if list.count == 0 => return Ok(disks),
                Body::List(list) => disks.push(list),
                _ => return Err(self.unexpected(&reply)),
            }
        }
        Err(self.error(Errno::EPROTO, "its list of disks does not end"))
    }

    /// Statistics of one disk, or of all with minor 65535, as the process writes them.
    ///
    /// # Errors
    /// No process listens, there is no such disk, or the answer is not one.
    pub fn stats(&self, minor: u16) -> Result<String> {
        let deadline = Deadline::after(Some(ASK_TIMEOUT));
        let stream = self.connect()?;
        self.send(&stream, &Message::bare(MessageKind::Stats, minor), &[], deadline)?;
        let reply = self.receive(&stream, deadline)?;
        let Body::Stat(stat) = reply.body else { return Err(self.unexpected(&reply)) };
        if stat.length > STATS_LEN_MAX {
            return Err(
                self.error(Errno::EPROTO, &format!("it announced {} bytes of statistics", stat.length))
            );
        }
        let mut text = vec![0; stat.length as usize];
        read_exact(&stream, &mut text, deadline).map_err(|error| self.io("reading statistics", &error))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Makes a disk with that number.
    ///
    /// # Errors
    /// What the process answers.
    pub fn attach(&self, minor: u16) -> Result<()> {
        self.simple(MessageKind::Attach, MessageKind::AttachRsp, minor, None)
    }

    /// Forgets it.
    ///
    /// # Errors
    /// What the process answers.
    pub fn detach(&self, minor: u16) -> Result<()> {
        self.simple(MessageKind::Detach, MessageKind::DetachRsp, minor, None)
    }

    /// Opens an image.
    ///
    /// # Errors
    /// What the process answers, or an argument that does not fit the message.
    pub fn open(&self, minor: u16, arguments: &OpenArguments) -> Result<DiskInfo> {
        let mut params = Params {
            flags: arguments.flags,
            devnum: minor.into(),
            path: arguments.image.clone(),
            prt_devnum: u32::MAX,
            req_timeout: arguments.request_timeout_s,
            ..Params::default()
        };
        if let Some(parent) = arguments.parent_minor {
            params.flags |= flags::REUSE_PRT;
            params.prt_devnum = parent;
        }
        let mut trailing =
            add_optional(&mut params, arguments.secondary.as_deref(), arguments.log_path.as_deref())?;
        if let Some(Key(key)) = &arguments.key {
            let len = u8::try_from(key.len()).ok().filter(|len| crate::message::key_len_is_valid(*len));
            let len = len.ok_or_else(|| ControlError::new(Errno::EINVAL, "a key has 32 or 64 bytes"))?;
            params.flags |= flags::OPEN_ENCRYPTED;
            trailing.push(len);
            trailing.extend_from_slice(key);
        }
        let message =
            Message { kind: MessageKind::Open, cookie: minor, body: Body::Params(Box::new(params)) };
        let reply = self.ask(&message, &trailing, None)?;
        self.image(reply, MessageKind::OpenRsp)
    }

    /// Closes the image; `force` does not wait for requests in flight.
    ///
    /// # Errors
    /// What the process answers, `ETIMEDOUT` after `timeout`.
    pub fn close(&self, minor: u16, force: bool, timeout: Option<Duration>) -> Result<()> {
        let kind = if force { MessageKind::ForceShutdown } else { MessageKind::Close };
        self.simple(kind, MessageKind::CloseRsp, minor, timeout)
    }

    /// Drains the disk and closes its images.
    ///
    /// # Errors
    /// What the process answers, `ETIMEDOUT` after `timeout`.
    pub fn pause(&self, minor: u16, timeout: Option<Duration>) -> Result<()> {
        self.simple(MessageKind::Pause, MessageKind::PauseRsp, minor, timeout)
    }

    /// Goes on, with another image if one is given.
    ///
    /// # Errors
    /// What the process answers, or an argument that does not fit the message.
    pub fn resume(&self, minor: u16, arguments: &ResumeArguments) -> Result<()> {
        let mut params = Params { path: arguments.image.clone().unwrap_or_default(), ..Params::default() };
        let trailing =
            add_optional(&mut params, arguments.secondary.as_deref(), arguments.log_path.as_deref())?;
        let message =
            Message { kind: MessageKind::Resume, cookie: minor, body: Body::Params(Box::new(params)) };
        let reply = self.ask(&message, &trailing, None)?;
        self.done(&reply, MessageKind::ResumeRsp)
    }

    /// Size and kind of the disk.
    ///
    /// # Errors
    /// What the process answers.
    pub fn disk_info(&self, minor: u16) -> Result<DiskInfo> {
        let reply = self.ask(&Message::bare(MessageKind::DiskInfo, minor), &[], Some(ASK_TIMEOUT))?;
        self.image(reply, MessageKind::DiskInfoRsp)
    }

    /// Connects a Xen guest's ring to a disk. What a foreign tapdisk understands; a process of ours knows more of
    /// rings by its own protocol ([`crate::Front::Blkif`]).
    ///
    /// # Errors
    /// What the process answers: `EALREADY` or `EEXIST` if there is this ring already.
    pub fn connect_ring(&self, minor: u16, ring: &Blkif, timeout: Option<Duration>) -> Result<()> {
        self.ring(MessageKind::XenblkifConnect, MessageKind::XenblkifConnectRsp, minor, ring, timeout)
    }

    /// Disconnects a guest's ring.
    ///
    /// # Errors
    /// What the process answers: `ENODEV` if there is no such ring.
    pub fn disconnect_ring(
        &self,
        minor: u16,
        domid: u32,
        devid: u32,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let ring = Blkif { domid, devid, ..Blkif::default() };
        self.ring(MessageKind::XenblkifDisconnect, MessageKind::XenblkifDisconnectRsp, minor, &ring, timeout)
    }

    fn ring(
        &self,
        kind: MessageKind,
        expected: MessageKind,
        minor: u16,
        ring: &Blkif,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let message = Message { kind, cookie: minor, body: Body::Blkif(Box::new(ring.clone())) };
        self.done(&self.ask(&message, &[], timeout)?, expected)
    }

    fn image(&self, reply: Message, expected: MessageKind) -> Result<DiskInfo> {
        match reply.body {
            Body::Image(image) if reply.kind == expected => {
                Ok(DiskInfo { sectors: image.sectors, sector_size: image.sector_size, info: image.info })
            }
            _ => Err(self.unexpected(&reply)),
        }
    }

    fn simple(
        &self,
        ask: MessageKind,
        expected: MessageKind,
        minor: u16,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let reply = self.ask(&Message::bare(ask, minor), &[], timeout)?;
        self.done(&reply, expected)
    }

    fn done(&self, reply: &Message, expected: MessageKind) -> Result<()> {
        match &reply.body {
            Body::Response(response) if reply.kind == expected && response.error == 0 => Ok(()),
            _ => Err(self.unexpected(reply)),
        }
    }

    fn ask(&self, message: &Message, trailing: &[u8], timeout: Option<Duration>) -> Result<Message> {
        let deadline = Deadline::after(timeout);
        let stream = self.connect()?;
        self.send(&stream, message, trailing, deadline)?;
        self.receive(&stream, deadline)
    }

    fn connect(&self) -> Result<UnixStream> {
        UnixStream::connect(&self.socket).map_err(|error| {
            let error = self.io("connecting", &error);
            match error.errno {
                Errno::ENOENT | Errno::ECONNREFUSED => {
                    error.next("'tap-ctl list' shows the processes there are")
                }
                _ => error,
            }
        })
    }

    fn send(
        &self,
        stream: &UnixStream,
        message: &Message,
        trailing: &[u8],
        deadline: Deadline,
    ) -> Result<()> {
        let mut bytes = message.encode().map_err(|error| too_long(&error))?.to_vec();
        bytes.extend_from_slice(trailing);
        send_all(stream, &bytes, &[], deadline).map_err(|error| self.io("sending a request", &error))
    }

    fn receive(&self, stream: &UnixStream, deadline: Deadline) -> Result<Message> {
        let mut bytes = [0; MESSAGE_LEN];
        read_exact(stream, &mut bytes, deadline)
            .map_err(|error| self.io("waiting for the answer", &error))?;
        Message::decode(&bytes).map_err(|error| self.error(Errno::EPROTO, &error.to_string()))
    }

    /// An ERROR, or an answer to something else.
    fn unexpected(&self, reply: &Message) -> ControlError {
        match &reply.body {
            Body::Response(response) if response.error != 0 => {
                let errno = Errno::new(response.error);
                let why = if response.message.is_empty() { errno.text() } else { response.message.clone() };
                self.error(errno, &why)
            }
            _ => self.error(Errno::EPROTO, &format!("it answered '{}'", reply.kind.text())),
        }
    }

    fn error(&self, errno: Errno, why: &str) -> ControlError {
        ControlError::new(errno, format!("disk process {}: {why}", self.id))
    }

    fn io(&self, doing: &str, error: &io::Error) -> ControlError {
        ControlError::io(format_args!("disk process {}: {doing}", self.id), error)
    }
}

/// Second image and log, which OPEN and RESUME have in common; what follows the message.
fn add_optional(params: &mut Params, secondary: Option<&str>, log_path: Option<&str>) -> Result<Vec<u8>> {
    if let Some(secondary) = secondary {
        params.flags |= flags::SECONDARY;
        params.secondary = secondary.to_owned();
    }
    match log_path {
        None => Ok(Vec::new()),
        Some(path) => {
            params.flags |= flags::ADD_LOG;
            Ok(encode_log_path(path).map_err(|error| too_long(&error))?.to_vec())
        }
    }
}

fn too_long(error: &crate::CodecError) -> ControlError {
    let errno = match error {
        crate::CodecError::Long(_) => Errno::ENAMETOOLONG,
        _ => Errno::EINVAL,
    };
    ControlError::new(errno, error.to_string())
}
