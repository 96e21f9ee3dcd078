//! Logs of a device's writes, as the kernel's `log-writes` keeps them.

use tapio_fixtures::log_writes::entries_in;

/// Entries are what the bytes have room for, and come again from the same bytes.
pub(super) fn log_writes(bytes: &[u8]) {
    let Ok(entries) = entries_in(bytes) else { return };
    assert!(entries.len() <= bytes.len() / 512, "{} entries in {} bytes", entries.len(), bytes.len());
    for entry in &entries {
        assert!(i64::try_from(entry.at).is_ok() && i64::try_from(entry.len).is_ok(), "{entry:?}");
    }
    assert_eq!(entries_in(bytes).ok(), Some(entries));
}
