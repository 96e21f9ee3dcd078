//! What is left out of the archive.

use std::collections::BTreeSet;

use serde_json::Value;

/// What stands in place of a secret.
const LEFT_OUT: &str = "(left out)";

/// Keys of a device configuration that hold no secret; any other's value is left out.
const PLAIN: [&str; 14] = [
    "device",
    "location",
    "server",
    "serverpath",
    "path",
    "type",
    "port",
    "target",
    "targetIQN",
    "LUNid",
    "SCSIid",
    "nfsversion",
    "subdir",
    "share",
];

/// Parts of a key whose value is a secret wherever it stands.
const WORDS: [&str; 7] = ["pass", "pwd", "secret", "token", "psk", "credential", "session"];

/// Parts of a key of a map whose value is a secret.
const MAP_WORDS: [&str; 4] = ["key", "auth", "chap", "cookie"];

/// Fields that hold whole records as texts.
const COPIES: [&str; 2] = ["snapshot_metadata", "last_boot_record"];

/// Shortest value that is looked for in all members: shorter ones are parts of any text.
const LEN_MIN: usize = 4;

/// Values that were left out of records, which are left out of logs and lists, too.
#[derive(Debug, Default)]
pub(super) struct Secrets {
    known: BTreeSet<String>,
}

fn has(key: &str, words: &[&str]) -> bool {
    let key = key.to_ascii_lowercase();
    words.iter().any(|word| key.contains(word))
}

impl Secrets {
    pub(super) fn learn(&mut self, value: &str) {
        if value.len() >= LEN_MIN {
            self.known.insert(value.to_owned());
        }
    }

    /// Leaves out the secrets of the records of a class.
    pub(super) fn strip(&mut self, records: &mut Value) {
        for record in records.as_object_mut().into_iter().flat_map(|all| all.values_mut()) {
            for (field, value) in record.as_object_mut().into_iter().flatten() {
                if COPIES.contains(&field.as_str()) {
                    *value = LEFT_OUT.into();
                }
                for (key, value) in value.as_object_mut().into_iter().flatten() {
                    let is_plain = if field == "device_config" {
                        PLAIN.contains(&key.as_str())
                    } else {
                        !has(key, &WORDS) && !has(key, &MAP_WORDS)
                    };
                    if !is_plain {
                        self.learn(value.as_str().unwrap_or_default());
                        *value = LEFT_OUT.into();
                    }
                }
            }
        }
    }

    /// A text without known values, values of keys that name a secret, and passwords in URLs.
    pub(super) fn without(&self, text: &str) -> String {
        let mut text = text.to_owned();
        // Longest first: one may be a part of another.
        let mut known: Vec<&String> = self.known.iter().collect();
        known.sort_by_key(|value| std::cmp::Reverse(value.len()));
        for value in known {
            text = text.replace(value.as_str(), LEFT_OUT);
        }
        text.split_inclusive('\n').map(|line| urls(&assigned(line))).collect()
    }
}

/// A line without what follows `password=` and the like.
fn assigned(line: &str) -> String {
    let mut done = String::new();
    let mut rest = line;
    while let Some(at) = rest.find('=') {
        let (before, after) = rest.split_at(at + 1);
        done.push_str(before);
        let is_of_key = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
        let key = before[..at].trim_end().rsplit(|c| !is_of_key(c)).next().unwrap_or_default();
        rest = after;
        if has(key, &WORDS) {
            let after = after.trim_start_matches([' ', '"', '\'']);
            done.push_str(LEFT_OUT);
            rest = &after[after.find([' ', ',', ';', '&', '"', '\'', '\n', '\t']).unwrap_or(after.len())..];
        }
    }
    done + rest
}

/// A line without the accounts of its URLs.
fn urls(line: &str) -> String {
    let mut done = String::new();
    let mut rest = line;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        done.push_str(before);
        let end = after.find(['/', ' ', '"', '\'', '\n', '\t']).unwrap_or(after.len());
        rest = after;
        if let Some(at) = after[..end].rfind('@') {
            done.push_str(LEFT_OUT);
            rest = &after[at..];
        }
    }
    done + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_of_records_are_left_out_everywhere() {
        let mut secrets = Secrets::default();
        let mut records = serde_json::json!({"OpaqueRef:1": {
            "name_label": "kept", "snapshot_metadata": "copy-of-all",
            "device_config": {"location": "/sr", "cifspassword": "first-one", "odd": "second-one"},
            "other_config": {"folder": "/f", "api-token": "third-one", "tls_key": "fourth-one"},
        }});
        secrets.strip(&mut records);
        let text = records.to_string();
        for kept in ["kept", "/sr", "/f", "cifspassword"] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        for gone in ["copy-of-all", "first-one", "second-one", "third-one", "fourth-one"] {
            assert!(!text.contains(gone), "{gone}: {text}");
        }
        assert_eq!(secrets.without("a log of fourth-one\n"), "a log of (left out)\n");
    }

    #[test]
    fn lines_lose_what_names_itself_a_secret() {
        let without = |line: &str| Secrets::default().without(line);
        assert_eq!(without("rw,password=abc,vers=3"), "rw,password=(left out),vers=3");
        assert_eq!(without("x session_id=\"abc\" y"), "x session_id=(left out)\" y");
        assert_eq!(without("psk = abc\nport = 3\n"), "psk =(left out)\nport = 3\n");
        assert_eq!(without("at https://me:abc@host/d"), "at https://(left out)@host/d");
    }
}
