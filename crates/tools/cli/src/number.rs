//! Numbers on the command lines of XenServer's tools, read as C's `strtoull` reads them: white space and a sign in
//! front,
//! digits as far as they go, the largest number where there are too many, and 0 where there are none.

use std::convert::Infallible;

/// The number that `text` begins with.
///
/// # Errors
/// None: the caller decides whether 0 makes sense.
pub fn unsigned(text: &str) -> Result<u64, Infallible> {
    let text = text.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r']);
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let mut number = Some(0_u64);
    for digit in digits.bytes().take_while(u8::is_ascii_digit) {
        number = number.and_then(|number| number.checked_mul(10)?.checked_add(u64::from(digit - b'0')));
    }
    Ok(match number {
        None => u64::MAX,
        Some(number) if negative => number.wrapping_neg(),
        Some(number) => number,
    })
}

/// The same as a number with a sign, as `strtol` and `atoi` have it.
///
/// # Errors
/// None.
pub fn signed(text: &str) -> Result<i64, Infallible> {
    let digits = text.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r']);
    let number = i128::from(unsigned(digits.trim_start_matches(['-', '+']))?);
    let number = if digits.starts_with('-') { -number } else { number };
    Ok(i64::try_from(number).unwrap_or(if number < 0 { i64::MIN } else { i64::MAX }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_the_c_library_reads_them() {
        for (text, number) in [
            ("10", 10),
            ("10x", 10),
            (" \t10", 10),
            ("+8", 8),
            ("010", 10),
            ("0x10", 0),
            ("abc", 0),
            ("", 0),
            ("-1", u64::MAX),
            ("99999999999999999999", u64::MAX),
            ("-99999999999999999999", u64::MAX),
        ] {
            assert_eq!(unsigned(text), Ok(number), "'{text}'");
        }
        for (text, number) in [("-7x", -7), ("12 ", 12), ("x", 0), ("99999999999999999999", i64::MAX)] {
            assert_eq!(signed(text), Ok(number), "'{text}'");
        }
    }
}
