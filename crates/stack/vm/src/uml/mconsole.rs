//! User-mode Linux's management console: datagrams on a UNIX socket (Linux arch/um/drivers/mconsole.h). A request is
//! magic, version and length as native 32-bit numbers and 512 bytes of text; a reply is an error, whether more
//! follows, a length, and 512 bytes.

use std::fs;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const MAGIC: u32 = 0xcafe_babe;
const VERSION: u32 = 2;
const DATA_LEN: usize = 512;
const HEADER_LEN: usize = 12;

/// More parts than any answer has.
const PARTS_MAX: usize = 64;

static SEQUENCE: AtomicU32 = AtomicU32::new(0);

fn number(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

/// Sends a command to the kernel that listens at `socket`, and gives its answer. `dir` takes our end.
pub(super) fn ask(dir: &Path, socket: &Path, command: &str, until: Instant) -> io::Result<String> {
    let own = dir.join(format!("mc{}", SEQUENCE.fetch_add(1, Ordering::Relaxed) % 1000));
    let _ = fs::remove_file(&own);
    let answer = exchange(&own, socket, command, until);
    let _ = fs::remove_file(&own);
    answer
}

fn exchange(own: &Path, socket: &Path, command: &str, until: Instant) -> io::Result<String> {
    if command.len() >= DATA_LEN {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the command is too long"));
    }
    let datagrams = UnixDatagram::bind(own)?;
    // The kernel answers as the user it runs as.
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(own, fs::Permissions::from_mode(0o622))?;
    let mut request = Vec::with_capacity(HEADER_LEN + DATA_LEN);
    for field in [MAGIC, VERSION, command.len() as u32] {
        request.extend_from_slice(&field.to_ne_bytes());
    }
    request.extend_from_slice(command.as_bytes());
    request.resize(HEADER_LEN + DATA_LEN, 0);
    datagrams.send_to(&request, socket)?;
    let mut text = String::new();
    for _ in 0..PARTS_MAX {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        datagrams.set_read_timeout(Some(left))?;
        let mut reply = [0; HEADER_LEN + DATA_LEN];
        let len = datagrams.recv(&mut reply)?;
        let said = reply.get(HEADER_LEN..len).unwrap_or_default();
        let said = &said[..said.len().min(number(&reply, 8) as usize)];
        text.push_str(String::from_utf8_lossy(said).trim_end_matches('\0'));
        if number(&reply, 4) == 0 {
            return if number(&reply, 0) == 0 { Ok(text) } else { Err(io::Error::other(text)) };
        }
    }
    Err(io::Error::other("the answer has no end"))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn an_answer_in_parts_is_put_together() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mconsole");
        let kernel = UnixDatagram::bind(&path).unwrap();
        let thread = thread::spawn(move || {
            let mut request = [0; 1024];
            for error in [0_u32, 1] {
                let (len, from) = kernel.recv_from(&mut request).unwrap();
                assert_eq!((len, number(&request, 0), number(&request, 8)), (524, MAGIC, 4));
                assert_eq!(&request[12..16], b"stop");
                for (more, text) in [(1_u32, "stop"), (0, "ped\0")] {
                    let mut reply: Vec<u8> =
                        [error, more, text.len() as u32].iter().flat_map(|n| n.to_ne_bytes()).collect();
                    reply.extend_from_slice(text.as_bytes());
                    kernel.send_to_addr(&reply, &from).unwrap();
                }
            }
        });
        let soon = Instant::now() + Duration::from_secs(60);
        assert_eq!(ask(dir.path(), &path, "stop", soon).unwrap(), "stopped");
        assert!(ask(dir.path(), &path, "stop", soon).unwrap_err().to_string().contains("stopped"));
        thread.join().unwrap();
        let begun = Instant::now();
        assert!(
            ask(dir.path(), &dir.path().join("none"), "stop", begun + Duration::from_millis(50)).is_err()
        );
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
}
