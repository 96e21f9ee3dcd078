//! Reading calls and answers.

use std::collections::BTreeMap;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use tapio_model::{ApiError, Value, datetime};

use super::tokens::{Tag, Token, Tokens};
use crate::limits::{Budget, Malformed, MessageLimits};

/// The bytes of a `base64` value (RFC 4648, section 4): libraries break its lines, and some leave bits behind the last
/// byte.
fn bytes_of(text: &str) -> Option<Vec<u8>> {
    const LENIENT: GeneralPurpose =
        GeneralPurpose::new(&STANDARD, GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true));
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    LENIENT.decode(digits).ok()
}

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// As `VDI.get_record`.
    pub method: String,
    /// In their order, the session first.
    pub params: Vec<Value>,
}

/// An answer as a client reads it: whole numbers are still text.
pub type Response = Result<Value, ApiError>;

fn utf8(bytes: &[u8]) -> Result<&str, Malformed> {
    std::str::from_utf8(bytes)
        .map_err(|error| Malformed(format!("byte {} is not UTF-8", error.valid_up_to())))
}

/// Reads a `methodCall`.
///
/// # Errors
/// What is wrong, and where.
pub fn decode_call(bytes: &[u8], limits: MessageLimits) -> Result<Call, Malformed> {
    let mut reader = Decoder::new(bytes, limits)?;
    reader.tokens.open(Tag::MethodCall)?;
    reader.tokens.open(Tag::MethodName)?;
    let method = reader.tokens.text()?.trim().to_owned();
    let mut params = Vec::new();
    match reader.tokens.element()? {
        // A call without parameters may leave them away altogether.
        Token::Close => {}
        Token::Open(Tag::Params) => {
            params = reader.params()?;
            reader.tokens.close()?;
        }
        _ => return Err(reader.tokens.wrong("params are expected after the method's name")),
    }
    reader.end()?;
    Ok(Call { method, params })
}

/// Reads a `methodResponse`.
///
/// # Errors
/// What is wrong, and where. A `fault` is an answer: an error whose code is `FAULT`.
pub fn decode_response(bytes: &[u8], limits: MessageLimits) -> Result<Response, Malformed> {
    let mut reader = Decoder::new(bytes, limits)?;
    reader.tokens.open(Tag::MethodResponse)?;
    let answer = match reader.tokens.element()? {
        Token::Open(Tag::Fault) => {
            reader.tokens.open(Tag::Value)?;
            let value = reader.value(0)?;
            reader.tokens.close()?;
            let said =
                |key: &str| value.as_map().and_then(|all| all.get(key)).map(text_of).unwrap_or_default();
            Err(ApiError::new("FAULT", [said("faultCode"), said("faultString")]))
        }
        Token::Open(Tag::Params) => {
            let mut params = reader.params()?;
            let (Some(Value::Map(mut answer)), 0) = (params.pop(), params.len()) else {
                return Err(reader.tokens.wrong("an answer is one struct"));
            };
            match answer.remove("Status").as_ref().and_then(Value::as_str) {
                Some("Success") => Ok(answer
                    .remove("Value")
                    .ok_or_else(|| reader.tokens.wrong("an answer of success has a Value"))?),
                Some("Failure") => {
                    let described = answer.remove("ErrorDescription");
                    let mut words =
                        described.as_ref().and_then(Value::as_set).unwrap_or_default().iter().map(text_of);
                    let code = words
                        .next()
                        .ok_or_else(|| reader.tokens.wrong("a failure has an ErrorDescription"))?;
                    Err(ApiError::new(code, words))
                }
                _ => return Err(reader.tokens.wrong("an answer's Status is Success or Failure")),
            }
        }
        _ => return Err(reader.tokens.wrong("an answer has params or a fault")),
    };
    reader.tokens.close()?;
    reader.end()?;
    Ok(answer)
}

fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Int(number) => number.to_string(),
        _ => String::new(),
    }
}

struct Decoder<'a> {
    tokens: Tokens<'a>,
    budget: Budget,
}

impl<'a> Decoder<'a> {
    fn new(bytes: &'a [u8], limits: MessageLimits) -> Result<Self, Malformed> {
        Ok(Self { tokens: Tokens::new(utf8(bytes)?), budget: Budget::new(limits) })
    }

    fn end(&mut self) -> Result<(), Malformed> {
        match self.tokens.element()? {
            Token::End => Ok(()),
            _ => Err(self.tokens.wrong("something follows the message")),
        }
    }

    /// What stands in `params`, and its end.
    fn params(&mut self) -> Result<Vec<Value>, Malformed> {
        let mut params = Vec::new();
        loop {
            match self.tokens.element()? {
                Token::Close => return Ok(params),
                Token::Open(Tag::Param) => {
                    self.tokens.open(Tag::Value)?;
                    params.push(self.value(0)?);
                    self.tokens.close()?;
                }
                _ => return Err(self.tokens.wrong("a param is expected")),
            }
        }
    }

    /// What stands in a `value`, and its end.
    fn value(&mut self, depth: usize) -> Result<Value, Malformed> {
        self.budget.take(depth)?;
        let mut plain = String::new();
        let tag = loop {
            match self.tokens.next()? {
                Token::Text(text) => plain.push_str(&text),
                // Text without a type is a string.
                Token::Close => return Ok(Value::String(plain)),
                Token::Open(tag) if plain.chars().all(char::is_whitespace) => break tag,
                Token::Open(_) => return Err(self.tokens.wrong("a value has both text and a type")),
                Token::End => return Err(self.tokens.wrong("the message ends within a value")),
            }
        };
        let value = self.typed(tag, depth)?;
        self.tokens.close()?;
        Ok(value)
    }

    fn typed(&mut self, tag: Tag, depth: usize) -> Result<Value, Malformed> {
        match tag {
            Tag::Struct => return self.members(depth),
            Tag::Array => return self.array(depth),
            _ => {}
        }
        let text = self.tokens.text()?;
        let word = text.trim();
        let value = match tag {
            Tag::String => return Ok(Value::String(text.into_owned())),
            Tag::Int => word.strip_prefix('+').unwrap_or(word).parse().ok().map(Value::Int),
            Tag::Boolean => match word {
                "1" | "true" => Some(Value::Bool(true)),
                "0" | "false" => Some(Value::Bool(false)),
                _ => None,
            },
            Tag::Double => word.parse().ok().map(Value::Float),
            Tag::DateTime => datetime::parse(word).map(Value::DateTime),
            // XenAPI has no type for bytes: they are taken where they are text.
            Tag::Base64 => bytes_of(word).and_then(|bytes| String::from_utf8(bytes).ok()).map(Value::String),
            Tag::Nil => word.is_empty().then_some(Value::Void),
            _ => return Err(self.tokens.wrong(format_args!("{tag:?} is no type"))),
        };
        match value {
            Some(value) => Ok(value),
            // No text stands for bytes that are none, and nothing is not something.
            None if matches!(tag, Tag::Base64 | Tag::Nil) => {
                let shown: String = word.chars().take(40).collect();
                Err(self.tokens.wrong(format_args!("'{shown}' is no {tag:?}")))
            }
            None => Ok(Value::string(word)),
        }
    }

    /// What stands in a `struct`, and its end.
    fn members(&mut self, depth: usize) -> Result<Value, Malformed> {
        let mut members = BTreeMap::new();
        loop {
            match self.tokens.element()? {
                Token::Close => return Ok(Value::Map(members)),
                Token::Open(Tag::Member) => {
                    self.tokens.open(Tag::Name)?;
                    let name = self.tokens.text()?.into_owned();
                    self.tokens.open(Tag::Value)?;
                    let value = self.value(depth + 1)?;
                    self.tokens.close()?;
                    members.insert(name, value);
                }
                _ => return Err(self.tokens.wrong("a member is expected")),
            }
        }
    }

    /// What stands in an `array`, and its end.
    fn array(&mut self, depth: usize) -> Result<Value, Malformed> {
        self.tokens.open(Tag::Data)?;
        let mut values = Vec::new();
        loop {
            match self.tokens.element()? {
                Token::Close => break,
                Token::Open(Tag::Value) => values.push(self.value(depth + 1)?),
                _ => return Err(self.tokens.wrong("a value is expected")),
            }
        }
        self.tokens.close()?;
        Ok(Value::Set(values))
    }
}
