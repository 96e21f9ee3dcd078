//! What a probe answers, in XML. sm-layout.md section 9.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use quick_xml::escape::escape;
use uuid::Uuid;

/// One SR that a probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SrEntry {
    /// Its UUID.
    pub uuid: Uuid,
    /// The devices it is on, where it is on devices.
    pub devices: Option<String>,
    /// Bytes, where they are known.
    pub size: Option<u64>,
}

/// The document of a complete probe.
pub fn sr_list(entries: &[SrEntry]) -> String {
    let items: Vec<_> = entries
        .iter()
        .map(|entry| {
            let mut fields = vec![("UUID", entry.uuid.to_string())];
            fields.extend(entry.devices.clone().map(|devices| ("Devlist", devices)));
            fields.extend(entry.size.map(|size| ("size", size.to_string())));
            ("SR", fields)
        })
        .collect();
    document("SRlist", &items)
}

/// A document of a probe: items of a list, each with fields. A field without a name is the item's own text.
pub(crate) fn document(root: &str, items: &[(&str, Vec<(&str, String)>)]) -> String {
    let mut xml = format!("<?xml version=\"1.0\" ?>\n<{root}>\n");
    for (item, fields) in items {
        let _ = writeln!(xml, "\t<{item}>");
        for (name, value) in fields {
            let value = escape(value);
            let _ = match *name {
                "" => writeln!(xml, "\t\t{value}"),
                name => writeln!(xml, "\t\t<{name}>\n\t\t\t{value}\n\t\t</{name}>"),
            };
        }
        let _ = writeln!(xml, "\t</{item}>");
    }
    let _ = writeln!(xml, "</{root}>");
    xml
}

/// What `blkid -o export` says of a device, by key. Lines that are none are left out.
pub fn parse_blkid(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(key, _)| {
            !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
        })
        .map(|(key, value)| (key.to_string(), value.to_string()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_what_clients_parse() {
        let uuid = Uuid::from_u128(7);
        let xml = sr_list(&[SrEntry { uuid, devices: Some("/dev/a&b".into()), size: Some(9) }]);
        assert!(xml.starts_with("<?xml version=\"1.0\" ?>\n<SRlist>"), "{xml}");
        assert!(xml.contains("/dev/a&amp;b") && xml.contains(&uuid.to_string()), "{xml}");
        let mut reader = quick_xml::Reader::from_str(&xml);
        let mut open = 0;
        loop {
            match reader.read_event().unwrap() {
                quick_xml::events::Event::Start(_) => open += 1,
                quick_xml::events::Event::End(_) => open -= 1,
                quick_xml::events::Event::Eof => break,
                _ => {}
            }
        }
        assert_eq!(open, 0);
        assert!(sr_list(&[]).contains("<SRlist>\n</SRlist>"));
    }

    #[test]
    fn odd_lines_of_blkid_are_left_out() {
        let found = parse_blkid("DEVNAME=/dev/x\nUUID=1=2\nnonsense\n=x\nlower=1\n");
        assert_eq!(found.len(), 2);
        assert_eq!(found["UUID"], "1=2");
    }
}
