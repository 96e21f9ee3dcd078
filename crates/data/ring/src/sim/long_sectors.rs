//! Requests of 512 bytes on a disk with sectors of 4096: see [`crate::blocks`].

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use tapio_types::{Access, Span};

use super::{Sim, SimHost};
use crate::{Executor, Inbox, Io, PageBuf, Polling, PollingConfig, Storage, Zeroing};

fn run(process: &Sim, work: impl Future<Output = ()> + 'static) {
    let inbox: Rc<Inbox<()>> = Inbox::new(1);
    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
    Executor::new(process.tasks().clone(), inbox, |()| async {}, polling).block_on(process, &mut (), work);
}

/// Every span of sectors of 512 bytes over some blocks of 4096, on files that end inside of a block and not.
#[test]
fn every_span_is_read_written_and_zeroed_and_nothing_beside_it() {
    const SECTOR: usize = 512;
    for sectors in [37, 40, 41_usize] {
        let (host, path) = (SimHost::new(1), Path::new("disk"));
        host.set_sector_len(4096);
        let mut model = vec![1; sectors * SECTOR];
        host.put(path, &model);
        let process = host.process();
        let opening = process.clone();
        run(&process, async move {
            let store = opening.open(path, Access::ReadWrite).await.expect("it is there");
            let mut mark = 1_u8;
            for start in 0..sectors {
                for end in start + 1..=sectors {
                    let (at, len) = (start * SECTOR, (end - start) * SECTOR);
                    let mut page = PageBuf::zeroed(len);
                    mark = mark.wrapping_add(1);
                    if end % 3 == 0 {
                        let span = Span::new(at as u64, len as u64);
                        store.zero(span, Zeroing::Keep).await.expect("zeroed");
                    } else {
                        page.fill(mark);
                        let written;
                        (page, written) = store.write_from(at as u64, page, 0..len).await;
                        written.expect("written");
                    }
                    model[at..at + len].copy_from_slice(&page);
                    page.fill(0xff);
                    let (page, read) = store.read_into(at as u64, page, 0..len).await;
                    read.expect("read");
                    assert!(page[..] == model[at..at + len], "{start}..{end}");
                    assert!(host.content(path).bytes() == model, "beside {start}..{end} of {sectors}");
                }
            }
        });
    }
}

/// Writes to one block wait for one another in one thread; another would know nothing of them.
#[test]
fn a_file_with_long_sectors_is_not_shared_with_other_threads() {
    let (host, path) = (SimHost::new(1), Path::new("disk"));
    host.put(path, &[1; 8192]);
    for (sector_len, is_shared) in [(512, true), (4096, false)] {
        host.set_sector_len(sector_len);
        let process = host.process();
        let opening = process.clone();
        run(&process, async move {
            let store = opening.open(path, Access::ReadWrite).await.expect("it is there");
            assert_eq!(opening.share(&store).is_some(), is_shared, "{sector_len}");
        });
    }
}
