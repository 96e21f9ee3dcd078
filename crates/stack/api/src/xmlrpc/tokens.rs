//! The elements and texts of a document.

use std::borrow::Cow;

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

use crate::limits::Malformed;

/// The elements of XML-RPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    MethodCall,
    MethodName,
    MethodResponse,
    Fault,
    Params,
    Param,
    Value,
    Int,
    Boolean,
    String,
    Double,
    DateTime,
    Base64,
    Nil,
    Struct,
    Member,
    Name,
    Array,
    Data,
}

impl Tag {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "methodCall" => Self::MethodCall,
            "methodName" => Self::MethodName,
            "methodResponse" => Self::MethodResponse,
            "fault" => Self::Fault,
            "params" => Self::Params,
            "param" => Self::Param,
            "value" => Self::Value,
            "int" | "i4" | "i8" | "i64" => Self::Int,
            "boolean" => Self::Boolean,
            "string" => Self::String,
            "double" => Self::Double,
            "dateTime.iso8601" => Self::DateTime,
            "base64" => Self::Base64,
            "nil" => Self::Nil,
            "struct" => Self::Struct,
            "member" => Self::Member,
            "name" => Self::Name,
            "array" => Self::Array,
            "data" => Self::Data,
            _ => return None,
        })
    }
}

pub(super) enum Token<'a> {
    Open(Tag),
    Close,
    Text(Cow<'a, str>),
    End,
}

pub(super) struct Tokens<'a> {
    reader: Reader<&'a [u8]>,
}

impl<'a> Tokens<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let mut reader = Reader::from_str(text);
        reader.config_mut().expand_empty_elements = true;
        Self { reader }
    }

    fn at(&self, what: impl std::fmt::Display) -> Malformed {
        Malformed(format!("byte {}: {what}", self.reader.buffer_position()))
    }

    pub(super) fn next(&mut self) -> Result<Token<'a>, Malformed> {
        loop {
            let event = self.reader.read_event().map_err(|error| self.at(error))?;
            return Ok(match event {
                Event::Start(start) => Token::Open(self.tag(&start)?),
                Event::Empty(_) => return Err(self.at("an element that was not expanded")),
                Event::End(_) => Token::Close,
                Event::Text(text) => Token::Text(text.xml10_content_of()),
                Event::CData(text) => Token::Text(text.into_inner()),
                Event::GeneralRef(reference) => Token::Text(self.character(&reference)?),
                Event::Decl(declaration) => {
                    let encoding = declaration.encoding().and_then(Result::ok).unwrap_or_default();
                    if !["", "utf-8", "us-ascii"].iter().any(|known| encoding.eq_ignore_ascii_case(known)) {
                        return Err(self.at(format_args!("encoding '{encoding}': only UTF-8 is read")));
                    }
                    continue;
                }
                Event::Comment(_) | Event::PI(_) => continue,
                Event::DocType(_) => return Err(self.at("a document type is not read")),
                Event::Eof => Token::End,
            });
        }
    }

    fn tag(&self, start: &BytesStart<'_>) -> Result<Tag, Malformed> {
        let name = start.local_name().into_inner();
        Tag::named(name).ok_or_else(|| {
            let shown: String = name.chars().take(40).collect();
            self.at(format_args!("XML-RPC has no element '{shown}'"))
        })
    }

    fn character(&self, reference: &quick_xml::events::BytesRef<'_>) -> Result<Cow<'a, str>, Malformed> {
        if let Some(character) = reference.resolve_char_ref().map_err(|error| self.at(error))? {
            return Ok(Cow::Owned(character.into()));
        }
        Ok(Cow::Borrowed(match &**reference {
            "lt" => "<",
            "gt" => ">",
            "amp" => "&",
            "apos" => "'",
            "quot" => "\"",
            _ => return Err(self.at("an entity that XML does not define")),
        }))
    }

    /// The next token that is not white space between elements.
    pub(super) fn element(&mut self) -> Result<Token<'a>, Malformed> {
        loop {
            match self.next()? {
                Token::Text(text) if text.chars().all(char::is_whitespace) => {}
                Token::Text(_) => return Err(self.at("text where an element is expected")),
                other => return Ok(other),
            }
        }
    }

    pub(super) fn open(&mut self, tag: Tag) -> Result<(), Malformed> {
        match self.element()? {
            Token::Open(found) if found == tag => Ok(()),
            _ => Err(self.at(format_args!("the element {tag:?} is expected"))),
        }
    }

    pub(super) fn close(&mut self) -> Result<(), Malformed> {
        match self.element()? {
            Token::Close => Ok(()),
            _ => Err(self.at("the end of an element is expected")),
        }
    }

    /// The text up to the end of the element.
    pub(super) fn text(&mut self) -> Result<Cow<'a, str>, Malformed> {
        let mut text = Cow::Borrowed("");
        loop {
            match self.next()? {
                Token::Text(more) if text.is_empty() => text = more,
                Token::Text(more) => text.to_mut().push_str(&more),
                Token::Close => return Ok(text),
                Token::Open(_) | Token::End => return Err(self.at("text is expected")),
            }
        }
    }

    pub(super) fn wrong(&self, what: impl std::fmt::Display) -> Malformed {
        self.at(what)
    }
}

/// Line ends as XML reads them (section 2.11), without losing the borrow where there is nothing to change.
trait Content<'a> {
    fn xml10_content_of(self) -> Cow<'a, str>;
}

impl<'a> Content<'a> for quick_xml::events::BytesText<'a> {
    fn xml10_content_of(self) -> Cow<'a, str> {
        let text = self.into_inner();
        if text.contains('\r') { Cow::Owned(text.replace("\r\n", "\n").replace('\r', "\n")) } else { text }
    }
}
