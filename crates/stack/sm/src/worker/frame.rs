//! Messages as bytes: the length of what follows (four bytes, the lowest first), then JSON.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// No message is longer. A scan comes in pieces, all else is short.
pub const FRAME_LEN_MAX: usize = 4 << 20;

const HEAD_LEN: usize = 4;

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameError(String);

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for FrameError {}

/// A message as it is sent.
///
/// # Errors
/// It is too long, or has a path that is no text.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut bytes = vec![0; HEAD_LEN];
    serde_json::to_writer(&mut bytes, message).map_err(|error| FrameError(error.to_string()))?;
    let len = bytes.len() - HEAD_LEN;
    match u32::try_from(len) {
        Ok(head) if len <= FRAME_LEN_MAX => {
            bytes[..HEAD_LEN].copy_from_slice(&head.to_le_bytes());
            Ok(bytes)
        }
        _ => Err(FrameError(format!("a message of {len} bytes is longer than {FRAME_LEN_MAX}"))),
    }
}

/// Bytes that have come, and the messages in them.
#[derive(Debug, Default)]
pub struct Frames {
    bytes: Vec<u8>,
}

impl Frames {
    /// More have come.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message, once it is whole.
    ///
    /// # Errors
    /// The bytes are none; nothing that follows them can be one either.
    pub fn take<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let Some(head) = self.bytes.first_chunk::<HEAD_LEN>() else { return Ok(None) };
        let len = u32::from_le_bytes(*head) as usize;
        if len > FRAME_LEN_MAX {
            return Err(FrameError(format!(
                "a message of {len} bytes is announced, {FRAME_LEN_MAX} are allowed"
            )));
        }
        let Some(text) = self.bytes.get(HEAD_LEN..HEAD_LEN + len) else { return Ok(None) };
        let message = serde_json::from_slice(text).map_err(|error| FrameError(error.to_string()))?;
        self.bytes.drain(..HEAD_LEN + len);
        Ok(Some(message))
    }

    /// Whether nothing waits to be taken.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}
