//! Samples in a file: a line of JSON that says what the file is, then one per sample.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tapio_control::{ControlError, Errno};

use super::sample::Sample;
use super::{about_file, bad_file};
use tapio_report::failure::Result;

/// Number of the format.
const VERSION: u32 = 1;
/// Longest line: ten thousand disks.
const LINE_LEN_MAX: u64 = 8 * 1024 * 1024;

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    xsiostat: u32,
    interval_ms: u64,
}

/// A value as one line without its newline.
pub fn line(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| ControlError::new(Errno::EIO, format!("a sample cannot be written: {error}")))
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
        writer.put(&line(&Head { xsiostat: VERSION, interval_ms })?)?;
        Ok(writer)
    }

    pub fn write(&mut self, sample: &Sample) -> Result<()> {
        self.put(&line(sample)?)
    }

    fn put(&mut self, line: &str) -> Result<()> {
        let written = self.file.write_all(format!("{line}\n").as_bytes());
        written.map_err(|error| about_file("cannot write", &self.path, &error))
    }
}

/// Reads samples from a file.
pub struct Reader<R> {
    path: PathBuf,
    file: R,
    line: usize,
}

impl Reader<BufReader<File>> {
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| about_file("cannot read", path, &error))?;
        Self::over(BufReader::new(file), path)
    }
}

impl<R: BufRead> Reader<R> {
    /// Reads from anything; `path` is for messages.
    pub fn over(file: R, path: &Path) -> Result<Self> {
        let mut reader = Self { path: path.to_path_buf(), file, line: 0 };
        let head = reader.next_line()?.ok_or_else(|| bad_file(path, 1, "the file is empty"))?;
        let head: Head =
            serde_json::from_str(&head).map_err(|_| bad_file(path, 1, "it does not say what it is"))?;
        if head.xsiostat != VERSION {
            return Err(bad_file(path, 1, &format!("format {} is not known", head.xsiostat)));
        }
        Ok(reader)
    }

    fn next_line(&mut self) -> Result<Option<String>> {
        self.line += 1;
        let mut line = String::new();
        let read = (&mut self.file).take(LINE_LEN_MAX).read_line(&mut line);
        match read {
            Ok(0) => Ok(None),
            // The program was ended in the middle of a line: what came before is good.
            Ok(_) if !line.ends_with('\n') && line.len() < LINE_LEN_MAX as usize => Ok(None),
            Ok(_) => Ok(Some(line)),
            Err(error) => Err(about_file("cannot read", &self.path, &error)),
        }
    }
}

impl<R: BufRead> Iterator for Reader<R> {
    type Item = Result<Sample>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = self.next_line().transpose()?;
        Some(line.and_then(|line| {
            serde_json::from_str(&line).map_err(|error| bad_file(&self.path, self.line, &error.to_string()))
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::format::{Format, text};
    use super::super::sample::Row;
    use super::*;

    #[test]
    fn what_was_written_prints_the_same_again() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("samples");
        let samples: Vec<Sample> = (0..20)
            .map(|index| Sample {
                time_ms: 1_000 * index,
                vbds: vec![Row {
                    domid: 5,
                    vbdid: 51712,
                    read_per_s: 1e6 / (index as f64 + 3.0),
                    write_queue: index as f64 / 7.0,
                    ..Row::default()
                }],
            })
            .collect();
        let mut writer = Writer::create(&path, 1000).expect("created");
        for sample in &samples {
            writer.write(sample).expect("written");
        }
        let read: Vec<Sample> = Reader::open(&path).expect("opened").collect::<Result<_>>().expect("whole");
        for format in [Format::V61, Format::V65, Format::V2016] {
            let print =
                |samples: &[Sample]| samples.iter().map(|sample| text(format, sample)).collect::<String>();
            assert_eq!(print(&read), print(&samples));
        }
    }

    #[test]
    fn other_files_are_refused_and_a_torn_end_is_left_out() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("file");
        let read = |content: &str| {
            fs::write(&path, content).expect("written");
            Reader::open(&path).and_then(Iterator::collect::<Result<Vec<Sample>>>)
        };
        let head = "{\"xsiostat\":1,\"interval_ms\":5}\n";
        let whole = "{\"time_ms\":1,\"vbds\":[]}\n";
        assert_eq!(read(&format!("{head}{whole}{{\"time_ms\":2,\"vb")).expect("torn").len(), 1);
        for bad in ["", "hello\n", "{\"xsiostat\":2,\"interval_ms\":5}\n"] {
            assert_eq!(read(bad).expect_err(bad).errno, Errno::EINVAL);
        }
        let error = read(&format!("{head}{whole}nonsense\n")).expect_err("bad line");
        assert!(error.message.contains("line 3"), "{error}");
        assert_eq!(Reader::open(&dir.path().join("missing")).err().expect("missing").errno, Errno::ENOENT);
    }
}
