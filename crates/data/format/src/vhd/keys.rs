//! Keys of encrypted images: kept apart from everything that is printed, and wiped when they are dropped.

use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::KeyHash;
use super::crypt::DiskCipher;
use crate::error::{FormatError, FormatErrorKind, Result, invalid};

/// Bytes of a key: two keys of AES-128, or of AES-256.
pub const KEY_LENS: [usize; 2] = [32, 64];

/// The keys that the images of a chain may need. Cheap to copy; the bytes are there once.
#[derive(Clone, Default)]
pub struct Keys(Arc<Vec<Zeroizing<Vec<u8>>>>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

impl Keys {
    /// These keys.
    ///
    /// # Errors
    /// `InvalidArgument` for one that has neither 32 nor 64 bytes.
    pub fn new(keys: Vec<Zeroizing<Vec<u8>>>) -> Result<Self> {
        match keys.iter().find(|key| !KEY_LENS.contains(&key.len())) {
            Some(odd) => Err(invalid(format!("a key has 32 or 64 bytes and not {}", odd.len()))),
            None => Ok(Self(Arc::new(keys))),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The cipher of an image with this fingerprint; none for an image that is not encrypted.
    ///
    /// # Errors
    /// `InvalidArgument` where the key of the image is not among these.
    pub fn cipher_for(&self, hash: &KeyHash) -> Result<Option<Box<DiskCipher>>> {
        if !hash.is_set() {
            return Ok(None);
        }
        if let Some(key) = self.0.iter().find(|key| hash.is_of(key)) {
            return DiskCipher::new(key).map(|cipher| Some(Box::new(cipher)));
        }
        let detail = match self.is_empty() {
            true => {
                "the image is encrypted: open it with its key ('tap-ctl open -E', 'tapio-disk --key-file')"
            }
            false => {
                "the image is encrypted with another key: 'vhd-util key -p' prints the hash of the right one"
            }
        };
        Err(FormatError::new(FormatErrorKind::InvalidArgument, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8, len: usize) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(vec![byte; len])
    }

    #[test]
    fn the_key_is_found_by_its_fingerprint() {
        let keys = Keys::new(vec![key(1, 32), key(2, 64)]).unwrap();
        for (byte, len) in [(1, 32), (2, 64)] {
            let hash = KeyHash::of([9; 32], &key(byte, len));
            assert!(keys.cipher_for(&hash).unwrap().is_some());
        }
        assert!(keys.cipher_for(&KeyHash::default()).unwrap().is_none());
        let other = KeyHash::of([9; 32], &key(3, 32));
        assert!(keys.cipher_for(&other).unwrap_err().to_string().contains("another key"));
        assert!(Keys::default().cipher_for(&other).unwrap_err().to_string().contains("--key-file"));
        assert!(Keys::new(vec![key(1, 33)]).is_err());
        assert_eq!(format!("{keys:?}"), "Keys(2)");
    }
}
