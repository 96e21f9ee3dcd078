//! Rows of several histories since a time: what clients of XenServer read every few seconds.

use std::fmt::Write;

use quick_xml::escape::escape;

use crate::archive::Consolidation;
use crate::history::History;
use crate::json::{number, text};
use crate::layout::Span;

/// Which rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Rows that end behind it, in seconds since 1970; below 0: so long ago.
    pub start_s: i64,
    /// Seconds of a row, at least.
    pub interval_s: u64,
    /// One function; all where none is named.
    pub function: Option<Consolidation>,
}

/// The sources of one history, under a name.
#[derive(Debug)]
pub struct Member<'a> {
    /// As `vm:UUID`.
    pub name: String,
    /// What is recorded.
    pub history: &'a History,
}

/// Rows of several histories.
#[derive(Debug)]
pub struct Updates<'a> {
    /// Seconds since 1970 of the oldest row and the newest; equal if there is none, too.
    pub(crate) start_s: u64,
    pub(crate) end_s: u64,
    pub(crate) step_s: u64,
    pub(crate) rows: u64,
    columns: Vec<Column<'a>>,
}

#[derive(Debug)]
struct Column<'a> {
    name: String,
    member: &'a History,
    source: &'a str,
    function: Consolidation,
    span: Span,
}

impl Column<'_> {
    fn value(&self, end_s: u64) -> f64 {
        let (newest_s, row_s) = self.member.newest(self.span);
        let age = newest_s.checked_sub(end_s).map(|older_s| older_s / row_s);
        age.map_or(f64::NAN, |age| self.member.row(self.source, self.function, self.span, age))
    }
}

/// The shortest rows that are long enough and go back far enough; otherwise the longest.
fn span_for(history: &History, start_s: u64, interval_s: u64) -> Span {
    let fits = |span: &&Span| {
        let (newest_s, row_s) = history.newest(**span);
        row_s >= interval_s && newest_s.saturating_sub(u64::from(span.rows) * row_s) <= start_s
    };
    let spans = history.layout().spans();
    spans.iter().find(fits).or(spans.last()).copied().unwrap_or(Span { steps: 1, rows: 0 })
}

impl<'a> Updates<'a> {
    /// Chooses rows. Histories have one layout; rows of a history that lags behind the others are unknown.
    pub fn of(members: &[Member<'a>], request: Request) -> Self {
        let Some(newest) = members.iter().max_by_key(|member| member.history.updated_ms()) else {
            return Self { start_s: 0, end_s: 0, step_s: 0, rows: 0, columns: Vec::new() };
        };
        let now_s = newest.history.updated_ms() / 1000;
        let start_s = match u64::try_from(request.start_s) {
            Ok(start_s) => start_s,
            Err(_) => now_s.saturating_sub(request.start_s.unsigned_abs()),
        };
        let span = span_for(newest.history, start_s, request.interval_s);
        let (end_s, step_s) = newest.history.newest(span);
        let rows = (end_s / step_s).saturating_sub(start_s / step_s).min(u64::from(span.rows));
        let start_s = end_s - rows.saturating_sub(1) * step_s;
        let mut columns = Vec::new();
        for member in members {
            for function in member.history.layout().functions() {
                if request.function.is_some_and(|wanted| wanted != *function) {
                    continue;
                }
                columns.extend(member.history.sources().map(|source| Column {
                    name: format!("{}:{}:{}", function.name(), member.name, source.name),
                    member: member.history,
                    source: &source.name,
                    function: *function,
                    span,
                }));
            }
        }
        Self { start_s, end_s, step_s, rows, columns }
    }

    /// Ends of rows, the newest first.
    fn ends(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.rows).map(|age| self.end_s - age * self.step_s)
    }

    /// As XML: `xport` with `meta` and `data`.
    pub fn xml(&self) -> String {
        let mut xml = String::from("<xport><meta>");
        let meta = [
            ("start", self.start_s),
            ("step", self.step_s),
            ("end", self.end_s),
            ("rows", self.rows),
            ("columns", self.columns.len() as u64),
        ];
        for (name, value) in meta {
            put(&mut xml, format_args!("<{name}>{value}</{name}>"));
        }
        xml.push_str("<legend>");
        for column in &self.columns {
            put(&mut xml, format_args!("<entry>{}</entry>", escape(column.name.as_str())));
        }
        xml.push_str("</legend></meta><data>");
        for end_s in self.ends() {
            put(&mut xml, format_args!("<row><t>{end_s}</t>"));
            for column in &self.columns {
                // Short: what is stored has the precision of 4 bytes.
                put(&mut xml, format_args!("<v>{}</v>", Short(column.value(end_s))));
            }
            xml.push_str("</row>");
        }
        xml.push_str("</data></xport>\n");
        xml
    }

    /// As JSON with the same members; what is unknown is the text `NaN`.
    pub fn json(&self) -> String {
        let mut json = String::new();
        put(
            &mut json,
            format_args!(
                "{{\"meta\":{{\"start\":{},\"step\":{},\"end\":{},\"rows\":{},\"columns\":{},\"legend\":[",
                self.start_s,
                self.step_s,
                self.end_s,
                self.rows,
                self.columns.len()
            ),
        );
        let comma = |at: usize| if at == 0 { "" } else { "," };
        for (at, column) in self.columns.iter().enumerate() {
            put(&mut json, format_args!("{}{}", comma(at), text(&column.name)));
        }
        json.push_str("]},\"data\":[");
        for (row, end_s) in self.ends().enumerate() {
            put(&mut json, format_args!("{}{{\"t\":{end_s},\"values\":[", comma(row)));
            for (at, column) in self.columns.iter().enumerate() {
                put(&mut json, format_args!("{}{}", comma(at), number(column.value(end_s))));
            }
            json.push_str("]}");
        }
        json.push_str("]}\n");
        json
    }
}

/// A figure of 4 bytes, in as few characters as it needs.
pub(crate) struct Short(pub(crate) f64);

impl std::fmt::Display for Short {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let short = self.0 as f32;
        match self.0 {
            value if value.is_nan() => f.write_str("NaN"),
            value if value == f64::INFINITY => f.write_str("Infinity"),
            value if value == f64::NEG_INFINITY => f.write_str("-Infinity"),
            _ if short != 0.0 && !(1e-4..1e15).contains(&short.abs()) => write!(f, "{short:e}"),
            _ => write!(f, "{short}"),
        }
    }
}

fn put(text: &mut String, what: std::fmt::Arguments<'_>) {
    // A string takes everything.
    let _ = text.write_fmt(what);
}
