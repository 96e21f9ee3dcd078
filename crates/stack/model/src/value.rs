//! Values as they travel and as they are kept.

use std::collections::BTreeMap;

/// A value of XenAPI. References, enumerations and UUIDs are strings; a record is a map from field names.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// No result: an empty string on the wire.
    Void,
    /// `boolean`.
    Bool(bool),
    /// 64 bits; XML-RPC carries it as a decimal string.
    Int(i64),
    /// `double`.
    Float(f64),
    /// `string`.
    String(String),
    /// Seconds since 1970 UTC; on the wire `20240131T12:34:56Z`.
    DateTime(i64),
    /// A set or a list.
    Set(Vec<Value>),
    /// A map with keys as text, or a record.
    Map(BTreeMap<String, Value>),
}

impl Value {
    /// Text.
    pub fn string(text: impl Into<String>) -> Self {
        Self::String(text.into())
    }

    /// A set of texts.
    pub fn strings<T: Into<String>>(texts: impl IntoIterator<Item = T>) -> Self {
        Self::Set(texts.into_iter().map(Self::string).collect())
    }

    /// A map from text to text.
    pub fn string_map<K: Into<String>, V: Into<String>>(pairs: impl IntoIterator<Item = (K, V)>) -> Self {
        Self::Map(pairs.into_iter().map(|(key, value)| (key.into(), Self::string(value))).collect())
    }

    /// The text, where it is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The number, where it is one.
    pub const fn as_int(&self) -> Option<i64> {
        match self {
            Self::Int(number) => Some(*number),
            _ => None,
        }
    }

    /// The truth, where it is one.
    pub const fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(truth) => Some(*truth),
            _ => None,
        }
    }

    /// The members, where it is a set.
    pub fn as_set(&self) -> Option<&[Value]> {
        match self {
            Self::Set(members) => Some(members),
            _ => None,
        }
    }

    /// The pairs, where it is a map.
    pub const fn as_map(&self) -> Option<&BTreeMap<String, Value>> {
        match self {
            Self::Map(pairs) => Some(pairs),
            _ => None,
        }
    }

    /// A map from text to text, without the pairs whose value is something else.
    pub fn to_string_map(&self) -> BTreeMap<String, String> {
        let pairs = self.as_map().into_iter().flatten();
        pairs.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
    }
}

impl From<bool> for Value {
    fn from(truth: bool) -> Self {
        Self::Bool(truth)
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Float(number)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::String(text)
    }
}
