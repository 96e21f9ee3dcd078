//! The log of changed blocks: by the offline tool, and by a disk that is opened on it.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use tapio_block::{Core, CoreOptions, TapOptions};
use tapio_format::FormatError;
use tapio_format::cbt::{self, BLOCK_LEN, HEADER_LEN, Log, LogHeader};
use tapio_ring::sim::SimHost;
use tapio_ring::{Executor, Inbox, Polling, PollingConfig};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec, Span};

use super::format::Bounded;

/// The disk that is opened on a log.
const DISK_LEN: u64 = 3 * BLOCK_LEN + 512;

/// Reads, grows and joins a log; opens a disk on it.
pub fn cbt_log(bytes: &[u8]) {
    if let Ok(header) = LogHeader::decode(bytes) {
        let again = header.encode();
        assert_eq!(LogHeader::decode(&again).expect("what was written can be read"), header);
        assert!(bytes[..36] == again[..36] && bytes[40..HEADER_LEN] == again[40..]);
    }
    match Log::open_on(Bounded(bytes.to_vec())) {
        Ok(log) => work(log),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    disk_on(bytes.to_vec());
    let mut fits = bytes.to_vec();
    fits.resize(fits.len().max(cbt::log_len(DISK_LEN) as usize), 0xff);
    fits[40..HEADER_LEN].copy_from_slice(&DISK_LEN.to_le_bytes());
    disk_on(fits);
}

fn work(mut log: Log<Bounded>) {
    let size = log.header().size;
    let before = bits(&log);
    let mut sum = 0u64;
    before.iter().for_each(|byte| sum += u64::from(byte.count_ones()));
    assert_eq!(before.len() as u64, cbt::bitmap_len(size));
    if log.grow(size.saturating_add(9 * BLOCK_LEN)).is_ok() {
        let after = bits(&log);
        assert!(after[..before.len()] == before[..] && after[before.len()..].iter().all(|byte| *byte == 0));
        let empty = Log::create_on(Vec::new(), log.header().size).expect("a log that could be grown");
        log.absorb(&empty).expect("memory");
        assert_eq!(bits(&log), after);
    }
    let mut map = before;
    let blocks = cbt::blocks_of(Span::new(sum.wrapping_mul(BLOCK_LEN / 3), 1 + sum * 1000));
    cbt::set_blocks(&mut map, blocks.clone());
    assert!(cbt::set_blocks(&mut map, blocks).is_empty(), "bits that were set are set");
}

fn bits(log: &Log<Bounded>) -> Vec<u8> {
    let mut all = Vec::new();
    let read = log.read_bitmap(|piece| {
        all.extend_from_slice(piece);
        Ok::<_, FormatError>(())
    });
    read.expect("what was opened can be read");
    all
}

/// Opens a disk on the log and closes it: the log says afterwards what it said before.
fn disk_on(bytes: Vec<u8>) {
    let (host, disk, path) = (SimHost::new(1), Path::new("/disk"), Path::new("/log"));
    host.put(disk, &vec![0; DISK_LEN as usize]);
    host.put(path, &bytes);
    let sim = host.process();
    let inbox = Inbox::new(1);
    let core =
        Core::new(sim.clone(), Rc::clone(&inbox), CoreOptions { report: |_| (), ..CoreOptions::default() });
    let serving = Rc::clone(&core);
    let make = move |request| Rc::clone(&serving).serve(request);
    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
    let mut executor = Executor::new(tapio_ring::Io::tasks(&sim).clone(), inbox, make, polling);
    let layers = vec![LayerSpec { kind: ImageKind::Raw, path: disk.into() }];
    let spec = ChainSpec { layers, access: Access::ReadWrite };
    let taps = TapOptions { log: Some(path.into()), ..TapOptions::default() };
    let opened = executor.block_on(&sim, &mut (), async move {
        core.resume_with(&spec, &taps).await?;
        core.close().await
    });
    executor.end(&sim);
    match opened {
        Ok(()) => {
            let mut wanted = bytes;
            if host.content(path).bytes()[36..40] == [0; 4] {
                // Padding, which is written as zeroes.
                wanted[36..40].fill(0);
            }
            assert!(host.content(path).bytes() == wanted, "an unchanged log was changed");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
