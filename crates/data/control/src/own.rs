//! Our own protocol: a line of JSON each way, on the socket of the tapdisk protocol.
//!
//! ```text
//!   → {"id":1,"command":"hello","version":1}
//!   ← {"id":1,"ok":{"version":1,"features":["fronts",…],"program":"tapio-disk","program_version":"0.1.0","pid":4711}}
//!   → {"id":2,"command":"front-add","minor":0,"front":{"kind":"nbd-unix","path":"/run/d.sock"}}
//!   ← {"id":2,"ok":{"id":1,"front":{…},"vbd":{"domid":0,"devid":0},"connections":0}}
//!   → {"id":3,"command":"pause","minor":9}
//!   ← {"id":3,"error":{"code":"ENODEV","errno":19,"message":"there is no disk 9","next":"…"}}
//! ```
//!
//! `hello` comes first and says which version and features the process has; commands follow in any number, each
//! answered before the next is read. Descriptors ride on the bytes of the line that names them by index. A field
//! that is not known is an error: a misspelt option must not be taken for none.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::command::Command;
use crate::{ControlError, Errno};

/// Version of the protocol.
pub const PROTOCOL_VERSION: u32 = 1;
/// What this version can do, as `hello` answers it.
pub const FEATURES: &[&str] = &[
    "tapdisk",
    "chain",
    "fronts",
    "nbd-unix",
    "nbd-tcp",
    "nbd-tls",
    "vhost-user",
    "fd-passing",
    "block",
    "histograms",
    "polling",
    "mirror",
    "changed-block-log",
    "snapshot",
    "commit",
    "key",
    "grow",
    "limits",
    "page-pool",
    "blkif",
    "trace",
    "follow",
    "share",
    TRANSFERS,
    SWAP_LEAF,
    SWAP_LOG,
    ROOM,
];
/// The feature of [`crate::command::SetTransfers`].
pub const TRANSFERS: &str = "transfers";
/// The feature of [`crate::command::SwapLeaf`].
pub const SWAP_LEAF: &str = "swap-leaf";
/// The feature of [`crate::command::SwapLeaf`] with a log of changed blocks.
pub const SWAP_LOG: &str = "swap-log";
/// The feature of [`crate::command::LookForRoom`].
pub const ROOM: &str = "room";
/// Longest line, its newline included. A chain of 30 images with long paths fits many times.
pub const LINE_LEN_MAX: usize = 256 * 1024;

/// A command with the number that its answer repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Chosen by the client.
    pub id: u64,
    /// What is asked.
    pub command: Command,
}

/// An error on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// Name of the error number.
    pub code: String,
    /// The number.
    pub errno: i32,
    /// A sentence.
    pub message: String,
    /// What to do next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

impl From<&ControlError> for ErrorBody {
    fn from(error: &ControlError) -> Self {
        Self {
            code: error.errno.name().to_owned(),
            errno: error.errno.raw(),
            message: error.message.clone(),
            next: error.next.clone(),
        }
    }
}

impl From<ErrorBody> for ControlError {
    fn from(body: ErrorBody) -> Self {
        Self { errno: Errno::new(body.errno), message: body.message, next: body.next }
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// Of the request.
    pub id: u64,
    /// What was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ok: Option<Value>,
    /// Or why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

impl Reply {
    /// The line.
    pub fn line(&self) -> String {
        // Only maps with keys that are not strings cannot be written, and there are none.
        let mut line =
            serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"id\":0,\"error\":\"{error}\"}}"));
        line.push('\n');
        line
    }
}

/// The answer to `hello`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of the process.
    pub version: u32,
    /// See [`FEATURES`].
    pub features: Vec<String>,
    /// Its name.
    pub program: String,
    /// Its version.
    pub program_version: String,
    /// Its number.
    pub pid: u32,
}

/// Reads a line without its newline. The number of a request that is not understood is given with the error where
/// it can be found, so that the answer reaches its waiter.
///
/// # Errors
/// `EPROTO` for what is not JSON of this shape.
pub fn parse_request(line: &[u8]) -> std::result::Result<Request, (u64, ControlError)> {
    let bad = |id: u64, why: String| {
        let error = ControlError::new(Errno::EPROTO, format!("the request was not understood: {why}"));
        (id, error.next("compare it with 'tapio disk --help' of the same version"))
    };
    let mut value: Value = serde_json::from_slice(line).map_err(|error| bad(0, error.to_string()))?;
    let Some(fields) = value.as_object_mut() else { return Err(bad(0, "it is not an object".into())) };
    let id = match fields.remove("id") {
        None => 0,
        Some(id) => id.as_u64().ok_or_else(|| bad(0, "its id is not a whole number".into()))?,
    };
    let command = Command::deserialize(value).map_err(|error| bad(id, error.to_string()))?;
    Ok(Request { id, command })
}

#[cfg(test)]
mod tests;
