//! Samples in a binary file.
//!
//! ```text
//! "xsiostat"  version u32  interval in ms u32
//! sample:     length u32   CRC-32 u32   body
//! ```
//!
//! These numbers are little endian. A body is made of numbers in LEB128 (seven bits a byte, the lowest first) and of
//! names (a length and that many bytes): time in ms since 1970; a count of pools, each a name, pages, pages in use; a
//! count of disks, each the numbers of [`Counted`] in the order of [`put_disk`]. Differences of counters are kept, not
//! rates: they are small, and what is printed of them is the same to the last digit.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use tapio_control::{ControlError, Errno};

use super::sample::{Counted, Pool, Sample};
use super::{about_file, bad_file};
use tapio_report::failure::Result;

const MAGIC: [u8; 8] = *b"xsiostat";
/// Number of the layout.
const VERSION: u32 = 2;
const HEAD_LEN: usize = 16;
/// Longest body: some ten thousand disks.
const BODY_LEN_MAX: u32 = 1 << 20;
/// Longest name of a pool.
const NAME_LEN_MAX: u64 = 64;

/// A value as one line of JSON without its newline.
pub fn line(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| ControlError::new(Errno::EIO, format!("a sample cannot be written: {error}")))
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn put_disk(out: &mut Vec<u8>, disk: &Counted, pool: u64) {
    let numbers = [
        disk.domid.into(),
        disk.vbdid.into(),
        disk.pid.into(),
        disk.elapsed_ns,
        disk.read_submitted,
        disk.read_completed,
        disk.read_sectors,
        disk.read_ticks_us,
        disk.write_submitted,
        disk.write_completed,
        disk.write_sectors,
        disk.write_ticks_us,
        disk.read_in_flight,
        disk.write_in_flight,
        disk.ring_total.into(),
        disk.ring_used.into(),
        disk.low_memory.into(),
        pool,
    ];
    numbers.into_iter().for_each(|number| put(out, number));
}

/// The body of a sample.
fn body(sample: &Sample) -> Vec<u8> {
    let mut pools: Vec<&Pool> = Vec::new();
    for pool in sample.vbds.iter().filter_map(|disk| disk.pool.as_ref()) {
        if !pools.contains(&pool) {
            pools.push(pool);
        }
    }
    let mut out = Vec::new();
    put(&mut out, sample.time_ms);
    put(&mut out, pools.len() as u64);
    for pool in &pools {
        put(&mut out, pool.name.len() as u64);
        out.extend_from_slice(pool.name.as_bytes());
        put(&mut out, pool.total.into());
        put(&mut out, pool.used.into());
    }
    put(&mut out, sample.vbds.len() as u64);
    for disk in &sample.vbds {
        // 0: none.
        let pool = disk.pool.as_ref().and_then(|pool| pools.iter().position(|known| *known == pool));
        put_disk(&mut out, disk, pool.map_or(0, |at| at as u64 + 1));
    }
    out
}

/// The rest of a body.
struct Body<'a>(&'a [u8]);

impl Body<'_> {
    fn number(&mut self) -> Option<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            let bits = u64::from(byte & 0x7f);
            if bits.leading_zeros() < shift {
                return None;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn small(&mut self) -> Option<u32> {
        self.number()?.try_into().ok()
    }

    fn pool(&mut self) -> Option<Pool> {
        let len = self.number().filter(|len| *len <= NAME_LEN_MAX)?;
        let (name, rest) = self.0.split_at_checked(len as usize)?;
        self.0 = rest;
        let name = std::str::from_utf8(name).ok().filter(|name| !name.chars().any(char::is_control))?;
        Some(Pool { name: name.to_owned(), total: self.small()?, used: self.small()? })
    }

    fn disk(&mut self, pools: &[Pool]) -> Option<Counted> {
        Some(Counted {
            domid: self.small()?,
            vbdid: self.small()?,
            pid: self.small()?,
            elapsed_ns: self.number()?,
            read_submitted: self.number()?,
            read_completed: self.number()?,
            read_sectors: self.number()?,
            read_ticks_us: self.number()?,
            write_submitted: self.number()?,
            write_completed: self.number()?,
            write_sectors: self.number()?,
            write_ticks_us: self.number()?,
            read_in_flight: self.number()?,
            write_in_flight: self.number()?,
            ring_total: self.small()?,
            ring_used: self.small()?,
            low_memory: match self.number()? {
                0 => false,
                1 => true,
                _ => return None,
            },
            pool: match self.number()? {
                0 => None,
                at => Some(pools.get(usize::try_from(at - 1).ok()?)?.clone()),
            },
        })
    }

    /// All of it; `None` for bytes that no writer of this layout makes.
    fn sample(mut self) -> Option<Sample> {
        let time_ms = self.number()?;
        // What is not there ends the loops early, whatever the counts promise.
        let mut pools = Vec::new();
        for _ in 0..self.number()? {
            pools.push(self.pool()?);
        }
        let mut vbds = Vec::new();
        for _ in 0..self.number()? {
            vbds.push(self.disk(&pools)?);
        }
        self.0.is_empty().then_some(Sample { time_ms, vbds })
    }
}

/// A body without the checksum that protects it.
pub fn sample_of(body: &[u8]) -> Option<Sample> {
    Body(body).sample()
}

/// The beginning of a file.
fn head(interval_ms: u64) -> [u8; HEAD_LEN] {
    let mut head = [0; HEAD_LEN];
    head[..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..].copy_from_slice(&u32::try_from(interval_ms).unwrap_or(u32::MAX).to_le_bytes());
    head
}

/// A sample as it lies in a file.
fn framed(sample: &Sample) -> Option<Vec<u8>> {
    let body = body(sample);
    let len = u32::try_from(body.len()).ok().filter(|len| *len <= BODY_LEN_MAX)?;
    Some([&len.to_le_bytes()[..], &crc32(&body).to_le_bytes(), &body].concat())
}

/// A file with these samples.
pub fn file_of(interval_ms: u64, samples: &[Sample]) -> Vec<u8> {
    let samples = samples.iter().filter_map(framed);
    [head(interval_ms).to_vec()].into_iter().chain(samples).flatten().collect()
}

/// Writes samples to a file, each at once, so that the file is whole whenever the program ends.
pub struct Writer {
    path: PathBuf,
    file: File,
}

impl Writer {
    pub fn create(path: &Path, interval_ms: u64) -> Result<Self> {
        let file = File::create(path).map_err(|error| about_file("cannot write", path, &error))?;
        let mut writer = Self { path: path.to_path_buf(), file };
        writer.put(&head(interval_ms))?;
        Ok(writer)
    }

    pub fn write(&mut self, sample: &Sample) -> Result<()> {
        let framed = framed(sample).ok_or_else(|| {
            let disks = sample.vbds.len();
            ControlError::new(Errno::E2BIG, format!("a sample of {disks} disks does not fit into a record"))
                .next("choose domains with -d")
        })?;
        self.put(&framed)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| about_file("cannot write", &self.path, &error))
    }
}

/// Reads samples from a file.
pub struct Reader<R> {
    path: PathBuf,
    file: R,
    /// Offset of the next sample.
    at: u64,
}

impl Reader<BufReader<File>> {
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| about_file("cannot read", path, &error))?;
        Self::over(BufReader::new(file), path)
    }
}

/// Fills the buffer as far as the file goes.
fn fill(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match file.read(&mut buffer[len..]) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

impl<R: Read> Reader<R> {
    /// Reads from anything; `path` is for messages.
    pub fn over(mut file: R, path: &Path) -> Result<Self> {
        let mut head = [0; HEAD_LEN];
        let len = fill(&mut file, &mut head).map_err(|error| about_file("cannot read", path, &error))?;
        if len < HEAD_LEN || head[..8] != MAGIC {
            return Err(bad_file(path, 0, "it does not begin as one"));
        }
        let version = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
        if version != VERSION {
            return Err(bad_file(path, 8, &format!("layout {version} is not the known {VERSION}")));
        }
        Ok(Self { path: path.to_path_buf(), file, at: HEAD_LEN as u64 })
    }

    /// The next sample; `None` at the end, and where the writer was ended in the middle of a sample.
    fn sample(&mut self) -> Result<Option<Sample>> {
        let failed = |error: io::Error| about_file("cannot read", &self.path, &error);
        let mut head = [0; 8];
        if fill(&mut self.file, &mut head).map_err(failed)? < head.len() {
            return Ok(None);
        }
        let [a, b, c, d, sum @ ..] = head;
        let len = u32::from_le_bytes([a, b, c, d]);
        if len > BODY_LEN_MAX {
            return Err(bad_file(&self.path, self.at, &format!("a sample of {len} bytes")));
        }
        let mut body = vec![0; len as usize];
        if fill(&mut self.file, &mut body).map_err(failed)? < body.len() {
            return Ok(None);
        }
        if crc32(&body) != u32::from_le_bytes(sum) {
            return Err(bad_file(&self.path, self.at, "the checksum of the sample is wrong"));
        }
        let sample =
            sample_of(&body).ok_or_else(|| bad_file(&self.path, self.at, "the sample makes no sense"))?;
        self.at += 8 + u64::from(len);
        Ok(Some(sample))
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = Result<Sample>;

    fn next(&mut self) -> Option<Self::Item> {
        self.sample().transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::format::{Format, text};
    use super::*;

    fn samples() -> Vec<Sample> {
        let disk = |index: u64| Counted {
            domid: 5,
            vbdid: 51712,
            pid: 9,
            elapsed_ns: 999_999_999 + index,
            read_submitted: 1_000_000 / (index + 3),
            write_ticks_us: index * 142_857,
            write_sectors: u64::MAX >> index,
            ring_total: 32,
            ring_used: 31,
            low_memory: index % 2 == 1,
            pool: (!index.is_multiple_of(3)).then(|| Pool { name: "sr".into(), total: 704, used: 700 }),
            ..Counted::default()
        };
        (0..20)
            .map(|index| Sample {
                time_ms: 1_000 * index,
                vbds: (0..=index % 4).map(|more| disk(index + more)).collect(),
            })
            .collect()
    }

    #[test]
    fn what_was_written_prints_the_same_again() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("samples");
        let samples = samples();
        let mut writer = Writer::create(&path, 1000).expect("created");
        for sample in &samples {
            writer.write(sample).expect("written");
        }
        let bytes = fs::read(&path).expect("readable");
        assert_eq!(bytes, file_of(1000, &samples));
        let disks: usize = samples.iter().map(|sample| sample.vbds.len()).sum();
        assert!(bytes.len() < disks * 60, "{} bytes for {disks} rows", bytes.len());
        let read: Vec<Sample> = Reader::open(&path).expect("opened").collect::<Result<_>>().expect("whole");
        assert_eq!(read, samples);
        for format in [Format::V61, Format::V65, Format::V2016, Format::Csv] {
            let print =
                |samples: &[Sample]| samples.iter().map(|sample| text(format, sample)).collect::<String>();
            assert_eq!(print(&read), print(&samples));
        }
    }

    #[test]
    fn other_files_are_refused_and_a_torn_end_is_left_out() {
        let path = Path::new("file");
        let read = |bytes: &[u8]| Reader::over(bytes, path)?.collect::<Result<Vec<Sample>>>();
        let samples = samples();
        let whole = file_of(5, &samples);
        for len in HEAD_LEN..whole.len() {
            let read = read(&whole[..len]).expect("torn");
            assert_eq!(read, samples[..read.len()]);
        }
        let newer = [&MAGIC[..], &3u32.to_le_bytes(), &[0; 4]].concat();
        for bad in [&b""[..], b"hello\n", &whole[..HEAD_LEN - 1], &newer] {
            assert_eq!(read(bad).expect_err("refused").errno, Errno::EINVAL);
        }
        let mut damaged = whole.clone();
        damaged[HEAD_LEN + 12] ^= 1;
        let error = read(&damaged).expect_err("refused");
        assert!(error.message.contains("byte 16") && error.message.contains("checksum"), "{error}");
        // A body with a right checksum that promises more than it holds.
        let body = [1u8, 0, 0xff, 0x7f];
        let lying = [&head(5)[..], &4u32.to_le_bytes(), &crc32(&body).to_le_bytes(), &body].concat();
        assert!(read(&lying).expect_err("refused").message.contains("no sense"));
        assert_eq!(Reader::open(Path::new("/nowhere")).err().expect("missing").errno, Errno::ENOENT);
    }

    #[test]
    fn numbers_of_all_lengths_come_back() {
        for number in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
            let mut bytes = Vec::new();
            put(&mut bytes, number);
            assert_eq!(Body(&bytes).number(), Some(number));
        }
        assert_eq!(Body(&[0xff; 11]).number(), None, "more than 64 bits");
        let mut over = vec![0xff; 9];
        over.push(2);
        assert_eq!(Body(&over).number(), None, "65 bits");
    }
}
