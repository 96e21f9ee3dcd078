//! Images on block devices, which loop devices stand in for, and file systems without room.

use std::path::PathBuf;
use std::process::Command;

use tapio_format::vhd::offline::Chain;

use crate::{Place, write};

/// A loop device over a file of the place, given back when dropped.
struct Loop(PathBuf);

impl Loop {
    fn over(place: &Place, name: &str, len: u64) -> Option<Self> {
        let file = std::fs::File::create(place.path(name)).unwrap();
        file.set_len(len).unwrap();
        let output = Command::new("losetup").args(["-f", "--show"]).arg(place.path(name)).output();
        match output {
            Ok(output) if output.status.success() => {
                Some(Self(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())))
            }
            _ => {
                println!("skipped: needs losetup and the right to use it");
                None
            }
        }
    }

    fn resize(&self, place: &Place, name: &str, len: u64) {
        std::fs::OpenOptions::new().write(true).open(place.path(name)).unwrap().set_len(len).unwrap();
        assert!(Command::new("losetup").arg("-c").arg(&self.0).status().unwrap().success());
    }

    fn name(&self) -> String {
        self.0.display().to_string()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

#[test]
fn a_chain_on_devices() {
    let place = Place::new();
    let Some(base) = Loop::over(&place, "base", 16 << 20) else { return };
    let Some(leaf) = Loop::over(&place, "leaf", 8 << 20) else { return };
    place.ok(&format!("create -n {} -s 20 -S 2097152", base.name()));
    place.ok(&format!("check -n {}", base.name()));
    let bytes = std::fs::read(place.path("base")).unwrap();
    assert_eq!(bytes[..512], bytes[(16 << 20) - 512..], "the footer is at the end of the device");
    write(&base.0, 0, &vec![1; 5 << 20]);
    place.ok(&format!("snapshot -n {} -p {} -S 2097152", leaf.name(), base.name()));
    write(&leaf.0, 3 << 20, &vec![2; 512 << 10]);
    for name in [base.name(), leaf.name()] {
        place.ok(&format!("check -b -n {name}"));
    }
    assert_eq!(place.ok(&format!("query -p -n {}", leaf.name())), format!("{}\n", base.name()));
    place.ok(&format!("set -n {} -f hidden -v 1", base.name()));
    assert_eq!(place.ok(&format!("coalesce -n {}", leaf.name())), "Coalesced 1024 sectors");
    let mut seen = vec![0; 6 << 20];
    Chain::open(&base.0).unwrap().read_at(0, &mut seen).unwrap();
    let value = |at: usize| match at {
        at if (3 << 20..(3 << 20) + (512 << 10)).contains(&at) => 2,
        at if at < 5 << 20 => 1,
        _ => 0,
    };
    assert!(seen.iter().enumerate().all(|(at, &byte)| byte == value(at)));

    // The volume is made larger, and then the footer is put at its new end.
    base.resize(&place, "base", 32 << 20);
    place.fails(22, &format!("check -n {}", base.name()));
    place.ok(&format!("modify -n {} -s {}", base.name(), 32 << 20));
    place.ok(&format!("check -n {}", base.name()));
}

#[test]
fn a_full_device_is_one_clear_error() {
    let place = Place::new();
    let Some(base) = Loop::over(&place, "base", 3 << 20) else { return };
    let said = place.fails(libc::ENOSPC, &format!("create -n {} -s 20 -S 2097152", base.name()));
    assert!(said.contains("no room"), "{said}");
    place.ok(&format!("create -n {} -s 20", base.name()));
    place.ok(&format!("snapshot -n leaf.vhd -p {}", base.name()));
    place.write("leaf.vhd", 0, &vec![1; 6 << 20]);
    let said = place.fails(libc::ENOSPC, "coalesce -n leaf.vhd");
    assert!(said.contains("make it larger"), "{said}");
    place.ok(&format!("check -n {}", base.name()));
    let mut seen = vec![0; 6 << 20];
    Chain::open(&place.path("leaf.vhd")).unwrap().read_at(0, &mut seen).unwrap();
    assert!(seen.iter().all(|&byte| byte == 1));
}

#[test]
fn a_full_file_system_leaves_images_whole() {
    let place = Place::new();
    place.ok("create -n base.vhd -s 20");
    place.write("base.vhd", 0, &[9; 512]);
    place.ok("snapshot -n leaf.vhd -p base.vhd");
    place.write("leaf.vhd", 0, &vec![1; 9 << 20]);
    // Files may grow to 5 MiB: a write beyond fails as on a full file system.
    let limited = |arguments: &str| {
        let line = format!(
            "trap '' XFSZ; ulimit -f 10240; exec '{}' vhd-util {arguments}",
            env!("CARGO_BIN_EXE_tapio")
        );
        let output = Command::new("sh").args(["-c", &line]).current_dir(place.dir.path()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (status, said) = limited("coalesce -n leaf.vhd");
    assert_eq!(status, Some(libc::EFBIG), "{said}");
    assert!(said.contains("base.vhd: cannot write"), "{said}");
    // The parent was written after the child was made, which a slow host shows in its time.
    place.ok("check -p -t -n leaf.vhd");
    place.ok("coalesce -n leaf.vhd");
    let (status, said) = limited("create -r -n new.vhd -s 20");
    assert_eq!(status, Some(libc::EFBIG), "{said}");
    assert!(!place.path("new.vhd").exists());
    assert_eq!(std::fs::read_dir(place.dir.path()).unwrap().count(), 2, "nothing is left behind");
}
