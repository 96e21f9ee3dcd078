//! Pictures of measurements, as SVG: stacked bars, lines, points and coloured tables, with units and a legend.
//!
//! Small on purpose: a measurement is shown in one of four ways, everywhere with the same colours and sizes. Text that
//! comes from elsewhere is escaped, and numbers that are none are left out.

mod axis;
mod canvas;
mod heat;
mod lines;
mod stacks;

use std::path::Path;

use tapio_control::ControlError;

use crate::failure::Result;

pub use axis::Axis;
pub use canvas::escaped;
pub use heat::Heat;
pub use lines::{Line, Lines, Points};
pub use stacks::{Bar, Group, Stacks};

/// Colours of series, in their order; they begin anew when there are more series. Readable on white, and told apart
/// by colour-blind readers.
const COLOURS: [&str; 12] = [
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#994455", "#eeaa33",
    "#004488", "#117733", "#882255",
];

/// Writes a picture into a file.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: &Path, svg: &str) -> Result<()> {
    std::fs::write(path, svg)
        .map_err(|error| ControlError::io(format_args!("cannot write {}", path.display()), &error))
}

fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The depth of the elements must come out at zero, and every attribute must be quoted.
    pub(super) fn assert_well_formed(svg: &str) {
        let mut reader = quick_xml::Reader::from_str(svg);
        let mut depth = 0;
        loop {
            match reader.read_event().expect("XML") {
                quick_xml::events::Event::Start(start) => {
                    depth += 1;
                    start.attributes().for_each(|attribute| drop(attribute.expect("an attribute")));
                }
                quick_xml::events::Event::End(_) => depth -= 1,
                quick_xml::events::Event::Empty(start) => {
                    start.attributes().for_each(|attribute| drop(attribute.expect("an attribute")));
                }
                quick_xml::events::Event::Eof => break,
                _ => {}
            }
        }
        assert_eq!(depth, 0);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn colours_of_a_picture_differ_until_there_are_too_many() {
        let some: std::collections::BTreeSet<_> = (0..COLOURS.len()).map(colour).collect();
        assert_eq!(some.len(), COLOURS.len());
        assert_eq!(colour(COLOURS.len()), colour(0));
    }
}
