//! The picture that a viewer has, and what of it has changed.

use std::io::{self, Read};

/// Longest side of a screen, in pixels.
pub const SIDE_MAX: u16 = 8192;

/// Pixels of the largest screen: a little more than 3840 by 2160.
pub const PIXELS_MAX: usize = 8 << 20;

/// Side of the squares in which changes are looked for, in pixels.
pub(super) const TILE: u16 = 16;

/// Digits of a number in the head of a picture.
const DIGITS_MAX: usize = 5;

/// Rectangles of one update: there are 16 bits for their number.
const RECTS_MAX: usize = 60_000;

fn bad(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// Whether such a screen is shown at all.
fn check_size(width: u32, height: u32) -> io::Result<(u16, u16)> {
    let side = |side: u32| u16::try_from(side).ok().filter(|side| (1..=SIDE_MAX).contains(side));
    match (side(width), side(height)) {
        (Some(width), Some(height)) if usize::from(width) * usize::from(height) <= PIXELS_MAX => {
            Ok((width, height))
        }
        _ => Err(bad(format!(
            "a screen of {width} by {height} pixels is not shown: sides of 1 to {SIDE_MAX} and {PIXELS_MAX} pixels are"
        ))),
    }
}

/// A picture as an emulator writes it (PPM, `P6`): its size, and the reader behind its head.
#[derive(Debug)]
pub struct Picture<R> {
    width: u16,
    height: u16,
    rows: R,
}

impl<R: Read> Picture<R> {
    /// Reads the head.
    ///
    /// # Errors
    /// It is none, or of a screen that is not shown; the reader's.
    pub fn open(mut from: R) -> io::Result<Self> {
        let mut mark = [0; 2];
        from.read_exact(&mut mark)?;
        if &mark != b"P6" {
            return Err(bad("the emulator's picture is no PPM file (P6)"));
        }
        let white = |byte: u8| byte.is_ascii_whitespace();
        let mut byte = || {
            let mut one = [0];
            from.read_exact(&mut one).map(|()| one[0])
        };
        if !white(byte()?) {
            return Err(bad("the head of the emulator's picture has no space behind its mark"));
        }
        // Each number ends with one white byte, the last one with the only one before the pixels.
        let mut number = || {
            let (mut value, mut digits) = (0_u32, 0);
            loop {
                match byte()? {
                    digit @ b'0'..=b'9' if digits < DIGITS_MAX => {
                        value = value * 10 + u32::from(digit - b'0');
                        digits += 1;
                    }
                    end if white(end) && digits > 0 => return Ok(value),
                    _ => return Err(bad("the head of the emulator's picture has a number that is none")),
                }
            }
        };
        let (width, height, most) = (number()?, number()?, number()?);
        if most != 255 {
            return Err(bad(format!("a colour of the emulator's picture goes to {most}; 255 is read")));
        }
        let (width, height) = check_size(width, height)?;
        Ok(Self { width, height, rows: from })
    }

    /// Width and height in pixels.
    pub fn size(&self) -> (u16, u16) {
        (self.width, self.height)
    }
}

/// A part of a screen, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rect {
    /// Left edge.
    pub x: u16,
    /// Upper edge.
    pub y: u16,
    /// Columns.
    pub width: u16,
    /// Rows.
    pub height: u16,
}

/// What a viewer has on its screen.
#[derive(Debug)]
pub struct Canvas {
    width: u16,
    height: u16,
    /// Row by row, `0x00RRGGBB`.
    pixels: Vec<u32>,
    /// Tiles that the viewer has not been sent as they are, row by row.
    dirty: Vec<bool>,
    row: Vec<u8>,
}

impl Canvas {
    /// A black screen, all of which is yet to be sent. The size was checked by [`Picture::open`].
    pub fn new((width, height): (u16, u16)) -> Self {
        let tiles = |side: u16| usize::from(side.div_ceil(TILE));
        Self {
            width,
            height,
            pixels: vec![0; usize::from(width) * usize::from(height)],
            dirty: vec![true; tiles(width) * tiles(height)],
            row: Vec::new(),
        }
    }

    /// Width and height in pixels.
    pub fn size(&self) -> (u16, u16) {
        (self.width, self.height)
    }

    fn columns(&self) -> usize {
        usize::from(self.width.div_ceil(TILE))
    }

    /// The viewer is to be sent everything again.
    pub fn spoil(&mut self) {
        self.dirty.fill(true);
    }

    /// Takes a picture over, and notes what has changed. Of a larger picture, what does not fit is cut off; around a
    /// smaller one it is black.
    ///
    /// # Errors
    /// The picture ends too early; the reader's. What was read until then is taken.
    pub fn take<R: Read>(&mut self, picture: &mut Picture<R>) -> io::Result<()> {
        let width = usize::from(self.width);
        let columns = self.columns();
        let shown = usize::from(picture.width.min(self.width));
        let mut row = std::mem::take(&mut self.row);
        row.resize(usize::from(picture.width) * 3, 0);
        for y in 0..self.height {
            if y < picture.height {
                picture.rows.read_exact(&mut row)?;
            }
            let colours = if y < picture.height { &row[..shown * 3] } else { &[] };
            let tiles = usize::from(y / TILE) * columns;
            let start = usize::from(y) * width;
            let mut colours = colours.chunks_exact(3).map(|c| u32::from_be_bytes([0, c[0], c[1], c[2]]));
            for (x, pixel) in self.pixels[start..start + width].iter_mut().enumerate() {
                let colour = colours.next().unwrap_or(0);
                if *pixel != colour {
                    *pixel = colour;
                    self.dirty[tiles + x / usize::from(TILE)] = true;
                }
            }
        }
        self.row = row;
        Ok(())
    }

    /// What is to be sent, as rectangles that do not overlap, and notes it as sent.
    pub fn take_changes(&mut self) -> Vec<Rect> {
        let columns = self.columns();
        let mut rects = Vec::new();
        let is_coarse = self.dirty.iter().filter(|dirty| **dirty).count() > RECTS_MAX;
        for (at, tiles) in self.dirty.chunks_mut(columns).enumerate() {
            let y = u16::try_from(at).unwrap_or(u16::MAX).saturating_mul(TILE);
            let height = TILE.min(self.height.saturating_sub(y));
            let mut rect = |first: usize, end: usize| {
                let x = u16::try_from(first).unwrap_or(u16::MAX).saturating_mul(TILE);
                let end = u16::try_from(end).unwrap_or(u16::MAX).saturating_mul(TILE).min(self.width);
                rects.push(Rect { x, y, width: end.saturating_sub(x), height });
            };
            if is_coarse && tiles.iter().any(|dirty| *dirty) {
                rect(0, columns);
                tiles.fill(false);
            }
            while let Some(first) = tiles.iter().position(|dirty| *dirty) {
                let end = tiles[first..].iter().position(|dirty| !dirty).map_or(columns, |len| first + len);
                rect(first, end);
                tiles[first..end].fill(false);
            }
        }
        rects
    }

    /// One row of a rectangle that lies on the screen.
    pub(super) fn row(&self, x: u16, y: u16, width: u16) -> &[u32] {
        let start = usize::from(y) * usize::from(self.width) + usize::from(x);
        &self.pixels[start..start + usize::from(width)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(head: &str, pixels: &[u8]) -> io::Result<Picture<std::io::Cursor<Vec<u8>>>> {
        Picture::open(std::io::Cursor::new([head.as_bytes(), pixels].concat()))
    }

    #[test]
    fn heads_of_pictures_are_read_and_bounded() {
        assert_eq!(picture("P6\n640 480\n255\n", &[]).unwrap().size(), (640, 480));
        for (wrong, why) in [
            ("P5\n640 480\n255\n", "no PPM"),
            ("P6x640 480\n255\n", "no space"),
            ("P6\n0 480\n255\n", "0 by 480"),
            ("P6\n8193 1\n255\n", "8193 by 1"),
            ("P6\n8000 8000\n255\n", "8000 by 8000"),
            ("P6\n640 480\n65535\n", "65535"),
            ("P6\n640  480\n255\n", "none"),
            ("P6\n999999 480\n255\n", "none"),
            ("P6\n-1 480\n255\n", "none"),
        ] {
            assert!(picture(wrong, &[]).unwrap_err().to_string().contains(why), "{wrong:?}");
        }
        assert!(picture("P6\n64", &[]).is_err(), "it is cut off");
    }

    #[test]
    fn changes_are_whole_tiles_in_rows() {
        let mut canvas = Canvas::new((40, 20));
        let all = [Rect { x: 0, y: 0, width: 40, height: 16 }, Rect { x: 0, y: 16, width: 40, height: 4 }];
        assert_eq!(canvas.take_changes(), all);
        let mut pixels = vec![0; 40 * 20 * 3];
        canvas.take(&mut picture("P6\n40 20\n255\n", &pixels).unwrap()).unwrap();
        assert_eq!(canvas.take_changes(), [], "black as it was");
        for x in [3, 39] {
            pixels[x * 3 + 1] = 7;
        }
        canvas.take(&mut picture("P6\n40 20\n255\n", &pixels).unwrap()).unwrap();
        let two = [Rect { x: 0, y: 0, width: 16, height: 16 }, Rect { x: 32, y: 0, width: 8, height: 16 }];
        assert_eq!((canvas.take_changes(), canvas.row(3, 0, 1)), (two.to_vec(), &[0x700][..]));
        canvas.spoil();
        assert_eq!(canvas.take_changes(), all);
        assert!(canvas.take(&mut picture("P6\n40 20\n255\n", &pixels[3..]).unwrap()).is_err());
    }

    #[test]
    fn pictures_of_another_size_are_cut_off_or_have_margins() {
        let mut canvas = Canvas::new((2, 2));
        let white = [255; 27];
        canvas.take(&mut picture("P6\n3 3\n255\n", &white).unwrap()).unwrap();
        assert_eq!((canvas.row(0, 0, 2), canvas.row(0, 1, 2)), (&[0xff_ffff; 2][..], &[0xff_ffff; 2][..]));
        canvas.take(&mut picture("P6\n1 1\n255\n", &white).unwrap()).unwrap();
        assert_eq!((canvas.row(0, 0, 2), canvas.row(0, 1, 2)), (&[0xff_ffff, 0][..], &[0; 2][..]));
    }
}
