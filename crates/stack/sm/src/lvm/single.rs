//! An SR of one VDI, which fills its LUN and is made and destroyed with it: for orchestrators that have the array make
//! snapshots and clones of the LUN.
//!
//! Tags of the group say it, so that every host knows, and a copy of the LUN too.

use tapio_types::ApiError;

use super::size;
use crate::dir::facts::FileKind;
use crate::errors;
use crate::traits::Config;

/// Key of `device_config`, and what it is.
pub(crate) const KEY: (&str, &str) =
    ("single-vdi", "vhd or raw: the SR holds one VDI, which fills it and is made and destroyed with it");
/// The tag of such a group.
const TAG: &str = "tapio.single-vdi";
/// The same while its VDI is not made yet: the kind follows.
const FRESH: &str = "tapio.single-vdi.fresh.";

/// What tags say of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Single {
    /// It holds one VDI.
    pub(crate) is_single: bool,
    /// Its VDI, of this kind, is to be made.
    pub(crate) fresh: Option<FileKind>,
}

const fn word(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Vhd => "vhd",
        FileKind::Raw => "raw",
    }
}

fn kind_of(text: &str) -> Option<FileKind> {
    FileKind::ALL.into_iter().find(|kind| word(*kind) == text)
}

impl Single {
    /// By the tags of a group, with commas between them.
    pub(crate) fn of(tags: &str) -> Self {
        let mut tags = tags.split(',');
        let fresh = tags.clone().find_map(|tag| kind_of(tag.strip_prefix(FRESH)?));
        Self { is_single: tags.any(|tag| tag == TAG), fresh }
    }
}

/// The tags of a new group whose VDI is to be of this kind.
pub(super) fn tags(kind: FileKind) -> [String; 2] {
    [TAG.to_owned(), fresh_tag(kind)]
}

/// The tag that goes when the VDI is made.
pub(super) fn fresh_tag(kind: FileKind) -> String {
    format!("{FRESH}{}", word(kind))
}

/// What `device_config` asks for.
///
/// # Errors
/// 1: another word.
pub(super) fn wanted(config: &Config) -> Result<Option<FileKind>, ApiError> {
    match config.get(KEY.0).map(String::as_str) {
        None | Some("" | "false") => Ok(None),
        Some("true") => Ok(Some(FileKind::Vhd)),
        Some(text) => match kind_of(text) {
            Some(kind) => Ok(Some(kind)),
            None => Err(errors::fail(1, format_args!("device_config:{} is '{text}': vhd or raw", KEY.0))),
        },
    }
}

/// The largest disk of a kind that so many free bytes have room for.
pub(super) fn fitting(kind: FileKind, free: u64) -> u64 {
    /// Disks are whole blocks of a VHD.
    const BLOCK: u64 = 2 << 20;
    if kind == FileKind::Raw {
        return free - free % size::EXTENT;
    }
    let (mut least, mut most) = (0, free / BLOCK);
    while least < most {
        let middle = (least + most).div_ceil(2);
        if size::full(middle * BLOCK) <= free { least = middle } else { most = middle - 1 }
    }
    least * BLOCK
}

/// Why there is no second VDI.
pub(super) fn refused(number: u16, next: &str) -> ApiError {
    errors::fail(number, format_args!("this SR holds one VDI (device_config:{}): {next}", KEY.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_say_what_a_group_is() {
        assert_eq!(Single::of(""), Single::default());
        assert_eq!(Single::of("x,tapio.single-vdix"), Single::default());
        for kind in FileKind::ALL {
            let [one, fresh] = tags(kind);
            let both = Single::of(&format!("x,{one},{fresh}"));
            assert_eq!(both, Single { is_single: true, fresh: Some(kind) });
            assert_eq!(Single::of(&one), Single { is_single: true, fresh: None });
            // What LVM takes in a tag.
            assert!(
                fresh.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_+.-".contains(&byte)),
                "{fresh}"
            );
        }
        let config = |value: &str| Config::from([(KEY.0.to_owned(), value.to_owned())]);
        assert_eq!(wanted(&config("raw")), Ok(Some(FileKind::Raw)));
        assert_eq!(wanted(&config("true")), Ok(Some(FileKind::Vhd)));
        assert_eq!((wanted(&config("false")), wanted(&Config::new())), (Ok(None), Ok(None)));
        assert_eq!(wanted(&config("qcow2")).expect_err("no such kind").code, "SR_BACKEND_FAILURE_1");
    }

    #[test]
    fn a_disk_fills_its_lun_and_not_more() {
        const MIB: u64 = 1 << 20;
        for free in [8, 12, 72, 100, 1 << 10, 3 << 20].map(|mib| mib * MIB) {
            let fits = fitting(FileKind::Vhd, free);
            assert!(size::full(fits) <= free && size::full(fits + 2 * MIB) > free, "{free}: {fits}");
            assert_eq!(fitting(FileKind::Raw, free + 5), free);
        }
        assert_eq!((fitting(FileKind::Vhd, 0), fitting(FileKind::Raw, MIB)), (0, 0));
    }
}
