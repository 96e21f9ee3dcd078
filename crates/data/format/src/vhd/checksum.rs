//! The format's checksums: the one's complement of a plain sum of bytes.

/// The checksum over `bytes` as if the four bytes at `field` were zero.
///
/// Footer and header both hold their own checksum, so the field is left out of the sum.
pub fn without_field(bytes: &[u8], field: usize) -> u32 {
    let all = sum(bytes);
    let own = sum(&bytes[field..field + 4]);
    !all.wrapping_sub(own)
}

/// The checksum over all of `bytes`.
pub fn of(bytes: &[u8]) -> u32 {
    !sum(bytes)
}

/// The checksum over all of `bytes` taken as signed, a slip of batmap version 1.1 that its images still carry.
pub fn of_signed(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(0u32, |sum, &byte| sum.wrapping_add_signed(i32::from(byte.cast_signed())))
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0u32, |sum, &byte| sum.wrapping_add(u32::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_map_sums_to_all_ones() {
        assert_eq!(of(&[0; 512]), 0xffff_ffff);
        assert_eq!(of_signed(&[0; 512]), 0xffff_ffff);
    }

    #[test]
    fn the_field_itself_does_not_count() {
        let mut bytes = [1u8; 16];
        let before = without_field(&bytes, 4);
        bytes[4..8].copy_from_slice(&before.to_be_bytes());
        assert_eq!(without_field(&bytes, 4), before);
        assert_eq!(before, !12);
    }

    #[test]
    fn signed_and_unsigned_differ_from_0x80_on() {
        assert_eq!(of(&[0x7f]), of_signed(&[0x7f]));
        assert_eq!(of(&[0xff]), !0xff);
        assert_eq!(of_signed(&[0xff]), !0xffff_ffff);
    }
}
