//! A table of numbers as colours: darker is more.

use super::axis::number;
use super::canvas::{Anchor, Canvas};

/// A picture of a table whose cells are coloured by their values.
#[derive(Clone, Debug, PartialEq)]
pub struct Heat {
    /// What it shows.
    pub title: String,
    /// What the columns are.
    pub x: String,
    /// What the rows are.
    pub y: String,
    /// What a value is, with its unit.
    pub value: String,
    /// Names of the columns, from left to right.
    pub columns: Vec<String>,
    /// Rows from top to bottom: a name, and a value for each column. `None` was not measured.
    pub rows: Vec<(String, Vec<Option<f64>>)>,
}

const LEFT: f64 = 90.0;
const TOP: f64 = 40.0;
const CELL: (f64, f64) = (58.0, 26.0);
/// Steps of the key.
const STEPS: usize = 5;

/// From a value's place between the least and the greatest, 0 to 1, to a colour. Lightness falls all the way, so it
/// reads in grey too.
fn shade(place: f64) -> String {
    let stops = [(247.0, 251.0, 255.0), (158.0, 202.0, 225.0), (49.0, 130.0, 189.0), (8.0, 48.0, 107.0)];
    let place = place.clamp(0.0, 1.0) * (stops.len() - 1) as f64;
    let index = (place as usize).min(stops.len() - 2);
    let (from, to, part) = (stops[index], stops[index + 1], place - index as f64);
    let mix = |from: f64, to: f64| (from + (to - from) * part).round() as u8;
    format!("#{:02x}{:02x}{:02x}", mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}

impl Heat {
    /// The picture.
    pub fn svg(&self) -> String {
        let values = || self.rows.iter().flat_map(|row| row.1.iter().flatten()).filter(|v| v.is_finite());
        let low = values().copied().fold(f64::INFINITY, f64::min);
        let high = values().copied().fold(f64::NEG_INFINITY, f64::max);
        let place = |value: f64| if high > low { (value - low) / (high - low) } else { 1.0 };
        let right = LEFT + CELL.0 * self.columns.len().max(4) as f64;
        let bottom = TOP + CELL.1 * self.rows.len() as f64;
        let key_height = TOP + 20.0 * (STEPS + 1) as f64 + 20.0;
        let mut canvas = Canvas::new(right + 190.0, (bottom + 60.0).max(key_height));
        canvas.text((LEFT, 20.0), Anchor::Start, true, &self.title);
        for (row, (name, cells)) in self.rows.iter().enumerate() {
            let y = TOP + CELL.1 * row as f64;
            canvas.text((LEFT - 6.0, y + CELL.1 / 2.0 + 4.0), Anchor::End, false, name);
            for (column, value) in cells.iter().enumerate().take(self.columns.len()) {
                let Some(value) = value.filter(|value| value.is_finite()) else { continue };
                let x = LEFT + CELL.0 * column as f64;
                let title = format!("{name}, {}: {} {}", self.columns[column], number(value), self.value);
                canvas.area((x + 0.5, y + 0.5), (CELL.0 - 1.0, CELL.1 - 1.0), &shade(place(value)), &title);
                let ink = if place(value) > 0.55 { "#ffffff" } else { "#000000" };
                canvas.inked((x + CELL.0 / 2.0, y + CELL.1 / 2.0 + 4.0), ink, &number(value));
            }
        }
        for (column, name) in self.columns.iter().enumerate() {
            let x = LEFT + CELL.0 * (column as f64 + 0.5);
            canvas.text((x, bottom + 18.0), Anchor::Middle, false, name);
        }
        canvas.text(((LEFT + right) / 2.0, bottom + 42.0), Anchor::Middle, false, &self.x);
        canvas.upright((18.0, (TOP + bottom) / 2.0), &self.y);
        canvas.text((right + 20.0, TOP + 10.0), Anchor::Start, false, &self.value);
        if low.is_finite() {
            for step in 0..STEPS {
                let part = step as f64 / (STEPS - 1) as f64;
                let (at, value) = (TOP + 20.0 * (step + 1) as f64, high - (high - low) * part);
                canvas.area((right + 20.0, at), (14.0, 14.0), &shade(place(value)), &self.value);
                canvas.text((right + 40.0, at + 12.0), Anchor::Start, false, &number(value));
            }
        }
        canvas.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::tests::assert_well_formed;

    #[test]
    fn cells_that_were_measured_are_coloured_by_their_values() {
        let heat = Heat {
            title: "reads <random>".into(),
            x: "depth".into(),
            y: "block".into(),
            value: "MB/s".into(),
            columns: vec!["1".into(), "2".into()],
            rows: vec![
                ("4 KiB".into(), vec![Some(1.0), Some(3.0)]),
                ("8 KiB".into(), vec![None, Some(f64::NAN)]),
            ],
        };
        let svg = heat.svg();
        assert_well_formed(&svg);
        assert!(svg.contains("4 KiB, 2: 3 MB/s") && !svg.contains("8 KiB, 1"), "{svg}");
        // Two cells, the steps of the key, and the ground.
        assert_eq!(svg.matches("<rect").count(), 2 + STEPS + 1);
        assert!(svg.contains(&shade(0.0)) && svg.contains(&shade(1.0)));
        let none = Heat { columns: Vec::new(), rows: Vec::new(), ..heat };
        assert_well_formed(&none.svg());
    }

    #[test]
    fn shades_grow_darker_without_a_step_back() {
        let light = |place: f64| {
            let text = shade(place);
            (1..7).step_by(2).map(|at| u32::from_str_radix(&text[at..at + 2], 16).expect("hex")).sum::<u32>()
        };
        let all: Vec<_> = (0..=20).map(|step| light(f64::from(step) / 20.0)).collect();
        assert!(all.windows(2).all(|two| two[0] > two[1]), "{all:?}");
    }
}
