//! Words that announce a secret, headers, URLs, calls.

use std::sync::LazyLock;

use regex::{Captures, Regex};

use super::LEFT_OUT;

/// After these, the rest of the line is left out: the value may have spaces, quotes and any other form.
const ANNOUNCES: &str = concat!(
    "(?i)",
    r"pass[-_ ]?(?:word|wd|phrase|code)|passw|\bpwd?\b|pwd[=:]|secret|credential|\bchap",
    r"|chap[-_]?(?:user|secret|pass)|cookie|authorization|bearer|\bbasic\s|negotiate\s|digest\s",
    r"|\bpsk|psk\b|private[-_ ]?key",
    r"|(?:api|access|encryption|encrypt|tls|ssl|volume|master|disk|luks|ssh|sign|signing)[-_ ]?key",
    r"|token|user-?data|cloud-?init|login_with_|_login\b",
    r"|\blogin\(|set_value|mac[-_ ]?key|x-auth|x-api|\bpin[=:]|unattend|sysprep|product[-_]?key",
);

/// Names whose value is left out, however it is given.
const NAMES: &str = concat!(
    r#"(?i)([\w.:%-]*(?:session|auth|key|user(?:name)?|account|login|nonce|salt|signature|sig|otp|seed|license"#,
    r#")[\w.%-]*(?:\\*["'])?\s*(?:=>|%3D|[=:])\s*)"#,
    r#"(\\*"[^"]*"?|\\*'[^']*'?|[^\s,;&"'<>]*)"#,
);

/// Names of a query that keep their values.
const QUERY: [&str; 12] = [
    "uuid",
    "vdi",
    "vm",
    "sr_id",
    "format",
    "base",
    "chunked",
    "ref",
    "use_compression",
    "preserve_power_state",
    "force",
    "export_snapshots",
];

struct Patterns {
    announces: Regex,
    names: Regex,
    element: Regex,
    account: Regex,
    query: Regex,
}

static PATTERNS: LazyLock<Option<Patterns>> = LazyLock::new(|| {
    Some(Patterns {
        announces: Regex::new(ANNOUNCES).ok()?,
        names: Regex::new(NAMES).ok()?,
        // What an element of XML holds: a call of XML-RPC has its password in one, without a name.
        element: Regex::new(r"(?i)((?:<|&lt;)(?:string|value|i4|int|base64)(?:>|&gt;))[^<]+").ok()?,
        account: Regex::new(r"(?i)(://|(?:%3A|:)%2F%2F|:\\?/\\?/)[^/\s\x22'?#]*@").ok()?,
        query: Regex::new(r"(?i)([?&]|&amp;|%3F|%26)([\w.%-]+?)(=|%3D)([^\s&\x22'<>#;]*)").ok()?,
    })
});

/// Whether a key names a secret.
pub(crate) fn names_a_secret(key: &str) -> bool {
    let Some(patterns) = PATTERNS.as_ref() else { return true };
    patterns.announces.is_match(key) || patterns.names.is_match(&format!("{key}=x"))
}

/// Whether a line is one that a program wrote for people.
pub(super) fn is_text(line: &str) -> bool {
    // The escape of colours is; a carriage return ends lines of a terminal.
    !line.chars().any(|c| c == '\u{fffd}' || (c.is_control() && !matches!(c, '\t' | '\r' | '\x1b')))
}

/// A line without what is announced as a secret; whether its value stands in the next line.
pub(super) fn without(line: &str) -> (String, bool) {
    let Some(patterns) = PATTERNS.as_ref() else { return (LEFT_OUT.to_owned(), false) };
    // First: what comes next might take the word that announces.
    let (line, end, is_announced) = match patterns.announces.find(line) {
        None => (line, "", false),
        Some(found) => {
            let (before, after) = line.split_at(found.end());
            let has_value = after.contains(char::is_alphanumeric);
            if has_value { (before, LEFT_OUT, false) } else { (before, after, true) }
        }
    };
    let text = patterns.account.replace_all(line, |found: &Captures<'_>| format!("{}{LEFT_OUT}@", &found[1]));
    let text = patterns.query.replace_all(&text, |found: &Captures<'_>| {
        let (before, name, equals) = (&found[1], &found[2], &found[3]);
        let is_kept = QUERY.contains(&name.to_ascii_lowercase().as_str());
        let value = if is_kept { &found[4] } else { LEFT_OUT };
        format!("{before}{name}{equals}{value}")
    });
    let text = patterns.element.replace_all(&text, |found: &Captures<'_>| format!("{}{LEFT_OUT}", &found[1]));
    let text = patterns.names.replace_all(&text, |found: &Captures<'_>| {
        // What is left out already keeps its bracket.
        if found[2].starts_with("(left") { found[0].to_owned() } else { format!("{}{LEFT_OUT}", &found[1]) }
    });
    (format!("{text}{end}"), is_announced)
}
