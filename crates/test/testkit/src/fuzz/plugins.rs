//! What storage plugins of others print.

use serde::de::DeserializeOwned;
use tapio_sm::external::source::Source;
use tapio_sm::external::v1::xml::{self, Response, Value};
use tapio_sm::external::v3::wire::{Backend, Blocks, Changed, Failure, Found, Query, Ranges, Stat, Volume};
use uuid::Uuid;

/// Bytes of the disk whose changed blocks are listed.
const DISK_LEN: u64 = (1 << 30) + 5;

/// The answer of a plugin of version 1, and the texts in it as names of data.
pub fn sm_plugin_v1(bytes: &[u8]) {
    if let Ok(Response::Value(value)) = xml::response(bytes) {
        texts_of(&value);
        // What was understood can be said again, and means the same.
        let again = xml::call("x", &value);
        let answer =
            again.replace("methodCall>", "methodResponse>").replace("<methodName>x</methodName>", "");
        if let Ok(Response::Value(same)) = xml::response(answer.as_bytes()) {
            assert_eq!(xml::call("x", &same), again);
        }
    }
}

fn texts_of(value: &Value) {
    match value {
        Value::Text(text) => source(Source::of_params(text)),
        Value::Array(items) => items.iter().for_each(texts_of),
        Value::Struct(members) => members.values().for_each(texts_of),
        Value::Nil | Value::Bool(_) => {}
    }
}

/// No name leads elsewhere than it says.
fn source(found: Result<Source, String>) {
    match found {
        Ok(Source::Raw(path) | Source::Vhd(path)) => {
            assert!(path.is_absolute() && !path.iter().any(|part| part == ".."), "{}", path.display());
        }
        Ok(Source::Nbd(name)) => assert!(!name.contains('\0')),
        Err(why) => assert!(!why.is_empty()),
    }
}

/// The answers of scripts of version 3, whichever the bytes are.
pub fn sm_plugin_v3(bytes: &[u8]) {
    read::<Query>(bytes);
    read::<Failure>(bytes);
    if let Some(stat) = read::<Stat>(bytes) {
        assert!(stat.sizes().physical_utilisation <= stat.sizes().physical_size);
        let _ = stat.trouble();
    }
    let _ = read::<Vec<Found>>(bytes);
    let volumes = read::<Volume>(bytes).into_iter().chain(read::<Vec<Volume>>(bytes).unwrap_or_default());
    for volume in volumes {
        let (sr, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let info = volume.info(sr);
        assert!(!info.uuid.is_nil() && info.uuid == volume.uuid_in(sr));
        assert!(i64::try_from(info.virtual_size).is_ok() && info.location.len() <= 4096);
        let mut noted = volume.clone();
        noted.keys.insert("tapio-uuid".to_owned(), volume.note(other));
        assert_eq!(noted.uuid_in(sr), other);
        volume.uri.iter().filter_map(|uri| Source::of_uri(uri)).for_each(source);
    }
    if let Some(backend) = read::<Backend>(bytes) {
        source(Source::best(&backend.implementations));
    }
    let mut blocks = Blocks::of_disk(DISK_LEN).expect("small");
    let len = blocks.text().len();
    if let Some(changed) = read::<Changed>(bytes) {
        let _ = blocks.add_answer(DISK_LEN / 2, &changed);
    }
    if let Some(ranges) = read::<Ranges>(bytes) {
        blocks.add_ranges(&ranges);
    }
    assert_eq!(blocks.text().len(), len);
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}
