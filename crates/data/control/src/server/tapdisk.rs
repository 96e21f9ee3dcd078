//! Answering tapdisk's messages: one request a connection.

use std::path::PathBuf;

use super::{Connection, Ended, Shared};
use crate::command::{self, Call, DiskCommand, Handle};
use crate::disk_report::DiskEntry;
use crate::host::DiskHost;
use crate::image_source::ImageSource;
use crate::key::Key;
use crate::message::{
    Blkif, Body, Image, List, MESSAGE_LEN, Message, MessageKind, PATH_LEN, Params, Response, Stat,
    decode_log_path, flags, key_len_is_valid,
};
use crate::stats_text::{stats_array_text, stats_text};
use crate::{ControlError, Errno, Result};

/// The cookie of STATS that asks for all disks.
const ALL: u16 = u16::MAX;

pub(super) fn answer(connection: &mut Connection<'_>) -> Result<()> {
    let bytes = take::<MESSAGE_LEN>(connection)?;
    let request = match Message::decode(&bytes) {
        Ok(request) => request,
        Err(error) => {
            let cookie = u16::from_ne_bytes([bytes[2], bytes[3]]);
            let error = ControlError::new(Errno::EINVAL, error.to_string());
            connection.send(&failure(cookie, &error))?;
            return Err(error);
        }
    };
    let shared = connection.shared;
    let mut ends = None;
    let answer = match request.kind {
        MessageKind::Pid => one(Message {
            kind: MessageKind::PidRsp,
            cookie: request.cookie,
            body: Body::Pid(std::process::id() as i32),
        }),
        MessageKind::List => disks(shared).and_then(|disks| list(&request, &disks)),
        MessageKind::Stats => stats(shared, request.cookie),
        _ => change(connection, &request, &mut ends),
    };
    let bytes = answer.unwrap_or_else(|error| {
        shared.host.log(&format!(
            "control: {} of disk {} failed: {error}",
            request.kind.text(),
            request.cookie
        ));
        failure(request.cookie, &error)
    });
    let sent = connection.send(&bytes);
    // Only now, so that the answer is on its way before the process goes.
    if let Some(why) = ends {
        shared.end(why);
    }
    sent
}

/// The next bytes of the request.
fn take<const N: usize>(connection: &mut Connection<'_>) -> Result<[u8; N]> {
    let bytes = take_len(connection, N)?;
    bytes.try_into().map_err(|_| ControlError::new(Errno::EIO, "a request of the wrong length"))
}

fn take_len(connection: &mut Connection<'_>, len: usize) -> Result<Vec<u8>> {
    let limit = connection.shared.limits.read;
    while connection.bytes.len() < len {
        if !connection.fill(limit)? {
            return Err(ControlError::new(Errno::ECONNRESET, "a request ended half-way"));
        }
    }
    Ok(connection.bytes.drain(..len).collect())
}

fn failure(cookie: u16, error: &ControlError) -> Vec<u8> {
    let mut text = error.to_string().replace('\0', " ");
    while text.len() >= PATH_LEN {
        text.pop();
    }
    let response = Response { error: error.errno.raw(), message: text };
    let message = Message { kind: MessageKind::Error, cookie, body: Body::Response(response) };
    // The text was cut to fit and has no NUL; a message without text would do as well.
    message.encode().map_or_else(|_| Vec::new(), Vec::from)
}

fn one(message: Message) -> Result<Vec<u8>> {
    message.encode().map(Vec::from).map_err(|error| ControlError::new(Errno::EOVERFLOW, error.to_string()))
}

fn done(kind: MessageKind, cookie: u16) -> Result<Vec<u8>> {
    one(Message { kind, cookie, body: Body::Response(Response::default()) })
}

/// One message per disk, which counts down, and one that ends the list.
fn list(request: &Message, disks: &[DiskEntry]) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity((disks.len() + 1) * MESSAGE_LEN);
    for (index, disk) in disks.iter().enumerate() {
        let mut path = disk.image.clone().unwrap_or_default();
        while path.len() >= PATH_LEN {
            path.pop();
        }
        let list = List {
            count: (disks.len() - index) as i32,
            minor: disk.minor.into(),
            state: disk.state.bits(),
            path,
        };
        let message = Message { kind: MessageKind::ListRsp, cookie: request.cookie, body: Body::List(list) };
        bytes.extend(one(message)?);
    }
    let end = List { minor: -1, ..List::default() };
    bytes.extend(one(Message { kind: MessageKind::ListRsp, cookie: request.cookie, body: Body::List(end) })?);
    Ok(bytes)
}

fn stats(shared: &Shared<'_>, cookie: u16) -> Result<Vec<u8>> {
    let text = if cookie == ALL {
        let all: Vec<_> =
            disks(shared)?.iter().filter_map(|disk| shared.host.stats(disk.minor).ok()).collect();
        stats_array_text(&all)
    } else {
        stats_text(&shared.host.stats(cookie)?)
    };
    let stat = Stat { length: text.len() as u64, ..Stat::default() };
    let mut bytes = one(Message { kind: MessageKind::StatsRsp, cookie, body: Body::Stat(stat) })?;
    bytes.extend_from_slice(text.as_bytes());
    Ok(bytes)
}

fn disks(shared: &Shared<'_>) -> Result<Vec<DiskEntry>> {
    Handle::handle(shared.host, command::List {}, &mut Call::of_itself())
}

/// Has a command handled in its turn; `key` is that of an image which it opens.
fn ask<'a, C: DiskCommand>(connection: &Connection<'a>, command: C, key: Option<Key>) -> Result<C::Reply>
where
    dyn DiskHost + 'a: Handle<C>,
{
    let (shared, mut call) = (connection.shared, Call { key, ..Call::of(connection) });
    shared.in_turn(|| Handle::handle(shared.host, command, &mut call))
}

/// Everything that changes a disk, or asks the kernel about one.
fn change(connection: &mut Connection<'_>, request: &Message, ends: &mut Option<Ended>) -> Result<Vec<u8>> {
    let shared = connection.shared;
    let (host, cookie) = (shared.host, request.cookie);
    match (request.kind, &request.body) {
        (MessageKind::Attach, _) => {
            ask(connection, command::Attach { minor: cookie }, None)?;
            done(MessageKind::AttachRsp, cookie)
        }
        (MessageKind::Detach, _) => {
            ask(connection, command::Detach { minor: cookie }, None)?;
            *ends = host.is_empty().then_some(Ended::Empty);
            done(MessageKind::DetachRsp, cookie)
        }
        (MessageKind::Open, Body::Params(params)) => {
            let (open, key) = open_request(connection, cookie, params)?;
            let info = ask(connection, open, key)?;
            let image = Image { sectors: info.sectors, sector_size: info.sector_size, info: info.info };
            one(Message { kind: MessageKind::OpenRsp, cookie, body: Body::Image(image) })
        }
        (MessageKind::Close, _) => {
            ask(connection, command::Close { minor: cookie, force: false }, None)?;
            done(MessageKind::CloseRsp, cookie)
        }
        (MessageKind::ForceShutdown, _) => {
            let mut call = Call::of(connection);
            let close = command::Close { minor: cookie, force: true };
            shared.in_forced_turn(|| Handle::handle(host, close, &mut call))?;
            done(MessageKind::CloseRsp, cookie)
        }
        (MessageKind::Pause, _) => {
            ask(connection, command::Pause { minor: cookie }, None)?;
            done(MessageKind::PauseRsp, cookie)
        }
        (MessageKind::Resume, Body::Params(params)) => {
            let resume = resume_request(connection, cookie, params)?;
            ask(connection, resume, None)?;
            done(MessageKind::ResumeRsp, cookie)
        }
        (MessageKind::DiskInfo, _) => {
            let info = ask(connection, command::DiskInfo { minor: cookie }, None)?;
            let image = Image { sectors: info.sectors, sector_size: info.sector_size, info: info.info };
            one(Message { kind: MessageKind::DiskInfoRsp, cookie, body: Body::Image(image) })
        }
        (MessageKind::XenblkifConnect, Body::Blkif(ring)) => {
            shared.in_turn(|| host.connect_ring(cookie, checked(ring)?))?;
            done(MessageKind::XenblkifConnectRsp, cookie)
        }
        (MessageKind::XenblkifDisconnect, Body::Blkif(ring)) => {
            shared.in_turn(|| host.disconnect_ring(cookie, checked(ring)?))?;
            done(MessageKind::XenblkifDisconnectRsp, cookie)
        }
        (MessageKind::Exit, _) => {
            let closed = ask(connection, command::Quit { force: false }, None);
            *ends = Some(Ended::Quit);
            closed?;
            done(MessageKind::CloseRsp, cookie)
        }
        (kind, _) => Err(ControlError::new(
            Errno::EINVAL,
            format!("'{}' is not a request of this process", kind.text()),
        )),
    }
}

/// Largest ring: eight pages.
const RING_ORDER_MAX: u32 = 3;

fn checked(ring: &Blkif) -> Result<&Blkif> {
    if ring.order > RING_ORDER_MAX || ring.poll_idle_threshold > 100 {
        return Err(ControlError::new(
            Errno::EINVAL,
            format!("a ring of order {} polling above {} % idle", ring.order, ring.poll_idle_threshold),
        )
        .next("give an order of at most 3 and at most 100 %"));
    }
    Ok(ring)
}

fn secondary(params: &Params) -> Result<Option<String>> {
    match (params.flags & flags::SECONDARY != 0, params.secondary.is_empty()) {
        (false, _) => Ok(None),
        (true, false) => Ok(Some(params.secondary.clone())),
        (true, true) => Err(ControlError::new(Errno::EINVAL, "a second image was announced and not named")),
    }
}

fn log_path(connection: &mut Connection<'_>, params: &Params) -> Result<Option<PathBuf>> {
    if params.flags & flags::ADD_LOG == 0 {
        return Ok(None);
    }
    let field = take::<PATH_LEN>(connection)?;
    let path =
        decode_log_path(&field).map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))?;
    if path.starts_with('/') {
        Ok(Some(path.into()))
    } else {
        Err(ControlError::new(Errno::EINVAL, format!("the log path '{path}' is not absolute")))
    }
}

/// Sharing the open parents of another disk saved tapdisk memory and changed nothing else, so that only a disk that is
/// not there is worth a word.
fn check_parents(shared: &Shared<'_>, minor: u16, other: u32) -> Result<()> {
    let number = u16::try_from(other)
        .map_err(|_| ControlError::new(Errno::EINVAL, format!("minor {other} does not exist")))?;
    if disks(shared)?.iter().any(|disk| disk.minor == number) {
        return Ok(());
    }
    let text = format!("disk {minor} cannot share the parents of disk {other}, which is not in this process");
    Err(ControlError::new(Errno::ENOENT, text).next("leave out -e, or give a disk of 'tap-ctl list'"))
}

/// OPEN. The flags for the page cache, a shared image and a cache on the leaf are a matter of speed: they are taken,
/// and change nothing.
fn open_request(
    connection: &mut Connection<'_>,
    minor: u16,
    params: &Params,
) -> Result<(command::Open, Option<Key>)> {
    let set = |flag: u32| params.flags & flag != 0;
    // What follows the message is read in the order in which clients send it, before anything is judged.
    let log = log_path(connection, params)?;
    let key = match set(flags::OPEN_ENCRYPTED) {
        false => None,
        true => {
            let [len] = take::<1>(connection)?;
            if !key_len_is_valid(len) {
                return Err(
                    ControlError::new(Errno::EINVAL, format!("a key of {len} bytes")).next("give 32 or 64")
                );
            }
            Some(Key(take_len(connection, len.into())?))
        }
    };
    let image = ImageSource::Leaf(params.path.clone());
    image.check()?;
    if set(flags::REUSE_PRT) {
        check_parents(connection.shared, minor, params.prt_devnum)?;
    }
    let open = command::Open {
        read_only: set(flags::RDONLY),
        secondary: secondary(params)?,
        standby: set(flags::STANDBY),
        timeout_s: Some(params.req_timeout),
        log,
        default_nbd: true,
        ..command::Open::of(minor, image)
    };
    Ok((open, key))
}

fn resume_request(connection: &mut Connection<'_>, minor: u16, params: &Params) -> Result<command::Resume> {
    let log = log_path(connection, params)?;
    let image = match params.path.as_str() {
        "" => None,
        path => Some(ImageSource::Leaf(path.to_owned())),
    };
    if let Some(image) = &image {
        image.check()?;
    }
    Ok(command::Resume { minor, image, secondary: secondary(params)?, log })
}
