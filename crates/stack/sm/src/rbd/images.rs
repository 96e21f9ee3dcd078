//! The VDIs in the namespace of an SR.

use std::collections::BTreeMap;

use tapio_rbd::{Image, Mode, RbdError, Snapshot};
use tapio_types::{ApiError, SECTOR_LEN};
use uuid::Uuid;

use super::failed;
use super::layout::{About, BASE, LEN_MAX, Place, TRACKED, plain_uuid};
use super::repository::Repository;
use crate::errors;
use crate::traits::VdiInfo;

/// Bytes that an image holds of its own since `from`, or since it was made, in whole objects.
fn used(image: &Image, from: Option<&str>, len: u64) -> Result<u64, RbdError> {
    let mut used = 0;
    image.diff(from, (0, len), true, false, |diff| used += if diff.has_data { diff.len } else { 0 })?;
    Ok(used)
}

fn info(vdi: Uuid, virtual_size: u64) -> VdiInfo {
    let words = [("vdi_type", "aio"), ("image-format", "raw")];
    VdiInfo {
        uuid: vdi,
        location: vdi.to_string(),
        virtual_size: virtual_size / SECTOR_LEN * SECTOR_LEN,
        physical_utilisation: 0,
        managed: true,
        read_only: false,
        parent: None,
        name_label: None,
        sm_config: words.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        cbt_enabled: false,
        is_metadata: false,
        told: None,
    }
}

/// One that cannot be read.
fn damaged(vdi: Uuid, why: &RbdError) -> VdiInfo {
    let sm_config = BTreeMap::from([("damaged".to_owned(), why.to_string())]);
    VdiInfo { sm_config, ..info(vdi, 0) }
}

/// The snapshots of an image that are VDIs, and the last of all before each.
fn vdis(snapshots: &[Snapshot]) -> impl Iterator<Item = (Uuid, &Snapshot, Option<&str>)> {
    snapshots.iter().enumerate().filter(|(_, snapshot)| !snapshot.is_removed).filter_map(|(at, snapshot)| {
        let before = snapshots[..at].iter().rev().find(|before| !before.is_removed);
        Some((plain_uuid(&snapshot.name)?, snapshot, before.map(|before| before.name.as_str())))
    })
}

impl Repository {
    /// The VDI that an image is.
    pub(super) fn info_of_image(&self, vdi: Uuid) -> Result<VdiInfo, RbdError> {
        let image = self.inside.open(&vdi.to_string(), None, Mode::Read)?;
        self.info_of(&image, vdi, &image.snapshots()?)
    }

    fn info_of(&self, image: &Image, vdi: Uuid, snapshots: &[Snapshot]) -> Result<VdiInfo, RbdError> {
        let len = image.length()?;
        if len > LEN_MAX {
            return Err(RbdError::new(
                libc::EFBIG,
                format!("the image has {len} bytes, which no disk can have"),
            ));
        }
        let last = snapshots.iter().rev().find(|snapshot| !snapshot.is_removed);
        Ok(VdiInfo {
            physical_utilisation: used(image, last.map(|last| last.name.as_str()), len)?,
            cbt_enabled: image.metadata(TRACKED)?.is_some(),
            ..info(vdi, len)
        })
    }

    /// The VDI that a snapshot is.
    pub(super) fn info_of_snapshot(&self, vdi: Uuid, of: &str) -> Result<VdiInfo, RbdError> {
        let image = self.inside.open(of, None, Mode::Read)?;
        let snapshots = image.snapshots()?;
        let found = vdis(&snapshots).find(|(uuid, _, _)| *uuid == vdi);
        let (_, snapshot, before) = found
            .ok_or_else(|| RbdError::new(libc::ENOENT, format!("image '{of}' has no snapshot {vdi}")))?;
        self.info_at(&image, vdi, (snapshot, before))
    }

    fn info_at(
        &self,
        image: &Image,
        vdi: Uuid,
        (snapshot, before): (&Snapshot, Option<&str>),
    ) -> Result<VdiInfo, RbdError> {
        let about = About::read(image, vdi)?;
        let at = self.inside.open(image.name(), Some(&snapshot.name), Mode::Read)?;
        let len = snapshot.len.min(LEN_MAX);
        Ok(VdiInfo {
            physical_utilisation: used(&at, before, len)?,
            // By agreement, as on other SRs: a clone would inherit it. Opening it for writing is refused.
            read_only: false,
            cbt_enabled: about.is_tracked,
            is_metadata: about.is_metadata,
            told: None,
            ..info(vdi, len)
        })
    }

    /// All VDIs.
    pub(super) fn all(&self) -> Result<Vec<VdiInfo>, RbdError> {
        let mut found = Vec::new();
        let mut places = BTreeMap::new();
        for name in self.inside.images()? {
            let vdi = plain_uuid(&name);
            if vdi.is_none() && name.strip_prefix(BASE).and_then(plain_uuid).is_none() {
                continue;
            }
            let image = match self.inside.open(&name, None, Mode::Read) {
                Ok(image) => image,
                // One that goes meanwhile is not there.
                Err(error) if error.is_missing() => continue,
                Err(error) => {
                    found.extend(vdi.map(|vdi| damaged(vdi, &error)));
                    continue;
                }
            };
            let snapshots = image.snapshots()?;
            found.extend(vdi.map(|vdi| {
                self.info_of(&image, vdi, &snapshots).unwrap_or_else(|error| damaged(vdi, &error))
            }));
            for (vdi, snapshot, before) in vdis(&snapshots) {
                places.insert(vdi, name.clone());
                let info = self.info_at(&image, vdi, (snapshot, before));
                found.push(info.unwrap_or_else(|error| damaged(vdi, &error)));
            }
        }
        *self.places_of_snapshots.lock() = places;
        Ok(found)
    }

    /// Where a VDI is.
    ///
    /// # Errors
    /// `VDI_MISSING`; the cluster does not answer.
    pub(super) fn find(&self, vdi: Uuid) -> Result<Place, ApiError> {
        match self.inside.open(&vdi.to_string(), None, Mode::Read) {
            Ok(_) => return Ok(Place::Image),
            Err(error) if error.is_missing() => {}
            Err(error) => return Err(failed(46)(error)),
        }
        let known = self.places_of_snapshots.lock().get(&vdi).cloned();
        if let Some(name) = known
            && self.inside.open(&name, Some(&vdi.to_string()), Mode::Read).is_ok()
        {
            return Ok(Place::SnapshotOf(name));
        }
        for name in self.inside.images().map_err(failed(40))? {
            let image = match self.inside.open(&name, None, Mode::Read) {
                Ok(image) => image,
                Err(error) if error.is_missing() => continue,
                Err(error) => return Err(failed(46)(error)),
            };
            let snapshots = image.snapshots().map_err(failed(46))?;
            if vdis(&snapshots).any(|(uuid, _, _)| uuid == vdi) {
                self.places_of_snapshots.lock().insert(vdi, name.clone());
                return Ok(Place::SnapshotOf(name));
            }
        }
        Err(errors::vdi_missing(self.sr, vdi))
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::CLONE;
    use super::*;

    #[test]
    fn snapshots_that_are_vdis_come_with_the_one_before() {
        let snapshot = |id, name: String, is_removed| Snapshot { id, name, len: 1, is_removed };
        let (a, b) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let all = [
            snapshot(1, a.to_string(), false),
            snapshot(2, Uuid::from_u128(9).to_string(), true),
            snapshot(3, format!("{CLONE}{b}"), false),
            snapshot(4, b.to_string(), false),
        ];
        let found: Vec<_> = vdis(&all).map(|(uuid, _, before)| (uuid, before.map(str::to_owned))).collect();
        assert_eq!(found, [(a, None), (b, Some(all[2].name.clone()))]);
    }
}
