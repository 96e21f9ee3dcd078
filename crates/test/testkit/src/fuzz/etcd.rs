//! Answers of an etcd cluster, and lines of its watches.

use tapio_store::etcd_wire::{WatchLine, error, is_alive, kvs, lease, revision, txn_answer, watch_line};

/// The members of an answer take no more than its bytes, and no bytes end the reader.
pub(super) fn etcd_answers(bytes: &[u8]) {
    let _ = error(bytes);
    for line in bytes.split(|byte| *byte == b'\n') {
        if let Ok(WatchLine::Events(_, events)) = watch_line(line) {
            let len: usize = events
                .iter()
                .map(|event| event.key.len() + event.value.as_ref().map_or(0, String::len))
                .sum();
            assert!(len <= line.len(), "events that are longer than their line");
        }
    }
    let Ok(value) = serde_json::from_slice(bytes) else { return };
    let _ = (lease(&value), is_alive(&value), revision(&value));
    let mut found = kvs(&value).unwrap_or_default();
    found.extend(txn_answer(&value).into_iter().flat_map(|answer| answer.ranges).flatten());
    // What a reader takes twice (as keys and as responses) is in the answer twice.
    let len: usize = found.iter().map(|kv| kv.key.len() + kv.value.len()).sum();
    assert!(len <= bytes.len(), "keys that are longer than their answer");
}
