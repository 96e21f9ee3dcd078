//! A viewer's session: the server's side of RFB 3.3, 3.7 and 3.8 (RFC 6143), without its connection. A viewer needs no
//! password, because it has come through a session of the API.

use std::io::{self, Read};

use super::canvas::{Canvas, Picture, Rect};
use super::pixels::{Encoding, Format, PLAIN};

/// Encodings that a viewer may name.
const ENCODINGS_MAX: usize = 1024;

/// Bytes of a clipboard, which is not used.
const CLIPBOARD_LEN_MAX: u32 = 1 << 20;

/// As soon as so many bytes wait to be sent, no more are made.
const OUT_LEN: usize = 64 << 10;

/// Longest name of a screen, in characters.
const NAME_CHARS_MAX: usize = 200;

/// Pseudo-encodings: the size of the screen changes; keys have scan codes, too.
const RESIZE: i32 = -223;
const CODES: i32 = -258;

/// Security types and their result.
const NONE: u8 = 1;

/// What a viewer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A symbol of X is pressed or released.
    Symbol(u32, bool),
    /// A scan code is pressed or released.
    Code(u32, bool),
    /// The pointer is there, and these of its buttons are pressed.
    Pointer {
        /// Bits of RFC 6143, 7.5.5.
        buttons: u8,
        /// From the left, in pixels.
        x: u16,
        /// From above, in pixels.
        y: u16,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Version,
    Security,
    Begin,
    Messages,
}

/// What a viewer can take; takes effect with the next update.
#[derive(Clone, Copy, Debug)]
struct Wishes {
    format: Format,
    encoding: Encoding,
    can_resize: bool,
}

/// A viewer's session.
#[derive(Debug)]
pub struct Session {
    step: Step,
    /// The viewer is told that security was agreed on.
    has_result: bool,
    name: String,
    /// Came and is not understood yet.
    inbox: Vec<u8>,
    /// Bytes to come that are not looked at.
    skipped: u32,
    out: Vec<u8>,
    /// How much of `out` was sent.
    sent: usize,
    wishes: Wishes,
    /// What an update that has begun is sent as.
    as_begun: Wishes,
    canvas: Canvas,
    /// What is left of the update that has begun.
    rects: std::vec::IntoIter<Rect>,
    wants_update: bool,
    /// The viewer has asked for scan codes and is yet to be told that it may send them.
    owes_codes: bool,
    takes_codes: bool,
}

impl Session {
    /// Greets a viewer of a screen of this size; the size is one that [`Picture::open`] allows.
    pub fn new(name: &str, size: (u16, u16)) -> Self {
        let wishes = Wishes { format: PLAIN, encoding: Encoding::Raw, can_resize: false };
        let name = name.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect();
        Self {
            step: Step::Version,
            has_result: false,
            name,
            inbox: Vec::new(),
            skipped: 0,
            out: b"RFB 003.008\n".to_vec(),
            sent: 0,
            wishes,
            as_begun: wishes,
            canvas: Canvas::new(size),
            rects: Vec::new().into_iter(),
            wants_update: false,
            owes_codes: false,
            takes_codes: false,
        }
    }

    /// The size of the viewer's screen.
    pub fn size(&self) -> (u16, u16) {
        self.canvas.size()
    }

    /// Takes what a viewer has sent, and adds what it does to `events`.
    ///
    /// # Errors
    /// A sentence: what of it is not possible. The session is over.
    pub fn receive(&mut self, bytes: &[u8], events: &mut Vec<Event>) -> Result<(), String> {
        let unseen = bytes.len().min(self.skipped as usize);
        self.skipped -= unseen as u32;
        let mut inbox = std::mem::take(&mut self.inbox);
        inbox.extend_from_slice(&bytes[unseen..]);
        let mut rest = &inbox[..];
        while let Some(len) = self.message(rest, events)? {
            rest = &rest[len..];
            let unseen = rest.len().min(self.skipped as usize);
            self.skipped -= unseen as u32;
            rest = &rest[unseen..];
        }
        self.inbox = rest.to_vec();
        Ok(())
    }

    /// Takes one message; its length, or nothing if it has not come as a whole.
    fn message(&mut self, bytes: &[u8], events: &mut Vec<Event>) -> Result<Option<usize>, String> {
        let fixed = |len: usize| (bytes.len() >= len).then_some(len);
        match self.step {
            Step::Version => {
                let Some(version) = bytes.first_chunk::<12>() else { return Ok(None) };
                self.agree_on(version)?;
                Ok(Some(12))
            }
            Step::Security => {
                let Some(chosen) = bytes.first() else { return Ok(None) };
                if *chosen != NONE {
                    return Err(format!("the viewer chose security type {chosen}, and 1 (none) was offered"));
                }
                if self.has_result {
                    self.out.extend(0_u32.to_be_bytes());
                }
                self.step = Step::Begin;
                Ok(Some(1))
            }
            Step::Begin => {
                // Whether others may see the screen, too: they may in any case.
                let Some(len) = fixed(1) else { return Ok(None) };
                let (width, height) = self.canvas.size();
                self.out.extend(width.to_be_bytes().iter().chain(&height.to_be_bytes()));
                self.out.extend(PLAIN.bytes());
                self.out.extend((self.name.len() as u32).to_be_bytes());
                self.out.extend(self.name.as_bytes());
                self.step = Step::Messages;
                Ok(Some(len))
            }
            Step::Messages => self.wish(bytes, events),
        }
    }

    fn agree_on(&mut self, version: &[u8; 12]) -> Result<(), String> {
        let number = |at: usize| std::str::from_utf8(&version[at..at + 3]).ok()?.parse::<u16>().ok();
        let is_rfb = version.starts_with(b"RFB ") && version[7] == b'.' && version[11] == b'\n';
        let (Some(3), Some(minor), true) = (number(4), number(8), is_rfb) else {
            return Err("the viewer does not speak RFB 3".into());
        };
        if minor < 7 {
            // The server decides alone (RFC 6143, appendix A).
            self.out.extend(u32::from(NONE).to_be_bytes());
            self.step = Step::Begin;
        } else {
            self.out.extend([1, NONE]);
            self.step = Step::Security;
        }
        self.has_result = minor > 7;
        Ok(())
    }

    fn wish(&mut self, bytes: &[u8], events: &mut Vec<Event>) -> Result<Option<usize>, String> {
        let be16 = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let be32 = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let Some(kind) = bytes.first() else { return Ok(None) };
        let len = match kind {
            0 => 20,
            2 if bytes.len() < 4 => return Ok(None),
            2 if usize::from(be16(2)) > ENCODINGS_MAX => {
                return Err(format!("the viewer names {} encodings; {ENCODINGS_MAX} are read", be16(2)));
            }
            2 => 4 + 4 * usize::from(be16(2)),
            3 => 10,
            4 | 6 => 8,
            5 => 6,
            255 => 12,
            other => return Err(format!("the viewer sent a message of kind {other}, which is none")),
        };
        if bytes.len() < len {
            return Ok(None);
        }
        match kind {
            0 => {
                let format = bytes[4..20].first_chunk().ok_or("a format is cut off")?;
                self.wishes.format = Format::read(format)?;
            }
            2 => self.encodings((4..len).step_by(4).map(|at| be32(at) as i32)),
            3 => {
                self.wants_update = true;
                if bytes[1] == 0 {
                    self.canvas.spoil();
                }
            }
            4 => events.push(Event::Symbol(be32(4), bytes[1] != 0)),
            5 => events.push(Event::Pointer { buttons: bytes[1], x: be16(2), y: be16(4) }),
            6 => {
                self.skipped = be32(4);
                if self.skipped > CLIPBOARD_LEN_MAX {
                    return Err(format!(
                        "a clipboard has {} bytes; {CLIPBOARD_LEN_MAX} are read",
                        self.skipped
                    ));
                }
            }
            _ if bytes[1] != 0 || !self.takes_codes => {
                return Err(format!(
                    "the viewer sent a message of kind 255, {}, which was not agreed on",
                    bytes[1]
                ));
            }
            _ => events.push(Event::Code(be32(8), be16(2) != 0)),
        }
        Ok(Some(len))
    }

    fn encodings(&mut self, mut named: impl Iterator<Item = i32> + Clone) {
        let has = |number: i32| named.clone().any(|one| one == number);
        self.wishes.can_resize = has(RESIZE);
        self.owes_codes |= has(CODES) && !self.takes_codes;
        // What a viewer names first it likes best.
        self.wishes.encoding = named.find_map(Encoding::of).unwrap_or(Encoding::Raw);
    }

    /// Whether the viewer waits for a picture. It is shown one by [`Self::show`] then.
    pub fn wants_picture(&self) -> bool {
        self.wants_update && self.rects.len() == 0
    }

    fn put_head(&mut self, rects: usize) {
        self.out.extend([0, 0]);
        self.out.extend((rects as u16).to_be_bytes());
    }

    fn put_rect(&mut self, rect: Rect, encoding: i32) {
        let sides = [rect.x, rect.y, rect.width, rect.height];
        self.out.extend(sides.iter().flat_map(|side| side.to_be_bytes()));
        self.out.extend(encoding.to_be_bytes());
    }

    /// Begins to send what has changed. Whether there was anything; else the viewer goes on waiting.
    ///
    /// # Errors
    /// The picture's.
    pub fn show<R: Read>(&mut self, mut picture: Picture<R>) -> io::Result<bool> {
        self.as_begun = self.wishes;
        let whole = |(width, height): (u16, u16)| Rect { x: 0, y: 0, width, height };
        if picture.size() != self.canvas.size() && self.wishes.can_resize {
            // The last rectangle of an update. The viewer asks for another one, of the new screen.
            self.canvas = Canvas::new(picture.size());
            self.put_head(1);
            self.put_rect(whole(picture.size()), RESIZE);
            self.wants_update = false;
            return Ok(true);
        }
        self.canvas.take(&mut picture)?;
        let rects = self.canvas.take_changes();
        let owes_codes = std::mem::take(&mut self.owes_codes);
        if rects.is_empty() && !owes_codes {
            return Ok(false);
        }
        self.wants_update = false;
        self.put_head(rects.len() + usize::from(owes_codes));
        if owes_codes {
            self.takes_codes = true;
            self.put_rect(whole(self.canvas.size()), CODES);
        }
        self.rects = rects.into_iter();
        Ok(true)
    }

    /// What is to be sent now; more comes when it was.
    pub fn pending(&mut self) -> &[u8] {
        while self.out.len() - self.sent < OUT_LEN
            && let Some(rect) = self.rects.next()
        {
            let Wishes { encoding, format, .. } = self.as_begun;
            self.put_rect(rect, encoding.number());
            encoding.put(&mut self.out, &self.canvas, rect, &format);
        }
        &self.out[self.sent..]
    }

    /// So many bytes of it were sent.
    pub fn sent(&mut self, len: usize) {
        self.sent += len;
        if self.sent >= self.out.len() {
            self.out.clear();
            self.sent = 0;
        }
    }
}
