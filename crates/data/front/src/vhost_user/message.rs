//! The messages of vhost-user: headers, payloads, descriptors; pure functions on bytes.
//!
//! Layouts and numbers follow the vhost-user protocol specification ("Vhost-user Protocol", sections *Message
//! Specification* and *Front-end message types*). Everything is in the host's byte order.

use std::fmt;

/// Bytes of a message header: request, flags, payload size.
pub const HEADER_LEN: usize = 12;
/// The longest payload taken. The longest that means anything here is a memory table or a configuration space.
pub const PAYLOAD_MAX: usize = 1024;
/// Regions in one `SET_MEM_TABLE`, and so the most descriptors that come with one message.
pub const TABLE_REGIONS_MAX: usize = 8;
/// The longest configuration space that the protocol can carry.
pub const CONFIG_LEN_MAX: usize = 256;

const FLAG_VERSION_MASK: u32 = 0x3;
const FLAG_VERSION: u32 = 0x1;
const FLAG_REPLY: u32 = 0x4;
const FLAG_NEED_REPLY: u32 = 0x8;

/// Bits of `GET_PROTOCOL_FEATURES`.
pub mod protocol {
    /// Several queues.
    pub const MQ: u64 = 1 << 0;
    /// The dirty log comes as a descriptor.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// Any message may ask for an acknowledgement.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The back end may send requests on a socket of its own.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The back end has a configuration space.
    pub const CONFIG: u64 = 1 << 9;
    /// Requests in flight are noted in shared memory.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// The device can be reset.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Memory regions come and go one by one.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// The virtio status byte is kept here.
    pub const STATUS: u64 = 1 << 16;
}

/// The header in front of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Which request this is, or answers.
    pub request: u32,
    /// Version and flags.
    pub flags: u32,
    /// Bytes of payload that follow.
    pub len: u32,
}

impl Header {
    /// The header of a request from the front end.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Self, MessageError> {
        let header = Self { request: u32_at(bytes, 0), flags: u32_at(bytes, 4), len: u32_at(bytes, 8) };
        if header.flags & FLAG_VERSION_MASK != FLAG_VERSION {
            return Err(MessageError::Version(header.flags & FLAG_VERSION_MASK));
        }
        if header.len as usize > PAYLOAD_MAX {
            return Err(MessageError::TooLong { request: header.request, len: header.len });
        }
        Ok(header)
    }

    /// The header of an answer to `request`.
    pub const fn reply(request: u32, len: u32) -> Self {
        Self { request, flags: FLAG_VERSION | FLAG_REPLY, len }
    }

    /// The header of a request; `need_reply` asks for an acknowledgement.
    pub const fn request(request: u32, len: u32, need_reply: bool) -> Self {
        let need = if need_reply { FLAG_NEED_REPLY } else { 0 };
        Self { request, flags: FLAG_VERSION | need, len }
    }

    /// Whether the sender wants an acknowledgement.
    pub const fn needs_reply(&self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
    }

    /// Whether this is an answer.
    pub const fn is_reply(&self) -> bool {
        self.flags & FLAG_REPLY != 0
    }

    /// The bytes on the wire.
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..4].copy_from_slice(&self.request.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_ne_bytes());
        bytes
    }
}

/// Numbers of the requests.
#[allow(missing_docs)]
pub mod id {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
    /// From the back end: the configuration space has changed.
    pub const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// A piece of guest memory as the front end describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// Where the guest sees it.
    pub guest: u64,
    /// Bytes.
    pub len: u64,
    /// Where the front end has it mapped: ring addresses are given in these.
    pub user: u64,
    /// Where it begins in the file behind its descriptor.
    pub offset: u64,
}

const REGION_LEN: usize = 32;

impl RegionSpec {
    fn parse(bytes: &[u8]) -> Self {
        Self {
            guest: u64_at(bytes, 0),
            len: u64_at(bytes, 8),
            user: u64_at(bytes, 16),
            offset: u64_at(bytes, 24),
        }
    }

    /// The bytes on the wire.
    pub fn to_bytes(self) -> [u8; REGION_LEN] {
        let mut bytes = [0; REGION_LEN];
        for (index, word) in [self.guest, self.len, self.user, self.offset].into_iter().enumerate() {
            bytes[index * 8..index * 8 + 8].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// Where the parts of a ring are, in addresses of the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    /// Bit 0: writes to the used ring are logged.
    pub flags: u32,
    /// Descriptor table.
    pub desc: u64,
    /// Used ring.
    pub used: u64,
    /// Available ring.
    pub avail: u64,
    /// Guest address by which writes to the used ring are logged.
    pub log: u64,
}

/// The in-flight region as the front end describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightSpec {
    /// Bytes.
    pub len: u64,
    /// Where it begins in its file.
    pub offset: u64,
    /// Queues it has room for.
    pub queues: u16,
    /// Descriptors of each queue.
    pub queue_size: u16,
}

impl InflightSpec {
    /// The bytes on the wire.
    pub fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[0..8].copy_from_slice(&self.len.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_ne_bytes());
        bytes[16..18].copy_from_slice(&self.queues.to_ne_bytes());
        bytes[18..20].copy_from_slice(&self.queue_size.to_ne_bytes());
        bytes
    }
}

/// A request of the front end with its payload taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<RegionSpec>),
    SetLogBase { len: u64, offset: u64 },
    SetLogFd,
    SetVringNum { index: u32, size: u32 },
    SetVringAddr { index: u32, addresses: RingAddresses },
    SetVringBase { index: u32, base: u32 },
    GetVringBase { index: u32 },
    SetVringKick { index: u8, has_fd: bool },
    SetVringCall { index: u8, has_fd: bool },
    SetVringErr { index: u8, has_fd: bool },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable { index: u32, enable: bool },
    SetBackendReqFd,
    GetConfig { offset: u32, len: u32, flags: u32 },
    SetConfig { offset: u32, flags: u32, bytes: Vec<u8> },
    GetInflightFd(InflightSpec),
    SetInflightFd(InflightSpec),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(RegionSpec),
    RemMemReg(RegionSpec),
    SetStatus(u64),
    GetStatus,
}

impl Message {
    /// Takes the payload of a message apart. Pure: the descriptors that came along are counted by
    /// [`Message::check_fds`].
    pub fn parse(request: u32, payload: &[u8]) -> Result<Self, MessageError> {
        let exact = |len: usize| {
            if payload.len() == len {
                Ok(payload)
            } else {
                Err(MessageError::Length { request, got: payload.len(), want: len })
            }
        };
        let number = || exact(8).map(|bytes| u64_at(bytes, 0));
        let state = || exact(8).map(|bytes| (u32_at(bytes, 0), u32_at(bytes, 4)));
        let fd_index = || number().map(|value| ((value & 0xff) as u8, value & 0x100 == 0));
        Ok(match request {
            id::GET_FEATURES => Self::GetFeatures,
            id::SET_FEATURES => Self::SetFeatures(number()?),
            id::SET_OWNER => Self::SetOwner,
            id::RESET_OWNER => Self::ResetOwner,
            id::SET_MEM_TABLE => Self::SetMemTable(parse_table(payload)?),
            id::SET_LOG_BASE => {
                let bytes = exact(16)?;
                Self::SetLogBase { len: u64_at(bytes, 0), offset: u64_at(bytes, 8) }
            }
            id::SET_LOG_FD => Self::SetLogFd,
            id::SET_VRING_NUM => state().map(|(index, size)| Self::SetVringNum { index, size })?,
            id::SET_VRING_ADDR => {
                let bytes = exact(40)?;
                let addresses = RingAddresses {
                    flags: u32_at(bytes, 4),
                    desc: u64_at(bytes, 8),
                    used: u64_at(bytes, 16),
                    avail: u64_at(bytes, 24),
                    log: u64_at(bytes, 32),
                };
                Self::SetVringAddr { index: u32_at(bytes, 0), addresses }
            }
            id::SET_VRING_BASE => state().map(|(index, base)| Self::SetVringBase { index, base })?,
            id::GET_VRING_BASE => state().map(|(index, _)| Self::GetVringBase { index })?,
            id::SET_VRING_KICK => fd_index().map(|(index, has_fd)| Self::SetVringKick { index, has_fd })?,
            id::SET_VRING_CALL => fd_index().map(|(index, has_fd)| Self::SetVringCall { index, has_fd })?,
            id::SET_VRING_ERR => fd_index().map(|(index, has_fd)| Self::SetVringErr { index, has_fd })?,
            id::GET_PROTOCOL_FEATURES => Self::GetProtocolFeatures,
            id::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(number()?),
            id::GET_QUEUE_NUM => Self::GetQueueNum,
            id::SET_VRING_ENABLE => match state()? {
                (index, value @ (0 | 1)) => Self::SetVringEnable { index, enable: value == 1 },
                (_, value) => return Err(MessageError::Value { request, value: value.into() }),
            },
            id::SET_BACKEND_REQ_FD => Self::SetBackendReqFd,
            id::GET_CONFIG => {
                let (offset, len, flags, _) = parse_config(request, payload)?;
                Self::GetConfig { offset, len, flags }
            }
            id::SET_CONFIG => {
                let (offset, _, flags, bytes) = parse_config(request, payload)?;
                Self::SetConfig { offset, flags, bytes: bytes.to_vec() }
            }
            id::GET_INFLIGHT_FD => Self::GetInflightFd(parse_inflight(request, payload)?),
            id::SET_INFLIGHT_FD => Self::SetInflightFd(parse_inflight(request, payload)?),
            id::RESET_DEVICE => Self::ResetDevice,
            id::GET_MAX_MEM_SLOTS => Self::GetMaxMemSlots,
            id::ADD_MEM_REG => Self::AddMemReg(RegionSpec::parse(&exact(40)?[8..])),
            id::REM_MEM_REG => Self::RemMemReg(RegionSpec::parse(&exact(40)?[8..])),
            id::SET_STATUS => Self::SetStatus(number()?),
            id::GET_STATUS => Self::GetStatus,
            other => return Err(MessageError::Unknown(other)),
        })
    }

    /// Checks that as many descriptors came along as this message needs.
    pub fn check_fds(&self, request: u32, count: usize) -> Result<(), MessageError> {
        let (low, high) = match self {
            Self::SetMemTable(regions) => (regions.len(), regions.len()),
            Self::SetVringKick { has_fd, .. }
            | Self::SetVringCall { has_fd, .. }
            | Self::SetVringErr { has_fd, .. } => (usize::from(*has_fd), usize::from(*has_fd)),
            Self::SetLogBase { .. }
            | Self::SetLogFd
            | Self::SetBackendReqFd
            | Self::SetInflightFd(_)
            | Self::AddMemReg(_) => (1, 1),
            // Some front ends send the descriptor of the region that is to go.
            Self::RemMemReg(_) => (0, 1),
            _ => (0, 0),
        };
        if (low..=high).contains(&count) {
            Ok(())
        } else {
            Err(MessageError::Descriptors { request, got: count, want: low })
        }
    }
}

fn parse_table(payload: &[u8]) -> Result<Vec<RegionSpec>, MessageError> {
    let request = id::SET_MEM_TABLE;
    let Some(count) = payload.get(..4).map(|bytes| u32_at(bytes, 0) as usize) else {
        return Err(MessageError::Length { request, got: payload.len(), want: 8 });
    };
    if count > TABLE_REGIONS_MAX {
        return Err(MessageError::Value { request, value: count as u64 });
    }
    let want = 8 + count * REGION_LEN;
    // Some front ends always send the table at its full length.
    if payload.len() < want || payload.len() > 8 + TABLE_REGIONS_MAX * REGION_LEN {
        return Err(MessageError::Length { request, got: payload.len(), want });
    }
    Ok(payload[8..want].chunks_exact(REGION_LEN).map(RegionSpec::parse).collect())
}

/// `(offset, len, flags, bytes)` of a configuration payload.
fn parse_config(request: u32, payload: &[u8]) -> Result<(u32, u32, u32, &[u8]), MessageError> {
    if payload.len() < 12 {
        return Err(MessageError::Length { request, got: payload.len(), want: 12 });
    }
    let (offset, len, flags) = (u32_at(payload, 0), u32_at(payload, 4), u32_at(payload, 8));
    let in_space = u64::from(offset) + u64::from(len) <= CONFIG_LEN_MAX as u64;
    if !in_space {
        return Err(MessageError::Value { request, value: u64::from(offset) + u64::from(len) });
    }
    let bytes = &payload[12..];
    if bytes.len() != len as usize {
        return Err(MessageError::Length { request, got: payload.len(), want: 12 + len as usize });
    }
    Ok((offset, len, flags, bytes))
}

fn parse_inflight(request: u32, payload: &[u8]) -> Result<InflightSpec, MessageError> {
    // The struct has 20 bytes; compilers pad it to 24, and front ends send either.
    if payload.len() != 20 && payload.len() != 24 {
        return Err(MessageError::Length { request, got: payload.len(), want: 20 });
    }
    Ok(InflightSpec {
        len: u64_at(payload, 0),
        offset: u64_at(payload, 8),
        queues: u16_at(payload, 16),
        queue_size: u16_at(payload, 18),
    })
}

/// A configuration payload: `GET_CONFIG`'s answer, `SET_CONFIG`'s request.
pub fn config_payload(offset: u32, flags: u32, bytes: &[u8]) -> Vec<u8> {
    let mut payload = Vec::with_capacity(12 + bytes.len());
    payload.extend_from_slice(&offset.to_ne_bytes());
    payload.extend_from_slice(&(bytes.len() as u32).to_ne_bytes());
    payload.extend_from_slice(&flags.to_ne_bytes());
    payload.extend_from_slice(bytes);
    payload
}

/// Why bytes are not a message that can be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum MessageError {
    /// The version bits are not 1.
    Version(u32),
    /// The payload is longer than any message is.
    TooLong { request: u32, len: u32 },
    /// The payload has the wrong length for its request.
    Length { request: u32, got: usize, want: usize },
    /// A field has a value that makes no sense.
    Value { request: u32, value: u64 },
    /// The wrong number of descriptors came along.
    Descriptors { request: u32, got: usize, want: usize },
    /// There is no such request.
    Unknown(u32),
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => {
                write!(f, "message of protocol version {version}; only version 1 exists")
            }
            Self::TooLong { request, len } => {
                write!(f, "message {request} announces {len} bytes; at most {PAYLOAD_MAX} are taken")
            }
            Self::Length { request, got, want } => {
                write!(f, "message {request} carries {got} bytes instead of {want}")
            }
            Self::Value { request, value } => {
                write!(f, "message {request} carries the impossible value {value:#x}")
            }
            Self::Descriptors { request, got, want } => {
                write!(f, "message {request} came with {got} descriptors instead of {want}")
            }
            Self::Unknown(request) => write!(f, "message {request} is not known or was not negotiated"),
        }
    }
}

impl std::error::Error for MessageError {}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    let mut out = [0; 2];
    out.copy_from_slice(&bytes[at..at + 2]);
    u16::from_ne_bytes(out)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut out = [0; 4];
    out.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(out)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut out = [0; 8];
    out.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_wire() {
        let header = Header::request(id::SET_MEM_TABLE, 72, true);
        let back = Header::parse(&header.to_bytes()).unwrap();
        assert_eq!(back, header);
        assert!(back.needs_reply() && !back.is_reply());
    }

    #[test]
    fn headers_of_another_version_or_an_absurd_length_are_refused() {
        let mut bytes = Header::request(1, 0, false).to_bytes();
        bytes[4] = 2;
        assert_eq!(Header::parse(&bytes), Err(MessageError::Version(2)));
        let long = Header::request(1, PAYLOAD_MAX as u32 + 1, false).to_bytes();
        assert!(matches!(Header::parse(&long), Err(MessageError::TooLong { .. })));
    }

    #[test]
    fn a_memory_table_is_as_long_as_it_says_or_padded_to_its_full_length() {
        let region = RegionSpec { guest: 1, len: 2, user: 3, offset: 4 };
        let mut payload = vec![1, 0, 0, 0, 0, 0, 0, 0];
        payload.extend_from_slice(&region.to_bytes());
        assert_eq!(Message::parse(id::SET_MEM_TABLE, &payload), Ok(Message::SetMemTable(vec![region])));
        let mut padded = payload.clone();
        padded.resize(8 + 8 * 32, 0);
        assert_eq!(Message::parse(id::SET_MEM_TABLE, &padded), Ok(Message::SetMemTable(vec![region])));
        payload.pop();
        assert!(matches!(Message::parse(id::SET_MEM_TABLE, &payload), Err(MessageError::Length { .. })));
        padded[0] = 9;
        assert!(matches!(Message::parse(id::SET_MEM_TABLE, &padded), Err(MessageError::Value { .. })));
        assert!(matches!(Message::parse(id::SET_MEM_TABLE, &[]), Err(MessageError::Length { .. })));
    }

    #[test]
    fn every_message_says_how_many_descriptors_it_needs() {
        let kick = Message::parse(id::SET_VRING_KICK, &3u64.to_ne_bytes()).unwrap();
        assert_eq!(kick, Message::SetVringKick { index: 3, has_fd: true });
        assert!(kick.check_fds(id::SET_VRING_KICK, 1).is_ok());
        assert!(kick.check_fds(id::SET_VRING_KICK, 0).is_err());
        let without = Message::parse(id::SET_VRING_KICK, &0x103u64.to_ne_bytes()).unwrap();
        assert!(without.check_fds(id::SET_VRING_KICK, 0).is_ok());
        assert!(without.check_fds(id::SET_VRING_KICK, 1).is_err());
        assert!(Message::GetFeatures.check_fds(id::GET_FEATURES, 1).is_err());
    }

    #[test]
    fn configuration_payloads_stay_inside_the_space() {
        let payload = config_payload(32, 0, &[1]);
        let want = Message::SetConfig { offset: 32, flags: 0, bytes: vec![1] };
        assert_eq!(Message::parse(id::SET_CONFIG, &payload), Ok(want));
        let outside = config_payload(250, 0, &[0; 7]);
        assert!(matches!(Message::parse(id::GET_CONFIG, &outside), Err(MessageError::Value { .. })));
        let mut huge = config_payload(0, 0, &[]);
        huge[0..4].copy_from_slice(&u32::MAX.to_ne_bytes());
        huge[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert!(Message::parse(id::GET_CONFIG, &huge).is_err());
    }

    #[test]
    fn no_payload_of_any_length_makes_the_parser_panic() {
        for request in 0..64 {
            for len in 0..300 {
                for fill in [0x00, 0x01, 0x7f, 0xff] {
                    let _ = Message::parse(request, &vec![fill; len]);
                }
            }
        }
    }
}
