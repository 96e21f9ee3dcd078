//! The kernel's NBD client by generic netlink (`linux/nbd-netlink.h`, Linux 4.12 or later): devices without a thread
//! that waits in the kernel, and with a new socket for one that lost its own.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// Longest message either way.
const MESSAGE_LEN_MAX: usize = 8192;
/// How long the kernel may take for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

/// Commands of the family.
pub(super) mod command {
    pub const CONNECT: u8 = 1;
    pub const DISCONNECT: u8 = 2;
    pub const RECONFIGURE: u8 = 3;
}

/// Attributes of a command.
pub(super) mod attribute {
    pub const INDEX: u16 = 1;
    pub const SIZE_BYTES: u16 = 2;
    pub const BLOCK_SIZE_BYTES: u16 = 3;
    pub const TIMEOUT: u16 = 4;
    pub const SERVER_FLAGS: u16 = 5;
    pub const SOCKETS: u16 = 7;
    pub const DEAD_CONN_TIMEOUT: u16 = 8;
    pub const BACKEND_IDENTIFIER: u16 = 10;
    pub const SOCK_ITEM: u16 = 1;
    pub const SOCK_FD: u16 = 1;
}

/// A message that is being written.
#[derive(Debug)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// A command of a family.
    pub(super) fn new(family: u16, command: u8) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend(family.to_ne_bytes());
        bytes.extend(((libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16).to_ne_bytes());
        bytes.extend([0; 8]);
        // Of generic netlink: command, version, reserved.
        bytes.extend([command, 1, 0, 0]);
        Self(bytes)
    }

    /// With an attribute.
    #[must_use]
    pub(super) fn with(mut self, kind: u16, value: &[u8]) -> Self {
        put(&mut self.0, kind, value);
        self
    }

    #[must_use]
    pub(super) fn u32(self, kind: u16, value: u32) -> Self {
        self.with(kind, &value.to_ne_bytes())
    }

    #[must_use]
    pub(super) fn u64(self, kind: u16, value: u64) -> Self {
        self.with(kind, &value.to_ne_bytes())
    }

    /// With a text, which the kernel wants to end with NUL.
    #[must_use]
    pub(super) fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.replace('\0', " ").into_bytes();
        bytes.push(0);
        self.with(kind, &bytes)
    }

    /// With a connected socket.
    #[must_use]
    pub(super) fn socket(self, socket: &OwnedFd) -> Self {
        let (mut item, mut list) = (Vec::new(), Vec::new());
        put(&mut item, attribute::SOCK_FD, &(socket.as_raw_fd() as u32).to_ne_bytes());
        put(&mut list, attribute::SOCK_ITEM | libc::NLA_F_NESTED as u16, &item);
        self.with(attribute::SOCKETS | libc::NLA_F_NESTED as u16, &list)
    }

    fn finish(mut self) -> Vec<u8> {
        let len = self.0.len() as u32;
        self.0[..4].copy_from_slice(&len.to_ne_bytes());
        self.0
    }
}

fn put(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    bytes.extend((value.len() as u16 + 4).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

fn two(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn four(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The value of an attribute in a list of them.
fn find(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(two(attributes, 0)?);
        let kind = two(attributes, 2)? & !(libc::NLA_F_NESTED as u16);
        let value = attributes.get(4..len)?;
        if kind == wanted {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
}

/// What a datagram of the kernel says: `Err` for an error, the attributes of an answer, and whether it was the last.
#[derive(Debug, Default)]
struct Answer {
    attributes: Vec<u8>,
    last: bool,
}

fn parse(mut bytes: &[u8], answer: &mut Answer) -> io::Result<()> {
    const HEADER_LEN: usize = 16;
    while let (Some(len), Some(kind)) = (four(bytes, 0), two(bytes, 4)) {
        let Some(message) = bytes.get(HEADER_LEN..len as usize) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        match i32::from(kind) {
            libc::NLMSG_ERROR => {
                let error = four(message, 0).unwrap_or(0).cast_signed();
                answer.last = true;
                if error != 0 {
                    return Err(io::Error::from_raw_os_error(error.saturating_neg()));
                }
            }
            _ => answer.attributes = message.get(4..).unwrap_or_default().to_vec(),
        }
        bytes = bytes.get((len as usize).next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(())
}

/// A conversation with the kernel.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
    family: u16,
}

impl Netlink {
    /// Finds the family of the NBD client.
    ///
    /// # Errors
    /// `ENOENT` without the driver.
    pub(super) fn open() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_GENERIC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let limit = libc::timeval { tv_sec: ANSWER_MAX.as_secs() as libc::time_t, tv_usec: 0 };
        let len = size_of::<libc::timeval>() as libc::socklen_t;
        // SAFETY: `limit` is valid for reading `len` bytes.
        let set = unsafe {
            let limit = (&raw const limit).cast();
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVTIMEO, limit, len)
        };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut netlink = Self { socket, family: 0 };
        let ask = Message::new(GENL_ID_CTRL, CTRL_CMD_GETFAMILY).with(CTRL_ATTR_FAMILY_NAME, b"nbd\0");
        let attributes = netlink.run(ask)?;
        let family = find(&attributes, CTRL_ATTR_FAMILY_ID).and_then(|value| two(value, 0));
        netlink.family = family.ok_or(io::ErrorKind::InvalidData)?;
        Ok(netlink)
    }

    /// A command to the NBD client.
    pub(super) fn command(&self, command: u8) -> Message {
        Message::new(self.family, command)
    }

    /// Sends a command; gives the attributes of its answer.
    pub(super) fn run(&self, message: Message) -> io::Result<Vec<u8>> {
        let bytes = message.finish();
        // SAFETY: the bytes are valid for reading.
        let sent = unsafe { libc::send(self.socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut answer = Answer::default();
        while !answer.last {
            let mut bytes = [0u8; MESSAGE_LEN_MAX];
            // SAFETY: the bytes are valid for writing.
            let len =
                unsafe { libc::recv(self.socket.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0) };
            if len < 0 {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
                    _ => return Err(error),
                }
            }
            parse(&bytes[..len as usize], &mut answer)?;
        }
        Ok(answer.attributes)
    }
}

/// Reads an answer for fuzzers and no one else: the number in it, or the errno.
pub fn foreign(bytes: &[u8]) -> Result<Option<u32>, Option<i32>> {
    let mut answer = Answer::default();
    parse(bytes, &mut answer).map_err(|error| error.raw_os_error())?;
    Ok(index(&answer.attributes))
}

/// The number of the device in the answer to a connection.
pub(super) fn index(attributes: &[u8]) -> Option<u32> {
    find(attributes, attribute::INDEX).and_then(|value| four(value, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_laid_out_as_the_kernel_reads_it() {
        let bytes =
            Message::new(0x22, command::CONNECT).u32(attribute::INDEX, 5).u64(attribute::TIMEOUT, 9).finish();
        assert_eq!(bytes.len(), 16 + 4 + 8 + 12);
        assert_eq!(four(&bytes, 0), Some(40));
        assert_eq!(two(&bytes, 4), Some(0x22));
        assert_eq!(bytes[16..18], [1, 1]);
        assert_eq!(find(&bytes[20..], attribute::TIMEOUT), Some(&9u64.to_ne_bytes()[..]));
        assert_eq!(index(&bytes[20..]), Some(5));
        assert_eq!(find(&bytes[20..], 99), None);
    }

    #[test]
    fn a_socket_is_nested_twice() {
        let socket = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let bytes = Message::new(1, 1).socket(&socket).finish();
        let list = find(&bytes[20..], attribute::SOCKETS).unwrap();
        let item = find(list, attribute::SOCK_ITEM).unwrap();
        let fd = find(item, attribute::SOCK_FD).and_then(|value| four(value, 0));
        assert_eq!(fd, Some(socket.as_raw_fd() as u32));
    }

    #[test]
    fn answers_are_read_and_broken_ones_are_errors() {
        let mut datagram = Message::new(1, 1).u32(attribute::INDEX, 3).finish();
        let mut error = 20u32.to_ne_bytes().to_vec();
        error.extend((libc::NLMSG_ERROR as u16).to_ne_bytes());
        error.resize(16, 0);
        let mut refused = error.clone();
        error.extend(0i32.to_ne_bytes());
        datagram.extend(&error);
        let mut answer = Answer::default();
        parse(&datagram, &mut answer).unwrap();
        assert!(answer.last);
        assert_eq!(index(&answer.attributes), Some(3));
        refused.extend((-libc::EPERM).to_ne_bytes());
        let result = parse(&refused, &mut Answer::default());
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EPERM));
        for end in 6..16 {
            assert!(parse(&refused[..end], &mut Answer::default()).is_err(), "{end}");
        }
        assert_eq!(find(&[3, 0, 1, 0], 1), None);
        assert_eq!(find(&[0, 0, 9, 0], 1), None);
    }
}
