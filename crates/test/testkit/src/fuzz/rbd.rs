//! Names of images of Ceph, which notes and other programs write, and texts that other clients of a cluster write.

use tapio_rbd::{Target, note, texts};

/// The name of an image, a list of names, and the note of a lock's owner.
pub(super) fn rbd_names(bytes: &[u8]) {
    let lossy = String::from_utf8_lossy(bytes);
    if let Ok(target) = lossy.parse::<Target>() {
        let name = target.name();
        assert!(!name.contains("key="), "{name}: a secret is no part of a name");
        assert_eq!(name.parse().as_ref(), Ok(&target), "{name}: another image");
        assert!(!target.to_string().chars().any(char::is_control), "{target:?}: odd characters in a log");
    }
    let found = texts(bytes);
    assert!(found.iter().map(|text| text.len() + 1).sum::<usize>() <= bytes.len() + 1);
    if let Some(read) = note(&lossy) {
        assert_eq!(note(&read).as_ref(), Some(&read), "a note that reads as another");
    }
}
