//! Prometheus text, version 0.0.4: <https://prometheus.io/docs/instrumenting/exposition_formats/>.

use std::fmt::{Display, Write};

/// What a figure does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// Only grows, but for a new beginning.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts below limits.
    Histogram,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A text on its way.
#[derive(Debug, Default)]
pub(super) struct Text(String);

impl Text {
    /// Begins the figures of one name. All of them come behind it; a family without any is well-formed.
    pub(super) fn family<'a>(&'a mut self, name: &'a str, kind: Kind, help: &str) -> Family<'a> {
        put(&mut self.0, format_args!("# HELP {name} {help}\n# TYPE {name} {}\n", kind.name()));
        Family { text: &mut self.0, name }
    }

    pub(super) fn end(self) -> String {
        self.0
    }
}

/// Figures of one name.
#[derive(Debug)]
pub(super) struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
}

impl Family<'_> {
    /// One figure. `suffix` is what histograms append to the name.
    pub(super) fn value(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        put(self.text, format_args!("{}{suffix}", self.name));
        for (number, (name, value)) in labels.iter().enumerate() {
            self.text.push(if number == 0 { '{' } else { ',' });
            put(self.text, format_args!("{name}=\""));
            escape(self.text, value);
            self.text.push('"');
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        put(self.text, format_args!(" {value}\n"));
    }
}

fn put(text: &mut String, what: std::fmt::Arguments<'_>) {
    // A string takes everything.
    let _ = text.write_fmt(what);
}

/// A label's value: three characters have a backslash in front of them. Clients choose names of objects.
fn escape(text: &mut String, value: &str) {
    for character in value.chars() {
        match character {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            other => text.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_their_labels_and_names_cannot_break_out() {
        let mut text = Text::default();
        let mut family = text.family("tapio_sr_info", Kind::Gauge, "What an SR is called");
        family.value("", &[("sr", "1"), ("name", "a\"} 1\n\\b")], 1);
        text.family("tapio_empty", Kind::Counter, "Nothing");
        text.family("t", Kind::Histogram, "Times").value("_sum", &[], 0.25);
        let expected = "# HELP tapio_sr_info What an SR is called\n# TYPE tapio_sr_info gauge\n\
            tapio_sr_info{sr=\"1\",name=\"a\\\"} 1\\n\\\\b\"} 1\n\
            # HELP tapio_empty Nothing\n# TYPE tapio_empty counter\n\
            # HELP t Times\n# TYPE t histogram\nt_sum 0.25\n";
        assert_eq!(text.end(), expected);
    }
}
