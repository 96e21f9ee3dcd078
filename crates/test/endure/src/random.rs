//! Numbers that a seed determines (splitmix64).

/// A stream of numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// One step of splitmix64: any number becomes one that looks like chance.
pub const fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Random {
    /// The stream of a seed and of the party that draws from it.
    pub fn new(seed: u64, party: &str) -> Self {
        Self(party.bytes().fold(mix(seed), |state, byte| mix(state ^ u64::from(byte))))
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Below `limit`, which is not 0.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// True once in `odds` times.
    pub const fn once_in(&mut self, odds: u64) -> bool {
        self.below(odds) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_and_a_party_determine_the_stream() {
        let draw = |seed, party| Random::new(seed, party).next();
        assert_eq!(draw(7, "chain"), draw(7, "chain"));
        assert_ne!(draw(7, "chain"), draw(7, "raw"));
        assert_ne!(draw(7, "chain"), draw(8, "chain"));
    }
}
