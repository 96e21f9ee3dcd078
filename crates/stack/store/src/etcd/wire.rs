//! What is sent to etcd's JSON gateway and what it answers: bytes are base64, numbers of 64 bits are text, and what is
//! zero, false or empty is absent.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::Revision;

/// One key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kv {
    pub key: String,
    pub value: String,
    /// The revision that made it.
    pub created: Revision,
    /// The revision that last changed it.
    pub changed: Revision,
}

/// What one change of a transaction does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Put(String, String),
    /// A put that lives as long as a lease.
    Lend(String, String, i64),
    Delete(String),
    /// All keys that start so.
    DeleteAll(String),
}

/// What must hold when a transaction is applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compare {
    /// The key was made by this revision; 0: it is not there.
    Created(String, Revision),
    /// The key was last changed by this revision; 0: it is not there.
    Changed(String, Revision),
}

/// What the gateway says of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TxnAnswer {
    pub revision: Revision,
    pub succeeded: bool,
    /// What each range of the branch that ran has found.
    pub ranges: Vec<Vec<Kv>>,
    /// Whether a range has more than it answered.
    pub more: bool,
}

/// A line of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchLine {
    /// The watch is there.
    Created,
    /// Changes up to this revision, in order; none where the line only reports progress.
    Events(Revision, Vec<Event>),
    /// The watch has ended: the oldest revision that can be watched if the cause is a compaction, and the reason.
    Canceled(Option<Revision>, String),
    /// The member cannot go on: its words.
    Broken(String),
}

/// One change that a watch saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub key: String,
    /// None: it was deleted.
    pub value: Option<String>,
    pub revision: Revision,
}

/// Base64 of a key or value.
pub fn encoded(text: &str) -> String {
    STANDARD.encode(text)
}

/// The first key behind all keys that start with `prefix`.
fn range_end(prefix: &str) -> String {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return STANDARD.encode(end);
        }
    }
    // All keys.
    "AA==".to_owned()
}

/// A request for one key.
pub fn range(key: &str) -> Value {
    json!({ "key": encoded(key) })
}

/// A request for the keys from `from` on that start with `prefix`, at most `limit`, as they were at `at`; 0: as they
/// are.
pub fn range_of(prefix: &str, from: &str, limit: usize, at: Revision) -> Value {
    json!({ "key": encoded(from), "range_end": range_end(prefix), "limit": limit.to_string(),
            "revision": at.to_string() })
}

/// A request for the key below `prefix` that was changed last.
pub fn newest_of(prefix: &str) -> Value {
    json!({ "key": encoded(prefix), "range_end": range_end(prefix), "limit": "1",
            "sort_order": "DESCEND", "sort_target": "MOD" })
}

/// A request to watch all keys that start with `prefix`, from a revision on.
pub fn watch(prefix: &str, from: Revision) -> Value {
    json!({ "create_request": { "key": encoded(prefix), "range_end": range_end(prefix),
            "start_revision": from.to_string(), "progress_notify": true } })
}

impl Op {
    fn request(&self) -> Value {
        match self {
            Self::Put(key, value) => {
                json!({ "request_put": { "key": encoded(key), "value": encoded(value) } })
            }
            Self::Lend(key, value, lease) => json!({ "request_put": {
                "key": encoded(key), "value": encoded(value), "lease": lease.to_string() } }),
            Self::Delete(key) => json!({ "request_delete_range": { "key": encoded(key) } }),
            Self::DeleteAll(prefix) => json!({ "request_delete_range": {
                "key": encoded(prefix), "range_end": range_end(prefix) } }),
        }
    }

    /// About as many bytes it has in a request.
    pub fn bytes(&self) -> usize {
        /// Lengths and tags around a change.
        const AROUND: usize = 32;
        AROUND
            + match self {
                Self::Put(key, value) | Self::Lend(key, value, _) => key.len() + value.len(),
                Self::Delete(key) | Self::DeleteAll(key) => key.len(),
            }
    }
}

impl Compare {
    fn request(&self) -> Value {
        match self {
            Self::Created(key, at) => json!({ "key": encoded(key), "target": "CREATE", "result": "EQUAL",
                "create_revision": at.to_string() }),
            Self::Changed(key, at) => json!({ "key": encoded(key), "target": "MOD", "result": "EQUAL",
                "mod_revision": at.to_string() }),
        }
    }
}

/// A transaction: `ops` if all of `compare` holds, otherwise one range for each key of `reads`.
pub fn txn(compare: &[Compare], ops: &[Op], reads: &[String]) -> Value {
    json!({
        "compare": compare.iter().map(Compare::request).collect::<Vec<_>>(),
        "success": ops.iter().map(Op::request).collect::<Vec<_>>(),
        "failure": reads.iter().map(|key| json!({ "request_range": range(key) })).collect::<Vec<_>>(),
    })
}

/// A transaction that only reads: what several ranges find at one moment.
pub fn look(ranges: &[Value]) -> Value {
    json!({ "success": ranges.iter().map(|range| json!({ "request_range": range })).collect::<Vec<_>>() })
}

fn number(value: &Value, name: &str) -> u64 {
    match value.get(name) {
        Some(Value::String(text)) => text.parse().unwrap_or_default(),
        Some(Value::Number(number)) => number.as_u64().unwrap_or_default(),
        _ => 0,
    }
}

/// The revision of the cluster when it answered.
pub fn revision(answer: &Value) -> Revision {
    answer.get("header").map_or(0, |header| number(header, "revision"))
}

fn text(value: &Value, name: &str) -> Result<String, String> {
    let Some(encoded) = value.get(name) else { return Ok(String::new()) };
    let encoded = encoded.as_str().ok_or_else(|| format!("its {name} is no text"))?;
    let bytes = STANDARD.decode(encoded).map_err(|error| format!("its {name} is no base64: {error}"))?;
    String::from_utf8(bytes).map_err(|_| format!("its {name} is no UTF-8"))
}

fn kv(value: &Value) -> Result<Kv, String> {
    Ok(Kv {
        key: text(value, "key")?,
        value: text(value, "value")?,
        created: number(value, "create_revision"),
        changed: number(value, "mod_revision"),
    })
}

fn members<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// What a transaction answered.
///
/// # Errors
/// What of it is no answer of etcd's.
pub fn txn_answer(answer: &Value) -> Result<TxnAnswer, String> {
    let mut ranges = Vec::new();
    let mut more = false;
    for response in members(answer, "responses") {
        if let Some(range) = response.get("response_range") {
            more |= range.get("more").and_then(Value::as_bool).unwrap_or_default();
            ranges.push(members(range, "kvs").iter().map(kv).collect::<Result<_, _>>()?);
        }
    }
    let succeeded = answer.get("succeeded").and_then(Value::as_bool).unwrap_or_default();
    Ok(TxnAnswer { revision: revision(answer), succeeded, ranges, more })
}

/// The keys that a range answered.
///
/// # Errors
/// What of it is no answer of etcd's.
pub fn kvs(answer: &Value) -> Result<Vec<Kv>, String> {
    members(answer, "kvs").iter().map(kv).collect()
}

/// The identity of a lease that was granted.
pub fn lease(answer: &Value) -> Option<i64> {
    answer.get("ID")?.as_str()?.parse().ok()
}

/// Whether the lease whose beat was answered is still there: one that is gone has no time to live.
pub fn is_alive(answer: &Value) -> bool {
    answer.get("result").is_some_and(|result| number(result, "TTL") > 0)
}

/// gRPC's code and the words of an error.
pub fn error(body: &[u8]) -> (u64, String) {
    /// Longer words are cut.
    const WORDS_MAX: usize = 500;
    let cut = |text: &str| text.chars().take(WORDS_MAX).collect::<String>();
    match serde_json::from_slice::<Value>(body) {
        Ok(value) if value.is_object() => {
            // The stream of a watch wraps its error.
            let of = value.get("error").filter(|inner| inner.is_object()).unwrap_or(&value);
            let words = of.get("message").or_else(|| of.get("error")).and_then(Value::as_str);
            let code = number(of, "code").max(number(of, "grpc_code"));
            (code, cut(words.unwrap_or_default()))
        }
        _ => (0, cut(String::from_utf8_lossy(body).trim())),
    }
}

/// One line of a watch.
///
/// # Errors
/// What of it is no line of etcd's.
pub fn watch_line(line: &[u8]) -> Result<WatchLine, String> {
    let value: Value = serde_json::from_slice(line).map_err(|error| format!("it is no JSON: {error}"))?;
    if value.get("error").is_some() {
        return Ok(WatchLine::Broken(error(line).1));
    }
    let result = value.get("result").ok_or("it has no result")?;
    let is = |name: &str| result.get(name).and_then(Value::as_bool).unwrap_or_default();
    if is("canceled") {
        let compacted = Some(number(result, "compact_revision")).filter(|at| *at > 0);
        let reason = result.get("cancel_reason").and_then(Value::as_str).unwrap_or_default();
        return Ok(WatchLine::Canceled(compacted, reason.chars().take(500).collect()));
    }
    if is("created") {
        return Ok(WatchLine::Created);
    }
    let mut events = Vec::new();
    for event in members(result, "events") {
        let of = event.get("kv").ok_or("an event has no key")?;
        let of = kv(of)?;
        let is_delete = event.get("type").and_then(Value::as_str) == Some("DELETE");
        events.push(Event { key: of.key, value: (!is_delete).then_some(of.value), revision: of.changed });
    }
    Ok(WatchLine::Events(revision(result), events))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_watch_are_read() {
        let line = br#"{"result":{"header":{"revision":"7"},"events":[{"kv":{"key":"YQ==","value":"Yg==",
            "mod_revision":"7","create_revision":"3"}},{"type":"DELETE","kv":{"key":"Yw==","mod_revision":"7"}}]}}"#;
        let put = Event { key: "a".into(), value: Some("b".into()), revision: 7 };
        let deleted = Event { key: "c".into(), value: None, revision: 7 };
        assert_eq!(watch_line(line), Ok(WatchLine::Events(7, vec![put, deleted])));
        let created = br#"{"result":{"header":{"revision":"7"},"created":true}}"#;
        assert_eq!(watch_line(created), Ok(WatchLine::Created));
        let compacted = br#"{"result":{"created":true,"canceled":true,"compact_revision":"5"}}"#;
        assert_eq!(watch_line(compacted), Ok(WatchLine::Canceled(Some(5), String::new())));
        let no_leader = br#"{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: no leader"}}"#;
        assert_eq!(watch_line(no_leader), Ok(WatchLine::Broken("etcdserver: no leader".into())));
        let progress = br#"{"result":{"header":{"revision":"9"}}}"#;
        assert_eq!(watch_line(progress), Ok(WatchLine::Events(9, Vec::new())));
        for wrong in [
            &b"x"[..],
            b"{}",
            br#"{"result":{"events":[{}]}}"#,
            br#"{"result":{"events":[{"kv":{"key":"_"}}]}}"#,
        ] {
            assert!(watch_line(wrong).is_err(), "{}", String::from_utf8_lossy(wrong));
        }
    }

    #[test]
    fn the_end_of_a_prefix_is_behind_all_its_keys() {
        assert_eq!(range_end("ab"), STANDARD.encode("ac"));
        assert_eq!(range_end("a\u{ff}"), STANDARD.encode([b'a', 0xc3, 0xc0]));
        assert_eq!(range_end(""), "AA==");
    }
}
