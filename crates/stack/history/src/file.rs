//! A history on disk: one file, written as a whole, with a checksum at its end.
//!
//! All numbers are little endian; a text is its length (2 bytes) and its bytes.
//!
//! | field | |
//! |---|---|
//! | magic | `TAPIOHI1` |
//! | step, in seconds | u32 |
//! | whether it has all functions, or means alone | u8 |
//! | last update, in milliseconds since 1970 | u64 |
//! | sources that are not recorded | u32 |
//! | each: name, description, unit | texts |
//! | kind (0 gauge, 1 derive, 2 absolute), least, greatest | u8, f64, f64 |
//! | sources that are recorded | u32 |
//! | each: the same, and | |
//! | last value, sum of the step, unknown seconds | f64 |
//! | each archive: value of the row, unknown steps, number of rows | f64, u64, u32 |
//! | rows, the oldest first | f32 |
//! | CRC-32 of all before | u32 |

use std::borrow::Cow;
use std::fmt;

use crate::archive::Archive;
use crate::history::{Column, History, SOURCES_MAX};
use crate::layout::Layout;
use crate::source::{Kind, Source, Step};

const MAGIC: &[u8; 8] = b"TAPIOHI1";

/// Longest text of a file, in bytes.
const TEXT_LEN_MAX: usize = 1024;

/// Why bytes are no history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damaged(&'static str);

impl fmt::Display for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Damaged {}

const SHORT: Damaged = Damaged("it ends in its middle");

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    let mut len = text.len().min(TEXT_LEN_MAX);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    bytes.extend((len as u16).to_le_bytes());
    bytes.extend(&text.as_bytes()[..len]);
}

fn put_source(bytes: &mut Vec<u8>, source: &Source) {
    for text in [&source.name, &source.doc, &source.units] {
        put_text(bytes, text);
    }
    bytes.push(source.kind as u8);
    for number in [source.min, source.max] {
        bytes.extend(number.to_le_bytes());
    }
}

/// The bytes of a history.
pub fn encode(history: &History) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(history.held_len());
    bytes.extend(MAGIC);
    bytes.extend(history.layout().step_s().to_le_bytes());
    bytes.push(u8::from(history.layout().functions().len() > 1));
    bytes.extend(history.updated_ms.to_le_bytes());
    bytes.extend((history.forgotten.len() as u32).to_le_bytes());
    for source in history.forgotten.values() {
        put_source(&mut bytes, source);
    }
    bytes.extend((history.columns.len() as u32).to_le_bytes());
    for column in &history.columns {
        put_source(&mut bytes, &column.source);
        let step = &column.step;
        for number in [step.last, step.sum, step.unknown_s] {
            bytes.extend(number.to_le_bytes());
        }
        for archive in &column.archives {
            bytes.extend(archive.value.to_le_bytes());
            bytes.extend(archive.unknown.to_le_bytes());
            bytes.extend((archive.rows.len() as u32).to_le_bytes());
            for row in &archive.rows {
                bytes.extend(row.to_le_bytes());
            }
        }
    }
    let sum = crc32fast::hash(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Damaged> {
        let (head, rest) = self.0.split_first_chunk().ok_or(SHORT)?;
        self.0 = rest;
        Ok(*head)
    }

    fn byte(&mut self) -> Result<u8, Damaged> {
        Ok(u8::from_le_bytes(self.take()?))
    }

    fn count(&mut self) -> Result<usize, Damaged> {
        Ok(u32::from_le_bytes(self.take()?) as usize)
    }

    fn long(&mut self) -> Result<u64, Damaged> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn float(&mut self) -> Result<f64, Damaged> {
        Ok(f64::from_le_bytes(self.take()?))
    }

    fn text(&mut self) -> Result<String, Damaged> {
        let len = usize::from(u16::from_le_bytes(self.take()?));
        let (head, rest) = self.0.split_at_checked(len).filter(|_| len <= TEXT_LEN_MAX).ok_or(SHORT)?;
        self.0 = rest;
        String::from_utf8(head.to_vec()).map_err(|_| Damaged("a name in it is no text"))
    }
}

/// The history in these bytes. Memory is taken for what is there, not for what a count in it claims.
///
/// # Errors
/// They are damaged, or of another version.
pub fn decode(bytes: &[u8]) -> Result<History, Damaged> {
    let (body, sum) = bytes.split_last_chunk::<4>().ok_or(SHORT)?;
    if !body.starts_with(MAGIC) {
        return Err(Damaged("it does not begin as a history of this version"));
    }
    if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
        return Err(Damaged("its checksum is wrong"));
    }
    decode_body(&body[MAGIC.len()..])
}

/// The same behind the magic number, without the checksum: for tests that change bytes.
///
/// # Errors
/// They are damaged.
pub fn decode_body(body: &[u8]) -> Result<History, Damaged> {
    let mut reader = Reader(body);
    let step_s = u32::from_le_bytes(reader.take()?);
    let has_all = match reader.byte()? {
        0 => false,
        1 => true,
        _ => return Err(Damaged("its functions are not known")),
    };
    let layout = Layout::new(step_s, has_all);
    if layout.step_s() != step_s {
        return Err(Damaged("its step is no part of a minute"));
    }
    let updated_ms = reader.long()?;
    if updated_ms > 1 << 48 {
        return Err(Damaged("its time is beyond all clocks"));
    }
    let mut history = History::new(layout.clone(), updated_ms);
    let forgotten = reader.count()?;
    if forgotten > SOURCES_MAX {
        return Err(Damaged("it has too many names"));
    }
    for _ in 0..forgotten {
        let source = read_source(&mut reader)?;
        history.forgotten.insert(source.name.clone().into_owned(), source);
    }
    let columns = reader.count()?;
    if columns > SOURCES_MAX {
        return Err(Damaged("it has too many sources"));
    }
    for _ in 0..columns {
        let column = read_column(&mut reader, &layout, history.steps_done())?;
        let name = column.source.name.as_ref();
        if history.has(name) || history.forgotten.contains_key(name) {
            return Err(Damaged("a source is in it twice"));
        }
        history.push(column);
    }
    if reader.0.is_empty() { Ok(history) } else { Err(Damaged("there is more behind its end")) }
}

fn read_source(reader: &mut Reader<'_>) -> Result<Source, Damaged> {
    let (name, doc, units) = (reader.text()?, reader.text()?, reader.text()?);
    let kind = match reader.byte()? {
        0 => Kind::Gauge,
        1 => Kind::Derive,
        2 => Kind::Absolute,
        _ => return Err(Damaged("the kind of a source is not known")),
    };
    let (min, max) = (reader.float()?, reader.float()?);
    if name.is_empty() {
        return Err(Damaged("a source has no name"));
    }
    Ok(Source { name: Cow::Owned(name), doc: Cow::Owned(doc), units: Cow::Owned(units), kind, min, max })
}

fn read_column(reader: &mut Reader<'_>, layout: &Layout, done: u64) -> Result<Column, Damaged> {
    let source = read_source(reader)?;
    let step = Step { last: reader.float()?, sum: reader.float()?, unknown_s: reader.float()? };
    if !(0.0..=f64::from(layout.step_s())).contains(&step.unknown_s) {
        return Err(Damaged("more than a step of a step is unknown"));
    }
    let mut archives = Vec::new();
    for (function, span) in layout.archives() {
        let passed = done % u64::from(span.steps);
        let mut archive = Archive::new(function, passed);
        archive.value = reader.float()?;
        archive.unknown = reader.long()?;
        if archive.unknown > passed {
            return Err(Damaged("more steps of a row are unknown than it has"));
        }
        let rows = reader.count()?;
        if rows > span.rows as usize || rows > reader.0.len() / 4 {
            return Err(SHORT);
        }
        archive.rows.reserve_exact(rows);
        for _ in 0..rows {
            archive.rows.push_back(f32::from_le_bytes(reader.take()?));
        }
        archives.push(archive);
    }
    Ok(Column { source, step, archives })
}
