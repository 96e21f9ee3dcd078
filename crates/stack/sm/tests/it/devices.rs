//! SRs on devices: loop devices over sparse files, as root.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use tapio_sm::{Config, ForkKind, Sr};
use tapio_types::Access;
use uuid::Uuid;

use crate::support::{Place, Watch, driver, fork, make, new_vdi, read, skip, write};

const MIB: u64 = 1 << 20;

/// A loop device over a file; given back when dropped.
pub struct Loop {
    pub path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Loop {
    /// None, and a line about it, where there are no loop devices to be had.
    pub fn new(size: u64) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        File::create(&file).unwrap().set_len(size).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        match made {
            Ok(output) if output.status.success() => {
                let path = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
                Some(Self { path, _dir: dir })
            }
            _ => {
                skip("needs loop devices");
                None
            }
        }
    }

    pub fn config(&self) -> Config {
        Config::from([("device".to_string(), self.path.display().to_string())])
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
    }
}

/// Whether the kernel has it; a node alone may be left of LVM's programs.
pub fn has_device_mapper() -> bool {
    File::options().read(true).write(true).open("/dev/mapper/control").is_ok()
}

/// An SR that is unmounted whatever happens.
pub struct Mounted(pub PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        if std::fs::read_dir(&self.0).is_ok_and(|mut entries| entries.next().is_some()) {
            let _ = Command::new("umount").arg("-q").arg(&self.0).status();
        }
    }
}

fn code<T>(result: Result<T, tapio_types::ApiError>) -> String {
    let error = result.map(|_| ()).unwrap_err();
    assert!(error.params.iter().any(|text| text.len() > 10), "{error}");
    error.code.to_string()
}

pub fn holds(device: &Path) -> String {
    let output = Command::new("blkid").args(["-p", "-o", "export"]).arg(device).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn life_of(sr_type: &str, size: u64) {
    let Some(disk) = Loop::new(size) else { return };
    let place = Place::new();
    let (ctx, config, sr) = (Watch::default(), disk.config(), place.sr);
    let driver = place.driver(sr_type);
    let _mounted = Mounted(place.dir.path().join("mount").join(sr.to_string()));
    assert!(!driver.probe(&ctx, &config).unwrap().xml.contains("<UUID>"));
    driver.create(&ctx, sr, &config, 0).unwrap();
    let probed = driver.probe(&ctx, &config).unwrap();
    assert!(probed.xml.contains(&sr.to_string()), "{}", probed.xml);
    assert_eq!(probed.results[0].sr.unwrap().0, sr);
    // What is there is not overwritten, and is no other SR.
    assert_eq!(code(driver.create(&ctx, Uuid::new_v4(), &config, 0)), "SR_BACKEND_FAILURE_42");
    assert_eq!(code(driver.attach(&ctx, Uuid::new_v4(), &config)), "SR_BACKEND_FAILURE_47");

    let attached = driver.attach(&ctx, sr, &config).unwrap();
    let vdi = make(attached.as_ref(), 32 * MIB, "vhd");
    write(attached.as_ref(), vdi, 0, 1);
    let (raw, copy) = (make(attached.as_ref(), 8 * MIB, "raw"), make(attached.as_ref(), 9 * MIB, "raw"));
    write(attached.as_ref(), raw, MIB, 6);
    let source = attached.activate(&ctx, raw, Access::ReadOnly).unwrap().chain;
    attached.fill(&ctx, copy, &source, None).unwrap();
    if sr_type == "btrfs" {
        let flags = rustix::fs::ioctl_getflags(File::open(&source.layers[0].path).unwrap()).unwrap();
        assert!(flags.contains(rustix::fs::IFlags::NOCOW), "{flags:?}");
    }
    attached.deactivate(&ctx, raw).unwrap();
    write(attached.as_ref(), raw, MIB, 7);
    assert_eq!([0, 1, 8].map(|at| read(attached.as_ref(), copy, at * MIB)), [0, 6, 0]);
    fork(attached.as_ref(), vdi, ForkKind::Snapshot);
    write(attached.as_ref(), vdi, 0, 2);
    let stat = attached.stat(&ctx).unwrap();
    assert!(stat.physical_size > size / 2 && stat.physical_size <= size, "{stat:?}");
    assert!(stat.physical_utilisation > 0 && stat.physical_utilisation < stat.physical_size / 2);
    assert_eq!(code(driver.create(&ctx, Uuid::new_v4(), &config, 0)), "SR_DEVICE_IN_USE");
    let forced = Config::from([("force".to_string(), "true".to_string())]);
    let forced: Config = config.clone().into_iter().chain(forced).collect();
    assert_eq!(code(driver.create(&ctx, Uuid::new_v4(), &forced, 0)), "SR_DEVICE_IN_USE");

    // A daemon that starts again finds it mounted; one elsewhere does not mount it a second time.
    drop(attached);
    let attached = driver.attach(&ctx, sr, &config).unwrap();
    assert_eq!(read(attached.as_ref(), vdi, 0), 2);
    let elsewhere = Place::new();
    assert_eq!(code(elsewhere.driver(sr_type).attach(&ctx, sr, &config)), "SR_DEVICE_IN_USE");
    let busy = attached.activate(&ctx, vdi, Access::ReadOnly).unwrap().chain;
    let open = File::open(&busy.layers[0].path).unwrap();
    attached.deactivate(&ctx, vdi).unwrap();
    let (attached, error) = attached.detach(&ctx).map(|()| panic!("detached")).unwrap_err();
    assert_eq!(error.code, "SR_BACKEND_FAILURE_53");
    drop(open);
    attached.detach(&ctx).map_err(|(_, error)| error).unwrap();
    assert!(!place.dir.path().join("mount").join(sr.to_string()).exists());

    let attached = driver.attach(&ctx, sr, &config).unwrap();
    assert_eq!(read(attached.as_ref(), vdi, 0), 2);
    let (attached, error) = attached.erase(&ctx).map(|()| panic!("erased")).unwrap_err();
    assert_eq!(error.code, "SR_NOT_EMPTY");
    for info in attached.scan(&ctx).unwrap().iter().filter(|info| info.managed) {
        attached.destroy(&ctx, info.uuid).unwrap();
    }
    attached.erase(&ctx).map_err(|(_, error)| error).unwrap();
    assert_eq!(holds(&disk.path), "");
    assert_eq!(code(driver.attach(&ctx, sr, &config)), "SR_BACKEND_FAILURE_47");
}

#[test]
fn an_ext4_sr_lives_and_is_erased() {
    life_of("ext", 128 * MIB);
}

#[test]
fn an_xfs_sr_lives_and_is_erased() {
    life_of("xfs", 512 * MIB);
}

#[test]
fn a_btrfs_sr_lives_is_written_in_place_and_erased() {
    life_of("btrfs", 256 * MIB);
}

#[test]
fn devices_that_will_not_do_are_refused() {
    let ctx = Watch::default();
    let place = Place::new();
    let driver = place.driver("ext");
    let with = |device: &str| Config::from([("device".to_string(), device.to_string())]);
    let create = |config: &Config| code(driver.create(&ctx, place.sr, config, 0));
    assert_eq!(create(&Config::new()), "SR_BACKEND_FAILURE_90");
    assert_eq!(create(&with("/dev/none-of-this-name")), "SR_BACKEND_FAILURE_91");
    assert_eq!(create(&with("/etc/passwd")), "SR_BACKEND_FAILURE_91");
    let missing = driver.probe(&ctx, &Config::new()).unwrap_err();
    assert_eq!(missing.code, "SR_BACKEND_FAILURE_90");
    assert!(missing.params[2].contains("<Devlist>"), "{missing}");
    let Some(small) = Loop::new(32 * MIB) else { return };
    assert_eq!(create(&small.config()), "SR_BACKEND_FAILURE_60");
    let Some(used) = Loop::new(128 * MIB) else { return };
    if !has_device_mapper() {
        assert_eq!(create(&with(&format!("{0},{0}", used.path.display()))), "SR_BACKEND_FAILURE_91");
    }
    // A user's file system.
    let formatted =
        Command::new("mkfs.ext4").args(["-q", "-F", "-L", "mine"]).arg(&used.path).status().unwrap();
    assert!(formatted.success());
    let error = driver.create(&ctx, place.sr, &used.config(), 0).unwrap_err();
    assert!(error.code == "SR_BACKEND_FAILURE_91" && error.params[1].contains("ext4 'mine'"), "{error}");
    assert!(holds(&used.path).contains("LABEL=mine"));
    assert!(!driver.probe(&ctx, &used.config()).unwrap().xml.contains("<UUID>"), "no SR of ours");
    let mut forced = used.config();
    forced.insert("force".into(), "true".into());
    driver.create(&ctx, place.sr, &forced, 0).unwrap();
    assert!(driver.probe(&ctx, &used.config()).unwrap().xml.contains(&place.sr.to_string()));
    let sr = driver.attach(&ctx, place.sr, &used.config()).unwrap();
    let _mounted = Mounted(place.dir.path().join("mount").join(place.sr.to_string()));
    sr.erase(&ctx).map_err(|(_, error)| error).unwrap();
    assert_eq!(holds(&used.path), "");
}

#[test]
fn a_full_sr_says_so_and_is_left_as_it_was() {
    let Some(disk) = Loop::new(64 * MIB) else { return };
    let place = Place::new();
    let (ctx, config, uuid) = (Watch::default(), disk.config(), place.sr);
    let driver = place.driver("ext");
    let point = place.dir.path().join("mount").join(uuid.to_string());
    let _mounted = Mounted(point.clone());
    driver.create(&ctx, uuid, &config, 0).unwrap();
    let sr = driver.attach(&ctx, uuid, &config).unwrap();
    let (vdi, raw) = (make(sr.as_ref(), 32 * MIB, "vhd"), make(sr.as_ref(), 32 * MIB, "raw"));
    write(sr.as_ref(), vdi, 0, 1);
    write(sr.as_ref(), raw, 0, 4);
    let into = make(sr.as_ref(), 64 * MIB, "vhd");
    let from = make(sr.as_ref(), 64 * MIB, "raw");
    fill_up(&point, 6 * MIB);
    for at in 0..4 {
        write(sr.as_ref(), from, at * 16 * MIB, 5);
    }
    // Each of the four takes a block of two mebibytes; there is room for fewer.
    let source = sr.activate(&ctx, from, Access::ReadOnly).unwrap().chain;
    fill_up(&point, 5 * MIB);
    let full = "SR_BACKEND_FAILURE_44";
    let mut sectors = vec![7; 512 * 1024];
    for at in 0..32 {
        // Real data, so that it cannot be thin.
        sectors[at as usize] = 1;
        if write_many(&source.layers[0].path, at * 2 * MIB, &sectors).is_err() {
            break;
        }
    }
    assert_eq!(code(sr.fill(&ctx, into, &source, None)), full);
    sr.deactivate(&ctx, from).unwrap();
    fill_up(&point, 0);
    let before = names(&point);
    assert_eq!(code(sr.create(&ctx, &new_vdi(512 * 1024 * MIB, "vhd"))), full);
    assert_eq!(names(&point), before);
    for (vdi, byte) in [(vdi, 1), (raw, 4)] {
        let error = sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap_err();
        assert_eq!(error.code, full, "{error}");
        assert_eq!(names(&point), before);
        assert_eq!(read(sr.as_ref(), vdi, 0), byte);
    }
    let error = sr.resize(&ctx, vdi, 1024 * 1024 * MIB).unwrap_err();
    assert_eq!(error.code, full, "{error}");
    assert_eq!(names(&point), before);
    assert_eq!((sr.vdi(&ctx, vdi).unwrap().virtual_size, read(sr.as_ref(), vdi, 0)), (32 * MIB, 1));
    // Removing needs no room.
    sr.destroy(&ctx, from).unwrap();
    std::fs::remove_file(point.join("filler")).unwrap();
    assert!(sr.fork(&ctx, vdi, Uuid::new_v4(), ForkKind::Snapshot).is_ok());
    sr.detach(&ctx).map_err(|(_, error)| error).unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn write_many(path: &Path, at: u64, bytes: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    File::options().write(true).open(path)?.write_all_at(bytes, at)
}

/// Writes a file until only `left` bytes are free.
fn fill_up(point: &Path, left: u64) {
    use std::io::Write;
    let mut file = File::options().create(true).append(true).open(point.join("filler")).unwrap();
    for piece in [1 << 20, 4096, 512] {
        let bytes = vec![1; piece];
        loop {
            let free = Command::new("stat").args(["-f", "-c", "%a %S"]).arg(point).output().unwrap();
            let free = String::from_utf8(free.stdout).unwrap();
            let (blocks, size) = free.trim().split_once(' ').unwrap();
            let free: u64 = blocks.parse::<u64>().unwrap() * size.parse::<u64>().unwrap();
            if left > 0 && free < left + piece as u64 {
                return;
            }
            if file.write_all(&bytes).is_err() {
                break;
            }
        }
    }
    // What is reserved for root is root's, too: until nothing goes.
    let _ = file.sync_all();
}

#[test]
fn an_sr_whose_file_system_is_gone_says_so() {
    let Some(disk) = Loop::new(64 * MIB) else { return };
    let place = Place::new();
    let (ctx, config) = (Watch::default(), disk.config());
    let point = place.dir.path().join("mount").join(place.sr.to_string());
    let _mounted = Mounted(point.clone());
    let driver = driver(place.dir.path(), "ext");
    driver.create(&ctx, place.sr, &config, 0).unwrap();
    let sr = driver.attach(&ctx, place.sr, &config).unwrap();
    let vdi = make(sr.as_ref(), MIB, "vhd");
    tapio_fixtures::unmounting::unmount(&point);
    for error in [
        sr.scan(&ctx).unwrap_err(),
        sr.stat(&ctx).unwrap_err(),
        sr.create(&ctx, &new_vdi(MIB, "vhd")).unwrap_err(),
        sr.activate(&ctx, vdi, Access::ReadOnly).unwrap_err(),
    ] {
        assert!(error.code == "SR_BACKEND_FAILURE_47" && error.params[1].contains("unmounted"), "{error}");
    }
    assert_eq!(names(&point), [""; 0], "nothing was made beside it");
    // Plugged again it is all there.
    let sr: Box<dyn Sr> = driver.attach(&ctx, place.sr, &config).unwrap();
    assert_eq!(sr.scan(&ctx).unwrap().len(), 1);
    sr.detach(&ctx).map_err(|(_, error)| error).unwrap();
}
