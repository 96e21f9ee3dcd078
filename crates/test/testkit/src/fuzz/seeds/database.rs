//! The database and the host as files.

use tapio_core::backup::{ACCOUNTS, CERTIFICATE, SETTINGS, sealed_host};
use tapio_core::db::sealed;
use tapio_core::replica::replica_of;

use super::Shelf;

const POOL: &str = "11111111-1111-4111-8111-111111111111";
/// The host of the database.
pub(in crate::fuzz) const HOST: &str = "22222222-2222-4222-8222-222222222222";

/// A head, and objects with it.
fn lines() -> [String; 3] {
    let head = format!(
        r#"{{"tapio_database":1,"version":"0.1.0","date":"20260101T12:00:00Z","pool":"{POOL}","hosts":["{HOST}"]}}"#
    );
    let pool = format!(
        r#"{{"class":"pool","uuid":"{POOL}","fields":{{"uuid":"{POOL}","master":"OpaqueRef:{HOST}"}}}}"#
    );
    let fields = format!(r#"{{"uuid":"{HOST}","hostname":"a","name_label":"a","other_config":{{}}}}"#);
    let host = format!(r#"{{"class":"host","uuid":"{HOST}","fields":{fields}}}"#);
    [head, pool, host]
}

/// A database of one host.
pub(in crate::fuzz) fn whole_dump() -> Vec<u8> {
    sealed((lines().join("\n") + "\n").as_bytes())
}

pub(super) fn put_into(shelf: &mut Shelf) {
    let [head, pool, host] = lines();
    let blob = r#"{"class":"blob","uuid":"33333333-3333-4333-8333-333333333333","fields":{"size":7,"public":false}}"#;
    shelf.put("database_dump", "whole", whole_dump());
    let blobs = [head.as_str(), &pool, &host, blob, ""].join("\n");
    shelf.put("database_dump", "objects", sealed(blobs.as_bytes()));
    shelf.put("database_dump", "head", head);
    let dump = whole_dump();
    let image = replica_of(&dump);
    let head = image(0, 512);
    shelf.put("database_replica", "text", dump.clone());
    // The text first, then the heads of both halves.
    let mut halves = dump.clone();
    halves.resize(1024.max(dump.len()), 0);
    shelf.put("database_replica", "heads", [halves[..1024].to_vec(), head.clone(), head].concat());
    let files: [(&str, &[u8]); 4] = [
        ("database.tapio", &dump),
        (SETTINGS, b"log-level = info\n"),
        (CERTIFICATE, b"-----BEGIN CERTIFICATE-----\n"),
        (ACCOUNTS, b"own vm-admin alice $argon2id$\n"),
    ];
    shelf.put("host_archive", "whole", sealed_host(HOST, &files));
    shelf.put("host_archive", "database_alone", sealed_host(HOST, &files[..1]));
    shelf.put("host_archive", "another_order", sealed_host(HOST, &[files[1], files[0]]));
    shelf.put("host_archive", "lengths", b"\x05\x03\x07\x00abcdefghijklmno".to_vec());
}
