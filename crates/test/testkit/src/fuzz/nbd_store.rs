//! What an NBD server says to the storage on the ring, and a peer to TLS with pre-shared keys.

use std::cell::RefCell;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;

use tapio_nbd::client::ExportInfo;
use tapio_nbd::tls::{Keys, psk_hears};
use tapio_nbd::wire::Style;
use tapio_nbd::{NbdStore, Target};
use tapio_ring::uring::{Uring, UringConfig};
use tapio_ring::{Executor, Inbox, Io, PageBuf, Polling, PollingConfig, Storage, Zeroing};
use tapio_types::Span;

use super::take;

/// What lies around the memory of a read and must stay.
const GUARD: u8 = 0xc3;
const READ_LEN: usize = 8192;

/// A server that has said everything before it is asked. The first byte is the style of its replies.
pub fn nbd_store(bytes: &[u8]) {
    let mut rest = bytes;
    let [choice] = take::<1>(&mut rest);
    let style = match choice & 3 {
        0 => Style::Simple,
        1 => Style::Structured,
        _ => Style::Extended,
    };
    let Ok((ours, mut theirs)) = UnixStream::pair() else { return };
    let said = theirs.set_nonblocking(true).and_then(|()| theirs.write_all(rest));
    if said.and_then(|()| theirs.shutdown(Shutdown::Write)).is_err() {
        return;
    }
    let config = UringConfig { entries: 16, pool_len: 1 << 20, ..UringConfig::default() };
    let Ok(uring) = Uring::new(config) else { return };
    let Ok(target) = "nbd+unix:///?socket=/nonexistent/socket&reconnect=0".parse::<Target>() else { return };
    // Flags: it has some, and flush, trim, write zeroes.
    let export = ExportInfo { len: 1 << 20, flags: 0x65, ..ExportInfo::default() };
    let polling = Rc::new(RefCell::new(Polling::new(PollingConfig::OFF)));
    let tasks = uring.tasks().clone();
    let mut executor = Executor::new(tasks, Inbox::<()>::new(1), |()| async {}, polling);
    let ring = uring.clone();
    executor.block_on(&uring, &mut (), async move {
        let Ok(store) = NbdStore::over(&ring, target, ours.into(), style, export) else { return };
        story(&store).await;
    });
    executor.end(&uring);
    drop(theirs);
}

/// Requests in a fixed order, so that the bytes can name them.
async fn story(store: &NbdStore) {
    for turn in 0..4u64 {
        let mut memory = PageBuf::zeroed(3 * READ_LEN);
        memory.fill(GUARD);
        let (memory, read) = store.read_into(turn * READ_LEN as u64, memory, READ_LEN..2 * READ_LEN).await;
        let outside = memory[..READ_LEN].iter().chain(&memory[2 * READ_LEN..3 * READ_LEN]);
        assert!(outside.into_iter().all(|byte| *byte == GUARD), "written outside of the read's memory");
        let (run, _) = store.known_runs(Span::new(turn << 16, 1 << 16), 1).await[0];
        assert!((1..=1 << 16).contains(&run), "a run of {run} bytes");
        let (run, _) = store.data_run(Span::new(0, 1 << 20)).await;
        assert!((1..=1 << 20).contains(&run), "a run of {run} bytes");
        let (_, written) = store.write_from(0, memory, 0..512).await;
        let zeroed = store.zero(Span::new(4096, 4096), Zeroing::Keep).await;
        let flushed = store.flush().await;
        if read.is_err() && written.is_err() && zeroed.is_err() && flushed.is_err() {
            return;
        }
    }
}

/// Bytes of a client without a key.
pub fn tls_psk(bytes: &[u8]) {
    let keys = format!("alice:{}", "5a".repeat(32));
    if let Ok(keys) = Keys::parse(&keys) {
        psk_hears(&Arc::new(keys), bytes);
    }
}
