//! Headers of tar members whose length is written last.

use std::io::{self, Seek, SeekFrom, Write};

pub(crate) const BLOCK: usize = 512;

/// Largest length of eleven octal digits; above it the number is binary, as GNU's tar has it.
const OCTAL_MAX: u64 = (1 << 33) - 1;

/// The header of a member.
///
/// # Errors
/// The name has 100 bytes or more.
pub(crate) fn header(name: &str, len: u64) -> io::Result<[u8; BLOCK]> {
    let mut block = [0; BLOCK];
    if name.len() >= 100 {
        let why = format!("the name '{name}' of a file is too long for the package");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let mut field = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    field(0, name.as_bytes());
    field(100, b"0000644\0");
    field(108, b"0000000\0");
    field(116, b"0000000\0");
    if len <= OCTAL_MAX {
        field(124, format!("{len:011o}\0").as_bytes());
    } else {
        field(124, &[0x80, 0, 0, 0]);
        field(128, &len.to_be_bytes());
    }
    field(136, b"00000000000\0");
    field(148, b"        ");
    field(156, b"0");
    field(257, b"ustar\0");
    field(263, b"00");
    let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Ok(block)
}

/// Zeros behind so many bytes of a member.
pub(crate) fn padding(len: u64) -> &'static [u8] {
    &[0; BLOCK][..(len.wrapping_neg() % BLOCK as u64) as usize]
}

/// Writes bytes at a place, and goes back to the end.
pub(crate) fn patch(output: &mut (impl Write + Seek), at: u64, bytes: &[u8]) -> io::Result<()> {
    output.seek(SeekFrom::Start(at))?;
    output.write_all(bytes)?;
    output.seek(SeekFrom::End(0)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_with_lengths_of_both_kinds() {
        for len in [0, 700, OCTAL_MAX, OCTAL_MAX + 1, 3 << 40] {
            let block = header("a.vmdk", len).unwrap();
            let mut members = tapio_xva::Members::new(&block[..]);
            let member = members.next().unwrap().unwrap();
            assert_eq!((member.name.as_str(), member.len), ("a.vmdk", len));
        }
        assert!(header(&"x".repeat(100), 1).is_err());
        assert_eq!((padding(0).len(), padding(1).len(), padding(512).len()), (0, 511, 0));
    }
}
