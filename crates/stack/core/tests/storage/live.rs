//! Disks that are plugged into this host, and what is done to them meanwhile.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use tapio_format::vhd::offline::{Chain, Image, OpenOptions};
use tapio_load::Random;
use tapio_model::{NULL_REF, Value};

use super::collect::collect;
use super::faulty::until;
use super::rig::{MIB, Rig};

fn none() -> Value {
    Value::string_map::<&str, &str>([])
}

/// Plugs a VDI into the control domain; answers the VBD and the device.
pub(crate) fn plug(rig: &Rig, vdi: &str, mode: &str) -> Result<(String, PathBuf), tapio_model::ApiError> {
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

pub(crate) fn unplug(rig: &Rig, vbd: &str) {
    rig.call("VBD.unplug", vec![vbd.into()]).expect("it is not in use");
    rig.call("VBD.destroy", vec![vbd.into()]).expect("it is unplugged");
}

pub(crate) fn write(device: &PathBuf, at: i64, byte: u8) {
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

/// Writes 4 KiB at a time anywhere in the first 8 MiB of a device, without end, and all of the rest of it when it is
/// told to. What the device must hold is known at the end.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    /// How often the rest is to be written, and how often it was.
    wanted: Arc<AtomicUsize>,
    done: Arc<AtomicUsize>,
    thread: Option<JoinHandle<Vec<u8>>>,
}

/// Where it writes always: four blocks, less than is merged while a guest waits.
const WINDOW: usize = 8 << 20;

impl Load {
    pub(crate) fn on(device: &Path, len: usize) -> Self {
        let file = File::options().write(true).open(device).expect("the device");
        let (stop, wanted, done) = (Arc::default(), Arc::default(), Arc::default());
        let load = Self { stop, wanted, done, thread: None };
        let (is_over, wanted, done) = (load.stop.clone(), load.wanted.clone(), load.done.clone());
        let work = move || {
            let (mut model, mut random) = (vec![0; len], Random::new(11));
            let mut turn = 0_u8;
            while !is_over.load(Ordering::Acquire) {
                turn = turn.wrapping_add(1);
                if wanted.load(Ordering::Acquire) > done.load(Ordering::Acquire) {
                    model[WINDOW..].fill(turn);
                    file.write_all_at(&model[WINDOW..], WINDOW as u64).expect("the disk goes on");
                    file.sync_data().expect("the disk goes on");
                    done.fetch_add(1, Ordering::AcqRel);
                }
                let at = random.below((WINDOW / 4096) as u64) as usize * 4096;
                model[at..at + 4096].fill(turn);
                file.write_all_at(&model[at..at + 4096], at as u64).expect("the disk goes on");
                if turn.is_multiple_of(16) {
                    file.sync_data().expect("the disk goes on");
                }
            }
            file.sync_all().expect("the disk goes on");
            model
        };
        Self { thread: Some(std::thread::spawn(work)), ..load }
    }

    /// Writes the rest of the device.
    pub(crate) fn write_much(&self) {
        let wanted = self.wanted.fetch_add(1, Ordering::AcqRel) + 1;
        until("much to be written", || self.done.load(Ordering::Acquire) == wanted);
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
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
        // More than is merged while a guest waits.
        load.write_much();
        collect(&rig, &sr);
        assert_eq!(
            rig.images("sr").len(),
            2 * kept.len() + 1,
            "the disk, and each snapshot on its base copy"
        );
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

#[test]
fn a_disk_is_opened_and_closed_while_images_below_it_are_merged() {
    const SIZE: usize = 64 << 20;
    let rig = Rig::live();
    let sr = rig.make_sr("sr");
    let set = |rate: &str| {
        let config = Value::string_map([("gc-quiet", "100000"), ("gc-rate", rate)]);
        rig.call("SR.set_other_config", vec![sr.as_str().into(), config]).expect("numbers");
    };
    let vdi = rig.make_vdi(&sr, SIZE as i64);
    let put = |byte: u8, at: usize| {
        let mut image = Image::open(&rig.file("sr", &vdi), OpenOptions::WRITE).expect("its image");
        image.write_at(at as u64, &vec![byte; SIZE / 2]).and_then(|()| image.finish()).expect("room");
    };
    // The parent has the first half, what goes into it the second and the third quarter: blocks that it has, and new
    // ones.
    set("1048576");
    put(1, 0);
    let single = Value::string_map([("type", "single")]);
    rig.call("VDI.snapshot", vec![vdi.as_str().into(), single]).expect("a base copy");
    put(2, SIZE / 4);
    let snapshot = rig.snapshot(&vdi);
    let kept = whole(&rig, &snapshot);
    let mut model = kept[..SIZE].to_vec();
    let mut turn = 0;
    let mut open = || -> Result<(), tapio_model::ApiError> {
        let (vbd, device) = plug(&rig, &vdi, "RW")?;
        let at = SIZE / 8 * (turn % 8);
        write(&device, at as i64, 3);
        model[at..at + MIB as usize].fill(3);
        let mut now = Vec::new();
        File::open(&device).and_then(|mut file| file.read_to_end(&mut now)).expect("the device");
        assert!(now[..SIZE] == model[..], "it reads what was written, the time {turn}");
        unplug(&rig, &vbd);
        assert!(whole(&rig, &snapshot) == kept);
        turn += 1;
        Ok(())
    };
    rig.call("SR.collect_garbage", vec![sr.as_str().into(), false.into()]).expect("it is attached");
    // As long as the copy takes, unless the host is very busy.
    for _ in 0..4 {
        match open() {
            Err(error)
                if !PathBuf::from("/dev/fuse").exists() || !PathBuf::from("/dev/loop-control").exists() =>
            {
                println!("skipped: needs a local device by FUSE: {error} [storage::live]");
                return;
            }
            opened => opened.expect("a device"),
        }
    }
    for task in rig.stack.db.find("task", "name_label", "Garbage Collection") {
        // It may have ended.
        let _ = rig.call("task.cancel", vec![task.reference.as_str().into()]);
    }
    until("the end of the copy", || !rig.stack.storage.is_collecting(&sr));
    // And as its chain changes.
    set("0");
    rig.call("SR.collect_garbage", vec![sr.as_str().into(), false.into()]).expect("it is attached");
    while rig.stack.storage.is_collecting(&sr) {
        open().expect("a device");
    }
    // An opening may have been in the way.
    collect(&rig, &sr);
    assert_eq!(rig.images("sr").len(), 3, "the disk, its snapshot, what they share");
    assert!(whole(&rig, &snapshot) == kept);
    assert!(whole(&rig, &vdi)[..SIZE] == model[..]);
    rig.check(&sr, "sr");
}

/// All that a disk holds which nothing writes.
fn whole(rig: &Rig, vdi: &str) -> Vec<u8> {
    let chain = Chain::open(&rig.file("sr", vdi)).expect("its chain");
    let mut bytes = vec![0; chain.virtual_len() as usize];
    chain.read_at(0, &mut bytes).expect("the whole disk");
    bytes
}
