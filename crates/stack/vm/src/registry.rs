//! Which drivers there are.

use std::sync::Arc;

use crate::host::Host;
use crate::qemu::Qemu;
use crate::settings::Settings;
use crate::sim::Sim;
use crate::traits::VmDriver;
use crate::uml::Uml;
use crate::xen::Xen;

/// All drivers; VMs that an earlier daemon started are found here.
pub fn registry(settings: &Settings) -> Vec<Arc<dyn VmDriver>> {
    vec![
        Arc::new(Uml::new(settings)),
        Arc::new(Qemu::new(settings)),
        Arc::new(Xen::new(settings)),
        Arc::new(Host::new(settings)),
        Arc::new(Sim::new(settings)),
    ]
}
