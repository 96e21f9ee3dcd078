//! What nodes hold, read with suspicion.

use std::fmt;

use tapio_xenstore::wire::decimal;

/// Something in xenstore is not as it has to be: the device is closed, and the cause written where people look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// As in the `error` nodes of Linux: `EINVAL` is 22.
    pub errno: i32,
    /// A sentence.
    pub text: String,
}

impl Fault {
    /// Nonsense in a node.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self { errno: libc::EINVAL, text: text.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.errno, self.text)
    }
}

/// Values of nodes by their names; what is not there is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Values {
    names: Vec<String>,
    values: Vec<Option<Vec<u8>>>,
}

impl Values {
    /// What was read for these names, in their order.
    pub fn new(names: Vec<String>, values: Vec<Option<Vec<u8>>>) -> Self {
        Self { names, values }
    }

    /// The bytes of a node.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let at = self.names.iter().position(|other| other == name)?;
        self.values.get(at)?.as_deref()
    }

    /// A node as text; what is no UTF-8 is not there.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.bytes(name).and_then(|bytes| std::str::from_utf8(bytes).ok())
    }

    /// A node as a number, which it must be where it is there.
    pub fn number(&self, name: &str) -> Result<Option<u32>, Fault> {
        let Some(bytes) = self.bytes(name) else { return Ok(None) };
        match decimal(bytes).and_then(|number| u32::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(Fault::invalid(format!("{name} holds '{}', which is no number", shown(bytes)))),
        }
    }

    /// A node as a number that has to be there.
    pub fn needed(&self, name: &str) -> Result<u32, Fault> {
        self.number(name)?.ok_or_else(|| Fault {
            errno: libc::ENOENT,
            text: format!("{name} is missing in the front end's directory"),
        })
    }

    /// Whether a node is `1`.
    pub fn flag(&self, name: &str) -> bool {
        self.bytes(name) == Some(b"1")
    }
}

/// The beginning of a value, as it can be shown: a guest may have written it to confuse a reader.
pub fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).escape_default().to_string()
}
