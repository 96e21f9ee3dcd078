//! The messages of this host's kernel (`host.dmesg`).

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;

use tapio_model::{ApiError, Value};

use crate::args::Args;
use crate::call::{Call, HandlersOf};
use crate::db::Db;

/// Where the kernel gives its messages, one with each read.
const MESSAGES: &str = "/dev/kmsg";
/// Longest message that the kernel gives, with its head.
const MESSAGE_LEN_MAX: usize = 8192;
/// Messages that are read: more than the kernel keeps, even where it writes faster than they are read.
const MESSAGES_MAX: usize = 1_000_000;
/// Bytes that are answered at most: the newest.
const ANSWER_LEN_MAX: usize = 1 << 20;

pub(super) fn register(handlers: &mut HandlersOf<'_, Db>) {
    handlers.on("host.dmesg", dmesg);
}

fn dmesg(call: &Call<Db>, args: &Args) -> Result<Value, ApiError> {
    let host = call.part.get("host", args.text(0)?)?;
    let text = read().map_err(|error| {
        let name = host.text("name_label");
        let next = match error.kind() {
            ErrorKind::PermissionDenied => {
                "; tapiod needs CAP_SYSLOG for that (kernel.dmesg_restrict): run it as root"
            }
            _ => "",
        };
        ApiError::new(
            "OPERATION_NOT_ALLOWED",
            [format!("host {name}: {MESSAGES} cannot be read: {error}{next}")],
        )
    })?;
    Ok(Value::String(text))
}

fn read() -> std::io::Result<String> {
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(MESSAGES)?;
    let (mut text, mut message) = (String::new(), [0; MESSAGE_LEN_MAX]);
    for _ in 0..MESSAGES_MAX {
        match file.read(&mut message) {
            Ok(0) => break,
            Ok(len) => text.extend(line(&String::from_utf8_lossy(&message[..len]))),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // The oldest that was not read yet is overwritten: the next is the one after it.
            Err(error)
                if error.kind() == ErrorKind::Interrupted || error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(error) => return Err(error),
        }
    }
    if text.len() > ANSWER_LEN_MAX {
        let cut = text.len() - ANSWER_LEN_MAX;
        let begin =
            text.bytes().skip(cut).position(|byte| byte == b'\n').map_or(text.len(), |at| cut + at + 1);
        text.drain(..begin);
    }
    Ok(text)
}

/// A message as `dmesg` shows it: seconds since the start of the kernel, and the text. As the kernel gives it, it is
/// `PRIORITY,NUMBER,MICROSECONDS,FLAGS;TEXT`, and lines with facts about the device.
fn line(message: &str) -> Option<String> {
    let (head, rest) = message.split_once(';')?;
    let time: u64 = head.split(',').nth(2)?.parse().ok()?;
    let text = rest.lines().next().unwrap_or_default();
    Some(format!("[{:5}.{:06}] {text}\n", time / 1_000_000, time % 1_000_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_look_as_dmesg_shows_them() {
        let shown = line("6,339,5140900,-;NET: Registered protocol family 10\n SUBSYSTEM=net\n");
        assert_eq!(shown.as_deref(), Some("[    5.140900] NET: Registered protocol family 10\n"));
        assert_eq!(line("4,1,123456000007,c,x=y;a;b").as_deref(), Some("[123456.000007] a;b\n"));
        for odd in ["", "no head", "1,2;text", "1,2,x,-;text"] {
            assert_eq!(line(odd), None, "{odd}");
        }
    }
}
