//! The sums of pieces.

use sha1::{Digest, Sha1};
use twox_hash::XxHash64;

/// XXH64 as archives have it: 16 digits in capitals.
pub(crate) fn xxhash(data: &[u8]) -> String {
    format!("{:016X}", XxHash64::oneshot(0, data))
}

/// SHA-1 as archives have it: 40 small digits.
pub(crate) fn sha1(data: &[u8]) -> String {
    Sha1::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_the_published_ones() {
        assert_eq!(xxhash(b""), "EF46DB3751D8E999");
        assert_eq!(xxhash(b"abc"), "44BC2CF5AD770999");
        assert_eq!(sha1(b"abc"), "a9993e364706816aba3e25717850c26c9cd0d89d");
    }
}
