//! What a call answers: a value, or the parts of a large one.

use std::collections::BTreeMap;
use std::fmt;

use crate::{ApiError, Value};

/// The answer of a call that worked.
#[derive(Debug)]
pub enum Answer {
    /// All of it.
    Whole(Value),
    /// One that is made part by part, as its client takes it.
    Large(Large),
}

/// Member of a batch of events whose members are the parts; it is the first of all in order.
pub const EVENTS: &str = "events";

/// What stands around the parts of a large answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// The one part is the answer.
    One,
    /// The parts are the members of a list.
    List,
    /// The parts are the pairs of a map, in the order of their keys.
    Map,
    /// A map whose member [`EVENTS`] is a list of the parts, and these, which come after it.
    Batch(BTreeMap<String, Value>),
}

/// A key (empty except for [`Shape::Map`]) and a value; an error ends the answer in its middle.
pub type Part = Result<(String, Value), ApiError>;

/// An answer whose parts are made one after the other from data that all answers share. Until they are asked for
/// it costs a few bytes for each object.
pub struct Large {
    /// What stands around the parts.
    pub shape: Shape,
    /// The parts.
    pub parts: Box<dyn Iterator<Item = Part> + Send>,
    /// What it holds while it waits, in bytes.
    pub held_len: usize,
    /// About as many bytes its largest part has.
    pub part_len: usize,
    /// About as many bytes it has in all.
    pub len: usize,
}

impl fmt::Debug for Large {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Large").field("shape", &self.shape).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Answer {
    /// All of it at once.
    ///
    /// # Errors
    /// Those of the parts.
    pub fn whole(self) -> Result<Value, ApiError> {
        let Large { shape, mut parts, .. } = match self {
            Self::Whole(value) => return Ok(value),
            Self::Large(large) => large,
        };
        Ok(match shape {
            Shape::One => parts.next().transpose()?.map_or(Value::Void, |(_, value)| value),
            Shape::List => Value::Set(parts.map(|part| Ok(part?.1)).collect::<Result<_, ApiError>>()?),
            Shape::Map => Value::Map(parts.collect::<Result<_, ApiError>>()?),
            Shape::Batch(mut rest) => {
                let events = parts.map(|part| Ok(part?.1)).collect::<Result<_, ApiError>>()?;
                rest.insert(EVENTS.to_owned(), Value::Set(events));
                Value::Map(rest)
            }
        })
    }
}

impl From<Value> for Answer {
    fn from(value: Value) -> Self {
        Self::Whole(value)
    }
}
