//! The database and the host as files, which a client sends.

use tapio_core::backup::{ACCOUNTS, CERTIFICATE, HostArchive, SETTINGS, sealed_host};
use tapio_core::db::{Dump, sealed};
use tapio_core::replica::{newest, replica_of};

use super::seeds::{HOST, whole_dump};

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

/// Bytes as the heads and the texts of both halves of a VDI: what is found has the sum that its head says.
pub(super) fn database_replica(bytes: &[u8]) {
    let (text, heads) = bytes.split_at(bytes.len() / 2);
    let (first, second) = heads.split_at(heads.len() / 2);
    let mut read = |at: u64, len: usize| {
        let from = match at {
            0 => first,
            _ if at.is_multiple_of(128 << 20) => second,
            _ => text,
        };
        let mut found = from[..len.min(from.len())].to_vec();
        found.resize(len.min(super::INPUT_LEN_MAX), 0);
        Ok::<_, ()>(found)
    };
    if let Ok(Some((head, text))) = newest(&mut read) {
        assert_eq!(head.len, text.len() as u64);
        let _ = Dump::parse(&text);
    }
    // What is written is found.
    let image = replica_of(bytes);
    let found = newest(&mut |at, len| Ok::<_, ()>(image(at, len)));
    assert!(found.is_ok_and(|found| found.is_some_and(|(head, text)| head.generation == 1 && text == bytes)));
}

/// Bytes as an archive; and as a manifest's members in one whose sums are right: the first byte says how long the first
/// file is, and so on. Refused with a sentence, or an archive that is the same after another write.
pub(super) fn host_archive(bytes: &[u8]) {
    look(bytes);
    let (lens, rest) = bytes.split_at(bytes.len().min(4));
    let mut rest = rest;
    let dump = whole_dump();
    let mut members: Vec<(&str, &[u8])> = vec![("database.tapio", &dump)];
    for (len, name) in lens.iter().zip([SETTINGS, CERTIFICATE, ACCOUNTS, "database.tapio"]) {
        let (file, behind) = rest.split_at(usize::from(*len).min(rest.len()));
        rest = behind;
        if len % 2 == 1 {
            members.push((name, file));
        }
    }
    look(&sealed_host(HOST, &members));
}

fn look(bytes: &[u8]) {
    match HostArchive::parse(bytes) {
        Ok(archive) => {
            let written = archive.bytes().expect("what was read can be written");
            let again = HostArchive::parse(&written).expect("what was written can be read");
            assert_eq!((&again.host, &again.files), (&archive.host, &archive.files));
            assert_eq!(again.dump.text(), archive.dump.text());
        }
        Err(why) => assert!(!why.is_empty()),
    }
}
