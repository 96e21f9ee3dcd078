//! Mounting by the programs of the file systems: `mount.nfs` asks servers and starts what locks need, `mount.cifs`
//! knows how credentials are handed over.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tapio_types::ApiError;

use super::{Numbers, Share};
use crate::Places;
use crate::command;
use crate::errors;
use crate::mount;

/// A server that is there answers sooner.
const TIMEOUT: Duration = Duration::from_secs(60);
/// A child that was forked meanwhile, and has not got to its own program yet, has the same files open for a moment.
const SETTLING: Duration = Duration::from_millis(500);
/// Begins the names of directories at which shares are looked at.
const VISIT: &str = ".share-";

/// How something is mounted.
#[derive(Clone, Debug)]
pub(crate) struct Mounting {
    /// As `mount.nfs`.
    pub(crate) program: &'static str,
    /// What has the program.
    pub(crate) package: &'static str,
    /// As `server:/path`.
    pub(crate) source: String,
    /// With commas between them.
    pub(crate) options: String,
    /// What the program reads from its standard input, and the variable that tells it to.
    pub(crate) secret: Option<(&'static str, Vec<u8>)>,
}

impl Mounting {
    fn mount(&self, numbers: Numbers, point: &Path) -> Result<(), ApiError> {
        let point = point.to_string_lossy();
        let arguments = [self.source.as_str(), &point, "-o", &self.options];
        let (variable, input) = match &self.secret {
            Some((variable, secret)) => (Some((*variable, "0")), secret.as_slice()),
            None => (None, &[][..]),
        };
        match command::run_fed(self.program, &arguments, variable, input, TIMEOUT) {
            Ok(_) => Ok(()),
            Err(error) if error.is_missing => {
                let next = format!("{}: {error}: install {}", self.source, self.package);
                Err(errors::fail(numbers.mount, next))
            }
            Err(error) => Err(errors::fail(numbers.mount, format_args!("{}: {error}", self.source))),
        }
    }

    /// Mounts it at `point`, and says whether it was not mounted there before.
    ///
    /// # Errors
    /// It cannot be mounted, or something else is mounted there.
    pub(crate) fn mount_once(&self, numbers: Numbers, point: &Path) -> Result<bool, ApiError> {
        let failed = |what| move |error: io::Error| errors::io(numbers.mount, what, point, &error);
        // Of a server that went away while it was mounted, the directory cannot even be looked at.
        match fs::create_dir(point) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(point).map_err(failed("cannot make"))?;
            }
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed("cannot make")(error));
            }
            _ => {}
        }
        match mount::at(point).map_err(failed("cannot see what is mounted at"))? {
            Some(there) if there.source == self.source => Ok(false),
            Some(there) => {
                let text = format!("{} is mounted at {}: unmount it", there.source, point.display());
                Err(errors::fail(numbers.attached, text))
            }
            None => {
                let mounted = self.mount(numbers, point);
                if mounted.is_err() {
                    let _ = fs::remove_dir(point);
                }
                mounted.map(|()| true)
            }
        }
    }
}

/// Unmounts what is at `point`, which is what was wanted if nothing is.
///
/// # Errors
/// Files of it stay open.
pub(crate) fn unmount(point: &Path) -> io::Result<()> {
    let until = Instant::now() + SETTLING;
    loop {
        match mount::unmount(point) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < until => {
                std::thread::sleep(SETTLING / 20);
            }
            // Another process has unmounted it.
            Err(error) if !matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => {
                return Err(error);
            }
            _ => break,
        }
    }
    let _ = fs::remove_dir(point);
    Ok(())
}

/// A share that is mounted for a look, or to make or remove a directory of it.
#[derive(Debug)]
pub(crate) struct Visit {
    point: Option<PathBuf>,
    number: u16,
}

impl Visit {
    /// Mounts the share at a place of its own.
    ///
    /// # Errors
    /// It cannot be mounted.
    pub(crate) fn begin(places: &Places, share: &dyn Share) -> Result<Self, ApiError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        sweep(&places.mount_dir);
        let name = format!("{VISIT}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let point = places.mount_dir.join(name);
        let numbers = share.numbers();
        share.mounting(None).mount_once(numbers, &point)?;
        Ok(Self { point: Some(point), number: numbers.unmount })
    }

    /// Where it is mounted.
    pub(crate) fn point(&self) -> &Path {
        self.point.as_deref().unwrap_or(Path::new("/nonexistent"))
    }

    /// Unmounts it.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn end(mut self) -> Result<(), ApiError> {
        let Some(point) = self.point.take() else { return Ok(()) };
        unmount(&point).map_err(|error| errors::io(self.number, "cannot unmount", &point, &error))
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        if let Some(point) = self.point.take()
            && let Err(error) = unmount(&point)
        {
            tracing::warn!("{} stays mounted: {error}", point.display());
        }
    }
}

/// Unmounts what processes that were killed left.
pub(super) fn sweep(mount_dir: &Path) {
    for entry in fs::read_dir(mount_dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner =
            name.to_str().and_then(|name| name.strip_prefix(VISIT)?.split_once('-')?.0.parse::<u32>().ok());
        if owner.is_some_and(|owner| !Path::new("/proc").join(owner.to_string()).exists()) {
            let _ = unmount(&entry.path());
        }
    }
}
