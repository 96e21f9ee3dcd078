//! A dynamic VHD that is written forward; its head, which says where its blocks are, is put in its place at the end.

use std::io::{self, ErrorKind, Seek, Write};

use tapio_format::vhd::stream::{STREAM_BLOCK_LEN, STREAM_LEN_MAX, StreamOut, StreamPart, StreamShape};
use tapio_format::vhd::{BLOCK_LEN, DiskType, Footer};

use crate::tar::patch;

/// Writes an image: pieces of the disk in their order.
pub(crate) struct VhdWriter<W> {
    output: W,
    /// The place of the image in the output.
    start: u64,
    shape: StreamShape,
    head_len: usize,
    /// The blocks that are there, in their order.
    blocks: Vec<u32>,
    /// The block that is being filled, and its number.
    block: Vec<u8>,
    number: u64,
}

fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, why.into())
}

/// The head of an image with these blocks, and its footer.
fn ends(shape: &StreamShape, blocks: Vec<u32>) -> io::Result<[Vec<u8>; 2]> {
    let stream = StreamOut::new(shape, blocks).map_err(|error| invalid(error.to_string()))?;
    let mut bytes = stream.parts().filter_map(|(_, part)| match part {
        StreamPart::Bytes(bytes) => Some(bytes.to_vec()),
        StreamPart::Block(_) => None,
    });
    let mut next =
        || bytes.next().ok_or_else(|| invalid("a VHD without a head or a footer: a defect of ours"));
    Ok([next()?, next()?])
}

impl<W: Write + Seek> VhdWriter<W> {
    /// Begins an image of a disk of `len` bytes, of whole sectors, where the output is now.
    ///
    /// # Errors
    /// The disk is larger than a VHD can be; the output's.
    pub(crate) fn new(mut output: W, len: u64) -> io::Result<Self> {
        if len > STREAM_LEN_MAX {
            let why =
                format!("a disk of {len} bytes: a VHD has {STREAM_LEN_MAX} at most; use disk-format=vmdk");
            return Err(invalid(why));
        }
        let Footer { uuid, timestamp, .. } = Footer::new(DiskType::Dynamic, len);
        let shape = StreamShape { len, uuid, timestamp, parent: None };
        let start = output.stream_position()?;
        let [head, _] = ends(&shape, Vec::new())?;
        output.write_all(&head)?;
        let block = vec![0; BLOCK_LEN as usize];
        Ok(Self { output, start, shape, head_len: head.len(), blocks: Vec::new(), block, number: 0 })
    }

    /// Writes a piece of the disk, which lies behind the one before it. What lies between is zero.
    ///
    /// # Errors
    /// It lies before another or behind the end; the output's.
    pub(crate) fn write(&mut self, mut at: u64, mut data: &[u8]) -> io::Result<()> {
        if at.checked_add(data.len() as u64).is_none_or(|end| end > self.shape.len) {
            return Err(invalid("a piece lies behind the end of its disk"));
        }
        while !data.is_empty() {
            let (number, inside) = (at / u64::from(BLOCK_LEN), (at % u64::from(BLOCK_LEN)) as usize);
            if number < self.number {
                return Err(invalid("a piece of a disk comes behind a later one"));
            }
            if number > self.number {
                self.end_block(number)?;
            }
            let len = (BLOCK_LEN as usize - inside).min(data.len());
            self.block[inside..inside + len].copy_from_slice(&data[..len]);
            data = &data[len..];
            at += len as u64;
        }
        Ok(())
    }

    /// Writes the block that is full, unless it is zero, and begins another one.
    fn end_block(&mut self, next: u64) -> io::Result<()> {
        if self.block.iter().any(|byte| *byte != 0) {
            self.output.write_all(&StreamOut::bitmap())?;
            self.output.write_all(&self.block)?;
            let number =
                u32::try_from(self.number).map_err(|_| invalid("a block behind the last one of a VHD"))?;
            self.blocks.push(number);
            self.block.fill(0);
        }
        self.number = next;
        Ok(())
    }

    /// Ends the image; answers its bytes. The output is at its end then.
    ///
    /// # Errors
    /// The output's.
    pub(crate) fn finish(mut self) -> io::Result<u64> {
        self.end_block(self.number)?;
        let count = self.blocks.len() as u64;
        let [head, footer] = ends(&self.shape, self.blocks)?;
        if head.len() != self.head_len {
            return Err(invalid("the head of a VHD has another length than was reserved: a defect of ours"));
        }
        self.output.write_all(&footer)?;
        patch(&mut self.output, self.start, &head)?;
        Ok((head.len() + footer.len()) as u64 + count * STREAM_BLOCK_LEN)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use tapio_format::vhd::offline::{Image as Vhd, OpenOptions};

    use super::*;
    use crate::image::Image;
    use crate::span::Span;

    #[test]
    fn an_image_is_read_as_it_was_written() {
        const BLOCK: usize = BLOCK_LEN as usize;
        let len = 9 * BLOCK as u64 + 512;
        let mut disk = vec![0; len as usize];
        let mut output = Cursor::new(vec![1; 700]);
        output.set_position(700);
        let mut writer = VhdWriter::new(&mut output, len).unwrap();
        for (at, piece) in [(5, 3_000_000), (4 * BLOCK, 1), (9 * BLOCK, 512)] {
            let data: Vec<u8> = (0..piece).map(|byte: usize| (byte * 7 + at) as u8 | 1).collect();
            disk[at..at + piece].copy_from_slice(&data);
            writer.write(at as u64, &data).unwrap();
        }
        assert!(writer.write(0, &[1]).is_err() && writer.write(len, &[1]).is_err());
        let image_len = writer.finish().unwrap();
        let span = Span { offset: 700, len: image_len };
        assert_eq!(output.get_ref().len() as u64, 700 + image_len);
        assert!(image_len < 5 * BLOCK as u64, "zero blocks are not there");
        let mut image = Image::open(&mut output, span).unwrap();
        let mut read = vec![0; image.len() as usize];
        image.read(&mut output, 0, &mut read).unwrap();
        assert!(read == disk);
        // As our own tools check it, and XenServer's.
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &output.get_ref()[700..]).unwrap();
        let opened = Vhd::open(file.path(), OpenOptions::READ).unwrap();
        assert!(opened.tolerances().is_empty(), "{:?}", opened.tolerances());
    }

    #[test]
    fn a_disk_that_is_too_large_is_refused() {
        let refused = VhdWriter::new(Cursor::new(Vec::new()), STREAM_LEN_MAX + 512).err().unwrap();
        assert!(refused.to_string().contains("use disk-format=vmdk"), "{refused}");
    }
}
