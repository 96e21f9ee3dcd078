//! The archive that is written: its members, and what could not be had.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::secrets::Secrets;

pub(super) struct Archive {
    output: GzEncoder<File>,
    members: Vec<(String, usize)>,
    missing: String,
    pub(super) secrets: Secrets,
    pub(super) shows_progress: bool,
}

impl Archive {
    /// Makes the file, for its owner alone.
    ///
    /// # Errors
    ///
    /// It exists, or cannot be made.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Self {
            output: GzEncoder::new(file, Compression::default()),
            members: Vec::new(),
            missing: String::new(),
            secrets: Secrets::default(),
            shows_progress: false,
        })
    }

    /// Adds a text without its secrets, or notes why there is none.
    pub(super) fn add(&mut self, name: &str, text: Result<String, String>) -> io::Result<()> {
        if self.shows_progress {
            eprintln!("{name}");
        }
        match text {
            Ok(text) => self.put(name, &text),
            Err(why) => {
                let _ = writeln!(self.missing, "{name}: {why}");
                Ok(())
            }
        }
    }

    fn put(&mut self, name: &str, text: &str) -> io::Result<()> {
        let text = self.secrets.without(text);
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
