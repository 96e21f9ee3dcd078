//! Base64 (RFC 4648, section 4), as XML-RPC and HTTP's basic authentication carry bytes.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn digit(byte: u8) -> Option<u32> {
    Some(match byte {
        b'A'..=b'Z' => u32::from(byte - b'A'),
        b'a'..=b'z' => u32::from(byte - b'a') + 26,
        b'0'..=b'9' => u32::from(byte - b'0') + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}

/// Text to bytes; white space anywhere is skipped. None where a character is foreign or the end is missing.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut held, mut count, mut padding) = (0_u32, 0, 0);
    for byte in text.bytes().filter(|byte| !byte.is_ascii_whitespace()) {
        if byte == b'=' {
            padding += 1;
            continue;
        }
        if padding > 0 {
            return None;
        }
        held = held << 6 | digit(byte)?;
        count += 1;
        if count == 4 {
            bytes.extend(&held.to_be_bytes()[1..]);
            (held, count) = (0, 0);
        }
    }
    match (count, padding) {
        (0, 0) => {}
        (2, 2) => bytes.push((held >> 4) as u8),
        (3, 1) => bytes.extend(&((held >> 2) as u16).to_be_bytes()),
        _ => return None,
    }
    Some(bytes)
}

/// Bytes to text, without line breaks.
pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| chunk.get(at).copied().map_or(0, u32::from);
        let held = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            let shown = place <= chunk.len();
            let at = (held >> (18 - 6 * place) & 63) as usize;
            text.push(if shown { ALPHABET[at].into() } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_the_rfc_and_every_length() {
        let examples = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("foobar", "Zm9vYmFy"),
        ];
        for (plain, text) in examples {
            assert_eq!(encode(plain.as_bytes()), text);
            assert_eq!(decode(text).as_deref(), Some(plain.as_bytes()));
        }
        for len in 0..=255_u8 {
            let bytes: Vec<u8> = (0..len).map(|at| at.wrapping_mul(151)).collect();
            assert_eq!(decode(&encode(&bytes)), Some(bytes));
        }
        assert_eq!(decode("Zm9v\n YmFy\r\n").as_deref(), Some(&b"foobar"[..]));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["Z", "Zg", "Zg=", "Zg=a", "Zm9v=", "Zm9-", "===="] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
