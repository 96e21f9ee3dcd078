//! The ring of a Xen guest, as a front end of a disk: what the disk process is given, what it offers, what it reports.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tapio_types::{Movement, RingState};

use crate::disk_info::DiskInfo;
use crate::message::Blkif;
use crate::polling::Polling;
use crate::{ControlError, Errno, Result};

/// Queues of a device, at most.
pub const BLKIF_QUEUES_MAX: usize = 16;
/// Largest ring, as a power of two pages.
pub const BLKIF_ORDER_MAX: u32 = 3;
/// Segments of an indirect request, at most: what eight pages of them hold.
pub const BLKIF_INDIRECT_MAX: u16 = 4096;
/// Segments of an indirect request when nothing else is said.
pub const BLKIF_INDIRECT_DEFAULT: u16 = 256;

/// Layout of a ring, by the words of xenstore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlkifProtocol {
    /// 108 bytes a request.
    #[serde(rename = "x86_32-abi")]
    X86_32,
    /// 112 bytes a request.
    #[default]
    #[serde(rename = "x86_64-abi")]
    X86_64,
}

impl BlkifProtocol {
    /// The word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::X86_32 => "x86_32-abi",
            Self::X86_64 => "x86_64-abi",
        }
    }

    /// By tapdisk's number: 1 is the host's own ABI, 2 is `x86_32`, 3 is `x86_64`.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 | 3 => Some(Self::X86_64),
            2 => Some(Self::X86_32),
            _ => None,
        }
    }
}

impl FromStr for BlkifProtocol {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "x86_32-abi" => Ok(Self::X86_32),
            "x86_64-abi" => Ok(Self::X86_64),
            _ => Err(format!("'{text}' is no layout of a ring: x86_32-abi or x86_64-abi")),
        }
    }
}

/// What is done about requests that a former process took and did not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RingStart {
    /// They are repeated if what was left behind belongs to this very ring.
    #[default]
    Auto,
    /// The ring is a new one; what was left behind is forgotten.
    Fresh,
    /// They are repeated; without a record of them the ring is refused unless it has nothing unanswered.
    Resume,
}

impl FromStr for RingStart {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "fresh" => Ok(Self::Fresh),
            "resume" => Ok(Self::Resume),
            _ => Err(format!("'{text}' begins no ring: auto, fresh or resume")),
        }
    }
}

/// One ring of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct BlkifQueue {
    /// Grants of its pages in order: 1, 2, 4 or 8.
    pub ring: Vec<u32>,
    /// Grants of the pages of responses, where these have a ring of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub responses: Vec<u32>,
    /// Event channel, as the guest's end of it is called in the guest.
    pub port: u32,
    /// Of a double of the hypervisor: indices of two passed descriptors, the one to wait on and the one to notify by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub double: Option<[u32; 2]>,
}

/// A block device of a Xen guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct BlkifFront {
    /// Domain of the guest.
    pub domid: u32,
    /// Device in the guest.
    pub devid: u32,
    /// Layout of its rings.
    #[serde(default)]
    pub protocol: BlkifProtocol,
    /// Its rings.
    pub queues: Vec<BlkifQueue>,
    /// How data is moved.
    #[serde(default)]
    pub movement: Movement,
    /// What is done about requests of a former process.
    #[serde(default)]
    pub start: RingStart,
    /// Segments of an indirect request, at most; 0: there are none.
    #[serde(default = "indirect_default")]
    pub max_indirect: u16,
    /// Bytes of a sector as the guest was told: 512 or 4096.
    #[serde(default = "sector_size")]
    pub sector_size: u32,
    /// Refuse writes over this front end.
    #[serde(default)]
    pub read_only: bool,
    /// The guest was told that it is a CD-ROM.
    #[serde(default)]
    pub cdrom: bool,
    /// The guest was told that it is removable.
    #[serde(default)]
    pub removable: bool,
    /// The disk spins for new requests; nothing changes without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub polling: Option<Polling>,
    /// Name of the page pool, as statistics show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The domain is a double's: index of the passed descriptor of its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub double: Option<u32>,
}

fn indirect_default() -> u16 {
    BLKIF_INDIRECT_DEFAULT
}

fn sector_size() -> u32 {
    512
}

fn invalid(message: String) -> ControlError {
    ControlError::new(Errno::EINVAL, message)
}

impl BlkifFront {
    /// The plain case: one ring on a device.
    pub fn new(domid: u32, devid: u32, queues: Vec<BlkifQueue>) -> Self {
        let (max_indirect, sector_size) = (indirect_default(), sector_size());
        Self { domid, devid, queues, max_indirect, sector_size, ..Self::default() }
    }

    /// From the message of the tapdisk protocol.
    ///
    /// # Errors
    /// `EINVAL` for a layout or an order that does not exist.
    pub fn from_message(ring: &Blkif) -> Result<Self> {
        let protocol = BlkifProtocol::from_number(ring.proto)
            .ok_or_else(|| invalid(format!("ring layout {} does not exist", ring.proto)).next("1, 2 or 3"))?;
        if ring.order > BLKIF_ORDER_MAX {
            return Err(invalid(format!("a ring of order {}", ring.order)).next("give at most 3"));
        }
        let pages = 1 << ring.order;
        let grants = ring.gref.iter().take(pages).copied().collect();
        let idle_percent = u8::try_from(ring.poll_idle_threshold).unwrap_or(u8::MAX);
        let queue = BlkifQueue { ring: grants, port: ring.port, ..BlkifQueue::default() };
        let front = Self {
            protocol,
            polling: Some(Polling { max_us: ring.poll_duration, idle_percent }),
            pool: (!ring.pool.is_empty()).then(|| ring.pool.clone()),
            ..Self::new(ring.domid, ring.devid, vec![queue])
        };
        front.check(0)?;
        Ok(front)
    }

    /// Whether it can be served at all, given how many descriptors came along.
    ///
    /// # Errors
    /// `EINVAL` with what is wrong.
    pub fn check(&self, fds: usize) -> Result<()> {
        if self.domid >= 0x7ff0 {
            return Err(invalid(format!("{} is the number of no guest", self.domid)));
        }
        if self.queues.is_empty() || self.queues.len() > BLKIF_QUEUES_MAX {
            return Err(invalid(format!(
                "{} rings: a device has 1 to {BLKIF_QUEUES_MAX}",
                self.queues.len()
            )));
        }
        let pages = |grants: &[u32]| grants.len().is_power_of_two() && grants.len() <= 1 << BLKIF_ORDER_MAX;
        for (index, queue) in self.queues.iter().enumerate() {
            if !pages(&queue.ring) || !(queue.responses.is_empty() || pages(&queue.responses)) {
                return Err(invalid(format!("the pages of ring {index} are not 1, 2, 4 or 8")));
            }
            if queue.responses.is_empty() != self.queues[0].responses.is_empty() {
                return Err(invalid("all rings have responses of their own, or none".into()));
            }
            if queue.double.is_some() != self.double.is_some() {
                return Err(invalid(format!(
                    "ring {index}: the descriptors of a double belong to its memory and to each of its rings"
                )));
            }
            let named = queue.double.into_iter().flatten();
            for (at, fd) in named.enumerate() {
                let all = self.queues.iter().filter_map(|queue| queue.double).flatten();
                let twice = all.filter(|other| *other == fd).count() > 1 || self.double == Some(fd);
                if fd as usize >= fds || twice {
                    return Err(invalid(format!(
                        "ring {index}: its descriptor {at} is number {fd} of the {fds} that came, or used twice"
                    )));
                }
            }
        }
        if self.double.is_some_and(|index| index as usize >= fds) {
            return Err(invalid(format!("the double's memory was named but {fds} descriptors came")));
        }
        if self.max_indirect > BLKIF_INDIRECT_MAX {
            return Err(invalid(format!(
                "{} segments in an indirect request: at most {BLKIF_INDIRECT_MAX} are possible",
                self.max_indirect
            )));
        }
        if !matches!(self.sector_size, 512 | 4096) {
            return Err(invalid(format!("sectors of {} bytes: 512 or 4096 are possible", self.sector_size)));
        }
        self.polling.as_ref().map_or(Ok(()), Polling::check)
    }

    /// Where it is, for lists.
    pub fn address(&self) -> String {
        format!("xen:{}/{}", self.domid, self.devid)
    }
}

/// What a back end offers to a guest before that connects; all of it is served by every disk process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkifOffer {
    /// Rings, at most.
    pub queues: u32,
    /// Largest ring, as a power of two pages.
    pub order: u32,
    /// Segments of an indirect request; 0: none.
    pub max_indirect: u16,
    /// Whether pages may stay mapped.
    pub persistent: bool,
    /// Whether barriers are offered.
    pub barrier: bool,
    /// Whether discards are offered.
    pub discard: bool,
    /// Whether rings of responses alone are offered.
    pub split: bool,
    /// Bytes of a sector: 512 or 4096.
    pub sector_size: u32,
    /// It is a CD-ROM.
    pub cdrom: bool,
    /// It is removable.
    pub removable: bool,
    /// The guest may only read, whatever the disk allows.
    pub read_only: bool,
}

impl Default for BlkifOffer {
    fn default() -> Self {
        Self {
            queues: 1,
            order: BLKIF_ORDER_MAX,
            max_indirect: BLKIF_INDIRECT_DEFAULT,
            persistent: false,
            barrier: true,
            discard: true,
            split: false,
            sector_size: 512,
            cdrom: false,
            removable: false,
            read_only: false,
        }
    }
}

impl BlkifOffer {
    /// The nodes of the back end's directory that a guest reads before it makes its rings.
    pub fn features(&self, disk: &DiskInfo) -> Vec<(&'static str, String)> {
        let read_only = self.read_only || disk.info & DiskInfo::READ_ONLY != 0;
        let flag = |set: bool| u32::from(set).to_string();
        let mut keys = vec![
            ("feature-barrier", flag(self.barrier && !read_only)),
            ("feature-flush-cache", flag(!read_only)),
            ("feature-persistent", flag(self.persistent)),
            ("max-ring-page-order", self.order.to_string()),
            ("max-ring-pages", (1u32 << self.order.min(BLKIF_ORDER_MAX)).to_string()),
            ("multi-queue-max-queues", self.queues.to_string()),
        ];
        if self.max_indirect > 0 {
            keys.push(("feature-max-indirect-segments", self.max_indirect.to_string()));
        }
        if self.discard && !read_only {
            let sector = self.sector_size.to_string();
            keys.push(("feature-discard", flag(true)));
            keys.push(("discard-granularity", sector));
            keys.push(("discard-alignment", flag(false)));
            keys.push(("discard-secure", flag(false)));
        }
        if self.split {
            keys.push(("tapio-feature-split-rings", flag(true)));
        }
        keys
    }

    /// The nodes that say what the disk is, written when the rings are connected.
    pub fn properties(&self, disk: &DiskInfo) -> Vec<(&'static str, String)> {
        vec![
            ("sectors", disk.sectors.to_string()),
            ("sector-size", self.sector_size.to_string()),
            ("physical-sector-size", "4096".to_owned()),
            ("info", self.info(disk).to_string()),
        ]
    }

    /// The bits of `info`: 1 CD-ROM, 2 removable, 4 read-only.
    pub const fn info(&self, disk: &DiskInfo) -> u32 {
        let mut info = disk.info;
        if self.cdrom {
            info |= 1;
        }
        if self.removable {
            info |= 2;
        }
        if self.read_only {
            info |= DiskInfo::READ_ONLY;
        }
        info
    }
}

/// A request that has no answer yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlkifRequest {
    /// What the guest calls it.
    pub id: u64,
    /// `BLKIF_OP_*`.
    pub op: u8,
    /// First sector of 512 bytes.
    pub sector: u64,
    /// Sectors of 512 bytes.
    pub sectors: u64,
    /// How long ago it was taken, in microseconds.
    pub age_us: u64,
}

/// A ring at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlkifRing {
    /// Where it stands.
    #[serde(flatten)]
    pub state: RingState,
    /// Requests without an answer, oldest first; the first few.
    pub oldest: Vec<BlkifRequest>,
    /// How many there are.
    pub in_flight: u32,
    /// Why nothing more is taken from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broken: Option<String>,
}

/// What a device did since it was connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlkifCounts {
    /// Requests taken.
    pub requests: u64,
    /// Requests answered.
    pub responses: u64,
    /// Requests that a former process had taken and this one repeated.
    pub repeated: u64,
    /// Notifications taken.
    pub kicks_in: u64,
    /// Notifications sent.
    pub kicks_out: u64,
    /// Requests that made no sense.
    pub errors_message: u64,
    /// Requests whose pages could not be reached.
    pub errors_map: u64,
    /// Requests that the disk refused or that its storage failed.
    pub errors_disk: u64,
    /// Calls of the hypervisor that copied.
    pub copy_calls: u64,
    /// Pieces of pages that these copied.
    pub copied_segments: u64,
    /// Bytes that they copied.
    pub copied_bytes: u64,
    /// Calls of the hypervisor that mapped.
    pub maps: u64,
    /// Pages that these mapped.
    pub mapped_pages: u64,
    /// Pages that were mapped already.
    pub persistent_hits: u64,
    /// Pages that were not yet.
    pub persistent_misses: u64,
    /// Mappings that were given up for others.
    pub persistent_evictions: u64,
}

/// A connected device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlkifReport {
    /// Domain.
    pub domid: u32,
    /// Device.
    pub devid: u32,
    /// Page pool.
    pub pool: String,
    /// How data is moved.
    pub movement: Movement,
    /// Why pages may not be mapped, if the storage is such.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only_copied: Option<String>,
    /// Counters of all rings together.
    pub counts: BlkifCounts,
    /// The rings.
    pub rings: Vec<BlkifRing>,
}

impl fmt::Display for BlkifFront {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(grants: &[u32]) -> BlkifQueue {
        BlkifQueue { ring: grants.to_vec(), port: 5, ..BlkifQueue::default() }
    }

    #[test]
    fn nonsense_is_refused_with_its_reason() {
        let good = BlkifFront::new(3, 51712, vec![ring(&[8, 9])]);
        assert_eq!(good.check(0), Ok(()));
        let refused = |change: &dyn Fn(&mut BlkifFront), part: &str| {
            let mut front = good.clone();
            change(&mut front);
            let error = front.check(3).expect_err(part);
            assert_eq!(error.errno, Errno::EINVAL);
            assert!(error.message.contains(part), "{part}: {error}");
        };
        refused(&|front| front.domid = 0x7ff0, "no guest");
        refused(&|front| front.queues.clear(), "0 rings");
        refused(&|front| front.queues = vec![ring(&[8]); 17], "17 rings");
        refused(&|front| front.queues = vec![ring(&[8, 9, 10])], "pages of ring 0");
        refused(&|front| front.queues = vec![ring(&[8; 16])], "pages of ring 0");
        refused(&|front| front.queues = vec![ring(&[])], "pages of ring 0");
        refused(&|front| front.max_indirect = 4097, "4097 segments");
        refused(&|front| front.sector_size = 1024, "1024 bytes");
        refused(&|front| front.double = Some(0), "belong to its memory");
        refused(&|front| front.queues[0].double = Some([1, 2]), "belong to its memory");
        let double = |memory: u32, events: [u32; 2]| {
            move |front: &mut BlkifFront| {
                front.double = Some(memory);
                front.queues[0].double = Some(events);
            }
        };
        refused(&double(0, [1, 3]), "number 3 of the 3");
        refused(&double(0, [1, 1]), "used twice");
        refused(&double(1, [1, 2]), "used twice");
        refused(&double(3, [1, 2]), "3 descriptors came");
        let mut front = good.clone();
        double(0, [1, 2])(&mut front);
        assert_eq!(front.check(3), Ok(()));
        refused(&|front| front.polling = Some(Polling { max_us: 1, idle_percent: 101 }), "polling for 1 us");
    }

    #[test]
    fn the_message_of_tapdisk_is_the_same_request() {
        let message = Blkif {
            domid: 7,
            devid: 51728,
            gref: [8, 9, 10, 11, 0, 0, 0, 0],
            order: 2,
            proto: 2,
            pool: "td-xenio-default".into(),
            port: 12,
            poll_duration: 1000,
            poll_idle_threshold: 50,
        };
        let front = BlkifFront::from_message(&message).expect("valid");
        assert_eq!((front.domid, front.devid, front.protocol), (7, 51728, BlkifProtocol::X86_32));
        assert_eq!(front.queues, vec![BlkifQueue { port: 12, ..ring(&[8, 9, 10, 11]) }]);
        assert_eq!(front.polling, Some(Polling { max_us: 1000, idle_percent: 50 }));
        assert_eq!(front.pool.as_deref(), Some("td-xenio-default"));
        for proto in [0, 4, u32::MAX] {
            assert!(BlkifFront::from_message(&Blkif { proto, ..message.clone() }).is_err());
        }
        assert!(BlkifFront::from_message(&Blkif { order: 4, ..message }).is_err());
    }

    #[test]
    fn a_guest_is_told_what_the_back_end_serves() {
        let disk = DiskInfo { sectors: 2048, sector_size: 512, info: 0 };
        let offer = BlkifOffer { cdrom: true, removable: true, ..BlkifOffer::default() };
        let keys = offer.features(&disk);
        let value = |name: &str| keys.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        assert_eq!(value("feature-flush-cache"), Some("1"));
        assert_eq!(value("feature-max-indirect-segments"), Some("256"));
        assert_eq!(value("max-ring-pages"), Some("8"));
        assert_eq!(value("feature-discard"), Some("1"));
        assert_eq!(value("tapio-feature-split-rings"), None);
        assert_eq!(offer.info(&disk), 3);
        let reader = DiskInfo { info: DiskInfo::READ_ONLY, ..disk };
        let keys = offer.features(&reader);
        assert!(keys.contains(&("feature-barrier", "0".to_owned())), "{keys:?}");
        assert!(!keys.iter().any(|(key, _)| key.starts_with("discard")), "{keys:?}");
        assert_eq!(offer.info(&reader), 7);
        assert_eq!(offer.properties(&disk)[0], ("sectors", "2048".to_owned()));
    }

    #[test]
    fn words_are_read_as_they_are_written() {
        for movement in [Movement::Copy, Movement::Persistent, Movement::Map, Movement::Bounce] {
            assert_eq!(movement.name().parse(), Ok(movement));
        }
        for protocol in [BlkifProtocol::X86_32, BlkifProtocol::X86_64] {
            assert_eq!(protocol.name().parse(), Ok(protocol));
        }
        assert!("mapp".parse::<Movement>().is_err());
        assert_eq!("resume".parse(), Ok(RingStart::Resume));
    }
}
