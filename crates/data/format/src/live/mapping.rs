//! The vocabulary of a mapping.

/// Where the bytes of an extent are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this layer's storage, contiguous from this byte.
    Data { offset: u64 },
    /// Nowhere: they read as zero.
    Zero,
    /// Not in this layer: ask the one below.
    Parent,
}

/// The beginning of a span, all of it in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes; at least one, at most the length of the span asked for.
    pub len: u64,
    /// Where they are.
    pub place: Place,
}

/// What a layer knows without asking its storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The answer.
    Extent(Extent),
    /// The metadata of this block is not in memory: load it and ask again.
    Miss { block: u32 },
}
