//! The hosts of a pool are upgraded one after the other, while VMs run on each of them.

use serde_json::{Value, json};
use tapio_fixtures::etcd::Cluster;

use super::ha::{lives, make_vm, resident_on};
use super::rig::{Host, first_host, is_missing, make_sr, vdi};

const OLD: (&str, &str) = ("TAPIO_VERSION", "0.1.3");
const NEW: (&str, &str) = ("TAPIO_VERSION", "0.1.4");
const OTHER: (&str, &str) = ("TAPIO_VERSION", "0.2.0");

/// Another daemon takes the place of one that is told to end, as a package's upgrade does.
fn replace(host: &mut Host, version: (&str, &str)) {
    host.signal(libc::SIGTERM);
    host.ends();
    host.start(&[version]);
}

/// Disk processes of a host.
fn disks(host: &Host) -> Vec<i32> {
    let mut disks = host.running("tapio-disk");
    disks.sort_unstable();
    disks
}

fn version_of(at: &Host, host: &Value) -> Value {
    at.done("host.get_software_version", json!([host]))["product_version"].clone()
}

/// The host that decides, of those whose daemon runs.
fn decides<'a>(hosts: &'a [Host], own: &[Value]) -> (usize, &'a Host) {
    let master = hosts[0].master();
    let at = own.iter().position(|host| *host == master).expect("one of them");
    (at, &hosts[at])
}

#[test]
fn hosts_are_upgraded_one_after_the_other_while_vms_run() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let mut hosts = vec![first_host(&cluster, &scratch.path().join("0"))];
    replace(&mut hosts[0], OLD);
    let sr = make_sr(&hosts[0], &scratch.path().join("shared"), true);
    for (at, version) in [(1, OLD), (2, OTHER)] {
        let mut host = Host::new(&scratch.path().join(at.to_string()), &[]);
        replace(&mut host, version);
        hosts.push(host);
    }
    hosts[1].join(&hosts[0]).unwrap();
    let refused = hosts[2].join(&hosts[0]).unwrap_err();
    assert_eq!(refused, ["POOL_JOINING_HOST_MUST_HAVE_SAME_API_VERSION", OTHER.1, OLD.1]);
    replace(&mut hosts[2], OLD);
    hosts[2].join(&hosts[0]).unwrap();
    for host in &hosts {
        host.until("three hosts are there", || host.count("host") == 3);
    }
    let own: Vec<Value> = hosts.iter().map(|host| hosts[0].host_at(&host.address()).unwrap()).collect();
    for host in &own {
        hosts[0].until("it has the SR", || hosts[0].pbd_of(&sr, host).is_some_and(|(_, on)| on));
    }
    let vms: Vec<Value> = own
        .iter()
        .map(|host| {
            let vm = make_vm(&hosts[0], &sr);
            hosts[0].done("VM.start_on", json!([vm, host, false, false]));
            vm
        })
        .collect();
    let running: Vec<Vec<i32>> = hosts.iter().map(disks).collect();
    assert!(running.iter().all(|disks| disks.len() == 1), "{running:?}");
    let pool = hosts[0].done("pool.get_all", json!([]))[0].clone();
    let is_told = |host: &Host| {
        let config = host.done("pool.get_other_config", json!([pool]));
        config.get("rolling_upgrade_in_progress") == Some(&json!("true"))
    };
    assert!(!is_told(&hosts[0]));

    for at in 0..3 {
        replace(&mut hosts[at], NEW);
        let (master, deciding) = {
            let host = &hosts[at];
            host.until("a host decides", || own.contains(&host.master()));
            host.until("it is a member again", || lives(host, &own[at]));
            decides(&hosts, &own)
        };
        deciding.until("its version is known", || version_of(deciding, &own[at]) == json!(NEW.1));
        deciding.until("the pool says whether hosts differ", || is_told(deciding) == (at < 2));
        deciding.until("it has the SR", || deciding.pbd_of(&sr, &own[at]).is_some_and(|(_, on)| on));

        // Guests and their disks went on, on all hosts, and old and new ones do what the other asks for.
        assert_eq!(hosts.iter().map(disks).collect::<Vec<_>>(), running, "after host {at}");
        for (vm, host) in vms.iter().zip(&own) {
            assert_eq!(resident_on(deciding, vm).as_ref(), Some(host));
            let snapshot = deciding.done("VM.snapshot", json!([vm, "while versions differ"]));
            deciding.done("VM.destroy", json!([snapshot]));
        }
        deciding.done("VDI.create", vdi(&sr, "while versions differ"));
        let more = make_vm(deciding, &sr);
        for host in own.iter().cycle().skip(master).take(3) {
            deciding.done("VM.start_on", json!([more, host, false, false]));
            assert_eq!(resident_on(deciding, &more).as_ref(), Some(host));
            deciding.done("VM.hard_shutdown", json!([more]));
        }
        // What runs on a new host does not go back to an old one.
        if at < 2 {
            let refused = hosts[at].call("VM.pool_migrate", json!([vms[at], own[2], {}])).unwrap_err();
            assert_eq!(refused[0], "VM_HOST_INCOMPATIBLE_VERSION_MIGRATE", "{refused:?}");
        }
    }

    // Another minor version stays out while hosts of this one live; disks go on.
    let told = hosts[2].log().len();
    hosts[2].signal(libc::SIGTERM);
    hosts[2].ends();
    let refused = hosts[2].try_start(&[OTHER]);
    assert!(!refused.success(), "{refused}");
    let log = hosts[2].log().split_off(told);
    assert!(log.contains("hosts work together within one minor version"), "{log}");
    hosts[2].start(&[NEW]);
    let back = &hosts[2];
    back.until("it is a member again", || lives(back, &own[2]) && own.contains(&back.master()));
    assert_eq!(hosts.iter().map(disks).collect::<Vec<_>>(), running);
}
