//! Requests and their answers (`docs/misc/xenstore.txt`).

use std::borrow::Cow;
use std::rc::Rc;

use tapio_xenstore::wire::{Errno, Message, MessageKind, PAYLOAD_MAX, Request, reply::OK};
use tapio_xenstore::{Path, Special};

use super::Server;
use crate::domains::{DOMID_MAX, FEATURES};
use crate::quota::{QUOTAS, Quota};
use crate::store::{Change, Transaction};
use crate::tree::{Caller, Perms};
use crate::watches::{ConnId, Watch};

/// Bytes of a token, at most: an event with a longer one has no room for a path.
const TOKEN_LEN_MAX: usize = 3072;
/// Bytes of an absolute path (`XENSTORE_ABS_PATH_MAX`).
const ABSOLUTE_LEN_MAX: usize = 3072;
/// Bytes of a relative one (`XENSTORE_REL_PATH_MAX`).
const RELATIVE_LEN_MAX: u64 = 2048;

fn privileged(caller: &Caller) -> Result<(), Errno> {
    if caller.privileged { Ok(()) } else { Err(Errno::EACCES) }
}

impl Server {
    /// Carries a request out and answers it; what it is refused with otherwise.
    pub(super) fn answer(&mut self, id: ConnId, message: &Message<'_>) -> Result<(), Errno> {
        let header = message.header;
        let (request, transaction) = (header.request, header.transaction);
        let Some(conn) = self.conn(id) else { return Ok(()) };
        let caller = conn.caller;
        let parsed = parse(header.kind, message.payload)?;
        let kind = parsed.kind();
        let text = match parsed {
            Request::Directory { .. }
            | Request::Read { .. }
            | Request::GetPerms { .. }
            | Request::DirectoryPart { .. } => return self.look(id, message, &parsed),
            Request::Write { .. } | Request::Mkdir { .. } | Request::Rm { .. } | Request::SetPerms { .. } => {
                let changes = self.change(id, transaction, &parsed)?;
                self.reply(id, kind, request, transaction, OK);
                self.fire(&changes);
                return Ok(());
            }
            Request::Watch { path, token, depth } => return self.watch(id, message, path, token, depth),
            Request::Unwatch { path, token } => {
                let path = watch_path(path, &caller)?.0;
                if !self.watches.remove(id, &path, token) {
                    return Err(Errno::ENOENT);
                }
                if let Some(conn) = self.conn_mut(id) {
                    conn.watches -= 1;
                }
                self.note_watch(id, &path, token);
                Cow::Borrowed("OK")
            }
            Request::ResetWatches => {
                self.forget_watches(id);
                if let Some(conn) = self.conn_mut(id) {
                    conn.transactions.clear();
                }
                Cow::Borrowed("OK")
            }
            Request::TransactionStart => self.begin(id, transaction)?.to_string().into(),
            Request::TransactionEnd { commit } => {
                let changes = self.end(id, transaction, commit)?;
                self.reply(id, kind, request, transaction, OK);
                self.fire(&changes);
                return Ok(());
            }
            Request::Control { arguments } => {
                privileged(&caller)?;
                match self.control(id, request, arguments)? {
                    Some(text) => text.into(),
                    None => return Ok(()),
                }
            }
            _ => self.answer_about_domain(&caller, &parsed)?,
        };
        self.reply(id, kind, request, transaction, format!("{text}\0").as_bytes());
        Ok(())
    }

    /// Requests that name a domain, but not a node: the text of the answer.
    fn answer_about_domain(
        &mut self,
        caller: &Caller,
        asked: &Request<'_>,
    ) -> Result<Cow<'static, str>, Errno> {
        let text = match *asked {
            Request::Introduce { domid, gfn, port } => {
                privileged(caller)?;
                self.introduce(domid, gfn, port)?;
                Cow::Borrowed("OK")
            }
            Request::Release { domid } => {
                privileged(caller)?;
                if domid == 0 || domid >= DOMID_MAX {
                    return Err(Errno::EINVAL);
                }
                let domain = self.domain(domid).ok_or(Errno::ENOENT)?;
                domain.introduced.ok_or(Errno::EINVAL)?;
                self.release(domid);
                Cow::Borrowed("OK")
            }
            Request::Resume { domid } => {
                privileged(caller)?;
                self.domains.change(domid).ok_or(Errno::ENOENT)?.shutdown = false;
                Cow::Borrowed("OK")
            }
            Request::GetDomainPath { domid } => format!("/local/domain/{domid}").into(),
            Request::IsDomainIntroduced { domid } => {
                Cow::Borrowed(if self.domains.introduced(domid) { "T" } else { "F" })
            }
            Request::SetTarget { domid, target } => {
                privileged(caller)?;
                self.set_target(domid, target)?;
                Cow::Borrowed("OK")
            }
            Request::GetFeature { domid } => {
                let features = match domid {
                    None => FEATURES,
                    Some(domid) if domid == caller.domid || caller.privileged => {
                        if domid != 0 && self.domain(domid).is_none() {
                            return Err(Errno::ENOENT);
                        }
                        self.domain(domid).and_then(|domain| domain.features).unwrap_or(FEATURES)
                    }
                    Some(_) => return Err(Errno::EACCES),
                };
                features.to_string().into()
            }
            Request::SetFeature { domid, value } => {
                privileged(caller)?;
                if value & !FEATURES != 0 || domid >= DOMID_MAX {
                    return Err(Errno::EINVAL);
                }
                let domain = self.domains.entry(domid);
                if domain.introduced.is_some() {
                    return Err(Errno::EBUSY);
                }
                domain.features = Some(value);
                Cow::Borrowed("OK")
            }
            Request::GetQuota { domid, quota } => {
                let allowed = caller.privileged || domid.is_none() || domid == Some(caller.domid);
                if !allowed {
                    return Err(Errno::EACCES);
                }
                self.quota(domid, quota)?.into()
            }
            Request::SetQuota { domid, quota, value } => {
                privileged(caller)?;
                self.set_quota(domid, quota, value.into())?;
                Cow::Borrowed("OK")
            }
            _ => return Err(Errno::ENOSYS),
        };
        Ok(text)
    }

    /// Requests that change nothing: the answer is written straight from the tree.
    fn look(&mut self, id: ConnId, message: &Message<'_>, asked: &Request<'_>) -> Result<(), Errno> {
        let header = message.header;
        let Self { conns, store, domains, .. } = self;
        let Some(conn) = conns.get_mut(id).and_then(Option::as_mut) else { return Ok(()) };
        let limits = domains.limits(conn.caller.domid);
        let (Request::Directory { path }
        | Request::Read { path }
        | Request::GetPerms { path }
        | Request::DirectoryPart { path, .. }) = asked
        else {
            return Err(Errno::ENOSYS);
        };
        if let Request::GetPerms { path } = asked
            && path.starts_with('@')
        {
            Special::parse(path).ok_or(Errno::EINVAL)?;
            let mut payload = Vec::new();
            let perms = domains.special(path);
            if !perms.of(&conn.caller).has(crate::tree::Access::READ) {
                return Err(Errno::EACCES);
            }
            perms.to_wire(&mut payload);
            conn.out.reply(MessageKind::GetPerms, header.request, header.transaction, &payload);
            return Ok(());
        }
        let path = node_path(path, &conn.caller, limits.get(Quota::PathMax))?;
        let caller = conn.caller;
        let mut view = match header.transaction {
            0 => store.view(&caller, limits),
            number => {
                let open = conn.transactions.iter_mut().find(|(known, _)| *known == number);
                store.view_in(&mut open.ok_or(Errno::ENOENT)?.1, &caller, limits)
            }
        };
        let mut payload = Vec::new();
        let payload = match asked {
            Request::Read { .. } => view.read(&path)?,
            Request::GetPerms { .. } => {
                view.perms(&path)?.to_wire(&mut payload);
                &payload
            }
            Request::DirectoryPart { offset, .. } => {
                let node = view.directory(&path)?;
                payload.extend_from_slice(format!("{}\0", node.list).as_bytes());
                // Room for the empty string that says that this was the rest.
                let room = PAYLOAD_MAX - payload.len() - 1;
                if node.children.list(*offset as usize, room, &mut payload) {
                    payload.push(0);
                }
                &payload
            }
            _ => {
                let children = &view.directory(&path)?.children;
                if children.listing_len() > PAYLOAD_MAX {
                    return Err(Errno::E2BIG);
                }
                children.list(0, PAYLOAD_MAX, &mut payload);
                &payload
            }
        };
        let whole = conn.out.reply(asked.kind(), header.request, header.transaction, payload);
        if whole { Ok(()) } else { Err(Errno::E2BIG) }
    }

    /// Requests that change the tree; what watches are to be told.
    fn change(&mut self, id: ConnId, transaction: u32, asked: &Request<'_>) -> Result<Vec<Change>, Errno> {
        if let Request::SetPerms { path, permissions } = asked
            && path.starts_with('@')
        {
            return self.set_special(id, path, Perms::from_wire(permissions).ok_or(Errno::EINVAL)?);
        }
        let Self { conns, store, domains, .. } = self;
        let Some(conn) = conns.get_mut(id).and_then(Option::as_mut) else { return Ok(Vec::new()) };
        let limits = domains.limits(conn.caller.domid);
        let caller = conn.caller;
        let memory = conn.memory() as u64;
        if !caller.privileged && limits.exceeded(Quota::Memory, memory) {
            return Err(Errno::ENOMEM);
        }
        let (Request::Write { path, .. }
        | Request::Mkdir { path }
        | Request::Rm { path }
        | Request::SetPerms { path, .. }) = asked
        else {
            return Err(Errno::ENOSYS);
        };
        let path = node_path(path, &caller, limits.get(Quota::PathMax))?;
        let mut view = match transaction {
            0 => store.view(&caller, limits),
            number => {
                let open = conn.transactions.iter_mut().find(|(known, _)| *known == number);
                store.view_in(&mut open.ok_or(Errno::ENOENT)?.1, &caller, limits)
            }
        };
        match asked {
            Request::Write { value, .. } => view.write(&path, value),
            Request::Mkdir { .. } => view.mkdir(&path),
            Request::Rm { .. } => view.remove(&path),
            Request::SetPerms { permissions, .. } => {
                view.set_perms(&path, Perms::from_wire(permissions).ok_or(Errno::EINVAL)?)
            }
            _ => Err(Errno::ENOSYS),
        }
    }

    fn set_special(&mut self, id: ConnId, name: &str, perms: Perms) -> Result<Vec<Change>, Errno> {
        Special::parse(name).ok_or(Errno::EINVAL)?;
        if !self.conn(id).is_some_and(|conn| conn.caller.privileged) {
            return Err(Errno::EACCES);
        }
        self.domains.general_mut().special.insert(name.into(), perms);
        Ok(Vec::new())
    }

    fn begin(&mut self, id: ConnId, transaction: u32) -> Result<u32, Errno> {
        if transaction != 0 {
            return Err(Errno::EBUSY);
        }
        let Self { conns, store, domains, .. } = self;
        let Some(conn) = conns.get_mut(id).and_then(Option::as_mut) else { return Err(Errno::EIO) };
        let limits = domains.limits(conn.caller.domid);
        let open = conn.transactions.len() as u64 + 1;
        if !conn.caller.privileged && limits.exceeded(Quota::Transactions, open) {
            return Err(Errno::ENOSPC);
        }
        let number = conn.fresh_transaction();
        conn.transactions.push((number, Transaction::new(&store.live)));
        Ok(number)
    }

    fn end(&mut self, id: ConnId, number: u32, commit: bool) -> Result<Vec<Change>, Errno> {
        let Self { conns, store, domains, .. } = self;
        let Some(conn) = conns.get_mut(id).and_then(Option::as_mut) else { return Err(Errno::EIO) };
        let place = conn.transactions.iter().position(|(known, _)| *known == number).ok_or(Errno::ENOENT)?;
        let (_, transaction) = conn.transactions.swap_remove(place);
        if !commit {
            return Ok(Vec::new());
        }
        store.commit(transaction, &conn.caller, domains.limits(conn.caller.domid))
    }

    fn watch(
        &mut self,
        id: ConnId,
        message: &Message<'_>,
        path: &str,
        token: &[u8],
        depth: Option<u32>,
    ) -> Result<(), Errno> {
        let Some(conn) = self.conn(id) else { return Ok(()) };
        let caller = conn.caller;
        let (whole, relative) = watch_path(path, &caller)?;
        // A special name has its domains below, and nothing below those.
        if token.len() > TOKEN_LEN_MAX || (whole.starts_with('@') && depth.is_some_and(|depth| depth != 1)) {
            return Err(Errno::EINVAL);
        }
        let limits = self.domains.limits(caller.domid);
        if !caller.privileged && limits.exceeded(Quota::Watches, conn.watches + 1) {
            return Err(Errno::E2BIG);
        }
        let watch = Watch { conn: id, token: token.into(), relative, depth };
        if !self.watches.add(&Rc::from(&*whole), watch) {
            return Err(Errno::EEXIST);
        }
        if let Some(conn) = self.conn_mut(id) {
            conn.watches += 1;
        }
        self.note_watch(id, &whole, token);
        let header = message.header;
        self.reply(id, MessageKind::Watch, header.request, header.transaction, OK);
        self.tell(id, path, token);
        Ok(())
    }

    fn set_target(&mut self, domid: u32, target: u32) -> Result<(), Errno> {
        let introduced = |domid: u32| domid != 0 && self.domains.introduced(domid);
        if !introduced(domid) || !introduced(target) {
            return Err(Errno::ENOENT);
        }
        let domain = self.domains.change(domid).ok_or(Errno::ENOENT)?;
        domain.target = Some(target);
        if let Some(conn) = domain.conn.and_then(|id| self.conn_mut(id)) {
            conn.caller.target = Some(target);
        }
        Ok(())
    }

    fn quota(&self, domid: Option<u32>, quota: Option<&str>) -> Result<String, Errno> {
        let limits = match domid {
            None => &self.domains.general.limits,
            Some(domid) if domid == 0 || self.domain(domid).is_some() => self.domains.limits(domid),
            Some(_) => return Err(Errno::ENOENT),
        };
        match quota {
            None => Ok(QUOTAS.map(|quota| quota.0).join(" ")),
            Some(name) => Ok(limits.by_name(name).ok_or(Errno::EINVAL)?.to_string()),
        }
    }

    pub(super) fn set_quota(&mut self, domid: Option<u32>, quota: &str, value: u64) -> Result<(), Errno> {
        let known = match domid {
            None => self.domains.general_mut().limits.set(quota, value),
            Some(domid) => {
                let mut limits = *self.domains.limits(domid);
                let known = limits.set(quota, value);
                self.domains.change(domid).ok_or(Errno::ENOENT)?.limits = Some(limits);
                known
            }
        };
        known.then_some(()).ok_or(Errno::EINVAL)
    }
}

/// Reads a request. The published form of `DIRECTORY_PART` has no NUL after its number.
fn parse(kind: u32, payload: &[u8]) -> Result<Request<'_>, Errno> {
    let parsed = Request::parse(kind, payload);
    if parsed.is_err()
        && kind == MessageKind::DirectoryPart as u32
        && payload.last().is_some_and(u8::is_ascii_digit)
    {
        let end = payload.iter().position(|byte| *byte == 0).ok_or(Errno::EINVAL)?;
        let path = std::str::from_utf8(&payload[..end]).map_err(|_| Errno::EINVAL)?;
        let number = tapio_xenstore::wire::decimal(&payload[end + 1..]).ok_or(Errno::EINVAL)?;
        return Ok(Request::DirectoryPart { path, offset: number.try_into().map_err(|_| Errno::EINVAL)? });
    }
    parsed
}

/// The absolute path of a node; a relative one begins at the caller's home.
fn node_path<'a>(path: &'a str, caller: &Caller, path_max: u64) -> Result<Cow<'a, str>, Errno> {
    let whole = if path.starts_with('/') && plain(path) {
        Cow::Borrowed(path)
    } else {
        Path::resolve(path, caller.domid).map_err(|_| Errno::EINVAL)?.to_string().into()
    };
    if !caller.privileged && path_max != 0 && below_home(&whole) as u64 > path_max {
        return Err(Errno::EINVAL);
    }
    Ok(whole)
}

/// Whether an absolute path is one, without making another of it.
fn plain(path: &str) -> bool {
    let bytes = path.as_bytes();
    bytes.len() <= ABSOLUTE_LEN_MAX
        && (bytes.len() == 1 || bytes.last() != Some(&b'/'))
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'/' | b'_' | b'@'))
        && !bytes.windows(2).any(|pair| pair == b"//")
}

/// Bytes of a path, without `/local/domain/N/`.
fn below_home(path: &str) -> usize {
    let inside = path.strip_prefix("/local/domain/").and_then(|rest| rest.split_once('/'));
    inside
        .filter(|(domid, _)| domid.bytes().all(|byte| byte.is_ascii_digit()))
        .map_or(path.len(), |(_, rest)| rest.len())
}

/// The path of a watch, and how many bytes its events leave off.
fn watch_path<'a>(path: &'a str, caller: &Caller) -> Result<(Cow<'a, str>, usize), Errno> {
    if path.starts_with('@') {
        Special::parse(path).ok_or(Errno::EINVAL)?;
        return Ok((Cow::Borrowed(path), 0));
    }
    let whole = node_path(path, caller, RELATIVE_LEN_MAX)?;
    let relative = whole.len() - path.len();
    Ok((whole, relative))
}
