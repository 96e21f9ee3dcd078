//! Payloads of answers, both ways.

pub use super::strings::strings;
use super::{Errno, MessageKind, PERMISSIONS_MAX, Permission, Pieces, WireError};

/// What a request without a result is answered with.
pub const OK: &[u8] = b"OK\0";

/// Permissions, as GET_PERMS answers them.
pub fn permissions(list: &[Permission]) -> Vec<u8> {
    strings(list.iter().map(ToString::to_string))
}

/// A refusal.
pub fn error(errno: Errno) -> Vec<u8> {
    strings([errno.name()])
}

/// An event of a watch.
pub fn event(path: &str, token: &[u8]) -> Vec<u8> {
    strings([path.as_bytes(), token])
}

/// The answer to DIRECTORY_PART: a number that changes with the children, then as many names from byte `offset` of
/// their list on as fit; an empty name ends the list.
///
/// `children` are all names with a NUL each. `None` if `offset` is beyond their end.
pub fn directory_part(generation: u64, children: &[u8], offset: usize) -> Option<Vec<u8>> {
    let rest = children.get(offset..)?;
    let mut payload = strings([generation.to_string()]);
    let room = super::PAYLOAD_MAX.saturating_sub(payload.len());
    if rest.len() < room {
        payload.extend_from_slice(rest);
        payload.push(0);
        return Some(payload);
    }
    // A name that is cut would be no name: the part ends after the last that fits.
    let end = rest[..room].iter().rposition(|byte| *byte == 0).map_or(0, |last| last + 1);
    payload.extend_from_slice(&rest[..end]);
    Some(payload)
}

/// Reads a list of strings.
///
/// # Errors
/// It does not end with a NUL, or is not UTF-8.
pub fn read_strings(kind: MessageKind, payload: &[u8]) -> Result<Vec<String>, WireError> {
    let pieces = Pieces::new(payload).ok_or(WireError::Malformed(kind))?;
    pieces.map(|piece| text(kind, piece)).collect()
}

/// Reads one string, whose NUL may be missing: some daemons leave it out.
///
/// # Errors
/// There is more than one, or it is not UTF-8.
pub fn read_text(kind: MessageKind, payload: &[u8]) -> Result<String, WireError> {
    let body = payload.strip_suffix(&[0]).unwrap_or(payload);
    if body.contains(&0) {
        return Err(WireError::Malformed(kind));
    }
    text(kind, body)
}

/// Reads permissions.
///
/// # Errors
/// One of them is none, or there are none at all.
pub fn read_permissions(payload: &[u8]) -> Result<Vec<Permission>, WireError> {
    let malformed = WireError::Malformed(MessageKind::GetPerms);
    let list: Option<Vec<Permission>> =
        Pieces::new(payload).ok_or(malformed)?.take(PERMISSIONS_MAX + 1).map(Permission::parse).collect();
    list.filter(|list| (1..=PERMISSIONS_MAX).contains(&list.len())).ok_or(malformed)
}

/// Reads an event: path and token.
///
/// # Errors
/// It has not two strings, or the path is not UTF-8.
pub fn read_event(payload: &[u8]) -> Result<(String, Vec<u8>), WireError> {
    let malformed = WireError::Malformed(MessageKind::WatchEvent);
    let mut pieces = Pieces::new(payload).ok_or(malformed)?;
    // A third piece is allowed: newer daemons may add one.
    match (pieces.next(), pieces.next()) {
        (Some(path), Some(token)) => Ok((text(MessageKind::WatchEvent, path)?, token.to_vec())),
        _ => Err(malformed),
    }
}

/// Reads a part of a directory: its generation, the bytes of names, and whether it is the last part.
///
/// # Errors
/// There is no generation, or a name is cut.
pub fn read_directory_part(payload: &[u8]) -> Result<(&[u8], &[u8], bool), WireError> {
    let malformed = WireError::Malformed(MessageKind::DirectoryPart);
    let end = payload.iter().position(|byte| *byte == 0).ok_or(malformed)?;
    let (generation, rest) = (&payload[..end], &payload[end + 1..]);
    match rest {
        [] => Err(malformed),
        [0] => Ok((generation, &[], true)),
        [names @ .., 0, 0] => Ok((generation, &rest[..=names.len()], true)),
        [.., 0] => Ok((generation, rest, false)),
        _ => Err(malformed),
    }
}

fn text(kind: MessageKind, bytes: &[u8]) -> Result<String, WireError> {
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| WireError::Malformed(kind))
}
