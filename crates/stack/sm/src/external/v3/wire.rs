//! The messages of version 3: what scripts answer, read leniently and bounded.
//!
//! Source: the published interface 5.0 of xapi-storage. Fields that are not known are skipped.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::changed_blocks::LISTED_MAX;
use crate::traits::{SrStat, VdiInfo};

/// The key of a volume under which its UUID here is kept: `UUID KEY`, so that a copy of the note on another volume, as
/// a clone may have it, says nothing.
pub const UUID_KEY: &str = "tapio-uuid";
/// Prefix of the keys that are `VDI.sm_config`.
const SM_CONFIG: &str = "_sm_config_";

/// Bytes of a name that is kept.
const NAME_MAX: usize = 4096;

/// What `Plugin.Query` answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Query {
    /// The type of SR, or the scheme.
    pub plugin: String,
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub description: String,
    #[serde(default)]
    pub vendor: String,
    #[serde(default)]
    pub copyright: String,
    #[serde(default)]
    pub version: String,
    #[serde(default)]
    pub required_api_version: String,
    #[serde(default)]
    pub features: Vec<String>,
    #[serde(default, deserialize_with = "texts")]
    pub configuration: BTreeMap<String, String>,
}

/// An SR as a script sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Stat {
    #[serde(default)]
    pub uuid: Option<String>,
    #[serde(default)]
    pub name: String,
    #[serde(default, deserialize_with = "bytes")]
    pub free_space: u64,
    #[serde(default, deserialize_with = "bytes")]
    pub total_space: u64,
    #[serde(default)]
    pub health: Value,
}

/// A volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Volume {
    pub key: String,
    #[serde(default)]
    pub uuid: Option<String>,
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub description: String,
    #[serde(default = "yes")]
    pub read_write: bool,
    #[serde(deserialize_with = "bytes")]
    pub virtual_size: u64,
    #[serde(default, deserialize_with = "bytes")]
    pub physical_utilisation: u64,
    #[serde(default)]
    pub uri: Vec<String>,
    #[serde(default, deserialize_with = "texts")]
    pub keys: BTreeMap<String, String>,
    #[serde(default)]
    pub volume_type: Option<String>,
    #[serde(default)]
    pub cbt_enabled: Option<bool>,
}

/// One answer of `SR.probe`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Found {
    #[serde(default, deserialize_with = "texts")]
    pub configuration: BTreeMap<String, String>,
    #[serde(default)]
    pub complete: bool,
    #[serde(default)]
    pub sr: Option<Stat>,
    #[serde(default, deserialize_with = "texts")]
    pub extra_info: BTreeMap<String, String>,
}

/// What `Datapath.attach` answers.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Backend {
    #[serde(default)]
    pub implementations: Vec<Value>,
}

/// What `Volume.list_changed_blocks` answers.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Changed {
    #[serde(deserialize_with = "bytes")]
    pub granularity: u64,
    pub bitmap: String,
}

/// What `Volume.compare` answers.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Ranges {
    #[serde(deserialize_with = "bytes")]
    pub blocksize: u64,
    #[serde(default)]
    pub ranges: Vec<(u64, u64)>,
}

/// What a script prints that ends with another status than 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Failure {
    pub code: String,
    #[serde(default)]
    pub params: Vec<Value>,
}

const fn yes() -> bool {
    true
}

/// A size: a number, or a text of one.
fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let wrong = |value: &Value| serde::de::Error::custom(format!("{value} is no number of bytes"));
    match Value::deserialize(from)? {
        Value::Number(number) => number
            .as_u64()
            .filter(|number| i64::try_from(*number).is_ok())
            .ok_or_else(|| wrong(&Value::Number(number.clone()))),
        Value::String(text) => {
            let number = text.parse::<i64>().ok().and_then(|number| u64::try_from(number).ok());
            number.ok_or_else(|| wrong(&Value::Null))
        }
        other => Err(wrong(&other)),
    }
}

/// A map of texts; what else is in it becomes text.
fn texts<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    let map = Option::<BTreeMap<String, Value>>::deserialize(from)?.unwrap_or_default();
    Ok(map.into_iter().map(|(key, value)| (key, text_of(value))).collect())
}

fn text_of(value: Value) -> String {
    match value {
        Value::String(text) => text,
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Longest text of a plugin that becomes part of a record.
pub(in crate::external) fn bounded(text: &str) -> String {
    let end = text.floor_char_boundary(NAME_MAX);
    text[..end].chars().filter(|c| !c.is_control() || *c == '\n' || *c == '\t').collect()
}

/// A UUID of a rule of our own, for a volume that has none.
fn derived(sr: Uuid, key: &str) -> Uuid {
    let hash = Sha256::new().chain_update(sr.as_bytes()).chain_update(key.as_bytes()).finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

impl Volume {
    /// Its UUID here: the one that was noted with it, its own, or one made of its key.
    pub fn uuid_in(&self, sr: Uuid) -> Uuid {
        let noted = self.keys.get(UUID_KEY).and_then(|note| note.split_once(' '));
        let noted =
            noted.filter(|(_, key)| *key == self.key).and_then(|(uuid, _)| Uuid::parse_str(uuid).ok());
        let own = || self.uuid.as_deref().and_then(|uuid| Uuid::parse_str(uuid).ok());
        noted.or_else(own).filter(|uuid| !uuid.is_nil()).unwrap_or_else(|| derived(sr, &self.key))
    }

    /// What its UUID is noted as.
    pub fn note(&self, uuid: Uuid) -> String {
        format!("{uuid} {}", self.key)
    }

    /// As the toolstack knows it.
    pub fn info(&self, sr: Uuid) -> VdiInfo {
        let given = self.keys.iter().filter_map(|(key, value)| {
            let key = key.strip_prefix(SM_CONFIG).filter(|key| !key.is_empty())?;
            Some((bounded(key), bounded(value)))
        });
        let mut sm_config: BTreeMap<String, String> = given.take(100).collect();
        // Nothing is known of what it is based on: a difference cannot be told from zeroes.
        sm_config.insert("vdi_type".to_owned(), "aio".to_owned());
        VdiInfo {
            uuid: self.uuid_in(sr),
            location: bounded(&self.key),
            virtual_size: self.virtual_size,
            physical_utilisation: self.physical_utilisation,
            managed: true,
            read_only: !self.read_write,
            parent: None,
            name_label: Some(bounded(&self.name)),
            sm_config,
            cbt_enabled: self.cbt_enabled.unwrap_or(false),
            is_metadata: self.volume_type.as_deref() == Some("CBT_Metadata"),
            told: None,
        }
    }
}

impl Stat {
    /// Sizes.
    pub fn sizes(&self) -> SrStat {
        SrStat {
            physical_size: self.total_space,
            physical_utilisation: self.total_space.saturating_sub(self.free_space),
            virtual_allocation: 0,
        }
    }

    /// What is wrong with it, if something is.
    pub fn trouble(&self) -> Option<String> {
        let (state, why) = match &self.health {
            Value::String(state) => (state.as_str(), ""),
            Value::Array(pair) => {
                (pair.first()?.as_str()?, pair.get(1).and_then(Value::as_str).unwrap_or(""))
            }
            _ => return None,
        };
        (state != "Healthy").then(|| format!("{} {}", bounded(state), bounded(why)).trim_end().to_owned())
    }
}

/// Bytes of a block of the lists that clients get.
const BLOCK: u64 = 64 << 10;

/// Which blocks of 64 KiB changed, as base64 of a bit for each, the first in the highest bit of the first byte.
#[derive(Debug)]
pub struct Blocks {
    bits: Vec<u8>,
    len: u64,
}

impl Blocks {
    /// None, of a disk of this length.
    ///
    /// # Errors
    /// A sentence: the disk is too large.
    pub fn of_disk(len: u64) -> Result<Self, String> {
        if len > LISTED_MAX {
            return Err(format!("a disk of {len} bytes is too large to list its blocks"));
        }
        let blocks = len.div_ceil(BLOCK);
        let bits = vec![0; usize::try_from(blocks.div_ceil(8)).unwrap_or(0)];
        Ok(Self { bits, len })
    }

    /// All of these bytes count as changed; what is behind the end of the disk is left out.
    pub fn add(&mut self, start: u64, len: u64) {
        let end = start.saturating_add(len).min(self.len);
        let mut block = start / BLOCK;
        while block * BLOCK < end {
            if let Some(byte) = usize::try_from(block / 8).ok().and_then(|at| self.bits.get_mut(at)) {
                *byte |= 0x80 >> (block % 8);
            }
            block += 1;
        }
    }

    /// What `Volume.compare` answered, of which each block is looked at once.
    pub fn add_ranges(&mut self, answer: &Ranges) {
        let bytes = |blocks: u64| blocks.saturating_mul(answer.blocksize);
        let mut ranges: Vec<(u64, u64)> =
            answer.ranges.iter().map(|(at, len)| (bytes(*at), bytes(*len))).collect();
        ranges.sort_unstable();
        let mut done = 0;
        for (start, len) in ranges {
            let end = start.saturating_add(len);
            let from = start.max(done);
            if end > from {
                self.add(from, end - from);
                done = end;
            }
        }
    }

    /// What `Volume.list_changed_blocks` answered for the bytes from `start` on.
    ///
    /// # Errors
    /// A sentence: it is no list.
    pub fn add_answer(&mut self, start: u64, answer: &Changed) -> Result<u64, String> {
        if answer.granularity == 0 || answer.granularity > 1 << 40 {
            return Err(format!("a granularity of {} bytes", answer.granularity));
        }
        let bits =
            STANDARD.decode(answer.bitmap.as_bytes()).map_err(|error| format!("no base64: {error}"))?;
        for (byte, value) in (0_u64..).zip(&bits) {
            for bit in 0..8 {
                if value & 0x80 >> bit != 0 {
                    let at = (byte * 8 + bit).saturating_mul(answer.granularity).saturating_add(start);
                    self.add(at, answer.granularity);
                }
            }
        }
        Ok((bits.len() as u64).saturating_mul(8).saturating_mul(answer.granularity))
    }

    /// As clients get it.
    pub fn text(&self) -> String {
        STANDARD.encode(&self.bits)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn volume(value: Value) -> Volume {
        serde_json::from_value(value).expect("a volume")
    }

    #[test]
    fn a_volume_has_the_uuid_that_was_noted_with_it_alone() {
        let (sr, noted) = (Uuid::from_u128(1), Uuid::from_u128(7));
        let mut one = volume(json!({"key": "a b", "virtual_size": 512, "uuid": null, "more": [1]}));
        let made = one.uuid_in(sr);
        assert_eq!(made, one.uuid_in(sr));
        assert_ne!(made, one.uuid_in(Uuid::from_u128(2)));
        one.uuid = Some(Uuid::from_u128(3).to_string());
        assert_eq!(one.uuid_in(sr), Uuid::from_u128(3));
        one.keys.insert(UUID_KEY.into(), one.note(noted));
        assert_eq!(one.uuid_in(sr), noted);
        let clone = Volume { key: "c".into(), uuid: None, ..one.clone() };
        assert_ne!(clone.uuid_in(sr), noted, "the note is about another volume");
        one.uuid = Some("no uuid".into());
        one.keys.clear();
        assert_eq!(one.uuid_in(sr), made);
    }

    #[test]
    fn sizes_are_numbers_that_fit() {
        let size = |size: Value| serde_json::from_value::<Volume>(json!({"key": "a", "virtual_size": size}));
        assert_eq!(size(json!("1024")).expect("as text").virtual_size, 1024);
        for odd in [json!(-1), json!(1.5), json!(u64::MAX), json!(null), json!("x"), json!([])] {
            assert!(size(odd.clone()).is_err(), "{odd}");
        }
        assert!(serde_json::from_value::<Volume>(json!({"virtual_size": 1})).is_err(), "no key");
        let stat: Stat =
            serde_json::from_value(json!({"free_space": 9, "total_space": 5})).expect("odd, but read");
        assert_eq!(stat.sizes().physical_utilisation, 0);
        let ill: Stat = serde_json::from_value(json!({"health": ["Unreachable", "no path"]})).expect("read");
        assert_eq!(ill.trouble().as_deref(), Some("Unreachable no path"));
    }

    #[test]
    fn changed_blocks_are_never_too_few() {
        let mut blocks = Blocks::of_disk(20 * BLOCK + 1).expect("small");
        blocks.add(BLOCK - 1, 2);
        blocks.add(20 * BLOCK, 99 * BLOCK);
        assert_eq!(STANDARD.decode(blocks.text()).expect("ours"), [0b1100_0000, 0, 0b0000_1000]);
        // Bits for half a MiB each: the second is blocks 8 to 15.
        let mut coarse = Blocks::of_disk(20 * BLOCK).expect("small");
        let answer = Changed { granularity: 8 * BLOCK, bitmap: STANDARD.encode([0b0100_0000]) };
        assert_eq!(coarse.add_answer(0, &answer), Ok(64 * BLOCK));
        assert_eq!(STANDARD.decode(coarse.text()).expect("ours"), [0, 0xff, 0]);
        assert!(coarse.add_answer(0, &Changed { granularity: 0, bitmap: String::new() }).is_err());
        assert!(coarse.add_answer(0, &Changed { granularity: 1, bitmap: "*".into() }).is_err());
        assert!(Blocks::of_disk(u64::MAX).is_err());
        let mut compared = Blocks::of_disk(9 * BLOCK).expect("small");
        compared
            .add_ranges(&Ranges { blocksize: BLOCK, ranges: vec![(8, 1), (0, 2), (1, u64::MAX / BLOCK)] });
        assert_eq!(STANDARD.decode(compared.text()).expect("ours"), [0xff, 0x80]);
    }
}
