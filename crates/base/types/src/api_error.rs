//! Errors as clients of XenAPI see them: a code and its parameters.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// A failed call: `ErrorDescription` of XML-RPC, `[code, parameters...]`.
///
/// The codes and the meaning of their parameters are XenAPI's (`tapio_model::errors` lists them with texts).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// As `VDI_IN_USE`.
    pub code: Cow<'static, str>,
    /// What the code's definition says: references, names, texts.
    pub params: Vec<String>,
}

impl ApiError {
    /// A code with its parameters.
    pub fn new<P: Into<String>>(
        code: impl Into<Cow<'static, str>>,
        params: impl IntoIterator<Item = P>,
    ) -> Self {
        Self { code: code.into(), params: params.into_iter().map(Into::into).collect() }
    }

    /// A code that has no parameters.
    pub fn bare(code: &'static str) -> Self {
        Self { code: Cow::Borrowed(code), params: Vec::new() }
    }

    /// Something of ours went wrong; `what` names the object, the cause and the next step.
    pub fn internal(what: impl fmt::Display) -> Self {
        Self::new("INTERNAL_ERROR", [what.to_string()])
    }

    /// A storage driver's error: `SR_BACKEND_FAILURE_<number>` with an empty first parameter, the text, and what
    /// the driver printed (a probe's XML document, or nothing). Numbers: `tapio_sm::errors`.
    pub fn backend(number: u16, text: impl fmt::Display, document: impl Into<String>) -> Self {
        Self::new(format!("SR_BACKEND_FAILURE_{number}"), [String::new(), text.to_string(), document.into()])
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.code, self.params.join(", "))
    }
}

impl std::error::Error for ApiError {}
