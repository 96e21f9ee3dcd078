//! Encrypted images: AES-XTS over each sector that is in an image, and the fingerprint that names the key.
//!
//! The tweak of a sector is the low 32 bits of its number on the virtual disk, little-endian, as dm-crypt's `plain`
//! has it. Sectors that are in no image read as zeros and not as the decryption of anything.

use std::fmt;

use aes::cipher::{BlockDecrypt, BlockEncrypt, KeyInit};
use aes::{Aes128, Aes256, Block};
use sha2::{Digest, Sha256};

use super::{KeyHash, SECTOR_LEN};
use crate::error::{Result, invalid};

/// Bytes of a block of AES.
const BLOCK_LEN: usize = 16;
/// Blocks of a sector. They go through the cipher together: a processor with instructions for AES works on eight blocks
/// in the time of two, if it is given them at once.
const BLOCKS: usize = SECTOR_LEN as usize / BLOCK_LEN;

/// A key in use.
pub struct DiskCipher(Keys);

enum Keys {
    Aes128(Box<Xts<Aes128>>),
    Aes256(Box<Xts<Aes256>>),
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
        Ok(Self(match key.len() {
            32 => Keys::Aes128(Box::new(Xts::new(key).ok_or_else(wrong)?)),
            64 => Keys::Aes256(Box::new(Xts::new(key).ok_or_else(wrong)?)),
            _ => return Err(wrong()),
        }))
    }

    /// Encrypts whole sectors in place, the first of which is `sector` on the virtual disk.
    pub fn encrypt(&self, sector: u64, data: &mut [u8]) {
        match &self.0 {
            Keys::Aes128(xts) => xts.each(sector, data, |aes, blocks| aes.encrypt_blocks(blocks)),
            Keys::Aes256(xts) => xts.each(sector, data, |aes, blocks| aes.encrypt_blocks(blocks)),
        }
    }

    /// Decrypts whole sectors in place, the first of which is `sector` on the virtual disk.
    pub fn decrypt(&self, sector: u64, data: &mut [u8]) {
        match &self.0 {
            Keys::Aes128(xts) => xts.each(sector, data, |aes, blocks| aes.decrypt_blocks(blocks)),
            Keys::Aes256(xts) => xts.each(sector, data, |aes, blocks| aes.decrypt_blocks(blocks)),
        }
    }
}

/// XTS (IEEE 1619, 5.3 and 5.4) on whole sectors, so without stealing.
struct Xts<C> {
    data: C,
    tweak: C,
}

impl<C: BlockEncrypt<BlockSize = aes::cipher::consts::U16> + KeyInit> Xts<C> {
    fn new(key: &[u8]) -> Option<Self> {
        let (data, tweak) = key.split_at(key.len() / 2);
        Some(Self { data: C::new_from_slice(data).ok()?, tweak: C::new_from_slice(tweak).ok()? })
    }

    /// Does `work` to each sector of `data`, between two additions of its tweaks.
    fn each(&self, first: u64, data: &mut [u8], work: impl Fn(&C, &mut [Block])) {
        let mut tweaks = [0u128; BLOCKS];
        let mut blocks = [Block::default(); BLOCKS];
        for (number, sector) in (first..).zip(data.chunks_exact_mut(SECTOR_LEN as usize)) {
            self.fill_tweaks(number as u32, &mut tweaks);
            for ((block, bytes), tweak) in blocks.iter_mut().zip(sector.chunks_exact(BLOCK_LEN)).zip(&tweaks)
            {
                block.copy_from_slice(bytes);
                add(block, *tweak);
            }
            work(&self.data, &mut blocks);
            for ((block, bytes), tweak) in
                blocks.iter_mut().zip(sector.chunks_exact_mut(BLOCK_LEN)).zip(&tweaks)
            {
                add(block, *tweak);
                bytes.copy_from_slice(block);
            }
        }
    }

    /// The tweak of each block of sector `number`: the first is the encrypted number, each other the one before times
    /// the primitive element of GF(2^128).
    fn fill_tweaks(&self, number: u32, tweaks: &mut [u128; BLOCKS]) {
        let mut first = Block::from(u128::from(number).to_le_bytes());
        self.tweak.encrypt_block(&mut first);
        let mut tweak = u128::from_le_bytes(first.into());
        for each in tweaks {
            *each = tweak;
            // The polynomial of the field, x^128 + x^7 + x^2 + x + 1. A multiplication and no branch: the time does not
            // depend on the key.
            tweak = (tweak << 1) ^ ((tweak >> 127) * 0x87);
        }
    }
}

/// Adds a tweak to a block.
fn add(block: &mut Block, tweak: u128) {
    let sum = u128::from_le_bytes((*block).into()) ^ tweak;
    block.copy_from_slice(&sum.to_le_bytes());
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

    /// Both key lengths, whole runs of sectors, numbers up to the last that a disk can have.
    #[test]
    fn every_sector_is_as_another_implementation_has_it() {
        use xts_mode::Xts128;
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as u32
        };
        for round in 0..64 {
            let key: Vec<u8> = (0..if round % 2 == 0 { 32 } else { 64 }).map(|_| next() as u8).collect();
            let plain: Vec<u8> = (0..SECTOR_LEN as usize * (1 + round % 5)).map(|_| next() as u8).collect();
            let first = if round < 2 { u64::from(u32::MAX) - 1 } else { u64::from(next()) };
            let mut wanted = plain.clone();
            for (sector, number) in wanted.chunks_mut(SECTOR_LEN as usize).zip(first..) {
                let tweak = u128::from(number as u32).to_le_bytes();
                let (data, other) = key.split_at(key.len() / 2);
                if key.len() == 32 {
                    let new = |key| Aes128::new_from_slice(key).unwrap();
                    Xts128::new(new(data), new(other)).encrypt_sector(sector, tweak);
                } else {
                    let new = |key| Aes256::new_from_slice(key).unwrap();
                    Xts128::new(new(data), new(other)).encrypt_sector(sector, tweak);
                }
            }
            let cipher = DiskCipher::new(&key).unwrap();
            let mut data = plain.clone();
            cipher.encrypt(first, &mut data);
            assert_eq!(data, wanted, "round {round}");
            cipher.decrypt(first, &mut data);
            assert_eq!(data, plain, "round {round}");
        }
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
