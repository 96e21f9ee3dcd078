//! A result as the text of an XML-RPC value: what `task.result` holds.

use tapio_model::{Value, xml};

/// `<value>OpaqueRef:..</value>`; empty for no result.
pub fn xml_text(value: &Value) -> String {
    if *value == Value::Void { String::new() } else { xml::value_text(value) }
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
