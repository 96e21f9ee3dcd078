//! The members of a tar archive, one after the other: ustar, with the long names of GNU and of PAX.
//!
//! The `tar` crate takes memory for as long a name as the archive claims to have, and knows paths, owners and links.
//! Here a member is a name and bytes.

use std::io::{self, Read, Write};

use crate::error::{XvaError, shown};

/// Bytes of a header, and what members are padded to.
const BLOCK: usize = 512;

/// Longest name that is read.
const NAME_LEN_MAX: u64 = 4096;

/// Longest set of PAX fields of a member that is read.
const FIELDS_LEN_MAX: u64 = 64 << 10;

/// Headers before one member, at most: a name, fields of the member and of all members.
const EXTRA_MAX: usize = 8;

/// A member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name, as it stands there: never a path to use.
    pub name: String,
    /// Its bytes.
    pub len: u64,
}

fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}

/// A number: octal digits, or bytes of the highest first behind a set bit.
fn number(field: &[u8]) -> Option<u64> {
    if field.first().is_some_and(|byte| byte & 0x80 != 0) {
        let (high, low) = field.split_at(field.len() - 8);
        let is_small = high.iter().enumerate().all(|(at, byte)| *byte == if at == 0 { 0x80 } else { 0 });
        return low.first_chunk().filter(|_| is_small).map(|bytes| u64::from_be_bytes(*bytes));
    }
    let digits = text(field);
    let digits = digits.trim();
    if digits.is_empty() {
        return Some(0);
    }
    u64::from_str_radix(digits, 8).ok()
}

fn sum(block: &[u8; BLOCK]) -> u64 {
    let is_sum = |at: usize| (148..156).contains(&at);
    block.iter().enumerate().map(|(at, byte)| if is_sum(at) { 32 } else { u64::from(*byte) }).sum()
}

/// Whether these bytes begin a tar archive.
pub(crate) fn is_tar(block: &[u8; BLOCK]) -> bool {
    number(&block[148..156]) == Some(sum(block)) && block[0] != 0
}

/// What a header can say beside its own name and length.
#[derive(Default)]
struct Extra {
    name: Option<String>,
    len: Option<u64>,
}

impl Extra {
    /// Reads PAX fields: `LENGTH KEY=VALUE\n`, the length counting all of it.
    fn read(&mut self, mut fields: &[u8]) -> Option<()> {
        while !fields.is_empty() {
            let space = fields.iter().position(|&byte| byte == b' ')?;
            let len: usize = std::str::from_utf8(&fields[..space]).ok()?.parse().ok()?;
            let field = fields.get(space + 1..len)?.strip_suffix(b"\n")?;
            let equals = field.iter().position(|&byte| byte == b'=')?;
            let value = std::str::from_utf8(&field[equals + 1..]).ok();
            match &field[..equals] {
                b"path" => self.name = Some(value?.to_owned()),
                b"size" => self.len = Some(value?.parse().ok()?),
                _ => {}
            }
            fields = &fields[len..];
        }
        Some(())
    }
}

/// Reads an archive forward.
#[derive(Debug)]
pub struct Members<R> {
    input: R,
    /// Bytes of the present member that were not read, and of its padding.
    left: u64,
    padding: u64,
    has_ended: bool,
}

impl<R: Read> Members<R> {
    /// Reads this one, which is not compressed.
    pub fn new(input: R) -> Self {
        Self { input, left: 0, padding: 0, has_ended: false }
    }

    /// Bytes of the present member that were not read.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// The next member; none behind the last. What was not read of the one before is passed over.
    ///
    /// # Errors
    /// A header is damaged, too long or of no file; the archive ends early.
    #[allow(clippy::should_implement_trait, reason = "it is no iterator: members are read between two calls")]
    pub fn next(&mut self) -> Result<Option<Member>, XvaError> {
        if self.has_ended {
            return Ok(None);
        }
        let mut extra = Extra::default();
        for _ in 0..EXTRA_MAX {
            self.skip()?;
            let mut block = [0; BLOCK];
            self.input.read_exact(&mut block)?;
            if block.iter().all(|&byte| byte == 0) {
                self.has_ended = true;
                return Ok(None);
            }
            if number(&block[148..156]) != Some(sum(&block)) {
                return Err(XvaError::Wrong("a header of the tar archive is damaged".to_owned()));
            }
            let wrong =
                || XvaError::Wrong("the length of a member of the tar archive is no number".to_owned());
            let len = number(&block[124..136]).ok_or_else(wrong)?;
            self.begin(len);
            match block[156] {
                b'L' => extra.name = Some(text(&self.field(len, NAME_LEN_MAX)?)),
                b'x' => {
                    let fields = self.field(len, FIELDS_LEN_MAX)?;
                    let wrong = || XvaError::Wrong("PAX fields of the tar archive are damaged".to_owned());
                    extra.read(&fields).ok_or_else(wrong)?;
                }
                b'g' => {}
                0 | b'0' => {
                    let len = extra.len.unwrap_or(len);
                    self.begin(len);
                    let name = extra.name.unwrap_or_else(|| name(&block));
                    return Ok(Some(Member { name, len }));
                }
                kind => {
                    let name = shown(&name(&block));
                    let kind = char::from(kind).escape_default();
                    return Err(XvaError::Wrong(format!(
                        "'{name}' is no file of the tar archive (type {kind})"
                    )));
                }
            }
        }
        Err(XvaError::Wrong("a member of the tar archive has too many headers".to_owned()))
    }

    fn begin(&mut self, len: u64) {
        self.left = len;
        self.padding = len.wrapping_neg() % BLOCK as u64;
    }

    /// The bytes of a header that is more than a block.
    fn field(&mut self, len: u64, max: u64) -> Result<Vec<u8>, XvaError> {
        if len > max {
            return Err(XvaError::Wrong(format!(
                "a header of the tar archive has {len} bytes, {max} are read"
            )));
        }
        let mut bytes = vec![0; len as usize];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// The next bytes of the member, which has as many.
    ///
    /// # Errors
    /// It has fewer; the archive ends early.
    pub fn read(&mut self, into: &mut [u8]) -> Result<(), XvaError> {
        let len = into.len() as u64;
        if len > self.left {
            return Err(XvaError::Early);
        }
        self.input.read_exact(into)?;
        self.left -= len;
        Ok(())
    }

    fn skip(&mut self) -> Result<(), XvaError> {
        let rest = self.left.saturating_add(self.padding);
        if rest > 0 && io::copy(&mut self.input.by_ref().take(rest), &mut io::sink())? < rest {
            return Err(XvaError::Early);
        }
        (self.left, self.padding) = (0, 0);
        Ok(())
    }
}

/// The name in a header: with its prefix, in archives that have one.
fn name(block: &[u8; BLOCK]) -> String {
    let name = text(&block[..100]);
    let prefix = if &block[257..263] == b"ustar\0" { text(&block[345..500]) } else { String::new() };
    if prefix.is_empty() { name } else { format!("{prefix}/{name}") }
}

/// Writes a member of a tar archive.
///
/// # Errors
///
/// The name has 100 bytes or more, or writing fails.
pub fn put(output: &mut impl Write, name: &str, data: &[u8]) -> io::Result<()> {
    let mut block = [0; BLOCK];
    let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "the name of a member is too long");
    block
        .get_mut(..name.len())
        .filter(|place| place.len() < 100)
        .ok_or_else(too_long)?
        .copy_from_slice(name.as_bytes());
    let mut field = |at: usize, text: &str| block[at..at + text.len()].copy_from_slice(text.as_bytes());
    for at in [100, 108, 116] {
        field(at, "0000000\0");
    }
    field(124, &format!("{:011o}\0", data.len()));
    field(136, "00000000000\0");
    field(156, "0");
    field(257, "ustar\0");
    field(263, "00");
    let sum = sum(&block);
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    output.write_all(&block)?;
    output.write_all(data)?;
    output.write_all(&[0; BLOCK][..data.len().wrapping_neg() % BLOCK])
}

/// Writes the end of a tar archive.
///
/// # Errors
///
/// Writing fails.
pub fn end(output: &mut impl Write) -> io::Result<()> {
    output.write_all(&[0; 2 * BLOCK])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(bytes: &[u8]) -> Result<Vec<(String, Vec<u8>)>, XvaError> {
        let mut members = Members::new(bytes);
        let mut found = Vec::new();
        while let Some(member) = members.next()? {
            let mut data = vec![0; member.len as usize];
            members.read(&mut data)?;
            found.push((member.name, data));
        }
        Ok(found)
    }

    fn typed(kind: u8, name: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        put(&mut bytes, name, data).unwrap();
        bytes[156] = kind;
        let sum = sum(bytes.first_chunk().unwrap());
        bytes[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        bytes
    }

    #[test]
    fn members_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        for (name, len) in [("ova.xml", 700), ("Ref:1/00000000", 512), ("empty", 0)] {
            put(&mut bytes, name, &vec![7; len]).unwrap();
        }
        assert!(is_tar(bytes.first_chunk().unwrap()));
        let early = members(&bytes);
        assert!(matches!(early, Err(XvaError::Early)));
        end(&mut bytes).unwrap();
        assert_eq!(bytes.len() % BLOCK, 0);
        let found = members(&bytes).unwrap();
        let lens: Vec<_> = found.iter().map(|(name, data)| (name.as_str(), data.len())).collect();
        assert_eq!(lens, [("ova.xml", 700), ("Ref:1/00000000", 512), ("empty", 0)]);
        assert!(put(&mut Vec::new(), &"x".repeat(100), b"").is_err());
    }

    #[test]
    fn long_names_of_both_kinds_are_read() {
        let fields = b"20 path=Ref:9/chunk\n10 size=3\n";
        let mut bytes = typed(b'x', "pax", fields);
        bytes.extend(typed(b'0', "short", b"abc"));
        bytes.extend(typed(b'L', "././@LongLink", b"a long name\0"));
        bytes.extend(typed(0, "short", b"def"));
        bytes.extend([0; 1024]);
        let found = members(&bytes).unwrap();
        assert_eq!(
            found,
            [("Ref:9/chunk".to_owned(), b"abc".to_vec()), ("a long name".to_owned(), b"def".to_vec())]
        );
    }

    #[test]
    fn what_is_no_file_or_too_long_is_refused() {
        let wrong = |bytes: &[u8]| matches!(members(bytes), Err(XvaError::Wrong(_)));
        assert!(wrong(&typed(b'2', "link", b"")));
        assert!(wrong(&typed(b'L', "long", &[b'x'; 5000])));
        assert!(wrong(&typed(b'x', "pax", b"nonsense")));
        assert!(wrong(&[1; 512]));
        assert!(wrong(&typed(b'x', "pax", b"").repeat(20)));
        assert_eq!(number(b"\x80\0\0\0\0\0\0\0\0\0\x01\0"), Some(256));
        assert_eq!(number(b"\xff\0\0\0\0\0\0\0\0\0\x01\0"), None);
    }
}
