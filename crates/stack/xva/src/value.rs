//! The values of `ova.xml`: XML-RPC, as XenServer and others write it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;

use quick_xml::Reader;
use quick_xml::events::Event;
use tapio_model::{Value, datetime};

use crate::error::{XvaError, shown};

/// Values inside each other.
const DEPTH_MAX: usize = 32;

/// Values of a document.
const VALUES_MAX: usize = 100_000;

enum Token<'a> {
    Open(String),
    Close,
    Text(Cow<'a, str>),
    End,
}

struct Tokens<'a> {
    reader: Reader<&'a [u8]>,
    ahead: Option<Token<'a>>,
    values: usize,
}

fn wrong(at: u64, why: impl std::fmt::Display) -> XvaError {
    XvaError::Wrong(format!("ova.xml, byte {at}: {why}"))
}

impl<'a> Tokens<'a> {
    fn wrong(&self, why: impl std::fmt::Display) -> XvaError {
        wrong(self.reader.buffer_position(), why)
    }

    fn next(&mut self) -> Result<Token<'a>, XvaError> {
        if let Some(ahead) = self.ahead.take() {
            return Ok(ahead);
        }
        loop {
            let event = self.reader.read_event().map_err(|error| self.wrong(error))?;
            return Ok(match event {
                Event::Start(start) => Token::Open(start.local_name().into_inner().to_owned()),
                Event::Empty(_) => return Err(self.wrong("an element that was not expanded")),
                Event::End(_) => Token::Close,
                Event::Text(text) => Token::Text(text.into_inner()),
                Event::CData(text) => Token::Text(text.into_inner()),
                Event::GeneralRef(reference) => {
                    let character = reference.resolve_char_ref().map_err(|error| self.wrong(error))?;
                    Token::Text(match (character, &*reference) {
                        (Some(character), _) => Cow::Owned(character.into()),
                        (_, "lt") => "<".into(),
                        (_, "gt") => ">".into(),
                        (_, "amp") => "&".into(),
                        (_, "apos") => "'".into(),
                        (_, "quot") => "\"".into(),
                        _ => return Err(self.wrong("an entity that XML does not define")),
                    })
                }
                Event::Decl(_) | Event::Comment(_) | Event::PI(_) => continue,
                Event::DocType(_) => return Err(self.wrong("a document type is not read")),
                Event::Eof => Token::End,
            });
        }
    }

    /// The next token that is not white space between elements.
    fn element(&mut self) -> Result<Token<'a>, XvaError> {
        loop {
            match self.next()? {
                Token::Text(text) if text.chars().all(char::is_whitespace) => {}
                Token::Text(_) => return Err(self.wrong("text where an element is expected")),
                other => return Ok(other),
            }
        }
    }

    fn open(&mut self, name: &str) -> Result<(), XvaError> {
        match self.element()? {
            Token::Open(found) if found == name => Ok(()),
            _ => Err(self.wrong(format_args!("<{name}> is expected"))),
        }
    }

    fn close(&mut self) -> Result<(), XvaError> {
        match self.element()? {
            Token::Close => Ok(()),
            _ => Err(self.wrong("the end of an element is expected")),
        }
    }

    /// Text up to the end of the element, or up to an element inside it.
    fn text(&mut self) -> Result<String, XvaError> {
        let mut text = String::new();
        loop {
            match self.next()? {
                Token::Text(more) => text.extend(more.chars().filter(|character| !is_foreign(*character))),
                Token::End => return Err(self.wrong("the document ends in its middle")),
                token => {
                    self.ahead = Some(token);
                    return Ok(text);
                }
            }
        }
    }

    /// What `<value>` has, with its end.
    fn value(&mut self, depth: usize) -> Result<Value, XvaError> {
        self.values += 1;
        if depth > DEPTH_MAX || self.values > VALUES_MAX {
            return Err(
                self.wrong(format_args!("more than {VALUES_MAX} values, or {DEPTH_MAX} inside each other"))
            );
        }
        let text = self.text()?;
        let Token::Open(kind) = self.next()? else { return Ok(Value::String(text)) };
        if !text.chars().all(char::is_whitespace) {
            return Err(self.wrong("text and an element in one value"));
        }
        let value = match kind.as_str() {
            "struct" => {
                let mut members = BTreeMap::new();
                while let Token::Open(name) = self.element()? {
                    if name != "member" {
                        return Err(self.wrong("<member> is expected"));
                    }
                    self.open("name")?;
                    let name = self.text()?;
                    self.close()?;
                    self.open("value")?;
                    let value = self.value(depth + 1)?;
                    self.close()?;
                    members.insert(name, value);
                }
                self.close()?;
                return Ok(Value::Map(members));
            }
            "array" => {
                let mut members = Vec::new();
                self.open("data")?;
                while let Token::Open(name) = self.element()? {
                    if name != "value" {
                        return Err(self.wrong("<value> is expected"));
                    }
                    members.push(self.value(depth + 1)?);
                }
                self.close()?;
                self.close()?;
                return Ok(Value::Set(members));
            }
            "boolean" => Value::Bool(matches!(self.text()?.trim(), "1" | "true")),
            "nil" => {
                self.text()?;
                Value::Void
            }
            // Numbers and dates stay text: the field that they are for knows their type.
            "string" | "int" | "i4" | "i8" | "double" | "dateTime.iso8601" | "base64" => {
                Value::String(self.text()?)
            }
            other => return Err(self.wrong(format_args!("XML-RPC has no type '{}'", shown(other)))),
        };
        self.close()?;
        self.close()?;
        Ok(value)
    }
}

/// Reads a document that is one value.
pub(crate) fn read(document: &[u8]) -> Result<Value, XvaError> {
    let text = std::str::from_utf8(document)
        .map_err(|error| wrong(error.valid_up_to() as u64, "this is no UTF-8"))?;
    let mut reader = Reader::from_str(text);
    reader.config_mut().expand_empty_elements = true;
    let mut tokens = Tokens { reader, ahead: None, values: 0 };
    tokens.open("value")?;
    let value = tokens.value(0)?;
    match tokens.element()? {
        Token::End => Ok(value),
        _ => Err(tokens.wrong("the end of the document is expected")),
    }
}

/// Whether XML has no place for a character.
fn is_foreign(character: char) -> bool {
    matches!(character, '\0'..='\x08' | '\x0b' | '\x0c' | '\x0e'..='\x1f' | '\u{fffe}' | '\u{ffff}')
}

fn push_text(out: &mut String, text: &str) {
    for character in text.chars() {
        match character {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '\r' => out.push_str("&#13;"),
            '\t' | '\n' => out.push(character),
            _ if is_foreign(character) => {}
            _ => out.push(character),
        }
    }
}

/// Writes a value.
pub(crate) fn push(out: &mut String, value: &Value) {
    out.push_str("<value>");
    // Writing to a String cannot fail.
    let _ = match value {
        Value::Void => Ok(()),
        Value::Bool(truth) => write!(out, "<boolean>{}</boolean>", u8::from(*truth)),
        Value::Int(number) => write!(out, "{number}"),
        Value::Float(number) => write!(out, "<double>{number}</double>"),
        Value::DateTime(at) => write!(out, "<dateTime.iso8601>{}</dateTime.iso8601>", datetime::format(*at)),
        Value::String(text) => {
            push_text(out, text);
            Ok(())
        }
        Value::Set(members) => {
            out.push_str("<array><data>");
            members.iter().for_each(|member| push(out, member));
            out.push_str("</data></array>");
            Ok(())
        }
        Value::Map(members) => {
            out.push_str("<struct>");
            for (name, member) in members {
                out.push_str("<member><name>");
                push_text(out, name);
                out.push_str("</name>");
                push(out, member);
                out.push_str("</member>");
            }
            out.push_str("</struct>");
            Ok(())
        }
    };
    out.push_str("</value>");
}
