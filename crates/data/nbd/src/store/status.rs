//! What is known of where an export has data: the answer to the last question about it.

use tapio_types::Span;

/// Extents that are remembered; what a server says beyond is asked for again.
const EXTENTS_MAX: usize = 4096;

/// The last answer to BLOCK_STATUS.
#[derive(Debug, Default)]
pub struct Status {
    start: u64,
    end: u64,
    /// Ends of extents, and whether they have data; in order.
    extents: Vec<(u64, bool)>,
    /// There is no room for more of the answer.
    full: bool,
    /// A question is in flight.
    pub busy: bool,
    /// The server has no answers.
    pub useless: bool,
}

impl Status {
    /// A question from `start` on: forgets what was known.
    pub fn begin(&mut self, start: u64) {
        (self.start, self.end, self.full, self.busy) = (start, start, false, true);
        self.extents.clear();
    }

    /// One extent of the answer.
    pub fn add(&mut self, len: u64, has_data: bool) {
        let end = self.end.saturating_add(len);
        if self.full {
            return;
        }
        let room = self.extents.len() < EXTENTS_MAX;
        match self.extents.last_mut() {
            Some(last) if last.1 == has_data => last.0 = end,
            _ if room => self.extents.push((end, has_data)),
            _ => {
                // What follows has lost its place.
                self.full = true;
                return;
            }
        }
        self.end = end;
    }

    /// Something was written: what is known may be wrong.
    pub fn forget(&mut self) {
        if !self.busy {
            self.extents.clear();
            self.end = self.start;
        }
    }

    /// How much from the beginning of `span` is alike, and whether it is data.
    pub fn run(&self, span: Span) -> Option<(u64, bool)> {
        if span.is_empty() || span.start < self.start || span.start >= self.end {
            return None;
        }
        let index = self.extents.partition_point(|(end, _)| *end <= span.start);
        let (end, has_data) = *self.extents.get(index)?;
        Some((span.len.min(end - span.start), has_data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_merged_and_forgotten() {
        let mut status = Status::default();
        assert_eq!(status.run(Span::new(0, 1)), None);
        status.begin(100);
        for (len, has_data) in [(10, true), (5, true), (20, false), (u64::MAX, true)] {
            status.add(len, has_data);
        }
        status.busy = false;
        assert_eq!(status.run(Span::new(99, 1)), None);
        assert_eq!(status.run(Span::new(100, 99)), Some((15, true)));
        assert_eq!(status.run(Span::new(114, 99)), Some((1, true)));
        assert_eq!(status.run(Span::new(115, 3)), Some((3, false)));
        assert_eq!(status.run(Span::new(200, 3)), Some((3, true)));
        status.forget();
        assert_eq!(status.run(Span::new(100, 99)), None);
    }

    #[test]
    fn an_answer_without_end_is_cut() {
        let mut status = Status::default();
        status.begin(0);
        for index in 0..3 * EXTENTS_MAX as u64 {
            status.add(1, index % 2 == 0);
        }
        assert_eq!(status.run(Span::new(EXTENTS_MAX as u64 - 1, 9)), Some((1, false)));
        assert_eq!(status.run(Span::new(EXTENTS_MAX as u64, 9)), None);
    }
}
