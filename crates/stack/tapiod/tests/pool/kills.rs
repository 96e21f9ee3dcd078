//! A host that is killed while it joins or leaves is alone or a member, and can do it again.

use serde_json::json;
use tapio_fixtures::etcd::Cluster;

use super::rig::{Host, first_host, is_missing, make_sr, vdi};

/// Starts the daemon so that it ends at a step, as if it were killed there.
fn start_to_die(host: &mut Host, step: &str) {
    host.kill();
    host.start(&[("TAPIO_DIE_AT", step)]);
}

#[test]
fn a_host_that_is_killed_while_it_joins_or_leaves_can_do_it_again() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let a = first_host(&cluster, &scratch.path().join("a"));
    let mut b = Host::new(&scratch.path().join("b"), &[]);
    let sr = make_sr(&b, &scratch.path().join("own"), false);
    let disk = b.done("VDI.create", vdi(&sr, "kept"));
    let has_disk = |host: &Host| host.call("VDI.get_name_label", json!([disk])) == Ok(json!("kept"));
    let has_sr = |host: &Host| {
        host.own().is_some_and(|own| host.pbd_of(&sr, &own).is_some_and(|(_, is_attached)| is_attached))
    };

    for step in ["pool-join:told", "pool-join:brought"] {
        start_to_die(&mut b, step);
        b.until("the SR is attached", || has_sr(&b));
        assert_eq!(b.join(&a).unwrap_err()[0], "NO_ANSWER", "{step}");
        b.ends();
        b.start(&[]);
        b.until("it is alone, and has what it had", || b.count("host") == 1 && has_sr(&b) && has_disk(&b));
        assert!(a.login().is_ok(), "{step}: the pool goes on");
    }
    start_to_die(&mut b, "pool-join:kept");
    assert_eq!(b.join(&a).unwrap_err()[0], "NO_ANSWER");
    b.ends();
    b.start(&[]);
    b.until("it is a member", || b.count("host") == 2 && has_sr(&b) && has_disk(&b));
    a.until("the pool knows it once", || a.count("host") == 2 && has_disk(&a));
    assert_eq!((a.count("pool"), a.count("SR"), a.count("VDI")), (1, 1, 1));

    for step in ["pool-eject:noted", "pool-eject:detached", "pool-eject:removed"] {
        start_to_die(&mut b, step);
        let own = a.host_at(&b.address()).expect("a member");
        a.until("the host lives", || super::ha::lives(&a, &own));
        let left = a.call("pool.eject", json!([own]));
        assert!(left.is_err(), "{step}: {left:?}");
        b.ends();
        b.start(&[]);
        b.until("it is alone", || b.count("host") == 1 && b.own().is_some_and(|now| now != own));
        a.until("the pool has forgotten it", || a.count("host") == 1 && a.count("SR") == 0);
        b.join(&a).unwrap();
        b.until("it is a member again", || b.count("host") == 2 && a.count("host") == 2);
        // So that there is something to detach.
        make_sr(&b, &scratch.path().join(step), false);
    }
}
