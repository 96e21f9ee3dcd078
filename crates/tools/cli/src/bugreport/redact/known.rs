//! Values that were left out of records, in every usual writing.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use aho_corasick::{AhoCorasick, MatchKind};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use percent_encoding::{AsciiSet, CONTROLS, NON_ALPHANUMERIC, utf8_percent_encode};

use super::LEFT_OUT;

/// Shorter values, and words, are parts of any text: taking them out would hide what the report is for. They are left
/// out where they stood, and where a word announces them.
const LEN_MIN: usize = 8;

/// A value of this length is looked for whatever it is made of.
const LEN_SURE: usize = 16;

/// Values that are looked for at most.
const VALUES_MAX: usize = 20_000;

/// Writings that are so short are found by chance.
const ENCODED_LEN_MIN: usize = 8;

const RESERVED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'&')
    .add(b'+')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'/');

/// Finds known values.
#[derive(Debug)]
pub(crate) struct Known {
    search: Option<AhoCorasick>,
    /// Whether the pattern of this number is a whole token.
    whole: Vec<bool>,
}

/// Whether a value is told from the words of the report.
pub(crate) fn is_distinctive(value: &str) -> bool {
    let classes = [
        value.bytes().any(|byte| byte.is_ascii_lowercase()),
        value.bytes().any(|byte| byte.is_ascii_uppercase()),
        value.bytes().any(|byte| byte.is_ascii_digit()),
        value.bytes().any(|byte| !byte.is_ascii_alphanumeric()),
    ];
    let count = classes.into_iter().filter(|is_there| *is_there).count();
    let is_number = value.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b':' | b'-'));
    !is_number && (value.len() >= LEN_SURE || (value.len() >= LEN_MIN && count >= 2))
}

/// A value as base64 has it at each of the three places in its bytes, without what its neighbours decide.
fn base64_forms(value: &[u8], into: &mut BTreeSet<String>) {
    for place in 0..3 {
        let mut bytes = vec![0; place];
        bytes.extend_from_slice(value);
        let whole = bytes.len() * 8 / 6;
        for text in [STANDARD_NO_PAD.encode(&bytes), URL_SAFE_NO_PAD.encode(&bytes)] {
            let first = (place * 8).div_ceil(6);
            if let Some(form) = text.get(first..whole).filter(|form| form.len() >= ENCODED_LEN_MIN) {
                into.insert(form.to_owned());
            }
        }
    }
}

fn hex(value: &[u8]) -> String {
    value.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Texts that stand for themselves between other characters.
fn plain_forms(value: &str, into: &mut BTreeSet<String>) {
    let json = serde_json::to_string(value).unwrap_or_default();
    let json = json.trim_start_matches('"').strip_suffix('"').unwrap_or_default().to_owned();
    let twice = serde_json::to_string(&json).unwrap_or_default();
    let twice = twice.trim_start_matches('"').strip_suffix('"').unwrap_or_default().to_owned();
    let ascii: String = json.chars().fold(String::new(), |mut text, c| {
        match c {
            ' '..='~' => text.push(c),
            _ => {
                let mut units = [0; 2];
                c.encode_utf16(&mut units).iter().for_each(|unit| {
                    let _ = write!(text, "\\u{unit:04x}");
                });
            }
        }
        text
    });
    let few = value.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let quoted = few.replace('"', "&quot;");
    let all = quoted.replace('\'', "&apos;");
    let number = quoted.replace('\'', "&#39;");
    let url = utf8_percent_encode(value, NON_ALPHANUMERIC).to_string();
    let some = utf8_percent_encode(value, RESERVED).to_string();
    let form = some.replace("%20", "+");
    let component = url.replace("%2D", "-").replace("%5F", "_").replace("%2E", ".").replace("%7E", "~");
    let plus = component.replace("%20", "+");
    let shell = value.replace('\'', "'\\''");
    let slashes = json.replace('/', "\\/");
    for text in
        [few, quoted, all, number, json, twice, ascii, some, form, url, component, plus, shell, slashes]
    {
        // Digits of the escapes may be small letters.
        into.insert(text.split('%').enumerate().fold(String::new(), |mut small, (at, part)| {
            if at > 0 {
                small.push('%');
                let (digits, rest) = part.split_at_checked(2).unwrap_or((part, ""));
                small.push_str(&digits.to_ascii_lowercase());
                small.push_str(rest);
            } else {
                small.push_str(part);
            }
            small
        }));
        into.insert(text);
    }
    into.insert(value.to_owned());
}

impl Known {
    /// Looks for those of the values that are distinctive and none of the report's own words.
    pub(crate) fn new<'a>(values: impl Iterator<Item = &'a str>, own: &BTreeSet<String>) -> Self {
        let (mut plain, mut encoded) = (BTreeSet::new(), BTreeSet::new());
        for value in values.filter(|value| is_distinctive(value) && !own.contains(*value)).take(VALUES_MAX) {
            plain_forms(value, &mut plain);
            base64_forms(value.as_bytes(), &mut encoded);
            let digits = hex(value.as_bytes());
            encoded.insert(digits.to_ascii_uppercase());
            encoded.insert(digits);
            // Lines of a value of several.
            for line in value.lines().filter(|line| is_distinctive(line) && !own.contains(*line)) {
                plain_forms(line, &mut plain);
            }
        }
        let whole = plain.iter().map(|_| true).chain(encoded.iter().map(|_| false)).collect();
        let search =
            AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(plain.iter().chain(&encoded));
        Self { search: search.ok(), whole }
    }

    /// A text without them.
    pub(crate) fn without(&self, text: &str) -> String {
        // A search that could not be made has too many values to look for.
        let Some(search) = &self.search else { return LEFT_OUT.to_owned() };
        let mut done = String::with_capacity(text.len());
        let mut from = 0;
        for found in search.find_iter(text) {
            let is_edge = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric());
            let is_whole = is_edge(text[..found.start()].chars().next_back())
                && is_edge(text[found.end()..].chars().next());
            let needs_edges = self.whole.get(found.pattern().as_usize()).copied().unwrap_or(false);
            // One of many characters is none by chance, whatever stands around it.
            if needs_edges && !is_whole && found.len() < LEN_SURE {
                continue;
            }
            done.push_str(&text[from..found.start()]);
            done.push_str(LEFT_OUT);
            from = found.end();
        }
        done.push_str(&text[from..]);
        done
    }
}
