//! New images, and images that a user put into the directory.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use tapio_format::vhd::offline::{self, Shape};
use tapio_types::ApiError;
use uuid::Uuid;

use super::ImageDir;
use super::facts::{Facts, FileKind};
use super::journal::partial_raw_name;
use crate::errors;
use crate::lock::Share;
use crate::traits::{Ctx, NewVdi, VdiInfo};

/// VHDs grow in steps of this many bytes.
pub(super) const VHD_STEP: u64 = 2 << 20;
/// The largest virtual size of a VHD in an SR: what 32-bit sector numbers leave after 8 GiB for metadata. 2040 GiB. A
/// disk of this size can be written in full.
const VHD_LEN_MAX: u64 = 2040 << 30;
/// Raw images have whole sectors.
const RAW_STEP: u64 = 512;

/// The size that an image gets which shall have at least `bytes`.
///
/// # Errors
/// 79: none, or more than there can be.
pub(crate) fn rounded(kind: FileKind, bytes: u64) -> Result<u64, ApiError> {
    let (step, max) = match kind {
        FileKind::Vhd => (VHD_STEP, VHD_LEN_MAX),
        FileKind::Raw => (RAW_STEP, i64::MAX.cast_unsigned() / 2),
    };
    match bytes.checked_next_multiple_of(step) {
        Some(size) if bytes > 0 && size <= max => Ok(size),
        _ => {
            let text = format!("{bytes} bytes: 1 to {max} bytes ({} GiB) are possible", max >> 30);
            Err(errors::fail(79, text))
        }
    }
}

/// In `sm_config` of a new raw VDI: all of its space is taken at once, so that no write finds the SR full.
const ALLOCATION: &str = "allocation";
const THICK: &str = "thick";

fn is_thick(new: &NewVdi) -> bool {
    new.sm_config.get(ALLOCATION).is_some_and(|word| word == THICK)
}

/// The kind that `sm_config` of a new VDI asks for.
///
/// # Errors
/// 66: another one, or two at once.
pub(crate) fn wanted_kind(new: &NewVdi, otherwise: FileKind) -> Result<FileKind, ApiError> {
    let mut kind = None;
    for key in ["type", "vdi_type", "image-format"] {
        let Some(word) = new.sm_config.get(key) else { continue };
        let named = match (key, word.as_str()) {
            ("image-format" | "vdi_type" | "type", "vhd") => FileKind::Vhd,
            ("image-format" | "type" | "vdi_type", "raw") | ("vdi_type", "aio") => FileKind::Raw,
            // `type` has other users, `image-format` has not.
            ("type", _) => continue,
            _ => {
                let text = format!("sm_config {key}={word}: this SR holds 'vhd' and 'raw'");
                return Err(errors::fail(66, text));
            }
        };
        if kind.is_some_and(|kind| kind != named) {
            return Err(errors::fail(66, "sm_config asks for two formats at once: leave one out"));
        }
        kind = Some(named);
    }
    Ok(kind.unwrap_or(otherwise))
}

impl ImageDir {
    pub(super) fn check_free(&self, vdi: Uuid) -> Result<(), ApiError> {
        for kind in FileKind::ALL {
            let path = self.file(kind, vdi);
            if std::fs::symlink_metadata(&path).is_ok() {
                return Err(errors::fail(43, format_args!("{} exists", path.display())));
            }
        }
        let log = self.log_file(vdi);
        if std::fs::symlink_metadata(&log).is_ok() {
            return Err(errors::fail(43, format_args!("{} exists", log.display())));
        }
        Ok(())
    }

    pub(super) fn create_image(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        let kind = wanted_kind(new, self.default_kind)?;
        let size = rounded(kind, new.virtual_size)?;
        if kind == FileKind::Vhd && is_thick(new) {
            let text = "sm_config allocation=thick: a VHD grows as it is written; ask for type=raw as well";
            return Err(errors::fail(66, text));
        }
        let _held = self.lock(ctx, Share::Exclusive)?;
        self.check_free(new.uuid)?;
        let own = self.index.begin();
        ctx.step("vdi-create:begin");
        let path = self.file(kind, new.uuid);
        match kind {
            FileKind::Vhd => {
                offline::create(&path, &Shape::Dynamic, size, 0)
                    .map_err(|error| errors::image(78, &error))?;
            }
            FileKind::Raw => self.create_raw(ctx, new, &path, size)?,
        }
        ctx.step("vdi-create:done");
        self.index.end(&own, &[new.uuid]);
        let mut info = self.info_of(new.uuid, 0)?;
        for (key, value) in &new.sm_config {
            info.sm_config.entry(key.clone()).or_insert_with(|| value.clone());
        }
        Ok(info)
    }

    fn create_raw(&self, ctx: &dyn Ctx, new: &NewVdi, path: &Path, size: u64) -> Result<(), ApiError> {
        let partial = self.path.join(partial_raw_name(new.uuid));
        // One that a killed process left: the SR's lock is held, so no process writes to it.
        let _ = std::fs::remove_file(&partial);
        let made =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial).and_then(|file| {
                file.set_len(size)?;
                if is_thick(new) {
                    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size)?;
                }
                file.sync_all()?;
                ctx.step("vdi-create:raw-made");
                std::fs::rename(&partial, path)
            });
        if let Err(error) = made {
            let _ = std::fs::remove_file(&partial);
            // Longer than the file system's files can be.
            let number =
                if matches!(error.raw_os_error(), Some(libc::EFBIG | libc::EINVAL)) { 79 } else { 78 };
            return Err(errors::io(number, "cannot make", path, &error));
        }
        self.sync()
    }

    pub(super) fn introduce_image(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        location: &str,
    ) -> Result<VdiInfo, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let own = [vdi.to_string(), FileKind::Vhd.file_name(vdi), FileKind::Raw.file_name(vdi)];
        if own.iter().any(|name| name == location) {
            let facts = self.whole_image(vdi)?;
            return self.info_now(vdi, &facts);
        }
        let (from, kind, old) = self.foreign_image(location)?;
        self.check_free(vdi)?;
        if let Some(old) = old {
            self.check_unused(ctx, old, "introduce")?;
            let children = self.list()?.children().get(&old).copied().unwrap_or(0);
            if children > 0 {
                let text = format!("{location} carries {children} other images: introduce it as {old}");
                return Err(errors::fail(46, text));
            }
        }
        let facts = Facts::read(&from, kind)
            .map_err(|error| errors::io(46, "cannot read the image", &from, &error))?;
        if let Some(why) = facts.damage {
            return Err(errors::fail(65, format_args!("{}: {why}: see 'vhd-util check'", from.display())));
        }
        ctx.step("introduce:begin");
        let path = self.file(kind, vdi);
        std::fs::rename(&from, &path)
            .map_err(|error| errors::io(46, "cannot give the image its name", &path, &error))?;
        self.sync()?;
        ctx.step("introduce:renamed");
        self.info_of(vdi, 0)
    }

    /// An image of another name in the directory: its path, kind, and the UUID in its name if there is one.
    fn foreign_image(&self, location: &str) -> Result<(PathBuf, FileKind, Option<Uuid>), ApiError> {
        let named = FileKind::ALL.into_iter().find(|kind| {
            location.strip_suffix(kind.extension()).is_some_and(|stem| stem.len() > 1 && stem.ends_with('.'))
        });
        if let Some(kind) = named.filter(|_| !location.contains('/') && !location.starts_with('.')) {
            let old = FileKind::of_file(location).map(|(uuid, _)| uuid);
            return match std::fs::symlink_metadata(self.path.join(location)) {
                Ok(data) if data.is_file() => Ok((self.path.join(location), kind, old)),
                Ok(_) => Err(errors::fail(46, format_args!("{location} is no regular file"))),
                Err(error) => Err(errors::io(46, "cannot find the image", &self.path.join(location), &error)),
            };
        }
        let uuid = super::facts::plain_uuid(location);
        for kind in FileKind::ALL {
            if let Some(uuid) = uuid.filter(|uuid| self.file(kind, *uuid).exists()) {
                return Ok((self.file(kind, uuid), kind, Some(uuid)));
            }
        }
        let text = format!(
            "there is no image '{location}' in {}: name a file there that ends in .vhd or .raw, or a UUID",
            self.path.display()
        );
        Err(errors::fail(46, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_and_bounded() {
        assert_eq!(rounded(FileKind::Vhd, 1).unwrap(), 2 << 20);
        assert_eq!(rounded(FileKind::Vhd, (4 << 20) + 1).unwrap(), 6 << 20);
        assert_eq!(rounded(FileKind::Vhd, 2040 << 30).unwrap(), 2040 << 30);
        assert_eq!(rounded(FileKind::Raw, 513).unwrap(), 1024);
        for (kind, bytes) in [
            (FileKind::Vhd, 0),
            (FileKind::Vhd, (2040 << 30) + 1),
            (FileKind::Vhd, u64::MAX),
            (FileKind::Raw, u64::MAX),
        ] {
            let error = rounded(kind, bytes).unwrap_err();
            assert_eq!(error.code, "SR_BACKEND_FAILURE_79");
            assert!(error.params[1].starts_with("VDI Invalid size"), "{error}");
        }
    }
}
