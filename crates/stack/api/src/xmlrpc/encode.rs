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

pub(crate) fn push_member(out: &mut String, name: &str, value: &Value) {
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

pub(crate) fn push_value(out: &mut String, value: &Value) {
    out.push_str("<value>");
    // Writing to a String cannot fail.
    let _ = match value {
        Value::Void => Ok(()),
        Value::Bool(truth) => write!(out, "<boolean>{}</boolean>", u8::from(*truth)),
        Value::Int(number) => write!(out, "{number}"),
        Value::Float(number) => write!(out, "<double>{number}</double>"),
        Value::DateTime(at) => write!(out, "<dateTime.iso8601>{}</dateTime.iso8601>", datetime::format(*at)),
        Value::String(text) => {
            // Text without a type is text, as xapi writes it. Clients in JavaScript read an empty `string` as no value
            // at all; readers that trim what has no type would lose white space at its ends.
            let is_typed = text.starts_with(char::is_whitespace) || text.ends_with(char::is_whitespace);
            out.push_str(if is_typed { "<string>" } else { "" });
            push_text(out, text);
            out.push_str(if is_typed { "</string>" } else { "" });
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

const ANSWER_START: &str = "<methodResponse><params><param><value><struct><member><name>Status</name><value>";
const ANSWER_END: &str = "</struct></value></param></params></methodResponse>";

fn answer(status: &str, name: &str, value: &Value) -> String {
    let mut out = String::with_capacity(256);
    out.push_str(HEAD);
    out.push_str(ANSWER_START);
    out.push_str(status);
    out.push_str("</value></member>");
    push_member(&mut out, name, value);
    out.push_str(ANSWER_END);
    out
}

/// What comes before the value of an answer of success.
pub(crate) fn push_success_start(out: &mut String) {
    out.push_str(HEAD);
    out.push_str(ANSWER_START);
    out.push_str("Success</value></member><member><name>Value</name>");
}

/// What comes behind it.
pub(crate) fn push_success_end(out: &mut String) {
    out.push_str("</member>");
    out.push_str(ANSWER_END);
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

/// The answer to what is no call: a fault of XML-RPC, by the number that its servers agreed on for that.
pub fn encode_fault(why: &str) -> String {
    let mut out = String::from(HEAD);
    out.push_str("<methodResponse><fault><value><struct><member><name>faultCode</name><value><int>-32700</int></value>");
    out.push_str("</member><member><name>faultString</name>");
    push_value(&mut out, &Value::string(why));
    out.push_str("</member></struct></value></fault></methodResponse>");
    out
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
