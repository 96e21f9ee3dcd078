//! Live update: another program goes on in the place of this one, and no client notices.
//!
//! ```text
//!   state ─▶ memfd ─▶ the new program looks whether it can read it (--check-state) ─▶ exec with --restore
//!                     sockets, event channels and the memfd stay open; the process keeps its number
//! ```
//!
//! Until the exec nothing has changed: a program that cannot be run, or that does not understand the state, is an error
//! for the client that asked, and this one serves on.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{MemfdFlags, memfd_create};
use tapio_xen::Channel;
use tapio_xen::sys::EventDevice;

use super::ring::Ring;
use super::rings::{Served, SharedRings, Source};
use super::{Daemon, DomainWatch};
use crate::domains::{Life, Platform};
use crate::state;
use crate::state::codec::{Reader, Writer};
use crate::watches::ConnId;

/// Bytes of a state, at most: what is longer is none of ours.
const STATE_LEN_MAX: u64 = 4 << 30;

/// What was asked for.
#[derive(Clone, Debug, Default)]
pub struct Update {
    /// The connection that asked, and the number of the request, if it was a request.
    pub asked: Option<(ConnId, u32)>,
    /// The program; the one that runs when it is not named.
    pub program: Option<String>,
    /// Its arguments; the ones that this one has when they are not named.
    pub arguments: Option<String>,
}

fn keep_open(fd: RawFd, keep: bool) {
    let flags = if keep { 0 } else { libc::FD_CLOEXEC };
    // SAFETY: no pointers. It fails for descriptors that are not open, of which there are none here.
    unsafe { libc::fcntl(fd, libc::F_SETFD, flags) };
}

fn memfd() -> io::Result<File> {
    Ok(memfd_create(c"tapio-xenstored", MemfdFlags::empty())?.into())
}

impl Daemon {
    /// Where this one's bytes come from and go to.
    fn save_transports(&self, update: &Update, out: &mut Writer) {
        out.u32(update.asked.map_or(u32::MAX, |(conn, _)| conn as u32));
        out.u32(update.asked.map_or(0, |(_, request)| request));
        out.count(self.listeners.len());
        for (path, listener) in &self.listeners {
            out.bytes(path.as_os_str().as_encoded_bytes());
            out.u32(listener.as_raw_fd() as u32);
        }
        out.count(self.sockets.len());
        for (id, socket) in &self.sockets {
            out.u32(*id as u32);
            out.u32(socket.stream.as_raw_fd() as u32);
        }
        // A double's memory is in this process alone: its rings do not go along.
        let rings = self.rings.borrow();
        let real: Vec<_> = rings
            .served
            .iter()
            .filter_map(|(domid, served)| Some((domid, served, served.ring.channel().port()?)))
            .collect();
        out.count(real.len());
        for (domid, served, port) in real {
            out.u32(*domid);
            out.u32(served.conn as u32);
            out.u32(served.ring.channel().raw_fd() as u32);
            out.u32(port);
        }
        let watch = self.domains.as_ref().map(|watch| &watch.channel);
        match watch.and_then(|channel| Some((channel.raw_fd(), channel.port()?))) {
            Some((fd, port)) => {
                out.u8(1);
                out.u32(fd as u32);
                out.u32(port);
            }
            None => out.u8(0),
        }
    }

    /// Lets another program go on. Returns only when it could not: why.
    ///
    /// `own` is the program that runs, `arguments` what it was started with.
    pub fn hand_over(&self, update: &Update, own: &Path, arguments: &[String]) -> String {
        let program = update.program.as_ref().map_or_else(|| own.to_owned(), PathBuf::from);
        let arguments: Vec<String> = update
            .arguments
            .as_ref()
            .map_or_else(|| arguments.to_vec(), |line| line.split_whitespace().map(String::from).collect());
        let mut out = Writer::default();
        state::save(&self.server, &mut out);
        self.save_transports(update, &mut out);
        let written = memfd().and_then(|mut file| {
            file.write_all(&out.0)?;
            file.rewind()?;
            Ok(file)
        });
        let file = match written {
            Ok(file) => file,
            Err(error) => return format!("cannot keep {} bytes of state in memory: {error}", out.0.len()),
        };
        let fd = file.as_raw_fd();
        let looked = Command::new(&program).arg(format!("--check-state={fd}")).stdin(Stdio::null()).output();
        match looked {
            Err(error) => return format!("cannot run {}: {error}", program.display()),
            Ok(output) if !output.status.success() => {
                let said = String::from_utf8_lossy(&output.stderr);
                return format!("{} does not understand this state: {}", program.display(), said.trim());
            }
            Ok(_) => {}
        }
        if let Err(error) = (&file).rewind() {
            return format!("cannot rewind the state: {error}");
        }
        self.server.flush_trace();
        tapio_log::flush(std::time::Duration::from_secs(1));
        let inherited = self.inherited();
        inherited.iter().for_each(|fd| keep_open(*fd, true));
        let error = Command::new(&program).args(&arguments).arg(format!("--restore={fd}")).exec();
        inherited.iter().for_each(|fd| keep_open(*fd, false));
        format!("cannot run {}: {error}", program.display())
    }
}

/// The bytes of an inherited state.
///
/// # Errors
/// The descriptor is none of ours.
pub fn read_state(fd: RawFd) -> Result<Vec<u8>, String> {
    let failed = |error: io::Error| format!("cannot read the state from descriptor {fd}: {error}");
    // SAFETY: the descriptor was named on the command line by the process that left it open for us; if it is not open,
    // every call on it fails.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.rewind().map_err(failed)?;
    if file.metadata().map_err(failed)?.len() > STATE_LEN_MAX {
        return Err(format!("descriptor {fd} holds more than {STATE_LEN_MAX} bytes: that is no state"));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// A daemon that goes on where another one stopped.
#[derive(Debug)]
pub struct Restored {
    /// It.
    pub daemon: Daemon,
    /// The connection that waits for an answer.
    pub asked: Option<(ConnId, u32)>,
    /// The channel by which the hypervisor tells of domains.
    pub domain_events: Option<Channel>,
}

fn inherit(number: u32) -> OwnedFd {
    keep_open(number as RawFd, false);
    // SAFETY: the program before us left it open for this and names it once.
    unsafe { OwnedFd::from_raw_fd(number as RawFd) }
}

impl Restored {
    /// From the bytes of a state.
    ///
    /// # Errors
    /// They are damaged or of another version.
    pub fn new(
        bytes: &[u8],
        platform: Box<dyn Platform>,
        rings: SharedRings,
        mut source: Option<Box<dyn Source>>,
    ) -> Result<Self, String> {
        let mut reader = Reader(bytes);
        let damaged = |what: state::codec::Damaged| format!("the state cannot be read: {}", what.0);
        let server = state::load(&mut reader, platform).map_err(damaged)?;
        let failed = |error: io::Error| format!("cannot go on with what was inherited: {error}");
        let mut daemon = Daemon::new(server, rings.clone()).map_err(failed)?;
        let mut read = || -> Result<_, state::codec::Damaged> {
            let (conn, request) = (reader.u32()?, reader.u32()?);
            let mut listeners = Vec::new();
            for _ in 0..reader.count()? {
                listeners.push((PathBuf::from(reader.text()?), reader.u32()?));
            }
            let mut sockets = Vec::new();
            for _ in 0..reader.count()? {
                sockets.push((reader.u32()? as ConnId, reader.u32()?));
            }
            let mut channels = Vec::new();
            for _ in 0..reader.count()? {
                channels.push((reader.u32()?, reader.u32()? as ConnId, reader.u32()?, reader.u32()?));
            }
            let events = if reader.u8()? != 0 { Some((reader.u32()?, reader.u32()?)) } else { None };
            let asked = (conn != u32::MAX).then_some((conn as ConnId, request));
            Ok((asked, listeners, sockets, channels, events))
        };
        let (asked, listeners, sockets, channels, events) = read().map_err(damaged)?;
        for (path, fd) in listeners {
            daemon.listen(&path, UnixListener::from(inherit(fd))).map_err(failed)?;
        }
        for (id, fd) in sockets {
            daemon.adopt(id, UnixStream::from(inherit(fd))).map_err(failed)?;
        }
        for (domid, conn, fd, port) in channels {
            if domid == 0 {
                // The first programs did not say which connection this was.
                daemon.server.domains.entry(0).conn = Some(conn);
            }
            let channel = Channel::Xen(EventDevice::from_fd(inherit(fd), port));
            let gfn =
                daemon.server.domain(domid).and_then(|domain| domain.introduced).map_or(0, |(gfn, _)| gfn);
            let page = source.as_mut().map(|source| source.page(domid, gfn));
            match page.map(|page| page.and_then(|page| Ring::new(page, channel))) {
                Some(Ok(ring)) => {
                    let mut rings = rings.borrow_mut();
                    rings.served.insert(domid, Served::new(conn, ring));
                    rings.fresh.push(domid);
                }
                Some(Err(error)) => crate::say!("domain {domid} is served no more: {error}"),
                None => {}
            }
        }
        let domain_events = events.map(|(fd, port)| Channel::Xen(EventDevice::from_fd(inherit(fd), port)));
        // Connections whose transport did not come along are over.
        let carried: std::collections::BTreeSet<ConnId> = daemon
            .sockets
            .keys()
            .copied()
            .chain(rings.borrow().served.values().map(|served| served.conn))
            .collect();
        let without: Vec<ConnId> = (0..daemon.server.conns.len())
            .filter(|id| !carried.contains(id))
            .filter(|id| !daemon.server.domains.known().values().any(|domain| domain.conn == Some(*id)))
            .collect();
        without.into_iter().for_each(|id| daemon.server.disconnect(id));
        Ok(Self { daemon, asked, domain_events })
    }

    /// Looks after domains by what was inherited.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn watch_domains(&mut self, life: Box<dyn FnMut(u32) -> Life>) -> io::Result<()> {
        match self.domain_events.take() {
            Some(channel) => self.daemon.watch_domains(DomainWatch { channel, life }),
            None => Ok(()),
        }
    }
}
