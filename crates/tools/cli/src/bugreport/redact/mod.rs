//! The second line: texts that Tapio does not structure (logs, findings, names) lose what may be a secret.
//!
//! ```text
//! mod      the order of the passes; UUIDs and references
//! lines    words that announce a secret, headers, URLs, calls
//! tokens   strings that look drawn by chance
//! known    values that were left out of records, in every usual writing
//! ```
//!
//! The first line is structure: only what a list names is taken at all. So this part may take too much, and does: a
//! line loses all that follows the word `password`.

mod known;
mod lines;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use regex::{Captures, Regex};

pub(super) use self::known::Known;
pub(super) use self::lines::names_a_secret;

/// What stands in place of a secret.
pub(super) const LEFT_OUT: &str = "(left out)";

/// Longest block of PEM, in bytes.
const PEM_LEN_MAX: usize = 64 << 10;

static UUID: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(
        r"(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|OpaqueRef(?::|%3A)[\w-]{1,64}",
    )
    .ok()
});

/// Takes secrets out of texts.
#[derive(Debug, Default)]
pub struct Redactor {
    /// UUIDs of objects whose records are in the report. Any other may be a session, which is a bearer token.
    uuids: BTreeSet<String>,
    /// The others get numbers, so that lines about the same one can be found.
    numbers: BTreeMap<String, usize>,
    known: Option<Known>,
}

impl Redactor {
    /// One that also knows these values, in every usual writing.
    pub fn of_secrets<'a>(values: impl Iterator<Item = &'a str>) -> Self {
        Self { known: Some(Known::new(values, &BTreeSet::new())), ..Self::default() }
    }

    /// From now on this UUID stays.
    pub(super) fn keep_uuid(&mut self, uuid: &str) {
        self.uuids.insert(uuid.to_ascii_lowercase());
    }

    /// Values that are taken out wherever they stand.
    pub(super) fn know(&mut self, known: Known) {
        self.known = Some(known);
    }

    /// A text of lines.
    pub fn text(&mut self, text: &str) -> String {
        let text = without_pem(text);
        let text = self.known.as_ref().map_or_else(|| text.clone(), |known| known.without(&text));
        let mut done = String::with_capacity(text.len());
        let mut is_announced = false;
        for line in text.split_inclusive('\n') {
            let (body, end) = line.strip_suffix('\n').map_or((line, ""), |body| (body, "\n"));
            if is_announced && !body.trim().is_empty() {
                done.push_str(LEFT_OUT);
                is_announced = false;
            } else if lines::is_text(body) {
                let (cut, announces) = lines::without(body);
                is_announced |= announces;
                let cut = self.without_uuids(&cut);
                done.push_str(&tokens::without(&cut));
            } else {
                done.push_str(&format!("({} bytes that are no text)", body.len()));
            }
            done.push_str(end);
        }
        done
    }

    fn without_uuids(&mut self, text: &str) -> String {
        let Some(pattern) = UUID.as_ref() else { return LEFT_OUT.to_owned() };
        let replaced = pattern.replace_all(text, |found: &Captures<'_>| {
            let found = found.get(0).map_or("", |found| found.as_str());
            let uuid = found.get(found.len().saturating_sub(36)..).unwrap_or(found).to_ascii_lowercase();
            if found.eq_ignore_ascii_case("OpaqueRef:NULL") || self.uuids.contains(&uuid) {
                return found.to_owned();
            }
            let next = self.numbers.len() + 1;
            let number = *self.numbers.entry(uuid).or_insert(next);
            format!("(unknown {number})")
        });
        replaced.into_owned()
    }
}

/// A text without keys and certificates in PEM.
fn without_pem(text: &str) -> String {
    let mut done = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("-----BEGIN ") {
        done.push_str(&rest[..at]);
        done.push_str(LEFT_OUT);
        let after = &rest[at..];
        let mut limit = after.len().min(PEM_LEN_MAX);
        while !after.is_char_boundary(limit) {
            limit -= 1;
        }
        let end = after[..limit].find("-----END ").and_then(|end| {
            let name = end + "-----END ".len();
            after[name..].find("-----").map(|dashes| name + dashes + 5)
        });
        // One that has no end is left out with all that may be of it.
        rest = &after[end.unwrap_or(limit)..];
    }
    done.push_str(rest);
    done
}

#[cfg(test)]
mod tests;
