//! The server: a socket, one front end on it at a time, a control thread for both.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tapio_block::DiskHandle;
use tapio_sys::poll::{self, PollFd, PollFlags};

use super::Log;
use super::blk;
use super::channel::{Channel, ChannelError};
use super::device::RemoteDevice;
use super::event::{Notifier, eventfd};
use super::message::{Header, id};
use super::session::{Refusal, Session, SessionConfig};
use super::vring::QUEUE_SIZE_MAX;

/// Queues of a device, at most.
pub const QUEUES_MAX: u16 = 64;

/// What a server offers.
#[derive(Clone)]
pub struct VhostUserOptions {
    /// Queues, 1 to 64.
    pub queues: u16,
    /// Descriptors of a queue, at most; the front end chooses. A power of two.
    pub queue_size_max: u16,
    /// Refuse everything that changes the disk. A disk that is read-only itself is always offered so.
    pub read_only: bool,
    /// The identity that the guest can read; its first 20 bytes.
    pub serial: String,
    /// Where a line goes that an operator should see: a connection that ended badly, a queue that broke.
    pub log: Log,
}

impl Default for VhostUserOptions {
    fn default() -> Self {
        Self {
            queues: 1,
            queue_size_max: 1024,
            read_only: false,
            serial: String::new(),
            log: Arc::new(|line| eprintln!("vhost-user: {line}")),
        }
    }
}

impl fmt::Debug for VhostUserOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostUserOptions")
            .field("queues", &self.queues)
            .field("queue_size_max", &self.queue_size_max)
            .field("read_only", &self.read_only)
            .field("serial", &self.serial)
            .finish_non_exhaustive()
    }
}

/// Where a server listens.
#[derive(Debug)]
pub enum Listen<'a> {
    /// A path to bind, readable and writable for the owner alone. A socket file without a server is replaced;
    /// the path is removed at the end.
    Path(&'a Path),
    /// A UNIX stream socket that listens already.
    Socket(OwnedFd),
}

/// How a server is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VhostUserState {
    /// A front end is connected.
    pub connected: bool,
    /// The feature bits that it agreed to.
    pub features: u64,
    /// Queues that run.
    pub queues_running: usize,
    /// Connections taken so far.
    pub connections: u64,
    /// Why the last connection ended, unless it was closed in good order.
    pub last_error: Option<String>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<VhostUserState>,
}

impl Shared {
    fn update(&self, change: impl FnOnce(&mut VhostUserState)) {
        change(&mut self.state.lock());
    }
}

/// Notifies the front end that the configuration space has changed. Does nothing if it takes no requests from us.
fn config_changed(backend: &mut Option<Channel>) {
    let header = Header::request(id::BACKEND_CONFIG_CHANGE, 0, false);
    if backend.as_ref().is_some_and(|channel| channel.send(header, &[], &[]).is_err()) {
        *backend = None;
    }
}

/// A vhost-user-blk device of a disk, on a socket.
pub struct VhostUserServer {
    shared: Arc<Shared>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    bound: Option<(PathBuf, u64)>,
}

impl fmt::Debug for VhostUserServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostUserServer").field("state", &self.state()).finish_non_exhaustive()
    }
}

impl VhostUserServer {
    /// Serves the disk behind `remote` to one front end after the other.
    ///
    /// Fails when the options make no sense or the path cannot be bound.
    pub fn listen(listen: Listen<'_>, options: VhostUserOptions, remote: DiskHandle) -> io::Result<Self> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        if options.queues == 0 || options.queues > QUEUES_MAX {
            return Err(invalid(format!("{} queues: 1 to {QUEUES_MAX} are possible", options.queues)));
        }
        let size = options.queue_size_max;
        if !size.is_power_of_two() || size > QUEUE_SIZE_MAX {
            return Err(invalid(format!(
                "queues of {size} descriptors: a power of two up to 32768 is possible"
            )));
        }
        let (listener, bound) = match listen {
            Listen::Path(path) => {
                let listener = bind(path).map_err(|error| {
                    io::Error::new(error.kind(), format!("{}: cannot listen: {error}", path.display()))
                })?;
                let inode = fs::symlink_metadata(path)?.ino();
                (listener, Some((path.to_owned(), inode)))
            }
            Listen::Socket(fd) => (UnixListener::from(fd), None),
        };
        // The wait for a front end is a poll on two descriptors; accepting must not wait again.
        listener.set_nonblocking(true)?;
        let stop = eventfd()?;
        let stop_seen = stop.try_clone()?;
        let shared = Arc::new(Shared::default());
        let server = Server { listener, stop: stop_seen, shared: Arc::clone(&shared), options, remote };
        let thread = std::thread::Builder::new()
            .name("vhost-user".to_owned())
            .stack_size(256 << 10)
            .spawn(move || server.run())?;
        Ok(Self { shared, stop, thread: Some(thread), bound })
    }

    /// How the server is doing.
    pub fn state(&self) -> VhostUserState {
        self.shared.state.lock().clone()
    }

    /// Ends the connection, if there is one, after its requests in flight were answered; stops listening.
    pub fn close(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if let Ok(stop) = self.stop.try_clone() {
            // An event counter that is full is readable too.
            let _ = File::from(stop).write(&1u64.to_ne_bytes());
        }
        // A panic of the control thread was reported by the panic hook; here it only means that the thread is over.
        let _ = thread.join();
        if let Some((path, inode)) = self.bound.take() {
            // Only our own socket is removed: a successor may have bound the path already.
            if fs::symlink_metadata(&path).is_ok_and(|found| found.ino() == inode) {
                let _ = fs::remove_file(&path);
            }
        }
    }
}

impl Drop for VhostUserServer {
    fn drop(&mut self) {
        self.end();
    }
}

/// The mode of a socket in this directory: for the user that made it. A directory with the set-group-ID bit hands its
/// group on to what is made in it, and thereby allows the group as well: guests that run as users of their own reach
/// the sockets of every process that comes to serve them.
pub fn mode_in(dir: Option<&Path>) -> u32 {
    let shares = dir
        .and_then(|dir| fs::metadata(dir).ok())
        .is_some_and(|data| data.permissions().mode() & libc::S_ISGID != 0);
    if shares { 0o660 } else { 0o600 }
}

/// Binds a path so that it is never visible with wider permissions than it is to have.
fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path exists and is not a socket"));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process serves this socket"));
        }
    }
    let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    name.push(format!(".{}", std::process::id()));
    let fresh = path.with_file_name(name);
    let listener = UnixListener::bind(&fresh)?;
    let placed = fs::set_permissions(&fresh, fs::Permissions::from_mode(mode_in(path.parent())))
        .and_then(|()| fs::rename(&fresh, path));
    if let Err(error) = placed {
        // The error that matters is the first one.
        let _ = fs::remove_file(&fresh);
        return Err(error);
    }
    Ok(listener)
}

/// The control thread's own view.
struct Server {
    listener: UnixListener,
    stop: OwnedFd,
    shared: Arc<Shared>,
    options: VhostUserOptions,
    remote: DiskHandle,
}

impl Server {
    fn run(self) {
        while let Some(stream) = self.accept() {
            self.shared.update(|state| {
                state.connected = true;
                state.connections += 1;
                state.last_error = None;
            });
            let ended = self.serve(stream);
            self.shared.update(|state| {
                (state.connected, state.features, state.queues_running) = (false, 0, 0);
                state.last_error.clone_from(&ended);
            });
            if let Some(why) = ended {
                (self.options.log)(&format!("connection ended: {why}"));
            }
        }
    }

    /// Waits for the next front end; none when the server is to stop.
    fn accept(&self) -> Option<UnixStream> {
        loop {
            let mut polled =
                [PollFd::new(&self.listener, PollFlags::IN), PollFd::new(&self.stop, PollFlags::IN)];
            let _ = poll::any(&mut polled, None);
            if !polled[1].revents().is_empty() {
                return None;
            }
            if !polled[0].revents().is_empty() {
                match self.listener.accept() {
                    Ok((stream, _)) => return Some(stream),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        (self.options.log)(&format!("cannot take a connection: {error}"));
                        // Out of descriptors, most likely: trying again at once would only burn time.
                        std::thread::sleep(std::time::Duration::from_millis(100));
                    }
                }
            }
        }
    }

    /// Waits until there is something to receive; or news for the front end, which is taken and answered by `true`.
    fn wait(&self, channel: &Channel, mut news: &File) -> bool {
        let read = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut polled = [read(news.as_fd()), read(channel.as_fd()), read(self.stop.as_fd())];
        let _ = poll::any(&mut polled, None);
        // Resets the counter; one that was not readable says so.
        !polled[0].revents().is_empty() && news.read(&mut [0; 8]).is_ok()
    }

    /// Serves one front end to its end. Gives the reason, unless it is a good one.
    fn serve(&self, stream: UnixStream) -> Option<String> {
        if let Err(error) = stream.set_nonblocking(false) {
            return Some(error.to_string());
        }
        let channel = Channel::new(stream.into());
        let options = &self.options;
        let queues = options.queues;
        let news = match eventfd() {
            Ok(news) => news,
            Err(error) => return Some(format!("no event descriptor: {error}")),
        };
        let signal = news.try_clone().map_err(|error| error.to_string());
        let signal = match signal.and_then(|fd| Notifier::new(fd).map_err(str::to_owned)) {
            Ok(signal) => signal,
            Err(error) => return Some(format!("no event descriptor: {error}")),
        };
        let log = Arc::clone(&options.log);
        let data = match RemoteDevice::attach(self.remote.clone(), queues.into(), signal, log) {
            Ok(data) => data,
            Err(error) => return Some(error.to_string()),
        };
        let geometry = match super::device::DataSide::geometry(&data) {
            Ok(geometry) => geometry,
            Err(error) => return Some(error.to_string()),
        };
        let config = SessionConfig {
            queues,
            queue_size_max: options.queue_size_max,
            read_only: options.read_only || geometry.read_only,
            serial: blk::serial_bytes(&options.serial),
        };
        let mut session = Session::new(data, config);
        let ended = self.talk(&channel, &File::from(news), &mut session);
        match session.data().detach() {
            Ok(drained) if !drained => {
                (options.log)("requests of a front end that is gone do not end; their storage is stuck");
            }
            Ok(_) => {}
            Err(error) => return Some(error.to_string()),
        }
        ended.err()
    }

    fn talk(
        &self,
        channel: &Channel,
        news: &File,
        session: &mut Session<RemoteDevice>,
    ) -> Result<(), String> {
        // The front end's socket for our own requests.
        let mut backend = None;
        loop {
            if self.wait(channel, news) {
                config_changed(&mut backend);
                continue;
            }
            let (header, message, fds) = match channel.receive(self.stop.as_fd()) {
                Ok(received) => received,
                Err(ChannelError::Closed | ChannelError::Stopped) => return Ok(()),
                Err(error) => return Err(error.to_string()),
            };
            let answer = session.handle(message, fds);
            // Looked at afterwards: User-mode Linux asks for the answer to the very message that allows answers.
            let wants_ack = header.needs_reply() && session.acknowledges();
            let sent = match answer {
                Ok(Some(reply)) => {
                    let fds: Vec<_> = reply.fd.iter().map(AsFd::as_fd).collect();
                    let head = Header::reply(header.request, reply.payload.len() as u32);
                    channel.send(head, &reply.payload, &fds)
                }
                Ok(None) if wants_ack => acknowledge(channel, header, 0),
                Ok(None) => Ok(()),
                // Without the data thread there is nothing left to serve.
                Err(error @ Refusal::Gone(_)) => return Err(error.to_string()),
                Err(error) if wants_ack => {
                    (self.options.log)(&format!("message {} refused: {error}", header.request));
                    acknowledge(channel, header, 1)
                }
                Err(error) => return Err(format!("message {}: {error}", header.request)),
            };
            sent.map_err(|error| {
                format!("the answer to message {} cannot be sent: {error}", header.request)
            })?;
            if let Some(socket) = session.take_backend() {
                backend = Some(Channel::new(socket));
            }
            let (features, running) = (session.features(), session.running());
            self.shared.update(|state| (state.features, state.queues_running) = (features, running));
        }
    }
}

fn acknowledge(channel: &Channel, header: Header, code: u64) -> io::Result<()> {
    channel.send(Header::reply(header.request, 8), &code.to_ne_bytes(), &[])
}
