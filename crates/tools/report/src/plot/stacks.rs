//! Bars made of parts, in groups that stand beside each other.

use super::axis::{Axis, number};
use super::canvas::{Anchor, Canvas};
use super::colour;

/// A bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// What stands below it.
    pub name: String,
    /// Its parts from the bottom up, one for each series; the last ones may be left out.
    pub parts: Vec<f64>,
}

/// Bars that belong together.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// What stands below them.
    pub name: String,
    /// The bars.
    pub bars: Vec<Bar>,
}

/// A picture of bars made of parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Stacks {
    /// What it shows.
    pub title: String,
    /// What the height of a bar is, with its unit.
    pub y: String,
    /// What the parts are, in the order of the bars' parts.
    pub series: Vec<String>,
    /// The bars, from left to right.
    pub groups: Vec<Group>,
    /// Every group has a scale of its own: its highest bar is as high as the picture. For groups whose bars differ by
    /// factors of ten.
    pub own_scales: bool,
}

const LEFT: f64 = 70.0;
const TOP: f64 = 40.0;
const HEIGHT: f64 = 340.0;
const BAR: f64 = 44.0;
const GAP: f64 = 8.0;
const BETWEEN: f64 = 34.0;
const LEGEND: f64 = 200.0;

fn sum(bar: &Bar) -> f64 {
    bar.parts.iter().filter(|part| part.is_finite() && **part > 0.0).sum()
}

impl Stacks {
    /// The picture.
    pub fn svg(&self) -> String {
        let width: f64 =
            self.groups.iter().map(|group| group.bars.len() as f64 * (BAR + GAP) + BETWEEN).sum();
        let right = LEFT + width.max(120.0);
        let height = TOP + HEIGHT + 64.0;
        let legend = TOP + 18.0 * self.series.len() as f64 + 20.0;
        let mut canvas = Canvas::new(right + LEGEND, height.max(legend));
        canvas.text((LEFT, 20.0), Anchor::Start, true, &self.title);
        canvas.upright((18.0, TOP + HEIGHT / 2.0), &self.y);
        let axis = Axis::linear("");
        let all = axis.range(self.groups.iter().flat_map(|group| group.bars.iter().map(sum)));
        if !self.own_scales {
            for tick in all.ticks() {
                let at = TOP + HEIGHT * (1.0 - all.place(tick).unwrap_or(0.0));
                canvas.rule((LEFT, at), (right, at), "#dddddd");
                canvas.text((LEFT - 6.0, at + 4.0), Anchor::End, false, &number(tick));
            }
        }
        canvas.rule((LEFT, TOP + HEIGHT), (right, TOP + HEIGHT), "#333333");
        let mut x = LEFT + BETWEEN / 2.0;
        for group in &self.groups {
            let own = axis.range(group.bars.iter().map(sum));
            let range = if self.own_scales { own } else { all };
            let begin = x;
            for bar in &group.bars {
                let mut done = 0.0;
                for (index, part) in bar.parts.iter().enumerate() {
                    if !part.is_finite() || *part <= 0.0 {
                        continue;
                    }
                    let place = |value: f64| TOP + HEIGHT * (1.0 - range.place(value).unwrap_or(0.0));
                    let (top, bottom) = (place(done + part), place(done));
                    let name = self.series.get(index).map_or("", String::as_str);
                    let title = format!("{} {}: {name} {}", group.name, bar.name, number(*part));
                    canvas.area((x, top), (BAR, bottom - top), colour(index), &title);
                    done += part;
                }
                let top = TOP + HEIGHT * (1.0 - range.place(done).unwrap_or(0.0));
                canvas.text((x + BAR / 2.0, top - 4.0), Anchor::Middle, false, &number(done));
                canvas.text((x + BAR / 2.0, TOP + HEIGHT + 16.0), Anchor::Middle, false, &bar.name);
                x += BAR + GAP;
            }
            canvas.text(((begin + x - GAP) / 2.0, TOP + HEIGHT + 36.0), Anchor::Middle, true, &group.name);
            x += BETWEEN;
        }
        for (index, name) in self.series.iter().enumerate() {
            let at = TOP + 18.0 * index as f64;
            canvas.area((right + 20.0, at), (12.0, 12.0), colour(index), name);
            canvas.text((right + 38.0, at + 10.0), Anchor::Start, false, name);
        }
        canvas.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::tests::assert_well_formed;

    #[test]
    fn parts_are_as_high_as_they_are_large() {
        let bar = |parts: &[f64]| Bar { name: "traced".into(), parts: parts.to_vec() };
        let stacks = Stacks {
            title: "t".into(),
            y: "us".into(),
            series: vec!["a".into(), "b".into()],
            groups: vec![
                Group { name: "4 KiB".into(), bars: vec![bar(&[25.0, 75.0]), bar(&[50.0])] },
                Group { name: "1 MiB".into(), bars: vec![bar(&[1.0, f64::NAN, 0.0])] },
            ],
            own_scales: false,
        };
        let svg = stacks.svg();
        assert_well_formed(&svg);
        assert!(svg.contains(&format!("height=\"{:.2}\"", HEIGHT * 0.25)), "{svg}");
        assert!(svg.contains(&format!("height=\"{:.2}\"", HEIGHT * 0.75)), "{svg}");
        assert!(svg.contains("4 KiB traced: b 75"));
        // Two entries of the legend, and four parts that are more than nothing.
        assert_eq!(svg.matches("<title>").count(), 6);
        let own = Stacks { own_scales: true, ..stacks }.svg();
        assert_well_formed(&own);
        assert!(
            own.contains(&format!("height=\"{HEIGHT:.2}\"")),
            "the lone bar of its group is as high as it can be"
        );
    }
}
