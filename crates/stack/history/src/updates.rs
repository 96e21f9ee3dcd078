//! Rows of several histories since a time: what clients of XenServer read every few seconds.
//!
//! A [`Frame`] is chosen once for all histories. Each history is then looked at alone, for as long as it takes to copy
//! its rows ([`Updates::add`]), and the text is made of the copies.

use std::fmt::Write;

use quick_xml::escape::escape;

use crate::figure::{Short, comma, number, text};
use crate::function::Consolidation;
use crate::history::History;
use crate::layout::{Layout, Span};

/// Most figures of an answer. Rows that go beyond are left out, the oldest first.
pub const FIGURES_MAX: usize = 500_000;

/// Which rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Rows that end behind it, in seconds since 1970; below 0: so long ago.
    pub start_s: i64,
    /// Seconds of a row, at least.
    pub interval_s: u64,
    /// One function; all that a history has where none is named.
    pub function: Option<Consolidation>,
}

/// Rows that an answer has, of every column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    function: Option<Consolidation>,
    span: Span,
    /// Seconds since 1970 of the oldest row and the newest; equal if there is none, too.
    start_s: u64,
    end_s: u64,
    step_s: u64,
    rows: u64,
}

/// The shortest rows that are long enough and go back far enough; otherwise the longest. With them the time at which
/// the newest ended, and the seconds of one.
fn span_for(layout: &Layout, now_s: u64, start_s: u64, interval_s: u64) -> (Span, u64, u64) {
    let of = |span: &Span| {
        let row_s = u64::from(layout.step_s()) * u64::from(span.steps);
        (*span, now_s / row_s * row_s, row_s)
    };
    let fits = |(span, newest_s, row_s): &(Span, u64, u64)| {
        *row_s >= interval_s && newest_s.saturating_sub(u64::from(span.rows) * row_s) <= start_s
    };
    let spans = layout.spans();
    let found = spans.iter().map(of).find(fits).or_else(|| spans.last().map(of));
    found.unwrap_or((Span { steps: 1, rows: 0 }, now_s, 1))
}

impl Frame {
    /// For histories of which the last was updated `now_ms` milliseconds after 1970, and that have so many columns.
    pub fn of(request: Request, layout: &Layout, now_ms: u64, columns: usize) -> Self {
        let now_s = now_ms / 1000;
        let start_s = match u64::try_from(request.start_s) {
            Ok(start_s) => start_s,
            Err(_) => now_s.saturating_sub(request.start_s.unsigned_abs()),
        };
        let (span, end_s, step_s) = span_for(layout, now_s, start_s, request.interval_s);
        let room = FIGURES_MAX / columns.max(1);
        let rows = (end_s / step_s).saturating_sub(start_s / step_s);
        let rows = rows.min(u64::from(span.rows)).min(room as u64).min(end_s / step_s);
        let start_s = end_s - rows.saturating_sub(1) * step_s;
        Self { function: request.function, span, start_s, end_s, step_s, rows }
    }

    /// Ends of rows, the newest first.
    fn ends(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.rows).map(|age| self.end_s - age * self.step_s)
    }

    /// Functions of which a history has rows of this length. Means of one step are its least and greatest too.
    fn functions(&self, history: &History) -> Vec<Consolidation> {
        let has = history.layout().functions();
        match self.function {
            None => has.to_vec(),
            Some(wanted) if has.contains(&wanted) || self.span.steps == 1 => vec![wanted],
            Some(_) => Vec::new(),
        }
    }
}

/// Rows of several histories.
#[derive(Debug)]
pub struct Updates {
    frame: Frame,
    columns: Vec<(String, Vec<f32>)>,
}

impl Updates {
    /// None yet.
    pub fn new(frame: Frame) -> Self {
        Self { frame, columns: Vec::new() }
    }

    /// Copies the rows of one history, under a name as `vm:UUID`. Rows of one that lags behind the others are unknown.
    pub fn add(&mut self, name: &str, history: &History) {
        let (newest_s, row_s) = history.newest(self.frame.span);
        let (end_s, step_s) = (self.frame.end_s, self.frame.step_s);
        let age = |row: usize| {
            let end_s = end_s - row as u64 * step_s;
            newest_s.checked_sub(end_s).map(|older_s| older_s / row_s)
        };
        for function in self.frame.functions(history) {
            let rows = history.excerpt((function, self.frame.span), &age, self.frame.rows as usize);
            let named =
                rows.into_iter().map(|(source, rows)| (format!("{}:{name}:{source}", function.name()), rows));
            self.columns.extend(named);
        }
    }

    /// As XML: `xport` with `meta` and `data`.
    pub fn xml(&self) -> String {
        let mut xml = String::from("<xport><meta>");
        let frame = &self.frame;
        let meta = [
            ("start", frame.start_s),
            ("step", frame.step_s),
            ("end", frame.end_s),
            ("rows", frame.rows),
            ("columns", self.columns.len() as u64),
        ];
        for (name, value) in meta {
            put(&mut xml, format_args!("<{name}>{value}</{name}>"));
        }
        xml.push_str("<legend>");
        for (name, _) in &self.columns {
            put(&mut xml, format_args!("<entry>{}</entry>", escape(name.as_str())));
        }
        xml.push_str("</legend></meta><data>");
        for (row, end_s) in frame.ends().enumerate() {
            put(&mut xml, format_args!("<row><t>{end_s}</t>"));
            for (_, values) in &self.columns {
                put(&mut xml, format_args!("<v>{}</v>", Short(f64::from(values[row]))));
            }
            xml.push_str("</row>");
        }
        xml.push_str("</data></xport>\n");
        xml
    }

    /// As JSON with the same members; what is unknown is the text `NaN`.
    pub fn json(&self) -> String {
        let mut json = String::new();
        let frame = &self.frame;
        put(
            &mut json,
            format_args!(
                "{{\"meta\":{{\"start\":{},\"step\":{},\"end\":{},\"rows\":{},\"columns\":{},\"legend\":[",
                frame.start_s,
                frame.step_s,
                frame.end_s,
                frame.rows,
                self.columns.len()
            ),
        );
        for (at, (name, _)) in self.columns.iter().enumerate() {
            put(&mut json, format_args!("{}{}", comma(at), text(name)));
        }
        json.push_str("]},\"data\":[");
        for (row, end_s) in frame.ends().enumerate() {
            put(&mut json, format_args!("{}{{\"t\":{end_s},\"values\":[", comma(row)));
            for (at, (_, values)) in self.columns.iter().enumerate() {
                put(&mut json, format_args!("{}{}", comma(at), number(f64::from(values[row]))));
            }
            json.push_str("]}");
        }
        json.push_str("]}\n");
        json
    }
}

fn put(text: &mut String, what: std::fmt::Arguments<'_>) {
    // A string takes everything.
    let _ = text.write_fmt(what);
}
