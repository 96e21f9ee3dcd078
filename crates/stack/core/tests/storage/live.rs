//! Disks that are plugged into this host, and what is done to them meanwhile.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tapio_format::vhd::offline::Chain;
use tapio_load::Random;
use tapio_model::{NULL_REF, Value};

use super::collect::collect;
use super::rig::{MIB, Rig};

fn none() -> Value {
    Value::string_map::<&str, &str>([])
}

/// Plugs a VDI into the control domain; answers the VBD and the device.
fn plug(rig: &Rig, vdi: &str, mode: &str) -> Result<(String, PathBuf), tapio_model::ApiError> {
    let here =
        rig.stack.db.all("VM").into_iter().find(|vm| vm.bool("is_control_domain")).expect("this host's VM");
    let record = [
        ("VM", here.reference.as_str()),
        ("VDI", vdi),
        ("userdevice", "autodetect"),
        ("mode", mode),
        ("type", "Disk"),
    ];
    let record = record.map(|(key, value)| (key.to_owned(), Value::string(value)));
    let vbd = rig.text("VBD.create", vec![Value::Map(record.into_iter().collect())])?;
    rig.call("VBD.plug", vec![vbd.as_str().into()])?;
    let device = rig.get("VBD", &vbd).text("device").to_owned();
    Ok((vbd, PathBuf::from("/dev").join(device)))
}

fn unplug(rig: &Rig, vbd: &str) {
    rig.call("VBD.unplug", vec![vbd.into()]).expect("it is not in use");
    rig.call("VBD.destroy", vec![vbd.into()]).expect("it is unplugged");
}

fn write(device: &PathBuf, at: i64, byte: u8) {
    let mut file = File::options().write(true).open(device).expect("the device");
    file.seek(SeekFrom::Start(at as u64)).expect("in it");
    file.write_all(&vec![byte; MIB as usize]).and_then(|()| file.sync_all()).expect("it is written");
}

/// What the first megabytes of a VDI hold, by a copy into a raw image.
fn bytes(rig: &Rig, sr: &str, vdi: &str) -> Vec<u8> {
    let raw = rig.try_vdi(sr, rig.vdi(vdi).int("virtual_size"), &[("type", "raw")]).expect("a raw VDI");
    rig.text("VDI.copy", vec![vdi.into(), NULL_REF.into(), NULL_REF.into(), raw.as_str().into()])
        .expect("a copy");
    let whole = std::fs::read(rig.file("sr", &raw)).expect("its file");
    rig.call("VDI.destroy", vec![raw.as_str().into()]).expect("it goes");
    whole.chunks(MIB as usize).map(|chunk| chunk[chunk.len() / 2]).collect()
}

#[test]
fn a_disk_is_forked_and_grown_while_it_is_used() {
    let rig = Rig::live();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let (vbd, device) = match plug(&rig, &vdi, "RW") {
        Ok(plugged) => plugged,
        Err(error)
            if !PathBuf::from("/dev/fuse").exists() || !PathBuf::from("/dev/loop-control").exists() =>
        {
            println!("skipped: needs a local device by FUSE: {error} [storage::live]");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let size = |device: &PathBuf| {
        let name = device.file_name().expect("a name").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(format!("/sys/block/{name}/size")).expect("its size");
        text.trim().parse::<i64>().expect("a number") * 512
    };
    assert_eq!(size(&device), rig.vdi(&vdi).int("virtual_size"));
    for method in ["VDI.destroy", "VDI.forget"] {
        assert_eq!(rig.refused(method, vec![vdi.as_str().into()]).0, "VDI_IN_USE", "{method}");
    }
    assert_eq!(rig.refused("VDI.copy", Rig::copy_params(&vdi, &sr)).0, "VDI_IN_USE");
    write(&device, 0, b'a');
    let first = rig.snapshot(&vdi);
    write(&device, 0, b'b');
    write(&device, MIB, b'c');
    let clone = rig.text("VDI.clone", vec![vdi.as_str().into(), none()]).expect("a clone of a live disk");
    write(&device, 2 * MIB, b'd');
    rig.call("VDI.resize", vec![vdi.as_str().into(), (6 * MIB).into()]).expect("it grows under use");
    assert!(rig.vdi(&vdi).int("virtual_size") >= 6 * MIB);
    assert_eq!(bytes(&rig, &sr, &first), [b'a', 0, 0, 0]);
    assert_eq!(bytes(&rig, &sr, &clone), [b'b', b'c', 0, 0]);
    let mut now = vec![0; 3 * MIB as usize];
    let mut file = File::open(&device).expect("the device");
    file.read_exact(&mut now).expect("it reads");
    assert_eq!([now[1], now[MIB as usize], now[2 * MIB as usize]], *b"bcd");
    drop(file);
    rig.check(&sr, "sr");
    unplug(&rig, &vbd);
    assert_eq!(bytes(&rig, &sr, &vdi)[..4], [b'b', b'c', b'd', 0]);
    for gone in [&first, &clone, &vdi] {
        rig.call("VDI.destroy", vec![gone.as_str().into()]).expect("it is not in use");
    }
    rig.check(&sr, "sr");
    assert!(rig.images("sr").is_empty());
}

#[test]
fn many_plugs_read_one_disk() {
    let rig = Rig::live();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let first = match plug(&rig, &vdi, "RO") {
        Ok((vbd, _)) => vbd,
        Err(error)
            if !PathBuf::from("/dev/fuse").exists() || !PathBuf::from("/dev/loop-control").exists() =>
        {
            println!("skipped: needs a local device by FUSE: {error} [storage::live]");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let mut vbds = vec![first];
    vbds.extend((1..20).map(|_| plug(&rig, &vdi, "RO").expect("one more reader").0));
    assert_eq!(rig.stack.storage.holders().len(), 20);
    let copy = rig.text("VDI.copy", Rig::copy_params(&vdi, &sr)).expect("readers share");
    for vbd in vbds {
        unplug(&rig, &vbd);
    }
    assert!(rig.stack.storage.holders().is_empty());
    for gone in [&vdi, &copy] {
        rig.call("VDI.destroy", vec![gone.as_str().into()]).expect("it is not in use");
    }
    rig.check(&sr, "sr");
}

/// Writes half of a device, then 4 KiB at a time anywhere in it, until it is ended; what the device must hold is known
/// then.
struct Load {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<u8>>>,
}

impl Load {
    fn on(device: &Path, len: usize) -> Self {
        let file = File::options().write(true).open(device).expect("the device");
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let work = move || {
            let (mut model, mut random) = (vec![0; len], Random::new(11));
            model[..len / 2].fill(0xaa);
            file.write_all_at(&model[..len / 2], 0).expect("the disk goes on");
            let mut turn = 0_u8;
            while !is_over.load(Ordering::Acquire) {
                let at = random.below((len / 4096) as u64) as usize * 4096;
                turn = turn.wrapping_add(1);
                model[at..at + 4096].fill(turn);
                file.write_all_at(&model[at..at + 4096], at as u64).expect("the disk goes on");
                // Not more than is merged meanwhile.
                if turn.is_multiple_of(16) {
                    file.sync_data().expect("the disk goes on");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            file.sync_all().expect("the disk goes on");
            model
        };
        Self { stop, thread: Some(std::thread::spawn(work)) }
    }

    fn end(mut self) -> Vec<u8> {
        self.stop.store(true, Ordering::Release);
        self.thread.take().expect("it runs").join().expect("no write failed")
    }
}

#[test]
fn chains_become_short_while_the_disk_is_written() {
    const SIZE: usize = 48 << 20;
    let rig = Rig::live();
    let sr = rig.make_sr("sr");
    let late = Value::string_map([("gc-quiet", "100000")]);
    rig.call("SR.set_other_config", vec![sr.as_str().into(), late]).expect("a number");
    let vdi = rig.make_vdi(&sr, SIZE as i64);
    let (vbd, device) = match plug(&rig, &vdi, "RW") {
        Ok(plugged) => plugged,
        Err(error)
            if !PathBuf::from("/dev/fuse").exists() || !PathBuf::from("/dev/loop-control").exists() =>
        {
            println!("skipped: needs a local device by FUSE: {error} [storage::live]");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let load = Load::on(&device, SIZE);
    let mut kept = Vec::new();
    for round in 0..3 {
        let mut snapshots: Vec<_> = (0..6).map(|_| rig.snapshot(&vdi)).collect();
        kept.push((snapshots.remove(round), Vec::new()));
        kept[round].1 = whole(&rig, &kept[round].0);
        for gone in snapshots {
            rig.call("VDI.destroy", vec![gone.as_str().into()]).expect("it is not in use");
        }
        collect(&rig, &sr);
        // What a disk that is written holds when it is looked at may be too much to be merged: then it stays on a base
        // copy of its own.
        assert!(rig.images("sr").len() <= 2 * kept.len() + 2, "{:?}", rig.images("sr"));
        for (snapshot, bytes) in &kept {
            assert!(whole(&rig, snapshot) == *bytes, "a snapshot is as it was");
        }
    }
    let model = load.end();
    for (snapshot, _) in &kept {
        rig.call("VDI.destroy", vec![snapshot.as_str().into()]).expect("it is not in use");
    }
    collect(&rig, &sr);
    assert_eq!(rig.images("sr").len(), 1, "it stands alone, and is plugged");
    let mut now = Vec::new();
    File::open(&device).and_then(|mut file| file.read_to_end(&mut now)).expect("the device");
    assert!(now[..SIZE] == model[..], "what the guest reads is what it wrote");
    unplug(&rig, &vbd);
    assert!(whole(&rig, &vdi)[..SIZE] == model[..], "and so is what lies there");
    rig.check(&sr, "sr");
}

/// All that a disk holds which nothing writes.
fn whole(rig: &Rig, vdi: &str) -> Vec<u8> {
    let chain = Chain::open(&rig.file("sr", vdi)).expect("its chain");
    let mut bytes = vec![0; chain.virtual_len() as usize];
    chain.read_at(0, &mut bytes).expect("the whole disk");
    bytes
}
