//! Names of groups and volumes. sm-layout.md section 1.
//!
//! ```text
//! VG_XenStorage-<sr>            the group
//! MGT                           metadata of all VDIs: see `metadata`
//! HOSTS                         which hosts use it, if several do: see `lease`
//! VHD-<vdi>  LV-<vdi>           images: VHD, raw
//! VHD-OLD_<vdi>                 a disk whose contents are in its parent
//! NEW-<vdi>                     an image that is not whole yet: no storage manager takes it for one
//! NEWLOG-<vdi>                  the log that a VDI goes on with once it has its name
//! <vdi>.cbtlog                  a log of changed blocks
//! <type>_<uuid>_<value>         a journal: see `journal`
//! ```

use uuid::Uuid;

use crate::dir::facts::{FileKind, plain_uuid};

const GROUP: &str = "VG_XenStorage-";
/// The volume of the lease area, of an SR that several hosts use. See `lease`.
pub(crate) const HOSTS: &str = "HOSTS";
/// The volume of the metadata.
pub(crate) const METADATA: &str = "MGT";
const VHD: &str = "VHD-";
const RAW: &str = "LV-";
const OLD: &str = "VHD-OLD_";
const NEW: &str = "NEW-";
const NEW_LOG: &str = "NEWLOG-";
const LOG: &str = ".cbtlog";
/// Length of a UUID's text.
const UUID_LEN: usize = 36;

/// The name of the group of an SR.
pub(crate) fn group(sr: Uuid) -> String {
    format!("{GROUP}{sr}")
}

/// The SR whose group has this name.
pub(crate) fn sr_of_group(name: &str) -> Option<Uuid> {
    plain_uuid(name.strip_prefix(GROUP)?)
}

const fn prefix(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Vhd => VHD,
        FileKind::Raw => RAW,
    }
}

/// The name of an image's volume.
pub(crate) fn volume(kind: FileKind, vdi: Uuid) -> String {
    format!("{}{vdi}", prefix(kind))
}

/// The name of the volume of an image that is not whole yet.
pub(crate) fn new_volume(vdi: Uuid) -> String {
    format!("{NEW}{vdi}")
}

/// The name of the volume of a disk whose contents are in its parent.
pub(crate) fn old_volume(vdi: Uuid) -> String {
    format!("{OLD}{vdi}")
}

/// The name of the volume of a log of changed blocks.
pub(crate) fn log_volume(vdi: Uuid) -> String {
    format!("{vdi}{LOG}")
}

/// The name of the volume of a log that has not got its own yet.
pub(crate) fn new_log_volume(vdi: Uuid) -> String {
    format!("{NEW_LOG}{vdi}")
}

/// The device mapper's name of a volume: dashes doubled, one dash between group and volume.
pub(crate) fn mapper(group: &str, volume: &str) -> String {
    format!("{}-{}", group.replace('-', "--"), volume.replace('-', "--"))
}

/// The image that a volume of this name holds.
pub(crate) fn image_of(name: &str) -> Option<(Uuid, FileKind)> {
    let of = |kind| Some((plain_uuid(name.strip_prefix(prefix(kind))?)?, kind));
    FileKind::ALL.into_iter().find_map(of)
}

/// The image that a child recorded under this name: that of its volume, or the device mapper's.
pub(crate) fn image_of_recorded(name: &str) -> Option<(Uuid, FileKind)> {
    let plain = name.replace("--", "-");
    let (before, uuid) = plain.split_at_checked(plain.len().checked_sub(UUID_LEN)?)?;
    let uuid = plain_uuid(uuid)?;
    let is = |kind: &FileKind| {
        let before = before.strip_suffix(prefix(*kind));
        before.is_some_and(|group| group.is_empty() || group.ends_with('-'))
    };
    FileKind::ALL.into_iter().find(is).map(|kind| (uuid, kind))
}

/// What the name of a volume stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Image(Uuid, FileKind),
    New(Uuid),
    Old(Uuid),
    Log(Uuid),
    NewLog(Uuid),
    Metadata,
    Other,
}

/// What it stands for.
pub(crate) fn role(name: &str) -> Role {
    if name == METADATA {
        return Role::Metadata;
    }
    if let Some(vdi) = name.strip_prefix(OLD).and_then(plain_uuid) {
        return Role::Old(vdi);
    }
    if let Some(vdi) = name.strip_prefix(NEW).and_then(plain_uuid) {
        return Role::New(vdi);
    }
    if let Some(vdi) = name.strip_prefix(NEW_LOG).and_then(plain_uuid) {
        return Role::NewLog(vdi);
    }
    if let Some(vdi) = name.strip_suffix(LOG).and_then(plain_uuid) {
        return Role::Log(vdi);
    }
    image_of(name).map_or(Role::Other, |(vdi, kind)| Role::Image(vdi, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_their_images_and_back() {
        let (sr, vdi) = (Uuid::from_u128(1), Uuid::from_u128(2));
        assert_eq!(sr_of_group(&group(sr)), Some(sr));
        for kind in FileKind::ALL {
            let name = volume(kind, vdi);
            assert_eq!((image_of(&name), role(&name)), (Some((vdi, kind)), Role::Image(vdi, kind)));
            assert_eq!(image_of_recorded(&name), Some((vdi, kind)));
            let mapped = mapper(&group(sr), &name);
            assert_eq!(image_of_recorded(&mapped), Some((vdi, kind)), "{mapped}");
        }
        assert_eq!(role(&new_volume(vdi)), Role::New(vdi));
        assert_eq!(role(&old_volume(vdi)), Role::Old(vdi));
        assert_eq!(role(&log_volume(vdi)), Role::Log(vdi));
        assert_eq!(role(&new_log_volume(vdi)), Role::NewLog(vdi));
        assert_eq!(role(METADATA), Role::Metadata);
        for other in ["", "VHD-", "VHD-x", "root", &format!("XVHD-{vdi}"), &format!("{vdi}")] {
            assert_eq!((role(other), image_of_recorded(other)), (Role::Other, None), "{other}");
        }
        assert_eq!(sr_of_group("VG_XenStorage-x"), None);
    }
}
