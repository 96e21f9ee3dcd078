//! A connection to a cluster, and the pools in it.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::Path;
use std::ptr;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;

use crate::Result;
use crate::error::{RbdError, c_text, check};
use crate::library::{ClusterHandle, IoHandle, Library, library};
use crate::target::{Connect, check_name};

/// Where a cluster is described if nothing says otherwise.
const CONF: &str = "/etc/ceph/ceph.conf";
/// Longest answer of a monitor and longest list of names that are read.
const ANSWER_LEN_MAX: usize = 16 << 20;
/// Seconds that connecting and one question to a monitor may take.
const MONITOR_SECONDS: &str = "30";

/// A connection. One serves all images of a process: it has threads and memory of its own, an image little more.
pub struct Cluster {
    pub(crate) library: &'static Library,
    handle: ClusterHandle,
    connect: Connect,
}

// SAFETY: handles of librados may be used by all threads at once.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("connect", &self.connect).finish_non_exhaustive()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: made by `rados_create2`, and pools and images hold this, so none is left.
        unsafe { (self.library.rados_shutdown)(self.handle) };
    }
}

static SHARED: LazyLock<Mutex<HashMap<Connect, Weak<Cluster>>>> = LazyLock::new(Mutex::default);

impl Cluster {
    /// The connection of this process to that cluster as that user, made if there is none. Blocks until a monitor
    /// answers, half a minute at most.
    ///
    /// # Errors
    /// The libraries or the configuration are not there; no monitor answers; the key is wrong.
    pub fn shared(connect: &Connect) -> Result<Arc<Self>> {
        let known = || SHARED.lock().get(connect).and_then(Weak::upgrade);
        if let Some(cluster) = known() {
            return Ok(cluster);
        }
        // Not under the lock: another cluster may answer sooner.
        let made = Arc::new(Self::connect(connect)?);
        let mut shared = SHARED.lock();
        shared.retain(|_, cluster| cluster.strong_count() > 0);
        let found = shared.get(connect).and_then(Weak::upgrade);
        let cluster = found.unwrap_or_else(|| Arc::clone(&made));
        shared.insert(connect.clone(), Arc::downgrade(&cluster));
        drop(shared);
        Ok(cluster)
    }

    /// The cluster has shut this client out: an image that is opened from now on gets a new connection.
    pub fn forget(&self) {
        SHARED.lock().retain(|_, known| !ptr::eq(known.as_ptr(), self));
    }

    fn connect(connect: &Connect) -> Result<Self> {
        let library = library()?;
        let mut handle = ptr::null_mut();
        let user = c_text(&format!("client.{}", connect.user))?;
        // SAFETY: a place for the handle, and terminated names.
        let code = unsafe { (library.rados_create2)(&raw mut handle, c"ceph".as_ptr(), user.as_ptr(), 0) };
        check(code, "cannot prepare a connection to a Ceph cluster")?;
        // From here on dropping it ends it.
        let cluster = Self { library, handle, connect: connect.clone() };
        cluster.configure()?;
        // SAFETY: the handle is open.
        let code = unsafe { (library.rados_connect)(cluster.handle) };
        if code < 0 {
            return Err(RbdError::of(code, format_args!("cannot connect to {cluster}")));
        }
        Ok(cluster)
    }

    fn configure(&self) -> Result<()> {
        let connect = &self.connect;
        let default = || (connect.mon_host.is_none() || Path::new(CONF).exists()).then(|| CONF.into());
        if let Some(path) = connect.conf.clone().or_else(default) {
            let text = path.display().to_string();
            let name = c_text(&text)?;
            // SAFETY: the handle is open, the name is terminated.
            let code = unsafe { (self.library.rados_conf_read_file)(self.handle, name.as_ptr()) };
            check(code, format_args!("cannot read the configuration of the Ceph cluster, {text}"))?;
        }
        let timeout = connect.timeout.map_or(0, |timeout| timeout.as_secs()).to_string();
        let keyring = connect.keyring.as_ref().map(|path| path.display().to_string());
        let settings = [
            ("mon_host", connect.mon_host.as_deref()),
            ("keyring", keyring.as_deref()),
            // A write that was answered is with the OSDs: there is no cache that a flush would have to empty.
            ("rbd_cache", Some("false")),
            ("rados_osd_op_timeout", Some(timeout.as_str())),
            ("rados_mon_op_timeout", Some(MONITOR_SECONDS)),
            ("client_mount_timeout", Some(MONITOR_SECONDS)),
            // Two threads move more than one disk takes.
            ("ms_async_op_threads", Some("2")),
            // One thread completes what is asked, so in order. With two the process died now and then (librbd 16): the
            // thread that tells that an image is open locks the image's state once more after that, which may be gone,
            // because the caller, on the other thread's word, has closed the image again.
            ("librados_thread_count", Some("1")),
            // It writes neither logs nor sockets: messages are the caller's.
            ("log_file", Some("")),
            ("log_to_stderr", Some("false")),
            ("err_to_stderr", Some("false")),
            ("log_max_recent", Some("1")),
            ("admin_socket", Some("")),
        ];
        for (key, value) in settings.into_iter().filter_map(|(key, value)| Some((key, value?))) {
            let (key_text, value) = (c_text(key)?, c_text(value)?);
            // SAFETY: the handle is open, both texts are terminated.
            let code =
                unsafe { (self.library.rados_conf_set)(self.handle, key_text.as_ptr(), value.as_ptr()) };
            // Later versions may lack one of them.
            if code != -libc::ENOENT {
                check(code, format_args!("the setting {key} of a Ceph cluster cannot be used"))?;
            }
        }
        Ok(())
    }

    /// The number that the cluster knows this client by.
    pub fn instance(&self) -> u64 {
        // SAFETY: the handle is connected.
        unsafe { (self.library.rados_get_instance_id)(self.handle) }
    }

    /// Names of all pools.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn pools(&self) -> Result<Vec<String>> {
        let mut names = vec![0u8; 4096];
        loop {
            // SAFETY: the buffer has as many bytes as are told.
            let code = unsafe {
                (self.library.rados_pool_list)(self.handle, names.as_mut_ptr().cast::<c_char>(), names.len())
            };
            let needed = check(code, "cannot list the pools of the cluster")? as usize;
            if needed <= names.len() {
                return Ok(texts(&names[..needed]));
            }
            if needed > ANSWER_LEN_MAX {
                return Err(RbdError::new(libc::E2BIG, "the cluster has more pools than can be listed"));
            }
            names.resize(needed, 0);
        }
    }

    /// Makes a pool for images.
    ///
    /// # Errors
    /// `EEXIST`; the user may not.
    pub fn create_pool(&self, name: &str) -> Result<()> {
        check_name("a pool", name).map_err(|error| RbdError::new(libc::EINVAL, error.to_string()))?;
        let text = c_text(name)?;
        // SAFETY: the handle is connected, the name is terminated.
        let code = unsafe { (self.library.rados_pool_create)(self.handle, text.as_ptr()) };
        check(code, format_args!("cannot make the pool '{name}'")).map(drop)
    }

    /// What a monitor answers to a command in JSON.
    ///
    /// # Errors
    /// The user may not ask, or the cluster does not answer.
    pub fn ask_monitor(&self, command: &str) -> Result<String> {
        let text = c_text(command)?;
        let commands = [text.as_ptr()];
        let (mut out, mut out_len, mut said, mut said_len) = (ptr::null_mut(), 0, ptr::null_mut(), 0);
        // SAFETY: one terminated command, no input, and places for two buffers.
        let code = unsafe {
            (self.library.rados_mon_command)(
                self.handle,
                commands.as_ptr(),
                1,
                c"".as_ptr(),
                0,
                &raw mut out,
                &raw mut out_len,
                &raw mut said,
                &raw mut said_len,
            )
        };
        let answer = match out.is_null() || out_len > ANSWER_LEN_MAX {
            true => String::new(),
            // SAFETY: the library gave a buffer of that length, which stays until it is freed below.
            false => unsafe {
                String::from_utf8_lossy(std::slice::from_raw_parts(out.cast::<u8>(), out_len)).into_owned()
            },
        };
        for buffer in [out, said] {
            if !buffer.is_null() {
                // SAFETY: a buffer of the library's, freed once.
                unsafe { (self.library.rados_buffer_free)(buffer) };
            }
        }
        check(code, "a monitor of the cluster refuses a question").map(|_| answer)
    }

    /// A pool, or a namespace of it.
    ///
    /// # Errors
    /// There is no such pool.
    pub fn pool(self: &Arc<Self>, name: &str, namespace: Option<&str>) -> Result<Arc<Pool>> {
        let text = c_text(name)?;
        let namespace_text = namespace.map(c_text).transpose()?;
        let mut io = ptr::null_mut();
        // SAFETY: the handle is connected, the name is terminated, and there is a place for the answer.
        let code = unsafe { (self.library.rados_ioctx_create)(self.handle, text.as_ptr(), &raw mut io) };
        if code == -libc::ENOENT {
            return Err(RbdError::new(libc::ENOENT, format!("{self} has no pool '{name}'")));
        }
        check(code, format_args!("cannot use the pool '{name}' of {self}"))?;
        if let Some(namespace) = &namespace_text {
            // SAFETY: the context is open and no other thread has it yet; the name is terminated.
            unsafe { (self.library.rados_ioctx_set_namespace)(io, namespace.as_ptr()) };
        }
        let (name, namespace) = (name.to_owned(), namespace.map(str::to_owned));
        Ok(Arc::new(Pool { cluster: Arc::clone(self), io, name, namespace }))
    }
}

impl fmt::Display for Cluster {
    /// For people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = &self.connect.user;
        match (&self.connect.mon_host, &self.connect.conf) {
            (Some(hosts), _) => write!(f, "the Ceph cluster of {hosts} as client.{user}"),
            (None, Some(conf)) => write!(f, "the Ceph cluster of {} as client.{user}", conf.display()),
            (None, None) => write!(f, "the Ceph cluster of {CONF} as client.{user}"),
        }
    }
}

/// The terminated texts in a buffer, one after the other, up to an empty one.
pub fn texts(buffer: &[u8]) -> Vec<String> {
    let parts = buffer.split(|byte| *byte == 0).take_while(|part| !part.is_empty());
    parts.filter_map(|part| std::str::from_utf8(part).ok().map(str::to_owned)).collect()
}

/// A text of the library's; none where it is no UTF-8.
pub(crate) fn text_of(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the library's texts are terminated, and stay while this copies them.
    unsafe { CStr::from_ptr(text) }.to_str().ok().map(str::to_owned)
}

/// A pool, or a namespace of it.
pub struct Pool {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) io: IoHandle,
    name: String,
    namespace: Option<String>,
}

// SAFETY: contexts may be used by all threads at once as long as none changes them, which none does here.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("name", &self.name)
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: made by `rados_ioctx_create`; images hold this, so none is left.
        unsafe { (self.library().rados_ioctx_destroy)(self.io) };
    }
}

impl Pool {
    pub(crate) fn library(&self) -> &'static Library {
        self.cluster.library
    }

    /// The connection.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The namespace that this looks into.
    pub fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// Makes a new pool one of images. Doing it again changes nothing.
    ///
    /// # Errors
    /// The user may not.
    pub fn init(&self) -> Result<()> {
        // SAFETY: the context is open.
        let code = unsafe { (self.library().rbd_pool_init)(self.io, false) };
        check(code, format_args!("cannot make '{}' a pool of images", self.name)).map(drop)
    }

    /// Names of its namespaces.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn namespaces(&self) -> Result<Vec<String>> {
        let mut len = 4096;
        loop {
            let mut names = vec![0u8; len];
            // SAFETY: the buffer has as many bytes as are told.
            let code = unsafe {
                (self.library().rbd_namespace_list)(
                    self.io,
                    names.as_mut_ptr().cast::<c_char>(),
                    &raw mut len,
                )
            };
            match code {
                code if code == -libc::ERANGE && len > names.len() && len <= ANSWER_LEN_MAX => {}
                code => {
                    check(code, format_args!("cannot list the namespaces of pool '{}'", self.name))?;
                    return Ok(texts(&names));
                }
            }
        }
    }

    /// Whether it has that namespace.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn has_namespace(&self, name: &str) -> Result<bool> {
        let (text, mut is_there) = (c_text(name)?, false);
        // SAFETY: the context is open, the name is terminated, and there is a place for the answer.
        let code =
            unsafe { (self.library().rbd_namespace_exists)(self.io, text.as_ptr(), &raw mut is_there) };
        check(code, format_args!("cannot look for namespace '{name}' in pool '{}'", self.name))?;
        Ok(is_there)
    }

    /// Makes a namespace; one that is there is fine.
    ///
    /// # Errors
    /// The user may not.
    pub fn create_namespace(&self, name: &str) -> Result<()> {
        let text = c_text(name)?;
        // SAFETY: the context is open, the name is terminated.
        match unsafe { (self.library().rbd_namespace_create)(self.io, text.as_ptr()) } {
            code if code == -libc::EEXIST => Ok(()),
            code => {
                check(code, format_args!("cannot make namespace '{name}' in pool '{}'", self.name)).map(drop)
            }
        }
    }

    /// Removes an empty namespace; one that is gone is fine.
    ///
    /// # Errors
    /// `EBUSY` while there are images in it.
    pub fn remove_namespace(&self, name: &str) -> Result<()> {
        let text = c_text(name)?;
        // SAFETY: the context is open, the name is terminated.
        match unsafe { (self.library().rbd_namespace_remove)(self.io, text.as_ptr()) } {
            code if code == -libc::ENOENT => Ok(()),
            code => check(code, format_args!("cannot remove namespace '{name}' of pool '{}'", self.name))
                .map(drop),
        }
    }
}
