//! What lies in an SR's directory.

use tapio_sm::lease::layout::{Beat, Header, Turn, encode_open};
use tapio_sm::lvm::metadata::{Metadata, SrEntry, VdiEntry};
use tapio_types::Access;
use uuid::Uuid;

use super::{Shelf, dynamic_image};

pub fn put_into(shelf: &mut Shelf) {
    put_plugins(shelf);
    put_lease(shelf);
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
    put_group(shelf);
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

/// What plugins print, as the published protocols have it.
fn put_plugins(shelf: &mut Shelf) {
    let answer = |value: &str| {
        format!(
            "<?xml version='1.0'?>\n<methodResponse>\n<params>\n<param>\n<value>{value}</value>\n</param>\n</params>\n\
             </methodResponse>\n"
        )
    };
    let member =
        |name: &str, value: &str| format!("<member><name>{name}</name><value>{value}</value></member>");
    let list = "<array><data><value><string>VDI_CREATE</string></value></data></array>";
    let about = [member("name", "<string>A &amp; B</string>"), member("capabilities", list)].concat();
    shelf.put("sm_plugin_v1", "about", answer(&format!("<struct>{about}</struct>")));
    let attached = [
        member("params_nbd", "nbd:unix:/run/n:exportname=x"),
        member("params", "/dev/x"),
        member("o_direct", "<boolean>1</boolean>"),
        member("xenstore_data", &format!("<struct>{}</struct>", member("vdi-type", "vhd"))),
    ];
    shelf.put("sm_plugin_v1", "attached", answer(&format!("<struct>{}</struct>", attached.concat())));
    shelf.put("sm_plugin_v1", "nothing", format!("a line\n{}", answer("<nil/>")));
    let fault =
        [member("faultCode", "<int>44</int>"), member("faultString", "<string>full</string>")].concat();
    let fault =
        format!("<methodResponse><fault><value><struct>{fault}</struct></value></fault></methodResponse>");
    shelf.put("sm_plugin_v1", "fault", fault);
    let uuid = "9d1e1f0c-6a4c-4f4e-8a8e-3a7f0a4d1c2b";
    let volume = format!(
        r#"{{"key":"a","uuid":"{uuid}","name":"n","read_write":true,"virtual_size":8388608,"uri":["raw+file:///d/a%20b"],
        "keys":{{"tapio-uuid":"{uuid} a","_sm_config_x":"y"}},"physical_utilisation":4096,"volume_type":"Data"}}"#
    );
    shelf.put("sm_plugin_v3", "volumes", format!("[{volume}]"));
    shelf.put("sm_plugin_v3", "volume", volume);
    let query =
        r#"{"plugin":"x","required_api_version":"5.0","features":["VDI_DESTROY"],"configuration":{"a":"b"}}"#;
    shelf.put("sm_plugin_v3", "query", query);
    let stat = r#"{"sr":"s","free_space":1,"total_space":2,"health":["Unreachable","why"]}"#;
    shelf.put("sm_plugin_v3", "stat", stat);
    shelf.put("sm_plugin_v3", "probe", format!(r#"[{{"configuration":{{}},"complete":true,"sr":{stat}}}]"#));
    let ways = r#"{"implementations":[["XenDisk",{"params":"vhd:/a","extra":{},"backend_type":"vbd3"}],
        ["BlockDevice",{"path":"/dev/x"}],["Nbd",{"uri":"nbd:unix:/s:exportname=d"}]]}"#;
    shelf.put("sm_plugin_v3", "ways", ways);
    shelf.put("sm_plugin_v3", "changed", r#"{"granularity":65536,"bitmap":"gAE="}"#);
    shelf.put("sm_plugin_v3", "ranges", r#"{"blocksize":65536,"ranges":[[0,2],[5,1]]}"#);
    shelf.put("sm_plugin_v3", "failure", r#"{"code":"Unimplemented","params":["x",1],"backtrace":{}}"#);
}

/// Sectors of a lease area.
fn put_lease(shelf: &mut Shelf) {
    let host = Uuid::from_u128(0x9d1e_1f0c);
    let header = Header { sr: Uuid::from_u128(3), silence_ms: 40_000 };
    let beat = Beat { host, generation: 5, counter: 99, has_left: false, name: "one".into() };
    let turn = Turn { is_choosing: true, ticket: 3, dead: [(1, 4), (62, 9)].into() };
    let open = [(host, Access::ReadWrite), (Uuid::from_u128(8), Access::ReadOnly)].into();
    shelf.put("lease_sectors", "header", header.encode());
    shelf.put("lease_sectors", "beat", beat.encode());
    shelf.put("lease_sectors", "turn", turn.encode());
    shelf.put("lease_sectors", "open", encode_open(5, &open)[0]);
}

/// What LVM has on a device: its label and an area of metadata, and a description.
fn put_group(shelf: &mut Shelf) {
    let id = "cngw9D-ibPC-Aefm-JAdr-2f2t-0YL5-81cVKY";
    let said = format!(
        r#"vg {{
status = ["RESIZEABLE", "READ", "WRITE"]
extent_size = 8192
physical_volumes {{
pv0 {{
id = "{id}"
status = ["ALLOCATABLE"]
pe_start = 2048
pe_count = 15
}}
}}
logical_volumes {{
VHD-1 {{
id = "q7WMWs-BhPt-Pw5V-4TvZ-tVjg-0JT7-929ORq"
status = ["READ", "WRITE", "VISIBLE"]
tags = ["allocation=thin"]
segment_count = 1
segment1 {{
start_extent = 0
extent_count = 2
type = "striped"
stripe_count = 1	# linear
stripes = [
"pv0", 4
]
}}
}}
}}
}}
"#
    );
    let mut device = vec![0; 8192];
    let mut put = |at: usize, bytes: &[u8]| device[at..at + bytes.len()].copy_from_slice(bytes);
    put(512, b"LABELONE\x01");
    put(532, b"\x20\0\0\0LVM2 001cngw9DibPCAefmJAdr2f2t0YL581cVKY");
    for (at, value) in [(576, 64 << 20), (584, 1 << 20), (616, 4096), (624, 4096_u64)] {
        put(at, &value.to_le_bytes());
    }
    put(4100, b" LVM2 x[5A%r0N*>\x01");
    for (at, value) in [(4120, 4096), (4128, 4096), (4136, 512), (4144, said.len() as u64)] {
        put(at, &value.to_le_bytes());
    }
    put(4608, said.as_bytes());
    shelf.put("sm_volumes", "device", device);
    shelf.put("sm_volumes", "group", said);
}
