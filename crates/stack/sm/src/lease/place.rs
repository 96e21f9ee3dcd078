//! The lease area of an SR: a file of its directory, or a volume of its group.

use std::io;
use std::path::Path;

use tapio_types::ApiError;
use uuid::Uuid;

use super::area::Area;
use super::config::{Wanted, wanted};
use super::disks::Images;
use super::member::{Member, Place};
use crate::errors;
use crate::lvm::group::Group;
use crate::lvm::names;
use crate::traits::{Config, Ctx};

/// The file of an area.
const FILE: &str = ".tapio-hosts";

/// Joins the hosts of an SR in a directory; none where it has no area, and is to get none.
///
/// # Errors
/// Those of joining; the area cannot be made.
pub(crate) fn of_directory(
    ctx: &dyn Ctx,
    (sr, path): (Uuid, &Path),
    run_dir: &Path,
    config: &Config,
) -> Result<Option<Member>, ApiError> {
    let Some(wanted) = wanted(config)? else { return Ok(None) };
    let failed = |error: io::Error| errors::io(47, "cannot use the SR's directory", path, &error);
    // As the kernel names what processes have open.
    let directory = std::fs::canonicalize(path).map_err(failed)?;
    let area = directory.join(FILE);
    if wanted.makes {
        match Area::make(&area) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(errors::io(37, "cannot make the lease area", &area, &error));
            }
            _ => {}
        }
    }
    let place = Place { area, run_dir: run_dir.to_path_buf(), sr, images: Images::Below(directory) };
    Member::join(ctx, place, &wanted)
}

/// The same of an SR in a volume group.
///
/// # Errors
/// As there.
pub(crate) fn of_group(
    ctx: &dyn Ctx,
    (sr, group): (Uuid, &Group),
    run_dir: &Path,
    wanted: Option<&Wanted>,
) -> Result<Option<Member>, ApiError> {
    let Some(wanted) = wanted else { return Ok(None) };
    let listed = group.list()?;
    match listed.volumes.get(names::HOSTS) {
        Some(volume) if !volume.is_active => group.activate([names::HOSTS].into_iter())?,
        Some(_) => {}
        None if wanted.makes => make(sr, group)?,
        None => return Ok(None),
    }
    let images = Images::Group(names::mapper(&group.name, ""));
    let place = Place { area: group.path(names::HOSTS), run_dir: run_dir.to_path_buf(), sr, images };
    Member::join(ctx, place, wanted)
}

/// Makes the volume of an area. It has its name when it holds nothing.
///
/// # Errors
/// No room, or LVM's.
pub(crate) fn make(sr: Uuid, group: &Group) -> Result<(), ApiError> {
    // Of a name that a recovery removes.
    let unfinished = names::new_volume(sr);
    let path = group.create(&unfinished, super::layout::AREA_LEN, None)?;
    Area::clear(&path).map_err(|error| errors::io(50, "cannot clear", &path, &error))?;
    group.rename(&unfinished, names::HOSTS)
}
