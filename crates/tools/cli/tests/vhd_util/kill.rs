//! The tool killed at any time: the images open, hold what they held, and the work can be repeated.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tapio_format::vhd::offline::Chain;

use crate::Place;

const MIB: u64 = 1 << 20;
const LEN: u64 = 64 * MIB;

fn contents(place: &Place, name: &str) -> Vec<u8> {
    let chain = Chain::open(&place.path(name)).unwrap();
    let mut bytes = vec![0; LEN as usize];
    chain.read_at(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_killed_coalesce_is_repeated() {
    let place = Place::new();
    place.ok("create -n base.vhd -s 64");
    for mib in (0..64).step_by(3) {
        place.write("base.vhd", mib * MIB, &vec![mib as u8 + 1; 300 << 10]);
    }
    place.ok("snapshot -n leaf.vhd -p base.vhd");
    for mib in (1..64).step_by(2) {
        place.write("leaf.vhd", mib * MIB, &vec![mib as u8 + 100; 900 << 10]);
    }
    let expected = contents(&place, "leaf.vhd");
    let base = std::fs::read(place.path("base.vhd")).unwrap();
    let whole = Instant::now();
    place.ok("coalesce -n leaf.vhd");
    let whole = whole.elapsed();
    let mut killed = 0;
    for part in 0..12u32 {
        std::fs::write(place.path("base.vhd"), &base).unwrap();
        let mut child =
            place.command().args(["coalesce", "-n", "leaf.vhd"]).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(whole * part / 12);
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
        let output = place.run(["check", "-p", "-b", "-t", "-n", "leaf.vhd"]);
        assert!(output.status.success(), "part {part}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(contents(&place, "leaf.vhd") == expected, "part {part}");
        place.ok("coalesce -n leaf.vhd");
        assert!(contents(&place, "base.vhd") == expected, "part {part}");
    }
    assert!(killed > 0, "it was never killed while it worked ({whole:?})");
}

#[test]
fn a_killed_create_or_snapshot_leaves_no_name() {
    let place = Place::new();
    place.ok("create -n base.vhd -s 64");
    place.write("base.vhd", 0, &[1; 512]);
    for (name, arguments) in [
        ("new.vhd", ["create", "-n", "new.vhd", "-s", "64", "-S", "2000000"].as_slice()),
        ("leaf.vhd", ["snapshot", "-n", "leaf.vhd", "-p", "base.vhd", "-S", "2000000"].as_slice()),
    ] {
        for part in 0..20 {
            let mut child = place.command().args(arguments).spawn().unwrap();
            std::thread::sleep(Duration::from_micros(700 * part));
            child.kill().unwrap();
            child.wait().unwrap();
            if place.path(name).exists() {
                place.ok(&format!("check -n {name}"));
                std::fs::remove_file(place.path(name)).unwrap();
            }
            // Whatever was left behind is no image to a scan.
            assert_eq!(place.ok("scan -f -m *").lines().count(), 1, "part {part}");
        }
        place.ok(&arguments.join(" "));
        place.ok(&format!("check -n {name}"));
        std::fs::remove_file(place.path(name)).unwrap();
    }
}
