use std::os::unix::fs::symlink;

use tapio_types::ImageKind;

use super::*;

/// A sysfs of our own.
struct Sys(tempfile::TempDir);

impl Sys {
    fn new() -> Self {
        let sys = Self(tempfile::tempdir().expect("a directory"));
        fs::create_dir_all(sys.0.path().join("dev/block")).expect("made");
        sys
    }

    /// A device of this number below `devices/PLACE`.
    fn device(&self, number: &str, place: &str) -> PathBuf {
        let dir = self.0.path().join("devices").join(place);
        fs::create_dir_all(&dir).expect("made");
        fs::write(dir.join("dev"), format!("{number}\n")).expect("written");
        symlink(&dir, self.0.path().join("dev/block").join(number)).expect("a link");
        dir
    }

    fn slave(of: &Path, slave: &Path) {
        fs::create_dir_all(of.join("slaves")).expect("made");
        symlink(slave, of.join("slaves").join(slave.file_name().expect("a name"))).expect("a link");
    }

    fn scheduler(dir: &Path, text: &str) {
        fs::create_dir_all(dir.join("queue")).expect("made");
        fs::write(dir.join("queue/scheduler"), text).expect("written");
    }

    fn beneath(&self, number: &str) -> Beneath {
        let sources = Sources { sys: self.0.path().into(), mountinfo: "/nothing".into() };
        sources.of_device(number, 0)
    }
}

#[test]
fn volumes_on_one_disk_have_one_name_whatever_is_between() {
    let sys = Sys::new();
    let disk = sys.device("8:0", "pci0000:00/ata1/host0/target0:0:0/0:0:0:0/block/sda");
    let part = sys.device("8:3", "pci0000:00/ata1/host0/target0:0:0/0:0:0:0/block/sda/sda3");
    fs::write(part.join("partition"), "3\n").expect("written");
    let [first, second] =
        ["253:0", "253:1"].map(|number| sys.device(number, &format!("virtual/block/{number}")));
    Sys::slave(&first, &part);
    Sys::slave(&second, &first);
    for number in ["8:0", "8:3", "253:0", "253:1"] {
        let found = sys.beneath(number);
        assert_eq!(
            (found.name().as_deref(), &found.network, &found.fair),
            (Some("8-0"), &None, &None),
            "{number}"
        );
    }
    Sys::scheduler(&disk, "mq-deadline [bfq] none\n");
    assert_eq!(sys.beneath("253:1").fair.as_deref(), Some("bfq of sda"));
    Sys::scheduler(&disk, "[mq-deadline] bfq none\n");
    assert_eq!(sys.beneath("253:1").fair, None);
}

#[test]
fn a_volume_over_two_disks_is_shared_fairly_where_both_are() {
    let sys = Sys::new();
    let disks =
        ["8:0", "8:16"].map(|number| sys.device(number, &format!("virtual/block/sd{}", &number[2..])));
    let volume = sys.device("253:0", "virtual/block/dm-0");
    disks.iter().for_each(|disk| Sys::slave(&volume, disk));
    assert_eq!(sys.beneath("253:0").name().as_deref(), Some("8-0_8-16"));
    Sys::scheduler(&disks[0], "[bfq] none");
    assert_eq!(sys.beneath("253:0").fair, None);
    Sys::scheduler(&disks[1], "[cfq] noop");
    assert!(sys.beneath("253:0").fair.is_some());
}

#[test]
fn disks_behind_a_network_are_known_by_their_place() {
    let sys = Sys::new();
    let devices = [
        ("8:32", "platform/host3/session1/target3:0:0/3:0:0:1/block/sdc", Some("iSCSI session session1")),
        (
            "8:48",
            "pci0/host4/rport-4:0-1/target4:0:0/4:0:0:0/block/sdd",
            Some("Fibre Channel port rport-4:0-1"),
        ),
        ("43:0", "virtual/block/nbd0", Some("nbd0 is an NBD device")),
        ("252:0", "rbd/0/block/rbd0", Some("Ceph RBD")),
        ("147:0", "virtual/block/drbd0", Some("DRBD")),
        ("7:0", "virtual/block/loop0", None),
        ("254:0", "pci0/virtio0/block/vda", None),
    ];
    for (number, place, want) in devices {
        sys.device(number, place);
        let found = sys.beneath(number).network;
        match want {
            Some(part) => assert!(found.as_ref().is_some_and(|why| why.contains(part)), "{place}: {found:?}"),
            None => assert_eq!(found, None, "{place}"),
        }
    }
    // A multipath device over it is as far away.
    let multipath = sys.device("253:9", "virtual/block/dm-9");
    let path = sys.0.path().join("devices/platform/host3/session1/target3:0:0/3:0:0:1/block/sdc");
    Sys::slave(&multipath, &path);
    assert!(sys.beneath("253:9").network.is_some());
}

#[test]
fn nvme_is_near_or_far_by_its_transport() {
    let sys = Sys::new();
    let near = sys.device("259:0", "pci0/nvme/nvme0/nvme0n1");
    fs::create_dir_all(near.join("device")).expect("made");
    fs::write(near.join("device/transport"), "pcie\n").expect("written");
    assert_eq!(sys.beneath("259:0").network, None);
    let far = sys.device("259:1", "virtual/nvme-subsystem/nvme-subsys1/nvme1n1");
    fs::create_dir_all(far.join("device/nvme1")).expect("made");
    fs::write(far.join("device/nvme1/transport"), "tcp\n").expect("written");
    assert!(sys.beneath("259:1").network.is_some_and(|why| why.contains("over tcp")));
}

#[test]
fn a_loop_device_is_what_its_file_is_and_circles_end() {
    let sys = Sys::new();
    let dir = sys.device("7:0", "virtual/block/loop0");
    fs::create_dir_all(dir.join("loop")).expect("made");
    let file = sys.0.path().join("file");
    fs::write(&file, "").expect("written");
    fs::write(dir.join("loop/backing_file"), format!("{}\n", file.display())).expect("written");
    let found = sys.beneath("7:0");
    assert_eq!(found.network, Sources::default().of_path(&file, 0).network);
    let [one, two] = ["253:0", "253:1"].map(|number| sys.device(number, &format!("virtual/block/{number}")));
    Sys::slave(&one, &two);
    Sys::slave(&two, &one);
    assert!(sys.beneath("253:0").name().is_some());
}

#[test]
fn a_scheduler_below_a_loop_device_does_not_tell_its_users_apart() {
    let sys = Sys::new();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let below = number(file.metadata().expect("there").dev());
    let disk = sys.device(&below, "pci0/virtio0/block/vda");
    let dir = sys.device("7:0", "virtual/block/loop0");
    fs::create_dir_all(dir.join("loop")).expect("made");
    fs::write(dir.join("loop/backing_file"), format!("{}\n", file.display())).expect("written");
    let part = sys.device("259:3", "virtual/block/loop0/loop0p1");
    fs::write(part.join("partition"), "1\n").expect("written");
    Sys::scheduler(&disk, "[bfq] none\n");
    assert_eq!(sys.beneath(&below).fair.as_deref(), Some("bfq of vda"));
    for number in ["7:0", "259:3"] {
        let found = sys.beneath(number);
        assert_eq!((found.name(), found.fair), (sys.beneath(&below).name(), None), "{number}");
    }
    Sys::scheduler(&dir, "[bfq] none\n");
    assert_eq!(sys.beneath("259:3").fair.as_deref(), Some("bfq of loop0"));
}

#[test]
fn an_export_is_behind_a_network_and_a_chain_is_as_far_as_its_farthest_image() {
    let sources = Sources::default();
    let near = LayerSpec { kind: ImageKind::Raw, path: "/proc/version".into() };
    let far = LayerSpec { kind: ImageKind::Nbd, path: "nbd://host/export".into() };
    let chain = |layers: &[&LayerSpec]| ChainSpec {
        layers: layers.iter().map(|layer| (*layer).clone()).collect(),
        access: tapio_types::Access::ReadWrite,
    };
    assert_eq!(sources.network_of(&chain(&[&near])), None);
    let why = sources.network_of(&chain(&[&near, &far])).expect("far");
    assert!(why.contains("nbd://host/export") && why.contains("an NBD export"), "{why}");
}
