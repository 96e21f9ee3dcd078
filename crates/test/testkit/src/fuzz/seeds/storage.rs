//! What lies in an SR's directory.

use tapio_sm::lvm::metadata::{Metadata, SrEntry, VdiEntry};
use uuid::Uuid;

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
    let mut medium = Vec::new();
    let sr = SrEntry { name: "Local & large".into(), ..SrEntry::default() };
    if let Ok(mut said) = Metadata::create(&mut medium, sr) {
        for number in 1..=3 {
            let entry = VdiEntry { name: "data".into(), ..VdiEntry::new(Uuid::from_u128(number), "vhd") };
            let _ = said.put(&mut medium, entry);
        }
        let _ = said.remove(&mut medium, Uuid::from_u128(2));
    }
    shelf.put("sm_volumes", "metadata", medium);
    shelf.put("sm_volumes", "journal", format!("73 {base}_{new}"));
    shelf.put("sm_volumes", "table", r#"{"report":[{"lv":[{"lv_name":"MGT","lv_size":"4194304"}]}]}"#);
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
