//! A domain's description costs one transaction, however many disks it has: counted by the daemon itself.

// In a test, a failure that panics where it happened says the most.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;

use tapio_xenstore::domains::{self, DeviceKind};
use tapio_xenstore::{Client, Nodes, XenbusState};
use tapio_xenstored::serve::Running;

struct World {
    _store: Running,
    client: Client,
    _dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Running::start(&dir.path().join("socket")).unwrap();
        let client = Client::connect(store.path()).unwrap();
        Self { _store: store, client, _dir: dir }
    }

    fn domain(&mut self, domid: u32, vbds: u32) {
        let dir = format!("/local/domain/{domid}");
        let mut nodes = vec![
            (format!("{dir}/name"), format!("vm-{domid}")),
            (format!("{dir}/vm"), format!("/vm/0000-{domid}")),
            (format!("{dir}/memory/target"), "262144".into()),
            (format!("{dir}/console/tty"), "/dev/pts/3".into()),
        ];
        let mut device = |kind: &str, back: &str, devid: u32, extra: (&str, &str)| {
            let front = format!("{dir}/device/{kind}/{devid}");
            let backend = format!("/local/domain/0/backend/{back}/{domid}/{devid}");
            nodes.push((format!("{front}/backend"), backend.clone()));
            nodes.push((format!("{front}/state"), "4".into()));
            nodes.push((format!("{backend}/state"), "4".into()));
            nodes.push((format!("{backend}/{}", extra.0), extra.1.into()));
        };
        for number in 0..vbds {
            device("vbd", "vbd3", 51712 + 16 * number, ("params", "/disks/a.vhd"));
        }
        device("vif", "vif", 0, ("bridge", "xenbr0"));
        self.client.transaction(|t| t.write_many(&nodes)).unwrap();
    }

    /// What the daemon has counted.
    fn counted(&mut self) -> BTreeMap<String, u64> {
        let text = self.client.control(&["stats"]).unwrap();
        text.lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(name, count)| (name.to_owned(), count.parse().unwrap()))
            .collect()
    }

    fn transactions(&mut self, work: impl FnOnce(&mut Client)) -> [u64; 2] {
        let before = self.counted();
        work(&mut self.client);
        let after = self.counted();
        ["TRANSACTION_START", "TRANSACTION_END"]
            .map(|name| after.get(name).copied().unwrap_or(0) - before.get(name).copied().unwrap_or(0))
    }
}

#[test]
fn a_vm_with_one_disk_and_one_with_255_cost_the_same_transactions() {
    for vbds in [1, 255] {
        let mut world = World::new();
        world.domain(7, vbds);
        let counts = world.transactions(|client| {
            let before = client.counts();
            let domain = domains::one(client, 7).unwrap().expect("a domain");
            assert_eq!(domain.devices(DeviceKind::Vbd).count(), vbds as usize);
            assert!((client.counts() - before).round_trips <= 6);
        });
        assert_eq!(counts, [1, 1], "{vbds} disks");
    }
}

#[test]
fn a_listing_of_a_host_is_one_transaction() {
    let mut world = World::new();
    for domid in 1..=40 {
        world.domain(domid, domid % 5);
    }
    let counts = world.transactions(|client| {
        let domains = domains::all(client).unwrap();
        // Domain 0 is there by its back ends.
        assert_eq!(domains.len(), 41);
        assert_eq!(domains[9].devices(DeviceKind::Vbd).count(), 4);
    });
    assert_eq!(counts, [1, 1]);
}

#[test]
fn the_whole_description_is_there() {
    let mut world = World::new();
    world.domain(3, 2);
    let domain = domains::one(&mut world.client, 3).unwrap().unwrap();
    assert_eq!((domain.name(), domain.uuid()), (Some("vm-3"), Some("0000-3")));
    assert_eq!(domain.value("memory/target"), Some("262144"));
    assert_eq!(domain.value("console/tty"), Some("/dev/pts/3"));
    let disk = domain.devices(DeviceKind::Vbd).nth(1).unwrap();
    assert_eq!((disk.devid, disk.backend_kind()), (51728, Some("vbd3")));
    assert_eq!(
        (disk.front_state(), disk.back_state()),
        (Some(XenbusState::Connected), Some(XenbusState::Connected))
    );
    assert_eq!(disk.back("params"), Some("/disks/a.vhd"));
    assert_eq!(domain.devices(DeviceKind::Vif).next().unwrap().back("bridge"), Some("xenbr0"));
    assert_eq!(domains::one(&mut world.client, 99).unwrap(), None);
}

#[test]
fn a_guest_cannot_have_the_host_s_nodes_shown() {
    let mut world = World::new();
    world.domain(3, 1);
    world.client.write("/local/domain/0/backend/vbd3/4/51712/params", "the neighbour's").unwrap();
    for foreign in [
        "/local/domain/0/backend/vbd3/4/51712",
        "/local/domain/0/backend/vbd3/3/51728",
        "/vm/secret",
        "/local/domain/x/backend/vbd3/3/51712",
        "",
        "//",
    ] {
        world.client.write("/local/domain/3/device/vbd/51712/backend", foreign).unwrap();
        let domain = domains::one(&mut world.client, 3).unwrap().unwrap();
        let disk = domain.devices(DeviceKind::Vbd).next().unwrap();
        assert_eq!((disk.backend.as_deref(), disk.back.as_slice()), (None, &[][..]), "{foreign}");
    }
}
