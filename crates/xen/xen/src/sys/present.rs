//! Whether there is a hypervisor at all.

use std::path::Path;

/// Whether this host runs on Xen.
pub fn is_xen() -> bool {
    is_xen_below(Path::new("/"))
}

/// Whether this is the control domain, dom0: it may create other domains.
pub fn is_control_domain() -> bool {
    is_control_domain_below(Path::new("/"))
}

pub(super) fn is_xen_below(root: &Path) -> bool {
    let kind = std::fs::read_to_string(root.join("sys/hypervisor/type"));
    kind.is_ok_and(|kind| kind.trim() == "xen") || root.join("proc/xen/capabilities").exists()
}

pub(super) fn is_control_domain_below(root: &Path) -> bool {
    let text = std::fs::read_to_string(root.join("proc/xen/capabilities"));
    text.is_ok_and(|text| text.split(|c: char| c == ',' || c.is_whitespace()).any(|word| word == "control_d"))
}
