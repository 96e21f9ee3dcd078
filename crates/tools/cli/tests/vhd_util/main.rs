//! `vhd-util` as a program: options, exact lines, exit status, and being killed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod device;
mod exit;
mod foreign;
mod kill;
mod lines;
mod whole;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A directory in which the tool runs.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(name)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tapio"));
        command.arg("vhd-util").current_dir(self.dir.path());
        command
    }

    fn run<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        self.command().args(arguments).output().unwrap()
    }

    /// Runs a line of arguments which must succeed, and gives what it printed.
    fn ok(&self, line: &str) -> String {
        let output = self.run(line.split_whitespace());
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a line of arguments which must fail with this status, and gives what it said.
    fn fails(&self, status: i32, line: &str) -> String {
        let output = self.run(line.split_whitespace());
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert_eq!(output.status.code(), Some(status), "{line}: {said}");
        said
    }

    fn write(&self, image: &str, at: u64, data: &[u8]) {
        write(&self.path(image), at, data);
    }
}

fn write(path: &Path, at: u64, data: &[u8]) {
    use tapio_format::vhd::offline::{Image, OpenOptions};
    let mut image = Image::open(path, OpenOptions::WRITE).unwrap();
    image.write_at(at, data).unwrap();
    image.commit().unwrap();
}
