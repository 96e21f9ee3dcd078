//! Writing calls and answers.

use std::fmt::Write;

use tapio_model::{ApiError, Value};

use tapio_model::datetime;

const HEAD: &str = "<?xml version=\"1.0\"?>";

/// The one place where XenAPI sends numbers as numbers: how many objects of each class `event.from` sees.
const COUNTED: &str = "valid_ref_counts";

/// Text with what XML gives a meaning to replaced. Characters that no XML document may hold (section 2.2) become
/// U+FFFD, and a carriage return is written by number so that no reader takes it for a line end.
fn push_text(out: &mut String, text: &str) {
    let mut plain_from = 0;
    for (at, byte) in text.bytes().enumerate() {
        let (replacement, len) = match byte {
            b'<' => ("&lt;", 1),
            b'>' => ("&gt;", 1),
            b'&' => ("&amp;", 1),
            b'\r' => ("&#13;", 1),
            b'\t' | b'\n' => continue,
            0..=0x1f => ("\u{fffd}", 1),
            0xef if text[at..].starts_with(['\u{fffe}', '\u{ffff}']) => ("\u{fffd}", 3),
            _ => continue,
        };
        out.push_str(&text[plain_from..at]);
        out.push_str(replacement);
        plain_from = at + len;
    }
    out.push_str(&text[plain_from..]);
}

fn push_member(out: &mut String, name: &str, value: &Value) {
    out.push_str("<member><name>");
    push_text(out, name);
    out.push_str("</name>");
    match value {
        Value::Map(counts) if name == COUNTED => push_counts(out, counts),
        _ => push_value(out, value),
    }
    out.push_str("</member>");
}

fn push_counts(out: &mut String, counts: &std::collections::BTreeMap<String, Value>) {
    out.push_str("<value><struct>");
    for (class, count) in counts {
        out.push_str("<member><name>");
        push_text(out, class);
        // Writing to a String cannot fail.
        let _ = write!(out, "</name><value><i4>{}</i4></value></member>", count.as_int().unwrap_or_default());
    }
    out.push_str("</struct></value>");
}

fn push_value(out: &mut String, value: &Value) {
    out.push_str("<value>");
    // Writing to a String cannot fail.
    let _ = match value {
        Value::Void => Ok(()),
        Value::Bool(truth) => write!(out, "<boolean>{}</boolean>", u8::from(*truth)),
        Value::Int(number) => write!(out, "<string>{number}</string>"),
        Value::Float(number) => write!(out, "<double>{number}</double>"),
        Value::DateTime(at) => write!(out, "<dateTime.iso8601>{}</dateTime.iso8601>", datetime::format(*at)),
        Value::String(text) => {
            // A text of white space alone would be lost between the tags of a value.
            out.push_str("<string>");
            push_text(out, text);
            out.push_str("</string>");
            Ok(())
        }
        Value::Set(members) => {
            out.push_str("<array><data>");
            members.iter().for_each(|member| push_value(out, member));
            out.push_str("</data></array>");
            Ok(())
        }
        Value::Map(members) => {
            out.push_str("<struct>");
            members.iter().for_each(|(name, member)| push_member(out, name, member));
            out.push_str("</struct>");
            Ok(())
        }
    };
    out.push_str("</value>");
}

/// A value alone, as a task's `result` holds it: `<value>...</value>`.
pub fn encode_value(value: &Value) -> String {
    let mut out = String::new();
    push_value(&mut out, value);
    out
}

fn answer(status: &str, name: &str, value: &Value) -> String {
    let mut out = String::with_capacity(256);
    out.push_str(HEAD);
    out.push_str("<methodResponse><params><param><value><struct><member><name>Status</name><value>");
    out.push_str(status);
    out.push_str("</value></member>");
    push_member(&mut out, name, value);
    out.push_str("</struct></value></param></params></methodResponse>");
    out
}

/// The answer of a call that worked.
pub fn encode_success(value: &Value) -> String {
    answer("Success", "Value", value)
}

/// The answer of a call that did not.
pub fn encode_failure(error: &ApiError) -> String {
    let words = std::iter::once(&*error.code).chain(error.params.iter().map(String::as_str));
    answer("Failure", "ErrorDescription", &Value::strings(words))
}

/// A request, as a client sends it.
pub fn encode_call(method: &str, params: &[Value]) -> String {
    let mut out = String::from(HEAD);
    out.push_str("<methodCall><methodName>");
    push_text(&mut out, method);
    out.push_str("</methodName><params>");
    for param in params {
        out.push_str("<param>");
        push_value(&mut out, param);
        out.push_str("</param>");
    }
    out.push_str("</params></methodCall>");
    out
}
