//! How far long work is, for a terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use tapio_report::failure::Result;
use tapio_report::size::size;

/// How often is asked.
const EVERY: Duration = Duration::from_millis(100);

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

/// How far some work is, in bytes.
#[derive(Debug)]
pub struct Stand<T> {
    pub done: u64,
    pub total: u64,
    /// What came of it, when it has ended.
    pub end: Option<Result<T>>,
}

/// Asks how far some work is until it has ended, and shows that on a terminal; what came of it.
///
/// # Errors
/// The work failed, or its progress is not known.
pub fn follow<T>(mut ask: impl FnMut() -> Result<Stand<T>>) -> Result<T> {
    let mut err = std::io::stderr();
    let (shown, begun, mut first) = (err.is_terminal(), Instant::now(), None);
    loop {
        let Stand { done, total, end } = ask()?;
        let since = done.saturating_sub(*first.get_or_insert(done));
        if shown {
            let line = bar(done, total, since as f64 / begun.elapsed().as_secs_f64().max(0.001));
            // Nowhere else to show it.
            let _ = write!(err, "\r\x1b[K{line}{}", if end.is_some() { "\n" } else { "" });
        }
        match end {
            Some(end) => return end,
            None => std::thread::sleep(EVERY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_what_is_done() {
        assert!(bar(1 << 20, 4 << 20, 0.0).starts_with(&format!(
            "[{}{}]  25 %",
            "#".repeat(7),
            ".".repeat(23)
        )));
        assert!(bar(512, 2 << 20, 0.0).starts_with("[....."));
        assert!(bar(0, 0, 0.0).contains("100 %"));
    }

    #[test]
    fn work_is_followed_to_its_end() {
        let mut ends = [None, None, Some(Ok(7))].into_iter();
        let found =
            follow(|| Ok(Stand { done: 0, total: 3, end: ends.next().expect("not asked after the end") }));
        assert_eq!((found, ends.next()), (Ok(7), None));
    }
}
