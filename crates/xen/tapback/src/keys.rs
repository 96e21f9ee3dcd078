//! The nodes of a device: what the toolstack and the front end write, read with suspicion.
//!
//! Names and defaults: `xen/include/public/io/blkif.h`, and tapback's for those of its own.

use tapio_control::{BLKIF_ORDER_MAX, BlkifProtocol, BlkifQueue, Polling};
use tapio_stat::VbdId;
use tapio_types::RingTuning;
use tapio_xen::blkif::split;
use tapio_xenstore::{Path, XenbusState};

use crate::locate::Wanted;
use crate::values::{Fault, Values, shown};

/// Nodes of the back end's directory that are looked at. All but `state` are the toolstack's.
pub const BACK: [&str; 17] = [
    "frontend",
    "frontend-id",
    "state",
    "online",
    "mode",
    "device-type",
    "removable",
    "params",
    "tapdisk-params",
    "tapio-disk",
    "physical-device-path",
    "hotplug-status",
    "discard-enable",
    "polling-duration",
    "polling-idle-threshold",
    "sectors",
    "tapio-rings",
];

/// Nodes that this program writes, so that an event of theirs is no news. (`state` is written by both sides.)
pub fn is_ours(name: &str) -> bool {
    name.starts_with("feature-")
        || name.starts_with("discard-") && name != "discard-enable"
        || name.starts_with("max-ring-")
        || matches!(
            name,
            "multi-queue-max-queues"
                | "tapio-feature-split-rings"
                | "sectors"
                | "sector-size"
                | "physical-sector-size"
                | "info"
                | "kthread-pid"
                | "hotplug-status"
        )
}

/// What the toolstack says of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Back {
    /// The front end's directory.
    pub frontend: String,
    /// Our state.
    pub state: XenbusState,
    /// Whether the guest may have it again when it lets go of it.
    pub online: bool,
    /// Whether the guest may write; `None` while the toolstack has not said it.
    pub writable: Option<bool>,
    /// It is a CD-ROM.
    pub cdrom: bool,
    /// It can be taken out.
    pub removable: bool,
    /// Discards may be offered.
    pub discard: bool,
    /// Whether the toolstack or we have said that the disk is there.
    pub hotplug_status: bool,
    /// Where the disk process is.
    pub wanted: Wanted,
    /// How it shall poll; not said without.
    pub polling: Option<Polling>,
    /// What its rings shall be; not said without.
    pub rings: RingTuning,
    /// What is said and cannot be done, without being a reason to refuse the disk.
    pub odd: Option<String>,
}

impl Back {
    /// Reads them. `None` while the device is not complete: the toolstack is still writing.
    ///
    /// # Errors
    /// What it says makes no sense.
    pub fn read(id: VbdId, values: &Values) -> Result<Option<Self>, Fault> {
        let (Some(frontend), Some(frontend_id), Some(state)) =
            (values.bytes("frontend"), values.number("frontend-id")?, values.bytes("state"))
        else {
            return Ok(None);
        };
        let Some(state) = XenbusState::parse(state) else {
            return Err(Fault::invalid(format!("state holds '{}', which is no state", shown(state))));
        };
        if frontend_id != id.domid {
            return Err(Fault::invalid(format!(
                "frontend-id is {frontend_id}, and the directory is that of domain {}",
                id.domid
            )));
        }
        let (polling, mut odd) = match polling(values) {
            Ok(polling) => (polling, None),
            Err(fault) => (None, Some(fault.text)),
        };
        let rings = values.bytes("tapio-rings").map(|text| RingTuning::parse(&String::from_utf8_lossy(text)));
        let rings = rings.unwrap_or_else(|| Ok(RingTuning::default())).unwrap_or_else(|why| {
            odd.get_or_insert(format!("tapio-rings: {}", shown(why.as_bytes())));
            RingTuning::default()
        });
        Ok(Some(Self {
            frontend: front_path(id, frontend)?,
            state,
            online: values.flag("online"),
            writable: match values.bytes("mode") {
                None => None,
                Some(mode) if mode.starts_with(b"w") => Some(true),
                Some(mode) if mode.starts_with(b"r") => Some(false),
                Some(mode) => {
                    return Err(Fault::invalid(format!("mode is '{}': r or w is possible", shown(mode))));
                }
            },
            cdrom: values.bytes("device-type") == Some(b"cdrom"),
            removable: values.flag("removable"),
            discard: values.bytes("discard-enable") != Some(b"0"),
            hotplug_status: values.bytes("hotplug-status").is_some(),
            wanted: Wanted::read(values),
            polling,
            rings,
            odd,
        }))
    }
}

fn polling(values: &Values) -> Result<Option<Polling>, Fault> {
    let Some(max_us) = values.number("polling-duration")? else { return Ok(None) };
    let idle = values.number("polling-idle-threshold")?.unwrap_or(0);
    match u8::try_from(idle) {
        Ok(idle_percent) if idle <= 100 && max_us <= 1_000_000 => Ok(Some(Polling { max_us, idle_percent })),
        _ => Err(Fault::invalid(format!(
            "polling for {max_us} us above {idle} % idle: at most 1000000 us and 100 % are possible"
        ))),
    }
}

/// A front end's directory is its domain's own, and named after the device: nothing else is read or watched.
fn front_path(id: VbdId, value: &[u8]) -> Result<String, Fault> {
    let foreign = || {
        let (domid, devid) = (id.domid, id.devid);
        Fault::invalid(format!(
            "frontend is '{}': /local/domain/{domid}/device/KIND/{devid} is expected",
            shown(value)
        ))
    };
    let text = std::str::from_utf8(value).map_err(|_| foreign())?;
    let path = Path::parse(text).map_err(|_| foreign())?;
    let parts: Vec<&str> = path.parts().collect();
    match parts.as_slice() {
        ["local", "domain", domid, "device", _, devid]
            if *domid == id.domid.to_string() && *devid == id.devid.to_string() =>
        {
            Ok(text.to_owned())
        }
        _ => Err(foreign()),
    }
}

/// Nodes of the front end's directory that say of which form the rest is.
pub const FRONT: [&str; 10] = [
    "protocol",
    "feature-persistent",
    "multi-queue-num-queues",
    "ring-page-order",
    "num-ring-pages",
    "ring-ref",
    "ring-ref0",
    "event-channel",
    split::FEATURE,
    split::RESPONSE_ORDER,
];

/// What a front end may choose at all: what was offered to it.
#[derive(Clone, Copy, Debug)]
pub struct Offered {
    /// Queues, at most.
    pub queues: u32,
    /// Pages of a ring as a power of two, at most.
    pub order: u32,
    /// Rings of responses alone.
    pub split: bool,
}

/// The form of what a front end wrote: known before its rings are read, so that only what exists is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    /// Layout of its rings.
    pub protocol: BlkifProtocol,
    /// Its pages may stay mapped.
    pub persistent: bool,
    /// Directories of its rings below its own; one empty name when the rings are in it.
    dirs: Vec<String>,
    order: u32,
    split: bool,
}

impl Form {
    /// Reads it.
    ///
    /// # Errors
    /// It is no number, or more than was offered.
    pub fn read(values: &Values, offered: Offered) -> Result<Self, Fault> {
        let protocol = match values.bytes("protocol") {
            // tapback's default, whatever this host's architecture is.
            None => BlkifProtocol::X86_32,
            Some(word) => std::str::from_utf8(word)
                .ok()
                .and_then(|word| word.parse().ok())
                .ok_or_else(|| Fault::invalid(format!("unknown ring protocol '{}'", shown(word))))?,
        };
        let queues = values.number("multi-queue-num-queues")?.unwrap_or(1);
        if queues == 0 || queues > offered.queues {
            return Err(Fault::invalid(format!(
                "multi-queue-num-queues is {queues}: 1 to {} were offered",
                offered.queues
            )));
        }
        let pages = match (values.number("ring-page-order")?, values.number("num-ring-pages")?) {
            (Some(order), _) if order <= offered.order => 1 << order,
            (Some(order), _) => {
                let most = offered.order;
                return Err(Fault::invalid(format!("ring-page-order is {order}: at most {most} is offered")));
            }
            (None, pages) => pages.unwrap_or(1),
        };
        if !pages.is_power_of_two() || pages > 1 << offered.order {
            let most = 1 << offered.order;
            return Err(Fault::invalid(format!("num-ring-pages is {pages}: a power of two up to {most}")));
        }
        let split = offered.split && values.flag(split::FEATURE);
        let dirs = match queues {
            1 => vec![String::new()],
            _ => (0..queues).map(|queue| format!("queue-{queue}/")).collect(),
        };
        let persistent = values.flag("feature-persistent");
        Ok(Self { protocol, persistent, dirs, order: pages.trailing_zeros(), split })
    }

    /// Nodes with the rings that were not in [`FRONT`].
    pub fn more(&self) -> Vec<String> {
        let mut names = Vec::new();
        for dir in &self.dirs {
            names.extend(ring_names(dir, "ring-ref", self.order));
            names.push(format!("{dir}event-channel"));
            if self.split {
                names.push(format!("{dir}{}", split::FEATURE));
                names.push(format!("{dir}{}", split::RESPONSE_ORDER));
                names.extend(ring_names(dir, split::RESPONSE_REF, BLKIF_ORDER_MAX));
            }
        }
        names.retain(|name| !FRONT.contains(&name.as_str()));
        names
    }

    /// The rings, once their nodes are read as well.
    ///
    /// # Errors
    /// One is missing, or is no number.
    pub fn queues(&self, values: &Values) -> Result<Vec<BlkifQueue>, Fault> {
        self.dirs
            .iter()
            .map(|dir| {
                let responses = if self.split && values.flag(&format!("{dir}{}", split::FEATURE)) {
                    let order = values.number(&format!("{dir}{}", split::RESPONSE_ORDER))?.unwrap_or(0);
                    if order > BLKIF_ORDER_MAX {
                        return Err(Fault::invalid(format!("{} is {order}", split::RESPONSE_ORDER)));
                    }
                    grants(values, dir, split::RESPONSE_REF, order)?
                } else {
                    Vec::new()
                };
                let ring = grants(values, dir, "ring-ref", self.order)?;
                let port = values.needed(&format!("{dir}event-channel"))?;
                Ok(BlkifQueue { ring, responses, port, ..BlkifQueue::default() })
            })
            .collect()
    }
}

/// A ring of one page is `ring-ref` or `ring-ref0`; a larger one is numbered.
fn ring_names(dir: &str, name: &str, order: u32) -> Vec<String> {
    let single = (order == 0 || name != "ring-ref").then(|| format!("{dir}{name}"));
    single.into_iter().chain((0..1 << order).map(|page| format!("{dir}{name}{page}"))).collect()
}

fn grants(values: &Values, dir: &str, name: &str, order: u32) -> Result<Vec<u32>, Fault> {
    if order == 0
        && let Some(single) = values.number(&format!("{dir}{name}"))?
    {
        return Ok(vec![single]);
    }
    (0..1 << order).map(|page| values.needed(&format!("{dir}{name}{page}"))).collect()
}

#[cfg(test)]
mod tests;
