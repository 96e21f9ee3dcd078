//! Bit maps: one bit a sector in front of each block, one bit a block in the batmap.
//!
//! Bit `n` is byte `n / 8`, mask `0x80 >> (n % 8)`. Images of creator version 0.1 count from the other end of
//! each byte; [`BitOrder::swap`] turns such a map into the usual order when it is read, and back when it is written.

/// Which end of a byte holds the first bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum BitOrder {
    /// 0x80 first: the published order.
    #[default]
    MsbFirst,
    /// 0x01 first: images by creator "tap" version 0.1.
    LsbFirst,
}

impl BitOrder {
    /// Turns a map of this order into the usual one, or the usual one into this order.
    pub fn swap(self, map: &mut [u8]) {
        if self == Self::LsbFirst {
            for byte in map {
                *byte = byte.reverse_bits();
            }
        }
    }
}

/// Whether bit `index` is set; a bit beyond the map is not.
pub fn test(map: &[u8], index: usize) -> bool {
    map.get(index / 8).is_some_and(|byte| byte & (0x80 >> (index % 8)) != 0)
}

/// Sets bit `index`.
///
/// # Panics
/// If the map is shorter than that.
pub fn set(map: &mut [u8], index: usize) {
    map[index / 8] |= 0x80 >> (index % 8);
}

/// Clears bit `index`.
///
/// # Panics
/// If the map is shorter than that.
pub fn clear(map: &mut [u8], index: usize) {
    map[index / 8] &= !(0x80 >> (index % 8));
}

/// Sets `count` bits from `start`.
///
/// # Panics
/// If the map is shorter than that.
pub fn set_range(map: &mut [u8], start: usize, count: usize) {
    if count == 0 {
        return;
    }
    let last = start + count - 1;
    let (first_byte, last_byte) = (start / 8, last / 8);
    let head = 0xffu8 >> (start % 8);
    let tail = !(0x7fu8 >> (last % 8));
    if first_byte == last_byte {
        map[first_byte] |= head & tail;
        return;
    }
    map[first_byte] |= head;
    map[first_byte + 1..last_byte].fill(0xff);
    map[last_byte] |= tail;
}

/// Whether all of `count` bits from `start` are set.
pub fn all_set(map: &[u8], start: usize, count: usize) -> bool {
    run(map, start, start.saturating_add(count)).is_none_or(|(value, len)| value && len == count)
}

/// The value of bit `start` and how many bits from there, below `end`, have the same value.
///
/// `None` where `start` is at or behind `end`. Bits beyond the map count as clear.
pub fn run(map: &[u8], start: usize, end: usize) -> Option<(bool, usize)> {
    if start >= end {
        return None;
    }
    let value = test(map, start);
    let uniform = if value { 0xff } else { 0x00 };
    let mut at = start + 1;
    while at < end {
        if at.is_multiple_of(64) && end - at >= 64 && word_is(map, at / 8, uniform) {
            at += 64;
        } else if at.is_multiple_of(8) && end - at >= 8 && map.get(at / 8).copied().unwrap_or(0) == uniform {
            at += 8;
        } else if test(map, at) == value {
            at += 1;
        } else {
            break;
        }
    }
    Some((value, at - start))
}

/// The runs of equal bits from `start` to `end`, as `(value, first bit, count)`.
pub fn runs(map: &[u8], start: usize, end: usize) -> impl Iterator<Item = (bool, usize, usize)> + '_ {
    let mut at = start;
    std::iter::from_fn(move || {
        let (value, count) = run(map, at, end)?;
        let first = at;
        at += count;
        Some((value, first, count))
    })
}

/// How many of the first `count` bits are set.
pub fn count_set(map: &[u8], count: usize) -> usize {
    let whole = (count / 8).min(map.len());
    let ones: usize = map[..whole].iter().map(|byte| byte.count_ones() as usize).sum();
    let rest = map.get(whole).map_or(0, |byte| {
        let bits = count - whole * 8;
        if bits >= 8 { 0 } else { (byte & !(0xffu8 >> bits)).count_ones() as usize }
    });
    ones + rest
}

fn word_is(map: &[u8], at: usize, uniform: u8) -> bool {
    match map.get(at..at + 8) {
        Some(word) => word == [uniform; 8],
        None => uniform == 0 && at >= map.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bit_is_the_high_one() {
        let mut map = [0; 2];
        set(&mut map, 0);
        set(&mut map, 9);
        assert_eq!(map, [0x80, 0x40]);
        assert!(test(&map, 9) && !test(&map, 8) && !test(&map, 4000));
        clear(&mut map, 0);
        assert_eq!(map, [0, 0x40]);
    }

    #[test]
    fn the_old_order_is_the_mirror_image() {
        let mut map = [0x01, 0x80];
        BitOrder::LsbFirst.swap(&mut map);
        assert_eq!(map, [0x80, 0x01]);
        BitOrder::MsbFirst.swap(&mut map);
        assert_eq!(map, [0x80, 0x01]);
    }

    /// Every range in a map of 24 bits, compared with a plain list of booleans.
    #[test]
    fn ranges_agree_with_single_bits_everywhere() {
        for start in 0..24 {
            for count in 0..=24 - start {
                let mut map = [0u8; 3];
                set_range(&mut map, start, count);
                for bit in 0..24 {
                    assert_eq!(
                        test(&map, bit),
                        (start..start + count).contains(&bit),
                        "{start}+{count}: {bit}"
                    );
                }
                assert_eq!(count_set(&map, 24), count);
                assert!(all_set(&map, start, count));
            }
        }
    }

    #[test]
    fn runs_cover_the_whole_span_once() {
        let mut map = vec![0u8; 512];
        for (start, count) in [(0, 1), (7, 130), (600, 64), (1024, 1000), (4095, 1)] {
            set_range(&mut map, start, count);
        }
        let mut at = 3;
        let mut previous = None;
        for (value, first, count) in runs(&map, 3, 4096) {
            assert_eq!(first, at);
            assert_ne!(Some(value), previous, "neighbouring runs differ");
            assert!((first..first + count).all(|bit| test(&map, bit) == value));
            at += count;
            previous = Some(value);
        }
        assert_eq!(at, 4096);
    }

    #[test]
    fn bits_beyond_the_map_are_clear() {
        assert_eq!(run(&[0xff], 0, 200), Some((true, 8)));
        assert_eq!(run(&[0xff], 8, 200), Some((false, 192)));
        assert_eq!(run(&[], 5, 5), None);
        assert_eq!(count_set(&[0xff], 100), 8);
        assert_eq!(count_set(&[0xff], 3), 3);
    }
}
