//! Which images a disk is opened with.

use std::path::{Path, PathBuf};

use tapio_block::{StandbyOptions, TapOptions};
use tapio_control::{ControlError, Errno, ImageSource, Result};
use tapio_format::continuation;
use tapio_format::vhd::offline::{self, resolve_chain};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec, parse_type_and_path};

use crate::failure::bad_image;
use crate::log;

/// The files that reaching its cluster takes, as far as its name says.
pub(crate) fn files_of_ceph(image: &ImageSource) -> Vec<PathBuf> {
    let layers = match image {
        ImageSource::Chain(layers) => layers.clone(),
        ImageSource::Leaf(text) => parse_type_and_path(text).into_iter().collect(),
    };
    let named = layers.iter().filter(|layer| layer.kind == ImageKind::Rbd);
    let targets = named.filter_map(|layer| layer.path.to_str()?.parse::<tapio_rbd::Target>().ok());
    targets.flat_map(|target| [target.connect.conf, target.connect.keyring]).flatten().collect()
}

/// The chain behind a name: the parents of a VHD are found from it.
pub(crate) fn chain(image: &ImageSource, access: Access) -> Result<ChainSpec> {
    let layer = match image {
        ImageSource::Chain(layers) => {
            let chain = ChainSpec { layers: layers.clone(), access };
            finish_resize_of(&chain)?;
            return Ok(chain);
        }
        ImageSource::Leaf(text) => {
            parse_type_and_path(text).map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))?
        }
    };
    whole_chain(layer, access)
}

/// The chain behind a leaf: the parents of a VHD are found from it.
fn whole_chain(layer: LayerSpec, access: Access) -> Result<ChainSpec> {
    match layer.kind {
        ImageKind::Raw | ImageKind::Nbd | ImageKind::Rbd => Ok(ChainSpec { layers: vec![layer], access }),
        ImageKind::Vhd if access == Access::ReadWrite => {
            finish_resize(&layer.path)?;
            resolve_chain(&layer.path, access).map_err(|error| bad_image(&error))
        }
        ImageKind::Vhd => resolve_chain(&layer.path, access).map_err(|error| bad_image(&error)),
    }
}

/// [`chain`], and the taps of the disk. Refuses a disk that is to be written and went on with another image,
/// which the caller does not know. If a standby took over, the disk is opened with the standby: the one that `taps`
/// names, or `earlier`, the one that the disk had before a pause.
pub(crate) fn opening(
    image: &ImageSource,
    access: Access,
    mut taps: TapOptions,
    earlier: Option<&StandbyOptions>,
) -> Result<(ChainSpec, TapOptions)> {
    let leaf = match image {
        ImageSource::Chain(layers) => layers.first().cloned(),
        ImageSource::Leaf(text) => parse_type_and_path(text).ok(),
    };
    let Some(leaf) = leaf.filter(|_| access == Access::ReadWrite) else {
        return Ok((chain(image, access)?, taps));
    };
    let followed = continuation::follow(&leaf).map_err(|error| bad_image(&error))?;
    let known = taps.standby.as_ref().or(earlier);
    let Some(standby) = known.filter(|standby| followed.stands_on(&leaf, &standby.image)) else {
        continuation::check_writable(&leaf, &followed).map_err(|error| bad_image(&error))?;
        return Ok((chain(image, access)?, taps));
    };
    let mut standby = standby.clone();
    standby.took_over = true;
    let mut overlaid = chain(image, access)?;
    log::line(&format!("{leaf} was full before: it goes on with {} on top of it", standby.image));
    overlaid.layers.insert(0, standby.image.clone());
    taps.standby = Some(standby);
    Ok((overlaid, taps))
}

/// Puts right what a resize left in the leaf that was broken off by a kill.
fn finish_resize(path: &Path) -> Result<()> {
    if let Some(done) = offline::finish_resize(path).map_err(|error| bad_image(&error))? {
        log::line(&format!("{}: {done}", path.display()));
    }
    Ok(())
}

/// The same for the leaf of a chain.
fn finish_resize_of(chain: &ChainSpec) -> Result<()> {
    match chain.layers.first() {
        Some(leaf) if leaf.kind == ImageKind::Vhd && chain.access == Access::ReadWrite => {
            finish_resize(&leaf.path)
        }
        _ => Ok(()),
    }
}
