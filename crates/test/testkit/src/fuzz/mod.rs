//! The fuzz targets: one function a parser of foreign bytes.
//!
//! A target never fails for bad bytes; it panics when our code breaks a guarantee: arithmetic that overflows, an index
//! outside, a loop without end, an answer that contradicts itself, memory out of proportion to the input.

mod api;
mod blkif;
mod blkif_backend;
mod bugreport;
mod changes;
mod control;
mod database;
mod device;
mod etcd;
mod facts;
mod format;
mod guest;
mod history;
mod lease;
mod live;
mod log_writes;
mod luns;
mod memory;
mod mutate;
mod nbd;
mod nbd_store;
mod ova;
mod plugins;
mod query;
mod rbd;
mod room;
mod screen;
pub mod seeds;
mod session;
mod stat;
mod storage;
mod thin;
mod xenstore;
mod xenstored;
mod xva;

pub use mutate::mutate;

/// Bytes of an input that a target looks at: what is interesting about any of the formats fits.
pub const INPUT_LEN_MAX: usize = 64 << 10;

/// A parser of foreign bytes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// As its directory in `fuzz/corpus` and its file in `fuzz/fuzz_targets` are called.
    pub name: &'static str,
    /// Feeds it.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "vhd_open", run: format::vhd_open },
    Target { name: "vhd_live", run: live::vhd_live },
    Target { name: "vhd_footer", run: format::vhd_footer },
    Target { name: "vhd_header", run: format::vhd_header },
    Target { name: "batmap", run: format::batmap },
    Target { name: "locator", run: format::locator },
    Target { name: "vhd_journal", run: format::vhd_journal },
    Target { name: "vhd_stream", run: format::vhd_stream },
    Target { name: "websocket", run: api::websocket },
    Target { name: "rfb_viewer", run: screen::rfb_viewer },
    Target { name: "screen_picture", run: screen::screen_picture },
    Target { name: "guest_agent", run: facts::guest_agent },
    Target { name: "cbt_log", run: changes::cbt_log },
    Target { name: "memory_head", run: memory::memory_head },
    Target { name: "database_dump", run: database::database_dump },
    Target { name: "host_archive", run: database::host_archive },
    Target { name: "database_replica", run: database::database_replica },
    Target { name: "etcd_answers", run: etcd::etcd_answers },
    Target { name: "query", run: query::query },
    Target { name: "bugreport_text", run: bugreport::bugreport_text },
    Target { name: "nbd_handshake", run: nbd::nbd_handshake },
    Target { name: "nbd_requests", run: nbd::nbd_requests },
    Target { name: "nbd_replies", run: nbd::nbd_replies },
    Target { name: "nbd_store", run: nbd_store::nbd_store },
    Target { name: "tls_psk", run: nbd_store::tls_psk },
    Target { name: "vhost_user_message", run: session::vhost_user_message },
    Target { name: "vring", run: guest::vring },
    Target { name: "packed_vring", run: guest::packed_vring },
    Target { name: "virtio_blk", run: guest::virtio_blk },
    Target { name: "blkif_request", run: blkif::blkif_request },
    Target { name: "blkif_ring", run: blkif::blkif_ring },
    Target { name: "blkif_backend", run: blkif_backend::blkif_backend },
    Target { name: "xenstore_wire", run: xenstore::xenstore_wire },
    Target { name: "fuse_request", run: device::fuse_request },
    Target { name: "netlink_answer", run: device::netlink_answer },
    Target { name: "tapdisk_message", run: control::tapdisk_message },
    Target { name: "own_protocol", run: control::own_protocol },
    Target { name: "thin_cli", run: thin::thin_cli },
    Target { name: "xmlrpc", run: api::xmlrpc },
    Target { name: "jsonrpc", run: api::jsonrpc },
    Target { name: "xsiostat_replay", run: stat::xsiostat_replay },
    Target { name: "stat_pages", run: stat::stat_pages },
    Target { name: "sm_journal", run: storage::sm_journal },
    Target { name: "lease_sectors", run: lease::lease_sectors },
    Target { name: "device_marks", run: storage::device_marks },
    Target { name: "sm_volumes", run: storage::sm_volumes },
    Target { name: "sm_image", run: storage::sm_image },
    Target { name: "sm_worker", run: storage::sm_worker },
    Target { name: "sm_plugin_v1", run: plugins::sm_plugin_v1 },
    Target { name: "sm_plugin_v3", run: plugins::sm_plugin_v3 },
    Target { name: "scsi_pages", run: luns::scsi_pages },
    Target { name: "iscsi_discovery", run: luns::iscsi_discovery },
    Target { name: "xenstored_session", run: xenstored::xenstored_session },
    Target { name: "xenstored_state", run: xenstored::xenstored_state },
    Target { name: "ova", run: ova::ova },
    Target { name: "ova_descriptor", run: ova::ova_descriptor },
    Target { name: "ova_image", run: ova::ova_image },
    Target { name: "ova_packed", run: ova::ova_packed },
    Target { name: "xva", run: xva::xva },
    Target { name: "xva_decoded", run: xva::xva_decoded },
    Target { name: "history_file", run: history::history_file },
    Target { name: "perfmon", run: history::perfmon },
    Target { name: "rbd_names", run: rbd::rbd_names },
    Target { name: "room_bell", run: room::room_bell },
    Target { name: "log_writes", run: log_writes::log_writes },
    Target { name: "xva_document", run: xva::xva_document },
];

/// Runs the target of this name.
///
/// # Panics
/// There is no such target, or it found a defect.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    let target = target.unwrap_or_else(|| panic!("there is no fuzz target {name}"));
    (target.run)(&bytes[..bytes.len().min(INPUT_LEN_MAX)]);
}

/// Takes `N` bytes off the front; zeroes where there are fewer.
fn take<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    let mut taken = [0; N];
    let len = N.min(bytes.len());
    taken[..len].copy_from_slice(&bytes[..len]);
    *bytes = &bytes[len..];
    taken
}
