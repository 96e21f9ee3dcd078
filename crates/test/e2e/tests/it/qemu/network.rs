//! Network interfaces of a real guest: taps in bridges of a network namespace that the test's thread has for itself.
//! What the thread starts, the emulator and the clients, begins in there.

// Tests all of it, but not in functions that the lint knows as tests.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;

use tapio_e2e::process::poll_until;
use tapio_e2e::tools::skip;
use tapio_vm::{BridgeState, ShutdownKind, VifSpec, VmState};
use uuid::Uuid;

use super::kernel;
use crate::conformance::Lab;

#[track_caller]
fn ip(words: &str) -> String {
    let output = Command::new("ip").args(words.split(' ')).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "ip {words}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Whether an address answers one packet.
fn answers(address: &str) -> bool {
    let mut ping = Command::new("busybox");
    ping.args(["ping", "-c", "1", "-W", "1", address]);
    ping.output().unwrap().status.success()
}

fn vif(position: u8, bridge: Option<&str>) -> VifSpec {
    VifSpec {
        vif: Some(Uuid::new_v4()),
        position,
        mac: format!("02:00:00:00:00:0{position}"),
        mtu: 1400,
        bridge: bridge.map(str::to_owned),
        tap: format!("tap7.{position}"),
    }
}

/// Interfaces that are not the namespace's own and no bridges.
fn taps() -> usize {
    ip("-o link show type tun").lines().count()
}

/// One interface from the start, one that comes and goes, another daemon, memory that is written and read again.
pub fn lives_with_networks(lab: &mut Lab) {
    // SAFETY: it changes this thread alone, which ends with the test.
    let is_apart = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
    if !is_apart || !std::path::Path::new("/dev/net/tun").exists() {
        return skip("needs network namespaces: root, and /dev/net/tun");
    }
    if !kernel().is_some_and(|dir| dir.join("virtio_net.ko").exists()) {
        return skip("needs a guest kernel with virtio_net (scripts/setup clients)");
    }
    ip("link add br7 type bridge");
    ip("address add 10.9.9.1/24 dev br7");
    ip("link set br7 up");
    let vm = lab.vm();
    assert_eq!(lab.driver().bridge("br7").unwrap(), BridgeState::There);
    assert_eq!(lab.driver().bridge("br8").unwrap(), BridgeState::Missing);
    lab.driver().create(&lab.spec).unwrap();
    let first = vif(0, Some("br7"));
    lab.driver().plug_vif(vm, &first).unwrap();
    lab.driver().plug_vif(vm, &first).expect("the same again");
    assert_eq!(lab.driver().plug_vif(vm, &vif(0, None)).unwrap_err().code, "DEVICE_ALREADY_EXISTS");
    lab.driver().plug_vif(vm, &vif(1, Some("br8"))).expect_err("there is no such bridge");
    assert_eq!((lab.driver().vifs(vm).unwrap().len(), taps()), (1, 1), "nothing is left of what failed");
    lab.driver().unpause(vm).unwrap();
    let mut console = lab.console();
    assert_eq!(console.run("cat /sys/class/net/eth0/address"), first.mac);
    assert_eq!(console.run("cat /sys/class/net/eth0/mtu"), "1400");
    console.run("ip address add 10.9.9.2/24 dev eth0 && ip link set eth0 up");
    assert!(
        poll_until(lab.limit, || answers("10.9.9.2").then_some(())).is_some(),
        "the guest is not reached"
    );
    // A frame as long as the link carries, from the guest.
    console.run("for i in $(seq 60); do ping -c 1 -W 5 -s 1372 10.9.9.1 && break; done");

    // While it runs, one whose network is not there, too.
    let (second, third) = (vif(1, Some("br7")), vif(2, None));
    lab.driver().plug_vif(vm, &second).unwrap();
    lab.driver().plug_vif(vm, &third).unwrap();
    assert_eq!(taps(), 2);
    let waits = |name: &str| {
        format!("for i in $(seq 600); do [ ! -e /sys/class/net/{name} ] || break; usleep 100000; done; ")
    };
    console.run(&(waits("eth1") + &waits("eth2") + "ip link set eth1 up && ip link set eth2 up"));
    assert_eq!(console.run("cat /sys/class/net/eth1/address"), second.mac);
    let carrier = "for i in $(seq 600); do [ $(cat /sys/class/net/eth1/carrier) = 0 ] || break; usleep 100000; done; \
                   cat /sys/class/net/eth1/carrier /sys/class/net/eth2/carrier";
    assert_eq!(console.run(carrier).split_whitespace().collect::<Vec<_>>(), ["1", "0"]);
    drop(console);
    lab.end_daemon();
    lab.start_daemon();
    assert_eq!(lab.driver().vifs(vm).unwrap().len(), 3);
    assert!(
        poll_until(lab.limit, || answers("10.9.9.2").then_some(())).is_some(),
        "the tap went with the daemon"
    );
    lab.driver().unplug_vif(vm, &second, false, lab.deadline()).unwrap();
    lab.driver().unplug_vif(vm, &second, false, lab.deadline()).expect("it is gone already");
    let mut console = lab.console();
    assert!(console.try_run("[ -e /sys/class/net/eth1 ]").is_err(), "the guest still has the interface");
    assert_eq!(taps(), 1);

    // Its memory goes on in another emulator, whose devices must be the same.
    lab.driver().pause(vm).unwrap();
    assert_eq!(
        lab.driver().unplug_vif(vm, &first, false, lab.deadline()).unwrap_err().code,
        "DEVICE_DETACH_REJECTED"
    );
    let kind = lab.driver().saved_as(vm).unwrap();
    let (from, to) = UnixStream::pair().unwrap();
    let read = std::thread::spawn(move || {
        let mut memory = Vec::new();
        File::from(OwnedFd::from(from)).read_to_end(&mut memory).unwrap();
        memory
    });
    lab.driver().save(vm, to.into(), &|| false).unwrap();
    let memory = read.join().unwrap();
    lab.driver().shutdown(vm, ShutdownKind::Hard, lab.deadline()).unwrap();
    assert!(poll_until(lab.limit, || (taps() == 0).then_some(())).is_some(), "a tap is left");
    lab.driver().create_saved(&lab.spec, &kind).unwrap();
    // The network of the third is there now, and the name of the first is taken by another.
    ip("tuntap add dev tap7.0 mode tap");
    lab.driver().plug_vif(vm, &first).unwrap();
    lab.driver().plug_vif(vm, &VifSpec { bridge: Some("br7".into()), ..third.clone() }).unwrap();
    let (from, mut to) = UnixStream::pair().unwrap();
    let written = std::thread::spawn(move || std::io::Write::write_all(&mut to, &memory));
    lab.driver().load(vm, from.into()).unwrap();
    written.join().unwrap().unwrap();
    lab.driver().unpause(vm).unwrap();
    assert_eq!(lab.driver().state(vm).unwrap(), VmState::Running);
    assert!(
        poll_until(lab.limit, || answers("10.9.9.2").then_some(())).is_some(),
        "the guest lost its network"
    );
    let mut console = lab.console();
    let carrier = carrier.replace("eth1", "eth2");
    assert_eq!(console.run(&carrier).split_whitespace().collect::<Vec<_>>(), ["1", "1"]);
    // By force its network goes whatever the guest does.
    lab.driver().pause(vm).unwrap();
    lab.driver().unplug_vif(vm, &third, true, lab.deadline()).unwrap();
    assert_eq!(taps(), 2, "the first, and the other's");
    lab.driver().shutdown(vm, ShutdownKind::Hard, lab.deadline()).unwrap();
    lab.assert_quiet();
    lab.assert_gone();
}
