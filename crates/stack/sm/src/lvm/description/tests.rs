//! What LVM itself writes, on loop devices and without device-mapper, beside what `lvs` prints of it.

use std::process::Command;

use super::super::commands::{Row, rows};
use super::super::group::volumes;
use super::*;

/// Bytes of an area of metadata.
const AREA_LEN: usize = 60 << 10;

/// Devices that go with this.
struct Loops(Vec<String>, tempfile::TempDir);

impl Drop for Loops {
    fn drop(&mut self) {
        for device in &self.0 {
            let _ = Command::new("losetup").args(["-d", device]).status();
        }
    }
}

impl Loops {
    /// None, and a line about it, where there are none to be had.
    fn new(count: usize) -> Option<Self> {
        let mut loops = Self(Vec::new(), tempfile::tempdir().unwrap());
        for number in 0..count {
            let file = loops.1.path().join(number.to_string());
            File::create(&file).and_then(|file| file.set_len(64 << 20)).unwrap();
            let made = Command::new("losetup").args(["-f", "--show"]).arg(&file).output();
            match made.ok().filter(|made| made.status.success()) {
                Some(made) => loops.0.push(String::from_utf8_lossy(&made.stdout).trim().to_owned()),
                None => {
                    use std::io::Write as _;
                    let _ = io::stderr().write_all(b"\nskipped: needs loop devices [description]\n");
                    return None;
                }
            }
        }
        Some(loops)
    }

    fn lvm(&self, words: &[&str]) -> String {
        let filter: String = self.0.iter().map(|name| format!("\"a|^{name}$|\",")).collect();
        let settings = format!(
            "activation {{ udev_sync=0 udev_rules=0 }} backup {{ backup=0 archive=0 }} devices {{ \
             obtain_device_list_from_udev=0 external_device_info_source=\"none\" filter=[{filter}\"r|.*|\"] }}"
        );
        let mut all = vec![words[0], "--driverloaded", "n", "--config", &settings];
        all.extend(&words[1..]);
        let done = Command::new("lvm")
            .args(&all)
            .envs([("LVM_SUPPRESS_FD_WARNINGS", "1"), ("DM_DISABLE_UDEV", "1")])
            .output()
            .unwrap();
        assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    fn table(&self, program: &str, fields: &str, more: &[&str]) -> Vec<Row> {
        let words = [program, "--reportformat", "json", "--units", "b", "--nosuffix", "-o", fields];
        rows(&self.lvm(&[&words[..], more].concat())).unwrap()
    }

    /// As LVM lists it.
    fn listed(&self) -> Listed {
        let number = |row: &Row, field: &str| row[field].parse::<u64>().unwrap();
        let devices = self.table("pvs", "pv_name,pe_start", &[]);
        let starts = devices.iter().map(|row| (row["pv_name"].clone(), number(row, "pe_start"))).collect();
        let fields =
            "lv_name,lv_uuid,lv_size,lv_tags,lv_attr,segtype,seg_start,seg_size,devices,vg_extent_size";
        let of_group = &self.table("vgs", "vg_size,vg_free", &["vg"])[0];
        Listed {
            size: number(of_group, "vg_size"),
            free: number(of_group, "vg_free"),
            volumes: volumes(&self.table("lvs", fields, &["--segments", "vg"]), &starts),
        }
    }

    fn read(&self) -> Result<Listed, String> {
        read(&self.0, "vg")
    }
}

/// The same as of LVM, after `done`.
#[track_caller]
fn same(loops: &Loops, done: &str) -> Listed {
    let read = loops.read().unwrap_or_else(|why| panic!("{done}: {why}"));
    assert_eq!(read, loops.listed(), "{done}");
    read
}

#[test]
fn what_lvm_wrote_is_what_lvm_lists() {
    let Some(loops) = Loops::new(2) else { return };
    let [first, second] = [loops.0[0].as_str(), loops.0[1].as_str()];
    assert!(loops.read().unwrap_err().contains("no label"));
    loops.lvm(&["pvcreate", "-ff", "-y", "--metadatasize", "60k", "--dataalignment", "4k", first, second]);
    assert!(loops.read().is_err(), "no group");
    loops.lvm(&["vgcreate", "vg", first, second]);
    assert_eq!(same(&loops, "no volumes").volumes.len(), 0);
    let make = |name: &str, len: &str, more: &[&str]| {
        let words = ["lvcreate", "-y", "-an", "-Wn", "-Zn", "-n", name, "-L", len];
        loops.lvm(&[&words[..], more, &["vg"]].concat());
    };
    make("MGT", "4m", &[]);
    make("VHD-1", "8m", &["--addtag", "allocation=thin", "--addtag", "hidden"]);
    make("inflate_1_8388608", "4m", &["--addtag", "journaler"]);
    same(&loops, "volumes");
    loops.lvm(&["lvextend", "-y", "-L", "80m", "vg/VHD-1"]);
    let long = same(&loops, "a volume on both devices");
    assert!(long.volumes["VHD-1"].segments.len() > 1);
    loops.lvm(&["lvchange", "-pr", "vg/MGT"]);
    assert!(!same(&loops, "a volume that is read only").volumes["MGT"].is_writable);
    loops.lvm(&["lvremove", "-f", "vg/inflate_1_8388608"]);
    same(&loops, "a journal that went");
    loops.lvm(&["lvreduce", "-f", "-y", "-L", "8m", "vg/VHD-1"]);
    // So often that the area of the texts begins again.
    for turn in 0..24 {
        loops.lvm(&["lvchange", "--addtag", &format!("turn-{turn}"), "vg/VHD-1"]);
        let read = loops.read().unwrap();
        assert_eq!(read.volumes["VHD-1"].tags.len(), 3 + turn);
    }
    same(&loops, "many changes");

    let alone = read(&loops.0[..1], "vg").unwrap_err();
    assert!(alone.contains("not known"), "a device is missing: {alone}");
    assert!(read(&loops.0, "other").unwrap_err().contains("section 'other'"));
    assert!(read(&["/no/device".to_owned()], "vg").is_err() && read(&[], "vg").is_err());
    make("striped", "8m", &["--type", "striped", "-i", "2"]);
    assert!(loops.read().unwrap_err().contains("no plain one"));
    loops.lvm(&["lvremove", "-f", "vg/striped"]);
    loops.lvm(&["pvchange", "-xn", second]);
    assert!(loops.read().unwrap_err().contains("takes no volumes"));
    loops.lvm(&["pvchange", "-xy", second]);
    same(&loops, "all of it again");

    // What is torn or of another time is not taken.
    let device = OpenOptions::new().read(true).write(true).open(second).unwrap();
    let mut area = vec![0; AREA_LEN];
    device.read_exact_at(&mut area, ALIGN).unwrap();
    let mut torn = area.clone();
    let in_force = u64::from_le_bytes(area[40..48].try_into().unwrap());
    torn[in_force as usize] ^= 1;
    for (bytes, why) in [(&torn, "checksum"), (&vec![0; AREA_LEN], "not as it is known")] {
        device.write_all_at(bytes, ALIGN).and_then(|()| device.sync_all()).unwrap();
        let refused = loops.read().unwrap_err();
        assert!(refused.contains(why), "{refused}");
    }
    loops.lvm(&["lvchange", "--addtag", "later", "vg/VHD-1"]);
    device.write_all_at(&area, ALIGN).and_then(|()| device.sync_all()).unwrap();
    assert!(loops.read().unwrap_err().contains("differ"), "the two are of different times");
}
