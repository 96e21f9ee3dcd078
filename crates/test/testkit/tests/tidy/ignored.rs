//! A test that is ignored is on the list of what may be skipped (`tests/skips.allowed`).
//!
//! `scripts/test` refuses such a test at the end of a run of every lane; this says it in a second.

use super::Source;

/// Path of the list.
const LIST: &str = "tests/skips.allowed";

/// Ignored tests that no line of the list names.
pub(super) fn unlisted(files: &[Source]) -> Vec<String> {
    let names = listed(files);
    let mut complaints = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let mut ignored = None;
        for (at, line) in file.lines() {
            let line = line.trim_start();
            if line.starts_with("#[ignore") {
                ignored = Some(at);
            } else if let Some(name) = test_name(line)
                && let Some(at) = ignored.take()
                && !names.contains(&name)
            {
                complaints.push(file.at(at, &format!("{name} is ignored and not on the list {LIST}")));
            }
        }
    }
    complaints
}

/// The name in a line that begins a function.
fn test_name(line: &str) -> Option<&str> {
    line.strip_prefix("fn ")?.split('(').next()
}

/// The last parts of the names that the list allows to be ignored.
fn listed(files: &[Source]) -> Vec<&str> {
    let list = files.iter().find(|file| file.path == LIST);
    let lines = list.into_iter().flat_map(|list| list.text.lines());
    let patterns = lines.filter_map(|line| line.strip_prefix("ignored: ")?.split("  ").next());
    patterns.filter_map(|pattern| pattern.rsplit("::").next()).collect()
}
