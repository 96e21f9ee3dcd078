//! What disks and targets of a storage network say of themselves.

use tapio_sm::{Pages, Portal, is_iscsi_name, is_scsi_id, parse_discovery};

/// Pages of a disk: the first byte says where the second begins; vendor and model are the end of it.
pub fn scsi_pages(bytes: &[u8]) {
    let Some((at, bytes)) = bytes.split_first() else { return };
    let (designators, serial) = bytes.split_at(usize::from(*at).min(bytes.len()));
    let words = String::from_utf8_lossy(&serial[serial.len().saturating_sub(20)..]).into_owned();
    let (vendor, model) = words.split_once(' ').unwrap_or((&words, ""));
    let pages = Pages { designators, serial, vendor, model };
    if let Some(id) = pages.scsi_id() {
        // It becomes the name of a file.
        assert!(is_scsi_id(&id), "{id:?}");
        assert_eq!(std::path::Path::new(&id).components().count(), 1, "{id:?}");
    }
    assert!(pages.serial().len() <= serial.len() * 3);
}

/// What `iscsiadm` prints after a discovery, whose names the target has chosen.
pub fn iscsi_discovery(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let found = parse_discovery(&text);
    assert!(found.len() <= text.lines().count());
    let mut lines = String::new();
    for node in &found {
        assert!(is_iscsi_name(&node.name), "{:?}", node.name);
        // It becomes an argument of a program and the name of a directory.
        assert!(!node.name.contains(['/', ' ']) && !node.name.starts_with('-'), "{:?}", node.name);
        assert_eq!(Portal::parse(&node.portal.to_string()), Some(node.portal));
        lines.push_str(&format!("{},1 {}\n", node.portal, node.name));
    }
    assert_eq!(parse_discovery(&lines), found);
}
