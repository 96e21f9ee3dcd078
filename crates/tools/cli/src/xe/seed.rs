//! The medium from which cloud-init takes the settings of a guest: a small file system with the label CIDATA
//! (cloud-init, data source NoCloud).
//!
//! It is ISO 9660 (ECMA-119) with a Joliet tree, so that names are as they were given: one directory, files one after
//! the other. The same files give the same bytes.

/// Bytes of a sector of a CD.
const SECTOR: usize = 2048;
/// Sectors in front of the volume descriptors, for other systems.
const SYSTEM_AREA: usize = 16;
/// Where things lie, in sectors: three descriptors, two path tables of each tree, two directories, then the files.
const PATHS: [u32; 4] = [19, 20, 21, 22];
const ROOTS: [u32; 2] = [23, 24];
const FILES_AT: u32 = 25;

/// Longest file: what a person writes is far below.
pub const FILE_LEN_MAX: usize = 8 << 20;

/// A number in both orders of bytes.
fn both32(number: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    bytes[4..].copy_from_slice(&number.to_be_bytes());
    bytes
}

fn both16(number: u16) -> [u8; 4] {
    let mut bytes = [0; 4];
    bytes[..2].copy_from_slice(&number.to_le_bytes());
    bytes[2..].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// Which of the two trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tree {
    /// Of the standard: capitals and a version behind the name.
    Plain,
    /// Of Joliet: UCS-2, big end first.
    Joliet,
}

impl Tree {
    fn name(self, name: &str) -> Vec<u8> {
        match self {
            Self::Plain => format!("{}.;1", name.to_ascii_uppercase()).into_bytes(),
            Self::Joliet => name.encode_utf16().flat_map(u16::to_be_bytes).collect(),
        }
    }

    /// Text of a fixed length, filled up with blanks.
    fn padded(self, text: &str, len: usize) -> Vec<u8> {
        let (mut bytes, blank): (Vec<u8>, &[u8]) = match self {
            Self::Plain => (text.bytes().collect(), b" "),
            Self::Joliet => (text.encode_utf16().flat_map(u16::to_be_bytes).collect(), b"\0 "),
        };
        while bytes.len() < len {
            bytes.extend_from_slice(blank);
        }
        bytes.truncate(len);
        bytes
    }
}

/// A record of a directory (ECMA-119, 9.1).
fn record(name: &[u8], at: u32, len: u32, is_dir: bool) -> Vec<u8> {
    let size = (33 + name.len()).next_multiple_of(2);
    let mut bytes = Vec::with_capacity(size);
    bytes.extend_from_slice(&[size as u8, 0]);
    bytes.extend_from_slice(&both32(at));
    bytes.extend_from_slice(&both32(len));
    // No date: 1970 would be as good.
    bytes.extend_from_slice(&[70, 1, 1, 0, 0, 0, 0]);
    bytes.extend_from_slice(&[if is_dir { 2 } else { 0 }, 0, 0]);
    bytes.extend_from_slice(&both16(1));
    bytes.push(name.len() as u8);
    bytes.extend_from_slice(name);
    bytes.resize(size, 0);
    bytes
}

/// A volume descriptor (ECMA-119, 8.4 and 8.5).
fn descriptor(tree: Tree, sectors: u32) -> Vec<u8> {
    let at = tree as usize;
    let mut bytes = vec![if tree == Tree::Plain { 1 } else { 2 }];
    bytes.extend_from_slice(b"CD001\x01\0");
    bytes.extend(tree.padded("", 32));
    bytes.extend(tree.padded("CIDATA", 32));
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend_from_slice(&both32(sectors));
    let mut escapes = [0; 32];
    if tree == Tree::Joliet {
        // UCS-2, level 3
        escapes[..3].copy_from_slice(b"%/E");
    }
    bytes.extend_from_slice(&escapes);
    bytes.extend_from_slice(&both16(1));
    bytes.extend_from_slice(&both16(1));
    bytes.extend_from_slice(&both16(SECTOR as u16));
    bytes.extend_from_slice(&both32(10));
    bytes.extend_from_slice(&PATHS[at * 2].to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&PATHS[at * 2 + 1].to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend(record(&[0], ROOTS[at], SECTOR as u32, true));
    // Names of the volume set, publisher, preparer, application and three files.
    bytes.extend(tree.padded("", 128 * 4 + 37 * 3));
    for _ in 0..4 {
        // Dates that are not given: sixteen zeros as digits, and no offset.
        bytes.extend_from_slice(&[b'0'; 16]);
        bytes.push(0);
    }
    bytes.extend_from_slice(&[1, 0]);
    bytes.resize(SECTOR, 0);
    bytes
}

/// The path table of a tree with its root alone (ECMA-119, 9.4).
fn paths(root: [u8; 4], parent: [u8; 2]) -> Vec<u8> {
    let mut bytes = vec![1, 0];
    bytes.extend_from_slice(&root);
    bytes.extend_from_slice(&parent);
    bytes.extend_from_slice(&[0, 0]);
    bytes.resize(SECTOR, 0);
    bytes
}

fn directory(tree: Tree, files: &[(&str, u32, u32)]) -> Vec<u8> {
    let root = ROOTS[tree as usize];
    let mut bytes = record(&[0], root, SECTOR as u32, true);
    bytes.extend(record(&[1], root, SECTOR as u32, true));
    for (name, at, len) in files {
        bytes.extend(record(&tree.name(name), *at, *len, false));
    }
    bytes.resize(SECTOR, 0);
    bytes
}

/// Makes the medium of these files; names are plain and short, and at most eight.
///
/// # Errors
/// A sentence: a file is too long.
pub fn image(files: &[(&str, &[u8])]) -> Result<Vec<u8>, String> {
    debug_assert!(
        files.len() <= 8 && files.iter().all(|(name, _)| name.len() <= 32),
        "one sector has all names"
    );
    let mut sorted: Vec<_> = files.to_vec();
    sorted.sort_by_key(|(name, _)| *name);
    let mut at = FILES_AT;
    let mut listed = Vec::new();
    for (name, content) in &sorted {
        if content.len() > FILE_LEN_MAX {
            return Err(format!("{name} has {} bytes, and {FILE_LEN_MAX} are possible", content.len()));
        }
        listed.push((*name, at, content.len() as u32));
        at += content.len().div_ceil(SECTOR).max(1) as u32;
    }
    let mut bytes = vec![0; SYSTEM_AREA * SECTOR];
    bytes.extend(descriptor(Tree::Plain, at));
    bytes.extend(descriptor(Tree::Joliet, at));
    let mut end = b"\xffCD001\x01".to_vec();
    end.resize(SECTOR, 0);
    bytes.extend(end);
    for root in ROOTS {
        bytes.extend(paths(root.to_le_bytes(), 1_u16.to_le_bytes()));
        bytes.extend(paths(root.to_be_bytes(), 1_u16.to_be_bytes()));
    }
    bytes.extend(directory(Tree::Plain, &listed));
    bytes.extend(directory(Tree::Joliet, &listed));
    for (_, content) in &sorted {
        bytes.extend_from_slice(content);
        let len =
            bytes.len().next_multiple_of(SECTOR).max(bytes.len() + usize::from(content.is_empty()) * SECTOR);
        bytes.resize(len, 0);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_lie_where_the_descriptors_say() {
        let long = vec![b'x'; 5000];
        let made =
            image(&[("user-data", &long), ("meta-data", b"instance-id: 1\n"), ("empty", b"")]).unwrap();
        assert_eq!(made.len() % SECTOR, 0);
        let sector = |at: u32| &made[at as usize * SECTOR..(at as usize + 1) * SECTOR];
        assert_eq!((&sector(16)[1..6], &sector(16)[40..46]), (&b"CD001"[..], &b"CIDATA"[..]));
        assert_eq!((sector(17)[0], sector(18)[0]), (2, 255));
        // The root of the second tree is where its descriptor says, and has all names.
        let root = u32::from_le_bytes(sector(17)[158..162].try_into().unwrap());
        assert_eq!(root, ROOTS[1]);
        let name: Vec<u8> = "user-data".encode_utf16().flat_map(u16::to_be_bytes).collect();
        let dir = sector(root);
        let place = dir.windows(name.len()).position(|part| part == name).unwrap() - 33;
        let at = u32::from_le_bytes(dir[place + 2..place + 6].try_into().unwrap());
        let len = u32::from_le_bytes(dir[place + 10..place + 14].try_into().unwrap());
        assert_eq!(&made[at as usize * SECTOR..][..len as usize], &long[..]);
        assert_eq!(
            made.len() as u32 / SECTOR as u32,
            u32::from_le_bytes(sector(16)[80..84].try_into().unwrap())
        );
        assert!(image(&[("user-data", &vec![0; FILE_LEN_MAX + 1])]).unwrap_err().contains("possible"));
    }
}
