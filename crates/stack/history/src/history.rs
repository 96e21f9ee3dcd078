//! What is recorded of one object.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::archive::Archive;
use crate::function::Consolidation;
use crate::layout::{HEARTBEAT_S, Layout, Span};
use crate::source::{Moment, Reading, Source, Step};

/// A source with its archives.
#[derive(Clone, Debug)]
pub(crate) struct Column {
    pub(crate) source: Source,
    pub(crate) step: Step,
    /// In the order of [`Layout::archives`].
    pub(crate) archives: Vec<Archive>,
}

/// One value at the time of an update.
#[derive(Clone, Debug)]
pub struct Sample {
    /// What is measured.
    pub source: Source,
    /// The value: of a gauge the figure, of a counter its state, else the amount since the last sample. NaN: unknown.
    pub value: f64,
    /// The counter began again since the last sample, so nothing is known of the time between them: what counts is
    /// another process than before.
    pub begins: bool,
}

/// Why an update changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateError {
    /// Its time is not behind that of the last one.
    NotLater,
}

impl fmt::Display for UpdateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLater => f.write_str("the time is not behind that of the last sample"),
        }
    }
}

impl std::error::Error for UpdateError {}

/// Most sources of a history: far more than the disks of a VM have.
pub(crate) const SOURCES_MAX: usize = 16_384;

/// What is recorded of one object.
#[derive(Clone, Debug)]
pub struct History {
    layout: Layout,
    /// Milliseconds since 1970 of the last update.
    pub(crate) updated_ms: u64,
    pub(crate) columns: Vec<Column>,
    index: HashMap<String, usize>,
    /// Sources that are not recorded.
    pub(crate) forgotten: BTreeMap<String, Source>,
}

impl History {
    /// Nothing is known before `now_ms` (milliseconds since 1970).
    pub fn new(layout: Layout, now_ms: u64) -> Self {
        Self {
            layout,
            updated_ms: now_ms,
            columns: Vec::new(),
            index: HashMap::new(),
            forgotten: BTreeMap::new(),
        }
    }

    /// Step, spans and functions.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Milliseconds since 1970 of the last update.
    pub fn updated_ms(&self) -> u64 {
        self.updated_ms
    }

    /// Sources that are recorded, in the order of their first sample.
    pub fn sources(&self) -> impl Iterator<Item = &Source> {
        self.columns.iter().map(|column| &column.source)
    }

    /// Sources that are not recorded, because they were forgotten.
    pub fn forgotten(&self) -> impl Iterator<Item = &Source> {
        self.forgotten.values()
    }

    /// Sources that are recorded.
    pub fn count(&self) -> usize {
        self.columns.len()
    }

    fn step_ms(&self) -> u64 {
        u64::from(self.layout.step_s()) * 1000
    }

    /// The whole steps since 1970 at the last update.
    pub(crate) fn steps_done(&self) -> u64 {
        self.updated_ms / self.step_ms()
    }

    /// Records the values of one moment, in milliseconds since 1970. A source that is not known yet is made; one that
    /// has no value is unknown. Names that were forgotten are left out.
    ///
    /// # Errors
    /// The time is not behind that of the last update; see [`Self::set_back`].
    pub fn update(&mut self, now_ms: u64, samples: &[Sample]) -> Result<(), UpdateError> {
        if now_ms <= self.updated_ms {
            return Err(UpdateError::NotLater);
        }
        for sample in samples {
            self.make_source(&sample.source);
        }
        let step_ms = self.step_ms();
        let (before, after) = (self.updated_ms / step_ms, now_ms / step_ms);
        let seconds = |ms: u64| ms as f64 / 1000.0;
        let steps = after - before;
        let after_ms = if steps == 0 { 0 } else { now_ms % step_ms };
        let moment = Moment {
            interval_s: seconds(now_ms - self.updated_ms),
            before_s: seconds(now_ms - self.updated_ms - after_ms),
            after_s: seconds(after_ms),
            steps,
            step_s: f64::from(self.layout.step_s()),
            heartbeat_s: f64::from(HEARTBEAT_S),
        };
        let mut values = vec![Reading::NONE; self.columns.len()];
        for sample in samples {
            if let Some(at) = self.index.get(sample.source.name.as_ref()) {
                values[*at] = Reading { value: sample.value, begins: sample.begins };
            }
        }
        let archives: Vec<(Consolidation, Span)> = self.layout.archives().collect();
        for (column, value) in self.columns.iter_mut().zip(values) {
            let Some(ended) = column.step.take(&column.source, value, &moment) else { continue };
            for (archive, (function, span)) in column.archives.iter_mut().zip(&archives) {
                archive.take(*function, *span, ended, before % u64::from(span.steps));
            }
        }
        self.updated_ms = now_ms;
        Ok(())
    }

    /// The clock was set back: goes on from `now_ms`. What was recorded keeps its distance from the last update.
    pub fn set_back(&mut self, now_ms: u64) {
        let passed_s = (now_ms % self.step_ms()) as f64 / 1000.0;
        self.updated_ms = now_ms;
        let spans: Vec<(Consolidation, Span)> = self.layout.archives().collect();
        let done = self.steps_done();
        for column in &mut self.columns {
            column.step = Step::unknown(passed_s);
            for (archive, (function, span)) in column.archives.iter_mut().zip(&spans) {
                let rows = std::mem::take(&mut archive.rows);
                *archive = Archive::new(*function, done % u64::from(span.steps));
                archive.rows = rows;
            }
        }
    }

    fn make_source(&mut self, source: &Source) {
        if let Some(at) = self.index.get(source.name.as_ref()) {
            // Texts for people may change with the version; the kind of a name does not.
            let known = &mut self.columns[*at].source;
            if known != source && known.kind == source.kind {
                *known = source.clone();
            }
            return;
        }
        if self.columns.len() >= SOURCES_MAX || self.forgotten.contains_key(source.name.as_ref()) {
            return;
        }
        let passed_s = (self.updated_ms % self.step_ms()) as f64 / 1000.0;
        let done = self.steps_done();
        let archives = self.layout.archives();
        let archives = archives.map(|(function, span)| Archive::new(function, done % u64::from(span.steps)));
        let column =
            Column { source: source.clone(), step: Step::unknown(passed_s), archives: archives.collect() };
        self.push(column);
    }

    /// Adds a column as it was read.
    pub(crate) fn push(&mut self, column: Column) {
        self.index.insert(column.source.name.clone().into_owned(), self.columns.len());
        self.columns.push(column);
    }

    /// Whether a source of this name is recorded.
    pub fn has(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    /// Removes a source with its archives, and records it no more. Answers whether it was recorded.
    pub fn forget(&mut self, name: &str) -> bool {
        let Some(column) = self.column(name) else { return false };
        let source = column.source.clone();
        self.remove(&|source| source == name);
        if self.forgotten.len() < SOURCES_MAX {
            self.forgotten.insert(name.to_owned(), source);
        }
        true
    }

    /// Records a source that was forgotten, from its next sample on. Answers whether it was forgotten.
    pub fn record(&mut self, name: &str) -> bool {
        self.forgotten.remove(name).is_some()
    }

    /// Removes the sources whose names fit.
    pub fn remove(&mut self, fits: &dyn Fn(&str) -> bool) {
        self.columns.retain(|column| !fits(&column.source.name));
        let names = self.columns.iter().map(|column| column.source.name.clone().into_owned());
        self.index = names.zip(0..).collect();
    }

    fn column(&self, name: &str) -> Option<&Column> {
        self.columns.get(*self.index.get(name)?)
    }

    /// The rate, or the figure of a gauge, of the last whole step; NaN if it is not known. None: not recorded.
    pub fn current(&self, name: &str) -> Option<f64> {
        self.column(name).map(|column| column.archives.first().map_or(f64::NAN, |archive| archive.row(0)))
    }

    /// The last value that was sampled of a source.
    pub fn last(&self, name: &str) -> Option<f64> {
        self.column(name).map(|column| column.step.last)
    }

    /// The mean of a source over its last seconds, of what is known: of the last step at least, and by the shortest
    /// rows that go back so far. NaN: nothing is known.
    pub fn mean(&self, name: &str, seconds: u32) -> f64 {
        let step_s = self.layout.step_s();
        let covers = |span: &&Span| {
            u64::from(span.steps) * u64::from(span.rows) * u64::from(step_s) >= u64::from(seconds)
        };
        let spans = self.layout.spans();
        let Some(span) = spans.iter().find(covers).or_else(|| spans.last()) else { return f64::NAN };
        let rows = u64::from((seconds / (span.steps * step_s)).clamp(1, span.rows));
        let rows = (0..rows).map(|age| self.row(name, Consolidation::Average, *span, age));
        let known: Vec<f64> = rows.filter(|row| !row.is_nan()).collect();
        known.iter().sum::<f64>() / known.len() as f64
    }

    /// Seconds since 1970 at which the newest row of a span ended, and seconds between rows.
    pub fn newest(&self, span: Span) -> (u64, u64) {
        let row_s = u64::from(self.layout.step_s()) * u64::from(span.steps);
        (self.steps_done() / u64::from(span.steps) * row_s, row_s)
    }

    /// The row of a source that is so many rows old (0: the newest); NaN if it is not known.
    pub fn row(&self, name: &str, function: Consolidation, span: Span, age: u64) -> f64 {
        let found = self.place(function, span).and_then(|at| self.column(name)?.archives.get(at));
        found.map_or(f64::NAN, |archive| archive.row(age))
    }

    /// Where the archives of a function and a span are. Every function of one step is that step.
    fn place(&self, function: Consolidation, span: Span) -> Option<usize> {
        let at = |function| self.layout.archives().position(|archive| archive == (function, span));
        let same = || (span.steps == 1).then(|| at(Consolidation::Average)).flatten();
        at(function).or_else(same)
    }

    /// Each source with its rows of one function and span, of these ages, the newest first. Unknown rows are NaN.
    pub(crate) fn excerpt(
        &self,
        (function, span): (Consolidation, Span),
        ages: &dyn Fn(usize) -> Option<u64>,
        rows: usize,
    ) -> Vec<(String, Vec<f32>)> {
        let Some(at) = self.place(function, span) else { return Vec::new() };
        let of = |column: &Column| {
            let row = |row| ages(row).map_or(f32::NAN, |age| column.archives[at].row(age) as f32);
            (column.source.name.clone().into_owned(), (0..rows).map(row).collect())
        };
        self.columns.iter().map(of).collect()
    }

    /// Figures of all archives: what a dump has, and what its length is in proportion to.
    pub fn figures(&self) -> usize {
        let rows = self.layout.archives().map(|(_, span)| span.rows as usize);
        self.columns.len().saturating_mul(rows.sum())
    }

    /// Bytes that this history holds, about.
    pub fn held_len(&self) -> usize {
        let archives = |column: &Column| {
            let rows: usize = column.archives.iter().map(|archive| archive.rows.capacity() * 4).sum();
            rows + column.archives.capacity() * size_of::<Archive>() + 2 * column.source.name.len()
        };
        let columns = self.columns.iter().map(|column| archives(column) + 64);
        size_of::<Self>() + columns.sum::<usize>() + self.columns.capacity() * size_of::<Column>()
    }
}
