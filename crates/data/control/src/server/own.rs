//! Answering our own protocol: a conversation of lines.

use serde_json::Value;

use super::{Connection, Ended};
use crate::command::{Call, Command};
use crate::own::{ErrorBody, LINE_LEN_MAX, Reply, parse_request};
use crate::{ControlError, Errno, Result};

pub(super) fn converse(connection: &mut Connection<'_>) -> Result<()> {
    let mut greeted = false;
    loop {
        let Some(line) = line(connection)? else { return Ok(()) };
        let mut ends = None;
        let (id, answer) = match parse_request(&line) {
            Err((id, error)) => (id, Err(error)),
            Ok(request) => {
                let greets = matches!(request.command, Command::Hello(_));
                let answer = if greets || greeted {
                    run(connection, request.command, &mut ends)
                } else {
                    Err(ControlError::new(Errno::EPROTO, "a conversation begins with 'hello'")
                        .next("send it first"))
                };
                greeted |= greets && answer.is_ok();
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

/// Does what a command asks, in its turn unless it may run beside others.
fn run(connection: &mut Connection<'_>, command: Command, ends: &mut Option<Ended>) -> Result<Value> {
    command.check(connection.fds.len())?;
    let fds = std::mem::take(&mut connection.fds);
    let shared = connection.shared;
    let mut call = Call { fds, ..Call::of(connection) };
    if let Command::Open(open) = &command {
        // Before its turn, which others wait for: a pipe gives its key when it likes.
        call.key = open.read_key(std::mem::take(&mut call.fds))?;
    }
    let detaches = matches!(command, Command::Detach(_));
    if matches!(command, Command::Quit(_)) {
        *ends = Some(Ended::Quit);
    }
    if command.is_concurrent() {
        return command.run(shared.host, &mut call);
    }
    let is_forced = matches!(&command, Command::Close(close) if close.force)
        || matches!(&command, Command::Quit(quit) if quit.force);
    let answer = match is_forced {
        true => shared.in_forced_turn(|| command.run(shared.host, &mut call))?,
        false => shared.in_turn(|| command.run(shared.host, &mut call))?,
    };
    if detaches && shared.host.is_empty() {
        *ends = Some(Ended::Empty);
    }
    Ok(answer)
}
