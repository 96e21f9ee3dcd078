//! The functions of librados and librbd that are used, and how they are found.
//!
//! Declared by hand after `rados/librados.h` and `rbd/librbd.h` of Ceph 16.2. The libraries are opened once and stay
//! open. A process whose sandbox forbids executable memory must open them before it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::error::RbdError;

/// `rados_t`.
pub type ClusterHandle = *mut c_void;
/// `rados_ioctx_t`.
pub type IoHandle = *mut c_void;
/// `rbd_image_t`.
pub type ImageHandle = *mut c_void;
/// `rbd_completion_t`.
pub type Completion = *mut c_void;
/// `rbd_image_options_t`.
pub type Options = *mut c_void;
/// `rbd_callback_t`: called on a thread of the library's.
pub type EndedFn = unsafe extern "C" fn(Completion, *mut c_void);
/// `librbd_progress_fn_t`.
pub type ProgressFn = unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int;
/// The callback of `rbd_diff_iterate2`: offset, length, whether there is data.
pub type DiffFn = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// `rbd_snap_info_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SnapInfo {
    pub id: u64,
    pub size: u64,
    pub name: *const c_char,
}

/// `rbd_image_spec_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ImageSpec {
    pub id: *mut c_char,
    pub name: *mut c_char,
}

/// `rbd_linked_image_spec_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LinkedImage {
    pub pool_id: i64,
    pub pool_name: *mut c_char,
    pub pool_namespace: *mut c_char,
    pub image_id: *mut c_char,
    pub image_name: *mut c_char,
    pub trash: bool,
}

/// `rbd_snap_spec_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SnapSpec {
    pub id: u64,
    pub namespace_type: c_int,
    pub name: *mut c_char,
}

/// `rbd_image_watcher_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Watcher {
    pub addr: *mut c_char,
    pub id: i64,
    pub cookie: u64,
}

/// `RBD_IMAGE_OPTION_FEATURES`.
pub const OPTION_FEATURES: c_int = 1;
/// `RBD_IMAGE_OPTION_DATA_POOL`.
pub const OPTION_DATA_POOL: c_int = 10;
/// `RBD_IMAGE_OPTION_CLONE_FORMAT`.
pub const OPTION_CLONE_FORMAT: c_int = 12;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
pub const LOCK_EXCLUSIVE: c_int = 0;
/// `RBD_SNAP_NAMESPACE_TYPE_USER`.
pub const SNAPSHOT_OF_USER: c_int = 0;

macro_rules! functions {
    ($($library:ident $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions, each with the signature that Ceph's headers declare.
        #[allow(missing_docs, reason = "each is documented in Ceph's headers, under the same name")]
        #[derive(Debug)]
        pub struct Library {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn load() -> Result<Self, String> {
                let rados = open(c"librados.so.2")?;
                let rbd = open(c"librbd.so.1")?;
                Ok(Self {
                    $($name: {
                        let found = symbol($library(rados, rbd), concat!(stringify!($name), "\0"))?;
                        // SAFETY: the library's header declares the function with this signature.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(found)
                        }
                    },)*
                })
            }
        }
    };
}

const fn rados(rados: *mut c_void, _: *mut c_void) -> *mut c_void {
    rados
}

const fn rbd(_: *mut c_void, rbd: *mut c_void) -> *mut c_void {
    rbd
}

type Text = *const c_char;

functions! {
    rados rados_create2(*mut ClusterHandle, Text, Text, u64) -> c_int;
    rados rados_conf_read_file(ClusterHandle, Text) -> c_int;
    rados rados_conf_set(ClusterHandle, Text, Text) -> c_int;
    rados rados_connect(ClusterHandle) -> c_int;
    rados rados_shutdown(ClusterHandle);
    rados rados_get_instance_id(ClusterHandle) -> u64;
    rados rados_pool_list(ClusterHandle, *mut c_char, usize) -> c_int;
    rados rados_pool_create(ClusterHandle, Text) -> c_int;
    rados rados_mon_command(
        ClusterHandle, *const Text, usize, Text, usize, *mut *mut c_char, *mut usize, *mut *mut c_char, *mut usize
    ) -> c_int;
    rados rados_buffer_free(*mut c_char);
    rados rados_ioctx_create(ClusterHandle, Text, *mut IoHandle) -> c_int;
    rados rados_ioctx_destroy(IoHandle);
    rados rados_ioctx_set_namespace(IoHandle, Text);

    rbd rbd_pool_init(IoHandle, bool) -> c_int;
    rbd rbd_namespace_create(IoHandle, Text) -> c_int;
    rbd rbd_namespace_remove(IoHandle, Text) -> c_int;
    rbd rbd_namespace_exists(IoHandle, Text, *mut bool) -> c_int;
    rbd rbd_namespace_list(IoHandle, *mut c_char, *mut usize) -> c_int;
    rbd rbd_image_options_create(*mut Options);
    rbd rbd_image_options_destroy(Options);
    rbd rbd_image_options_set_uint64(Options, c_int, u64) -> c_int;
    rbd rbd_image_options_set_string(Options, c_int, Text) -> c_int;
    rbd rbd_create4(IoHandle, Text, u64, Options) -> c_int;
    rbd rbd_clone3(IoHandle, Text, Text, IoHandle, Text, Options) -> c_int;
    rbd rbd_remove(IoHandle, Text) -> c_int;
    rbd rbd_rename(IoHandle, Text, Text) -> c_int;
    rbd rbd_list2(IoHandle, *mut ImageSpec, *mut usize) -> c_int;
    rbd rbd_image_spec_list_cleanup(*mut ImageSpec, usize);
    rbd rbd_open(IoHandle, Text, *mut ImageHandle, Text) -> c_int;
    rbd rbd_open_read_only(IoHandle, Text, *mut ImageHandle, Text) -> c_int;
    rbd rbd_close(ImageHandle) -> c_int;
    rbd rbd_get_size(ImageHandle, *mut u64) -> c_int;
    rbd rbd_resize2(ImageHandle, u64, bool, Option<ProgressFn>, *mut c_void) -> c_int;
    rbd rbd_metadata_get(ImageHandle, Text, *mut c_char, *mut usize) -> c_int;
    rbd rbd_metadata_set(ImageHandle, Text, Text) -> c_int;
    rbd rbd_metadata_remove(ImageHandle, Text) -> c_int;
    rbd rbd_snap_list(ImageHandle, *mut SnapInfo, *mut c_int) -> c_int;
    rbd rbd_snap_list_end(*mut SnapInfo);
    rbd rbd_snap_get_namespace_type(ImageHandle, u64, *mut c_int) -> c_int;
    rbd rbd_snap_create(ImageHandle, Text) -> c_int;
    rbd rbd_snap_remove(ImageHandle, Text) -> c_int;
    rbd rbd_snap_protect(ImageHandle, Text) -> c_int;
    rbd rbd_snap_unprotect(ImageHandle, Text) -> c_int;
    rbd rbd_flatten_with_progress(ImageHandle, ProgressFn, *mut c_void) -> c_int;
    rbd rbd_get_parent(ImageHandle, *mut LinkedImage, *mut SnapSpec) -> c_int;
    rbd rbd_linked_image_spec_cleanup(*mut LinkedImage);
    rbd rbd_snap_spec_cleanup(*mut SnapSpec);
    rbd rbd_lock_acquire(ImageHandle, c_int) -> c_int;
    rbd rbd_lock_release(ImageHandle) -> c_int;
    rbd rbd_lock_get_owners(ImageHandle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd rbd_lock_break(ImageHandle, c_int, Text) -> c_int;
    rbd rbd_watchers_list(ImageHandle, *mut Watcher, *mut usize) -> c_int;
    rbd rbd_watchers_list_cleanup(*mut Watcher, usize);
    rbd rbd_diff_iterate2(ImageHandle, Text, u64, u64, u8, u8, DiffFn, *mut c_void) -> c_int;
    rbd rbd_read(ImageHandle, u64, usize, *mut c_char) -> isize;
    rbd rbd_write(ImageHandle, u64, usize, Text) -> isize;
    rbd rbd_write_zeroes(ImageHandle, u64, usize, c_int, c_int) -> isize;
    rbd rbd_flush(ImageHandle) -> c_int;
    rbd rbd_aio_create_completion(*mut c_void, Option<EndedFn>, *mut Completion) -> c_int;
    rbd rbd_aio_get_return_value(Completion) -> isize;
    rbd rbd_aio_release(Completion);
    rbd rbd_aio_read(ImageHandle, u64, usize, *mut c_char, Completion) -> c_int;
    rbd rbd_aio_readv(ImageHandle, *const libc::iovec, c_int, u64, Completion) -> c_int;
    rbd rbd_aio_write(ImageHandle, u64, usize, Text, Completion) -> c_int;
    rbd rbd_aio_writev(ImageHandle, *const libc::iovec, c_int, u64, Completion) -> c_int;
    rbd rbd_aio_write_zeroes(ImageHandle, u64, usize, Completion, c_int, c_int) -> c_int;
    rbd rbd_aio_flush(ImageHandle, Completion) -> c_int;
}

fn open(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: a terminated name; constructors of the libraries set these up and start nothing.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !library.is_null() {
        return Ok(library);
    }
    // SAFETY: after a failure there is a terminated text, until this thread calls again.
    let why = unsafe { libc::dlerror() };
    // SAFETY: as above.
    let why = if why.is_null() { "".into() } else { unsafe { CStr::from_ptr(why) }.to_string_lossy() };
    Err(format!(
        "disks on Ceph need {}, which cannot be opened ({why}): install librbd1 (Debian) or librbd",
        name.to_string_lossy()
    ))
}

fn symbol(library: *mut c_void, name: &str) -> Result<*mut c_void, String> {
    // SAFETY: the library is open and stays so; the macro terminates the name.
    let found = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
    match found.is_null() {
        false => Ok(found),
        true => Err(format!(
            "librbd has no {}: disks on Ceph need the libraries of Ceph 16 or later",
            name.trim_end_matches('\0')
        )),
    }
}

/// Why there are no libraries.
#[derive(Debug)]
struct Why {
    errno: i32,
    text: String,
}

static LIBRARY: OnceLock<Result<Library, Why>> = OnceLock::new();

/// From now on the libraries are not opened, because of `why`; if they are not open yet.
pub fn forbid(why: &str) {
    LIBRARY.get_or_init(|| Err(Why { errno: libc::EPERM, text: why.to_owned() }));
}

/// The libraries, opened at the first call.
///
/// # Errors
/// They are not installed, or too old: one sentence with the package's name.
pub fn library() -> Result<&'static Library, RbdError> {
    let load = || Library::load().map_err(|text| Why { errno: libc::ENOPKG, text });
    match LIBRARY.get_or_init(load) {
        Ok(library) => Ok(library),
        Err(why) => Err(RbdError::new(why.errno, why.text.clone())),
    }
}
