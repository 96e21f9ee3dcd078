//! Strings that look drawn by chance: keys, tokens, digests, encoded bytes.

use super::LEFT_OUT;

/// Shorter ones are words, numbers and names of devices.
const LEN_MIN: usize = 14;

/// Bytes of a URL that are written by their numbers: more than a name with a space has.
const ESCAPES_MIN: usize = 3;

fn is_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=' | '_' | '-' | '%' | '.')
}

/// How often letters and digits take turns, and capitals and small letters.
fn turns(piece: &str) -> usize {
    let kind = |c: u8| match c {
        b'0'..=b'9' => 0,
        b'a'..=b'z' => 1,
        _ => 2,
    };
    piece.as_bytes().windows(2).filter(|pair| kind(pair[0]) != kind(pair[1])).count()
}

/// A run of letters and digits that no word, number or time is.
fn is_random(piece: &str) -> bool {
    let has_digit = piece.bytes().any(|byte| byte.is_ascii_digit());
    let has_letter = piece.bytes().any(|byte| byte.is_ascii_alphabetic());
    let is_hex = piece.bytes().all(|byte| byte.is_ascii_hexdigit());
    piece.len() >= LEN_MIN
        && ((has_digit && has_letter && turns(piece) >= if is_hex { 3 } else { 4 })
            || (piece.len() >= 20 && turns(piece) >= 8)
            || (is_hex && has_letter && piece.len() >= 32)
            // A number of that length counts nothing on a host.
            || (piece.len() >= 24 && !has_letter))
}

/// A text without them.
pub(super) fn without(text: &str) -> String {
    let mut done = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(is_part) {
        done.push_str(&rest[..at]);
        let run = &rest[at..];
        let len = run.find(|c| !is_part(c)).unwrap_or(run.len());
        done.push_str(&run_without(&run[..len]));
        rest = &run[len..];
    }
    done.push_str(rest);
    done
}

/// A path loses the names that look so; anything else goes as a whole.
fn run_without(run: &str) -> String {
    let pieces = |part: &str| part.split(|c: char| !c.is_ascii_alphanumeric()).any(is_random);
    let is_escaped = run.matches('%').count() >= ESCAPES_MIN;
    if !pieces(run) && !is_escaped {
        return run.to_owned();
    }
    if run.starts_with('/') && !is_escaped {
        let parts = run.split('/').map(|part| if pieces(part) { LEFT_OUT } else { part });
        return parts.collect::<Vec<_>>().join("/");
    }
    LEFT_OUT.to_owned()
}
