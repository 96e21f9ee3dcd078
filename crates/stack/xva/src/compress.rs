//! What is around the tar archive: gzip, zstd or nothing.

use std::io::{self, BufRead, BufReader, Read, Write};

use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use crate::error::XvaError;
use crate::tar;

/// How an archive is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    #[default]
    None,
    /// By gzip.
    Gzip,
    /// By zstd.
    Zstd,
}

/// Bytes that tell which compression it is.
const HEAD_LEN: usize = 512;

/// Bytes that are read at once.
const PIECE_LEN: usize = 64 << 10;

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Largest window of zstd that is taken memory for: that of level 19, the highest without `--ultra`.
const WINDOW_MAX: u64 = 8 << 20;

/// Bytes of a frame of zstd that is written.
const FRAME_LEN: usize = 2 << 20;

type Headed<R> = BufReader<io::Chain<io::Cursor<Vec<u8>>, R>>;

/// The bytes of the tar archive, whatever is around it.
pub struct Decompressor<R: Read>(Kind<R>);

enum Kind<R: Read> {
    None(Headed<R>),
    Gzip(Box<MultiGzDecoder<Headed<R>>>),
    Zstd(Box<Zstd<Headed<R>>>),
}

impl<R: Read> std::fmt::Debug for Decompressor<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Decompressor").field(&self.compression()).finish()
    }
}

impl<R: Read> Decompressor<R> {
    /// Tells from its first bytes how a stream is compressed.
    ///
    /// # Errors
    /// It is neither a tar archive nor compressed in a known way, or is shorter than one block.
    pub fn new(mut input: R) -> Result<Self, XvaError> {
        let mut head = Vec::with_capacity(HEAD_LEN);
        input.by_ref().take(HEAD_LEN as u64).read_to_end(&mut head)?;
        let is_tar = head.first_chunk().is_some_and(tar::is_tar);
        let (is_zstd, is_gzip) = (head.starts_with(&ZSTD_MAGIC), head.starts_with(&GZIP_MAGIC));
        let is_short = head.len() < HEAD_LEN;
        let headed = BufReader::with_capacity(PIECE_LEN, io::Cursor::new(head).chain(input));
        Ok(Self(if is_tar {
            Kind::None(headed)
        } else if is_zstd {
            Kind::Zstd(Box::new(Zstd::new(headed)))
        } else if is_gzip {
            Kind::Gzip(Box::new(MultiGzDecoder::new(headed)))
        } else if is_short {
            return Err(XvaError::Early);
        } else {
            let why = "this is no XVA archive: neither a tar archive nor one compressed by gzip or zstd";
            return Err(XvaError::Wrong(why.to_owned()));
        }))
    }

    /// How it is compressed.
    pub fn compression(&self) -> Compression {
        match self.0 {
            Kind::None(_) => Compression::None,
            Kind::Gzip(_) => Compression::Gzip,
            Kind::Zstd(_) => Compression::Zstd,
        }
    }
}

impl<R: Read> Read for Decompressor<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.0 {
            Kind::None(input) => input.read(into),
            Kind::Gzip(input) => input.read(into),
            Kind::Zstd(input) => input.read(into),
        }
    }
}

/// Frames of zstd, one behind the other.
struct Zstd<R> {
    decoder: FrameDecoder,
    input: R,
    is_in_frame: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(input: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_MAX);
        Self { decoder, input, is_in_frame: false }
    }

    /// Whether there is another frame.
    fn begin(&mut self) -> io::Result<bool> {
        loop {
            if self.input.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.init(&mut self.input) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    if io::copy(&mut self.input.by_ref().take(length), &mut io::sink())? < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(self.refused(&error)),
            }
        }
    }

    /// Why a frame cannot be read: its stream ended, or it is no frame.
    fn refused(&mut self, error: &FrameDecoderError) -> io::Error {
        match self.input.fill_buf() {
            Err(error) => error,
            Ok([]) => io::ErrorKind::UnexpectedEof.into(),
            Ok(_) => {
                io::Error::new(io::ErrorKind::InvalidData, format!("the zstd stream is damaged: {error}"))
            }
        }
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while !into.is_empty() {
            if !self.is_in_frame {
                if !self.begin()? {
                    break;
                }
                self.is_in_frame = true;
            }
            let len = self.decoder.read(into)?;
            if len > 0 {
                return Ok(len);
            }
            if self.decoder.is_finished() {
                self.is_in_frame = false;
                continue;
            }
            let decoded = self.decoder.decode_blocks(&mut self.input, BlockDecodingStrategy::UptoBlocks(1));
            decoded.map_err(|error| self.refused(&error))?;
        }
        Ok(0)
    }
}

/// Compresses the bytes of a tar archive.
pub struct Compressor<W: Write>(To<W>);

enum To<W: Write> {
    None(W),
    Gzip(GzEncoder<W>),
    /// Each frame is compressed in memory: the encoder of the crate panics where its output fails.
    Zstd(W, Vec<u8>),
}

impl<W: Write> std::fmt::Debug for Compressor<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").finish_non_exhaustive()
    }
}

impl<W: Write> Compressor<W> {
    /// Compresses so into `output`.
    pub fn new(compression: Compression, output: W) -> Self {
        Self(match compression {
            Compression::None => To::None(output),
            Compression::Gzip => To::Gzip(GzEncoder::new(output, flate2::Compression::fast())),
            Compression::Zstd => To::Zstd(output, Vec::with_capacity(FRAME_LEN)),
        })
    }

    /// Writes what is held back and the end.
    ///
    /// # Errors
    /// The output's.
    pub fn finish(self) -> io::Result<()> {
        match self.0 {
            To::None(mut output) => output.flush(),
            To::Gzip(encoder) => encoder.finish()?.flush(),
            To::Zstd(mut output, held) => {
                if !held.is_empty() {
                    output.write_all(&frame(&held))?;
                }
                output.flush()
            }
        }
    }
}

fn frame(data: &[u8]) -> Vec<u8> {
    compress_to_vec(data, CompressionLevel::Fastest)
}

impl<W: Write> Write for Compressor<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            To::None(output) => output.write(data),
            To::Gzip(encoder) => encoder.write(data),
            To::Zstd(output, held) => {
                let len = data.len().min(FRAME_LEN - held.len());
                held.extend_from_slice(&data[..len]);
                if held.len() == FRAME_LEN {
                    output.write_all(&frame(held))?;
                    held.clear();
                }
                Ok(len)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.0 {
            To::None(output) => output.flush(),
            To::Gzip(encoder) => encoder.flush(),
            To::Zstd(output, _) => output.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive() -> Vec<u8> {
        let mut bytes = Vec::new();
        for number in 0..9_u8 {
            let data: Vec<u8> = (0..700_001_u32).map(|at| (at / 9) as u8 ^ number).collect();
            tar::put(&mut bytes, "a member", &data).unwrap();
        }
        bytes
    }

    fn compressed(compression: Compression, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut compressor = Compressor::new(compression, &mut bytes);
        compressor.write_all(data).unwrap();
        compressor.finish().unwrap();
        bytes
    }

    #[test]
    fn each_compression_is_told_and_read() {
        let data = archive();
        for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
            let mut bytes = compressed(compression, &data);
            if compression == Compression::Zstd {
                // A frame that readers pass over.
                bytes.extend([0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]);
            }
            let mut reader = Decompressor::new(&*bytes).unwrap();
            assert_eq!(reader.compression(), compression);
            let mut read = Vec::new();
            reader.read_to_end(&mut read).unwrap();
            assert!(read == data, "{compression:?}");
            let mut short = Decompressor::new(&bytes[..bytes.len() / 2]).unwrap();
            let ended = short.read_to_end(&mut Vec::new());
            assert!(compression == Compression::None || ended.is_err(), "{compression:?}");
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        assert!(matches!(Decompressor::new(&b"<html>"[..]), Err(XvaError::Early)));
        assert!(matches!(Decompressor::new(&[b'x'; 4096][..]), Err(XvaError::Wrong(_))));
    }
}
