//! Paths of images: the one a parent is recorded by, and the way from one image to another.

use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use crate::error::{FormatError, Result, invalid};

/// The name under which parents are looked for and recorded: absolute, without links.
///
/// A logical volume stays what it is called: `/dev/VG/LV` becomes `/dev/mapper/VG-LV` where that exists and not the
/// number behind it, which changes; `/dev/drbd/by-res/...` stays as well.
///
/// # Errors
/// Those of the system, `Missing` above all.
pub fn canonical(path: &Path) -> Result<PathBuf> {
    let plain = normal(path)?;
    if let Ok(below) = plain.strip_prefix("/dev") {
        let parts: Vec<&OsStr> = below.iter().collect();
        match parts.as_slice() {
            [first, _] if *first == "mapper" && plain.exists() => return Ok(plain),
            [group, volume] => {
                let mapped = Path::new("/dev/mapper").join(mapper_name(group, volume));
                if mapped.exists() {
                    return Ok(mapped);
                }
            }
            [drbd, by_res, ..] if *drbd == "drbd" && *by_res == "by-res" && is_drbd(&plain) => {
                return Ok(plain);
            }
            _ => {}
        }
    }
    std::fs::canonicalize(path).map_err(|error| FormatError::io("cannot find", error).with_path(path))
}

/// The path made absolute with `.` and `..` taken out by their letters.
fn normal(path: &Path) -> Result<PathBuf> {
    let absolute =
        std::path::absolute(path).map_err(|error| FormatError::io("cannot find", error).with_path(path))?;
    let mut plain = PathBuf::new();
    for part in absolute.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    Ok(plain)
}

/// The device mapper's name of a logical volume: dashes doubled, one dash between group and volume.
fn mapper_name(group: &OsStr, volume: &OsStr) -> String {
    let double = |part: &OsStr| part.to_string_lossy().replace('-', "--");
    format!("{}-{}", double(group), double(volume))
}

fn is_drbd(path: &Path) -> bool {
    std::fs::canonicalize(path).is_ok_and(|real| {
        real.to_str()
            .and_then(|real| real.strip_prefix("/dev/drbd"))
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    })
}

/// The path to the canonical `target` as seen from the directory of the image `from`, which need not exist yet.
///
/// Begins with `./` for what lies beside or below it and with `../` otherwise.
///
/// # Errors
/// Those of finding the directory of `from`.
pub fn relative(from: &Path, target: &Path) -> Result<PathBuf> {
    let directory = directory_of(from)?;
    let (from_parts, to_parts): (Vec<_>, Vec<_>) =
        (directory.components().collect(), target.components().collect());
    let common = from_parts.iter().zip(&to_parts).take_while(|(a, b)| a == b).count();
    let up = from_parts.len() - common;
    let mut path = if up == 0 { PathBuf::from(".") } else { std::iter::repeat_n("..", up).collect() };
    path.extend(&to_parts[common..]);
    Ok(path)
}

/// The canonical directory of an image that may not exist yet.
pub(super) fn directory_of(image: &Path) -> Result<PathBuf> {
    let image = match canonical(image) {
        Ok(image) => image,
        Err(_) => {
            let name = image.file_name().ok_or_else(|| invalid("names no file").with_path(image))?;
            let directory = match image.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => parent,
                _ => Path::new("."),
            };
            canonical(directory)?.join(name)
        }
    };
    Ok(image.parent().map_or_else(|| PathBuf::from("/"), Path::to_path_buf))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_are_those_of_the_reference() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        let from = |from: &str, to: &str| relative(&root.join(from), &root.join(to)).unwrap();
        assert_eq!(from("child.vhd", "parent.vhd"), Path::new("./parent.vhd"));
        assert_eq!(from("child.vhd", "a/b/parent.vhd"), Path::new("./a/b/parent.vhd"));
        assert_eq!(from("a/b/child.vhd", "parent.vhd"), Path::new("../../parent.vhd"));
        assert_eq!(from("a/child.vhd", "a/parent.vhd"), Path::new("./parent.vhd"));
        assert!(relative(&root.join("none/child.vhd"), &root).is_err());
    }

    #[test]
    fn volumes_keep_their_names() {
        assert_eq!(
            mapper_name(OsStr::new("VG_XenStorage-1-2"), OsStr::new("VHD-3")),
            "VG_XenStorage--1--2-VHD--3"
        );
        assert_eq!(normal(Path::new("/dev/../dev/./VG/x")).unwrap(), Path::new("/dev/VG/x"));
    }
}
