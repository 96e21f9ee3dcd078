//! Images for a disk process.

use std::path::Path;

use tapio_format::Medium;
use tapio_format::vhd::offline::{self, Image, OpenOptions};
use tapio_format::vhd::{CHAIN_DEPTH_MAX, SECTOR_LEN, layout};
use tapio_types::{Access, ApiError, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

use super::ImageDir;
use super::facts::{Facts, FileKind};
use super::journal::{cbt_journal_name, foreign_journal, unfinished};
use crate::errors;
use crate::links;
use crate::lock::Share;
use crate::traits::{Ctx, OpenSpec};

impl ImageDir {
    pub(super) fn activate_image(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        access: Access,
    ) -> Result<OpenSpec, ApiError> {
        let mut held = self.lock(ctx, Share::Shared)?;
        if self.is_unfinished(vdi)? {
            drop(held);
            self.recover(ctx)?;
            held = self.lock(ctx, Share::Shared)?;
        }
        let facts = self.whole_image(vdi)?;
        if access == Access::ReadWrite && facts.hidden {
            let text = format!("{vdi} is a base copy, which others rely on: it is read only");
            return Err(errors::fail(46, text));
        }
        let layers = self.chain(vdi, &facts)?;
        if facts.kind == FileKind::Vhd {
            check_blocks(&layers[0].path)?;
        }
        let log = match access {
            Access::ReadWrite => self.log_for_disk(ctx, vdi, facts.virtual_size)?,
            Access::ReadOnly => None,
        };
        *self.active.lock().entry(vdi).or_insert(0) += 1;
        drop(held);
        Ok(OpenSpec { chain: ChainSpec { layers, access }, log })
    }

    /// Whether a change of the VDI was broken off. Refuses where another storage manager has to finish it.
    fn is_unfinished(&self, vdi: Uuid) -> Result<bool, ApiError> {
        if let Some(journal) = foreign_journal(&self.path, vdi) {
            return Err(errors::fail(46, unfinished(&journal)));
        }
        let resize = offline::journal_beside(&self.file(FileKind::Vhd, vdi));
        let clone = self.path.join(format!("clone_{vdi}"));
        let log = self.path.join(cbt_journal_name(vdi));
        Ok([resize, clone, log].iter().any(|journal| std::fs::symlink_metadata(journal).is_ok()))
    }

    /// The images of a VDI, leaf first. Every parent is the image whose UUID its child recorded.
    pub(super) fn chain(&self, vdi: Uuid, leaf: &Facts) -> Result<Vec<LayerSpec>, ApiError> {
        let path = self.file(leaf.kind, vdi);
        if let Some(layers) = self.chain_by_names(vdi, leaf) {
            return Ok(layers);
        }
        // Parents of other names are found by their locators; `resolve_chain` also reports what is wrong with it.
        let layers =
            offline::resolve_chain(&path, Access::ReadOnly).map_err(|error| unusable(&error))?.layers;
        // A locator may name any file of the host, and a raw parent is shown to the guest as it is.
        for layer in &layers {
            links::holds(&self.path, &layer.path)
                .map_err(|error| errors::io(65, "cannot use the parent", &layer.path, &error))?;
        }
        Ok(layers)
    }

    /// The chain where every image lies in the directory under its recorded name, without opening block tables.
    fn chain_by_names(&self, vdi: Uuid, leaf: &Facts) -> Option<Vec<LayerSpec>> {
        let layer = |kind: FileKind, path: &Path| LayerSpec {
            kind: match kind {
                FileKind::Vhd => ImageKind::Vhd,
                FileKind::Raw => ImageKind::Raw,
            },
            path: path.to_path_buf(),
        };
        let mut layers = vec![layer(leaf.kind, &self.file(leaf.kind, vdi))];
        let mut next = leaf.parent.clone();
        while let Some(wanted) = next {
            let (uuid, kind) = FileKind::of_file(&wanted.name)?;
            let path = self.file(kind, uuid);
            let facts = Facts::read(&path, kind).ok()?;
            let is_meant = facts.footer_uuid == wanted.uuid && facts.damage.is_none() && !facts.disabled;
            if !is_meant || layers.len() >= CHAIN_DEPTH_MAX {
                return None;
            }
            layers.push(layer(kind, &path));
            next = facts.parent;
        }
        Some(layers)
    }
}

/// Refuses a leaf whose block table points behind its end: better here than in front of a guest.
fn check_blocks(path: &Path) -> Result<(), ApiError> {
    let image = Image::open(path, OpenOptions::READ).map_err(|error| unusable(&error))?;
    let len =
        image.medium().len().map_err(|error| errors::io(65, "cannot find the length of", path, &error))?;
    let bitmap_len = layout::bitmap_len(image.block_len());
    let is_outside = |sector: u32| u64::from(sector) * SECTOR_LEN + bitmap_len > len;
    match image.bat().allocated().find(|(_, sector)| is_outside(*sector)) {
        None => Ok(()),
        Some((block, sector)) => {
            let text = format!(
                "{}: block {block} is at sector {sector}, behind the end of {len} bytes: it was cut off; see \
                 'vhd-util check', or restore it from a backup",
                path.display()
            );
            Err(errors::fail(65, text))
        }
    }
}

fn unusable(error: &tapio_format::FormatError) -> ApiError {
    errors::image(65, error)
}
