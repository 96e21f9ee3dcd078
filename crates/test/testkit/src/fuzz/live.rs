//! VHD by the live opener, over a file and a device of the simulator.

use std::cell::RefCell;
use std::future::Ready;
use std::path::Path;
use std::rc::Rc;

use tapio_format::FormatError;
use tapio_format::live::vhd::{BITMAPS_KEPT, IntentPlace, OpenOptions, RoomPlace, SpaceMode, open};
use tapio_format::live::{Layer, Lookup, Place};
use tapio_format::vhd::Keys;
use tapio_ring::sim::SimHost;
use tapio_ring::{Executor, Inbox, Io, PageBuf, Polling, PollingConfig, Storage, Tasks};
use tapio_types::{Access, SECTOR_LEN, Span};

use super::format::healed;

const PATH: &str = "/image.vhd";

/// Opens, reads, writes, closes and opens again; as it is and with the checksums right.
pub fn vhd_live(bytes: &[u8]) {
    let healed = healed(bytes);
    for bytes in [bytes, &healed] {
        for access in [Access::ReadOnly, Access::ReadWrite] {
            visit(bytes, access, false);
        }
        // A device ends on a sector.
        if (bytes.len() as u64).is_multiple_of(SECTOR_LEN) {
            visit(bytes, Access::ReadWrite, true);
        }
    }
}

fn visit(bytes: &[u8], access: Access, device: bool) {
    let host = SimHost::new(1);
    let path = Path::new(PATH);
    if device {
        host.put_content(path, tapio_ring::sim::Durable::new(bytes), true);
    } else {
        host.put(path, bytes);
    }
    let written = session(&host, access, true);
    if let Some(first) = written {
        let found = session(&host, Access::ReadOnly, false);
        assert_eq!(found, Some(first), "what was written and closed is not there again");
    }
}

/// One process that uses the image. Says what the first sector held at the end, where all went well.
fn session(host: &SimHost, access: Access, write: bool) -> Option<u8> {
    let sim = host.process();
    let tasks = sim.tasks().clone();
    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
    let mut executor: Executor<(), Ready<()>, _> =
        Executor::new(tasks.clone(), Inbox::new(1), |()| std::future::ready(()), polling);
    let opening = sim.clone();
    let store =
        executor.block_on(&sim, &mut (), async move { opening.open(Path::new(PATH), access).await }).ok()?;
    let result =
        executor.block_on(&sim, &mut (), async move { use_image(store, &tasks, access, write).await });
    executor.end(&sim);
    match result {
        Ok(first) => first,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            None
        }
    }
}

async fn use_image<S: Storage>(
    store: S,
    tasks: &Tasks,
    access: Access,
    write: bool,
) -> Result<Option<u8>, FormatError> {
    let options = OpenOptions {
        access,
        space: SpaceMode::Auto,
        intent: IntentPlace::Private,
        keys: Keys::default(),
        bitmaps_kept: BITMAPS_KEPT,
        room: RoomPlace::default(),
    };
    let opened = open(store, tasks, &options).await?;
    assert!(opened.remarks.iter().all(|remark| remark.len() < 4096), "a remark without measure");
    let layer = opened.layer;
    let sectors = layer.virtual_len() / SECTOR_LEN;
    let mut result = Ok(None);
    for first in [sectors.saturating_sub(1), sectors / 2, 0] {
        if first >= sectors {
            continue;
        }
        let span = Span::new(first * SECTOR_LEN, SECTOR_LEN);
        if write
            && access == Access::ReadWrite
            && let Err(error) = write_sector(&layer, span, 0x5a).await
        {
            result = Err(error);
            continue;
        }
        match read_sector(&layer, span).await {
            Ok(byte) if result.is_ok() => result = Ok(byte),
            Ok(_) => {}
            Err(error) => result = Err(error),
        }
    }
    // Closed whatever happened: its services end with it.
    let closed = layer.close().await;
    let byte = result?;
    closed?;
    // A disk that was only read has nothing to prove, nor has one of no sectors.
    Ok(byte)
}

async fn write_sector<S: Storage>(layer: &Layer<S>, span: Span, byte: u8) -> Result<(), FormatError> {
    let extent = layer.prepare(span).await?;
    assert!(extent.len > 0 && extent.len <= span.len, "{extent:?} for {span:?}");
    let Place::Data { offset } = extent.place else { panic!("a place to write to is {:?}", extent.place) };
    let mut page = PageBuf::zeroed(SECTOR_LEN as usize);
    page.fill(byte);
    let (_, done) = layer.store().write_from(offset, page, 0..SECTOR_LEN as usize).await;
    if let Err(error) = done {
        layer.not_written(span);
        return Err(FormatError::io("cannot write", error));
    }
    if layer.written(span, offset) {
        layer.settle().await?;
    }
    layer.sync().await
}

/// The first byte of the sector; `None` where it is not in this layer.
async fn read_sector<S: Storage>(layer: &Layer<S>, span: Span) -> Result<Option<u8>, FormatError> {
    for _ in 0..3 {
        match layer.lookup(span) {
            Lookup::Miss { block } => layer.load(block).await?,
            Lookup::Extent(extent) => {
                assert!(extent.len > 0 && extent.len <= span.len, "{extent:?} for {span:?}");
                let Place::Data { offset } = extent.place else { return Ok(None) };
                let page = PageBuf::zeroed(SECTOR_LEN as usize);
                let (page, read) = layer.store().read_into(offset, page, 0..SECTOR_LEN as usize).await;
                read.map_err(|error| FormatError::io("cannot read", error))?;
                return Ok(Some(page[0]));
            }
        }
    }
    panic!("a block that was loaded three times is still not known");
}
