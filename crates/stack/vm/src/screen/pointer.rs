//! The pointer: from places on a viewer's screen to places or distances of the guest's.

/// Buttons that there are: left, middle, right, and the wheel up, down, left and right.
pub const BUTTONS: u8 = 7;

/// The largest coordinate of a pointer that goes to places.
const PLACE_MAX: u32 = 0x7fff;

/// Where a pointer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Motion {
    /// To a place: across and down, 0 to 0x7fff.
    To(u32, u32),
    /// By a distance: across and down, in pixels.
    By(i32, i32),
}

/// A viewer's pointer, as it was last.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pointer {
    at: Option<(u16, u16)>,
    buttons: u8,
}

impl Pointer {
    /// What has changed: a motion, and buttons that were pressed (`true`) or released. `size` is that of the screen.
    pub fn change(
        &mut self,
        buttons: u8,
        (x, y): (u16, u16),
        (width, height): (u16, u16),
        has_places: bool,
    ) -> (Option<Motion>, Vec<(u8, bool)>) {
        let (x, y) = (x.min(width.saturating_sub(1)), y.min(height.saturating_sub(1)));
        let before = self.at.replace((x, y));
        let motion = if has_places {
            let place = |at: u16, size: u16| u32::from(at) * PLACE_MAX / u32::from(size.max(2) - 1);
            Some(Motion::To(place(x, width), place(y, height)))
        } else {
            let way = |to: u16, from: u16| i32::from(to) - i32::from(from);
            before.map(|before| Motion::By(way(x, before.0), way(y, before.1)))
        };
        let motion = motion.filter(|motion| *motion != Motion::By(0, 0));
        let changed = self.buttons ^ buttons;
        self.buttons = buttons;
        let bits = (0..BUTTONS).filter(|bit| changed & 1 << bit != 0);
        (motion, bits.map(|bit| (bit, buttons & 1 << bit != 0)).collect())
    }

    /// Releases all buttons: their viewer has gone.
    pub fn release(&mut self) -> Vec<(u8, bool)> {
        let held = std::mem::take(&mut self.buttons);
        (0..BUTTONS).filter(|bit| held & 1 << bit != 0).map(|bit| (bit, false)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mouse_goes_by_distances_and_a_tablet_to_places() {
        let mut pointer = Pointer::default();
        let size = (641, 481);
        assert_eq!(pointer.change(0, (10, 10), size, false), (None, vec![]));
        assert_eq!(pointer.change(1, (13, 8), size, false), (Some(Motion::By(3, -2)), vec![(0, true)]));
        assert_eq!(pointer.change(4, (13, 8), size, false), (None, vec![(0, false), (2, true)]));
        assert_eq!(pointer.change(4, (640, 240), size, true), (Some(Motion::To(0x7fff, 0x3fff)), vec![]));
        assert_eq!(pointer.change(4, (9999, 9999), size, true).0, Some(Motion::To(0x7fff, 0x7fff)));
        assert_eq!((pointer.release(), pointer.release()), (vec![(2, false)], vec![]));
        assert_eq!(Pointer::default().change(0, (5, 5), (1, 1), true).0, Some(Motion::To(0, 0)));
    }
}
