//! A Ceph cluster on this host: disks on its images, and an SR in a pool of it.

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};
use tapio_e2e::ceph::Cluster;
use tapio_e2e::client::{copy_out, random_file, sha256, tool};
use tapio_e2e::disk::{DiskOptions, text};
use tapio_e2e::needs;
use tapio_e2e::process::{poll_until, run, run_within};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;
use tapio_e2e::toolstack::{DaemonOptions, Session};

use super::MIB;

const POOL: &str = "tapio";
/// Anything ends within this time.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn disks_and_an_sr_on_a_cluster() {
    let begun = std::time::Instant::now();
    needs!("ceph-mon", "ceph-osd", "ceph", "rbd", "fio", "nbdcopy", "blkdiscard");
    let scratch = Scratch::on_disk();
    let mut cluster = Cluster::start(&scratch.join("ceph"));
    println!("the cluster serves after {:.1} s", begun.elapsed().as_secs_f64());
    an_sr(&scratch, &cluster);
    println!("the SR is done after {:.1} s", begun.elapsed().as_secs_f64());
    disks(&scratch, &mut cluster);
    println!("all is done after {:.1} s", begun.elapsed().as_secs_f64());
}

/// The bytes of an image as Ceph's own tool reads them.
fn exported(cluster: &Cluster, scratch: &Scratch, image: &str) -> PathBuf {
    let path = scratch.join("exported.raw");
    let _ = fs::remove_file(&path);
    cluster.tool("rbd", &["export", "--no-progress", image, text(&path)]).ok();
    path
}

/// Disk processes as they are started by hand: sandboxed, over NBD.
fn disks(scratch: &Scratch, cluster: &mut Cluster) {
    cluster.tool("rbd", &["create", &format!("{POOL}/disk"), "--size", "48M"]).ok();
    let name = format!("rbd:{POOL}/disk?mon_host={}", cluster.monitor);
    let options = DiskOptions::image(name.clone()).nbd();
    let disk = options.start(scratch.path());
    let original = scratch.join("original.raw");
    random_file(&original, 48 * MIB);
    tool("nbdcopy", &["--flush", "--connections=4", text(&original), &disk.uri()]).ok();
    assert_eq!(sha256(&exported(cluster, scratch, &format!("{POOL}/disk"))), sha256(&original));

    // One client writes. Others read, snapshots too.
    let said = options.refused(scratch.path());
    assert!(
        said.contains("is open for writing by client.") && said.contains("close it there first"),
        "{said}"
    );
    cluster.tool("rbd", &["snap", "create", &format!("{POOL}/disk@before")]).ok();
    let snapshot = DiskOptions::image(format!("rbd:{POOL}/disk@before?conf={}", text(&cluster.conf())));
    let said = snapshot.clone().nbd().refused(scratch.path());
    assert!(said.contains("which is only read"), "{said}");
    let missing = DiskOptions::image(format!("rbd:{POOL}/none?mon_host={}", cluster.monitor)).nbd();
    let said = missing.refused(scratch.path());
    assert!(said.contains("cannot open the RBD image 'none' of pool 'tapio'"), "{said}");

    // The OSD dies under load, and comes back: nothing is lost, and no request fails.
    let load = {
        let (uri, dir) = (disk.uri(), scratch.path().to_path_buf());
        std::thread::spawn(move || verified_load(&uri, &dir))
    };
    // Takes a moment, in which the load begins.
    cluster.tool("rbd", &["status", &format!("{POOL}/disk")]).ok();
    cluster.kill_osd();
    cluster.tool("ceph", &["osd", "stat"]).ok();
    assert!(!load.is_finished(), "the load is over before the OSD was killed");
    cluster.start_osd();
    load.join().expect("every block reads as it was written");

    // A disk process that is killed: its lock is known dead, and the next process goes on at once.
    let now = scratch.join("now.raw");
    copy_out(&disk.uri(), &now);
    disk.crash();
    let disk = options.start(scratch.path());
    let copy = scratch.join("copy.raw");
    copy_out(&disk.uri(), &copy);
    assert_eq!(sha256(&copy), sha256(&now));
    let reader = snapshot.nbd().arg("--read-only").start(scratch.path());
    copy_out(&reader.uri(), &copy);
    assert_eq!(sha256(&copy), sha256(&original), "the snapshot is as it was");
    reader.stop();
    disk.stop();
    let status = cluster.tool("rbd", &["status", &format!("{POOL}/disk")]).ok();
    assert!(status.contains("none"), "an ended process has the image open: {status}");
}

/// Writes in random order, flushes, reads and compares.
fn verified_load(uri: &str, dir: &Path) {
    let mut fio = Command::new("fio");
    fio.args([
        "--name=verify",
        "--ioengine=nbd",
        &format!("--uri={uri}"),
        "--rw=randwrite",
        "--bsrange=4k-64k",
    ]);
    fio.args(["--bs_unaligned=0", "--blockalign=4k", "--iodepth=16", "--size=48m", "--io_size=24m"]);
    fio.args(["--randseed=7", "--rate_iops=400", "--verify=crc32c", "--do_verify=1", "--verify_fatal=1"]);
    fio.args(["--fsync=64", "--output-format=terse"]).current_dir(dir);
    run_within(&mut fio, LIMIT).ok();
}

/// The device of the host that a VDI is plugged as.
struct Plugged {
    vbd: String,
    path: PathBuf,
}

impl Plugged {
    fn new(session: &Session, vdi: &str) -> Result<Self, Vec<String>> {
        let vms = session.call("VM.get_all_records", &[]);
        let vms = vms.as_object().expect("records");
        let (vm, _) =
            vms.iter().find(|(_, record)| record["is_control_domain"] == true).expect("the host's VM");
        let vbd = json!({"VM": vm, "VDI": vdi, "userdevice": "autodetect", "mode": "RW", "type": "Disk"});
        let vbd = session.text("VBD.create", &[vbd]);
        session.try_call("VBD.plug", &[json!(vbd)])?;
        let path = PathBuf::from("/dev").join(session.text("VBD.get_device", &[json!(vbd)]));
        Ok(Self { vbd, path })
    }

    fn file(&self) -> fs::File {
        fs::File::options().read(true).write(true).open(&self.path).expect("the device")
    }

    fn write(&self, at: u64, byte: u8, len: u64) {
        let mut file = self.file();
        file.seek(SeekFrom::Start(at)).expect("a place");
        file.write_all(&vec![byte; len as usize]).expect("written");
        file.sync_all().expect("durable");
    }

    fn read(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let mut file = self.file();
        file.seek(SeekFrom::Start(at)).expect("a place");
        file.read_exact(&mut bytes).expect("read");
        bytes
    }

    fn unplug(self, session: &Session) {
        session.call("VBD.unplug", &[json!(self.vbd)]);
        session.call("VBD.destroy", &[json!(self.vbd)]);
    }
}

/// Writes to a device until it is told to end: a snapshot is taken meanwhile.
struct Writer {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Writer {
    fn start(path: &Path, at: u64) -> Self {
        let (is_over, path) = (Arc::new(AtomicBool::new(false)), path.to_path_buf());
        let flag = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            let mut file = fs::File::options().write(true).open(path).expect("the device");
            let mut rounds = 0;
            while !flag.load(Ordering::Relaxed) {
                rounds += 1;
                file.seek(SeekFrom::Start(at))
                    .and_then(|_| file.write_all(&[rounds as u8; 64 << 10]))
                    .expect("written");
                file.sync_all().expect("durable");
            }
            rounds
        });
        Self { is_over, thread }
    }

    fn end(self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().expect("every write worked")
    }
}

fn uuid(session: &Session, vdi: &str) -> String {
    session.text("VDI.get_uuid", &[json!(vdi)])
}

/// The bits of a list of changed blocks, the first block first.
fn bits(listed: &str) -> Vec<bool> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits = listed.bytes().filter(|c| *c != b'=').map(digit);
    digits.flat_map(|digit| (0..6).rev().map(move |bit| digit >> bit & 1 == 1)).collect()
}

fn make_sr(session: &Session, config: Value) -> Result<Value, Vec<String>> {
    let host = session.call("host.get_all", &[])[0].clone();
    let names = [json!("ceph"), json!(""), json!("rbd"), json!("user"), json!(true), json!({})];
    session.try_call("SR.create", &[&[host, config, json!(0)][..], &names].concat())
}

fn until_attached(session: &Session, sr: &str) {
    let pbds = session.call("SR.get_PBDs", &[json!(sr)]);
    let is_attached = || {
        let attached = session.call("PBD.get_currently_attached", &[pbds[0].clone()]);
        (attached == json!(true)).then_some(())
    };
    poll_until(LIMIT, is_attached).expect("the SR is attached");
}

/// The toolstack: from the empty cluster to a pool without an SR.
fn an_sr(scratch: &Scratch, cluster: &Cluster) {
    let options = DaemonOptions::new(scratch).default_sr();
    let daemon = options.start();
    let session = daemon.login();
    let conf = json!({"conf": text(&cluster.conf())});
    let error = make_sr(&session, conf.clone()).expect_err("no pool is named");
    assert!(error[0] == "SR_BACKEND_FAILURE_115", "{error:?}");
    let config = json!({"conf": text(&cluster.conf()), "pool": POOL});
    let sr = make_sr(&session, config.clone()).expect("an SR").as_str().expect("a reference").to_owned();
    let namespace = session.text("SR.get_uuid", &[json!(sr)]);
    let host = session.call("host.get_all", &[])[0].clone();
    let found = session.text("SR.probe", &[host, config, json!("rbd"), json!({})]);
    assert!(found.contains(&namespace), "{found}");
    let record = |size: u64| json!({"SR": sr, "virtual_size": size, "name_label": "disk", "type": "user"});
    let vdi = session.text("VDI.create", &[record(64 * MIB)]);
    let image = format!("{POOL}/{namespace}/{}", uuid(&session, &vdi));
    session.call("VDI.enable_cbt", &[json!(vdi)]);
    let disk = match Plugged::new(&session, &vdi) {
        Ok(disk) => disk,
        Err(error) => {
            return skip(&format!("needs a local device by FUSE: {error:?}"));
        }
    };

    // A snapshot while the disk is written: what was durable before it is in it, what comes later is not.
    disk.write(0, 1, 8 * MIB);
    let writer = Writer::start(&disk.path, 48 * MIB);
    let snapshot = session.text("VDI.snapshot", &[json!(vdi), json!({})]);
    assert!(writer.end() > 0);
    disk.write(MIB, 2, 128 << 10);
    let clone = session.text("VDI.clone", &[json!(vdi), json!({})]);
    disk.write(2 * MIB, 3, 64 << 10);
    let restored = session.text("VDI.clone", &[json!(snapshot), json!({})]);

    // It grows, and gives space back, while it is used.
    session.call("VDI.resize", &[json!(vdi), json!(96 * MIB)]);
    let path = text(&disk.path).to_owned();
    let is_longer = || {
        let len = run(Command::new("blockdev").args(["--getsize64", &path])).ok();
        (len.trim() == (96 * MIB).to_string()).then_some(())
    };
    poll_until(LIMIT, is_longer).expect("the device is longer");
    disk.write(95 * MIB, 4, MIB);
    let discard = ["-o", &(4 * MIB).to_string(), "-l", &(4 * MIB).to_string(), &path];
    run(Command::new("blkdiscard").args(discard)).ok();
    assert!(disk.read(4 * MIB, 4 * MIB).iter().all(|byte| *byte == 0), "what was discarded");
    assert!(disk.read(95 * MIB, MIB).iter().all(|byte| *byte == 4), "what was added");
    disk.unplug(&session);

    // Ceph's own tools read the same.
    let at = |path: &Path, offset: u64| {
        let mut byte = [0];
        let mut file = fs::File::open(path).expect("exported");
        file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(&mut byte)).expect("a byte");
        byte[0]
    };
    let before = exported(cluster, scratch, &format!("{image}@{}", uuid(&session, &snapshot)));
    assert_eq!([0, MIB, 2 * MIB, 5 * MIB].map(|place| at(&before, place)), [1, 1, 1, 1]);
    assert_eq!(fs::metadata(&before).expect("exported").len(), 64 * MIB);
    let cloned = exported(cluster, scratch, &format!("{POOL}/{namespace}/{}", uuid(&session, &clone)));
    assert_eq!([0, MIB, 2 * MIB].map(|place| at(&cloned, place)), [1, 2, 1]);
    let now = exported(cluster, scratch, &image);
    assert_eq!([0, MIB, 2 * MIB, 5 * MIB, 95 * MIB].map(|place| at(&now, place)), [1, 2, 3, 0, 4]);
    let digest = sha256(&now);

    // Changed blocks, by the cluster's own comparison.
    let listed = bits(&session.text("VDI.list_changed_blocks", &[json!(snapshot), json!(vdi)]));
    let block = |place: u64| listed[(place >> 16) as usize];
    // The writer over the snapshot may have written all of it before.
    assert!([MIB, 2 * MIB, 5 * MIB, 95 * MIB].iter().all(|place| block(*place)), "{listed:?}");
    assert!([0, 3 * MIB, 16 * MIB, 60 * MIB].iter().all(|place| !block(*place)), "{listed:?}");
    let error = session.fails("VDI.list_changed_blocks", &[json!(vdi), json!(snapshot)]);
    assert_eq!(error[0], "SR_BACKEND_FAILURE_460", "{error:?}");

    // Out of the cluster into a file, and back.
    let pool = session.call("pool.get_all", &[])[0].clone();
    let files = session.text("pool.get_default_SR", &[pool]);
    let file = session.text("VDI.copy", &[json!(vdi), json!(files)]);
    let back = session.text("VDI.copy", &[json!(file), json!(sr)]);
    let copied = exported(cluster, scratch, &format!("{POOL}/{namespace}/{}", uuid(&session, &back)));
    assert_eq!(sha256(&copied), digest, "a copy by way of a file");

    // A storage worker that dies in the middle of a clone leaves nothing of it.
    daemon.stop();
    for step in ["rbd-clone:snapshot-made", "rbd-clone:image-made"] {
        let daemon = options.clone().env("TAPIO_DIE_AT", step).start();
        let session = daemon.login();
        until_attached(&session, &sr);
        let error = session.fails("VDI.clone", &[json!(vdi), json!({})]);
        assert_ne!(error[0], "SR_NOT_ATTACHED", "{step}: {error:?}");
        daemon.stop();
    }
    let daemon = options.start();
    let session = daemon.login();
    until_attached(&session, &sr);
    let left = || {
        let listed = cluster.tool("rbd", &["snap", "ls", &image]).ok();
        (!listed.contains("clone-")).then_some(())
    };
    poll_until(LIMIT, left).expect("the snapshots at which clones began are gone");
    session.call("SR.scan", &[json!(sr)]);
    let vdis: Vec<String> = serde_json::from_value(session.call("SR.get_VDIs", &[json!(sr)])).expect("VDIs");
    let wanted = [&vdi, &snapshot, &clone, &restored, &back];
    assert!(wanted.iter().all(|vdi| vdis.contains(vdi)), "{vdis:?}");

    // The origin goes first; what is left of it goes with the last that needs it.
    let others = vdis.iter().filter(|vdi| !wanted.contains(vdi));
    for vdi in wanted.into_iter().chain(others) {
        session.call("VDI.destroy", &[json!(vdi)]);
    }
    let images = cluster.tool("rbd", &["ls", &format!("{POOL}/{namespace}")]).ok();
    assert_eq!(images.trim(), "tapio.sr");
    session.call("SR.destroy", &[json!(sr)]);
    let spaces = cluster.tool("rbd", &["namespace", "ls", POOL]).ok();
    assert!(!spaces.contains(&namespace), "{spaces}");
    daemon.stop();
}
