//! Domains in bytes: for another program to go on with, and on disk.

use std::rc::Rc;

use super::codec::{Damaged, Reader, Writer};
use super::nodes::{get_perms, put_perms};
use crate::domains::{Domain, General};
use crate::quota::{Limits, QUOTAS};
use crate::watches::{ConnId, Watch};

fn put_limits(out: &mut Writer, limits: &Limits) {
    limits.values().iter().for_each(|value| out.u64(*value));
}

fn get_limits(bytes: &mut Reader<'_>) -> Result<Limits, Damaged> {
    let mut limits = Limits::default();
    for (name, ..) in QUOTAS {
        limits.set(name, bytes.u64()?);
    }
    Ok(limits)
}

/// What is about all domains, but for what the program was started with.
pub fn put_general(out: &mut Writer, general: &General) {
    put_limits(out, &general.limits);
    out.count(general.special.len());
    for (name, perms) in &general.special {
        out.bytes(name.as_bytes());
        put_perms(out, perms);
    }
}

pub fn get_general(bytes: &mut Reader<'_>) -> Result<General, Damaged> {
    let mut general = General { limits: get_limits(bytes)?, ..General::default() };
    for _ in 0..bytes.count()? {
        let name = bytes.text()?.to_owned();
        general.special.insert(name, get_perms(bytes)?);
    }
    Ok(general)
}

/// The same for another start of the program.
pub fn put_general_kept(out: &mut Writer, general: &General) {
    put_limits(out, &general.given);
    put_general(out, general);
}

pub fn get_general_kept(bytes: &mut Reader<'_>) -> Result<General, Damaged> {
    let given = get_limits(bytes)?;
    Ok(General { given, ..get_general(bytes)? })
}

/// One domain, with its number.
pub fn put_domain(out: &mut Writer, domid: u32, domain: &Domain) {
    out.u32(domid);
    out.u8(domain.introduced.is_some().into());
    let (gfn, port) = domain.introduced.unwrap_or_default();
    out.u64(gfn);
    out.u32(port);
    out.u32(domain.conn.map_or(u32::MAX, |conn| conn as u32));
    out.u32(domain.target.unwrap_or(u32::MAX));
    out.u8(domain.shutdown.into());
    out.u32(domain.features.unwrap_or(u32::MAX));
    out.u8(domain.limits.is_some().into());
    if let Some(limits) = &domain.limits {
        put_limits(out, limits);
    }
}

pub fn get_domain(bytes: &mut Reader<'_>) -> Result<(u32, Domain), Damaged> {
    let domid = bytes.u32()?;
    let introduced = bytes.u8()? != 0;
    let (gfn, port) = (bytes.u64()?, bytes.u32()?);
    let mut optional = || bytes.u32().map(|value| (value != u32::MAX).then_some(value));
    let (conn, target) = (optional()?, optional()?);
    let shutdown = bytes.u8()? != 0;
    let features = bytes.u32()?;
    let limits = if bytes.u8()? != 0 { Some(get_limits(bytes)?) } else { None };
    let domain = Domain {
        introduced: introduced.then_some((gfn, port)),
        conn: conn.map(|conn| conn as usize),
        target,
        shutdown,
        features: (features != u32::MAX).then_some(features),
        limits,
    };
    Ok((domid, domain))
}

/// The watches of one connection.
pub fn put_watches<'a>(out: &mut Writer, watches: impl Iterator<Item = (&'a Rc<str>, &'a Watch)>) {
    let watches: Vec<_> = watches.collect();
    out.count(watches.len());
    for (path, watch) in watches {
        out.bytes(path.as_bytes());
        out.bytes(&watch.token);
        out.u32(watch.relative as u32);
        out.u32(watch.depth.unwrap_or(u32::MAX));
    }
}

pub fn get_watches(bytes: &mut Reader<'_>, conn: ConnId) -> Result<Vec<(Rc<str>, Watch)>, Damaged> {
    let mut watches = Vec::new();
    for _ in 0..bytes.count()? {
        let path: Rc<str> = bytes.text()?.into();
        let token = bytes.bytes()?.into();
        let relative = bytes.u32()? as usize;
        if !path.is_char_boundary(relative) {
            return Err(Damaged("a watch is none"));
        }
        let depth = bytes.u32()?;
        let depth = (depth != u32::MAX).then_some(depth);
        watches.push((path, Watch { conn, token, relative, depth }));
    }
    Ok(watches)
}
