//! Hosts join, outlive their coordinator, and leave.

use std::fs;
use std::time::Instant;

use serde_json::{Value, json};
use tapio_fixtures::etcd::Cluster;

use super::ha::{lives, make_vm};
use super::rig::{Host, first_host, is_missing, make_sr, vdi};

#[test]
fn hosts_join_share_outlive_their_coordinator_and_leave() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let mut a = first_host(&cluster, &scratch.path().join("a"));
    let b = Host::new(&scratch.path().join("b"), &[]);
    let c = Host::new(&scratch.path().join("c"), &[]);
    let sr = make_sr(&a, &scratch.path().join("shared"), true);
    let wrong = b.call("pool.join", json!([a.address(), "root", "wrong"])).unwrap_err();
    assert_eq!(wrong[0], "JOINING_HOST_SERVICE_FAILED");
    let itself = a.join(&a).unwrap_err();
    assert_eq!(itself[0], "OPERATION_NOT_ALLOWED");
    let not_etcd = c.join(&b).unwrap_err();
    assert_eq!(not_etcd[0], "OPERATION_NOT_ALLOWED", "{not_etcd:?}");
    b.join(&a).unwrap();
    b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
    c.join(&a).unwrap();
    for host in [&a, &b, &c] {
        host.until("three hosts are there", || host.count("host") == 3);
        host.until("all have the SR", || {
            [&a, &b, &c].iter().all(|other| {
                let reference = host.host_at(&other.address());
                reference.is_some_and(|reference| {
                    host.pbd_of(&sr, &reference).is_some_and(|(_, attached)| attached)
                })
            })
        });
        assert_eq!(host.count("pool"), 1);
    }
    let [host_a, host_b, host_c] = [&a, &b, &c].map(|host| a.host_at(&host.address()).unwrap());
    assert_eq!(a.master(), host_a);
    // Clients are sent to the host that decides.
    assert!(a.login().is_ok());
    assert_eq!(b.login().unwrap_err(), ["HOST_IS_SLAVE".to_owned(), a.address()]);
    // A call for another host is done there, and its effect is known when it returns.
    let (pbd, _) = a.pbd_of(&sr, &host_b).unwrap();
    a.done("PBD.unplug", json!([pbd]));
    assert!(!a.pbd_of(&sr, &host_b).unwrap().1);
    a.done("PBD.plug", json!([pbd]));
    assert!(a.pbd_of(&sr, &host_b).unwrap().1);
    // Hosts know each other by their certificates: one that shows a new one is known again.
    let shown = a.done("host.get_server_certificate", json!([host_b]));
    assert_ne!(shown, a.done("host.get_server_certificate", json!([host_a])));
    a.done("host.reset_server_certificate", json!([host_b]));
    a.until("the host is known by its new certificate", || {
        a.call("host.get_server_certificate", json!([host_b])).is_ok_and(|now| now != shown)
    });
    b.until("and it knows the others", || b.call("host.get_server_certificate", json!([host_a])).is_ok());
    let disk = a.done("VDI.create", vdi(&sr, "before"));
    b.until("a disk of another host is there", || b.call("VDI.get_uuid", json!([disk])).is_ok());

    a.kill();
    let died = Instant::now();
    b.until("another host decides", || b.master() == host_b || b.master() == host_c);
    eprintln!(
        "another host decides {:.1} s after the death of the one that did",
        died.elapsed().as_secs_f64()
    );
    let (next, last) = if b.master() == host_b { (&b, &c) } else { (&c, &b) };
    next.until("clients may log in", || next.login().is_ok());
    last.until("clients are sent there", || {
        last.login().is_err_and(|failure| failure[1..] == [next.address()])
    });
    let metrics = |reference: &Value| {
        let metrics = next.done("host.get_metrics", json!([reference]));
        next.done("host_metrics.get_live", json!([metrics])) == json!(true)
    };
    next.until("the host that died is known as such", || !metrics(&host_a));
    next.done("VDI.create", vdi(&sr, "after"));
    let gone = next.call("PBD.plug", json!([next.pbd_of(&sr, &host_a).unwrap().0])).unwrap_err();
    assert_eq!(gone[0], "CANNOT_CONTACT_HOST", "{gone:?}");

    a.start(&[]);
    a.until("it is a member again", || a.master() == next.master() && metrics(&host_a));
    assert!(a.count("VDI") >= 2, "what was made meanwhile is there");
    next.done("pool.designate_new_master", json!([host_a]));
    a.until("it decides again", || a.master() == host_a && a.login().is_ok());

    let refused = a.call("pool.eject", json!([host_a])).unwrap_err();
    assert_eq!(refused[0], "OPERATION_NOT_ALLOWED");
    let _ = a.call("pool.eject", json!([host_c]));
    a.until("it has left", || a.count("host") == 2 && a.pbd_of(&sr, &host_c).is_none());
    c.until("it is alone", || c.count("host") == 1 && c.host_at(&c.address()).as_ref() != Some(&host_c));
    assert_eq!(c.count("SR"), 0, "its database is new");
    assert_eq!(b.count("host"), 2);
}

#[test]
fn a_host_that_was_stopped_writes_nothing_when_another_decides() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let mut a = first_host(&cluster, &scratch.path().join("a"));
    let b = Host::new(&scratch.path().join("b"), &[]);
    let sr = make_sr(&a, &scratch.path().join("files"), false);
    b.join(&a).unwrap();
    b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
    let [host_a, host_b] = [&a, &b].map(|host| b.host_at(&host.address()).unwrap());
    // It stops between a step of the storage and the record of it.
    a.kill();
    a.start(&[("TAPIO_STOP_AT", "vdi-create:image-made")]);
    a.until("the SR is attached", || a.pbd_of(&sr, &host_a).is_some_and(|(_, attached)| attached));
    a.until("a host decides", || [&host_a, &host_b].contains(&&a.master()));
    let failed = std::thread::scope(|scope| {
        let making = scope.spawn(|| a.call("VDI.create", vdi(&sr, "late")));
        b.until("the other decides", || b.master() == host_b);
        let metrics = b.done("host.get_metrics", json!([host_a]));
        b.until("the stopped host is dead", || {
            b.done("host_metrics.get_live", json!([metrics])) == json!(false)
        });
        a.signal(libc::SIGCONT);
        making.join().unwrap()
    });
    let failed = failed.unwrap_err();
    // The daemon starts again when it sees that it lost its place; the answer may be lost with it.
    assert!(failed[1].contains("does not hold") || failed[0] == "NO_ANSWER", "{failed:?}");
    a.until("it is a member again", || {
        a.master() == host_b && a.pbd_of(&sr, &host_a).is_some_and(|(_, on)| on)
    });
    let named = |host: &Host| host.done("VDI.get_by_name_label", json!(["late"])).as_array().map(Vec::len);
    assert_eq!((named(&b), named(&a)), (Some(0), Some(0)));
    a.kill();
    a.start(&[]);
    a.until("the SR is attached", || a.pbd_of(&sr, &host_a).is_some_and(|(_, attached)| attached));
    a.done("VDI.create", vdi(&sr, "again"));
    let images = fs::read_dir(scratch.path().join("files")).unwrap().flatten();
    let images = images.filter(|entry| entry.file_name().to_string_lossy().ends_with(".vhd")).count();
    assert_eq!(images, 1, "the image of the change that was refused is removed");
}

/// A host that does not come back is forgotten: not while it lives, not while the records say that VMs run there, and
/// with it goes what only it had.
#[test]
fn a_host_is_forgotten_when_it_is_gone_and_its_vms_are_known_to_be() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let a = first_host(&cluster, &scratch.path().join("a"));
    let mut b = Host::new(&scratch.path().join("b"), &[]);
    let sr = make_sr(&a, &scratch.path().join("shared"), true);
    b.join(&a).unwrap();
    b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
    let [host_a, host_b] = [&a, &b].map(|host| a.host_at(&host.address()).unwrap());
    a.until("the other has the SR", || a.pbd_of(&sr, &host_b).is_some_and(|(_, on)| on));
    let own = make_sr(&b, &scratch.path().join("own"), false);
    a.until("the SR of one host is known to the other", || a.pbd_of(&own, &host_b).is_some());
    let (vm, local) = (make_vm(&a, &sr), make_vm(&a, &own));
    a.done("VM.set_affinity", json!([vm, host_b]));
    a.done("VM.start_on", json!([vm, host_b, false, false]));
    let refused = a.call("host.destroy", json!([host_b])).unwrap_err();
    assert_eq!(refused, ["HOST_IS_LIVE", host_b.as_str().unwrap()]);

    b.kill_all();
    a.until("the host is missed", || !lives(&a, &host_b));
    let refused = a.call("host.destroy", json!([host_b])).unwrap_err();
    assert_eq!(refused, ["HOST_HAS_RESIDENT_VMS", host_b.as_str().unwrap(), vm.as_str().unwrap()]);
    assert_eq!(a.count("host"), 2, "nothing has changed");
    a.done("VM.power_state_reset", json!([vm]));
    a.done("host.destroy", json!([host_b]));
    assert_eq!((a.count("host"), a.master()), (1, host_a));
    assert!(a.pbd_of(&sr, &host_b).is_none() && a.call("SR.get_uuid", json!([own])).is_err());
    // What the records of VMs say of it is nothing any more; a disk that only it had is gone with its SR.
    assert_eq!(a.done("VM.get_affinity", json!([vm])), json!("OpaqueRef:NULL"));
    assert_eq!(a.done("VM.get_VBDs", json!([local])), json!([]));
    assert_eq!(a.done("VM.get_power_state", json!([vm])), json!("Halted"));
    assert_eq!(a.done("VM.get_resident_on", json!([vm])), json!("OpaqueRef:NULL"));
}
