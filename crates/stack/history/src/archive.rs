//! Rows of one source, consolidated by one function.

use std::collections::VecDeque;

use crate::function::Consolidation;
use crate::layout::{Span, XFF};
use crate::source::Ended;

/// Places that are made at a time: a young history is small.
const GROWTH: usize = 16;

/// Rows of one source by one function.
#[derive(Clone, Debug)]
pub(crate) struct Archive {
    /// Of the row that has begun.
    pub(crate) value: f64,
    /// Steps of the row that has begun of which nothing is known.
    pub(crate) unknown: u64,
    /// The newest last. Rows before the first were never known.
    pub(crate) rows: VecDeque<f32>,
}

impl Archive {
    /// Of a source of which nothing was known in the `passed` steps of the row that has begun.
    pub(crate) fn new(function: Consolidation, passed: u64) -> Self {
        Self { value: function.first(), unknown: passed, rows: VecDeque::new() }
    }

    /// Takes steps that ended; `passed` steps of the row had ended before.
    pub(crate) fn take(&mut self, function: Consolidation, span: Span, ended: Ended, passed: u64) {
        let steps = u64::from(span.steps);
        let is_unknown = ended.rate.is_nan();
        // Those that complete the row that has begun.
        let first = steps - passed;
        if ended.steps < first {
            self.value = function.with(self.value, ended.rate, ended.steps);
            self.unknown += if is_unknown { ended.steps } else { 0 };
            return;
        }
        let unknown = self.unknown + if is_unknown { first } else { 0 };
        let sum = function.with(self.value, ended.rate, first);
        let row = match function {
            _ if unknown == steps || unknown as f64 > steps as f64 * XFF => f64::NAN,
            Consolidation::Average => sum / (steps - unknown) as f64,
            Consolidation::Min | Consolidation::Max => sum,
            // As in rrdtool: unknown if the last step is.
            Consolidation::Last => ended.rate,
        };
        let whole = (ended.steps - first) / steps;
        let rest = (ended.steps - first) % steps;
        self.push(span, row);
        for _ in 0..whole.min(u64::from(span.rows)) {
            self.push(span, ended.rate);
        }
        self.value = function.with(function.first(), ended.rate, rest);
        self.unknown = if is_unknown { rest } else { 0 };
    }

    fn push(&mut self, span: Span, row: f64) {
        let max = span.rows as usize;
        while self.rows.len() >= max {
            self.rows.pop_front();
        }
        if self.rows.len() == self.rows.capacity() {
            self.rows.reserve_exact(GROWTH.min(max - self.rows.len()));
        }
        self.rows.push_back(row as f32);
    }

    /// The row of this age; 0 is the newest.
    pub(crate) fn row(&self, age: u64) -> f64 {
        let at = usize::try_from(age).ok().and_then(|age| self.rows.len().checked_sub(age + 1));
        at.and_then(|at| self.rows.get(at)).map_or(f64::NAN, |row| f64::from(*row))
    }
}
