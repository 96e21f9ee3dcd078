//! Small images in memory, made from the codecs alone: any block size, any creator, a few hundred kilobytes.

use std::path::Path;

use tapio_format::Medium;
use tapio_format::vhd::footer::Footer;
use tapio_format::vhd::offline::{Chain, Image, Layer, OpenOptions};
use tapio_format::vhd::{
    Bat, BatmapHeader, DiskType, Header, LocatorEntry, PlatformCode, SECTOR_LEN, batmap, layout, locator,
};

/// What an image to be built is like.
#[derive(Clone)]
pub struct Plan {
    pub disk_type: DiskType,
    pub block_len: u32,
    pub blocks: u32,
    /// Entries of the table beyond those that the size needs.
    pub spare: u32,
    pub creator: ([u8; 4], u32),
    pub parent: Option<uuid::Uuid>,
    /// Bytes of the device that the image is on; 0 for a file.
    pub device_len: u64,
}

impl Plan {
    pub fn new(disk_type: DiskType) -> Self {
        Self {
            disk_type,
            block_len: 16 << 10,
            blocks: 12,
            spare: 0,
            creator: (*b"tap\0", 0x0001_0003),
            parent: None,
            device_len: 0,
        }
    }

    pub fn len(&self) -> u64 {
        u64::from(self.block_len) * u64::from(self.blocks)
    }

    /// The bytes of the image, empty of data.
    pub fn build(&self) -> Vec<u8> {
        let mut footer = Footer::new(self.disk_type, self.len());
        (footer.creator_app, footer.creator_version) = self.creator;
        if self.disk_type == DiskType::Fixed {
            let mut bytes = vec![0; self.len() as usize];
            bytes.extend(footer.encode());
            return bytes;
        }
        let mut header = Header::new(self.blocks + self.spare);
        header.block_len = self.block_len;
        let mut bytes = vec![0; layout::metadata_end(&header, None) as usize];
        let with_batmap = footer.may_have_batmap();
        if with_batmap {
            let at = batmap::header_offset(&header);
            let sectors = batmap::sectors_for(header.entries_max);
            let map = BatmapHeader::new(at + 512, sectors);
            bytes.write_at(at, &map.encode()).unwrap();
            bytes.resize(bytes.len() + sectors as usize * 512, 0);
        }
        if let Some(parent) = self.parent {
            header.parent_uuid = parent;
            header.set_parent_name("parent.vhd").unwrap();
            let path = locator::encode_path(PlatformCode::MacX, "./parent.vhd").unwrap();
            header.locators[0] = LocatorEntry {
                code: PlatformCode::MacX,
                data_space: 512,
                data_len: path.len() as u32,
                reserved: 0,
                data_offset: bytes.len() as u64,
            };
            let at = bytes.len() as u64;
            bytes.resize(bytes.len() + 512, 0);
            bytes.write_at(at, &path).unwrap();
        }
        bytes.write_at(header.table_offset, &Bat::new(header.entries_max).encode()).unwrap();
        bytes.write_at(512, &header.encode()).unwrap();
        bytes.write_at(0, &footer.encode()).unwrap();
        if self.device_len > 0 {
            bytes.resize(self.device_len as usize - 512, 0);
        }
        bytes.extend(footer.encode());
        bytes
    }
}

/// The bytes of every sector of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    pub bytes: Vec<u8>,
}

impl Model {
    pub fn new(len: u64) -> Self {
        Self { bytes: vec![0; len as usize] }
    }

    pub fn write(&mut self, at: u64, data: &[u8]) {
        self.bytes[at as usize..at as usize + data.len()].copy_from_slice(data);
    }
}

/// A small generator of numbers that repeat for a seed.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Writes `count` random runs of sectors, each a byte of its own, and says what the disk then holds.
pub fn scribble<M: Medium>(image: &mut Image<M>, model: &mut Model, random: &mut Random, count: usize) {
    let sectors = image.virtual_len() / SECTOR_LEN;
    for _ in 0..count {
        let first = random.below(sectors);
        let run = 1 + random.below(40.min(sectors - first));
        let data = vec![random.next() as u8 | 1; (run * SECTOR_LEN) as usize];
        image.write_at(first * SECTOR_LEN, &data).unwrap();
        model.write(first * SECTOR_LEN, &data);
    }
    image.commit().unwrap();
}

pub fn open<M: Medium>(medium: M) -> Image<M> {
    Image::open_on(medium, Path::new("test.vhd"), OpenOptions::WRITE).unwrap()
}

pub fn layer<M: Medium>(image: Image<M>) -> Layer<M> {
    Layer::Vhd(Box::new(image))
}

/// All bytes of the disk that the chain is.
pub fn contents<M: Medium>(chain: &Chain<M>) -> Vec<u8> {
    let mut bytes = vec![0x5a; chain.virtual_len() as usize];
    chain.read_at(0, &mut bytes).unwrap();
    bytes
}
