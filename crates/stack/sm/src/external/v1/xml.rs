//! XML-RPC as plugins of version 1 are called by it: a call of one structure, and its answer.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use quick_xml::Reader;
use quick_xml::escape::escape;
use quick_xml::events::{BytesRef, Event};

/// Values inside of values that are read.
const DEPTH_MAX: usize = 32;
/// Elements of an answer that are read.
const ELEMENTS_MAX: usize = 1_000_000;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing.
    Nil,
    /// Text; numbers and dates too, which come as text often enough.
    Text(String),
    /// True or false.
    Bool(bool),
    /// Several.
    Array(Vec<Value>),
    /// Named ones.
    Struct(BTreeMap<String, Value>),
}

/// What a plugin answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Response {
    /// A value.
    Value(Value),
    /// A number and a text.
    Fault(i64, String),
}

impl Value {
    /// A text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// Texts by name.
    pub fn texts<K: Into<String>, V: Into<String>>(pairs: impl IntoIterator<Item = (K, V)>) -> Self {
        Self::Struct(pairs.into_iter().map(|(key, value)| (key.into(), Self::text(value))).collect())
    }

    /// The text, if it is one.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A member of a structure.
    pub fn get(&self, name: &str) -> Option<&Value> {
        match self {
            Self::Struct(members) => members.get(name),
            _ => None,
        }
    }

    /// The text of a member.
    pub fn text_of(&self, name: &str) -> Option<&str> {
        self.get(name)?.as_text()
    }

    fn write(&self, out: &mut String) {
        out.push_str("<value>");
        // Writing to a text cannot fail.
        let _ = match self {
            Self::Nil => write!(out, "<nil/>"),
            Self::Text(text) => write!(out, "<string>{}</string>", escape(clean(text))),
            Self::Bool(is) => write!(out, "<boolean>{}</boolean>", u8::from(*is)),
            Self::Array(items) => {
                out.push_str("<array><data>");
                items.iter().for_each(|item| item.write(out));
                write!(out, "</data></array>")
            }
            Self::Struct(members) => {
                out.push_str("<struct>");
                for (name, value) in members {
                    let _ = write!(out, "<member><name>{}</name>", escape(clean(name)));
                    value.write(out);
                    out.push_str("</member>");
                }
                write!(out, "</struct>")
            }
        };
        out.push_str("</value>");
    }
}

/// Text without the characters that XML cannot hold, and that an argument of a program cannot.
fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\r' | '\t')).collect()
}

/// A call with one parameter.
pub fn call(method: &str, parameter: &Value) -> String {
    let mut out = format!("<?xml version=\"1.0\"?><methodCall><methodName>{}</methodName>", escape(method));
    out.push_str("<params><param>");
    parameter.write(&mut out);
    out.push_str("</param></params></methodCall>");
    out
}

/// The answer to a call. What a program printed around the document is skipped, as lines of a library's.
///
/// # Errors
/// A sentence: it is no answer.
pub fn response(bytes: &[u8]) -> Result<Response, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "it is no UTF-8".to_owned())?;
    let start =
        text.find("<?xml").or_else(|| text.find("<methodResponse")).ok_or("it has no <methodResponse>")?;
    let mut parser = Parser { reader: Reader::from_str(&text[start..]), elements: 0 };
    parser.reader.config_mut().expand_empty_elements = true;
    parser.enter("methodResponse")?;
    match parser.next_start()?.as_str() {
        "params" => {
            parser.enter("param")?;
            parser.enter("value")?;
            parser.value(0).map(Response::Value)
        }
        "fault" => {
            parser.enter("value")?;
            let fault = parser.value(0)?;
            let code = fault.text_of("faultCode").and_then(|code| code.trim().parse().ok());
            let what = fault.text_of("faultString").unwrap_or_default().to_owned();
            Ok(Response::Fault(code.ok_or("a fault without a number")?, what))
        }
        other => Err(format!("<{other}> in <methodResponse>")),
    }
}

/// The elements of a document, one after the other.
struct Parser<'a> {
    reader: Reader<&'a [u8]>,
    elements: usize,
}

/// What comes next.
enum Token {
    Start(String),
    End,
    Text(String),
}

impl Parser<'_> {
    fn next(&mut self) -> Result<Token, String> {
        loop {
            self.elements += 1;
            if self.elements > ELEMENTS_MAX {
                return Err(format!("more than {ELEMENTS_MAX} elements"));
            }
            return Ok(match self.reader.read_event().map_err(|error| format!("no XML: {error}"))? {
                Event::Start(start) => Token::Start(start.name().as_ref().chars().take(100).collect()),
                Event::End(_) => Token::End,
                Event::Text(piece) => Token::Text(piece.xml10_content().into_owned()),
                Event::CData(piece) => Token::Text(piece.into_inner().into_owned()),
                Event::GeneralRef(entity) => Token::Text(character(&entity)?),
                Event::Eof => return Err("it ends too early".to_owned()),
                Event::DocType(_) => return Err("a document type".to_owned()),
                _ => continue,
            });
        }
    }

    /// The next element that begins; text in front of it is skipped.
    fn next_start(&mut self) -> Result<String, String> {
        loop {
            match self.next()? {
                Token::Start(name) => return Ok(name),
                Token::Text(_) => {}
                Token::End => return Err("an element ends where one must begin".to_owned()),
            }
        }
    }

    fn enter(&mut self, wanted: &str) -> Result<(), String> {
        let found = self.next_start()?;
        if found == wanted { Ok(()) } else { Err(format!("<{found}> instead of <{wanted}>")) }
    }

    fn end(&mut self) -> Result<(), String> {
        loop {
            match self.next()? {
                Token::End => return Ok(()),
                Token::Text(_) => {}
                Token::Start(name) => return Err(format!("<{name}> where an element must end")),
            }
        }
    }

    /// The text up to the end of an element.
    fn text(&mut self) -> Result<String, String> {
        let mut text = String::new();
        loop {
            match self.next()? {
                Token::End => return Ok(text),
                Token::Text(piece) => text.push_str(&piece),
                Token::Start(name) => return Err(format!("<{name}> in a text")),
            }
        }
    }

    /// A value whose `<value>` has begun, up to the end of that.
    fn value(&mut self, depth: usize) -> Result<Value, String> {
        if depth > DEPTH_MAX {
            return Err(format!("values are more than {DEPTH_MAX} deep"));
        }
        let mut plain = String::new();
        let kind = loop {
            match self.next()? {
                Token::Text(piece) => plain.push_str(&piece),
                // Without a type it is text.
                Token::End => return Ok(Value::Text(plain)),
                Token::Start(kind) => break kind,
            }
        };
        let value = match kind.as_str() {
            "nil" => self.text().map(|_| Value::Nil)?,
            "string" | "int" | "i4" | "i8" | "double" | "dateTime.iso8601" | "base64" => {
                Value::Text(self.text()?)
            }
            "boolean" => match self.text()?.trim() {
                "1" | "true" => Value::Bool(true),
                "0" | "false" => Value::Bool(false),
                other => {
                    return Err(format!("'{}' is no boolean", other.chars().take(20).collect::<String>()));
                }
            },
            "array" => self.array(depth)?,
            "struct" => self.members(depth)?,
            other => return Err(format!("a value of type <{other}>")),
        };
        self.end()?;
        Ok(value)
    }

    fn array(&mut self, depth: usize) -> Result<Value, String> {
        let mut items = Vec::new();
        match self.next_start()?.as_str() {
            "data" => loop {
                match self.next()? {
                    Token::Text(_) => {}
                    Token::End => break,
                    Token::Start(name) if name == "value" => items.push(self.value(depth + 1)?),
                    Token::Start(name) => return Err(format!("<{name}> in an array")),
                }
            },
            other => return Err(format!("<{other}> in an array")),
        }
        self.end()?;
        Ok(Value::Array(items))
    }

    fn members(&mut self, depth: usize) -> Result<Value, String> {
        let mut members = BTreeMap::new();
        loop {
            match self.next()? {
                Token::Text(_) => {}
                Token::End => return Ok(Value::Struct(members)),
                Token::Start(name) if name == "member" => {
                    self.enter("name")?;
                    let name = self.text()?;
                    self.enter("value")?;
                    let value = self.value(depth + 1)?;
                    self.end()?;
                    members.insert(name, value);
                }
                Token::Start(name) => return Err(format!("<{name}> in a struct")),
            }
        }
    }
}

fn character(entity: &BytesRef<'_>) -> Result<String, String> {
    if let Some(character) = entity.resolve_char_ref().map_err(|error| error.to_string())? {
        return Ok(character.into());
    }
    let text = match &**entity {
        "lt" => "<",
        "gt" => ">",
        "amp" => "&",
        "apos" => "'",
        "quot" => "\"",
        _ => return Err("an entity that XML does not define".to_owned()),
    };
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(value: &str) -> Result<Response, String> {
        let text = format!(
            "a warning\n<?xml version='1.0'?>\n<methodResponse>\n<params>\n<param>\n<value>{value}</value>\n</param>\n\
             </params>\n</methodResponse>\n"
        );
        response(text.as_bytes())
    }

    #[test]
    fn what_python_writes_is_read() {
        let members = "<struct>\n<member>\n<name>a</name>\n<value><string>x &amp; &#60;y</string></value>\n</member>\n\
                       <member><name>b</name><value><array><data>\n<value><boolean>1</boolean></value>\n\
                       <value><int>7</int></value><value>bare</value><value><nil/></value></data></array></value>\
                       </member>\n</struct>";
        let Ok(Response::Value(value)) = answer(members) else { panic!("{:?}", answer(members)) };
        assert_eq!(value.text_of("a"), Some("x & <y"));
        let items = [Value::Bool(true), Value::text("7"), Value::text("bare"), Value::Nil];
        assert_eq!(value.get("b"), Some(&Value::Array(items.into())));
        assert_eq!(answer("<nil/>"), Ok(Response::Value(Value::Nil)));
        assert_eq!(answer(""), Ok(Response::Value(Value::text(""))));
        let fault = "<methodResponse><fault><value><struct><member><name>faultCode</name><value><int>44</int></value>\
                     </member><member><name>faultString</name><value><string>full</string></value></member></struct>\
                     </value></fault></methodResponse>";
        assert_eq!(response(fault.as_bytes()), Ok(Response::Fault(44, "full".into())));
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        let deep = "<array><data><value>".repeat(100) + &"</value></data></array>".repeat(100);
        for odd in
            ["<int>1</int><int>2</int>", "<thing/>", "<boolean>x</boolean>", &deep, "<struct><x/></struct>"]
        {
            assert!(answer(odd).is_err(), "{odd}");
        }
        let none = [
            "",
            "nothing",
            "<methodResponse>",
            "<?xml?><x/>",
            "<methodResponse><params></params></methodResponse>",
        ];
        for odd in none {
            assert!(response(odd.as_bytes()).is_err(), "{odd}");
        }
        assert!(response(b"<methodResponse>\xff").is_err());
    }

    #[test]
    fn a_call_is_what_was_published() {
        let parameter = Value::Struct(BTreeMap::from([
            ("args".to_owned(), Value::Array(vec![Value::text("1 < 2")])),
            ("command".to_owned(), Value::text("sr_scan\0")),
        ]));
        let text = call("sr_scan", &parameter);
        assert!(text.contains("<methodName>sr_scan</methodName>"), "{text}");
        assert!(text.contains("<string>1 &lt; 2</string>") && !text.contains('\0'), "{text}");
    }
}
