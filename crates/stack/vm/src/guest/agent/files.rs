//! Directories and files of the guest, read in pieces of fixed size.

use super::sys::{self, File};
use super::text::Text;

/// Longest name of a file.
const NAME_LEN_MAX: usize = 512;
/// Longest answer.
pub const ANSWER_LEN_MAX: usize = 1024;

/// A name of a file.
pub type Name = Text<NAME_LEN_MAX>;
/// An answer of the agent.
pub type Answer = Text<ANSWER_LEN_MAX>;

/// Shows the names in a directory to `is_last` until it says so; whether it did.
pub fn each_entry(dir: &mut Name, mut is_last: impl FnMut(&[u8]) -> bool) -> bool {
    let Some(Ok(dir)) = dir.name().map(|name| File::open(name, sys::READ_ONLY)) else { return false };
    let mut bytes = [0; 2048];
    while let Ok(len @ 1..) = dir.entries(&mut bytes) {
        let mut rest = bytes.get(..len).unwrap_or_default();
        // `struct linux_dirent64`: number, offset, length of the whole (at 16), kind, and the name (at 19).
        while let Some(&[low, high]) = rest.get(16..18) {
            let (entry, after) = rest.split_at(usize::from(u16::from_ne_bytes([low, high])).min(rest.len()));
            let name = entry.get(19..).unwrap_or_default();
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            if !matches!(name, b"" | b"." | b"..") && is_last(name) {
                return true;
            }
            if entry.is_empty() {
                break;
            }
            rest = after;
        }
    }
    false
}

/// Shows the lines of a file to `is_last` until it says so; whether it did.
pub fn each_line(file: &mut Name, mut is_last: impl FnMut(&[u8]) -> bool) -> bool {
    let Some(Ok(file)) = file.name().map(|name| File::open(name, sys::READ_ONLY)) else { return false };
    let mut lines = Lines::<4096>::new();
    while let Some(line) = lines.next(&file) {
        if is_last(line) {
            return true;
        }
    }
    false
}

/// Lines of a file, as they come.
#[derive(Debug)]
pub struct Lines<const N: usize> {
    bytes: [u8; N],
    /// What was read and not given out.
    begin: usize,
    end: usize,
    /// The line that comes was longer than there is room for: its end is passed over.
    is_cut: bool,
}

impl<const N: usize> Lines<N> {
    /// Nothing is read yet.
    pub const fn new() -> Self {
        Self { bytes: [0; N], begin: 0, end: 0, is_cut: false }
    }

    /// The next line, without its end; none at the end of the file. One that is too long is left out.
    pub fn next(&mut self, file: &File) -> Option<&[u8]> {
        loop {
            let rest = self.bytes.get(self.begin..self.end).unwrap_or_default();
            if let Some(len) = rest.iter().position(|byte| *byte == b'\n') {
                let begin = self.begin;
                self.begin += len + 1;
                if core::mem::take(&mut self.is_cut) {
                    continue;
                }
                return self.bytes.get(begin..begin + len);
            }
            if self.begin == 0 && self.end == N {
                (self.end, self.is_cut) = (0, true);
            }
            self.bytes.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
            let room = self.bytes.get_mut(self.end..)?;
            match file.read(room) {
                Ok(read @ 1..) => self.end += read,
                _ => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::path::Path;

    use super::*;

    fn name(path: &Path) -> Name {
        Text::of(&[path.to_str().unwrap().as_bytes()])
    }

    #[test]
    fn lines_come_whole_and_those_that_are_too_long_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        let mut file = fs::File::create(&path).unwrap();
        writeln!(file, "1 ping").unwrap();
        writeln!(file, "2 {}", "x".repeat(100)).unwrap();
        write!(file, "\n3 ping\nno end").unwrap();
        let file = File::open(name(&path).name().unwrap(), sys::READ_ONLY).unwrap();
        let mut lines = Lines::<32>::new();
        let mut found = Vec::new();
        while let Some(line) = lines.next(&file) {
            found.push(String::from_utf8(line.to_vec()).unwrap());
        }
        assert_eq!(found, ["1 ping", "", "3 ping"]);
    }

    #[test]
    fn directories_are_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..300 {
            fs::write(dir.path().join(format!("virtio{number}")), "").unwrap();
        }
        let mut count = 0;
        assert!(!each_entry(&mut name(dir.path()), |entry| {
            count += usize::from(entry.starts_with(b"virtio"));
            false
        }));
        assert_eq!(count, 300);
        assert!(each_entry(&mut name(dir.path()), |entry| entry == b"virtio299"));
        assert!(!each_entry(&mut name(Path::new("/no/such/directory")), |_| true));
    }
}
