//! Packages of VMs, their descriptors, and the images in them.

use std::io::{Cursor, Seek, Write};

use tapio_ova::{Descriptor, Image, Import, Package, Span};

/// Bytes of an archive that is made: what is all zero takes little in a package.
const TOTAL_MAX: u64 = 32 << 20;
/// Parts of a disk that are looked at.
const PARTS_MAX: usize = 64;

/// A package is opened, and becomes an archive of the length that was told before.
pub(super) fn ova(bytes: &[u8]) {
    // Without its sums, which a changed byte would break.
    let Ok(mut package) = Package::open(Cursor::new(bytes), false, |_| ()) else { return };
    let Ok(import) = Import::plan(&mut package) else { return };
    let len = import.len();
    if len > TOTAL_MAX {
        return;
    }
    let mut archive = Vec::new();
    if import.send(&mut package, &mut archive).is_ok() {
        assert_eq!(archive.len() as u64, len, "the length that the server is told");
    }
}

/// Drives name disks that are there.
pub(super) fn ova_descriptor(bytes: &[u8]) {
    let Ok(descriptor) = Descriptor::read(bytes) else { return };
    assert!(!descriptor.systems.is_empty());
    for system in &descriptor.systems {
        assert!(system.cpus > 0 && system.memory > 0);
        assert!(
            system.drives.iter().filter_map(|drive| drive.disk).all(|disk| disk < descriptor.disks.len())
        );
    }
}

/// A file that gzip packed is unpacked, whole or not at all; another one is left as it is.
pub(super) fn ova_packed(bytes: &[u8]) {
    // A host without room for temporary files tells nothing about the parser.
    let Ok(mut file) = tempfile::tempfile() else { return };
    if file.write_all(bytes).and_then(|()| file.rewind()).is_err() {
        return;
    }
    let is_packed = bytes.starts_with(&[0x1f, 0x8b, 8]);
    let Ok(unpacked) = tapio_ova::unpacked(file) else {
        assert!(is_packed, "what was not packed is read as it is");
        return;
    };
    let len = unpacked.metadata().map_or(0, |facts| facts.len());
    assert!(is_packed || len == bytes.len() as u64);
    // Deflate makes at most 1032 bytes of one.
    assert!(len <= 1032 * (bytes.len() as u64 + 1));
}

/// Parts of a disk are read; what is not held is zero.
pub(super) fn ova_image(bytes: &[u8]) {
    let mut input = Cursor::new(bytes);
    let span = Span { offset: 0, len: bytes.len() as u64 };
    let Ok(mut image) = Image::open(&mut input, span) else { return };
    let mut part = vec![0; 100_000];
    let mut at = 0;
    for _ in 0..PARTS_MAX {
        let Ok(held) = image.next_held(&mut input, at) else { return };
        let held = held.filter(|held| *held < image.len());
        assert!(held.is_none_or(|held| held >= at));
        if image.read(&mut input, at, &mut part).is_ok() {
            let zeros = held.map_or(part.len() as u64, |held| held - at).min(part.len() as u64);
            assert!(part[..zeros as usize].iter().all(|byte| *byte == 0), "what is not held is zero");
        }
        match held {
            Some(held) => at = held + part.len() as u64,
            None => return,
        }
    }
}
