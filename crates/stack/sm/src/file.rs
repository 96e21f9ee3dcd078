//! `file`: a directory of this host as an SR.
//!
//! The directory is `device_config:location`; `<mount_dir>/<sr uuid>` is a symbolic link to it. A small file in it
//! says whose it is, so that a probe can tell and two SRs do not share it.

use std::fs::{self, DirBuilder};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use tapio_types::ApiError;
use uuid::Uuid;

use crate::Places;
use crate::dir::facts::{FileKind, MARKER, plain_uuid};
use crate::dir::{self, Backing, ImageDir};
use crate::errors;
use crate::in_place;
use crate::mount;
use crate::probe::{SrEntry, sr_list};
use crate::traits::{Config, Ctx, DriverInfo, ProbeAnswer, ProbeResult, Sr, SrDriver, SrStat};

static INFO: DriverInfo = DriverInfo {
    sr_type: "file",
    name: "Local directory",
    description: "VDIs as VHD and raw files in a directory of this host",
    capabilities: dir::CAPABILITIES,
    configuration: &[
        ("location", "absolute path of the directory (required)"),
        ("preferred-image-formats", "formats of new VDIs in order of preference: vhd, raw"),
        crate::lease::SILENCE_KEY,
    ],
    // A file system that several hosts mount at once.
    is_shareable: true,
};

/// The driver.
#[derive(Debug)]
pub(crate) struct FileDriver {
    places: Places,
}

impl FileDriver {
    pub(crate) fn new(places: Places) -> Self {
        Self { places }
    }
}

/// `device_config:location`, an absolute path.
fn location(config: &Config) -> Result<PathBuf, ApiError> {
    let text = config.get("location").map_or("", String::as_str);
    if text.is_empty() {
        return Err(errors::fail(94, "device_config:location is the directory of the SR"));
    }
    let path = PathBuf::from(text);
    if !path.is_absolute() || text.contains('\0') {
        return Err(errors::fail(1, format_args!("location '{text}' is no absolute path")));
    }
    Ok(path)
}

/// Whose the directory is, if it says so.
fn owner(directory: &Path) -> io::Result<Option<Uuid>> {
    let file = match fs::File::open(directory.join(MARKER)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut text = Vec::new();
    file.take(64).read_to_end(&mut text)?;
    Ok(std::str::from_utf8(&text).ok().and_then(|text| plain_uuid(text.trim_end())))
}

fn mark(directory: &Path, sr: Uuid) -> io::Result<()> {
    let path = directory.join(MARKER);
    let mut file = fs::File::create(&path)?;
    file.write_all(format!("{sr}\n").as_bytes())?;
    file.sync_all()?;
    mount::sync_directory(directory)
}

fn unreadable(directory: &Path, error: &io::Error) -> ApiError {
    errors::io(47, "cannot read the SR's directory", directory, error)
}

impl SrDriver for FileDriver {
    fn info(&self) -> &'static DriverInfo {
        &INFO
    }

    fn probe(&self, _: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let directory = location(config)?;
        let sr = match owner(&directory) {
            Ok(sr) => sr,
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(unreadable(&directory, &error)),
        };
        let mut answer = ProbeAnswer::default();
        let mut entries = Vec::new();
        let mut result =
            ProbeResult { configuration: config.clone(), complete: true, ..ProbeResult::default() };
        if let Ok((physical_size, physical_utilisation)) = mount::sizes(&directory) {
            let stat = SrStat { physical_size, physical_utilisation, virtual_allocation: 0 };
            if let Some(uuid) = sr {
                entries.push(SrEntry { uuid, devices: None, size: Some(physical_size) });
                result.sr = Some((uuid, stat));
            } else {
                let images = fs::read_dir(&directory).map_or(0, |entries| {
                    let is_image =
                        |name: &std::ffi::OsStr| name.to_str().and_then(FileKind::of_file).is_some();
                    entries.flatten().filter(|entry| is_image(&entry.file_name())).count()
                });
                result.extra_info.insert("images".into(), images.to_string());
            }
        }
        answer.xml = sr_list(&entries);
        answer.results.push(result);
        Ok(answer)
    }

    fn create(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        let directory = location(config)?;
        ctx.step("sr-create:begin");
        let made = !directory.exists();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(|error| errors::io(61, "cannot make the directory", &directory, &error))?;
        in_place::write_in_place(&directory);
        let entries = fs::read_dir(&directory).map_err(|error| unreadable(&directory, &error))?;
        for entry in entries {
            let name = entry.map_err(|error| unreadable(&directory, &error))?.file_name();
            // One that this very call made before it was interrupted counts as empty.
            let is_own = name == MARKER && owner(&directory).is_ok_and(|owner| owner == Some(sr));
            if name != "lost+found" && !is_own {
                let text = format!("{} holds '{}'", directory.display(), name.display());
                return Err(errors::fail(42, text));
            }
        }
        if let Err(error) = mark(&directory, sr) {
            let _ = fs::remove_file(directory.join(MARKER));
            if made {
                let _ = fs::remove_dir(&directory);
            }
            return Err(errors::io(61, "cannot write into", &directory, &error));
        }
        Ok(())
    }

    fn attach(&self, ctx: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let directory = location(config)?;
        let real = fs::canonicalize(&directory)
            .map_err(|error| errors::io(47, "cannot find the SR's directory", &directory, &error))?;
        match owner(&real).map_err(|error| unreadable(&real, &error))? {
            Some(owner) if owner == sr => {}
            Some(owner) => {
                let text = format!(
                    "{} belongs to SR {owner}: introduce it under this UUID, or remove {MARKER} there",
                    real.display()
                );
                return Err(errors::fail(47, text));
            }
            // Made elsewhere. A directory that cannot be written is used as it is.
            None => {
                if let Err(error) = mark(&real, sr) {
                    tracing::info!("{}: is not marked as SR {sr}: {error}", real.display());
                }
            }
        }
        let link = self.places.mount_dir.join(sr.to_string());
        point_to(&link, &real)?;
        ctx.step("sr-attach:mounted");
        let backing = Link { link: link.clone(), directory: real };
        match ImageDir::open(ctx, sr, &link, &self.places.run_dir, config, Box::new(backing)) {
            Ok(opened) => Ok(opened.boxed()),
            Err(error) => {
                let _ = fs::remove_file(&link);
                Err(error)
            }
        }
    }
}

/// Makes `link` a symbolic link to `directory`, whatever link it was.
fn point_to(link: &Path, directory: &Path) -> Result<(), ApiError> {
    if fs::read_link(link).is_ok_and(|target| target == directory) {
        return Ok(());
    }
    let place = link.parent().unwrap_or(Path::new("/"));
    let fail = |error: io::Error| errors::io(47, "cannot make the SR's link", link, &error);
    fs::create_dir_all(place).map_err(fail)?;
    let fresh = place.join(format!(".{}.link", link.file_name().unwrap_or_default().display()));
    let _ = fs::remove_file(&fresh);
    std::os::unix::fs::symlink(directory, &fresh).map_err(fail)?;
    // An empty directory may be left of an SR that was mounted there.
    let _ = fs::remove_dir(link);
    fs::rename(&fresh, link).map_err(|error| {
        let _ = fs::remove_file(&fresh);
        fail(error)
    })
}

/// The link, and the directory behind it.
struct Link {
    link: PathBuf,
    directory: PathBuf,
}

impl Backing for Link {
    fn is_among_hosts(&self) -> bool {
        true
    }

    fn detach(&self) -> Result<(), ApiError> {
        match fs::remove_file(&self.link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(errors::io(62, "cannot remove the SR's link", &self.link, &error))
            }
            _ => Ok(()),
        }
    }

    fn erase(&self, _: &dyn Ctx) -> Result<(), ApiError> {
        match fs::remove_file(self.directory.join(MARKER)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(errors::io(63, "cannot remove the SR's mark in", &self.directory, &error));
            }
            _ => {}
        }
        self.detach()
    }
}
