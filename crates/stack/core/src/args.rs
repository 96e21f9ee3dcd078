//! The parameters of a call.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};

/// Parameters after the session, checked against the message's types, defaults filled in: the accessors answer an
/// internal error only where a handler and the table disagree.
#[derive(Clone, Debug)]
pub struct Args(pub Vec<Value>);

impl Args {
    /// One parameter.
    ///
    /// # Errors
    /// The handler asks for one that the table does not have.
    pub fn value(&self, at: usize) -> Result<&Value, ApiError> {
        self.0.get(at).ok_or_else(|| ApiError::internal(format!("the message has no parameter {at}")))
    }

    /// A text, a reference, a word.
    ///
    /// # Errors
    /// As [`Self::value`].
    pub fn text(&self, at: usize) -> Result<&str, ApiError> {
        self.value(at)?.as_str().ok_or_else(|| ApiError::internal(format!("parameter {at} is no text")))
    }

    /// A number.
    ///
    /// # Errors
    /// As [`Self::value`].
    pub fn int(&self, at: usize) -> Result<i64, ApiError> {
        self.value(at)?.as_int().ok_or_else(|| ApiError::internal(format!("parameter {at} is no number")))
    }

    /// A truth.
    ///
    /// # Errors
    /// As [`Self::value`].
    pub fn bool(&self, at: usize) -> Result<bool, ApiError> {
        self.value(at)?.as_bool().ok_or_else(|| ApiError::internal(format!("parameter {at} is no boolean")))
    }

    /// A map of texts.
    ///
    /// # Errors
    /// As [`Self::value`].
    pub fn map(&self, at: usize) -> Result<BTreeMap<String, String>, ApiError> {
        Ok(self.value(at)?.to_string_map())
    }

    /// The record that a client sent.
    ///
    /// # Errors
    /// The table and the handler disagree.
    pub(crate) fn record(&self) -> Result<&BTreeMap<String, Value>, ApiError> {
        self.value(0)?.as_map().ok_or_else(|| ApiError::internal("parameter 0 is no record"))
    }
}

/// A text of a record that a client sent.
pub(crate) fn text_in<'a>(record: &'a BTreeMap<String, Value>, field: &str) -> &'a str {
    record.get(field).and_then(Value::as_str).unwrap_or_default()
}
