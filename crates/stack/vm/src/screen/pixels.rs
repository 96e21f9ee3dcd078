//! Pixels and rectangles as a viewer wants them (RFC 6143, 7.4 and 7.7).

use super::canvas::{Canvas, Rect, TILE};

/// How a viewer has its pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    /// Bytes: 1, 2 or 4.
    len: usize,
    is_big_endian: bool,
    /// The largest value of red, green and blue, and how far it is shifted to the left.
    colours: [(u32, u32); 3],
}

/// 32 bits, lowest byte first, blue in the lowest.
pub(super) const PLAIN: Format =
    Format { len: 4, is_big_endian: false, colours: [(255, 16), (255, 8), (255, 0)] };

impl Format {
    /// The 16 bytes of a format.
    pub(super) fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let bits = (self.len * 8) as u8;
        bytes[..4].copy_from_slice(&[bits, if bits == 32 { 24 } else { bits }, self.is_big_endian.into(), 1]);
        for (at, (most, shift)) in self.colours.iter().enumerate() {
            bytes[4 + 2 * at..6 + 2 * at].copy_from_slice(&(*most as u16).to_be_bytes());
            bytes[10 + at] = *shift as u8;
        }
        bytes
    }

    /// Reads a format.
    ///
    /// # Errors
    /// A sentence: what of it is not possible.
    pub(super) fn read(bytes: &[u8; 16]) -> Result<Self, String> {
        let [bits, _, is_big_endian, has_colours, ..] = *bytes;
        if !matches!(bits, 8 | 16 | 32) {
            return Err(format!("pixels of {bits} bits are not sent: 8, 16 and 32 are possible"));
        }
        if has_colours == 0 {
            return Err("a palette is not sent: choose true colours".into());
        }
        let mut colours = [(0, 0); 3];
        for (at, colour) in colours.iter_mut().enumerate() {
            let most = u32::from(u16::from_be_bytes([bytes[4 + 2 * at], bytes[5 + 2 * at]]));
            let shift = u32::from(bytes[10 + at]);
            let is_mask = most > 0 && (most + 1).is_power_of_two();
            if !is_mask || shift + most.count_ones() > u32::from(bits) {
                return Err(format!(
                    "a colour of 0 to {most}, shifted by {shift}, does not fit into a pixel of {bits} bits"
                ));
            }
            *colour = (most, shift);
        }
        Ok(Self { len: usize::from(bits / 8), is_big_endian: is_big_endian != 0, colours })
    }

    /// Adds a pixel (`0x00RRGGBB`).
    fn put(&self, out: &mut Vec<u8>, pixel: u32) {
        if *self == PLAIN {
            return out.extend(pixel.to_le_bytes());
        }
        let [_, red, green, blue] = pixel.to_be_bytes();
        let value = [red, green, blue]
            .iter()
            .zip(&self.colours)
            .fold(0, |value, (part, (most, shift))| value | ((u32::from(*part) * most + 127) / 255) << shift);
        if self.is_big_endian {
            out.extend(&value.to_be_bytes()[4 - self.len..]);
        } else {
            out.extend(&value.to_le_bytes()[..self.len]);
        }
    }
}

/// How rectangles are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Raw,
    Hextile,
}

impl Encoding {
    /// Its number.
    pub(super) fn number(self) -> i32 {
        match self {
            Self::Raw => 0,
            Self::Hextile => 5,
        }
    }

    /// The encoding of that number, where it is one of these.
    pub(super) fn of(number: i32) -> Option<Self> {
        [Self::Raw, Self::Hextile].into_iter().find(|one| one.number() == number)
    }

    /// Adds the pixels of a rectangle that lies on the canvas.
    pub(super) fn put(self, out: &mut Vec<u8>, canvas: &Canvas, rect: Rect, format: &Format) {
        match self {
            Self::Raw => raw(out, canvas, rect, format),
            Self::Hextile => hextile(out, canvas, rect, format),
        }
    }
}

fn raw(out: &mut Vec<u8>, canvas: &Canvas, rect: Rect, format: &Format) {
    for y in rect.y..rect.y + rect.height {
        canvas.row(rect.x, y, rect.width).iter().for_each(|pixel| format.put(out, *pixel));
    }
}

/// Bits of a tile's first byte.
const RAW: u8 = 1;
const GROUND: u8 = 2;
const INK: u8 = 4;
const PARTS: u8 = 8;

/// What a tile is made of.
enum Tile {
    Plain(u32),
    /// Two colours, the more frequent one first.
    Two(u32, u32),
    Many,
}

fn look(canvas: &Canvas, tile: Rect) -> Tile {
    let rows = (tile.y..tile.y + tile.height).map(|y| canvas.row(tile.x, y, tile.width));
    let first = canvas.row(tile.x, tile.y, 1)[0];
    let (mut other, mut of_first, mut of_other) = (None, 0, 0);
    for pixel in rows.flatten() {
        match other {
            _ if *pixel == first => of_first += 1,
            None => (other, of_other) = (Some(*pixel), 1),
            Some(known) if known == *pixel => of_other += 1,
            Some(_) => return Tile::Many,
        }
    }
    match other {
        None => Tile::Plain(first),
        Some(other) if of_other > of_first => Tile::Two(other, first),
        Some(other) => Tile::Two(first, other),
    }
}

/// Runs of a colour in the rows of a tile: a byte for their place, one for their size.
fn parts(canvas: &Canvas, tile: Rect, ink: u32) -> Vec<[u8; 2]> {
    let mut parts = Vec::new();
    for y in 0..tile.height {
        let row = canvas.row(tile.x, tile.y + y, tile.width);
        let mut x = 0;
        while let Some(start) = row[x..].iter().position(|pixel| *pixel == ink).map(|at| x + at) {
            let len = row[start..].iter().take_while(|pixel| **pixel == ink).count();
            // Within 16 by 16, so both halves of a byte are enough.
            parts.push([(start as u8) << 4 | y as u8, (len as u8 - 1) << 4]);
            x = start + len;
        }
    }
    parts
}

/// Tiles of 16 by 16: of one colour, of a ground with runs of another colour on it, or raw (RFC 6143, 7.7.4).
fn hextile(out: &mut Vec<u8>, canvas: &Canvas, rect: Rect, format: &Format) {
    // What the tile before has left the viewer with: ground and ink. A raw tile leaves nothing.
    let mut known: (Option<u32>, Option<u32>) = (None, None);
    for y in (rect.y..rect.y + rect.height).step_by(TILE.into()) {
        for x in (rect.x..rect.x + rect.width).step_by(TILE.into()) {
            let (width, height) = (TILE.min(rect.x + rect.width - x), TILE.min(rect.y + rect.height - y));
            let tile = Rect { x, y, width, height };
            let (ground, ink, parts) = match look(canvas, tile) {
                Tile::Plain(ground) => (ground, None, Vec::new()),
                Tile::Two(ground, ink) => (ground, Some(ink), parts(canvas, tile, ink)),
                Tile::Many => {
                    out.push(RAW);
                    raw(out, canvas, tile, format);
                    known = (None, None);
                    continue;
                }
            };
            let mask_at = out.len();
            let mut mask = 0;
            out.push(0);
            if known.0 != Some(ground) {
                mask |= GROUND;
                format.put(out, ground);
                known.0 = Some(ground);
            }
            if let Some(ink) = ink {
                if known.1 != Some(ink) {
                    mask |= INK;
                    format.put(out, ink);
                    known.1 = Some(ink);
                }
                mask |= PARTS;
                // At most eight runs in each of 16 rows.
                out.push(parts.len() as u8);
                out.extend(parts.as_flattened());
            }
            out[mask_at] = mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_read_checked_and_used() {
        assert_eq!(Format::read(&PLAIN.bytes()), Ok(PLAIN));
        let mut small = PLAIN.bytes();
        // Five, six and five bits of 16.
        small[0] = 16;
        small[4..13].copy_from_slice(&[0, 31, 0, 63, 0, 31, 11, 5, 0]);
        let format = Format::read(&small).unwrap();
        let mut out = Vec::new();
        format.put(&mut out, 0xff_ffff);
        format.put(&mut out, 0x00_ff00);
        assert_eq!(out, [0xff, 0xff, 0xe0, 0x07]);
        small[2] = 1;
        out.clear();
        Format::read(&small).unwrap().put(&mut out, 0x00_ff00);
        assert_eq!(out, [0x07, 0xe0]);
        for (at, byte, why) in
            [(0, 24, "24 bits"), (3, 0, "palette"), (5, 30, "0 to 30"), (10, 12, "by 12"), (5, 0, "0 to 0")]
        {
            let mut wrong = small;
            wrong[at] = byte;
            assert!(Format::read(&wrong).unwrap_err().contains(why), "{why}");
        }
    }
}
