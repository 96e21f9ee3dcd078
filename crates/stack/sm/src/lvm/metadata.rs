//! The volume `MGT`: names of the SR and of its VDIs, as XenServer's storage manager keeps them.
//! sm-layout.md section 3.
//!
//! Which images there are, and of what kind, volumes say; this says what they are called. So every change of volumes
//! comes before the change here, and what is missing or left here is put in order when the SR is attached.
//!
//! Order of writes: each change becomes valid by the write of one sector, which is flushed before the next.
//!
//! ```text
//! new SR           sectors 1 to 3, then sector 0 with the length
//! VDI, new slot    its two sectors behind the end, then sector 0 with the greater length
//! VDI, old slot    its first sector (names of what is deleted still), then the second, which says that it is there
//! other values     the second sector; names: the first
//! VDI goes         the second sector, which says that it is deleted; in the last slot then sector 0
//! UUID of the SR   sector 1
//! ```
//!
//! A slot that cannot be read is left alone, and no VDI is put there.

mod text;

use tapio_format::{FormatError, Medium};
use tapio_types::SECTOR_LEN;
use uuid::Uuid;

use text::{Fields, fields, padded, shortened};
pub(crate) use text::{illegal, unsayable};

/// Bytes of the volume.
pub const VOLUME_LEN: u64 = 4 << 20;
const SECTOR: usize = SECTOR_LEN as usize;
/// Bytes before the slots.
const HEAD: usize = 4 * SECTOR;
/// Bytes of a slot.
const SLOT: usize = 2 * SECTOR;
/// Slots that there can be.
const SLOTS_MAX: usize = (VOLUME_LEN as usize - HEAD) / SLOT;
const MAGIC: &str = "XSSM:";
/// Digits of the length, with blanks behind.
const LENGTH_LEN: usize = 10;
const VERSION: &str = ":1:2";
const XML: &str = "<?xml version=\"1.0\" ?>";
/// Bytes that a name and a description may take together; each gets half where they are longer.
const NAMES_MAX: usize = 445;

/// Whether volumes are as large as their disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Allocation {
    /// A disk has all of its space at once.
    #[default]
    Thick,
    /// A disk that nothing uses has the space that it holds.
    Thin,
}

impl Allocation {
    /// As it is written.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Thick => "thick",
            Self::Thin => "thin",
        }
    }

    /// By its word.
    pub fn of_word(word: &str) -> Option<Self> {
        [Self::Thick, Self::Thin].into_iter().find(|one| one.word() == word)
    }
}

/// What is said of the SR.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SrEntry {
    /// Its UUID.
    pub uuid: Uuid,
    /// Of its volumes.
    pub allocation: Allocation,
    /// `name_label`.
    pub name: String,
    /// `name_description`.
    pub description: String,
}

/// What is said of a VDI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VdiEntry {
    /// Its UUID.
    pub uuid: Uuid,
    /// `name_label`.
    pub name: String,
    /// `name_description`.
    pub description: String,
    /// The VDI that it is a snapshot of; none where it is no snapshot.
    pub snapshot_of: Option<Uuid>,
    /// When it was taken, as `20240101T00:00:00Z`.
    pub snapshot_time: String,
    /// `VDI.type`, as `user`.
    pub kind: String,
    /// `vhd` or `aio`.
    pub vdi_type: String,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether it is a disk of its own.
    pub managed: bool,
    /// Of a pool's metadata.
    pub metadata_of_pool: String,
}

impl VdiEntry {
    /// A disk without a name.
    pub fn new(uuid: Uuid, vdi_type: &str) -> Self {
        Self {
            uuid,
            name: String::new(),
            description: String::new(),
            snapshot_of: None,
            snapshot_time: "19700101T00:00:00Z".into(),
            kind: "user".into(),
            vdi_type: vdi_type.into(),
            read_only: false,
            managed: true,
            metadata_of_pool: String::new(),
        }
    }

    /// Whether the volume says the same of both: a name that is too long is cut.
    pub(crate) fn is_said_as(&self, other: &Self) -> bool {
        (self.first_sector(), self.second_sector(false)) == (other.first_sector(), other.second_sector(false))
    }

    fn first_sector(&self) -> [u8; SECTOR] {
        let names = shortened(&self.name, &self.description, NAMES_MAX);
        padded(&format!(
            "<vdi><name_label>{}</name_label><name_description>{}</name_description>",
            names.0, names.1
        ))
    }

    fn second_sector(&self, is_deleted: bool) -> [u8; SECTOR] {
        let flag = |is: bool| u8::from(is).to_string();
        let of = self.snapshot_of.map(|of| of.to_string()).unwrap_or_default();
        let fields = [
            ("uuid", self.uuid.to_string()),
            ("is_a_snapshot", flag(self.snapshot_of.is_some())),
            ("snapshot_of", of),
            ("snapshot_time", self.snapshot_time.clone()),
            ("type", self.kind.clone()),
            ("vdi_type", self.vdi_type.clone()),
            ("read_only", flag(self.read_only)),
            ("metadata_of_pool", self.metadata_of_pool.clone()),
            ("managed", flag(self.managed)),
            ("deleted", flag(is_deleted)),
        ];
        let most = |tag: &str| match tag {
            "snapshot_time" => 32,
            "type" => 24,
            "vdi_type" => 16,
            // A UUID, or a reference.
            _ => 64,
        };
        let text: String = fields.iter().map(|(tag, value)| text::element(tag, value, most(tag))).collect();
        padded(&(text + "</vdi>"))
    }

    /// An entry, and whether it is deleted.
    fn of(fields: &Fields) -> Result<(Self, bool), String> {
        let text = |tag: &str| fields.get(tag).cloned().unwrap_or_default();
        let flag = |tag: &str| fields.get(tag).is_some_and(|value| value == "1");
        let uuid =
            |tag: &str| Uuid::try_parse(&text(tag)).map_err(|_| format!("its {tag} is '{}'", text(tag)));
        let snapshot_of = match flag("is_a_snapshot") {
            // One of a VDI that is gone is a snapshot still.
            true => Some(uuid("snapshot_of").unwrap_or_default()),
            false => None,
        };
        let entry = Self {
            uuid: uuid("uuid")?,
            name: text("name_label"),
            description: text("name_description"),
            snapshot_of,
            snapshot_time: text("snapshot_time"),
            kind: text("type"),
            vdi_type: text("vdi_type"),
            read_only: flag("read_only"),
            managed: flag("managed"),
            metadata_of_pool: text("metadata_of_pool"),
        };
        Ok((entry, flag("deleted")))
    }
}

/// A place for a VDI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// It has one.
    Used(VdiEntry),
    /// What was there is deleted.
    Deleted,
    /// What is there cannot be read, and why.
    Unreadable(String),
}

/// What the volume says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Of the SR.
    pub sr: SrEntry,
    /// Of its VDIs, by their place.
    pub slots: Vec<Slot>,
}

/// The head of the volume: how many slots there are.
fn header(slots: usize) -> [u8; SECTOR] {
    let len = HEAD + slots * SLOT;
    padded(&format!("{MAGIC}{len:<LENGTH_LEN$}{VERSION}"))
}

fn sr_sectors(sr: &SrEntry) -> [[u8; SECTOR]; 3] {
    let one = |tag: &str, value: &str| {
        let most = SECTOR - 2 * tag.len() - "<></>".len();
        padded(&format!("<{tag}>{}</{tag}>", text::cut(value, most)))
    };
    let uuid = text::element("uuid", &sr.uuid.to_string(), 64);
    let allocation = text::element("allocation", sr.allocation.word(), 64);
    [
        padded(&format!("{XML}{uuid}{allocation}")),
        one("name_label", &sr.name),
        one("name_description", &sr.description),
    ]
}

impl Metadata {
    /// Of a new SR.
    pub const fn new(sr: SrEntry) -> Self {
        Self { sr, slots: Vec::new() }
    }

    /// Bytes of the volume that the first sector counts.
    ///
    /// # Errors
    /// It is no such volume, or of a version that is not known here.
    fn used_len(first: &[u8]) -> Result<usize, String> {
        let text = text::plain(first);
        let rest = text.strip_prefix(MAGIC).ok_or("it does not begin as such a volume does")?;
        let (len, version) = rest.split_once(':').ok_or("its first sector has no version")?;
        if version.trim() != &VERSION[1..] {
            return Err(format!("its version is '{}': 1:2 is known here", version.trim()));
        }
        let len: usize = len.trim().parse().map_err(|_| format!("its length is '{}'", len.trim()))?;
        let is_whole = len
            .checked_sub(HEAD)
            .is_some_and(|slots| slots.is_multiple_of(SLOT) && slots / SLOT <= SLOTS_MAX);
        if is_whole { Ok(len) } else { Err(format!("its length of {len} bytes is no number of VDIs")) }
    }

    /// From the bytes of the volume, which may be more.
    ///
    /// # Errors
    /// It is no such volume, or what it says of the SR cannot be read.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let len = Self::used_len(bytes.get(..SECTOR).ok_or("it is shorter than a sector")?)?;
        let bytes =
            bytes.get(..len).ok_or_else(|| format!("it is shorter than the {len} bytes that it says"))?;
        let of_sr = text::plain(&bytes[SECTOR..HEAD]);
        let of_sr = fields(of_sr.strip_prefix(XML).unwrap_or(&of_sr))?;
        let text = |tag: &str| of_sr.get(tag).cloned().unwrap_or_default();
        let sr = SrEntry {
            uuid: Uuid::try_parse(&text("uuid"))
                .map_err(|_| format!("the SR's UUID is '{}'", text("uuid")))?,
            allocation: Allocation::of_word(&text("allocation")).unwrap_or_default(),
            name: text("name_label"),
            description: text("name_description"),
        };
        let slot = |bytes: &[u8]| {
            let text = text::plain(bytes);
            let inner = text.strip_prefix("<vdi>").and_then(|text| text.trim_end().strip_suffix("</vdi>"));
            let inner = inner.ok_or_else(|| "it is no '<vdi>'".to_owned());
            match inner.and_then(fields).and_then(|fields| VdiEntry::of(&fields)) {
                Ok((_, true)) => Slot::Deleted,
                Ok((entry, false)) => Slot::Used(entry),
                Err(why) => Slot::Unreadable(why),
            }
        };
        Ok(Self { sr, slots: bytes[HEAD..].chunks_exact(SLOT).map(slot).collect() })
    }

    /// Reads the volume.
    ///
    /// # Errors
    /// As [`Self::decode`]; those of the medium.
    pub fn read(medium: &impl Medium) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("it cannot be read: {error}");
        let mut bytes = vec![0; SECTOR];
        medium.read_at(0, &mut bytes).map_err(failed)?;
        bytes.resize(Self::used_len(&bytes)?, 0);
        medium.read_at(0, &mut bytes).map_err(failed)?;
        Self::decode(&bytes)
    }

    /// The VDIs.
    pub fn vdis(&self) -> impl Iterator<Item = &VdiEntry> {
        self.slots.iter().filter_map(|slot| match slot {
            Slot::Used(entry) => Some(entry),
            _ => None,
        })
    }

    /// What is said of one.
    pub fn vdi(&self, uuid: Uuid) -> Option<&VdiEntry> {
        self.vdis().find(|entry| entry.uuid == uuid)
    }

    /// Writes a new volume, without VDIs.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn create(medium: &mut impl Medium, sr: SrEntry) -> Result<Self, FormatError> {
        put(medium, 0, &[0; SECTOR])?;
        for (at, sector) in sr_sectors(&sr).iter().enumerate() {
            write(medium, (at + 1) * SECTOR, sector)?;
        }
        flush(medium)?;
        put(medium, 0, &header(0))?;
        Ok(Self::new(sr))
    }

    /// Says something else of the SR: its UUID, its names.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn set_sr(&mut self, medium: &mut impl Medium, sr: SrEntry) -> Result<(), FormatError> {
        for (at, sector) in sr_sectors(&sr).iter().enumerate() {
            put(medium, (at + 1) * SECTOR, sector)?;
        }
        self.sr = sr;
        Ok(())
    }

    /// Says this of a VDI, new or known.
    ///
    /// # Errors
    /// There is no room for another one; those of the medium.
    pub fn put(&mut self, medium: &mut impl Medium, entry: VdiEntry) -> Result<(), FormatError> {
        let is_it = |slot: &Slot| matches!(slot, Slot::Used(known) if known.uuid == entry.uuid);
        let known = self.slots.iter().position(is_it);
        let place = known.or_else(|| self.slots.iter().position(|slot| *slot == Slot::Deleted));
        let at = place.unwrap_or(self.slots.len());
        if at >= SLOTS_MAX {
            let detail = format!("the volume {} has room for {SLOTS_MAX} VDIs", super::names::METADATA);
            return Err(FormatError::new(tapio_format::FormatErrorKind::OutOfSpace, detail));
        }
        let offset = HEAD + at * SLOT;
        put(medium, offset, &entry.first_sector())?;
        put(medium, offset + SECTOR, &entry.second_sector(false))?;
        if at == self.slots.len() {
            put(medium, 0, &header(at + 1))?;
            self.slots.push(Slot::Used(entry));
        } else {
            self.slots[at] = Slot::Used(entry);
        }
        Ok(())
    }

    /// Says that a VDI is gone; one that is not known is.
    ///
    /// # Errors
    /// Those of the medium.
    pub fn remove(&mut self, medium: &mut impl Medium, uuid: Uuid) -> Result<(), FormatError> {
        let found = self.slots.iter().enumerate().find_map(|(at, slot)| match slot {
            Slot::Used(entry) if entry.uuid == uuid => Some((at, entry.second_sector(true))),
            _ => None,
        });
        let Some((at, sector)) = found else { return Ok(()) };
        put(medium, HEAD + at * SLOT + SECTOR, &sector)?;
        self.slots[at] = Slot::Deleted;
        if at + 1 == self.slots.len() {
            put(medium, 0, &header(at))?;
            self.slots.pop();
        }
        Ok(())
    }
}

/// Of a copy that gets names of its own.
impl Metadata {
    /// Gives the SR another UUID, and each VDI that which `new` says. VDIs first, each by its second sector.
    ///
    /// # Errors
    /// Those of the medium.
    pub(crate) fn resign(
        &mut self,
        medium: &mut impl Medium,
        sr: Uuid,
        new: impl Fn(Uuid) -> Uuid,
    ) -> Result<(), FormatError> {
        for (at, slot) in self.slots.iter_mut().enumerate() {
            let Slot::Used(entry) = slot else { continue };
            entry.uuid = new(entry.uuid);
            entry.snapshot_of = entry.snapshot_of.map(|of| if of.is_nil() { of } else { new(of) });
            put(medium, HEAD + at * SLOT + SECTOR, &entry.second_sector(false))?;
        }
        self.sr.uuid = sr;
        put(medium, SECTOR, &sr_sectors(&self.sr)[0])
    }
}

/// `Fri Nov 20 18:35:24 2026` as the volume has it: `20261120T18:35:24Z`.
pub(crate) fn compact_time(text: &str) -> String {
    const MONTHS: &str = "JanFebMarAprMayJunJulAugSepOctNovDec";
    let words: Vec<&str> = text.split_whitespace().collect();
    let [_, month, day, time, year] = words[..] else { return "19700101T00:00:00Z".into() };
    let month = MONTHS.find(month).map_or(1, |at| at / 3 + 1);
    format!("{year}{month:02}{day:0>2}T{time}Z")
}

fn write(medium: &mut impl Medium, at: usize, sector: &[u8; SECTOR]) -> Result<(), FormatError> {
    let written = medium.write_at(at as u64, sector);
    written.map_err(|error| FormatError::io("cannot write the SR's metadata", error).with_offset(at as u64))
}

fn flush(medium: &mut impl Medium) -> Result<(), FormatError> {
    medium.flush().map_err(|error| FormatError::io("cannot flush the SR's metadata", error))
}

/// Writes a sector, durably.
fn put(medium: &mut impl Medium, at: usize, sector: &[u8; SECTOR]) -> Result<(), FormatError> {
    write(medium, at, sector)?;
    flush(medium)
}

#[cfg(test)]
mod tests;
