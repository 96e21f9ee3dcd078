//! A package that is read: which files it has, whether they are whole, and what its descriptor says.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use tapio_xva::Members;

use crate::descriptor::Descriptor;
use crate::digest::{Sums, sums};
use crate::error::{OvaError, shown};
use crate::span::Span;
use crate::spool::{is_gzip, new_file, unpack};
use crate::{DESCRIPTOR_LEN_MAX, FILES_MAX, MANIFEST_LEN_MAX};

/// Bytes that are read at once.
const PIECE: usize = 256 << 10;

/// Whether a tar archive, also one that gzip packed, is a package, and no XVA archive: told from its first member.
pub fn is_package(input: impl Read) -> bool {
    let mut input = BufReader::new(input);
    let is_packed = matches!(input.fill_buf(), Ok(head) if is_gzip(head));
    let first = match is_packed {
        true => Members::new(MultiGzDecoder::new(input)).next(),
        false => Members::new(input).next(),
    };
    matches!(first, Ok(Some(member)) if is_descriptor(&member.name))
}

fn is_descriptor(name: &str) -> bool {
    ends_with(name, ".ovf")
}

fn ends_with(name: &str, end: &str) -> bool {
    name.get(name.len().saturating_sub(end.len())..).is_some_and(|last| last.eq_ignore_ascii_case(end))
}

/// Counts what is read through it.
struct Counted<R> {
    input: R,
    at: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = self.input.read(into)?;
        self.at.set(self.at.get() + len as u64);
        Ok(len)
    }
}

/// The bytes of the present member.
struct Member<'a, R>(&'a mut Members<R>);

impl<R: Read> Read for Member<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = self.0.left().min(into.len() as u64) as usize;
        self.0.read(&mut into[..len]).map_err(|error| match error {
            tapio_xva::XvaError::Io(error) => error,
            tapio_xva::XvaError::Early => io::ErrorKind::UnexpectedEof.into(),
            other => io::Error::new(io::ErrorKind::InvalidData, other.to_string()),
        })?;
        Ok(len)
    }
}

/// A package in a file.
#[derive(Debug)]
pub struct Package<R> {
    input: R,
    files: BTreeMap<String, Span>,
    descriptor: Descriptor,
    /// What was packed by gzip.
    spool: Option<File>,
}

/// Where a file is read: in the package, or unpacked.
pub(crate) enum Input<'a, R> {
    Package(&'a mut R),
    Spool(&'a mut File),
}

impl<R: Read> Read for Input<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Package(input) => input.read(into),
            Self::Spool(spool) => spool.read(into),
        }
    }
}

impl<R: Seek> Seek for Input<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            Self::Package(input) => input.seek(to),
            Self::Spool(spool) => spool.seek(to),
        }
    }
}

impl<R: Read + Seek> Package<R> {
    /// Reads all of it once: where its files are, and their sums, which those of its manifest must be if `is_checked`.
    /// `at` is told how many bytes were read.
    ///
    /// # Errors
    /// It is no package, ends early, or a file does not have its sum.
    pub fn open(mut input: R, is_checked: bool, mut at: impl FnMut(u64)) -> Result<Self, OvaError> {
        input.seek(SeekFrom::Start(0))?;
        let place = Rc::new(Cell::new(0));
        let counted = Counted { input: BufReader::with_capacity(PIECE, &mut input), at: Rc::clone(&place) };
        let mut members = Members::new(counted);
        let mut files: BTreeMap<String, (Span, Sums)> = BTreeMap::new();
        let (mut descriptor, mut manifest) = (None, None);
        while let Some(member) = members.next()? {
            let name = member.name.trim_start_matches("./").to_owned();
            let span = Span { offset: place.get(), len: member.len };
            let is_first = descriptor.is_none();
            if is_first && !is_descriptor(&name) {
                let why = format!(
                    "no OVA package: it begins with '{}', not with a descriptor (.ovf)",
                    shown(&name)
                );
                return Err(OvaError::Wrong(why));
            }
            if is_first || ends_with(&name, ".mf") {
                let max = if is_first { DESCRIPTOR_LEN_MAX } else { MANIFEST_LEN_MAX };
                let text = text(&mut members, (&name, member.len), max)?;
                let sums = sums(&text[..], |_| ())?;
                match is_first {
                    true => descriptor = Some(text),
                    false => manifest = Some((name.clone(), text)),
                }
                files.insert(name, (span, sums));
            } else {
                let sums = sums(Member(&mut members), |_| at(place.get()))?;
                if files.insert(name.clone(), (span, sums)).is_some() {
                    return Err(OvaError::Wrong(format!("the package has '{}' twice", shown(&name))));
                }
            }
            if files.len() > FILES_MAX {
                return Err(OvaError::Wrong(format!("the package has more than {FILES_MAX} files")));
            }
            at(place.get());
        }
        drop(members);
        let descriptor = descriptor.ok_or(OvaError::Early)?;
        if let Some((name, text)) = manifest.filter(|_| is_checked) {
            check(&name, &text, &files)?;
        }
        let files = files.into_iter().map(|(name, (span, _))| (name, span)).collect();
        Ok(Self { input, files, descriptor: Descriptor::read(&descriptor)?, spool: None })
    }

    /// What it says.
    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Where a file of it is.
    ///
    /// # Errors
    /// It does not have it.
    pub(crate) fn file(&self, name: &str) -> Result<Span, OvaError> {
        let found = self.files.get(name.trim_start_matches("./")).copied();
        found.ok_or_else(|| OvaError::Wrong(format!("the package does not have its file '{}'", shown(name))))
    }

    /// Where its files are read, or those that were unpacked.
    pub(crate) fn input(&mut self, is_unpacked: bool) -> Input<'_, R> {
        match &mut self.spool {
            Some(spool) if is_unpacked => Input::Spool(spool),
            _ => Input::Package(&mut self.input),
        }
    }

    /// Unpacks a file of it that gzip packed, unless it `may` be no such file and is none: where it is then. More than
    /// `limit` bytes are refused.
    ///
    /// # Errors
    /// It was not packed by gzip, or is damaged; what a temporary file says.
    pub(crate) fn unpack(&mut self, span: Span, may: bool, limit: u64) -> Result<Option<Span>, OvaError> {
        let mut head = [0; 3];
        let len = span.len.min(3) as usize;
        span.read(&mut self.input, 0, &mut head[..len])?;
        if !is_gzip(&head[..len]) {
            return match may {
                true => Ok(None),
                false => Err(OvaError::wrong("the descriptor says that gzip compressed it, which is not so")),
            };
        }
        let mut spool = match self.spool.take() {
            Some(spool) => spool,
            None => new_file()?,
        };
        let unpacked = unpack(&mut self.input, span, &mut spool, limit);
        self.spool = Some(spool);
        unpacked.map(Some)
    }
}

fn text<R: Read>(members: &mut Members<R>, (name, len): (&str, u64), max: u64) -> Result<Vec<u8>, OvaError> {
    if len > max {
        return Err(OvaError::Wrong(format!("'{}' has {len} bytes: {max} are read", shown(name))));
    }
    let mut text = vec![0; len as usize];
    members.read(&mut text)?;
    Ok(text)
}

/// Compares the sums of a manifest, lines as `SHA256(a.ovf)= 12ab...`, with those of the files.
fn check(name: &str, manifest: &[u8], files: &BTreeMap<String, (Span, Sums)>) -> Result<(), OvaError> {
    let wrong = |line: &str| {
        OvaError::Wrong(format!(
            "the manifest '{}' has a line that is not understood: '{}'",
            shown(name),
            shown(line)
        ))
    };
    let text = std::str::from_utf8(manifest).map_err(|_| wrong("no UTF-8"))?;
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (kind, rest) = line.split_once('(').ok_or_else(|| wrong(line))?;
        let (file, sum) =
            rest.rsplit_once(")=").or_else(|| rest.rsplit_once(") =")).ok_or_else(|| wrong(line))?;
        let missing =
            || OvaError::Wrong(format!("the package does not have '{}' of its manifest", shown(file)));
        let (_, sums) = files.get(file.trim_start_matches("./")).ok_or_else(missing)?;
        let ours = match kind.trim().to_ascii_uppercase().as_str() {
            "SHA1" => &sums.sha1,
            "SHA256" => &sums.sha256,
            other => {
                let why = format!(
                    "sums by {}: SHA1 and SHA256 are read; force=true passes them over",
                    shown(other)
                );
                return Err(OvaError::Unsupported(why));
            }
        };
        if !sum.trim().eq_ignore_ascii_case(ours) {
            return Err(OvaError::Damaged { name: shown(file) });
        }
    }
    Ok(())
}
