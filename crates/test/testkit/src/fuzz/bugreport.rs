//! Lines that any party had written to a log, in a report for support.

use tapio_cli::Redactor;

/// A value of a record that the report left out.
const KNOWN: &str = "Pl4nted-known-value";
/// A session's UUID: no object has it.
const SESSION: &str = "9a1b2c3d-0000-4111-8222-333344445555";

/// A secret does not get through, whatever stands around it: a known value anywhere, a session between other words,
/// and a value that nobody knows behind a word that announces it.
pub(super) fn bugreport_text(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut redactor = Redactor::of_secrets([KNOWN].into_iter());
    let left = redactor.text(&text);
    assert!(left.len() <= 32 * text.len() + 1024, "{} bytes of {}", left.len(), text.len());
    assert!(!left.contains(KNOWN));
    let mut at = bytes.first().map_or(0, |byte| usize::from(*byte)).min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    let (before, after) = text.split_at(at);
    let left = redactor.text(&format!("{before} {KNOWN} OpaqueRef:{SESSION}\n{after}\npassword: qZx\n"));
    assert!(!left.contains(KNOWN), "a known value got through: {left}");
    assert!(!left.contains(SESSION), "a session got through: {left}");
    assert!(!left.contains("qZx") || text.contains("qZx"), "an announced value got through: {left}");
    // What was left out once stays so.
    assert!(!redactor.text(&left).contains(KNOWN));
}
