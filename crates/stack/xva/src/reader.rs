//! An archive that is read forward.

use std::io::Read;

use crate::document::Document;
use crate::error::{XvaError, shown};
use crate::tar::Members;
use crate::{CHUNK_LEN_MAX, DOCUMENT, DOCUMENT_LEN_MAX, digest};

/// Bytes of the longest sum: of a SHA-1, with the line end that some write.
const SUM_LEN_MAX: u64 = 64;

/// A piece of a disk.
#[derive(Debug, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// The id of the VDI.
    pub disk: &'a str,
    /// Its number.
    pub number: u32,
    /// Its bytes.
    pub data: &'a [u8],
}

/// Reads an archive: its document first, then piece by piece.
#[derive(Debug)]
pub struct Reader<R> {
    members: Members<R>,
    disk: String,
    data: Vec<u8>,
    is_checked: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the document, from a stream that is not compressed any more. `is_checked`: a wrong sum is an error.
    ///
    /// # Errors
    /// The archive does not begin with it, or it cannot be read.
    pub fn open(input: R, is_checked: bool) -> Result<(Self, Document), XvaError> {
        let mut members = Members::new(input);
        let first = members.next()?.ok_or(XvaError::Early)?;
        if first.name.trim_start_matches("./") != DOCUMENT {
            return Err(XvaError::Unexpected { expected: DOCUMENT.to_owned(), found: shown(&first.name) });
        }
        if first.len > DOCUMENT_LEN_MAX as u64 {
            let why = format!("ova.xml has {} bytes: {DOCUMENT_LEN_MAX} are read", first.len);
            return Err(XvaError::Wrong(why));
        }
        let mut text = vec![0; first.len as usize];
        members.read(&mut text)?;
        let document = Document::read(&text)?;
        Ok((Self { members, disk: String::new(), data: Vec::new(), is_checked }, document))
    }

    /// The next piece, checked against its sum; none at the end of the archive.
    ///
    /// # Errors
    /// It is no piece, is too long, has no sum or a wrong one; the archive ends early.
    pub fn next_chunk(&mut self) -> Result<Option<Chunk<'_>>, XvaError> {
        let Some(member) = self.members.next()? else { return Ok(None) };
        let (disk, number) = parse(&member.name).ok_or_else(|| XvaError::Unexpected {
            expected: "the next piece of a disk, as 'Ref:1/00000000'".to_owned(),
            found: shown(&member.name),
        })?;
        if member.len > CHUNK_LEN_MAX as u64 {
            let why = format!(
                "'{}' has {} bytes: pieces of {CHUNK_LEN_MAX} are read",
                shown(&member.name),
                member.len
            );
            return Err(XvaError::Wrong(why));
        }
        disk.clone_into(&mut self.disk);
        self.data.resize(member.len as usize, 0);
        self.members.read(&mut self.data)?;
        self.check(&member.name)?;
        Ok(Some(Chunk { disk: &self.disk, number, data: &self.data }))
    }

    /// Reads the sum of the piece that was read.
    fn check(&mut self, name: &str) -> Result<(), XvaError> {
        let sum = self.members.next()?.ok_or(XvaError::Early)?;
        let kind = sum.name.strip_prefix(name).filter(|_| sum.len <= SUM_LEN_MAX);
        let ours = match kind {
            Some(".xxhash") => digest::xxhash(&self.data),
            Some(".checksum") => digest::sha1(&self.data),
            _ => {
                let expected = format!("{}.xxhash", shown(name));
                return Err(XvaError::Unexpected { expected, found: shown(&sum.name) });
            }
        };
        let mut theirs = vec![0; sum.len as usize];
        self.members.read(&mut theirs)?;
        if self.is_checked && theirs.trim_ascii() != ours.as_bytes() {
            return Err(XvaError::Damaged { name: shown(name) });
        }
        Ok(())
    }
}

/// The disk and the number in the name of a piece.
fn parse(name: &str) -> Option<(&str, u32)> {
    let (disk, number) = name.trim_start_matches("./").rsplit_once('/')?;
    let is_number = number.len() >= 8 && number.bytes().all(|byte| byte.is_ascii_digit());
    Some((disk, number.parse().ok().filter(|_| is_number && !disk.is_empty())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::Version;
    use crate::{Writer, tar};

    fn document() -> Document {
        let text = String::new;
        let version = Version {
            hostname: text(),
            date: text(),
            product_brand: text(),
            product_version: text(),
            build_number: text(),
            major: 2,
            minor: 0,
        };
        Document { version, objects: Vec::new() }
    }

    fn all(bytes: &[u8], is_checked: bool) -> Result<Vec<(String, u32, usize)>, XvaError> {
        let (mut reader, _) = Reader::open(bytes, is_checked)?;
        let mut found = Vec::new();
        while let Some(chunk) = reader.next_chunk()? {
            found.push((chunk.disk.to_owned(), chunk.number, chunk.data.len()));
        }
        Ok(found)
    }

    fn head() -> Vec<u8> {
        let mut writer = Writer::new(Vec::new(), &document()).unwrap();
        writer.chunk("Ref:1", 0, &[7; 1000]).unwrap();
        let mut bytes = writer.finish().unwrap();
        bytes.truncate(bytes.len() - 1024);
        bytes
    }

    #[test]
    fn pieces_are_read_as_they_were_written_with_sums_of_both_kinds() {
        let mut bytes = head();
        tar::put(&mut bytes, "Ref:1/00000009", b"abc").unwrap();
        tar::put(&mut bytes, "Ref:1/00000009.checksum", b"a9993e364706816aba3e25717850c26c9cd0d89d").unwrap();
        tar::end(&mut bytes).unwrap();
        let expected = [("Ref:1".to_owned(), 0, 1000), ("Ref:1".to_owned(), 9, 3)];
        assert_eq!(all(&bytes, true).unwrap(), expected);
        let at = bytes.windows(3).rposition(|three| three == b"abc").unwrap();
        bytes[at] = b'x';
        assert!(matches!(all(&bytes, true), Err(XvaError::Damaged { name }) if name == "Ref:1/00000009"));
        assert_eq!(all(&bytes, false).unwrap(), expected);
    }

    #[test]
    fn other_members_are_refused() {
        let with = |name: &str, data: &[u8]| {
            let mut bytes = head();
            tar::put(&mut bytes, name, data).unwrap();
            tar::put(&mut bytes, "next", b"").unwrap();
            all(&bytes, false)
        };
        for name in [
            "../../etc/passwd",
            "/etc/passwd",
            "Ref:1/1",
            "Ref:1/00000001",
            "Ref:1/99999999999",
            "/00000001",
            "",
        ] {
            let refused = with(name, b"x");
            assert!(
                matches!(refused, Err(XvaError::Unexpected { .. } | XvaError::Wrong(_))),
                "{name}: {refused:?}"
            );
        }
        assert!(matches!(with("Ref:1/00000001", &vec![0; CHUNK_LEN_MAX + 1]), Err(XvaError::Wrong(_))));
        let mut bytes = Vec::new();
        tar::put(&mut bytes, "other.xml", b"").unwrap();
        assert!(
            matches!(all(&bytes, true), Err(XvaError::Unexpected { expected, .. }) if expected == DOCUMENT)
        );
        assert!(matches!(all(&head(), true), Err(XvaError::Early)));
    }
}
