//! Which archives a history has.

use crate::function::Consolidation;

/// Longest time between two samples, in seconds; what lies between samples that are further apart is unknown.
pub const HEARTBEAT_S: u32 = 300;

/// The share of a row's steps that may be unknown.
pub const XFF: f64 = 0.5;

/// Longest step, in seconds.
const STEP_MAX: u32 = 60;

/// Rows of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Steps that one row covers.
    pub steps: u32,
    /// Rows that are kept.
    pub rows: u32,
}

/// Step, spans and consolidation functions: the same for all sources of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    step_s: u32,
    functions: Vec<Consolidation>,
    spans: Vec<Span>,
}

impl Layout {
    /// XenServer's: 10 minutes by steps (of 5 s), 2 hours by minutes, a week by hours, a year by days. `step_s` divides
    /// a minute, or the next divisor below it counts. `has_all`: rows of all functions are kept, not means alone.
    pub fn new(step_s: u32, has_all: bool) -> Self {
        let mut step_s = step_s.clamp(1, STEP_MAX);
        while !60_u32.is_multiple_of(step_s) {
            step_s -= 1;
        }
        let functions: &[Consolidation] = match has_all {
            true => &Consolidation::ALL,
            false => &[Consolidation::Average],
        };
        let spans = [(step_s, 120), (60, 120), (3600, 168), (86_400, 366)];
        let spans = spans.map(|(seconds, rows)| Span { steps: seconds / step_s, rows });
        Self { step_s, functions: functions.to_vec(), spans: spans.to_vec() }
    }

    /// Seconds of a step.
    pub fn step_s(&self) -> u32 {
        self.step_s
    }

    /// Consolidation functions, each of which has all spans.
    pub fn functions(&self) -> &[Consolidation] {
        &self.functions
    }

    /// From the shortest rows to the longest.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Archives of a source: function and span, the functions of one span behind each other.
    pub fn archives(&self) -> impl Iterator<Item = (Consolidation, Span)> + '_ {
        self.spans.iter().flat_map(|span| self.functions.iter().map(|function| (*function, *span)))
    }

    /// Bytes that the rows of one source take at most.
    pub fn source_len_max(&self) -> usize {
        self.archives().map(|(_, span)| span.rows as usize * size_of::<f32>()).sum()
    }
}
