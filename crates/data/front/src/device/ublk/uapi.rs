//! Numbers and layouts of the kernel's user-space block driver (`linux/ublk_cmd.h`). Everything is in the host's
//! byte order.

/// Bytes of `struct ublksrv_ctrl_cmd`.
pub const CONTROL_LEN: usize = 32;
/// Bytes of `struct ublksrv_ctrl_dev_info`.
pub const INFO_LEN: usize = 64;
/// Bytes of `struct ublk_params` as far as it is used here: head, basic and discard.
pub const PARAMS_LEN: usize = 60;
/// Bytes of `struct ublksrv_io_desc`.
pub const DESCRIPTOR_LEN: usize = 24;

/// An ioctl number as the driver encodes its commands: direction, size of the argument, number.
const fn encode(direction: u32, len: usize, number: u32) -> u32 {
    direction << 30 | (len as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn read(number: u32) -> u32 {
    encode(2, CONTROL_LEN, number)
}

const fn both(number: u32) -> u32 {
    encode(3, CONTROL_LEN, number)
}

/// Commands to `/dev/ublk-control`.
pub mod control {
    use super::{both, read};

    pub const ADD_DEV: u32 = both(0x04);
    pub const DEL_DEV_ASYNC: u32 = read(0x14);
    pub const START_DEV: u32 = both(0x06);
    pub const STOP_DEV: u32 = both(0x07);
    pub const SET_PARAMS: u32 = both(0x08);
    pub const START_USER_RECOVERY: u32 = both(0x10);
    pub const END_USER_RECOVERY: u32 = both(0x11);
    pub const GET_DEV_INFO: u32 = read(0x02);
    pub const GET_FEATURES: u32 = read(0x13);
    pub const UPDATE_SIZE: u32 = both(0x15);
}

/// Commands to `/dev/ublkcN`.
pub mod io {
    /// The first request of a tag.
    pub const FETCH: u32 = super::encode(3, 16, 0x20);
    /// The answer to one, and the next.
    pub const COMMIT_AND_FETCH: u32 = super::encode(3, 16, 0x21);
}

/// Bits of features, both offered by the driver and chosen for a device.
pub mod feature {
    /// The device survives its server.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// What it had not answered is asked again.
    pub const RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands are encoded as here.
    pub const IOCTL_ENCODE: u64 = 1 << 6;
    /// The size may change.
    pub const UPDATE_SIZE: u64 = 1 << 10;
}

/// Where a device is in its life.
pub mod state {
    /// Added and not started, or stopped.
    pub const DEAD: u16 = 0;
    /// Its server died; requests wait.
    pub const QUIESCED: u16 = 2;
}

/// Operations of a request.
pub mod op {
    pub const READ: u8 = 0;
    pub const WRITE: u8 = 1;
    pub const FLUSH: u8 = 2;
    pub const DISCARD: u8 = 3;
    pub const WRITE_ZEROES: u8 = 5;
}

/// Flag of a request: durable before it is answered.
pub const FLAG_FUA: u32 = 1 << 13;
/// Flag of a request: keep the space.
pub const FLAG_NOUNMAP: u32 = 1 << 15;

/// A command to the control device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Control {
    pub device: u32,
    pub len: u16,
    pub address: u64,
    pub value: u64,
}

impl Control {
    /// `struct ublksrv_ctrl_cmd`, in as many bytes as a large entry of a ring has.
    pub fn bytes(&self) -> [u8; tapio_ring::uring::COMMAND_LEN] {
        let mut bytes = [0; tapio_ring::uring::COMMAND_LEN];
        bytes[..4].copy_from_slice(&self.device.to_ne_bytes());
        // No queue in particular.
        bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.len.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.value.to_ne_bytes());
        bytes
    }
}

/// `struct ublksrv_io_cmd`: answers `tag` with `result` (bytes, or a negative errno); the next request's data is moved
/// through the memory at `address`.
pub fn io_command(tag: u16, result: i32, address: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    // Queue 0 comes first.
    bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
    bytes[4..8].copy_from_slice(&result.to_ne_bytes());
    bytes[8..].copy_from_slice(&address.to_ne_bytes());
    bytes
}

/// What is known of a device (`struct ublksrv_ctrl_dev_info`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    pub queues: u16,
    pub depth: u16,
    pub state: u16,
    pub buffer_len: u32,
    pub device: u32,
    pub server_pid: i32,
    pub flags: u64,
}

impl Info {
    /// The structure's bytes.
    pub fn bytes(&self) -> [u8; INFO_LEN] {
        let mut bytes = [0; INFO_LEN];
        bytes[..2].copy_from_slice(&self.queues.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.depth.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.state.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.buffer_len.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.device.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.server_pid.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.flags.to_ne_bytes());
        bytes
    }

    /// Reads the structure; `None` when there is not enough.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let two = |at: usize| bytes.get(at..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes));
        let four = |at: usize| bytes.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
        let eight = |at: usize| bytes.get(at..)?.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes));
        Some(Self {
            queues: two(0)?,
            depth: two(2)?,
            state: two(4)?,
            buffer_len: four(8)?,
            device: four(12)?,
            server_pid: four(16)?.cast_signed(),
            flags: eight(24)?,
        })
    }
}

/// What the block layer gets to know of the disk (`struct ublk_params` with its basic and discard parts).
pub fn params(
    len: u64,
    sector_len: u32,
    physical_len: u32,
    read_only: bool,
    max_len: u32,
) -> [u8; PARAMS_LEN] {
    const BASIC: u32 = 1;
    const DISCARD: u32 = 2;
    // A volatile cache, which flushes and FUA see to.
    let attributes: u32 = 4 | 8 | u32::from(read_only);
    let physical = physical_len.max(sector_len);
    let shifts =
        [sector_len.ilog2() as u8, physical.ilog2() as u8, physical.ilog2() as u8, physical.ilog2() as u8];
    let longest: u32 = 1 << (30 - 9);
    let words: [&[u8]; 14] = [
        &(PARAMS_LEN as u32).to_ne_bytes(),
        &(BASIC | DISCARD).to_ne_bytes(),
        &attributes.to_ne_bytes(),
        &shifts,
        &(max_len / 512).to_ne_bytes(),
        &0u32.to_ne_bytes(),
        &(len / 512).to_ne_bytes(),
        &0u64.to_ne_bytes(),
        // Discard: alignment, granularity, the longest discard and zeroing in sectors, one range at a time.
        &0u32.to_ne_bytes(),
        &physical.to_ne_bytes(),
        &longest.to_ne_bytes(),
        &longest.to_ne_bytes(),
        &1u16.to_ne_bytes(),
        &0u16.to_ne_bytes(),
    ];
    let mut bytes = [0; PARAMS_LEN];
    let mut at = 0;
    for word in words {
        bytes[at..at + word.len()].copy_from_slice(word);
        at += word.len();
    }
    bytes
}

/// A request (`struct ublksrv_io_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    pub op: u8,
    pub flags: u32,
    pub sectors: u32,
    pub first_sector: u64,
}

impl Descriptor {
    /// Reads the structure's bytes.
    pub fn parse(bytes: &[u8; DESCRIPTOR_LEN]) -> Self {
        let word = u64::from_ne_bytes(*bytes.first_chunk().expect("24 bytes begin with 8"));
        let low = u32::from_ne_bytes(*bytes.first_chunk().expect("24 bytes begin with 4"));
        let sectors = if cfg!(target_endian = "little") { (word >> 32) as u32 } else { word as u32 };
        let first = bytes[8..].first_chunk().expect("16 bytes begin with 8");
        Self { op: low as u8, flags: low & !0xff, sectors, first_sector: u64::from_ne_bytes(*first) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_kernels_header() {
        assert_eq!(control::ADD_DEV, 0xc020_7504);
        assert_eq!(control::GET_FEATURES, 0x8020_7513);
        assert_eq!(io::FETCH, 0xc010_7520);
        assert_eq!(io::COMMIT_AND_FETCH, 0xc010_7521);
    }

    #[test]
    fn structures_have_their_fields_where_the_kernel_looks() {
        let info = Info {
            queues: 1,
            depth: 128,
            state: state::QUIESCED,
            buffer_len: 1 << 20,
            device: 7,
            server_pid: 4711,
            flags: feature::USER_RECOVERY,
        };
        assert_eq!(Info::parse(&info.bytes()), Some(info));
        assert_eq!(Info::parse(&info.bytes()[..31]), None);
        assert_eq!(info.bytes()[12], 7);
        let control = Control { device: 3, len: 64, address: 0x1122, value: 9 }.bytes();
        assert_eq!((control[0], control[4], control[6], control[8], control[16]), (3, 0xff, 64, 0x22, 9));
        let params = params(1 << 30, 512, 4096, true, 1 << 20);
        assert_eq!(params[0], 60);
        assert_eq!(params[8], 13, "read only, with a cache, with FUA");
        assert_eq!(params[12..16], [9, 12, 12, 12]);
        assert_eq!(params[16..20], 2048u32.to_ne_bytes());
        assert_eq!(params[24..32], (2u64 << 20).to_ne_bytes());
        assert_eq!(params[44..48], 4096u32.to_ne_bytes());
        assert_eq!(params[56], 1);
        assert_eq!(io_command(5, -5, 1 << 12)[2..8], [5, 0, 0xfb, 0xff, 0xff, 0xff]);
    }

    #[test]
    fn a_request_is_read_from_its_descriptor() {
        let mut bytes = [0; DESCRIPTOR_LEN];
        bytes[..4].copy_from_slice(&(1u32 | FLAG_FUA).to_ne_bytes());
        bytes[4..8].copy_from_slice(&8u32.to_ne_bytes());
        bytes[8..16].copy_from_slice(&77u64.to_ne_bytes());
        let want = Descriptor { op: op::WRITE, flags: FLAG_FUA, sectors: 8, first_sector: 77 };
        assert_eq!(Descriptor::parse(&bytes), want);
    }
}
