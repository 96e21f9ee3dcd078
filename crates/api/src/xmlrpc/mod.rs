//! XML-RPC in XenAPI's dialect.
//!
//! 64-bit numbers travel as decimal strings, references and enumerations as strings, an answer is a `struct` of
//! `Status` and either `Value` or `ErrorDescription` (xen-api, "wire protocol"). A decoder meets strings where numbers
//! are meant, so whoever knows the type of a parameter converts it.
//!
//! The reader takes what XML-RPC libraries write: all spellings of whole numbers, `nil`, `base64`, text without a type,
//! white space between elements. Document types and entities of one's own are refused.

mod decode;
mod encode;
mod tokens;

pub use decode::{Call, Response, decode_call, decode_response};
pub use encode::{encode_call, encode_failure, encode_success, encode_value};

#[cfg(test)]
mod tests;
