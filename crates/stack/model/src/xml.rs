//! Values as XML-RPC writes them: in answers of the API, in `task.result` and in `ova.xml`.

use std::fmt::Write;

use crate::{Value, datetime};

/// The one place where XenAPI sends numbers as numbers: how many objects of each class `event.from` sees.
const COUNTED: &str = "valid_ref_counts";

/// Text with what XML gives a meaning to replaced. Characters that no XML document may hold (section 2.2) become
/// U+FFFD, and a carriage return is written by number so that no reader takes it for a line end.
pub fn push_text(out: &mut String, text: &str) {
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

/// A member of a structure.
pub fn push_member(out: &mut String, name: &str, value: &Value) {
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

/// A value, with its element.
pub fn push_value(out: &mut String, value: &Value) {
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

/// A value alone: `<value>...</value>`.
pub fn value_text(value: &Value) -> String {
    let mut out = String::new();
    push_value(&mut out, value);
    out
}
