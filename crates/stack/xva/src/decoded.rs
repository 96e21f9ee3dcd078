//! A stream that another process decompresses: what is around an archive is read by decoders that are not ours, on
//! bytes of a client, so that is done where nothing else is held.
//!
//! ```text
//!   client ── head ──▶ daemon ── [`Decoded::begin`] ──▶ decoder
//!     └─────── the rest ──────────────────────────────▶ [`decode`] ── frames ──▶ daemon, [`Decoded`]
//! ```
//!
//! A frame is a length of four bytes, the lowest first, and so many bytes. One of length 0 is the last: behind it come
//! a byte that says how the stream ended, the length of a text in two bytes, and the text. A decoder that ends without
//! that has died.

use std::io::{self, ErrorKind, Read, Write};

use crate::compress::{Decompressor, HEAD_LEN};
use crate::error::XvaError;

/// Bytes of the longest frame.
const FRAME_LEN_MAX: usize = 64 << 10;

/// Bytes of the longest text.
const TEXT_LEN_MAX: usize = 1 << 10;

/// How a stream ended.
const WHOLE: u8 = 0;
const EARLY: u8 = 1;
const WRONG: u8 = 2;
const FAILED: u8 = 3;

/// The decoder: reads the head of the stream from `daemon` and the rest from `client`, and writes frames to `daemon`.
///
/// # Errors
/// The daemon is gone. Whatever is wrong with the stream is told to it.
pub fn decode(client: impl Read, mut daemon: impl Read + Write) -> io::Result<()> {
    let mut len = [0; 2];
    daemon.read_exact(&mut len)?;
    let mut head = vec![0; usize::from(u16::from_le_bytes(len))];
    daemon.read_exact(&mut head)?;
    let (kind, text) = match decompress(io::Cursor::new(head).chain(client), &mut daemon)? {
        Ok(()) => (WHOLE, String::new()),
        Err(XvaError::Early) => (EARLY, String::new()),
        Err(XvaError::Io(error)) => (FAILED, error.to_string()),
        Err(error) => (WRONG, error.to_string()),
    };
    let text = &text.as_bytes()[..text.floor_char_boundary(TEXT_LEN_MAX)];
    let mut last = vec![0, 0, 0, 0, kind];
    last.extend((text.len() as u16).to_le_bytes());
    last.extend(text);
    daemon.write_all(&last)
}

/// The outer error is the daemon's, the inner one the stream's.
fn decompress(stream: impl Read, daemon: &mut impl Write) -> io::Result<Result<(), XvaError>> {
    let mut stream = match Decompressor::new(stream) {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(error)),
    };
    let mut frame = vec![0; 4 + FRAME_LEN_MAX];
    loop {
        let len = match stream.read(&mut frame[4..]) {
            Ok(0) => return Ok(Ok(())),
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Ok(Err(error.into())),
        };
        frame[..4].copy_from_slice(&(len as u32).to_le_bytes());
        daemon.write_all(&frame[..4 + len])?;
    }
}

/// What a decoder makes of a stream, as the daemon reads it.
#[derive(Debug)]
pub struct Decoded<R> {
    frames: R,
    left: usize,
    has_ended: bool,
}

impl<R: Read + Write> Decoded<R> {
    /// Gives a decoder the head of a stream, which it needs before the rest.
    ///
    /// # Errors
    /// The decoder is gone; the head is longer than any.
    pub fn begin(mut decoder: R, head: &[u8]) -> io::Result<Self> {
        let len = u16::try_from(head.len()).ok().filter(|_| head.len() <= HEAD_LEN);
        let len = len.ok_or(ErrorKind::InvalidInput)?;
        decoder.write_all(&[&len.to_le_bytes()[..], head].concat())?;
        Ok(Self::new(decoder))
    }
}

impl<R: Read> Decoded<R> {
    /// Frames that are there.
    pub const fn new(frames: R) -> Self {
        Self { frames, left: 0, has_ended: false }
    }

    fn exact(&mut self, into: &mut [u8]) -> io::Result<()> {
        self.frames.read_exact(into).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => died(),
            _ => error,
        })
    }

    /// The length of the next frame; 0 at the end of a whole stream.
    fn next_frame(&mut self) -> io::Result<usize> {
        let mut len = [0; 4];
        self.exact(&mut len)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > FRAME_LEN_MAX {
            return Err(nonsense());
        }
        if len > 0 {
            return Ok(len);
        }
        let mut last = [0; 3];
        self.exact(&mut last)?;
        let [kind, low, high] = last;
        let text_len = usize::from(u16::from_le_bytes([low, high]));
        if text_len > TEXT_LEN_MAX {
            return Err(nonsense());
        }
        let mut text = vec![0; text_len];
        self.exact(&mut text)?;
        self.has_ended = true;
        let text = || shown_long(&text);
        match kind {
            WHOLE => Ok(0),
            EARLY => Err(ErrorKind::UnexpectedEof.into()),
            WRONG => Err(io::Error::new(ErrorKind::InvalidData, text())),
            FAILED => Err(io::Error::other(text())),
            _ => Err(nonsense()),
        }
    }
}

impl<R: Read> Read for Decoded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() || (self.has_ended && self.left == 0) {
            return Ok(0);
        }
        if self.left == 0 {
            self.left = self.next_frame()?;
            if self.left == 0 {
                return Ok(0);
            }
        }
        let len = into.len().min(self.left);
        let len = match self.frames.read(&mut into[..len])? {
            0 => return Err(died()),
            len => len,
        };
        self.left -= len;
        Ok(len)
    }
}

/// A decoder's text: its length is bounded, and it has no control characters.
fn shown_long(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn died() -> io::Error {
    let why = "the archive cannot be decompressed: the process that does it ended, by its bounds (memory, system calls) or \
               a defect; the daemon's log may have more. Decompress it and import it as it is then";
    io::Error::new(ErrorKind::InvalidData, why)
}

fn nonsense() -> io::Error {
    let why = "the archive cannot be decompressed: the process that does it does not speak our language";
    io::Error::new(ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::compress::head;
    use crate::{Compression, Compressor, tar};

    fn archive() -> Vec<u8> {
        let mut bytes = Vec::new();
        let data: Vec<u8> = (0..700_001_u32).map(|at| (at / 9) as u8).collect();
        tar::put(&mut bytes, "a member", &data).unwrap();
        bytes
    }

    fn compressed(compression: Compression, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut compressor = Compressor::new(compression, &mut bytes);
        compressor.write_all(data).unwrap();
        compressor.finish().unwrap();
        bytes
    }

    /// What the daemon reads, with a decoder on a thread.
    fn through(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let mut rest = bytes;
            let (_, head) = head(&mut rest).unwrap();
            scope.spawn(move || {
                let _ = decode(rest, theirs);
            });
            let mut all = Vec::new();
            Decoded::begin(ours, &head)?.read_to_end(&mut all).map(|_| all)
        })
    }

    #[test]
    fn a_stream_is_the_same_through_a_decoder() {
        let data = archive();
        for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
            let bytes = compressed(compression, &data);
            assert!(through(&bytes).unwrap() == data, "{compression:?}");
            if compression != Compression::None {
                let short = through(&bytes[..bytes.len() / 2]).unwrap_err();
                assert_eq!(short.kind(), ErrorKind::UnexpectedEof, "{compression:?}");
            }
        }
        let mut damaged = compressed(Compression::Zstd, &data);
        damaged[4..600].fill(0xff);
        let told = through(&damaged).unwrap_err();
        assert_eq!(told.kind(), ErrorKind::InvalidData);
        assert!(told.to_string().contains("zstd"), "{told}");
    }

    #[test]
    fn a_decoder_that_dies_is_no_end() {
        let end = [0, 0, 0, 0, WHOLE, 0, 0];
        let whole = [&[3, 0, 0, 0][..], b"abc", &end].concat();
        let mut read = String::new();
        Decoded::new(&*whole).read_to_string(&mut read).unwrap();
        assert_eq!(read, "abc");
        for len in 0..whole.len() {
            let told = Decoded::new(&whole[..len]).read_to_end(&mut Vec::new()).unwrap_err();
            assert_eq!(told.kind(), ErrorKind::InvalidData, "{len}");
            assert!(told.to_string().contains("ended"), "{told}");
        }
        for nonsense in [&[0xff; 4][..], &[0, 0, 0, 0, 9, 0, 0], &[0, 0, 0, 0, WRONG, 0xff, 0xff]] {
            let told = Decoded::new(nonsense).read_to_end(&mut Vec::new()).unwrap_err();
            assert_eq!(told.kind(), ErrorKind::InvalidData);
        }
        let text = Decoded::new(&[0, 0, 0, 0, WRONG, 4, 0, b'a', 7, b'b', b'c'][..]);
        let told = { text }.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(told.to_string(), "a?bc");
    }
}
