//! Encrypted images: AES-XTS over each sector that is in an image, and the fingerprint that names the key.
//!
//! The tweak of a sector is the low 32 bits of its number on the virtual disk, little-endian, as dm-crypt's `plain`
//! has it. Sectors that are in no image read as zeros and not as the decryption of anything.

use std::fmt;

use aes::cipher::KeyInit;
use aes::{Aes128, Aes256};
use sha2::{Digest, Sha256};
use xts_mode::Xts128;

use super::{KeyHash, SECTOR_LEN};
use crate::error::{Result, invalid};

/// A key in use.
pub struct DiskCipher(Cipher);

enum Cipher {
    Aes128(Box<Xts128<Aes128>>),
    Aes256(Box<Xts128<Aes256>>),
}

impl fmt::Debug for DiskCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DiskCipher")
    }
}

impl DiskCipher {
    /// A cipher for a key of 32 bytes (AES-128) or 64 bytes (AES-256): XTS takes two keys.
    ///
    /// # Errors
    /// `InvalidArgument` for any other length.
    pub fn new(key: &[u8]) -> Result<Self> {
        let wrong = || invalid(format!("a key has 32 or 64 bytes and not {}", key.len()));
        let (data, tweak) = key.split_at(key.len() / 2);
        Ok(Self(match key.len() {
            32 => {
                let new = |key| Aes128::new_from_slice(key).map_err(|_| wrong());
                Cipher::Aes128(Box::new(Xts128::new(new(data)?, new(tweak)?)))
            }
            64 => {
                let new = |key| Aes256::new_from_slice(key).map_err(|_| wrong());
                Cipher::Aes256(Box::new(Xts128::new(new(data)?, new(tweak)?)))
            }
            _ => return Err(wrong()),
        }))
    }

    /// Encrypts whole sectors in place, the first of which is `sector` on the virtual disk.
    pub fn encrypt(&self, sector: u64, data: &mut [u8]) {
        self.each(sector, data, |cipher, tweak, sector| match cipher {
            Cipher::Aes128(xts) => xts.encrypt_sector(sector, tweak),
            Cipher::Aes256(xts) => xts.encrypt_sector(sector, tweak),
        });
    }

    /// Decrypts whole sectors in place, the first of which is `sector` on the virtual disk.
    pub fn decrypt(&self, sector: u64, data: &mut [u8]) {
        self.each(sector, data, |cipher, tweak, sector| match cipher {
            Cipher::Aes128(xts) => xts.decrypt_sector(sector, tweak),
            Cipher::Aes256(xts) => xts.decrypt_sector(sector, tweak),
        });
    }

    fn each(&self, first: u64, data: &mut [u8], work: impl Fn(&Cipher, [u8; 16], &mut [u8])) {
        for (number, sector) in (first..).zip(data.chunks_exact_mut(SECTOR_LEN as usize)) {
            let mut tweak = [0; 16];
            tweak[..4].copy_from_slice(&(number as u32).to_le_bytes());
            work(&self.0, tweak, sector);
        }
    }
}

impl KeyHash {
    /// The fingerprint of a key.
    pub fn of(nonce: [u8; 32], key: &[u8]) -> Self {
        let hash = Sha256::new().chain_update(nonce).chain_update(key).finalize().into();
        Self { cookie: 1, nonce, hash }
    }

    /// Whether this is the fingerprint of `key`.
    pub fn is_of(&self, key: &[u8]) -> bool {
        self.is_set() && Self::of(self.nonce, key).hash == self.hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// IEEE 1619, vector 2: tweak 0x3333333333 has more than 32 bits, so vector 1 and one of our own are used.
    #[test]
    fn the_first_block_of_the_published_vector() {
        // Vector 1: both keys zero, sector 0, data zero.
        let cipher = DiskCipher::new(&[0; 32]).unwrap();
        let mut data = [0; 512];
        cipher.encrypt(0, &mut data);
        let expected = [
            0x91, 0x7c, 0xf6, 0x9e, 0xbd, 0x68, 0xb2, 0xec, 0x9b, 0x9f, 0xe9, 0xa3, 0xea, 0xdd, 0xa6, 0x92,
            0xcd, 0x43, 0xd2, 0xf5, 0x95, 0x98, 0xed, 0x85, 0x8c, 0x02, 0xc2, 0x65, 0x2f, 0xbf, 0x92, 0x2e,
        ];
        assert_eq!(data[..32], expected);
    }

    #[test]
    fn sectors_come_back_and_differ_by_their_number() {
        for len in [32, 64] {
            let key: Vec<u8> = (0..len).collect();
            let cipher = DiskCipher::new(&key).unwrap();
            let mut data = [7; 1536];
            cipher.encrypt(9, &mut data);
            assert_ne!(data[..512], data[512..1024]);
            let mut second = [7; 512];
            cipher.encrypt(10 + (1 << 32), &mut second);
            assert_eq!(second, data[512..1024], "the low 32 bits count");
            cipher.decrypt(9, &mut data);
            assert_eq!(data, [7; 1536]);
        }
    }

    #[test]
    fn keys_have_one_of_two_lengths() {
        for len in [0, 16, 31, 33, 63, 65, 128] {
            assert!(DiskCipher::new(&vec![0; len]).is_err(), "{len}");
        }
    }

    #[test]
    fn a_fingerprint_is_the_hash_of_nonce_and_key() {
        let hash = KeyHash::of([0; 32], &[0; 32]);
        // SHA-256 of 64 zero bytes.
        assert_eq!(hash.hash[..4], [0xf5, 0xa5, 0xfd, 0x42]);
        assert!(hash.is_of(&[0; 32]) && !hash.is_of(&[1; 32]));
        assert!(!KeyHash::default().is_of(&[0; 32]));
    }
}
