//! The one source of chance of a simulation.

/// A small generator (SplitMix64): the same numbers for the same seed on every host.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator for `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub const fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which is above zero.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// True `parts` times in `of`.
    pub const fn chance(&mut self, parts: u64, of: u64) -> bool {
        self.below(of) < parts
    }
}
