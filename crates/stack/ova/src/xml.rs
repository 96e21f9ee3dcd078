//! A small tree of elements: names and attributes without their prefixes.

use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};

use crate::error::OvaError;

/// Elements inside each other.
const DEPTH_MAX: usize = 32;
/// Elements of a document.
const NODES_MAX: usize = 50_000;
/// Attributes of an element.
const ATTRIBUTES_MAX: usize = 64;

/// An element.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: String,
    attributes: Vec<(String, String)>,
    text: String,
    children: Vec<Node>,
}

impl Node {
    pub(crate) fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Its text, without white space around it.
    pub(crate) fn text(&self) -> &str {
        self.text.trim()
    }

    pub(crate) fn children<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Self> {
        self.children.iter().filter(move |child| child.name == name)
    }

    pub(crate) fn child(&self, name: &str) -> Option<&Self> {
        self.children.iter().find(|child| child.name == name)
    }

    /// The text of a child; empty where it is missing.
    pub(crate) fn text_of(&self, name: &str) -> &str {
        self.child(name).map_or("", Self::text)
    }

    pub(crate) fn all(&self) -> &[Self] {
        &self.children
    }
}

fn wrong(at: u64, why: impl std::fmt::Display) -> OvaError {
    OvaError::Wrong(format!("the descriptor, byte {at}: {why}"))
}

fn node(start: &BytesStart<'_>, at: u64) -> Result<Node, OvaError> {
    let mut attributes = Vec::new();
    for attribute in start.attributes() {
        let attribute = attribute.map_err(|error| wrong(at, error))?;
        if attributes.len() == ATTRIBUTES_MAX {
            return Err(wrong(at, format_args!("an element has more than {ATTRIBUTES_MAX} attributes")));
        }
        let value = attribute.normalized_value(XmlVersion::Implicit1_0).map_err(|error| wrong(at, error))?;
        attributes.push((attribute.key.local_name().into_inner().to_owned(), value.into_owned()));
    }
    let name = start.local_name().into_inner().to_owned();
    Ok(Node { name, attributes, ..Node::default() })
}

/// Reads a document: its outermost element.
pub(crate) fn read(document: &[u8]) -> Result<Node, OvaError> {
    let text = std::str::from_utf8(document)
        .map_err(|error| wrong(error.valid_up_to() as u64, "this is no UTF-8"))?;
    let mut reader = Reader::from_str(text.trim_start_matches('\u{feff}'));
    reader.config_mut().expand_empty_elements = true;
    let mut open: Vec<Node> = Vec::new();
    let mut count = 0;
    loop {
        let at = reader.buffer_position();
        match reader.read_event().map_err(|error| wrong(at, error))? {
            Event::Start(start) => {
                count += 1;
                if open.len() == DEPTH_MAX || count > NODES_MAX {
                    let why = format!("more than {NODES_MAX} elements, or {DEPTH_MAX} inside each other");
                    return Err(wrong(at, why));
                }
                open.push(node(&start, at)?);
            }
            Event::End(_) => {
                let Some(closed) = open.pop() else { return Err(wrong(at, "an end without a beginning")) };
                match open.last_mut() {
                    Some(parent) => parent.children.push(closed),
                    None => return Ok(closed),
                }
            }
            Event::Text(more) => {
                if let Some(node) = open.last_mut() {
                    node.text.push_str(&more.into_inner());
                }
            }
            Event::CData(more) => {
                if let Some(node) = open.last_mut() {
                    node.text.push_str(&more.into_inner());
                }
            }
            Event::GeneralRef(reference) => {
                let resolved = reference.resolve_char_ref().map_err(|error| wrong(at, error))?;
                let character = match (resolved, &*reference) {
                    (Some(character), _) => character,
                    (_, "lt") => '<',
                    (_, "gt") => '>',
                    (_, "amp") => '&',
                    (_, "apos") => '\'',
                    (_, "quot") => '"',
                    _ => return Err(wrong(at, "an entity that XML does not define")),
                };
                if let Some(node) = open.last_mut() {
                    node.text.push(character);
                }
            }
            Event::DocType(_) => return Err(wrong(at, "a document type is not read")),
            Event::Eof => return Err(wrong(at, "the document ends in its middle")),
            Event::Decl(_) | Event::Comment(_) | Event::PI(_) | Event::Empty(_) => {}
        }
    }
}

/// Text with what XML gives a meaning to replaced, also where it stands between quotes.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    tapio_model::xml::push_text(&mut out, text);
    out.replace('"', "&quot;").replace('\n', "&#10;").replace('\t', "&#9;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_read_without_their_prefixes() {
        let text = "\u{feff}<?xml version='1.0'?><o:a xmlns:o='x'><o:b o:id=\"1 &lt;\">t&amp;<!-- c -->u</o:b><c/></o:a>";
        let node = read(text.as_bytes()).unwrap();
        assert_eq!(node.name, "a");
        let inner = node.child("b").unwrap();
        assert_eq!((inner.text(), inner.attribute("id")), ("t&u", Some("1 <")));
        assert_eq!((node.all().len(), node.text_of("c"), node.text_of("none")), (2, "", ""));
        assert_eq!(escaped("a<\"b\"\n"), "a&lt;&quot;b&quot;&#10;");
    }

    #[test]
    fn what_is_no_document_is_refused() {
        let deep = "<a>".repeat(DEPTH_MAX + 1);
        for bad in ["", "<a>", "<a></b>", "<!DOCTYPE a [<!ENTITY b 'c'>]><a/>", "<a>&b;</a>", &deep] {
            assert!(matches!(read(bad.as_bytes()), Err(OvaError::Wrong(_))), "{bad}");
        }
        assert!(read(&[0xff, 0xfe]).is_err());
        assert!(read(format!("<a>{}</a>", "<b/>".repeat(NODES_MAX)).as_bytes()).is_err());
    }
}
