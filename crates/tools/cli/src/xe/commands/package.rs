//! VMs to OVA packages and from them. They are made of the archives that the server sends, and become archives that it
//! takes, in this process: the server reads no package, and makes the VM whole or not at all.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, ErrorKind};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;

use tapio_ova::{DiskFormat, ExportOptions, Import, OvaError, Package, SumKind, export};

use super::transfer::{Bar, Source};
use crate::xe::error::{Failure, Result};
use crate::xe::session::Session;

/// Bytes between the connection and the package.
const PIECE_LEN: usize = 1 << 20;

/// The package that is written, on a thread of its own.
pub(super) struct Writing(JoinHandle<std::result::Result<(), OvaError>>);

fn failure(path: &Path, error: &OvaError) -> Failure {
    Failure::other(format!("{}: {error}", path.display()))
}

fn piped() -> Result<(UnixStream, UnixStream)> {
    UnixStream::pair().map_err(|error| Failure::other(format!("a pair of sockets: {error}")))
}

fn file(stream: UnixStream) -> File {
    File::from(OwnedFd::from(stream))
}

/// How a package is written.
///
/// # Errors
/// An unknown name.
pub(super) fn options(session: &Session) -> Result<ExportOptions> {
    let disks = match session.or("disk-format", "vmdk") {
        "vmdk" => DiskFormat::Vmdk,
        "vhd" => DiskFormat::Vhd,
        other => return Err(Failure::other(format!("disk-format={other}: vmdk and vhd are known"))),
    };
    let sums = match session.or("sums", "sha256") {
        "sha256" => SumKind::Sha256,
        "sha1" => SumKind::Sha1,
        other => return Err(Failure::other(format!("sums={other}: sha256 and sha1 are known"))),
    };
    Ok(ExportOptions { disks, sums })
}

/// Makes a package in an empty file of the archive that is written into what this answers.
pub(super) fn write(mut package: File, options: ExportOptions) -> Result<(File, Writing)> {
    let (reader, writer) = piped()?;
    let work = move || {
        export(BufReader::with_capacity(PIECE_LEN, reader), &mut package, options)?;
        Ok(package.sync_all()?)
    };
    Ok((file(writer), Writing(std::thread::spawn(work))))
}

fn joined(work: JoinHandle<std::result::Result<(), OvaError>>) -> std::result::Result<(), OvaError> {
    let defect = |_| Err(OvaError::Io(io::Error::other("a defect of ours ended the transfer")));
    work.join().unwrap_or_else(defect)
}

impl Writing {
    /// How it ended, after all was written or could not be.
    pub(super) fn end(self, received: Result<()>, path: &Path) -> Result<()> {
        match (received, joined(self.0)) {
            (received, Ok(())) => received,
            // The archive did not come to its end.
            (Err(lost), Err(OvaError::Early)) => Err(lost),
            (_, Err(error)) => Err(failure(path, &error)),
        }
    }
}

/// A package that is read.
pub(super) struct Reading {
    work: JoinHandle<std::result::Result<(), OvaError>>,
    /// The end that the request reads.
    archive: UnixStream,
}

/// Whether a file is a package. What cannot be told is none, and said by who reads it as an archive.
pub(super) fn is_package(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| tapio_ova::is_package(BufReader::new(file)))
}

/// Reads a package, and makes the body of an import of it.
///
/// # Errors
/// It is damaged (unless sums are not `checked`), or has a disk that cannot be read.
pub(super) fn read(
    session: &Session,
    package: File,
    path: &Path,
    checked: bool,
) -> Result<(Source, Reading)> {
    let package = tapio_ova::unpacked(package).map_err(|error| failure(path, &error))?;
    let len = package.metadata().map_err(|error| failure(path, &error.into()))?.len();
    let mut bar = Bar::new(session, "reading the package")?;
    let planned = Package::open(package, checked, |at| bar.at(at, len))
        .and_then(|mut package| Import::plan(&mut package).map(|import| (package, import)));
    let (mut package, import) = planned.map_err(|error| failure(path, &error))?;
    bar.bar.finish_and_clear();
    let (archive, writer) = piped()?;
    let reader =
        archive.try_clone().map_err(|error| Failure::other(format!("a pair of sockets: {error}")))?;
    let left = import.len();
    let work = move || import.send(&mut package, BufWriter::with_capacity(PIECE_LEN, writer));
    Ok((Source { file: file(reader), left }, Reading { work: std::thread::spawn(work), archive }))
}

impl Reading {
    /// How it ended: what is wrong with the package is the cause of what the server says then.
    pub(super) fn end<T>(self, sent: Result<T>, path: &Path) -> Result<T> {
        // A request that was refused may still have its end, and reads no more of it.
        let _ = self.archive.shutdown(Shutdown::Both);
        match joined(self.work) {
            // The server wanted no more.
            Err(OvaError::Io(error)) if error.kind() == ErrorKind::BrokenPipe => sent,
            Err(error) => Err(failure(path, &error)),
            Ok(()) => sent,
        }
    }
}
