//! The archive that is written: its members, and what could not be had.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;

use super::records::redacted;
use super::redact::Redactor;

pub(super) struct Archive {
    output: GzEncoder<File>,
    members: Vec<(String, usize)>,
    missing: String,
    pub(super) redactor: Redactor,
    pub(super) shows_progress: bool,
}

impl Archive {
    /// Makes the file, for its owner alone.
    ///
    /// # Errors
    /// It exists, or cannot be made.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Self {
            output: GzEncoder::new(file, Compression::default()),
            members: Vec::new(),
            missing: String::new(),
            redactor: Redactor::default(),
            shows_progress: false,
        })
    }

    /// Adds a text without its secrets, or notes why there is none.
    pub(super) fn add(&mut self, name: &str, text: Result<String, String>) -> io::Result<()> {
        match text {
            Ok(text) => {
                let text = self.redactor.text(&text);
                self.put(name, &text)
            }
            Err(why) => {
                // The reason is text of others, as a log is.
                let why = self.redactor.text(&why.replace('\n', " "));
                let _ = writeln!(self.missing, "{name}: {why}");
                Ok(())
            }
        }
    }

    /// The same for JSON, which stays JSON.
    pub(super) fn add_json(&mut self, name: &str, value: Result<Value, String>) -> io::Result<()> {
        match value {
            Ok(value) => {
                let text = format!("{:#}\n", redacted(&value, &mut self.redactor));
                self.put(name, &text)
            }
            Err(why) => self.add(name, Err(why)),
        }
    }

    fn put(&mut self, name: &str, text: &str) -> io::Result<()> {
        if self.shows_progress {
            eprintln!("{name}");
        }
        tapio_xva::put_member(&mut self.output, name, text.as_bytes())?;
        self.members.push((name.to_owned(), text.len()));
        Ok(())
    }

    /// Writes the end, and answers the members with their lengths in bytes.
    pub(super) fn end(&mut self) -> io::Result<Vec<(String, usize)>> {
        let missing = std::mem::take(&mut self.missing);
        self.put("missing.txt", &missing)?;
        tapio_xva::end_members(&mut self.output)?;
        self.output.try_finish()?;
        self.output.get_ref().sync_all()?;
        Ok(std::mem::take(&mut self.members))
    }
}
