//! What became of a disk's images without being asked for.

use std::sync::Arc;

use parking_lot::Mutex;
use tapio_types::LayerSpec;

use crate::counter::Counter;

/// The images of a disk that has moved to what was below its leaf, until the keeper of their names has asked.
#[derive(Clone, Debug, Default)]
pub struct Moved(Arc<Mutex<Option<Vec<LayerSpec>>>>);

impl Moved {
    /// The disk has these images now, leaf first. Called on its data thread.
    pub(crate) fn note(&self, images: &[LayerSpec]) {
        if let Some(leaf) = images.first() {
            Counter::with(|stats| stats.set_image(&leaf.to_string()));
        }
        *self.0.lock() = Some(images.to_vec());
    }

    /// What was noted since the last time.
    pub fn take(&self) -> Option<Vec<LayerSpec>> {
        self.0.lock().take()
    }
}
