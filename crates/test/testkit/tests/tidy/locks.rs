//! The programs take their locks from `parking_lot`.
//!
//! What a lock guards is whole whenever it can be left, so a panic under it need not stop the other threads. The locks
//! of the standard library are poisoned then, and every use has to say that it does not mind.

use super::{Source, has_word};

/// The locks of `std::sync`, and what goes with their poisoning.
const LOCKS: [&str; 8] = [
    "Mutex",
    "MutexGuard",
    "RwLock",
    "RwLockReadGuard",
    "RwLockWriteGuard",
    "Condvar",
    "TryLockError",
    "PoisonError",
];

/// Wings whose crates are built into programs.
const WINGS: [&str; 5] = ["base", "data", "stack", "tools", "xen"];

/// The lines of a file that are not for tests alone: none of a file of tests, and those above a module of tests.
fn product_text(file: &Source) -> &str {
    let mut parts = file.path.split('/');
    let is_crate = parts.next() == Some("crates") && parts.next().is_some_and(|wing| WINGS.contains(&wing));
    let is_source = is_crate && parts.nth(1) == Some("src") && file.is_rust();
    let is_test = parts.any(|part| part == "tests" || part == "tests.rs" || part.ends_with("_tests.rs"));
    if !is_source || is_test {
        return "";
    }
    let tests = file.text.find("#[cfg(test)]\nmod tests {").unwrap_or(file.text.len());
    &file.text[..tests]
}

/// Uses of the standard library's locks in the programs.
pub(super) fn poisonable(files: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files {
        let text = product_text(file);
        for (at, path) in text.match_indices("std::sync::") {
            let names = &text[at + path.len()..];
            let end = if names.starts_with('{') {
                names.find('}')
            } else {
                names.find(|c: char| !c.is_alphanumeric() && c != '_')
            };
            let names = &names[..end.unwrap_or(names.len())];
            for lock in LOCKS.iter().filter(|lock| has_word(names, lock)) {
                let line = text[..at].matches('\n').count() + 1;
                complaints.push(
                    file.at(line, &format!("std's {lock}: its poisoning says nothing, use parking_lot")),
                );
            }
        }
    }
    complaints
}
