//! Answers of an etcd cluster.

use super::Shelf;

/// Lines of a watch.
const EVENTS: &str = concat!(
    r#"{"result":{"header":{"revision":"7"},"events":[{"kv":{"key":"YQ==","value":"Yg==","#,
    r#""mod_revision":"7","create_revision":"3"}},{"type":"DELETE","kv":{"key":"Yw==","mod_revision":"7"}}]}}"#,
    "\n",
    r#"{"result":{"header":{"revision":"9"}}}"#,
    "\n",
);

/// How a watch ends.
const ENDS: &str = concat!(
    r#"{"result":{"created":true}}"#,
    "\n",
    r#"{"result":{"created":true,"canceled":true,"compact_revision":"5"}}"#,
    "\n",
    r#"{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: no leader"}}"#,
    "\n",
);

const TXN: &str = concat!(
    r#"{"header":{"revision":"12"},"succeeded":true,"responses":[{"response_put":{}},{"response_range":"#,
    r#"{"kvs":[{"key":"YQ==","value":"Yg==","mod_revision":"7","create_revision":"3"}],"more":true,"count":"2"}}]}"#,
);

const RANGE: &str = concat!(
    r#"{"header":{"revision":"12"},"kvs":[{"key":"YQ==","value":"Yg==","mod_revision":"7","#,
    r#""create_revision":"3"}],"count":"1"}"#,
);

pub(super) fn put_into(shelf: &mut Shelf) {
    let lease = r#"{"result":{"header":{"revision":"1"},"ID":"7587860393513121034","TTL":"5"}}"#;
    let grant = r#"{"header":{"revision":"1"},"ID":"7587860393513121034","TTL":"5"}"#;
    let refused =
        r#"{"error":"etcdserver: permission denied","message":"etcdserver: permission denied","code":7}"#;
    let all = [("events", EVENTS), ("ends", ENDS), ("txn", TXN), ("range", RANGE)];
    for (name, text) in all.into_iter().chain([("lease", lease), ("grant", grant), ("refused", refused)]) {
        shelf.put("etcd_answers", name, text);
    }
}
