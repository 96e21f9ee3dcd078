//! Small changes to an input, drawn from a seed: what the tests can do without a fuzzer.

use tapio_ring::sim::Random;

/// Numbers at which arithmetic turns over, put in at any width and in both byte orders.
const EDGES: [u64; 14] = [
    0,
    1,
    2,
    511,
    512,
    4095,
    4096,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX - 511,
    u64::MAX,
];

/// A changed copy of `input`; `other` is another input of the same corpus, from which pieces may come.
pub fn mutate(input: &[u8], other: &[u8], seed: u64, len_max: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = input.to_vec();
    for _ in 0..1 + random.below(4) {
        change(&mut bytes, other, &mut random);
    }
    bytes.truncate(len_max);
    bytes
}

fn below(random: &mut Random, limit: usize) -> usize {
    random.below(limit.max(1) as u64) as usize
}

fn change(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let len = bytes.len();
    let at = below(random, len);
    // Headers stand at the beginning and the end: every second change is there.
    let at = match random.below(4) {
        0 => at.min(below(random, 64)),
        1 => len.saturating_sub(1 + below(random, 64)),
        _ => at,
    };
    match random.below(9) {
        0 if len > 0 => bytes[at] ^= 1 << random.below(8),
        1 if len > 0 => bytes[at] = random.next() as u8,
        2 | 3 if len > 0 => put_edge(bytes, at, random),
        4 => {
            let end = (at + 1 + below(random, 32)).min(len);
            drop(bytes.drain(at..end));
        }
        5 => {
            let piece: Vec<u8> = (0..1 + random.below(16)).map(|_| random.next() as u8).collect();
            drop(bytes.splice(at..at, piece));
        }
        6 => {
            let end = (at + 1 + below(random, 64)).min(len);
            let piece = bytes[at..end].to_vec();
            let to = below(random, len + 1);
            drop(bytes.splice(to..to, piece));
        }
        7 if !other.is_empty() => {
            let start = below(random, other.len());
            let piece = other[start..(start + 1 + below(random, 256)).min(other.len())].to_vec();
            let end = (at + piece.len()).min(len);
            drop(bytes.splice(at..end, piece));
        }
        _ => bytes.truncate(below(random, len + 1)),
    }
}

fn put_edge(bytes: &mut [u8], at: usize, random: &mut Random) {
    let mut value = EDGES[below(random, EDGES.len())];
    if random.chance(1, 4) {
        value = value.wrapping_sub(random.below(16));
    }
    let width = [1, 2, 4, 8][below(random, 4)].min(bytes.len() - at);
    // Numbers are mostly where their width divides their place.
    let at = if random.chance(3, 4) { at - at % width } else { at };
    let field = &mut bytes[at..at + width];
    if random.chance(1, 2) {
        field.copy_from_slice(&value.to_le_bytes()[..width]);
    } else {
        field.copy_from_slice(&value.to_be_bytes()[8 - width..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_change_again_and_seeds_give_many() {
        let input: Vec<u8> = (0..200).collect();
        let changed: Vec<_> = (0..500).map(|seed| mutate(&input, b"other", seed, 1000)).collect();
        let again: Vec<_> = (0..500).map(|seed| mutate(&input, b"other", seed, 1000)).collect();
        assert_eq!(changed, again);
        let different = changed.iter().collect::<std::collections::HashSet<_>>().len();
        assert!(different > 450, "{different}");
        assert!(
            changed.iter().any(|bytes| bytes.len() > 200) && changed.iter().any(|bytes| bytes.len() < 200)
        );
    }

    #[test]
    fn nothing_is_too_short_to_be_changed_and_the_bound_holds() {
        for seed in 0..2000 {
            let _ = mutate(&[], &[], seed, 10);
            let _ = mutate(&[7], &[1], seed, 10);
            assert!(mutate(&[1; 64], &[2; 300], seed, 10).len() <= 10);
        }
    }
}
