//! A log file that its only writer rotates.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::SystemTime;

use crate::days::day;
use crate::kept::{Rotation, beside, compress_newest, make_room, newest};

/// A log that cannot be rotated grows to so many times its limit, then its lines are lost: the file system of others is
/// worth more.
const GROWTH_MAX: u64 = 2;

/// The file. It is opened for appending, and each write is of whole lines.
#[derive(Debug)]
pub struct Rotated {
    path: PathBuf,
    rotation: Rotation,
    file: File,
    len: u64,
    /// The day of its first line.
    day: u64,
    /// Standard output and error are this file, too: what libraries and panics print.
    takes_output: bool,
    compressing: Option<JoinHandle<()>>,
    /// Not a pipe or a device, which only take lines.
    is_file: bool,
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

impl Rotated {
    /// Opens a log, or makes it.
    ///
    /// # Errors
    /// Its directory is not there, or it cannot be opened.
    pub fn open(path: &Path, rotation: Rotation) -> io::Result<Self> {
        let file = open(path)?;
        let data = file.metadata()?;
        let begun = if data.len() == 0 { SystemTime::now() } else { data.modified()? };
        let path = path.to_owned();
        let (len, day) = (data.len(), day(begun));
        Ok(Self {
            path,
            rotation,
            file,
            len,
            day,
            takes_output: false,
            compressing: None,
            is_file: data.is_file(),
        })
    }

    /// Lets standard output and standard error be this file, also after each rotation.
    ///
    /// # Errors
    /// A descriptor cannot be replaced.
    pub fn take_output(mut self) -> io::Result<Self> {
        self.takes_output = true;
        self.replace_output()?;
        Ok(self)
    }

    fn replace_output(&self) -> io::Result<()> {
        if self.takes_output {
            rustix::stdio::dup2_stdout(&self.file)?;
            rustix::stdio::dup2_stderr(&self.file)?;
        }
        Ok(())
    }

    /// Appends lines.
    ///
    /// # Errors
    /// They could not be written: the file system is full, or the log has outgrown its limit because it cannot be
    /// rotated. A later call may work.
    pub fn write(&mut self, lines: &[u8], now: SystemTime) -> io::Result<()> {
        if !self.is_file {
            return self.file.write_all(lines);
        }
        self.follow(now)?;
        let is_due =
            self.len > 0 && (self.len + lines.len() as u64 > self.rotation.len_max || self.day < day(now));
        if is_due {
            let rotated = self.rotate(now);
            if self.len > self.rotation.len_max.saturating_mul(GROWTH_MAX) {
                rotated?;
            }
        }
        if let Err(error) = self.file.write_all(lines) {
            // Half a line would be the beginning of the next one.
            let _ = self.file.set_len(self.len);
            return Err(error);
        }
        self.len += lines.len() as u64;
        Ok(())
    }

    /// Looks whether another program moved, removed or shortened the file.
    fn follow(&mut self, now: SystemTime) -> io::Result<()> {
        let own = self.file.metadata()?;
        match fs::metadata(&self.path) {
            Ok(named) if (named.dev(), named.ino()) == (own.dev(), own.ino()) => self.len = own.len(),
            Ok(_) => self.begin(now)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.begin(now)?,
            // It cannot be looked at: the descriptor is as good as before.
            Err(_) => self.len = own.len(),
        }
        Ok(())
    }

    fn begin(&mut self, now: SystemTime) -> io::Result<()> {
        self.file = open(&self.path)?;
        self.len = self.file.metadata()?.len();
        self.day = day(now);
        self.replace_output()
    }

    /// Renames the file, and begins another. Each step is one rename: a kill between two loses no line.
    fn rotate(&mut self, now: SystemTime) -> io::Result<()> {
        if let Some(compressing) = self.compressing.take() {
            // It has ended long ago unless lines come faster than they are compressed.
            let _ = compressing.join();
        }
        if self.rotation.kept == 0 {
            self.file.set_len(0)?;
            (self.len, self.day) = (0, day(now));
            return Ok(());
        }
        make_room(&self.path, self.rotation)?;
        // Made before the old one loses its name: a file system without room keeps what there is.
        let fresh = beside(&self.path, ".new");
        let _ = fs::remove_file(&fresh);
        let file = open(&fresh)?;
        fs::rename(&self.path, newest(&self.path))?;
        fs::rename(&fresh, &self.path)?;
        (self.file, self.len, self.day) = (file, 0, day(now));
        self.compressing = compress_newest(&self.path);
        self.replace_output()
    }
}

impl Drop for Rotated {
    fn drop(&mut self) {
        if let Some(compressing) = self.compressing.take() {
            let _ = compressing.join();
        }
    }
}

#[cfg(test)]
mod tests;
