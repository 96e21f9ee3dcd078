//! Numbers that a seed determines.

/// A small generator (xorshift64*): the same numbers for the same seed on every host. Not for secrets.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator for `seed`; neighbouring seeds have nothing in common.
    pub const fn new(seed: u64) -> Self {
        // A step of SplitMix64. The state may be anything but 0, which would stay 0.
        let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        Self(if z == 0 { 1 } else { z })
    }

    /// The next 64 bits.
    pub const fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`, which is above zero.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Bytes by chance.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(size_of::<u64>()) {
            part.copy_from_slice(&self.next().to_le_bytes()[..part.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn a_seed_determines_the_numbers() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            [random.next(), random.next()]
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(6), draw(7));
        // The seed whose first mixture is 0.
        assert_ne!(draw(0u64.wrapping_sub(0x9e37_79b9_7f4a_7c15)), [0, 0]);
    }

    #[test]
    fn every_number_below_the_limit_comes() {
        let mut random = Random::new(1);
        let mut seen = [0; 10];
        (0..1000).for_each(|_| seen[random.below(10) as usize] += 1);
        assert!(seen.iter().all(|count| (50..200).contains(count)), "{seen:?}");
    }

    #[test]
    fn bytes_are_filled_to_the_last() {
        let mut long = [0; 64];
        Random::new(3).fill(&mut long);
        assert!(long.chunks(8).all(|part| part.iter().any(|byte| *byte != 0)), "{long:?}");
        let mut short = [0; 13];
        Random::new(3).fill(&mut short);
        assert_eq!(short, long[..13]);
    }
}
