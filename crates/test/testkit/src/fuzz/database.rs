//! The database as a file, which a client sends.

use tapio_core::db::{Dump, sealed};

/// Bytes as a dump, and as the lines of one whose last line is right: refused with a sentence, or objects that are the
/// same after another write.
pub(super) fn database_dump(bytes: &[u8]) {
    // The sum protects from accidents alone.
    let body: Vec<u8> = bytes
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|line| !is_end(line))
        .flatten()
        .copied()
        .collect();
    for text in [bytes.to_vec(), sealed(&body)] {
        let dump = match Dump::parse(&text) {
            Ok(dump) => dump,
            Err(why) => {
                assert!(!why.is_empty());
                continue;
            }
        };
        let written = dump.text();
        let again = Dump::parse(written.as_bytes()).expect("what was read can be written");
        assert_eq!(again.text(), written);
        assert_eq!(again.odd, dump.odd);
    }
}

fn is_end(line: &[u8]) -> bool {
    line.starts_with(b"{\"end\":")
}
