//! What is remembered of a device between two looks at xenstore.

use std::time::{Duration, Instant};

use tapio_control::{BlkifOffer, DiskInfo, Polling};
use tapio_stat::VbdId;
use tapio_types::{Movement, RingTuning};
use tapio_xenstore::{Counts, Watch, XenbusState};

use crate::disks::{Link, Linked};
use crate::keys::{Back, Offered};
use crate::table::Ring;

/// First wait for a disk process that is not there.
const RETRY_FIRST: Duration = Duration::from_millis(50);
/// Longest one.
const RETRY_MAX: Duration = Duration::from_secs(2);

/// What is offered to guests, where nothing else is said of a disk.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// Queues of a device, at most.
    pub queues: u32,
    /// Pages of a ring as a power of two, at most.
    pub order: u32,
    /// Segments of an indirect request, at most; 0: there are none.
    pub max_indirect: u16,
    /// How data is moved.
    pub movement: Movement,
    /// Barriers.
    pub barrier: bool,
    /// Discards, where the disk can be written.
    pub discard: bool,
    /// Rings of responses alone, our extension.
    pub split: bool,
    /// The disk processes are foreign tapdisks: no more is offered than these can.
    pub tapdisk: bool,
}

impl Default for Offer {
    fn default() -> Self {
        Self {
            queues: 4,
            order: tapio_control::BLKIF_ORDER_MAX,
            max_indirect: tapio_control::BLKIF_INDIRECT_DEFAULT,
            movement: Movement::Copy,
            barrier: true,
            discard: true,
            split: false,
            tapdisk: false,
        }
    }
}

impl Offer {
    /// The same with what is said of a disk. A foreign tapdisk has no choices but the order.
    pub fn of(&self, rings: &RingTuning) -> Self {
        let order = rings.order.unwrap_or(self.order);
        if self.tapdisk {
            return Self { order, ..*self };
        }
        Self {
            order,
            queues: rings.queues.unwrap_or(self.queues),
            max_indirect: rings.max_indirect.unwrap_or(self.max_indirect),
            movement: rings.movement.unwrap_or(self.movement),
            ..*self
        }
    }

    /// What a front end may choose.
    pub fn bounds(&self) -> Offered {
        let queues = if self.tapdisk { 1 } else { self.queues };
        Offered { queues, order: self.order, split: self.split && !self.tapdisk }
    }

    /// The nodes of the back end, before and once the disk is known.
    pub fn nodes(&self, back: &Back, disk: Option<&DiskInfo>) -> Vec<(&'static str, String)> {
        let unknown = DiskInfo { sectors: 0, sector_size: 512, info: 0 };
        let info = disk.copied().unwrap_or(unknown);
        let offer = BlkifOffer {
            queues: self.bounds().queues,
            order: self.order,
            max_indirect: self.max_indirect,
            persistent: self.movement == Movement::Persistent,
            barrier: self.barrier,
            discard: self.discard && back.discard,
            split: self.split,
            sector_size: if info.sector_size == 4096 { 4096 } else { 512 },
            cdrom: back.cdrom,
            removable: back.removable,
            read_only: back.writable == Some(false),
        };
        let mut nodes = offer.features(&info);
        if self.tapdisk {
            let can = ["feature-barrier", "max-ring-page-order", "max-ring-pages"];
            nodes.retain(|(name, _)| can.contains(name));
        } else if offer.discard && !nodes.iter().any(|(name, _)| *name == "feature-discard") {
            // It may have been offered before the disk was known to be read-only.
            nodes.push(("feature-discard", "0".to_owned()));
        }
        if disk.is_some() {
            nodes.extend(offer.properties(&info));
        }
        nodes
    }
}

/// A device.
#[derive(Debug)]
pub(crate) struct Device {
    /// The front end's directory.
    pub(crate) front_dir: String,
    /// The watch of its state.
    pub(crate) watch: Option<Watch>,
    /// What the disk process said when it took the ring; kept when that is lost.
    pub(crate) linked: Option<Linked>,
    /// Whether it still has it.
    pub(crate) ring: Ring,
    /// A job runs, and nothing else is done.
    pub(crate) busy: bool,
    /// The state that was written last.
    pub(crate) wrote: Option<XenbusState>,
    /// The nodes that describe the disk process are old.
    pub(crate) stale: bool,
    /// Not before this moment.
    pub(crate) again_at: Option<Instant>,
    retry: Duration,
    /// What was said last about why it is not connected.
    pub(crate) said: Option<String>,
    /// How it polls.
    pub(crate) polling: Option<Polling>,
    /// When the disk is to be asked whether it has grown.
    pub(crate) ask_at: Option<Instant>,
    /// Something was written below `error`.
    pub(crate) faulty: bool,
    /// What it has cost since it was seen, or connected.
    pub(crate) cost: Counts,
    /// Since then.
    pub(crate) since: Instant,
}

impl Device {
    pub(crate) fn new(id: VbdId, now: Instant) -> Self {
        Self {
            front_dir: format!("/local/domain/{}/device/vbd/{}", id.domid, id.devid),
            watch: None,
            linked: None,
            ring: Ring::None,
            busy: false,
            wrote: None,
            stale: false,
            again_at: None,
            retry: RETRY_FIRST,
            said: None,
            polling: None,
            ask_at: None,
            faulty: false,
            cost: Counts::default(),
            since: now,
        }
    }

    /// The names by which its disk process is asked about its ring.
    pub(crate) fn link(&self, id: VbdId) -> Option<Link> {
        self.linked.as_ref().map(|linked| Link { at: linked.at.clone(), front: linked.front, vbd: id })
    }

    /// It failed; later again.
    pub(crate) fn put_off(&mut self, now: Instant) {
        self.again_at = Some(now + self.retry);
        self.retry = RETRY_MAX.min(self.retry * 2);
    }

    /// Something has changed: it may succeed at once.
    pub(crate) fn try_now(&mut self) {
        self.again_at = None;
        self.retry = RETRY_FIRST;
    }

    pub(crate) fn may_try(&self, now: Instant) -> bool {
        self.again_at.is_none_or(|at| at <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locate::Wanted;

    fn back() -> Back {
        Back {
            frontend: String::new(),
            state: XenbusState::Initialising,
            online: true,
            writable: Some(true),
            cdrom: false,
            removable: false,
            discard: true,
            hotplug_status: false,
            wanted: Wanted::default(),
            polling: None,
            rings: RingTuning::default(),
            odd: None,
        }
    }

    fn value<'a>(nodes: &'a [(&'static str, String)], name: &str) -> Option<&'a str> {
        nodes.iter().find(|(other, _)| *other == name).map(|(_, value)| value.as_str())
    }

    #[test]
    fn what_is_said_of_a_disk_comes_before_what_is_said_of_all() {
        let rings = RingTuning {
            order: Some(1),
            queues: Some(2),
            max_indirect: Some(0),
            movement: Some(Movement::Map),
        };
        let offer = Offer::default().of(&rings);
        assert_eq!((offer.order, offer.queues, offer.max_indirect), (1, 2, 0));
        assert_eq!((offer.movement, offer.barrier), (Movement::Map, true));
        let nodes = offer.nodes(&back(), None);
        let of = |key: &str| nodes.iter().find(|(name, _)| *name == key).map(|(_, value)| value.as_str());
        assert_eq!((of("max-ring-page-order"), of("multi-queue-max-queues")), (Some("1"), Some("2")));
        assert_eq!(of("feature-max-indirect-segments"), None);
        let foreign = Offer { tapdisk: true, ..Offer::default() }.of(&rings);
        assert_eq!((foreign.order, foreign.movement), (1, Movement::Copy));
        assert_eq!(Offer::default().of(&RingTuning::default()).queues, Offer::default().queues);
    }

    #[test]
    fn a_guest_is_offered_everything() {
        let nodes = Offer::default().nodes(&back(), None);
        for (name, expected) in [
            ("max-ring-page-order", "3"),
            ("max-ring-pages", "8"),
            ("multi-queue-max-queues", "4"),
            ("feature-flush-cache", "1"),
            ("feature-barrier", "1"),
            ("feature-discard", "1"),
            ("feature-persistent", "0"),
            ("feature-max-indirect-segments", "256"),
        ] {
            assert_eq!(value(&nodes, name), Some(expected), "{name}");
        }
        assert!(value(&nodes, "sectors").is_none() && value(&nodes, "tapio-feature-split-rings").is_none());
        let offer = Offer { movement: Movement::Persistent, split: true, ..Offer::default() };
        let nodes = offer.nodes(&back(), None);
        assert_eq!(value(&nodes, "feature-persistent"), Some("1"));
        assert_eq!(value(&nodes, "tapio-feature-split-rings"), Some("1"));
    }

    #[test]
    fn a_disk_that_cannot_be_written_takes_an_offer_back() {
        let info = DiskInfo { sectors: 100, sector_size: 4096, info: DiskInfo::READ_ONLY };
        let nodes = Offer::default().nodes(&back(), Some(&info));
        assert_eq!(value(&nodes, "feature-discard"), Some("0"));
        assert_eq!(value(&nodes, "sectors"), Some("100"), "always in units of 512 bytes");
        assert_eq!(value(&nodes, "sector-size"), Some("4096"));
        assert_eq!(value(&nodes, "info"), Some("4"));
        let reader = Back { writable: Some(false), discard: false, ..back() };
        let nodes = Offer::default().nodes(&reader, None);
        assert!(value(&nodes, "feature-discard").is_none_or(|value| value == "0"));
    }

    #[test]
    fn a_foreign_tapdisk_is_not_promised_what_it_cannot() {
        let offer = Offer { tapdisk: true, split: true, ..Offer::default() };
        let nodes = offer.nodes(&back(), None);
        let names: Vec<_> = nodes.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["feature-barrier", "max-ring-page-order", "max-ring-pages"]);
        assert_eq!((offer.bounds().queues, offer.bounds().split), (1, false));
    }
}
