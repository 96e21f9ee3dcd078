//! Screens of guests: what a viewer sends, and what an emulator shows.

use std::io::Cursor;

use tapio_vm::screen::{Canvas, Event, Keyboard, PIXELS_MAX, Picture, Pointer, SIDE_MAX, Session};

use super::take;

/// The screen that viewers look at.
const SIZE: (u16, u16) = (70, 40);

/// A picture of this number.
fn picture(number: u8) -> Picture<Cursor<Vec<u8>>> {
    // Now and then one of another size.
    let (width, height) = if number % 8 == 7 { (33, 50) } else { SIZE };
    let mut bytes = format!("P6\n{width} {height}\n255\n").into_bytes();
    let len = usize::from(width) * usize::from(height) * 3;
    bytes.extend((0..len).map(|at| ((at / 90) as u8).wrapping_mul(number)));
    Picture::open(Cursor::new(bytes)).expect("an honest picture")
}

/// A byte for the length of the pieces in which the rest comes, then what a viewer sends. Whatever that is, little is
/// held for it, keys and buttons are those that there are, and a session ends with a sentence.
pub fn rfb_viewer(bytes: &[u8]) {
    let mut rest = bytes;
    let [piece] = take::<1>(&mut rest);
    let mut session = Session::new("guest", SIZE);
    let (mut keyboard, mut pointer, mut events) = (Keyboard::default(), Pointer::default(), Vec::new());
    for (number, part) in rest.chunks(usize::from(piece) * 16 + 1).enumerate() {
        events.clear();
        if let Err(why) = session.receive(part, &mut events) {
            assert!(!why.is_empty() && why.len() < 200 && !why.contains(char::is_control), "{why:?}");
            break;
        }
        assert!(events.len() <= part.len());
        for event in &events {
            match *event {
                Event::Symbol(symbol, is_down) => assert!(keyboard.symbol(symbol, is_down).len() <= 5),
                Event::Code(code, is_down) => assert!(keyboard.code(code, is_down).len() <= 1),
                Event::Pointer { buttons, x, y } => {
                    let (_, changed) = pointer.change(buttons, (x, y), session.size(), number % 2 == 0);
                    assert!(changed.len() <= 7);
                }
            }
        }
        if session.wants_picture() {
            session.show(picture(number as u8)).expect("an honest picture");
        }
        if number % 3 != 2 {
            let mut left = 1 << 20;
            while !session.pending().is_empty() {
                let len = session.pending().len();
                assert!(len <= left, "an update of a small screen is small");
                left -= len;
                session.sent(len);
            }
        }
    }
    assert!(keyboard.release().len() <= 400 && pointer.release().len() <= 7);
}

/// An emulator's picture: it is refused, or of a size that is shown, and what has changed lies on the screen.
pub fn screen_picture(bytes: &[u8]) {
    let mut picture = match Picture::open(bytes) {
        Ok(picture) => picture,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let (width, height) = picture.size();
    let pixels = usize::from(width) * usize::from(height);
    assert!(width.max(height) <= SIDE_MAX && (1..=PIXELS_MAX).contains(&pixels));
    // A large one is of the same code, and takes long.
    let size = if pixels > 1 << 16 { (100, 100) } else { (width, height) };
    let mut canvas = Canvas::new(size);
    canvas.take_changes();
    let is_whole = canvas.take(&mut picture).is_ok();
    let changes = canvas.take_changes();
    assert!(is_whole || bytes.len() < pixels * 3 + 20);
    for rect in &changes {
        assert!(rect.width > 0 && rect.height > 0);
        assert!(rect.x + rect.width <= size.0 && rect.y + rect.height <= size.1, "{rect:?}");
    }
    assert!(canvas.take_changes().is_empty());
}
