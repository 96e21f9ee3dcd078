//! A result as the text of an XML-RPC value: what `task.result` holds.

use std::fmt::Write;

use tapio_model::Value;

use crate::dates;

/// `<value>OpaqueRef:..</value>`; empty for no result.
pub fn xml_text(value: &Value) -> String {
    if *value == Value::Void {
        return String::new();
    }
    let mut text = String::new();
    write_value(&mut text, value);
    text
}

fn write_value(text: &mut String, value: &Value) {
    text.push_str("<value>");
    match value {
        Value::Void => {}
        Value::Bool(truth) => {
            let _ = write!(text, "<boolean>{}</boolean>", u8::from(*truth));
        }
        Value::Int(number) => {
            let _ = write!(text, "{number}");
        }
        Value::Float(number) => {
            let _ = write!(text, "<double>{number}</double>");
        }
        // Without a type, readers may drop white space at the ends.
        Value::String(inner)
            if inner.starts_with(char::is_whitespace) || inner.ends_with(char::is_whitespace) =>
        {
            text.push_str("<string>");
            escape(text, inner);
            text.push_str("</string>");
        }
        Value::String(inner) => escape(text, inner),
        Value::DateTime(seconds) => {
            let _ = write!(text, "<dateTime.iso8601>{}</dateTime.iso8601>", dates::format(*seconds));
        }
        Value::Set(members) => {
            text.push_str("<array><data>");
            for member in members {
                write_value(text, member);
            }
            text.push_str("</data></array>");
        }
        Value::Map(pairs) => {
            text.push_str("<struct>");
            for (key, member) in pairs {
                text.push_str("<member><name>");
                escape(text, key);
                text.push_str("</name>");
                write_value(text, member);
                text.push_str("</member>");
            }
            text.push_str("</struct>");
        }
    }
    text.push_str("</value>");
}

fn escape(text: &mut String, inner: &str) {
    for c in inner.chars() {
        match c {
            '&' => text.push_str("&amp;"),
            '<' => text.push_str("&lt;"),
            '>' => text.push_str("&gt;"),
            // XML has no way to write these.
            '\0'..='\x08' | '\x0b' | '\x0c' | '\x0e'..='\x1f' | '\u{fffe}' | '\u{ffff}' => {
                text.push('\u{fffd}');
            }
            c => text.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use tapio_model::Value;

    use super::xml_text;

    #[test]
    fn results_look_as_on_the_wire() {
        assert_eq!(xml_text(&Value::Void), "");
        assert_eq!(xml_text(&"OpaqueRef:1".into()), "<value>OpaqueRef:1</value>");
        assert_eq!(xml_text(&"".into()), "<value></value>");
        assert_eq!(xml_text(&" a".into()), "<value><string> a</string></value>");
        assert_eq!(xml_text(&Value::Int(-7)), "<value>-7</value>");
        assert_eq!(xml_text(&true.into()), "<value><boolean>1</boolean></value>");
        assert_eq!(
            xml_text(&Value::strings(["a<b", "c&d"])),
            "<value><array><data><value>a&lt;b</value><value>c&amp;d</value></data></array></value>"
        );
        assert_eq!(
            xml_text(&Value::string_map([("k", "v\u{1}")])),
            "<value><struct><member><name>k</name><value>v\u{fffd}</value></member></struct></value>"
        );
    }
}
