//! A line on a terminal that says how far the run is.

use std::io::{IsTerminal, Write};

/// Characters of the bar.
const BAR_LEN: usize = 30;

/// The line; silent where standard error is no terminal.
#[derive(Debug)]
pub struct Progress {
    total: usize,
    done: usize,
    shown: bool,
}

impl Progress {
    /// A run of so many steps.
    pub fn new(total: usize) -> Self {
        Self { total: total.max(1), done: 0, shown: std::io::stderr().is_terminal() }
    }

    /// A step begins.
    pub fn begin(&mut self, what: &str) {
        self.done = (self.done + 1).min(self.total);
        if self.shown {
            // A line that cannot be drawn is no loss.
            let _ = write!(std::io::stderr(), "\r\x1b[K{}", line(self.done - 1, self.total, what));
        }
    }

    /// The run is over: the line goes.
    pub fn end(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

fn line(done: usize, total: usize, what: &str) -> String {
    let full = BAR_LEN * done / total;
    format!("[{}{}] {done}/{total} {what}", "#".repeat(full), ".".repeat(BAR_LEN - full))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_fills() {
        assert_eq!(line(1, 2, "x"), format!("[{}{}] 1/2 x", "#".repeat(15), ".".repeat(15)));
        assert!(
            line(0, 9, "x").starts_with("[.")
                && line(9, 9, "x").starts_with(&format!("[{}]", "#".repeat(30)))
        );
    }
}
