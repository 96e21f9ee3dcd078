//! Lines, or points, over an axis of numbers.

use super::axis::{Axis, number};
use super::canvas::{Anchor, Canvas};
use super::colour;

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// As the legend has it.
    pub name: String,
    /// Its points, by ascending x.
    pub points: Vec<(f64, f64)>,
}

/// A picture of some lines.
#[derive(Clone, Debug, PartialEq)]
pub struct Lines {
    /// What it shows.
    pub title: String,
    /// From left to right.
    pub x: Axis,
    /// From bottom to top.
    pub y: Axis,
    /// The lines, in the order of the legend.
    pub lines: Vec<Line>,
}

const LEFT: f64 = 70.0;
const TOP: f64 = 40.0;
const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 320.0;
const LEGEND: f64 = 220.0;

/// The same without the lines: points that belong to no sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Points(pub Lines);

impl Points {
    /// The picture.
    pub fn svg(&self) -> String {
        self.0.draw(false)
    }
}

impl Lines {
    /// The picture.
    pub fn svg(&self) -> String {
        self.draw(true)
    }

    fn draw(&self, joined: bool) -> String {
        let mut canvas = Canvas::new(LEFT + WIDTH + 20.0 + LEGEND, TOP + HEIGHT + 60.0);
        canvas.text((LEFT, 20.0), Anchor::Start, true, &self.title);
        let points = || self.lines.iter().flat_map(|line| line.points.iter().copied());
        let (across, up) =
            (self.x.range(points().map(|point| point.0)), self.y.range(points().map(|point| point.1)));
        let x = |value: f64| across.place(value).map(|place| LEFT + WIDTH * place);
        let y = |value: f64| up.place(value).map(|place| TOP + HEIGHT * (1.0 - place));
        for tick in up.ticks() {
            if let Some(at) = y(tick) {
                canvas.rule((LEFT, at), (LEFT + WIDTH, at), "#dddddd");
                canvas.text((LEFT - 6.0, at + 4.0), Anchor::End, false, &number(tick));
            }
        }
        for tick in across.ticks() {
            if let Some(at) = x(tick) {
                canvas.rule((at, TOP), (at, TOP + HEIGHT), "#eeeeee");
                canvas.text((at, TOP + HEIGHT + 18.0), Anchor::Middle, false, &number(tick));
            }
        }
        canvas.rule((LEFT, TOP + HEIGHT), (LEFT + WIDTH, TOP + HEIGHT), "#333333");
        canvas.rule((LEFT, TOP), (LEFT, TOP + HEIGHT), "#333333");
        canvas.text((LEFT + WIDTH / 2.0, TOP + HEIGHT + 42.0), Anchor::Middle, false, &self.x.title);
        canvas.upright((18.0, TOP + HEIGHT / 2.0), &self.y.title);
        for (index, line) in self.lines.iter().enumerate() {
            let places = |point: &(f64, f64)| Some((x(point.0)?, y(point.1)?));
            let drawn: Vec<_> = line.points.iter().filter_map(places).collect();
            if joined {
                canvas.path(&drawn, colour(index));
            }
            for point in &line.points {
                if let Some(place) = places(point) {
                    let title = format!("{}: {} at {}", line.name, number(point.1), number(point.0));
                    canvas.dot(place, colour(index), &title);
                }
            }
            let at = TOP + 8.0 + 18.0 * index as f64;
            canvas.area((LEFT + WIDTH + 20.0, at), (12.0, 12.0), colour(index), &line.name);
            canvas.text((LEFT + WIDTH + 38.0, at + 10.0), Anchor::Start, false, &line.name);
        }
        canvas.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::tests::assert_well_formed;

    #[test]
    fn every_point_that_has_a_place_is_drawn() {
        let line = |name: &str, points: &[(f64, f64)]| Line { name: name.into(), points: points.to_vec() };
        let lines = Lines {
            title: "a < b".into(),
            x: Axis::log("bytes"),
            y: Axis::linear("k/s"),
            lines: vec![
                line("one & two", &[(512.0, 10.0), (4096.0, 20.0), (1e6, f64::NAN)]),
                line("none", &[]),
                line("odd", &[(0.0, 5.0)]),
            ],
        };
        let svg = lines.svg();
        assert_well_formed(&svg);
        assert_eq!(svg.matches("<circle").count(), 2);
        assert_eq!(svg.matches("<polyline").count(), 3);
        assert_eq!(Points(lines.clone()).svg().matches("<circle").count(), 2);
        assert!(!Points(lines.clone()).svg().contains("<polyline"));
        assert!(svg.contains("one &amp; two") && svg.contains("a &lt; b") && svg.contains(">k/s<"));
        assert!(Lines { lines: Vec::new(), ..lines }.svg().ends_with("</svg>\n"));
    }
}
