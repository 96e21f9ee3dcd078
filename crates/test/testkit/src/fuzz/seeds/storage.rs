//! What lies in an SR's directory.

use super::{Shelf, dynamic_image};

pub fn put_into(shelf: &mut Shelf) {
    let [base, new] = ["9d1e1f0c-6a4c-4f4e-8a8e-3a7f0a4d1c2b", "0f2f9a52-54a1-4b6e-9d47-9c3b1f6d7e10"];
    shelf.put("sm_journal", "pair", format!("{base}_{new}\n"));
    shelf.put("sm_journal", "single", format!("{base}\n"));
    shelf.put("sm_journal", "merge", format!("{base}\ntapio\n"));
    shelf.put("sm_journal", "cut", format!("{base}_{}", &new[..20]));
    shelf.put(
        "sm_journal",
        "blkid",
        "DEVNAME=/dev/loop0\nLABEL=tapio-sr\nUUID=1\nTYPE=ext4\nUSAGE=filesystem\n",
    );
    // A byte for the partition that is asked for, then a disk.
    let disk = |number: u8, parts: &[(usize, &[u8])]| {
        let mut bytes = vec![0; 6145];
        bytes[0] = number;
        for (at, part) in parts {
            bytes[1 + at..1 + at + part.len()].copy_from_slice(part);
        }
        bytes
    };
    let mut header = [0; 88];
    header[..8].copy_from_slice(b"EFI PART");
    (header[72], header[80], header[84]) = (2, 4, 128);
    shelf.put("device_marks", "gpt", disk(2, &[(512, &header), (1152, &[7; 32])]));
    shelf.put("device_marks", "mbr", disk(1, &[(440, &[1, 2, 3, 4]), (450, &[0x83]), (510, &[0x55, 0xaa])]));
    shelf.put(
        "device_marks",
        "logical",
        disk(5, &[(440, &[1, 2, 3, 4]), (450, &[0x05]), (510, &[0x55, 0xaa])]),
    );
    shelf.put("device_marks", "group", disk(0, &[(512, b"LABELONE"), (536, b"LVM2 001")]));
    let block = [&0xa92b_4efc_u32.to_le_bytes()[..], &[1, 0, 0, 0], &[0; 8], &[9; 16]].concat();
    shelf.put("device_marks", "array", disk(0, &[(4096, &block)]));
    shelf.put("sm_image", "dynamic", dynamic_image());
    shelf.put("sm_image", "empty", "");
    // A byte for the length of pieces, then messages; a program that speaks the protocol makes the same.
    let said = |step: u8, texts: &[&str]| {
        let mut bytes = vec![step];
        for text in texts {
            bytes.extend_from_slice(&u32::try_from(text.len()).unwrap_or(0).to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
        }
        bytes
    };
    let attach =
        format!(r#"{{"begin":{{"attach":{{"driver":"file","sr":"{base}","config":{{"location":"/d"}}}}}}}}"#);
    let asked = format!(r#"{{"reply":{{"done":{{"Err":{{"code":"VDI_MISSING","params":["{base}"]}}}}}}}}"#);
    shelf.put(
        "sm_worker",
        "to_worker",
        said(9, &[attach.as_str(), r#"{"begin":"scan"}"#, r#""cancel""#, asked.as_str()]),
    );
    let pause = r#"{"ask":{"pause":{"disk":0}}}"#;
    let done =
        r#"{"done":{"Ok":{"stat":{"physical_size":9,"physical_utilisation":1,"virtual_allocation":0}}}}"#;
    let notice = format!(r#"{{"notice":{{"vdi":"{base}","notice":"log-incomplete","why":"it is not"}}}}"#);
    shelf.put("sm_worker", "notice", said(200, &[notice.as_str(), done]));
    shelf.put(
        "sm_worker",
        "from_worker",
        said(200, &[r#"{"progress":0.5}"#, pause, r#"{"images":[]}"#, done]),
    );
    shelf.put("sm_worker", "too_long", [&[1][..], &u32::MAX.to_le_bytes()].concat());
}
