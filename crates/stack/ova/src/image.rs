//! A disk of a package, whatever its file is.

use std::io::{Read, Seek};

use crate::DISK_LEN_MAX;
use crate::error::{OvaError, shown};
use crate::span::Span;
use crate::vhd::Vhd;
use crate::vmdk::Vmdk;

/// Bytes of a raw disk that are looked at together.
const PIECE: usize = 64 << 10;

/// A disk that is read at any place.
#[derive(Debug)]
pub struct Image {
    span: Span,
    len: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// It holds nothing.
    Empty,
    /// A byte of the disk is a byte of the file.
    Flat,
    Vmdk(Box<Vmdk>),
    Vhd(Vhd),
}

impl Image {
    /// A disk that holds nothing.
    pub(crate) fn empty(len: u64) -> Self {
        Self { span: Span { offset: 0, len: 0 }, len, kind: Kind::Empty }
    }

    /// Opens a VMDK or a VHD, told by its bytes.
    ///
    /// # Errors
    /// It is neither, is a difference to another image, or contradicts itself.
    pub fn open(input: &mut (impl Read + Seek), span: Span) -> Result<Self, OvaError> {
        Self::open_as(input, span, false)
    }

    /// The same; what is neither is raw if it `may_be_raw`, unless it begins as an image of another kind.
    ///
    /// # Errors
    /// As above, and if a raw disk has no whole sectors.
    pub(crate) fn open_as(
        input: &mut (impl Read + Seek),
        span: Span,
        may_be_raw: bool,
    ) -> Result<Self, OvaError> {
        let mut head = [0; 512];
        let len = span.len.min(512) as usize;
        span.read(input, 0, &mut head[..len])?;
        let (len, kind) = if head.starts_with(b"KDMV") {
            let vmdk = Vmdk::open(input, span, &head)?;
            (vmdk.len(), Kind::Vmdk(Box::new(vmdk)))
        } else {
            match Vhd::open(input, span, &head)? {
                Some((len, Some(vhd))) => (len, Kind::Vhd(vhd)),
                Some((len, None)) => (len, Kind::Flat),
                None => match foreign(&head) {
                    Some(why) => return Err(OvaError::Unsupported(why.to_owned())),
                    None if may_be_raw && span.len.is_multiple_of(512) => (span.len, Kind::Flat),
                    None => return Err(OvaError::Unsupported(unknown(&head))),
                },
            }
        };
        if len == 0 || len > DISK_LEN_MAX {
            let why = format!("a disk of {len} bytes: up to {DISK_LEN_MAX} are read");
            return Err(OvaError::Unsupported(why));
        }
        Ok(Self { span, len, kind })
    }

    /// Bytes of the disk.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the disk has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes the disk longer than its image; the rest is zero.
    pub(crate) fn grow(&mut self, len: u64) {
        self.len = self.len.max(len);
    }

    /// The first place at or behind this one of which the image holds anything; what lies between is zero.
    ///
    /// # Errors
    /// A table that contradicts itself; the input's.
    pub fn next_held(&mut self, input: &mut (impl Read + Seek), at: u64) -> Result<Option<u64>, OvaError> {
        match &mut self.kind {
            Kind::Empty => Ok(None),
            Kind::Flat => next_nonzero(input, self.span, at, self.len),
            Kind::Vmdk(vmdk) => vmdk.next_held(input, at),
            Kind::Vhd(vhd) => Ok(vhd.next_held(at)),
        }
    }

    /// Whether so many different places can lie in the file: each takes a sector of it.
    pub(crate) fn has_room_for(&self, places: u64) -> bool {
        places <= self.span.len / 512
    }

    /// Reads a part of the disk; what lies behind its end is zero.
    ///
    /// # Errors
    /// The image contradicts itself; the input's.
    pub fn read(&mut self, input: &mut (impl Read + Seek), at: u64, into: &mut [u8]) -> Result<(), OvaError> {
        match &mut self.kind {
            Kind::Empty => into.fill(0),
            Kind::Flat => {
                let there = self.span.len.saturating_sub(at).min(into.len() as u64) as usize;
                let (data, rest) = into.split_at_mut(there);
                self.span.read(input, at, data)?;
                rest.fill(0);
            }
            Kind::Vmdk(vmdk) => vmdk.read(input, at, into)?,
            Kind::Vhd(vhd) => vhd.read(input, at, into)?,
        }
        Ok(())
    }
}

/// The first piece at or behind this place in which a byte is not zero. Where those are was not written down.
fn next_nonzero(
    input: &mut (impl Read + Seek),
    span: Span,
    mut at: u64,
    len: u64,
) -> Result<Option<u64>, OvaError> {
    let end = span.len.min(len);
    let mut piece = vec![0; PIECE.min(end.saturating_sub(at) as usize)];
    while at < end {
        let data = &mut piece[..PIECE.min((end - at) as usize)];
        span.read(input, at, data)?;
        if data.iter().any(|byte| *byte != 0) {
            return Ok(Some(at));
        }
        at += data.len() as u64;
    }
    Ok(None)
}

/// Why an image of another kind, told by its first bytes, is not read.
fn foreign(head: &[u8; 512]) -> Option<&'static str> {
    let is = |at: usize, magic: &[u8]| head[at..].starts_with(magic);
    Some(match () {
        () if is(0, b"COWD") => "an old VMDK of ESX: write it anew, as stream-optimised",
        () if is(0, b"# Disk") => "a VMDK whose data are in other files: write it anew, as stream-optimised",
        () if is(0, b"QFI\xfb") => "an image of the kind qcow2: write it anew, as a stream-optimised VMDK",
        () if is(0, b"vhdxfile") => "a VHDX: write it anew, as a VHD or a stream-optimised VMDK",
        () if is(64, &[0x7f, 0x10, 0xda, 0xbe]) => {
            "a VDI of VirtualBox: write it anew, as a stream-optimised VMDK"
        }
        () => return None,
    })
}

fn unknown(head: &[u8; 512]) -> String {
    let first = shown(&String::from_utf8_lossy(&head[..8]));
    format!(
        "a disk that is neither a VMDK nor a VHD, nor named as raw (.img, .raw) or as large as its descriptor says: it \
         begins with '{first}'"
    )
}
