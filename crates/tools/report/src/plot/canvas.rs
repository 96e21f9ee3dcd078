//! The few shapes that pictures are made of.

use std::fmt::Write;

/// Text that stands in XML as it is meant.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Where a text stands in relation to its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

impl Anchor {
    const fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Middle => "middle",
            Self::End => "end",
        }
    }
}

/// A picture that is being drawn; lengths are pixels. Writing to a string cannot fail, here and below.
#[derive(Debug)]
pub(super) struct Canvas {
    svg: String,
}

impl Canvas {
    pub(super) fn new(width: f64, height: f64) -> Self {
        let mut svg = String::new();
        let _ = writeln!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"12\">"
        );
        let _ = writeln!(svg, "<rect width=\"{width:.0}\" height=\"{height:.0}\" fill=\"#ffffff\"/>");
        Self { svg }
    }

    pub(super) fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, bold: bool, text: &str) {
        let weight = if bold { " font-weight=\"bold\"" } else { "" };
        let (anchor, text) = (anchor.name(), escaped(text));
        let _ = writeln!(
            self.svg,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"{weight}>{text}</text>"
        );
    }

    /// A text in a colour, with its middle at the point.
    pub(super) fn inked(&mut self, (x, y): (f64, f64), colour: &str, text: &str) {
        let text = escaped(text);
        let _ = writeln!(
            self.svg,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" fill=\"{colour}\">{text}</text>"
        );
    }

    /// A text that is read from the bottom up, with its middle at the point.
    pub(super) fn upright(&mut self, (x, y): (f64, f64), text: &str) {
        let text = escaped(text);
        let _ = writeln!(
            self.svg,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 {x:.1} {y:.1})\">{text}</text>"
        );
    }

    /// A filled box; `title` is shown where the pointer is.
    pub(super) fn area(
        &mut self,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        colour: &str,
        title: &str,
    ) {
        let (width, height, title) = (width.max(0.0), height.max(0.0), escaped(title));
        let _ = writeln!(
            self.svg,
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{colour}\">\
             <title>{title}</title></rect>"
        );
    }

    pub(super) fn rule(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
        let _ = writeln!(
            self.svg,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
        );
    }

    pub(super) fn path(&mut self, points: &[(f64, f64)], colour: &str) {
        let points: Vec<_> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let points = points.join(" ");
        let _ = writeln!(
            self.svg,
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        );
    }

    /// A dot; `title` is shown where the pointer is.
    pub(super) fn dot(&mut self, (x, y): (f64, f64), colour: &str, title: &str) {
        let title = escaped(title);
        let _ = writeln!(
            self.svg,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"><title>{title}</title></circle>"
        );
    }

    pub(super) fn end(self) -> String {
        self.svg + "</svg>\n"
    }
}
