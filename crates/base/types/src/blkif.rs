//! The block ring of a Xen guest, in the words of all crates that deal with it.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a guest's data is moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Movement {
    /// The hypervisor copies it, many pages by one call.
    #[default]
    Copy,
    /// Pages stay mapped; the guest uses the same ones again (`feature-persistent`).
    Persistent,
    /// The pages of each request are mapped and unmapped.
    Map,
    /// As `map`, and the processor copies between them and the process's own memory: what blktap2 did.
    Bounce,
}

impl Movement {
    /// The word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Persistent => "persistent",
            Self::Map => "map",
            Self::Bounce => "bounce",
        }
    }
}

impl FromStr for Movement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Copy, Self::Persistent, Self::Map, Self::Bounce]
            .into_iter()
            .find(|movement| movement.name() == text)
            .ok_or_else(|| format!("'{text}' moves no data: copy, persistent, map or bounce"))
    }
}

/// Settings of a guest's rings that an administrator may choose for a disk; what is not set is the back end's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingTuning {
    /// Pages of a ring as a power of two, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<u32>,
    /// Rings, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u32>,
    /// Segments of an indirect request, at most; 0: there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_indirect: Option<u16>,
    /// How data is moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub movement: Option<Movement>,
}

impl RingTuning {
    /// The settings' names, in the order of the fields: those under which a back end offers the same to a guest.
    pub const KEYS: [&'static str; 4] =
        ["max-ring-page-order", "multi-queue-max-queues", "max-indirect-segments", "data-movement"];

    /// Sets one by its name; others are left alone.
    ///
    /// # Errors
    /// What is possible, as a sentence.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        fn number(value: &str, least: u32, most: u32) -> Result<u32, String> {
            let plain = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
            let number = value.parse().ok().filter(|number| plain && (least..=most).contains(number));
            number.ok_or_else(|| format!("a number from {least} to {most} is expected"))
        }
        match key {
            "max-ring-page-order" => self.order = Some(number(value, 0, 3)?),
            "multi-queue-max-queues" => self.queues = Some(number(value, 1, 16)?),
            "max-indirect-segments" => {
                self.max_indirect = Some(u16::try_from(number(value, 0, 4096)?).unwrap_or(u16::MAX));
            }
            "data-movement" => self.movement = Some(value.parse()?),
            _ => {}
        }
        Ok(())
    }

    /// Those that are set as one text, `KEY=VALUE,...`.
    pub fn text(&self) -> String {
        self.pairs().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
    }

    /// Reads such a text.
    ///
    /// # Errors
    /// The part that cannot be, with what is possible.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut tuning = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let known = part.split_once('=').filter(|(key, _)| Self::KEYS.contains(key));
            let (key, value) =
                known.ok_or_else(|| format!("'{part}': KEY=VALUE of {}", Self::KEYS.join(", ")))?;
            tuning.set(key, value).map_err(|why| format!("{part}: {why}"))?;
        }
        Ok(tuning)
    }

    /// Those that are set, by name.
    pub fn pairs(&self) -> impl Iterator<Item = (&'static str, String)> {
        let values = [
            self.order.map(|order| order.to_string()),
            self.queues.map(|queues| queues.to_string()),
            self.max_indirect.map(|segments| segments.to_string()),
            self.movement.map(|movement| movement.name().to_owned()),
        ];
        Self::KEYS.into_iter().zip(values).filter_map(|(key, value)| Some((key, value?)))
    }
}

/// Where a ring stands. The numbers run freely modulo 2^32 (blkif.h, `struct blkif_sring`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RingState {
    /// Slots.
    pub size: u32,
    /// Requests the guest has produced.
    pub req_prod: u32,
    /// Requests taken.
    pub req_cons: u32,
    /// Request at which the guest shall notify.
    pub req_event: u32,
    /// Responses the guest can see.
    pub rsp_prod: u32,
    /// Responses written, perhaps not yet shown.
    pub rsp_pvt: u32,
    /// Response at which the guest wants to be notified.
    pub rsp_event: u32,
}

impl RingState {
    /// Requests in the ring that have no response yet.
    pub const fn used(&self) -> u32 {
        self.req_prod.wrapping_sub(self.rsp_prod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_rings_have_bounds_and_come_back() {
        let mut tuning = RingTuning::default();
        for (key, value) in RingTuning::KEYS.into_iter().zip(["3", "16", "0", "persistent"]) {
            tuning.set(key, value).expect(key);
        }
        assert_eq!((tuning.order, tuning.queues, tuning.max_indirect), (Some(3), Some(16), Some(0)));
        let pairs: Vec<_> = tuning.pairs().collect();
        assert_eq!(pairs[3], ("data-movement", "persistent".to_owned()));
        assert_eq!(pairs.len(), 4);
        assert_eq!(RingTuning::parse(&tuning.text()), Ok(tuning));
        assert_eq!(RingTuning::parse(""), Ok(RingTuning::default()));
        for bad in ["max-ring-page-order", "max-ring-page-order=9", "colour=red"] {
            assert!(RingTuning::parse(bad).expect_err(bad).contains(bad), "{bad}");
        }
        for (key, bad) in [
            (RingTuning::KEYS[0], "4"),
            (RingTuning::KEYS[0], "+1"),
            (RingTuning::KEYS[1], "0"),
            (RingTuning::KEYS[2], "4097"),
            (RingTuning::KEYS[3], "fly"),
        ] {
            assert!(!tuning.set(key, bad).expect_err(bad).is_empty());
        }
        assert_eq!(tuning.set("another", "x"), Ok(()), "not of rings");
        assert_eq!(RingTuning::default().pairs().count(), 0);
    }
}
