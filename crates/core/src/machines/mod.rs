//! VMs and VBDs: what their messages do.

use crate::call::Handlers;
use crate::config::Config;

/// Guests of this host.
#[derive(Debug)]
pub struct Machines {}

/// Registers the messages of this part.
pub fn register(_: &mut Handlers) {}

impl Machines {
    /// None is known yet.
    pub fn new(_: &Config) -> Self {
        Self {}
    }
}
