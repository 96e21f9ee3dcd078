//! The objects of a host that was alone become objects of a pool.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;
use tapio_store::{Row, Txn};
use uuid::Uuid;

/// Classes whose objects a pool has of its own.
const OF_POOLS: &[&str] = &["pool", "role", "sm", "message", "task", "session", "subject"];

/// Rows that only mean something to the store that has them.
const OF_STORES: [&str; 2] = ["/meta/", "/gone/"];

/// Where a host's journal lies in the store that it had for itself.
const NOTES: &str = "/note/";

fn members(row: &Row) -> Option<serde_json::Map<String, Json>> {
    match serde_json::from_str(row.value.as_deref()?) {
        Ok(Json::Object(members)) => Some(members),
        _ => None,
    }
}

fn is(row: &Row, field: &str) -> bool {
    members(row).and_then(|members| members.get(field)?.as_bool()).unwrap_or_default()
}

fn text(members: &serde_json::Map<String, Json>, field: &str) -> String {
    members.get(field).and_then(Json::as_str).unwrap_or_default().to_owned()
}

fn class_of(key: &str) -> &str {
    key.trim_start_matches('/').split('/').next().unwrap_or_default()
}

fn reference_of(key: &str) -> String {
    format!("OpaqueRef:{}", key.rsplit('/').next().unwrap_or_default())
}

/// Writes the rows of a store that one host had for itself into the store of a pool. An empty pool takes all of them.
/// Otherwise what each pool has of its own stays behind, and templates; and networks that the pool has under the same
/// bridge are those of the pool. `host` names the journal in the pool's store.
pub(super) fn transaction(local: &[Row], pool: &[Row], host: Uuid) -> Txn {
    let is_new = !pool.iter().any(|row| class_of(&row.key) == "pool");
    let bridges: BTreeMap<String, String> = pool
        .iter()
        .filter(|row| class_of(&row.key) == "network")
        .filter_map(|row| Some((text(&members(row)?, "bridge"), reference_of(&row.key))))
        .filter(|(bridge, _)| !bridge.is_empty())
        .collect();
    let mut renamed: BTreeMap<String, String> = BTreeMap::new();
    let mut left: BTreeSet<String> = BTreeSet::new();
    for row in local.iter().filter(|_| !is_new) {
        let Some(found) = members(row) else { continue };
        match class_of(&row.key) {
            "network" => {
                if let Some(known) = bridges.get(&text(&found, "bridge")) {
                    renamed.insert(reference_of(&row.key), known.clone());
                }
            }
            "vm" if is(row, "is_a_template") && !is(row, "is_a_snapshot") => {
                left.insert(reference_of(&row.key));
            }
            _ => {}
        }
    }
    let mut txn = Txn::default();
    for row in local {
        let Some(value) = row.value.clone() else { continue };
        if OF_STORES.iter().any(|prefix| row.key.starts_with(prefix)) {
            continue;
        }
        if let Some(key) = row.key.strip_prefix(NOTES) {
            txn.puts.push((format!("/hosts/{host}/note/{key}"), value));
            continue;
        }
        let reference = reference_of(&row.key);
        if !is_new && (OF_POOLS.contains(&class_of(&row.key)) || renamed.contains_key(&reference)) {
            continue;
        }
        let belongs_to_left = members(row).is_some_and(|members| left.contains(&text(&members, "VM")));
        if left.contains(&reference) || belongs_to_left {
            continue;
        }
        let value = renamed.iter().fold(value, |value, (old, new)| value.replace(old.as_str(), new));
        txn.puts.push((row.key.clone(), value));
    }
    txn
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(key: &str, value: &str) -> Row {
        Row { key: key.into(), value: Some(value.into()), revision: 1 }
    }

    #[test]
    fn what_a_pool_has_stays_behind_and_networks_are_joined() {
        let host = Uuid::nil();
        let local = [
            row("/pool/p1", "{}"),
            row("/host/h1", r#"{"uuid":"h1"}"#),
            row("/network/n1", r#"{"bridge":"eth0"}"#),
            row("/network/n2", r#"{"bridge":"eth1"}"#),
            row("/pif/x", r#"{"network":"OpaqueRef:n1"}"#),
            row("/vm/t", r#"{"is_a_template":true}"#),
            row("/vbd/tb", r#"{"VM":"OpaqueRef:t"}"#),
            row("/vm/v", r#"{"is_a_template":false}"#),
            row("/note/storage/x", "{}"),
            row("/meta/generation", "7"),
        ];
        let keys = |txn: &Txn| txn.puts.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>();
        let pool = [row("/pool/p2", "{}"), row("/network/m1", r#"{"bridge":"eth0"}"#)];
        let joined = transaction(&local, &pool, host);
        let note = format!("/hosts/{host}/note/storage/x");
        assert_eq!(keys(&joined), ["/host/h1", "/network/n2", "/pif/x", "/vm/v", note.as_str()]);
        assert_eq!(joined.puts[2].1, r#"{"network":"OpaqueRef:m1"}"#);
        assert_eq!(
            keys(&transaction(&local, &[], host)).len(),
            9,
            "a new pool takes all but the store's own row"
        );
    }
}
