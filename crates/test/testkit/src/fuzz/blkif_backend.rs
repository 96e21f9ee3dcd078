//! A guest of Xen that asks anything of a real disk by the back end of its rings.

use std::fs::File;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tapio_block::{Disk, DiskOptions};
use tapio_front::blkif::{BlkifOptions, BlkifRing, BlkifServer, Start};
use tapio_types::Movement;
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};
use tapio_xen::blkif::{Abi, FrontRing, REQUEST_LEN_MAX, SEGMENT_LEN, Slot, status};
use tapio_xen::double::{DoubleVm, Guest, Wire};
use tapio_xen::{Channel, Domain, GrantRef, Rights};

use super::take;

const DISK_LEN: u64 = 1 << 20;
/// Pages of the guest behind its ring, all granted in one way or another.
const PAGES: u32 = 16;
/// Slots of the ring.
const SLOTS: usize = 32;
const LIMIT: Duration = Duration::from_secs(20);

/// One disk for all inputs: what it holds is not looked at.
fn disk() -> &'static Mutex<Disk> {
    static DISK: OnceLock<Mutex<Disk>> = OnceLock::new();
    DISK.get_or_init(|| {
        let dir =
            if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm".into() } else { std::env::temp_dir() };
        let path = dir.join(format!("tapio-fuzz-blkif-{}", std::process::id()));
        File::create(&path).and_then(|file| file.set_len(DISK_LEN)).expect("an image in memory");
        let layer = LayerSpec { kind: ImageKind::Raw, path: path.clone() };
        let chain = ChainSpec { layers: vec![layer], access: Access::ReadWrite };
        let disk = Disk::start(chain, DiskOptions::default()).expect("a disk on it");
        // It is open; the name is not needed any more.
        let _ = std::fs::remove_file(path);
        Mutex::new(disk)
    })
}

/// Requests by the slot, behind a byte that says how they are served; what follows is in the guest's pages.
///
/// Grants are made to name pages that there are, mostly: otherwise no input would reach further than the first one.
pub fn blkif_backend(bytes: &[u8]) {
    let mut rest = bytes;
    let [flags] = take::<1>(&mut rest);
    let abi = if flags & 4 != 0 { Abi::X86_32 } else { Abi::X86_64 };
    let vm = DoubleVm::new(PAGES + 1).expect("memory");
    // SAFETY: the page stays as long as `vm`, which outlives the ring; nothing else refers into it.
    let mut ring = unsafe { FrontRing::new(vm.page(0), 4096, abi).expect("one page") };
    let ring_grant = vm.grant(0, Rights::Write, 0).expect("a grant");
    let grants: Vec<GrantRef> = (1..=PAGES)
        .map(|page| match page {
            5 => vm.grant(page, Rights::Read, 0),
            6 => vm.grant(page, Rights::Write, 77),
            7 => vm.grant_absent(Rights::Write, 0),
            _ => vm.grant(page, Rights::Write, 0),
        })
        .map(|grant| grant.expect("a grant"))
        .collect();
    let named = |number: u32| {
        let known = grants.get(number as usize % (grants.len() + 1));
        known.map_or(number, |grant| grant.0).to_le_bytes()
    };
    let mut asked = 0;
    while asked < SLOTS && rest.len() >= REQUEST_LEN_MAX {
        let mut slot = Slot(take::<REQUEST_LEN_MAX>(&mut rest));
        let first = if slot.0[0] == 6 { 20 } else { 16 } + if abi == Abi::X86_64 { 8 } else { 4 };
        let step = if slot.0[0] == 6 { 4 } else { 8 };
        for at in (first..REQUEST_LEN_MAX - 4).step_by(step) {
            let number = u32::from_le_bytes([slot.0[at], slot.0[at + 1], slot.0[at + 2], slot.0[at + 3]]);
            slot.0[at..at + 4].copy_from_slice(&named(number));
        }
        assert!(ring.put(&slot), "the ring has room");
        asked += 1;
    }
    for (index, word) in rest.chunks_exact(SEGMENT_LEN).take(PAGES as usize * 512).enumerate() {
        let mut segment = [0; SEGMENT_LEN];
        segment.copy_from_slice(word);
        let number = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        segment[..4].copy_from_slice(&named(number));
        vm.write(1 + index as u32 / 512, index % 512 * SEGMENT_LEN, &segment);
    }
    let _ = ring.publish();
    let (_wire, theirs) = Wire::pair().expect("descriptors");
    let memory = vm.share().expect("a descriptor");
    let movements = [Movement::Copy, Movement::Persistent, Movement::Map, Movement::Bounce];
    let options = BlkifOptions {
        domain: Domain::Double(Guest::from_fd(memory, 3).expect("the VM's memory")),
        abi,
        rings: vec![BlkifRing {
            pages: vec![ring_grant],
            responses: Vec::new(),
            port: 1,
            channel: Channel::Double(theirs),
        }],
        movement: movements[usize::from(flags & 3)],
        max_indirect: 512,
        sector_size: if flags & 16 != 0 { 4096 } else { 512 },
        read_only: flags & 8 != 0,
        record: None,
        start: Start::Auto,
        log: Arc::new(|_| ()),
        on_ring: None,
    };
    let remote = disk().lock().unwrap_or_else(PoisonError::into_inner).remote().clone();
    let server = BlkifServer::connect(options, remote).expect("the ring is whole");
    let (end, mut answered) = (Instant::now() + LIMIT, 0);
    while answered < asked {
        ring.look().expect("the ring stays whole");
        while let Some(answer) = ring.take() {
            assert!((status::EOPNOTSUPP..=status::OKAY).contains(&answer.status), "{answer:?}");
            answered += 1;
        }
        assert!(Instant::now() < end, "{answered} of {asked} requests were answered");
        std::thread::yield_now();
    }
    let state = server.state().expect("the thread lives");
    assert!(state.rings[0].broken.is_none() && state.rings[0].in_flight == 0, "{state:?}");
    assert!(server.close(), "everything was answered");
    for grant in grants.iter().chain([&ring_grant]) {
        assert_eq!(vm.uses(*grant), 0, "nothing stays mapped");
    }
}
