//! How far long work is, for a terminal.

use crate::size::size;

/// Width of the bar in characters.
const BAR_LEN: u64 = 30;

/// `done` of `total` bytes as a bar with numbers, at `per_second` bytes a second. Nothing to do is all done.
pub fn bar(done: u64, total: u64, per_second: f64) -> String {
    let (filled, part) = match total {
        0 => (BAR_LEN, 100),
        _ => (done * BAR_LEN / total, done * 100 / total),
    };
    format!(
        "[{}{}] {part:>3} %  {} of {}  {}/s",
        "#".repeat(filled as usize),
        ".".repeat((BAR_LEN - filled) as usize),
        size(done),
        size(total),
        size(per_second as u64)
    )
}
