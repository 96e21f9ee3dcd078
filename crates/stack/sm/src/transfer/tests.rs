use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::*;
use crate::traits::{Config, Ctx, LiveDisk, NewVdi, Sr};

const MIB: u64 = 1 << 20;

#[derive(Default)]
struct Caller(AtomicBool);

impl Ctx for Caller {
    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
    fn progress(&self, _: f64) {}
    fn live(&self, _: Uuid) -> Option<Box<dyn LiveDisk>> {
        None
    }
    fn step(&self, _: &'static str) {}
}

/// An SR with a disk of so many bytes.
fn disk(directory: &std::path::Path, len: u64) -> (Box<dyn Sr>, Uuid) {
    let (sr, vdi) = (Uuid::from_u128(1), Uuid::from_u128(2));
    let config = Config::from([("location".to_owned(), directory.join("images").display().to_string())]);
    let drivers = crate::registry(&directory.join("mount"), &directory.join("run"));
    let file = drivers.iter().find(|driver| driver.info().sr_type == "file").expect("it is known");
    file.create(&Caller::default(), sr, &config, 0).unwrap();
    let sr = file.attach(&Caller::default(), sr, &config).unwrap();
    let (name_label, name_description) = (String::new(), String::new());
    let sm_config = std::collections::BTreeMap::new();
    let new = NewVdi { uuid: vdi, virtual_size: len, sm_config, name_label, name_description };
    sr.create(&Caller::default(), &new).unwrap();
    (sr, vdi)
}

fn receive(sr: &dyn Sr, what: &Import, bytes: &[u8]) -> Result<(), ApiError> {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // The storage may want no more.
            let _ = ours.write_all(bytes);
        });
        sr.import(&Caller::default(), what, OwnedFd::from(theirs))
    })
}

fn read(sr: &dyn Sr, vdi: Uuid, start: u64) -> Result<(u64, Vec<u8>), ApiError> {
    let chain = sr.activate(&Caller::default(), vdi, Access::ReadOnly)?.chain;
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let what = Export { chain, uuid: vdi, base: None, format: StreamFormat::Raw, start };
    let (sent, bytes) = std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut bytes = Vec::new();
            ours.read_to_end(&mut bytes).unwrap();
            bytes
        });
        let sent = sr.export(&Caller::default(), &what, OwnedFd::from(theirs));
        (sent, reader.join().unwrap())
    });
    sr.deactivate(&Caller::default(), vdi)?;
    sent?;
    let (head, stream) = bytes.split_at(HEAD_LEN);
    Ok((u64::from_le_bytes(*head.first_chunk().unwrap()), stream.to_vec()))
}

#[test]
fn what_was_received_before_an_end_is_there_and_the_rest_follows() {
    let directory = tempfile::tempdir().unwrap();
    let (sr, vdi) = disk(directory.path(), 6 * MIB);
    let whole: Vec<u8> = (0..6 * MIB).map(|at| (at / 512 % 251) as u8 + 1).collect();
    let import = |start, len| Import { into: vdi, format: StreamFormat::Raw, start, len };
    let cut = 3 * MIB as usize + 700;
    let error = receive(&*sr, &import(0, Some(6 * MIB)), &whole[..cut]).unwrap_err();
    let place = (3 * MIB + 512).to_string();
    assert_eq!((&*error.code, &*error.params), ("IMPORT_ERROR_PREMATURE_EOF", &[place][..]));
    let (len, got) = read(&*sr, vdi, 0).unwrap();
    assert_eq!(len, 6 * MIB);
    let there = 3 * MIB as usize + 512;
    assert!(got[..there] == whole[..there] && got[there..].iter().all(|&byte| byte == 0));
    receive(&*sr, &import(there as u64, None), &whole[there..]).unwrap();
    assert!(read(&*sr, vdi, 0).unwrap().1 == whole);
    assert!(read(&*sr, vdi, 5 * MIB + 3).unwrap().1 == whole[5 * MIB as usize + 3..]);
    for start in [6 * MIB, 6 * MIB + 1] {
        assert_eq!(read(&*sr, vdi, start).unwrap_err().code, "SR_BACKEND_FAILURE_79");
    }
}

#[test]
fn a_reader_that_takes_nothing_does_not_keep_a_cancelled_call() {
    let directory = tempfile::tempdir().unwrap();
    let (sr, vdi) = disk(directory.path(), 64 * MIB);
    let chain = sr.activate(&Caller::default(), vdi, Access::ReadOnly).unwrap().chain;
    let (ours, theirs) = UnixStream::pair().unwrap();
    let what = Export { chain, uuid: vdi, base: None, format: StreamFormat::Raw, start: 0 };
    let caller = Caller::default();
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| sr.export(&caller, &what, OwnedFd::from(theirs)));
        let mut head = [0; HEAD_LEN];
        (&ours).read_exact(&mut head).unwrap();
        caller.0.store(true, Ordering::SeqCst);
        assert_eq!(sending.join().unwrap().unwrap_err().code, "TASK_CANCELLED");
    });
}

#[test]
fn an_encrypted_image_is_neither_sent_nor_received_into() {
    use tapio_format::vhd::KeyHash;
    use tapio_format::vhd::offline::{Image, OpenOptions, set_key_hash};
    let directory = tempfile::tempdir().unwrap();
    let (sr, vdi) = disk(directory.path(), 4 * MIB);
    let path = directory.path().join("images").join(format!("{vdi}.vhd"));
    let mut image = Image::open(&path, OpenOptions::WRITE).unwrap();
    set_key_hash(&mut image, KeyHash::of([1; 32], &[2; 32])).unwrap();
    drop(image);
    assert_eq!(read(&*sr, vdi, 0).unwrap_err().code, "VDI_IS_ENCRYPTED");
    let what = Import { into: vdi, format: StreamFormat::Raw, start: 0, len: None };
    assert_eq!(receive(&*sr, &what, &[0; 512]).unwrap_err().code, "VDI_IS_ENCRYPTED");
}

/// The pieces of a disk, or of its difference to another one, from byte `start` on.
fn pieces(sr: &dyn Sr, vdi: Uuid, base: Option<Uuid>, start: u64) -> Vec<(u64, Vec<u8>)> {
    let open = |vdi| sr.activate(&Caller::default(), vdi, Access::ReadOnly).unwrap().chain;
    let (chain, base) = (open(vdi), base.map(|base| (open(base), base)));
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let what = Export { chain, uuid: vdi, base, format: StreamFormat::Chunked, start };
    let bytes = std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut bytes = Vec::new();
            ours.read_to_end(&mut bytes).unwrap();
            bytes
        });
        sr.export(&Caller::default(), &what, OwnedFd::from(theirs)).unwrap();
        reader.join().unwrap()
    });
    for vdi in [Some(vdi), what.base.map(|(_, base)| base)].into_iter().flatten() {
        sr.deactivate(&Caller::default(), vdi).unwrap();
    }
    let (mut rest, mut pieces) = (&bytes[HEAD_LEN..], Vec::new());
    loop {
        let (head, data) = rest.split_at(12);
        let at = u64::from_le_bytes(*head.first_chunk().unwrap());
        let len = u32::from_le_bytes(head[8..].try_into().unwrap()) as usize;
        if len == 0 {
            assert!(data.is_empty(), "nothing follows the last piece");
            return pieces;
        }
        pieces.push((at, data[..len].to_vec()));
        rest = &data[len..];
    }
}

#[test]
fn a_difference_in_pieces_makes_the_disk_of_the_other_one() {
    let directory = tempfile::tempdir().unwrap();
    let (sr, vdi) = disk(directory.path(), 8 * MIB);
    let import = |start, len| Import { into: vdi, format: StreamFormat::Raw, start, len: Some(len) };
    let first: Vec<u8> = (0..4 * MIB).map(|at| (at / 512 % 251) as u8 + 1).collect();
    receive(&*sr, &import(0, 4 * MIB), &first).unwrap();
    let snapshot = Uuid::from_u128(3);
    sr.fork(&Caller::default(), vdi, snapshot, crate::ForkKind::Snapshot).unwrap();
    // Other data, zeros over data, and data where there was none.
    receive(&*sr, &import(MIB, 64 << 10), &[7; 64 << 10]).unwrap();
    receive(&*sr, &import(3 * MIB, 4096), &[0; 4096]).unwrap();
    receive(&*sr, &import(7 * MIB, 512), &[9; 512]).unwrap();
    let (_, whole) = read(&*sr, vdi, 0).unwrap();
    let (_, before) = read(&*sr, snapshot, 0).unwrap();

    let sent = pieces(&*sr, vdi, Some(snapshot), 0);
    let mut made = before.clone();
    for (at, data) in &sent {
        made[*at as usize..*at as usize + data.len()].copy_from_slice(data);
    }
    assert!(made == whole, "the pieces over the snapshot are the disk");
    let bytes: usize = sent.iter().map(|(_, data)| data.len()).sum();
    assert!(bytes < 2 * MIB as usize, "{bytes} bytes are sent of a difference of 69");
    // What follows the end of a piece is what is sent from there on.
    let end = sent[0].0 + sent[0].1.len() as u64;
    assert_eq!(pieces(&*sr, vdi, Some(snapshot), end), sent[1..]);

    // A whole disk is sent without its zeros.
    let sent = pieces(&*sr, snapshot, None, 0);
    let mut made = vec![0; 8 * MIB as usize];
    for (at, data) in &sent {
        assert!(data.iter().any(|byte| *byte != 0));
        made[*at as usize..*at as usize + data.len()].copy_from_slice(data);
    }
    assert!(made == before && sent.len() == 4, "{} pieces", sent.len());
}
