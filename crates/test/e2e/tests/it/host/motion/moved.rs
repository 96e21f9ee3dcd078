//! VMs arrive with all that they have, and nothing is left behind.

use std::collections::BTreeMap;

use serde_json::json;

use super::{Guest, MIB, Site, contents, write};

impl Site {
    /// The VDI with this name, of a snapshot or not.
    #[track_caller]
    fn vdi_of(&self, vm: &str) -> String {
        self.vdi_at(vm, "0")
    }

    fn snapshot(&self, vm: &str, name: &str) -> String {
        self.value(&["vm-snapshot", &format!("uuid={vm}"), &format!("new-name-label={name}")])
    }

    /// The images below a VDI, by the records.
    fn depth(&self, vdi: &str) -> usize {
        let session = self.world.daemon().login();
        let mut vdi = session.text("VDI.get_by_uuid", &[json!(vdi)]);
        let mut depth = 0;
        while vdi != "OpaqueRef:NULL" {
            depth += 1;
            vdi = session.text("VDI.get_parent", &[json!(vdi)]);
        }
        depth
    }
}

/// A VM with two disks, two snapshots and one whose disk has no disk that it is of any more.
#[test]
fn a_vm_moves_with_its_disks_and_snapshots_and_back() {
    let (one, two) = (Site::new(), Site::new());
    let vm = one.vm("web");
    let root = one.disk("root", 64);
    one.attach(&vm, &root, "0");
    let mut now = contents(64, 1, &[0, 20 * MIB, 63 * MIB]);
    one.fill(&root, &now);
    let extra = one.disk("extra", 16);
    let vbd = one.attach(&vm, &extra, "1");
    one.fill(&extra, &contents(16, 2, &[MIB]));
    let first = one.snapshot(&vm, "first");
    let of_first = now.clone();
    // The second disk goes, and its snapshot stays.
    one.value(&["vbd-destroy", &format!("uuid={vbd}")]);
    one.value(&["vdi-destroy", &format!("uuid={extra}")]);
    write(&mut now, 3, &[20 * MIB, 30 * MIB]);
    now[63 * MIB..].fill(0);
    one.fill(&root, &now);
    let second = one.snapshot(&vm, "second");
    let of_second = now.clone();
    write(&mut now, 4, &[0, 40 * MIB]);
    one.fill(&root, &now);
    let network = one.value(&["network-list", "--minimal"]).split(',').next().unwrap_or_default().to_owned();
    let mac = "02:11:22:33:44:55";
    let (of_vm, of_net) = (format!("vm-uuid={vm}"), format!("network-uuid={network}"));
    one.value(&["vif-create", &of_vm, &of_net, "device=0", &format!("mac={mac}")]);
    one.value(&["vm-param-set", &format!("uuid={vm}"), "name-description=moves", "other-config:note=kept"]);
    let (used, depth) = (one.used(), one.depth(&root));

    let guest = Guest { uuid: vm.clone(), holds: BTreeMap::from([("0".to_owned(), now)]) };
    for (from, to) in [(&one, &two), (&two, &one)] {
        from.migrate(to, &vm, &[]).ok();
        assert!(to.has(&vm) && !from.has(&vm));
        from.is_empty();
        to.is_over();
        to.is_whole(&guest);
        // The line of snapshots, and of their disks.
        let snapshots = to.list(&["snapshot-list", &format!("snapshot-of={vm}")]);
        assert_eq!(snapshots.len(), 2, "{snapshots:?}");
        assert_eq!(to.param("vm", &vm, "parent"), second);
        assert_eq!(to.param("snapshot", &second, "parent"), first);
        let root = to.vdi_of(&vm);
        for (snapshot, data) in [(&first, &of_first), (&second, &of_second)] {
            let vdi = to.vdi_of(snapshot);
            assert_eq!(to.param("vdi", &vdi, "snapshot-of"), root);
            assert!(to.read(&vdi) == *data, "the disk of a snapshot holds something else");
        }
        // The disk of the first snapshot whose disk is gone.
        let orphan = to.vdi_at(&first, "1");
        assert!(to.read(&orphan) == contents(16, 2, &[MIB]));
        assert_eq!(to.param("vdi", &orphan, "is-a-snapshot"), "true");
        // What is common is there once, and what was thin is thin.
        assert_eq!(to.depth(&root), depth);
        assert!(to.used() <= used + used / 4 + (1 << 20), "{} of {used} bytes", to.used());
        assert_eq!(to.param("vm", &vm, "name-description"), "moves");
        assert_eq!(
            to.value(&["vm-param-get", &format!("uuid={vm}"), "param-name=other-config", "param-key=note"]),
            "kept"
        );
        assert_eq!(to.list(&["vif-list", &format!("vm-uuid={vm}"), "params=MAC"]), [mac]);
    }
    // It goes back to a snapshot that has moved twice.
    one.value(&["snapshot-revert", &format!("snapshot-uuid={first}")]);
    assert!(one.read(&one.vdi_of(&vm)) == of_first);
    one.finish();
    two.finish();
}

#[test]
fn a_vm_is_copied_to_another_pool_and_stays() {
    let (one, two) = (Site::new(), Site::new());
    let guest = one.small("template", 7);
    let network = one.value(&["network-list", "--minimal"]).split(',').next().unwrap_or_default().to_owned();
    let (of_vm, of_net) = (format!("vm-uuid={}", guest.uuid), format!("network-uuid={network}"));
    one.value(&["vif-create", &of_vm, &of_net, "device=0", "mac=02:11:22:33:44:66"]);
    let copied = one.migrate(&two, &guest.uuid, &["copy=true"]).ok();
    let copied = Guest { uuid: copied.trim().to_owned(), holds: guest.holds.clone() };
    assert_ne!(copied.uuid, guest.uuid);
    one.is_whole(&guest);
    two.is_whole(&copied);
    let macs = two.list(&["vif-list", &format!("vm-uuid={}", copied.uuid), "params=MAC"]);
    assert!(macs.len() == 1 && macs[0] != "02:11:22:33:44:66", "a copy has an address of its own: {macs:?}");
    // A template of a user too, which stays one; it is there beside the copy.
    one.value(&["vm-param-set", &format!("uuid={}", guest.uuid), "is-a-template=true"]);
    let template = one.migrate(&two, &guest.uuid, &["copy=true"]).ok();
    assert_eq!(two.param("template", template.trim(), "is-a-template"), "true");
    let of_system = one.list(&["template-list", "is-default-template=true"]);
    if let Some(of_system) = of_system.first() {
        let said = one.migrate(&two, of_system, &["copy=true"]).fails();
        assert!(said.contains("template"), "{said}");
    }
    one.is_over();
    two.is_over();
    one.finish();
    two.finish();
}

#[test]
fn a_suspended_vm_moves_with_its_memory_and_a_checkpoint_and_goes_on() {
    let (one, two) = (Site::new(), Site::new());
    let guest = one.small("web", 8);
    let (of, sr) = (format!("uuid={}", guest.uuid), format!("suspend-SR-uuid={}", one.sr()));
    one.value(&["vm-param-set", &of, "other-config:driver=sim", &sr]);
    one.value(&["vm-start", &of]);
    let checkpoint = one.value(&["vm-checkpoint", &of, "new-name-label=middle"]);
    // The memory of one that runs stays where it is.
    let said = one.migrate(&two, &guest.uuid, &[]).fails();
    assert!(said.contains("power state"), "{said}");
    one.value(&["vm-suspend", &of]);
    let said = one.migrate(&two, &guest.uuid, &["copy=true"]).fails();
    assert!(said.contains("power state"), "{said}");
    one.migrate(&two, &guest.uuid, &[]).ok();
    one.is_empty();
    two.is_over();
    assert_eq!(two.param("vm", &guest.uuid, "power-state"), "suspended");
    two.is_whole(&guest);
    two.value(&["vm-resume", &of]);
    assert_eq!(two.param("vm", &guest.uuid, "power-state"), "running");
    two.value(&["vm-shutdown", &of, "force=true"]);
    // The checkpoint has its memory too.
    two.value(&["snapshot-revert", &format!("snapshot-uuid={checkpoint}")]);
    assert_eq!(two.param("vm", &guest.uuid, "power-state"), "suspended");
    two.value(&["vm-resume", &of]);
    two.value(&["vm-shutdown", &of, "force=true"]);
    two.is_whole(&guest);
    one.finish();
    two.finish();
}
