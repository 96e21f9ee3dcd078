//! Answering our own protocol: a conversation of lines.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use super::{Connection, Ended};
use crate::host::{FrontRequest, Key, OpenRequest, ResumeRequest};
use crate::images::ImageWork;
use crate::mirror::MirrorRequest;
use crate::own::{Command, ErrorBody, FEATURES, Hello, LINE_LEN_MAX, PROTOCOL_VERSION, Reply, parse_request};
use crate::polling::Polling;
use crate::{ControlError, Errno, Result};

pub(super) fn converse(connection: &mut Connection<'_>) -> Result<()> {
    let mut greeted = false;
    loop {
        let Some(line) = line(connection)? else { return Ok(()) };
        let mut ends = None;
        let (id, answer) = match parse_request(&line) {
            Err((id, error)) => (id, Err(error)),
            Ok(request) => {
                let answer = match (&request.command, greeted) {
                    (Command::Hello { .. }, _) | (_, true) => run(connection, &request.command, &mut ends),
                    (_, false) => Err(ControlError::new(Errno::EPROTO, "a conversation begins with 'hello'")
                        .next("send it first")),
                };
                greeted |= matches!((&request.command, &answer), (Command::Hello { .. }, Ok(_)));
                (request.id, answer)
            }
        };
        // What a command did not take is closed with it.
        connection.fds.clear();
        let reply = match answer {
            Ok(value) => Reply { id, ok: Some(value), error: None },
            Err(error) => Reply { id, ok: None, error: Some(ErrorBody::from(&error)) },
        };
        let sent = connection.send(reply.line().as_bytes());
        if let Some(why) = ends {
            connection.shared.end(why);
        }
        sent?;
    }
}

/// The next line without its newline; `None` when the conversation is over.
fn line(connection: &mut Connection<'_>) -> Result<Option<Vec<u8>>> {
    let mut searched = 0;
    loop {
        if let Some(end) = connection.bytes[searched..].iter().position(|byte| *byte == b'\n') {
            let mut line: Vec<u8> = connection.bytes.drain(..=searched + end).collect();
            line.pop();
            return Ok(Some(line));
        }
        searched = connection.bytes.len();
        if searched > LINE_LEN_MAX {
            let error =
                ControlError::new(Errno::EMSGSIZE, format!("a request is longer than {LINE_LEN_MAX} bytes"));
            let reply = Reply { id: 0, ok: None, error: Some(ErrorBody::from(&error)) };
            connection.send(reply.line().as_bytes())?;
            return Err(error);
        }
        // A request that has begun must end soon; between two there may be a pause.
        let limits = connection.shared.limits;
        let timeout = if searched == 0 { limits.idle } else { limits.read };
        match connection.fill(timeout) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) if error.errno == Errno::ETIMEDOUT && searched == 0 => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

/// The checks have seen that it is text.
fn log_text(log: Option<&std::path::PathBuf>) -> Option<String> {
    log.map(|path| path.to_string_lossy().into_owned())
}

fn value(of: impl Serialize) -> Result<Value> {
    serde_json::to_value(of)
        .map_err(|error| ControlError::new(Errno::EIO, format!("the answer cannot be written: {error}")))
}

/// The key of an open request, whose descriptors were counted.
fn key_of(index: Option<u32>, file: Option<&Path>, fds: Vec<OwnedFd>) -> Result<Option<Key>> {
    match (index.and_then(|index| fds.into_iter().nth(index as usize)), file) {
        (Some(fd), _) => Key::read(File::from(fd)).map(Some),
        (None, Some(path)) => Key::in_file(path).map(Some),
        (None, None) => Ok(None),
    }
}

fn run(connection: &mut Connection<'_>, command: &Command, ends: &mut Option<Ended>) -> Result<Value> {
    command.check(connection.fds.len())?;
    let fds = std::mem::take(&mut connection.fds);
    let shared = connection.shared;
    let host = shared.host;
    match command {
        Command::Hello { version } if *version < PROTOCOL_VERSION => Err(ControlError::new(
            Errno::EPROTO,
            format!("version {version} of the protocol is too old: this process speaks {PROTOCOL_VERSION}"),
        )
        .next("use the tapio that came with the disk process")),
        Command::Hello { .. } => value(Hello {
            version: PROTOCOL_VERSION,
            features: FEATURES.iter().map(ToString::to_string).collect(),
            program: "tapio-disk".into(),
            program_version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
        }),
        Command::List {} => value(host.list()),
        Command::Stats { minor: Some(minor) } => value(host.report(*minor)?),
        Command::Stats { minor: None } => {
            value(host.list().iter().filter_map(|disk| host.report(disk.minor).ok()).collect::<Vec<_>>())
        }
        Command::FrontList { minor } => value(host.fronts(*minor)?),
        Command::DiskInfo { minor } => value(shared.in_turn(|| host.disk_info(*minor))?),
        Command::FrontAdd { minor, front, vbd } => {
            let request = FrontRequest { front: front.clone(), vbd: *vbd, fds };
            value(shared.in_turn(|| host.front_add(*minor, request))?)
        }
        Command::Grow { minor, len } => value(shared.in_turn(|| host.grow(*minor, *len))?),
        Command::Open {
            minor,
            image,
            read_only,
            timeout_s,
            default_nbd,
            key,
            key_file,
            pool,
            secondary,
            standby,
            log,
        } => {
            let request = OpenRequest {
                secondary: secondary.clone(),
                standby: *standby,
                log_path: log_text(log.as_ref()),
                key: key_of(*key, key_file.as_deref(), fds)?,
                read_only: *read_only,
                request_timeout: timeout_s.filter(|s| *s > 0).map(|s| Duration::from_secs(s.into())),
                default_nbd: *default_nbd,
                pool: pool.clone(),
                ..OpenRequest::of(image.clone())
            };
            value(shared.in_turn(|| host.open(*minor, &request))?)
        }
        Command::Quit { force } => {
            let closed = shared.in_turn(|| host.quit(*force));
            *ends = Some(Ended::Quit);
            closed.map(|()| json!({}))
        }
        Command::Detach { minor } => {
            shared.in_turn(|| host.detach(*minor))?;
            *ends = host.is_empty().then_some(Ended::Empty);
            Ok(json!({}))
        }
        Command::Attach { minor } => shared.in_turn(|| host.attach(*minor)).map(|()| json!({})),
        Command::Close { minor, force } => {
            shared.in_turn(|| host.close(*minor, *force, connection)).map(|()| json!({}))
        }
        Command::Pause { minor } => shared.in_turn(|| host.pause(*minor, connection)).map(|()| json!({})),
        Command::Resume { minor, image, secondary, log } => {
            let (image, secondary) = (image.clone(), secondary.clone());
            let request = ResumeRequest { image, secondary, log_path: log_text(log.as_ref()) };
            shared.in_turn(|| host.resume(*minor, &request)).map(|()| json!({}))
        }
        Command::FrontRemove { minor, front, force } => {
            shared.in_turn(|| host.front_remove(*minor, *front, *force)).map(|()| json!({}))
        }
        Command::FrontFollow { minor, front } => {
            let news = fds.into_iter().next().ok_or_else(|| {
                ControlError::new(Errno::EINVAL, "no socket came along").next("pass one with the request")
            })?;
            value(shared.in_turn(|| host.front_follow(*minor, *front, news.into()))?)
        }
        Command::Limits { minor } => value(host.limits(*minor)?),
        Command::SetLimits { minor, limits } => {
            shared.in_turn(|| host.set_limits(*minor, limits)).map(|()| json!({}))
        }
        Command::MirrorStart { minor, target, copy, rate, patience_ms } => {
            let (target, patience_ms) = (target.clone(), *patience_ms);
            let request = MirrorRequest { target, copy: *copy, rate: *rate, patience_ms };
            value(shared.in_turn(|| host.mirror_start(*minor, &request))?)
        }
        Command::MirrorStatus { minor } => value(host.mirror_status(*minor)?),
        Command::MirrorResume { minor } => shared.in_turn(|| host.mirror_resume(*minor)).map(|()| json!({})),
        Command::MirrorRate { minor, rate } => {
            shared.in_turn(|| host.mirror_rate(*minor, *rate)).map(|()| json!({}))
        }
        Command::MirrorPivot { minor } => value(shared.in_turn(|| host.mirror_pivot(*minor))?),
        Command::MirrorCancel { minor } => shared.in_turn(|| host.mirror_cancel(*minor)).map(|()| json!({})),
        Command::SetPolling { minor, max_us, idle_percent } => {
            let polling = Polling { max_us: *max_us, idle_percent: *idle_percent };
            shared.in_turn(|| host.set_polling(*minor, polling)).map(|()| json!({}))
        }
        Command::TraceStart { minor, events } => value(shared.in_turn(|| host.trace_start(*minor, *events))?),
        Command::TraceStop { minor, forget } => value(shared.in_turn(|| host.trace_stop(*minor, *forget))?),
        Command::JobList { minor } => value(host.image_work(*minor, &ImageWork::Jobs)?),
        Command::Snapshot { .. }
        | Command::Commit { .. }
        | Command::JobCancel { .. }
        | Command::JobRate { .. } => match command.image_work() {
            Some((minor, work)) => value(shared.in_turn(|| host.image_work(minor, &work))?),
            None => Ok(json!({})),
        },
    }
}
