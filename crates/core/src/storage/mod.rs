//! SRs, PBDs and VDIs: what their messages do.

use tapio_model::ApiError;
use tapio_types::{Access, ChainSpec};

use crate::call::{Call, Handlers};
use crate::config::Config;

/// Attached SRs.
#[derive(Debug)]
pub struct Storage {}

/// Registers the messages of this part.
pub fn register(_: &mut Handlers) {}

impl Storage {
    /// None is attached yet.
    pub fn new(_: &Config) -> Self {
        Self {}
    }

    /// Makes a VDI ready for a disk process: the images to open. Checks sharing (one writer or many readers).
    ///
    /// # Errors
    /// `VDI_IN_USE`, `SR_NOT_ATTACHED`, the driver's.
    pub fn activate(&self, _call: &Call, _vdi: &str, _access: Access) -> Result<ChainSpec, ApiError> {
        Err(ApiError::new("NOT_IMPLEMENTED", ["VDI.activate"]))
    }

    /// Undoes [`Self::activate`].
    ///
    /// # Errors
    /// The driver's.
    pub fn deactivate(&self, _call: &Call, _vdi: &str) -> Result<(), ApiError> {
        Err(ApiError::new("NOT_IMPLEMENTED", ["VDI.deactivate"]))
    }
}
