//! Small VHDs, made from the codecs alone.

use std::path::Path;

use tapio_format::Medium;
use tapio_format::cbt::{self, LogHeader};
use tapio_format::vhd::footer::COOKIE_DISABLED;
use tapio_format::vhd::journal::{ENTRY_LEN, Entry, EntryKind, HEADER_LEN, JournalHeader};
use tapio_format::vhd::offline::{Image, OpenOptions};
use tapio_format::vhd::{
    Bat, BatmapHeader, DiskType, FOOTER_LEN, Footer, Header, KeyHash, LocatorEntry, PlatformCode, SECTOR_LEN,
    batmap, layout, locator,
};
use uuid::Uuid;

use super::Shelf;

/// What an image is to be.
#[derive(Clone)]
struct Plan {
    disk_type: DiskType,
    block_len: u32,
    blocks: u32,
    creator: ([u8; 4], u32),
    locators: Vec<(PlatformCode, &'static str)>,
    key: bool,
}

impl Plan {
    fn new(disk_type: DiskType) -> Self {
        Self {
            disk_type,
            block_len: 4096,
            blocks: 5,
            creator: (*b"tap\0", 0x0001_0003),
            locators: Vec::new(),
            key: false,
        }
    }

    fn footer(&self) -> Footer {
        let mut footer = Footer::new(self.disk_type, u64::from(self.block_len) * u64::from(self.blocks));
        (footer.creator_app, footer.creator_version) = self.creator;
        (footer.uuid, footer.timestamp) = (Uuid::from_bytes([0x11; 16]), 0x2000_0000);
        footer
    }

    /// The image with `written` sectors of data.
    fn build(&self, written: &[u64]) -> Vec<u8> {
        let footer = self.footer();
        if self.disk_type == DiskType::Fixed {
            let mut bytes = vec![0xda; footer.current_len as usize];
            bytes.extend(footer.encode());
            return bytes;
        }
        let mut header = Header::new(self.blocks);
        header.block_len = self.block_len;
        let mut bytes = vec![0; layout::metadata_end(&header, None) as usize];
        if footer.may_have_batmap() {
            let at = batmap::header_offset(&header);
            let sectors = batmap::sectors_for(header.entries_max);
            let mut found = BatmapHeader::new(at + SECTOR_LEN, sectors);
            if self.key {
                found.key_hash = KeyHash { cookie: 1, nonce: [2; 32], hash: [3; 32] };
            }
            put(&mut bytes, at, &found.encode());
            put(&mut bytes, at + SECTOR_LEN, &vec![0; sectors as usize * SECTOR_LEN as usize]);
        }
        if self.disk_type == DiskType::Differencing {
            header.parent_uuid = Uuid::from_bytes([0x22; 16]);
            header.parent_timestamp = 0x1fff_0000;
            header.set_parent_name("parent.vhd").expect("it is short");
        }
        for (entry, (code, path)) in header.locators.iter_mut().zip(&self.locators) {
            let path = locator::encode_path(*code, path).expect("a plain path");
            let at = bytes.len() as u64;
            *entry = LocatorEntry {
                code: *code,
                data_space: 512,
                data_len: path.len() as u32,
                reserved: 0,
                data_offset: at,
            };
            put(&mut bytes, at, &path);
            bytes.resize(at as usize + 512, 0);
        }
        put(&mut bytes, header.table_offset, &Bat::new(header.entries_max).encode());
        put(&mut bytes, 512, &header.encode());
        put(&mut bytes, 0, &footer.encode());
        bytes.extend(footer.encode());
        self.write(bytes, written)
    }

    fn write(&self, bytes: Vec<u8>, written: &[u64]) -> Vec<u8> {
        if written.is_empty() {
            return bytes;
        }
        let image = Image::open_on(bytes, Path::new("seed.vhd"), OpenOptions::WRITE);
        let mut image = image.expect("the codecs agree with the opener");
        for sector in written {
            image.write_at(sector * SECTOR_LEN, &[*sector as u8 | 0x80; 512]).expect("memory has room");
        }
        image.commit().expect("memory has room");
        image.into_medium()
    }
}

fn put(bytes: &mut Vec<u8>, at: u64, from: &[u8]) {
    bytes.write_at(at, from).expect("memory has room");
}

/// A dynamic disk of five small blocks, two of them in use.
pub fn dynamic_image() -> Vec<u8> {
    Plan::new(DiskType::Dynamic).build(&[0, 9, 10])
}

fn three_locators() -> Vec<(PlatformCode, &'static str)> {
    vec![
        (PlatformCode::MacX, "./parent.vhd"),
        (PlatformCode::W2ku, "./parent.vhd"),
        (PlatformCode::W2ru, "../dir/parent.vhd"),
    ]
}

fn put_images(shelf: &mut Shelf, target: &'static str) {
    let dynamic = dynamic_image();
    let old = Plan { creator: (*b"tap\0", 0x0000_0001), ..Plan::new(DiskType::Dynamic) };
    let foreign = Plan { creator: (*b"win ", 0x0006_0001), ..Plan::new(DiskType::Dynamic) };
    let child = Plan { locators: three_locators(), ..Plan::new(DiskType::Differencing) };
    let key = Plan { key: true, ..Plan::new(DiskType::Dynamic) };
    shelf.put(target, "empty", []);
    shelf.put(target, "dynamic", dynamic.clone());
    shelf.put(target, "dynamic-empty", Plan::new(DiskType::Dynamic).build(&[]));
    shelf.put(target, "dynamic-full", Plan::new(DiskType::Dynamic).build(&(0..24).collect::<Vec<_>>()));
    shelf.put(target, "dynamic-old-creator", old.build(&[1]));
    shelf.put(target, "dynamic-foreign", foreign.build(&[1]));
    shelf.put(target, "child", child.build(&[3, 30]));
    shelf.put(target, "encrypted", key.build(&[]));
    shelf.put(target, "fixed", Plan { blocks: 2, ..Plan::new(DiskType::Fixed) }.build(&[]));
    shelf.put(target, "footer-alone", Plan { blocks: 0, ..Plan::new(DiskType::Fixed) }.build(&[]));
    shelf.put(target, "short-footer", &dynamic[..dynamic.len() - 1]);
    shelf.put(target, "no-footer", &dynamic[..dynamic.len() - FOOTER_LEN]);
    let mut disabled = dynamic;
    let end = disabled.len() - FOOTER_LEN;
    for at in [0, end] {
        let mut footer = Footer::parse(disabled[at..].first_chunk().expect("a footer is there"));
        footer.cookie = COOKIE_DISABLED;
        put(&mut disabled, at as u64, &footer.encode());
    }
    shelf.put(target, "disabled", disabled);
}

/// What a resize leaves for the case that it is broken off.
fn journal() -> Vec<u8> {
    let image = dynamic_image();
    let footer_at = (image.len() - FOOTER_LEN) as u64;
    let piece =
        |kind, start: u64, len: usize| (kind, start, image[start as usize..start as usize + len].to_vec());
    let metadata = [
        piece(EntryKind::Footer, footer_at, 512),
        piece(EntryKind::FooterCopy, 0, 512),
        piece(EntryKind::Header, 512, 1024),
        piece(EntryKind::Table, 1536, 512),
        piece(EntryKind::BatmapHeader, 2048, 512),
        piece(EntryKind::Batmap, 2560, 512),
    ];
    let data = [piece(EntryKind::Data, 3584, 1024)];
    let mut bytes = vec![0; HEADER_LEN];
    let mut append = |pieces: &[(EntryKind, u64, Vec<u8>)]| {
        let start = bytes.len() as u64;
        for (kind, offset, payload) in pieces {
            bytes.extend(Entry::new(*kind, *offset, payload).encode());
            bytes.extend(payload);
        }
        start
    };
    let (metadata_offset, data_offset) = (append(&metadata), append(&data));
    let header = JournalHeader {
        uuid: Uuid::from_bytes([0x11; 16]),
        footer_offset: footer_at,
        data_entries: data.len() as u32,
        metadata_entries: metadata.len() as u32,
        data_offset,
        metadata_offset,
        end: bytes.len() as u64,
    };
    bytes[..HEADER_LEN].copy_from_slice(&header.encode());
    bytes
}

pub fn put_into(shelf: &mut Shelf) {
    put_images(shelf, "vhd_open");
    put_images(shelf, "vhd_live");
    put_images(shelf, "vhd_stream");

    for (name, disk_type) in
        [("fixed", DiskType::Fixed), ("dynamic", DiskType::Dynamic), ("differencing", DiskType::Differencing)]
    {
        shelf.put("vhd_footer", name, Plan::new(disk_type).footer().encode());
    }
    let foreign = Plan { creator: (*b"qem2", 0x0005_0003), ..Plan::new(DiskType::Dynamic) };
    shelf.put("vhd_footer", "foreign", foreign.footer().encode());

    let child = Plan { locators: three_locators(), ..Plan::new(DiskType::Differencing) }.build(&[]);
    shelf.put("vhd_header", "dynamic", &dynamic_image()[512..1536]);
    shelf.put("vhd_header", "child", &child[512..1536]);

    for (name, entries, len) in [("small", 5u32, 20480u64), ("large", 1 << 20, 2 << 40)] {
        let header = Header::new(entries);
        let at = batmap::header_offset(&header) + SECTOR_LEN;
        let mut map = BatmapHeader::new(at, batmap::sectors_for(entries));
        map.key_hash = KeyHash { cookie: u8::from(entries == 5), nonce: [2; 32], hash: [3; 32] };
        let bits = [&entries.to_be_bytes()[..], &len.to_be_bytes(), &map.encode(), &[0x80; 512]].concat();
        shelf.put("batmap", name, bits);
    }
    let old = BatmapHeader { version: batmap::VERSION_SIGNED, ..BatmapHeader::new(2560, 1) };
    let bits = [&5u32.to_be_bytes()[..], &20480u64.to_be_bytes(), &old.encode(), &[0xff; 64]].concat();
    shelf.put("batmap", "signed", bits);

    let paths = [
        (0u8, PlatformCode::MacX, "./parent.vhd"),
        (1, PlatformCode::W2ku, "../a/b.vhd"),
        (2, PlatformCode::W2ru, "./\u{1f4be}.vhd"),
    ];
    for (pick, code, path) in paths {
        let path = locator::encode_path(code, path).expect("a plain path");
        shelf.put("locator", code.as_str(), [&[pick][..], &path].concat());
    }
    shelf.put("locator", "in-a-header", [&[3][..], &child[512..1536]].concat());
    shelf.put("locator", "drive", [&[1][..], b"C\0:\0\\\0x\0"].concat());

    let log = |size: u64, consistent| {
        let header =
            LogHeader { size, consistent, parent: Uuid::from_bytes([0x22; 16]), ..LogHeader::default() };
        let mut bytes = header.encode().to_vec();
        bytes.resize(cbt::log_len(size) as usize, 0x55);
        bytes
    };
    let head = |machine: &str| {
        tapio_core::vms::MemoryHead { len: 300, digest: [7; 32], machine: machine.into(), vifs: 5 }.encode()
    };
    shelf.put("memory_head", "whole", head(""));
    shelf.put("memory_head", "with-machine", head("pc-i440fx-7.2"));
    shelf.put("memory_head", "cut-off", &head("")[..40]);
    let frames: [&[u8]; 3] = [b"\x82\x82\0\0\0\0hi", b"\x89\x81\x01\x02\x03\x04p", b"\x88\x80\0\0\0\0"];
    shelf.put("websocket", "keys", frames.concat());
    shelf.put("websocket", "long", [&b"\x82\xfe\x01\x00\0\0\0\0"[..], &[7; 256]].concat());
    shelf.put("cbt_log", "trusted", log(3 * cbt::BLOCK_LEN + 512, 1));
    shelf.put("cbt_log", "in-use", log(64 << 20, 0));
    shelf.put("cbt_log", "on-a-volume", [log(64 << 20, 1), vec![0xee; 848]].concat());
    shelf.put("cbt_log", "cut-off", &log(64 << 20, 1)[..100]);

    let journal = journal();
    shelf.put("vhd_journal", "header-alone", &journal[..HEADER_LEN]);
    shelf.put("vhd_journal", "cut-off", &journal[..journal.len() - 700]);
    shelf.put("vhd_journal", "one-entry", &journal[..HEADER_LEN + ENTRY_LEN + 512]);
    shelf.put("vhd_journal", "whole", journal);
}
