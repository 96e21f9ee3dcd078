//! The bytes of the lease area: 4 MiB on the storage, in sectors of 4096 bytes, each written by one host alone.
//!
//! ```text
//! sector      what                                             written by
//! 0           which SR, after how long a silent host is dead   the host that made the area
//! 1 + n       beat of host n: its name, generation, counter    its keeper
//! 65 + n      turn of host n: its ticket for the SR's lock,    its storage worker
//!             and the generations of others it counts as dead
//! 128 + 14 n  what host n has open, 14 sectors                 its storage worker
//! ```
//!
//! Numbers have the lowest byte first. Each sector begins with four letters and ends with the CRC-32 of what is
//! before. A sector that is torn, or was never written, is as good as none.

use std::collections::BTreeMap;

use tapio_types::Access;
use uuid::Uuid;

/// Bytes of a sector.
pub const SECTOR: usize = 4096;
/// Hosts that an area has room for.
pub const HOSTS: usize = 63;
/// Sectors of what a host has open.
pub(crate) const OPEN_SECTORS: usize = 14;
/// Bytes of an area.
pub const AREA_LEN: u64 = 4 << 20;

const BEATS: usize = 1;
const TURNS: usize = BEATS + HOSTS + 1;
const OPENS: usize = TURNS + HOSTS;
const _: () =
    assert!((OPENS + HOSTS * OPEN_SECTORS) * SECTOR <= AREA_LEN as usize, "an area holds all of it");

/// The number of sectors with beats and turns, from the first on.
pub(crate) const HEAD_SECTORS: usize = OPENS;
/// Bytes of a host's name.
const NAME_MAX: usize = 64;
/// Bytes of an entry of what is open: a VDI and how.
const OPEN_LEN: usize = 17;
const OPEN_PER_SECTOR: usize = (SECTOR - 12) / OPEN_LEN;
/// VDIs that a host can have open.
pub(crate) const OPEN_MAX: usize = OPEN_PER_SECTOR * OPEN_SECTORS;
/// Bytes of a mark that a host is dead.
const MARK_LEN: usize = 9;
/// Shortest time, in milliseconds, after which a silent host may count as dead, and longest.
pub const SILENCE_MS: std::ops::RangeInclusive<u32> = 2_000..=600_000;

/// The sector of a host's beat.
pub const fn beat_at(slot: usize) -> usize {
    BEATS + slot
}

/// The sector of its turn.
pub const fn turn_at(slot: usize) -> usize {
    TURNS + slot
}

/// The first sector of what it has open.
pub const fn open_at(slot: usize) -> usize {
    OPENS + slot * OPEN_SECTORS
}

/// The first sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The SR.
    pub sr: Uuid,
    /// Milliseconds of silence after which a host counts as dead.
    pub silence_ms: u32,
}

/// That a host is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beat {
    /// The host's UUID.
    pub host: Uuid,
    /// Its fencing number: greater than any that was there when it joined.
    pub generation: u64,
    /// Another one at every beat.
    pub counter: u64,
    /// Whether it has left in order.
    pub has_left: bool,
    /// For people.
    pub name: String,
}

/// What a host wants of the SR's lock, and whom it counts as dead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// Whether it is choosing its ticket.
    pub is_choosing: bool,
    /// Its ticket; 0 for none.
    pub ticket: u64,
    /// Generations that it counts as dead, by slot.
    pub dead: BTreeMap<u8, u64>,
}

/// Letters at the beginning of a sector.
type Letters = [u8; 4];
const HEADER: Letters = *b"TPLH";
const BEAT: Letters = *b"TPLB";
const TURN: Letters = *b"TPLT";
const OPEN: Letters = *b"TPLO";

struct Writer {
    bytes: [u8; SECTOR],
    at: usize,
}

impl Writer {
    fn new(letters: Letters) -> Self {
        let mut writer = Self { bytes: [0; SECTOR], at: 0 };
        writer.put(&letters);
        writer
    }

    /// What does not fit is left out: callers have bounds of their own.
    fn put(&mut self, bytes: &[u8]) {
        if let Some(place) = self.bytes[..SECTOR - 4].get_mut(self.at..self.at + bytes.len()) {
            place.copy_from_slice(bytes);
            self.at += bytes.len();
        }
    }

    fn sealed(mut self) -> [u8; SECTOR] {
        let sum = crc32fast::hash(&self.bytes[..SECTOR - 4]);
        self.bytes[SECTOR - 4..].copy_from_slice(&sum.to_le_bytes());
        self.bytes
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Of a whole sector that begins with these letters.
    fn of(letters: Letters, sector: &'a [u8]) -> Option<Self> {
        let (body, sum) = sector.get(..SECTOR)?.split_at(SECTOR - 4);
        let is_whole = crc32fast::hash(body).to_le_bytes() == *sum;
        body.strip_prefix(&letters).filter(|_| is_whole).map(Self)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn number(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn uuid(&mut self) -> Option<Uuid> {
        self.take().map(Uuid::from_bytes)
    }
}

impl Header {
    /// The sector.
    pub fn encode(&self) -> [u8; SECTOR] {
        let mut writer = Writer::new(HEADER);
        writer.put(self.sr.as_bytes());
        writer.put(&self.silence_ms.to_le_bytes());
        writer.sealed()
    }

    /// From a sector; none where it is not whole, or says what no host would write.
    pub fn decode(sector: &[u8]) -> Option<Self> {
        let mut reader = Reader::of(HEADER, sector)?;
        let header = Self { sr: reader.uuid()?, silence_ms: reader.take().map(u32::from_le_bytes)? };
        SILENCE_MS.contains(&header.silence_ms).then_some(header)
    }
}

impl Beat {
    /// The sector. A long name is cut.
    pub fn encode(&self) -> [u8; SECTOR] {
        let mut writer = Writer::new(BEAT);
        writer.put(self.host.as_bytes());
        writer.put(&self.generation.to_le_bytes());
        writer.put(&self.counter.to_le_bytes());
        let name = &self.name[..self.name.floor_char_boundary(NAME_MAX)];
        writer.put(&[u8::from(self.has_left), u8::try_from(name.len()).unwrap_or(0)]);
        writer.put(name.as_bytes());
        writer.sealed()
    }

    /// From a sector; none where it is not whole.
    pub fn decode(sector: &[u8]) -> Option<Self> {
        let mut reader = Reader::of(BEAT, sector)?;
        let (host, generation, counter) = (reader.uuid()?, reader.number()?, reader.number()?);
        let has_left = match reader.byte()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let len = usize::from(reader.byte()?);
        let name = reader.0.get(..len).filter(|_| len <= NAME_MAX)?;
        let name = std::str::from_utf8(name).ok()?.to_owned();
        Some(Self { host, generation, counter, has_left, name })
    }

    /// The host, for people. A name that another host wrote shows nothing but letters.
    pub fn named(&self) -> String {
        match self.name.as_str() {
            "" => format!("host {}", self.host),
            name => format!("host {} ({})", name.escape_default(), self.host),
        }
    }
}

impl Turn {
    /// The sector.
    pub fn encode(&self) -> [u8; SECTOR] {
        let mut writer = Writer::new(TURN);
        writer.put(&[u8::from(self.is_choosing)]);
        writer.put(&self.ticket.to_le_bytes());
        let dead: Vec<_> = self.dead.iter().filter(|(slot, _)| usize::from(**slot) < HOSTS).collect();
        writer.put(&[u8::try_from(dead.len()).unwrap_or(0)]);
        for (slot, generation) in dead {
            let mut mark = [0; MARK_LEN];
            mark[0] = *slot;
            mark[1..].copy_from_slice(&generation.to_le_bytes());
            writer.put(&mark);
        }
        writer.sealed()
    }

    /// From a sector; none where it is not whole.
    pub fn decode(sector: &[u8]) -> Option<Self> {
        let mut reader = Reader::of(TURN, sector)?;
        let is_choosing = match reader.byte()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let ticket = reader.number()?;
        let mut dead = BTreeMap::new();
        for _ in 0..reader.byte()? {
            let slot = reader.byte().filter(|slot| usize::from(*slot) < HOSTS)?;
            dead.insert(slot, reader.number()?);
        }
        Some(Self { is_choosing, ticket, dead })
    }
}

/// The sectors of what a host of this generation has open, all [`OPEN_SECTORS`] of them. Nothing beyond [`OPEN_MAX`].
pub fn encode_open(generation: u64, open: &BTreeMap<Uuid, Access>) -> Vec<[u8; SECTOR]> {
    let entries: Vec<_> = open.iter().take(OPEN_MAX).collect();
    let mut pieces = entries.chunks(OPEN_PER_SECTOR);
    let one = |_| {
        let piece = pieces.next().unwrap_or_default();
        let mut writer = Writer::new(OPEN);
        writer.put(&generation.to_le_bytes()[..2]);
        writer.put(&u16::try_from(piece.len()).unwrap_or(0).to_le_bytes());
        for (vdi, access) in piece {
            writer.put(vdi.as_bytes());
            writer.put(&[u8::from(**access == Access::ReadWrite)]);
        }
        writer.sealed()
    };
    (0..OPEN_SECTORS).map(one).collect()
}

/// What one of these sectors says; none where it is not whole.
pub fn decode_open(sector: &[u8]) -> Option<Vec<(Uuid, Access)>> {
    let mut reader = Reader::of(OPEN, sector)?;
    let _generation = reader.take::<2>()?;
    let count = usize::from(reader.take().map(u16::from_le_bytes)?);
    let mut open = Vec::with_capacity(count.min(OPEN_PER_SECTOR));
    for _ in 0..count {
        let vdi = reader.uuid()?;
        let access = match reader.byte()? {
            0 => Access::ReadOnly,
            1 => Access::ReadWrite,
            _ => return None,
        };
        open.push((vdi, access));
    }
    Some(open)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(sector: &[u8; SECTOR]) -> impl Iterator<Item = [u8; SECTOR]> {
        let sector = *sector;
        [0, 5, 30, SECTOR - 1].into_iter().map(move |at| {
            let mut other = sector;
            other[at] ^= 1;
            other
        })
    }

    #[test]
    fn what_is_written_is_read_and_what_is_torn_is_not() {
        let header = Header { sr: Uuid::from_u128(7), silence_ms: 40_000 };
        assert_eq!(Header::decode(&header.encode()), Some(header));
        let name = "é".repeat(40);
        let beat = Beat { host: Uuid::from_u128(9), generation: 3, counter: 77, has_left: true, name };
        let read = Beat::decode(&beat.encode()).expect("it is whole");
        assert_eq!((read.name.len(), read.counter, read.has_left), (64, 77, true));
        let turn = Turn { is_choosing: true, ticket: 12, dead: BTreeMap::from([(0, 5), (62, u64::MAX)]) };
        assert_eq!(Turn::decode(&turn.encode()), Some(turn.clone()));
        for other in broken(&turn.encode()) {
            assert_eq!(Turn::decode(&other), None);
        }
        for other in broken(&beat.encode()).chain([turn.encode(), [0; SECTOR]]) {
            assert_eq!(Beat::decode(&other), None);
        }
        assert_eq!(Beat::decode(&beat.encode()[1..]), None, "it is too short");
        for silence_ms in [0, SILENCE_MS.start() - 1, SILENCE_MS.end() + 1] {
            assert_eq!(Header::decode(&Header { silence_ms, ..header }.encode()), None);
        }
    }

    #[test]
    fn as_many_disks_as_there_is_room_for_come_back() {
        let open: BTreeMap<Uuid, Access> = (0..OPEN_MAX as u128)
            .map(|at| (Uuid::from_u128(at), if at % 3 == 0 { Access::ReadWrite } else { Access::ReadOnly }))
            .collect();
        let read =
            encode_open(1, &open).iter().flat_map(|sector| decode_open(sector).expect("whole")).collect();
        assert_eq!(open, read);
        const { assert!(OPEN_MAX > 3000) };
        let none = encode_open(1, &BTreeMap::new());
        assert!(none.iter().all(|sector| decode_open(sector).is_some_and(|open| open.is_empty())));
    }

    #[test]
    fn sectors_of_hosts_lie_apart() {
        let mut all: Vec<usize> = vec![0];
        for slot in 0..HOSTS {
            all.extend([beat_at(slot), turn_at(slot)]);
            all.extend((0..OPEN_SECTORS).map(|at| open_at(slot) + at));
        }
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
        assert!(turn_at(HOSTS - 1) < HEAD_SECTORS);
    }
}
