//! The database as a file.

use tapio_core::db::sealed;

use super::Shelf;

const POOL: &str = "11111111-1111-4111-8111-111111111111";
const HOST: &str = "22222222-2222-4222-8222-222222222222";

pub(super) fn put_into(shelf: &mut Shelf) {
    let head = format!(
        r#"{{"tapio_database":1,"version":"0.1.0","date":"20260101T12:00:00Z","pool":"{POOL}","hosts":["{HOST}"]}}"#
    );
    let pool = format!(
        r#"{{"class":"pool","uuid":"{POOL}","fields":{{"uuid":"{POOL}","master":"OpaqueRef:{HOST}"}}}}"#
    );
    let fields = format!(r#"{{"uuid":"{HOST}","hostname":"a","name_label":"a","other_config":{{}}}}"#);
    let host = format!(r#"{{"class":"host","uuid":"{HOST}","fields":{fields}}}"#);
    let blob = r#"{"class":"blob","uuid":"33333333-3333-4333-8333-333333333333","fields":{"size":7,"public":false}}"#;
    let whole = [head.as_str(), &pool, &host, ""].join("\n");
    shelf.put("database_dump", "whole", sealed(whole.as_bytes()));
    let blobs = [head.as_str(), &pool, &host, blob, ""].join("\n");
    shelf.put("database_dump", "objects", sealed(blobs.as_bytes()));
    shelf.put("database_dump", "head", head);
}
