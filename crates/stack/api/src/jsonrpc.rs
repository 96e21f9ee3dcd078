//! JSON-RPC 1.0 and 2.0 as XenAPI speaks them.
//!
//! The two differ in their envelope: 1.0 has `result` and `error` side by side, the error being `[code, params...]`;
//! 2.0 has one of them, the error being `{code: 1, message: CODE, data: [params]}`, and knows batches and calls that
//! want no answer.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Deserializer, Serialize, Serializer};
use tapio_model::{ApiError, Value};

use crate::limits::{Budget, Malformed, MessageLimits};
use tapio_model::datetime;

/// Calls in one batch.
pub const BATCH_LEN_MAX: usize = 256;

/// Which envelope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Without a member `jsonrpc`.
    V1,
    /// With `"jsonrpc": "2.0"`.
    V2,
}

/// What the caller tells answers apart by; absent where it wants none.
pub type Id = Option<Value>;

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// As `VDI.get_record`.
    pub method: String,
    /// In their order, the session first.
    pub params: Vec<Value>,
    /// To be repeated in the answer.
    pub id: Id,
    /// Envelope of the answer.
    pub version: Version,
}

/// A request that is JSON but no call.
#[derive(Clone, Debug, PartialEq)]
pub struct Invalid {
    /// What it lacks.
    pub why: String,
    /// To be repeated in the answer.
    pub id: Id,
    /// Envelope of the answer.
    pub version: Version,
}

/// What a body holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// One request.
    One(Result<Call, Invalid>),
    /// Several, answered together.
    Batch(Vec<Result<Call, Invalid>>),
}

/// Reads a request or a batch.
///
/// # Errors
/// It is no JSON, or beyond the limits.
pub fn decode(bytes: &[u8], limits: MessageLimits) -> Result<Body, Malformed> {
    match decode_value(bytes, limits)? {
        Value::Set(calls) if calls.is_empty() => Ok(Body::One(Err(Invalid {
            why: "the batch is empty".into(),
            id: Some(Value::Void),
            version: Version::V2,
        }))),
        Value::Set(calls) if calls.len() > BATCH_LEN_MAX => {
            Err(Malformed(format!("the batch has more than {BATCH_LEN_MAX} calls")))
        }
        Value::Set(calls) => Ok(Body::Batch(calls.into_iter().map(call).collect())),
        one => Ok(Body::One(call(one))),
    }
}

/// Reads any JSON. Whole numbers are [`Value::Int`], other numbers [`Value::Float`], `null` is [`Value::Void`].
///
/// # Errors
/// It is no JSON, or beyond the limits.
pub fn decode_value(bytes: &[u8], limits: MessageLimits) -> Result<Value, Malformed> {
    let mut budget = Budget::new(limits);
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let read = Seed { budget: &mut budget, depth: 0 }.deserialize(&mut deserializer);
    let value = read.map_err(|error| Malformed(error.to_string()))?;
    deserializer.end().map_err(|error| Malformed(error.to_string()))?;
    Ok(value)
}

fn call(value: Value) -> Result<Call, Invalid> {
    let invalid = |why: &str, id: Id, version| Invalid { why: why.into(), id, version };
    let Value::Map(mut members) = value else {
        return Err(invalid("a request is an object", Some(Value::Void), Version::V2));
    };
    let version = match members.get("jsonrpc").and_then(Value::as_str) {
        Some("2.0") => Version::V2,
        _ => Version::V1,
    };
    let id = members.remove("id");
    if matches!(id, Some(Value::Set(_) | Value::Map(_))) {
        return Err(invalid("an id is text or a number", Some(Value::Void), version));
    }
    let Some(Value::String(method)) = members.remove("method") else {
        return Err(invalid("a request has a method, which is text", id.or(Some(Value::Void)), version));
    };
    let params = match members.remove("params") {
        None | Some(Value::Void) => Vec::new(),
        Some(Value::Set(params)) => params,
        Some(_) => {
            return Err(invalid(
                "params are a list in the order of the documentation",
                id.or(Some(Value::Void)),
                version,
            ));
        }
    };
    // Only 2.0 knows calls that want no answer.
    let id = match version {
        Version::V1 => id.or(Some(Value::Void)),
        Version::V2 => id,
    };
    Ok(Call { method, params, id, version })
}

struct Seed<'a> {
    budget: &'a mut Budget,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.budget.take(self.depth).map_err(D::Error::custom)?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of XenAPI")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Void)
    }

    fn visit_bool<E>(self, truth: bool) -> Result<Value, E> {
        Ok(Value::Bool(truth))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Int(number))
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Value, E> {
        let fits =
            i64::try_from(number).map_err(|_| E::custom(format_args!("{number} needs more than 63 bits")))?;
        Ok(Value::Int(fits))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(Value::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::string(text))
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(Value::String(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        let depth = self.depth + 1;
        while let Some(value) = members.next_element_seed(Seed { budget: &mut *self.budget, depth })? {
            values.push(value);
        }
        Ok(Value::Set(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut values = BTreeMap::new();
        let depth = self.depth + 1;
        while let Some(name) = members.next_key::<String>()? {
            values.insert(name, members.next_value_seed(Seed { budget: &mut *self.budget, depth })?);
        }
        Ok(Value::Map(values))
    }
}

/// A value as JSON. Nothing is the empty text, as XenAPI wants; numbers that JSON has no way to write are texts.
struct Json<'a>(&'a Value);

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Void => serializer.serialize_str(""),
            Value::Bool(truth) => serializer.serialize_bool(*truth),
            Value::Int(number) => serializer.serialize_i64(*number),
            Value::Float(number) if number.is_finite() => serializer.serialize_f64(*number),
            Value::Float(number) => serializer.collect_str(number),
            Value::String(text) => serializer.serialize_str(text),
            Value::DateTime(at) => serializer.serialize_str(&datetime::format(*at)),
            Value::Set(members) => {
                let mut list = serializer.serialize_seq(Some(members.len()))?;
                members.iter().try_for_each(|member| list.serialize_element(&Json(member)))?;
                list.end()
            }
            Value::Map(members) => {
                let mut map = serializer.serialize_map(Some(members.len()))?;
                members.iter().try_for_each(|(name, member)| map.serialize_entry(name, &Json(member)))?;
                map.end()
            }
        }
    }
}

/// An id as it came: nothing is `null` here.
struct JsonId<'a>(&'a Id);

impl Serialize for JsonId<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            None | Some(Value::Void) => serializer.serialize_unit(),
            Some(id) => Json(id).serialize(serializer),
        }
    }
}

/// A value as JSON text.
pub fn encode_value(value: &Value) -> String {
    text(&Json(value))
}

/// Maps have keys that are texts and nothing here fails, so there is always a text.
fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| format!("\"{error}\""))
}

#[derive(Serialize)]
struct Answer1<'a> {
    result: Option<Json<'a>>,
    error: Option<Vec<&'a str>>,
    id: JsonId<'a>,
}

#[derive(Serialize)]
struct Fault2<'a> {
    code: i64,
    message: &'a str,
    data: &'a [String],
}

#[derive(Serialize)]
struct Answer2<'a> {
    jsonrpc: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Json<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Fault2<'a>>,
    id: JsonId<'a>,
}

/// The answer to a call.
pub fn encode_answer(version: Version, id: &Id, answer: &Result<Value, ApiError>) -> String {
    let id = JsonId(id);
    match (version, answer) {
        (Version::V1, Ok(value)) => text(&Answer1 { result: Some(Json(value)), error: None, id }),
        (Version::V1, Err(error)) => {
            let words = std::iter::once(&*error.code).chain(error.params.iter().map(String::as_str));
            text(&Answer1 { result: None, error: Some(words.collect()), id })
        }
        (Version::V2, Ok(value)) => {
            text(&Answer2 { jsonrpc: "2.0", result: Some(Json(value)), error: None, id })
        }
        (Version::V2, Err(error)) => {
            let error = Fault2 { code: 1, message: &error.code, data: &error.params };
            text(&Answer2 { jsonrpc: "2.0", result: None, error: Some(error), id })
        }
    }
}

/// A text as JSON.
pub(crate) fn encode_text(inner: &str) -> String {
    text(&inner)
}

/// What comes before the result of an answer of success.
pub(crate) const fn success_start(version: Version) -> &'static str {
    match version {
        Version::V1 => "{\"result\":",
        Version::V2 => "{\"jsonrpc\":\"2.0\",\"result\":",
    }
}

/// What comes behind it.
pub(crate) fn success_end(version: Version, id: &Id) -> String {
    let error = if version == Version::V1 { ",\"error\":null" } else { "" };
    format!("{error},\"id\":{}}}", text(&JsonId(id)))
}

/// The answer to a request that is no call.
pub fn encode_invalid(invalid: &Invalid) -> String {
    match invalid.version {
        Version::V1 => {
            let error = ApiError::new("INTERNAL_ERROR", [invalid.why.as_str()]);
            encode_answer(Version::V1, &invalid.id, &Err(error))
        }
        Version::V2 => fault(-32600, "Invalid Request", &invalid.why, &invalid.id),
    }
}

/// The answer to what is no JSON.
pub fn encode_malformed(malformed: &Malformed) -> String {
    fault(-32700, "Parse error", &malformed.0, &None)
}

fn fault(code: i64, message: &str, why: &str, id: &Id) -> String {
    let error = Fault2 { code, message, data: &[why.to_owned()] };
    text(&Answer2 { jsonrpc: "2.0", result: None, error: Some(error), id: JsonId(id) })
}

/// Answers of a batch, each as [`encode_answer`] wrote it.
pub fn encode_batch(answers: &[String]) -> String {
    format!("[{}]", answers.join(","))
}

#[cfg(test)]
mod tests;
