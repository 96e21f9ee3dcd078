//! XML-RPC in XenAPI's dialect.
//!
//! 64-bit numbers travel as decimal strings, references and enumerations as strings, an answer is a `struct` of
//! `Status` and either `Value` or `ErrorDescription` (xen-api, "wire protocol"). A decoder meets strings where numbers
//! are meant, so the caller, which knows the type of a parameter, converts it.
//!
//! A value of a type that it is not (a date that is none, a number of letters) is read as text: a message that looks
//! at it refuses it by name, and one that does not, as a constructor with the fields that it ignores, never sees
//! it. Bytes that are no call at all are answered by a fault.
//!
//! The reader takes what XML-RPC libraries write: all spellings of whole numbers, `nil`, `base64`, text without a type,
//! white space between elements. Document types and entities of one's own are refused.

mod decode;
pub(crate) mod encode;
mod tokens;

pub use decode::{Call, Response, decode_call, decode_response};
pub use encode::{encode_call, encode_failure, encode_fault, encode_success};

#[cfg(test)]
mod tests;
