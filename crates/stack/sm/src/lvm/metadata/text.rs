//! The text of its sectors: XML elements without attributes, one level deep, with blanks behind.

use std::collections::BTreeMap;

use quick_xml::Reader;
use quick_xml::escape::{escape, unescape};
use quick_xml::events::Event;

use super::SECTOR;

/// Values by their tags.
pub(super) type Fields = BTreeMap<String, String>;

/// The text of some sectors, without zeros and what is behind it.
pub(super) fn plain(bytes: &[u8]) -> String {
    let kept: Vec<u8> = bytes.iter().copied().filter(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&kept).trim_end().to_owned()
}

/// A sector of this text, with blanks behind. A longer one is cut: what is said of VDIs and SRs is bounded before.
pub(super) fn padded(text: &str) -> [u8; SECTOR] {
    let mut sector = [b' '; SECTOR];
    let len = text.len().min(SECTOR);
    sector[..len].copy_from_slice(&text.as_bytes()[..len]);
    sector
}

/// Characters that XML can say.
fn is_legal(character: char) -> bool {
    matches!(character, '\t' | '\n' | '\r' | ' '..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
}

/// The first character of a text that cannot be written.
pub(crate) fn illegal(text: &str) -> Option<char> {
    text.chars().find(|character| !is_legal(*character))
}

/// An element with a value of so many bytes at most.
pub(super) fn element(tag: &str, value: &str, most: usize) -> String {
    format!("<{tag}>{}</{tag}>", cut(value, most))
}

/// As much of a text as fits into so many bytes, escaped. What XML cannot say is left out.
pub(super) fn cut(text: &str, most: usize) -> String {
    let mut out = String::new();
    for character in text.chars().filter(|character| is_legal(*character)) {
        let mut one = [0; 4];
        let one = escape(&*character.encode_utf8(&mut one)).into_owned();
        if out.len() + one.len() > most {
            break;
        }
        out += &one;
    }
    out
}

/// Two texts, escaped, that have so many bytes together; each is cut to a half only where both are too long.
pub(super) fn shortened(name: &str, description: &str, most: usize) -> (String, String) {
    let whole = (cut(name, usize::MAX), cut(description, usize::MAX));
    if whole.0.len() + whole.1.len() <= most {
        return whole;
    }
    (cut(name, most / 2), cut(description, most / 2))
}

/// What is wrong with a name that has a character which cannot be said.
pub(crate) fn unsayable(character: char) -> String {
    format!("a name has the character {}, which XML cannot say", character.escape_unicode())
}

/// The elements in a text.
///
/// # Errors
/// It is none of elements that hold text alone.
pub(super) fn fields(text: &str) -> Result<Fields, String> {
    let mut reader = Reader::from_str(text);
    reader.config_mut().check_end_names = true;
    let mut found = Fields::new();
    // The open element and what was read of it.
    let mut open: Option<(String, String)> = None;
    loop {
        let event = reader.read_event().map_err(|error| error.to_string())?;
        match event {
            Event::Start(tag) if open.is_none() => {
                let tag = tag.name().as_ref().to_owned();
                open = Some((tag, String::new()));
            }
            Event::Empty(tag) if open.is_none() => {
                found.insert(tag.name().as_ref().to_owned(), String::new());
            }
            Event::End(_) => {
                let (tag, value) = open.take().ok_or("an element ends that has not begun")?;
                found.insert(tag, value);
            }
            Event::Text(text) => {
                if let Some((_, value)) = &mut open {
                    *value += &text.into_inner();
                }
            }
            Event::GeneralRef(reference) => {
                let name = reference.into_inner();
                let text = format!("&{name};");
                let text = unescape(&text).map_err(|error| error.to_string())?;
                if let Some((_, value)) = &mut open {
                    *value += &text;
                }
            }
            Event::Eof => {
                return if open.is_none() { Ok(found) } else { Err("an element does not end".into()) };
            }
            _ => return Err("there is more than elements and their text".into()),
        }
    }
}
