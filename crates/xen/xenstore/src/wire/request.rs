//! Payloads of requests, both ways.

use super::reply::permissions as permission_strings;
use super::strings::{Pieces, decimal, strings};
use super::{Errno, MessageKind, PERMISSIONS_MAX, Permission, WireError, frame};

/// What can be asked. Paths are as they came: [`crate::Path`] judges them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the words of the specification")]
pub enum Request<'a> {
    /// A command of the daemon's own and its arguments, each with a NUL.
    Control {
        arguments: &'a [u8],
    },
    Directory {
        path: &'a str,
    },
    Read {
        path: &'a str,
    },
    GetPerms {
        path: &'a str,
    },
    /// `depth`: how many levels below the path are of interest; all without.
    Watch {
        path: &'a str,
        token: &'a [u8],
        depth: Option<u32>,
    },
    Unwatch {
        path: &'a str,
        token: &'a [u8],
    },
    TransactionStart,
    TransactionEnd {
        commit: bool,
    },
    Introduce {
        domid: u32,
        gfn: u64,
        port: u32,
    },
    Release {
        domid: u32,
    },
    GetDomainPath {
        domid: u32,
    },
    Write {
        path: &'a str,
        value: &'a [u8],
    },
    Mkdir {
        path: &'a str,
    },
    Rm {
        path: &'a str,
    },
    SetPerms {
        path: &'a str,
        permissions: Vec<Permission>,
    },
    IsDomainIntroduced {
        domid: u32,
    },
    Resume {
        domid: u32,
    },
    SetTarget {
        domid: u32,
        target: u32,
    },
    ResetWatches,
    /// `offset` in the bytes of the list of children.
    DirectoryPart {
        path: &'a str,
        offset: u32,
    },
    GetFeature {
        domid: Option<u32>,
    },
    SetFeature {
        domid: u32,
        value: u32,
    },
    /// Without a quota: the names of all.
    GetQuota {
        domid: Option<u32>,
        quota: Option<&'a str>,
    },
    /// Without a domain: for those that come.
    SetQuota {
        domid: Option<u32>,
        quota: &'a str,
        value: u32,
    },
}

fn small(text: &[u8]) -> Result<u32, Errno> {
    decimal(text).and_then(|number| u32::try_from(number).ok()).ok_or(Errno::EINVAL)
}

fn utf8(text: &[u8]) -> Result<&str, Errno> {
    std::str::from_utf8(text).map_err(|_| Errno::EINVAL)
}

/// Exactly `N` strings.
fn exactly<const N: usize>(payload: &[u8]) -> Result<[&[u8]; N], Errno> {
    let mut found = [&[][..]; N];
    let mut pieces = Pieces::new(payload).ok_or(Errno::EINVAL)?;
    for place in &mut found {
        *place = pieces.next().ok_or(Errno::EINVAL)?;
    }
    if pieces.next().is_some() { Err(Errno::EINVAL) } else { Ok(found) }
}

/// One to three strings (optional ones in front or at the end).
fn up_to_three(payload: &[u8]) -> Result<([&[u8]; 3], usize), Errno> {
    let mut found = [&[][..]; 3];
    let mut count = 0;
    for piece in Pieces::new(payload).ok_or(Errno::EINVAL)? {
        *found.get_mut(count).ok_or(Errno::EINVAL)? = piece;
        count += 1;
    }
    Ok((found, count))
}

/// A string, and all bytes after its NUL.
fn string_and_rest(payload: &[u8]) -> Result<(&str, &[u8]), Errno> {
    let end = payload.iter().position(|byte| *byte == 0).ok_or(Errno::EINVAL)?;
    Ok((utf8(&payload[..end])?, &payload[end + 1..]))
}

impl<'a> Request<'a> {
    /// Reads a request.
    ///
    /// # Errors
    /// What it is to be answered with: `ENOSYS` for a kind that cannot be asked, `EINVAL` for another form.
    pub fn parse(kind: u32, payload: &'a [u8]) -> Result<Self, Errno> {
        let one = || exactly::<1>(payload).map(|[only]| only);
        let path = || one().and_then(utf8);
        let domid = || one().and_then(small);
        Ok(match MessageKind::from_number(kind).ok_or(Errno::ENOSYS)? {
            MessageKind::WatchEvent | MessageKind::Error => return Err(Errno::ENOSYS),
            MessageKind::Control => {
                Pieces::new(payload).filter(|_| !payload.is_empty()).ok_or(Errno::EINVAL)?;
                Self::Control { arguments: payload }
            }
            MessageKind::Directory => Self::Directory { path: path()? },
            MessageKind::Read => Self::Read { path: path()? },
            MessageKind::GetPerms => Self::GetPerms { path: path()? },
            MessageKind::Watch => match up_to_three(payload)? {
                ([path, token, _], 2) => Self::Watch { path: utf8(path)?, token, depth: None },
                ([path, token, depth], 3) => {
                    Self::Watch { path: utf8(path)?, token, depth: Some(small(depth)?) }
                }
                _ => return Err(Errno::EINVAL),
            },
            MessageKind::Unwatch => {
                let [path, token] = exactly(payload)?;
                Self::Unwatch { path: utf8(path)?, token }
            }
            // Their payload is an empty string by the book; it is not looked at.
            MessageKind::TransactionStart => Self::TransactionStart,
            MessageKind::ResetWatches => Self::ResetWatches,
            MessageKind::TransactionEnd => match one()? {
                b"T" => Self::TransactionEnd { commit: true },
                b"F" => Self::TransactionEnd { commit: false },
                _ => return Err(Errno::EINVAL),
            },
            MessageKind::Introduce => {
                let [domid, gfn, port] = exactly(payload)?;
                let gfn = decimal(gfn).ok_or(Errno::EINVAL)?;
                Self::Introduce { domid: small(domid)?, gfn, port: small(port)? }
            }
            MessageKind::Release => Self::Release { domid: domid()? },
            MessageKind::GetDomainPath => Self::GetDomainPath { domid: domid()? },
            MessageKind::Write => {
                let (path, value) = string_and_rest(payload)?;
                Self::Write { path, value }
            }
            MessageKind::Mkdir => Self::Mkdir { path: path()? },
            MessageKind::Rm => Self::Rm { path: path()? },
            MessageKind::SetPerms => {
                let (path, rest) = string_and_rest(payload)?;
                let permissions: Option<Vec<Permission>> = Pieces::new(rest)
                    .ok_or(Errno::EINVAL)?
                    .take(PERMISSIONS_MAX + 1)
                    .map(Permission::parse)
                    .collect();
                let permissions = permissions
                    .filter(|list| (1..=PERMISSIONS_MAX).contains(&list.len()))
                    .ok_or(Errno::EINVAL)?;
                Self::SetPerms { path, permissions }
            }
            MessageKind::IsDomainIntroduced => Self::IsDomainIntroduced { domid: domid()? },
            MessageKind::Resume => Self::Resume { domid: domid()? },
            MessageKind::SetTarget => {
                let [domid, target] = exactly(payload)?;
                Self::SetTarget { domid: small(domid)?, target: small(target)? }
            }
            MessageKind::DirectoryPart => {
                let [path, offset] = exactly(payload)?;
                Self::DirectoryPart { path: utf8(path)?, offset: small(offset)? }
            }
            MessageKind::GetFeature => match up_to_three(payload)? {
                (_, 0) | ([[], ..], 1) => Self::GetFeature { domid: None },
                ([domid, ..], 1) => Self::GetFeature { domid: Some(small(domid)?) },
                _ => return Err(Errno::EINVAL),
            },
            MessageKind::SetFeature => {
                let [domid, value] = exactly(payload)?;
                Self::SetFeature { domid: small(domid)?, value: small(value)? }
            }
            MessageKind::GetQuota => match up_to_three(payload)? {
                (_, 0) | ([[], ..], 1) => Self::GetQuota { domid: None, quota: None },
                ([quota, ..], 1) => Self::GetQuota { domid: None, quota: Some(utf8(quota)?) },
                ([domid, quota, _], 2) => {
                    Self::GetQuota { domid: Some(small(domid)?), quota: Some(utf8(quota)?) }
                }
                _ => return Err(Errno::EINVAL),
            },
            MessageKind::SetQuota => match up_to_three(payload)? {
                ([quota, value, _], 2) => {
                    Self::SetQuota { domid: None, quota: utf8(quota)?, value: small(value)? }
                }
                ([domid, quota, value], 3) => {
                    Self::SetQuota { domid: Some(small(domid)?), quota: utf8(quota)?, value: small(value)? }
                }
                _ => return Err(Errno::EINVAL),
            },
        })
    }

    /// Its kind.
    pub const fn kind(&self) -> MessageKind {
        match self {
            Self::Control { .. } => MessageKind::Control,
            Self::Directory { .. } => MessageKind::Directory,
            Self::Read { .. } => MessageKind::Read,
            Self::GetPerms { .. } => MessageKind::GetPerms,
            Self::Watch { .. } => MessageKind::Watch,
            Self::Unwatch { .. } => MessageKind::Unwatch,
            Self::TransactionStart => MessageKind::TransactionStart,
            Self::TransactionEnd { .. } => MessageKind::TransactionEnd,
            Self::Introduce { .. } => MessageKind::Introduce,
            Self::Release { .. } => MessageKind::Release,
            Self::GetDomainPath { .. } => MessageKind::GetDomainPath,
            Self::Write { .. } => MessageKind::Write,
            Self::Mkdir { .. } => MessageKind::Mkdir,
            Self::Rm { .. } => MessageKind::Rm,
            Self::SetPerms { .. } => MessageKind::SetPerms,
            Self::IsDomainIntroduced { .. } => MessageKind::IsDomainIntroduced,
            Self::Resume { .. } => MessageKind::Resume,
            Self::SetTarget { .. } => MessageKind::SetTarget,
            Self::ResetWatches => MessageKind::ResetWatches,
            Self::DirectoryPart { .. } => MessageKind::DirectoryPart,
            Self::GetFeature { .. } => MessageKind::GetFeature,
            Self::SetFeature { .. } => MessageKind::SetFeature,
            Self::GetQuota { .. } => MessageKind::GetQuota,
            Self::SetQuota { .. } => MessageKind::SetQuota,
        }
    }

    /// Its payload.
    pub fn payload(&self) -> Vec<u8> {
        let number = |number: u64| number.to_string().into_bytes();
        let domain = |domid: &u32| strings([domid.to_string()]);
        match self {
            Self::Control { arguments } => arguments.to_vec(),
            Self::Directory { path }
            | Self::Read { path }
            | Self::GetPerms { path }
            | Self::Mkdir { path }
            | Self::Rm { path } => strings([path]),
            Self::Watch { path, token, depth: None } | Self::Unwatch { path, token } => {
                strings([path.as_bytes(), token])
            }
            Self::Watch { path, token, depth: Some(depth) } => {
                strings([path.as_bytes(), token, depth.to_string().as_bytes()])
            }
            Self::TransactionStart | Self::ResetWatches => vec![0],
            Self::TransactionEnd { commit } => strings([if *commit { "T" } else { "F" }]),
            Self::Introduce { domid, gfn, port } => {
                strings([number((*domid).into()), number(*gfn), number((*port).into())])
            }
            Self::Release { domid }
            | Self::GetDomainPath { domid }
            | Self::IsDomainIntroduced { domid }
            | Self::Resume { domid } => domain(domid),
            Self::Write { path, value } => {
                let mut payload = strings([path]);
                payload.extend_from_slice(value);
                payload
            }
            Self::SetPerms { path, permissions } => {
                let mut payload = strings([path]);
                payload.extend_from_slice(&permission_strings(permissions));
                payload
            }
            Self::SetTarget { domid, target } => strings([domid.to_string(), target.to_string()]),
            Self::DirectoryPart { path, offset } => strings([*path, &offset.to_string()]),
            Self::GetFeature { domid } => domid.as_ref().map_or_else(Vec::new, domain),
            Self::SetFeature { domid, value } => strings([domid.to_string(), value.to_string()]),
            Self::GetQuota { domid, quota } => {
                let mut payload = domid.as_ref().map_or_else(Vec::new, domain);
                payload.extend(strings(*quota));
                payload
            }
            Self::SetQuota { domid, quota, value } => {
                let mut payload = domid.as_ref().map_or_else(Vec::new, domain);
                payload.extend(strings([*quota, &value.to_string()]));
                payload
            }
        }
    }

    /// Appends it to what is to be sent.
    ///
    /// # Errors
    /// It is longer than a message may be.
    pub fn frame(&self, request: u32, transaction: u32, out: &mut Vec<u8>) -> Result<(), WireError> {
        frame(self.kind(), request, transaction, &self.payload(), out)
    }
}
