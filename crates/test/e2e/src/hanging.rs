//! A file system whose calls hang, one kind at a time: FUSE over the files of a directory.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::disk::text;
use crate::scratch::Scratch;

/// A kind of call, by its number in `linux/fuse.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Call {
    /// A name is looked up.
    Lookup = 1,
    /// Attributes are read.
    GetAttr = 3,
    /// Attributes, here the length, are changed.
    SetAttr = 4,
    /// A name is removed.
    Unlink = 10,
    /// A file is opened.
    Open = 14,
    /// Data are written.
    Write = WRITE,
    /// What was written is made durable.
    Sync = FSYNC,
    /// A descriptor is closed.
    Flush = 25,
    /// A lock is taken or released.
    SetLock = 32,
    /// Space is reserved or given back.
    Fallocate = 43,
    /// Data or a hole is looked for.
    Seek = 46,
}

const READ: u32 = 15;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const INIT: u32 = 26;
const SET_LOCK_WAIT: u32 = 33;
/// Calls without an answer: FORGET, INTERRUPT, DESTROY, BATCH_FORGET.
const SILENT: [u32; 4] = [2, 36, 38, 42];

/// Bits of INIT: reads in parallel, long writes, locks of whole files, long requests.
const INIT_FLAGS: u32 = 1 << 0 | 1 << 5 | 1 << 10 | 1 << 22;
/// The longest read or write.
const TRANSFER_MAX: u32 = 128 << 10;
const HEADER_LEN: usize = 40;
const ROOT: u64 = 1;
/// Of `fuse_setattr_in`: a new length is wanted.
const WANTS_LEN: u32 = 1 << 3;

#[derive(Debug, Default)]
struct State {
    hanging: BTreeSet<u32>,
    /// Requests that hang.
    held: Vec<Vec<u8>>,
    /// The files, by the numbers that the kernel knows them by.
    files: BTreeMap<u64, (String, File)>,
}

/// The mounted file system; gone when dropped.
#[derive(Debug)]
pub struct HangingFs {
    dir: PathBuf,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    fuse: File,
    behind: PathBuf,
    state: Mutex<State>,
}

impl HangingFs {
    /// Mounts it; it has the files that are put into [`HangingFs::behind`].
    ///
    /// # Errors
    /// What is missing on this host, for a skip message.
    pub fn start(scratch: &Scratch) -> Result<Self, String> {
        let (dir, behind) = (scratch.join("hanging"), scratch.join("behind"));
        for dir in [&dir, &behind] {
            fs::create_dir(dir).expect("a directory");
        }
        let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let fuse = fuse.map_err(|error| format!("needs FUSE: {error}"))?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", fuse.as_raw_fd());
        let options = CString::new(options).expect("no zero byte");
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        rustix::mount::mount(c"hanging", &dir, "fuse.hanging", flags, options.as_c_str())
            .map_err(|error| format!("needs FUSE: {error}"))?;
        let shared = Arc::new(Shared { fuse, behind, state: Mutex::default() });
        let serving = Arc::clone(&shared);
        thread::spawn(move || serving.serve());
        Ok(Self { dir, shared })
    }

    /// Where a file of it is made without asking it.
    pub fn behind(&self, name: &str) -> PathBuf {
        self.shared.behind.join(name)
    }

    /// A file of it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Calls of this kind get no answer from now on.
    pub fn hang(&self, call: Call) {
        let mut state = self.shared.state();
        state.hanging.insert(call as u32);
        if call == Call::SetLock {
            state.hanging.insert(SET_LOCK_WAIT);
        }
    }

    /// How many calls hang.
    pub fn held(&self) -> usize {
        self.shared.state().held.len()
    }

    /// Everything that hangs is answered, and hangs no more.
    pub fn go_on(&self) {
        let held = {
            let mut state = self.shared.state();
            state.hanging.clear();
            std::mem::take(&mut state.held)
        };
        for request in held {
            self.shared.answer(&request);
        }
    }
}

impl Drop for HangingFs {
    fn drop(&mut self) {
        self.go_on();
        if let Err(error) = rustix::mount::unmount(&self.dir, UnmountFlags::DETACH) {
            eprintln!("{}: {error}", text(&self.dir));
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The structures of answers, in the host's order.
#[derive(Default)]
struct Out(Vec<u8>);

impl Out {
    fn u16(mut self, value: u16) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn zeroes(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    /// `fuse_attr`.
    fn attributes(self, node: u64, len: u64) -> Self {
        let (mode, links) =
            if node == ROOT { (libc::S_IFDIR | 0o755, 2) } else { (libc::S_IFREG | 0o644, 1) };
        let sizes = self.u64(node).u64(len).u64(len / 512).zeroes(24 + 12);
        sizes.u32(mode).u32(links).u32(0).u32(0).u32(0).u32(4096).u32(0)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics with it")
    }

    /// Answers until the file system is unmounted. Nothing is kept in the kernel, so every call comes here.
    fn serve(&self) {
        let mut buffer = vec![0; TRANSFER_MAX as usize + 4096];
        loop {
            let request = match (&self.fuse).read(&mut buffer) {
                Ok(len) if len >= HEADER_LEN => &buffer[..len],
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                // A request that was taken back before it was read.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
                _ => return,
            };
            let opcode = u32_at(request, 4);
            if SILENT.contains(&opcode) {
                continue;
            }
            let mut state = self.state();
            if state.hanging.contains(&opcode) {
                state.held.push(request.to_vec());
                continue;
            }
            drop(state);
            self.answer(request);
        }
    }

    fn answer(&self, request: &[u8]) {
        let (error, body) = match self.answer_of(request) {
            Ok(out) => (0, out.0),
            Err(error) => (-error.raw_os_error(), Vec::new()),
        };
        let len = u32::try_from(16 + body.len()).expect("short");
        let head = Out::default().u32(len).u32(error as u32).u64(u64_at(request, 8)).0;
        // A request whose process was killed is gone.
        let _ = (&self.fuse).write(&[head, body].concat());
    }

    fn answer_of(&self, request: &[u8]) -> Result<Out, Errno> {
        let (node, body) = (u64_at(request, 16), &request[HEADER_LEN..]);
        let out = Out::default();
        let mut state = self.state();
        let file = match node {
            0 | ROOT => None,
            _ => Some(state.files.get(&node).ok_or(Errno::STALE)?.1.try_clone().expect("a descriptor")),
        };
        let file = || file.as_ref().ok_or(Errno::ISDIR);
        let len = |file: &File| file.metadata().expect("it is there").len();
        let name =
            || String::from_utf8_lossy(body.split(|byte| *byte == 0).next().unwrap_or(body)).into_owned();
        let failed = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        match u32_at(request, 4) {
            INIT => Ok(out
                .u32(7)
                .u32(u32_at(body, 4).min(38))
                .u32(TRANSFER_MAX)
                .u32(u32_at(body, 12) & INIT_FLAGS)
                .u16(64)
                .u16(48)
                .u32(TRANSFER_MAX)
                .u32(1)
                .u16((TRANSFER_MAX / 4096) as u16)
                .zeroes(2 + 4 + 4 + 2 + 22)),
            1 => {
                let name = name();
                let path = self.behind.join(&name);
                let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
                let found = file.metadata().map_err(failed)?;
                assert_eq!(found.permissions().mode() & libc::S_IFMT, libc::S_IFREG, "files only");
                let node = found.ino().max(ROOT + 1);
                state.files.insert(node, (name, file));
                // Node, generation, and for how long name and attributes are believed: not at all.
                Ok(out.u64(node).u64(0).zeroes(24).attributes(node, found.len()))
            }
            3 => {
                let len = if node == ROOT { 0 } else { len(file()?) };
                Ok(out.zeroes(16).attributes(node, len))
            }
            4 => {
                if u32_at(body, 0) & WANTS_LEN != 0 {
                    file()?.set_len(u64_at(body, 16)).map_err(failed)?;
                }
                Ok(out.zeroes(16).attributes(node, len(file()?)))
            }
            10 => fs::remove_file(self.behind.join(name())).map(|()| out).map_err(failed),
            14 => file().map(|_| out.zeroes(16)),
            READ => {
                let mut data = vec![0; u32_at(body, 16) as usize];
                let read = file()?.read_at(&mut data, u64_at(body, 8)).map_err(failed)?;
                data.truncate(read);
                Ok(Out(data))
            }
            WRITE => {
                let len = u32_at(body, 16);
                let data = &body[40..40 + len as usize];
                file()?.write_all_at(data, u64_at(body, 8)).map_err(failed)?;
                Ok(out.u32(len).u32(0))
            }
            STATFS => Ok(out
                .u64(1 << 20)
                .u64(1 << 19)
                .u64(1 << 19)
                .zeroes(16)
                .u32(4096)
                .u32(255)
                .u32(4096)
                .zeroes(28)),
            FSYNC => file()?.sync_data().map(|()| out).map_err(failed),
            43 => {
                let flags = FallocateFlags::from_bits_retain(u32_at(body, 24));
                rustix::fs::fallocate(file()?, flags, u64_at(body, 8), u64_at(body, 16)).map(|()| out)
            }
            46 => {
                let offset = u64_at(body, 8);
                let whence = match u32_at(body, 16) as i32 {
                    libc::SEEK_DATA => SeekFrom::Data(offset),
                    libc::SEEK_HOLE => SeekFrom::Hole(offset),
                    _ => return Err(Errno::INVAL),
                };
                rustix::fs::seek(file()?, whence).map(|at| out.u64(at))
            }
            // One client has all locks.
            RELEASE | 25 | 32 | SET_LOCK_WAIT => Ok(out),
            _ => Err(Errno::NOSYS),
        }
    }
}

impl HangingFs {
    /// The place of a new image: made behind the file system's back.
    pub fn raw_image(&self, name: &str, len: u64) -> PathBuf {
        let made = File::create(self.behind(name)).and_then(|file| file.set_len(len));
        made.unwrap_or_else(|error| panic!("{name}: {error}"));
        self.file(name)
    }

    /// The mount point.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}
