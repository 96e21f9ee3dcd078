//! Sizes of the transfers that a disk makes of its guests' requests.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::size::{exact_bytes, parse_bytes};

/// Every size is a multiple of this many bytes.
const UNIT: u32 = 4096;
/// The largest size in bytes.
const SIZE_MAX: u32 = 32 << 20;

/// How a disk's requests go to its storage. 0 means: as the guest made them.
///
/// Neither changes what a guest sees: a request is answered once, when all of it is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct TransferSizes {
    /// A larger transfer goes as several of this many bytes, side by side.
    pub split: u32,
    /// Neighbouring transfers that come at the same time go as one, up to this many bytes.
    pub merge: u32,
}

impl TransferSizes {
    /// Keys of `other_config` of a VBD or an SR, in the order of the fields.
    pub const KEYS: [&'static str; 2] = ["split-size", "merge-size"];

    /// Whether transfers are what the guest asked for.
    pub const fn is_off(&self) -> bool {
        self.split == 0 && self.merge == 0
    }

    /// Refuses impossible sizes.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what is possible.
    pub fn check(&self) -> Result<(), String> {
        for (name, size) in [("split", self.split), ("merge", self.merge)] {
            if size > SIZE_MAX || !size.is_multiple_of(UNIT) {
                return Err(format!("{name} of {size} bytes: a multiple of 4 KiB up to 32 MiB is expected"));
            }
        }
        if self.split > 0 && self.merge > self.split {
            return Err(format!(
                "merge of {} is more than split of {}: what was made one would be split again",
                exact_bytes(self.merge.into()),
                exact_bytes(self.split.into())
            ));
        }
        Ok(())
    }

    /// Sets one by its name (`split`, `merge`) or its key of `other_config`; others are left alone.
    ///
    /// # Errors
    /// What is possible, as a sentence.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let field = match name {
            "split" | "split-size" => &mut self.split,
            "merge" | "merge-size" => &mut self.merge,
            _ => return Err(format!("'{name}' is no size of transfers: split and merge are")),
        };
        let bytes = if value == "off" { 0 } else { parse_bytes(value)? };
        let size = u32::try_from(bytes).ok().filter(|size| *size <= SIZE_MAX && size.is_multiple_of(UNIT));
        *field =
            size.ok_or_else(|| format!("'{value}': a multiple of 4 KiB up to 32 MiB, or off, is expected"))?;
        Ok(())
    }
}

/// `off`, or `split=64KiB,merge=64KiB`.
impl FromStr for TransferSizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Self::default();
        if text == "off" {
            return Ok(sizes);
        }
        for part in text.split(',') {
            let pair = part.split_once('=');
            let (name, value) =
                pair.ok_or_else(|| format!("'{part}': write 'off' or split=64KiB,merge=64KiB"))?;
            sizes.set(name, value)?;
        }
        sizes.check()?;
        Ok(sizes)
    }
}

/// As [`TransferSizes::from_str`] reads it.
impl fmt::Display for TransferSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = [("split", self.split), ("merge", self.merge)];
        let parts: Vec<_> = given
            .into_iter()
            .filter(|(_, size)| *size > 0)
            .map(|(name, size)| format!("{name}={}", exact_bytes(size.into())))
            .collect();
        if parts.is_empty() { f.write_str("off") } else { f.write_str(&parts.join(",")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for text in ["off", "split=64KiB", "merge=512KiB", "split=1MiB,merge=4KiB"] {
            assert_eq!(text.parse::<TransferSizes>().map(|sizes| sizes.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("split=65536,merge=off".parse(), Ok(TransferSizes { split: 65_536, merge: 0 }));
        for text in ["", "split", "split=", "split=1000", "merge=33MiB", "size=4KiB", "split=4KiB,merge=8KiB"]
        {
            text.parse::<TransferSizes>().expect_err(text);
        }
        assert!(TransferSizes::default().is_off());
    }
}
