//! Screens of guests, for viewers that speak RFB (VNC; RFC 6143).
//!
//! ```text
//!   viewer ── socket ── serve ── Session ── Canvas ── pictures (PPM) ── emulator
//!                                   └────── Keyboard, Pointer ── keys, motions ──┘
//! ```
//!
//! The server is this daemon's and not the emulator's: a VNC server of QEMU looks at its screen every three seconds as
//! long as the guest runs, with a viewer or without. This one is a thread for each viewer. It takes a picture only if
//! the viewer has asked for one, and there is no thread without a viewer.
//!
//! Both sides are foreign: a viewer's bytes are those of a client of the API, and pictures come from an emulator.

mod canvas;
mod keyboard;
mod pixels;
mod pointer;
mod serve;
mod session;
#[cfg(test)]
mod tests;

use std::io::{self, Read};

pub use canvas::{Canvas, PIXELS_MAX, Picture, SIDE_MAX};
pub use keyboard::{Key, Keyboard};
pub use pointer::{Motion, Pointer};
pub(crate) use serve::serve;
pub use session::{Event, Session};

/// What is behind a viewer.
pub(crate) trait Screen {
    /// Whether its emulator is still there.
    fn is_there(&self) -> bool;

    /// The present picture, as a PPM file.
    ///
    /// # Errors
    /// The emulator has ended, or does not answer.
    fn picture(&mut self) -> io::Result<Box<dyn Read + '_>>;

    /// Presses and releases keys, in this order; `true` is pressed. Keys that nothing in the VM takes are lost.
    ///
    /// # Errors
    /// As [`Self::picture`].
    fn keys(&mut self, strokes: &[(Key, bool)]) -> io::Result<()>;

    /// Whether the guest's pointer goes to places (a tablet), and not by distances (a mouse).
    fn has_places(&mut self) -> bool;

    /// Moves the pointer, then presses and releases its buttons: bits of RFC 6143, 7.5.5.
    ///
    /// # Errors
    /// As [`Self::picture`].
    fn pointer(&mut self, motion: Option<Motion>, buttons: &[(u8, bool)]) -> io::Result<()>;
}
