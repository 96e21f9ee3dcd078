//! Which image a disk is opened with.

use serde::{Deserialize, Serialize};
use tapio_types::{ImageKind, LayerSpec, parse_type_and_path};

use crate::plain_path::plain_path;
use crate::{ControlError, Errno, Result};

/// Longest chain that can be named.
const LAYERS_MAX: usize = 64;
/// Longest name of an image that is not local: an export's, percent-encoded, and what stands around it.
const NAME_LEN_MAX: usize = 16 << 10;

/// Which image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageSource {
    /// The leaf as `type:/path`; its parents are found from it.
    Leaf(String),
    /// All images, leaf first.
    Chain(Vec<LayerSpec>),
}

impl ImageSource {
    /// Another image, as `type:/path`, is the leaf from now on.
    pub fn put_on_top(&mut self, leaf: &str) {
        match self {
            Self::Leaf(text) => leaf.clone_into(text),
            Self::Chain(layers) => {
                if let Ok(layer) = parse_type_and_path(leaf) {
                    layers.insert(0, layer);
                }
            }
        }
    }

    /// The disk is on these images from now on, leaf first.
    pub fn move_to(&mut self, images: Vec<LayerSpec>) {
        match self {
            Self::Leaf(text) => {
                if let Some(leaf) = images.first() {
                    *text = leaf.to_string();
                }
            }
            Self::Chain(layers) => *layers = images,
        }
    }

    /// As lists show it: the leaf.
    pub fn text(&self) -> String {
        match self {
            Self::Leaf(text) => text.clone(),
            Self::Chain(layers) => layers.first().map_or_else(String::new, ToString::to_string),
        }
    }

    /// Whether an image of a Ceph cluster is among them.
    pub fn is_of_ceph(&self) -> bool {
        match self {
            Self::Leaf(text) => parse_type_and_path(text).is_ok_and(|layer| layer.kind == ImageKind::Rbd),
            Self::Chain(layers) => layers.iter().any(|layer| layer.kind == ImageKind::Rbd),
        }
    }

    /// Whether it can be an image at all.
    ///
    /// # Errors
    /// `EINVAL` with what is wrong.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Leaf(text) => {
                let layer = parse_type_and_path(text)
                    .map_err(|error| ControlError::new(Errno::EINVAL, error.to_string()))?;
                plain_image(&layer)
            }
            Self::Chain(layers) if layers.is_empty() || layers.len() > LAYERS_MAX => Err(ControlError::new(
                Errno::EINVAL,
                format!("a chain has 1 to {LAYERS_MAX} images, not {}", layers.len()),
            )),
            Self::Chain(layers) => layers.iter().try_for_each(plain_image),
        }
    }
}

/// A path, or for what is not local a name, which is understood where it is opened.
fn plain_image(layer: &LayerSpec) -> Result<()> {
    if layer.kind.is_local() {
        return plain_path(&layer.path, "image", usize::MAX);
    }
    match layer.path.to_str() {
        Some(name) if name.len() <= NAME_LEN_MAX && !name.chars().any(char::is_control) => Ok(()),
        _ => Err(ControlError::new(
            Errno::EINVAL,
            format!(
                "the {} target '{}' is not usable",
                layer.kind,
                layer.path.display().to_string().escape_default()
            ),
        )
        .next(format!("give at most {NAME_LEN_MAX} bytes without control characters"))),
    }
}
