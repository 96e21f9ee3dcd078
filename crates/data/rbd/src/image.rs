//! Images, by calls that block.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use crate::Result;
use crate::cluster::{Pool, text_of};
use crate::error::{RbdError, c_text, check};
use crate::library::{
    ImageHandle, ImageSpec, Library, OPTION_CLONE_FORMAT, OPTION_DATA_POOL, OPTION_FEATURES, Options,
};

/// Images that a pool may have before this driver refuses to list them.
const IMAGES_MAX: usize = 1 << 20;
/// Longest value of metadata that is read.
const METADATA_LEN_MAX: usize = 64 << 10;
/// layering, exclusive-lock, object-map, fast-diff, deep-flatten.
const FEATURES: u64 = 0x1 | 0x4 | 0x8 | 0x10 | 0x20;

/// How an image is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// What it was at a snapshot, or is when it is opened. The cluster does not know that it is open.
    Read,
    /// Also to be changed. The cluster knows that it is open, as long as the client lives.
    Write,
}

/// Part of an image that differs from a snapshot, or holds something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Diff {
    /// Bytes.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Whether there is data; otherwise it reads as zero now.
    pub has_data: bool,
}

/// An open image. Dropping it closes it, which blocks until what is in flight has ended, and releases its lock.
pub struct Image {
    pub(crate) pool: Arc<Pool>,
    pub(crate) handle: ImageHandle,
    pub(crate) name: String,
}

// SAFETY: handles of images may be used by all threads at once.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: opened by this, and used by nothing else any more. What it answers is of no use.
        let _ = unsafe { (self.library().rbd_close)(self.handle) };
    }
}

/// Options for a new image.
struct NewOptions {
    library: &'static Library,
    options: Options,
}

impl NewOptions {
    fn new(library: &'static Library, data_pool: Option<&str>) -> Result<Self> {
        let mut options = ptr::null_mut();
        // SAFETY: a place for the handle.
        unsafe { (library.rbd_image_options_create)(&raw mut options) };
        let new = Self { library, options };
        new.set(OPTION_FEATURES, FEATURES)?;
        if let Some(pool) = data_pool {
            let pool = c_text(pool)?;
            // SAFETY: the options are there, the text is terminated.
            let code =
                unsafe { (library.rbd_image_options_set_string)(options, OPTION_DATA_POOL, pool.as_ptr()) };
            check(code, "the pool of data cannot be set")?;
        }
        Ok(new)
    }

    fn set(&self, option: c_int, value: u64) -> Result<()> {
        // SAFETY: the options are there.
        let code = unsafe { (self.library.rbd_image_options_set_uint64)(self.options, option, value) };
        check(code, "an option of a new image cannot be set").map(drop)
    }
}

impl Drop for NewOptions {
    fn drop(&mut self) {
        // SAFETY: made by `rbd_image_options_create`.
        unsafe { (self.library.rbd_image_options_destroy)(self.options) };
    }
}

impl Pool {
    /// Names of its images. A name that is no UTF-8 is left out: this driver makes none.
    ///
    /// # Errors
    /// The cluster does not answer; more than a million images.
    pub fn images(&self) -> Result<Vec<String>> {
        let mut count = 256;
        loop {
            let mut specs = vec![ImageSpec { id: ptr::null_mut(), name: ptr::null_mut() }; count];
            let mut found = count;
            // SAFETY: as many places as are told.
            let code = unsafe { (self.library().rbd_list2)(self.io, specs.as_mut_ptr(), &raw mut found) };
            if code == -libc::ERANGE && found > count && found <= IMAGES_MAX {
                count = found;
                continue;
            }
            check(code, format_args!("cannot list the images of pool '{}'", self.name()))?;
            let found = found.min(count);
            let names = specs[..found].iter().filter_map(|spec| text_of(spec.name)).collect();
            // SAFETY: the library has filled so many.
            unsafe { (self.library().rbd_image_spec_list_cleanup)(specs.as_mut_ptr(), found) };
            return Ok(names);
        }
    }

    /// Makes an image of `len` bytes that reads as zero; `data_pool` takes its data where that is another pool.
    ///
    /// # Errors
    /// `EEXIST`; no such pool.
    pub fn create(&self, name: &str, len: u64, data_pool: Option<&str>) -> Result<()> {
        let (text, options) = (c_text(name)?, NewOptions::new(self.library(), data_pool)?);
        // SAFETY: the context and the options are there, the name is terminated.
        let code = unsafe { (self.library().rbd_create4)(self.io, text.as_ptr(), len, options.options) };
        check(code, format_args!("cannot make the RBD image '{name}'")).map(drop)
    }

    /// Makes an image that begins as the snapshot of another one of this pool. The snapshot need not be protected.
    ///
    /// # Errors
    /// `EEXIST`; no such image or snapshot.
    pub fn clone_image(
        &self,
        parent: &str,
        snapshot: &str,
        name: &str,
        data_pool: Option<&str>,
    ) -> Result<()> {
        let (parent_text, snapshot_text, text) = (c_text(parent)?, c_text(snapshot)?, c_text(name)?);
        let options = NewOptions::new(self.library(), data_pool)?;
        options.set(OPTION_CLONE_FORMAT, 2)?;
        // SAFETY: the context and the options are there, the names are terminated.
        let code = unsafe {
            (self.library().rbd_clone3)(
                self.io,
                parent_text.as_ptr(),
                snapshot_text.as_ptr(),
                self.io,
                text.as_ptr(),
                options.options,
            )
        };
        check(code, format_args!("cannot clone '{name}' from '{parent}@{snapshot}'")).map(drop)
    }

    /// Removes an image.
    ///
    /// # Errors
    /// `ENOENT`; `ENOTEMPTY` while it has snapshots; `EBUSY` while a client has it open.
    pub fn remove(&self, name: &str) -> Result<()> {
        let text = c_text(name)?;
        // SAFETY: the context is there, the name is terminated.
        let code = unsafe { (self.library().rbd_remove)(self.io, text.as_ptr()) };
        check(code, format_args!("cannot remove the RBD image '{name}'")).map(drop)
    }

    /// Gives an image another name, also while it is open.
    ///
    /// # Errors
    /// `ENOENT`, `EEXIST`.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        let (from_text, to_text) = (c_text(from)?, c_text(to)?);
        // SAFETY: the context is there, the names are terminated.
        let code = unsafe { (self.library().rbd_rename)(self.io, from_text.as_ptr(), to_text.as_ptr()) };
        check(code, format_args!("cannot rename the RBD image '{from}' to '{to}'")).map(drop)
    }

    /// Opens an image, or a snapshot of it.
    ///
    /// # Errors
    /// `ENOENT`; the cluster does not answer.
    pub fn open(self: &Arc<Self>, name: &str, snapshot: Option<&str>, mode: Mode) -> Result<Image> {
        let text = c_text(name)?;
        let snapshot_text = snapshot.map(c_text).transpose()?;
        let snapshot_at = snapshot_text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
        let open = match mode {
            Mode::Read => self.library().rbd_open_read_only,
            Mode::Write => self.library().rbd_open,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the context is there, the names are terminated, and there is a place for the handle.
        let code = unsafe { open(self.io, text.as_ptr(), &raw mut handle, snapshot_at) };
        if code == -libc::ESHUTDOWN {
            self.cluster.forget();
        }
        let at = snapshot.map_or_else(String::new, |snapshot| format!("@{snapshot}"));
        check(code, format_args!("cannot open the RBD image '{name}{at}' of pool '{}'", self.name()))?;
        Ok(Image { pool: Arc::clone(self), handle, name: name.to_owned() })
    }
}

unsafe extern "C" fn no_progress(_: u64, _: u64, _: *mut c_void) -> c_int {
    0
}

/// A progress callback's caller; answering true stops the work.
type Progress<'a> = &'a mut dyn FnMut(f64) -> bool;

unsafe extern "C" fn progress(done: u64, total: u64, arg: *mut c_void) -> c_int {
    // SAFETY: the argument is what the call below passed, which waits until the work has ended.
    let tell = unsafe { &mut *arg.cast::<Progress<'_>>() };
    if tell(done as f64 / total.max(1) as f64) { -libc::ECANCELED } else { 0 }
}

/// What a walk along the differences carries: the receiver, and what it found wrong.
struct Walk<'a> {
    each: &'a mut dyn FnMut(Diff),
    end: u64,
}

unsafe extern "C" fn difference(start: u64, len: usize, has_data: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: the argument is what the call below passed, which waits until the walk has ended.
    let walk = unsafe { &mut *arg.cast::<Walk<'_>>() };
    // The cluster's numbers: cut to what was asked for.
    let start = start.min(walk.end);
    let len = (len as u64).min(walk.end - start);
    if len > 0 {
        (walk.each)(Diff { start, len, has_data: has_data != 0 });
    }
    0
}

impl Image {
    pub(crate) fn library(&self) -> &'static Library {
        self.pool.library()
    }

    /// The name that it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The pool.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    pub(crate) fn check(&self, code: c_int, what: &str) -> Result<c_int> {
        if code == -libc::ESHUTDOWN {
            self.pool.cluster.forget();
        }
        check(code, format_args!("the RBD image '{}': {what}", self.name))
    }

    /// Bytes, as they are now; of the snapshot, if it was opened at one.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn length(&self) -> Result<u64> {
        let mut len = 0;
        // SAFETY: the image is open, and there is a place for the answer.
        let code = unsafe { (self.library().rbd_get_size)(self.handle, &raw mut len) };
        self.check(code, "cannot ask for its length")?;
        Ok(len)
    }

    /// Makes it `len` bytes long, also while another client has its lock. What is cut off is gone.
    ///
    /// # Errors
    /// The cluster does not answer; it was opened for reading.
    pub fn resize(&self, len: u64, may_shrink: bool) -> Result<()> {
        // SAFETY: the image is open; the callback takes no memory.
        let code = unsafe {
            (self.library().rbd_resize2)(self.handle, len, may_shrink, Some(no_progress), ptr::null_mut())
        };
        self.check(code, "cannot be made longer").map(drop)
    }

    /// Copies what the image has of its parent into it, so that it needs the parent no more. `tell` is called with how
    /// far it is, and stops it by true.
    ///
    /// # Errors
    /// `ECANCELED`; the cluster does not answer. What was copied stays.
    pub fn flatten(&self, tell: &mut dyn FnMut(f64) -> bool) -> Result<()> {
        let mut tell: Progress<'_> = tell;
        let arg = (&raw mut tell).cast::<c_void>();
        // SAFETY: the image is open; the argument lives until the call has ended.
        match unsafe { (self.library().rbd_flatten_with_progress)(self.handle, progress, arg) } {
            // There is no parent.
            code if code == -libc::EINVAL => Ok(()),
            code => self.check(code, "cannot be made independent of its parent").map(drop),
        }
    }

    /// A value of the image's metadata.
    ///
    /// # Errors
    /// The cluster does not answer; more than 64 KiB.
    pub fn metadata(&self, key: &str) -> Result<Option<String>> {
        let text = c_text(key)?;
        let mut len = 256;
        loop {
            let mut value = vec![0u8; len];
            // SAFETY: the image is open, the key is terminated, the buffer has as many bytes as are told.
            let code = unsafe {
                (self.library().rbd_metadata_get)(
                    self.handle,
                    text.as_ptr(),
                    value.as_mut_ptr().cast::<c_char>(),
                    &raw mut len,
                )
            };
            match code {
                code if code == -libc::ENOENT => return Ok(None),
                code if code == -libc::ERANGE && len > value.len() && len <= METADATA_LEN_MAX => {}
                code => {
                    self.check(code, "its metadata cannot be read")?;
                    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
                    value.truncate(end);
                    return Ok(String::from_utf8(value).ok());
                }
            }
        }
    }

    /// Sets a value of the image's metadata.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn set_metadata(&self, key: &str, value: &str) -> Result<()> {
        let (key, value) = (c_text(key)?, c_text(value)?);
        // SAFETY: the image is open, both texts are terminated.
        let code = unsafe { (self.library().rbd_metadata_set)(self.handle, key.as_ptr(), value.as_ptr()) };
        self.check(code, "its metadata cannot be written").map(drop)
    }

    /// Removes a value of the image's metadata; one that is gone is fine.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn remove_metadata(&self, key: &str) -> Result<()> {
        let key = c_text(key)?;
        // SAFETY: the image is open, the key is terminated.
        match unsafe { (self.library().rbd_metadata_remove)(self.handle, key.as_ptr()) } {
            code if code == -libc::ENOENT => Ok(()),
            code => self.check(code, "its metadata cannot be written").map(drop),
        }
    }

    /// What differs in `start .. start + len` between `from`, a snapshot or the empty image, and what was opened, in
    /// order. With `whole_objects` it is asked of the object map: at once, but in pieces of 4 MiB. With
    /// `with_parent` what is the parent's counts as well.
    ///
    /// # Errors
    /// No such snapshot; the cluster does not answer.
    pub fn diff(
        &self,
        from: Option<&str>,
        (start, len): (u64, u64),
        whole_objects: bool,
        with_parent: bool,
        mut each: impl FnMut(Diff),
    ) -> Result<()> {
        let from = from.map(c_text).transpose()?;
        let from_at = from.as_ref().map_or(ptr::null(), |text| text.as_ptr());
        let mut walk = Walk { each: &mut each, end: start.saturating_add(len) };
        // SAFETY: the image is open, the name is terminated or missing, the argument lives until the call has ended.
        let code = unsafe {
            (self.library().rbd_diff_iterate2)(
                self.handle,
                from_at,
                start,
                len,
                u8::from(with_parent),
                u8::from(whole_objects),
                difference,
                (&raw mut walk).cast::<c_void>(),
            )
        };
        self.check(code, "its differences cannot be listed").map(drop)
    }

    /// Fills `into` from `at` on.
    ///
    /// # Errors
    /// Beyond the end; the cluster does not answer.
    pub fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        // SAFETY: the image is open, the memory has as many bytes as are told.
        let code = unsafe {
            (self.library().rbd_read)(self.handle, at, into.len(), into.as_mut_ptr().cast::<c_char>())
        };
        self.check(i32::try_from(code).unwrap_or(i32::MAX), "cannot be read")?;
        match usize::try_from(code) {
            Ok(count) if count == into.len() => Ok(()),
            _ => Err(RbdError::new(libc::EIO, format!("the RBD image '{}' ends before the read", self.name))),
        }
    }

    /// Writes `from` at `at`.
    ///
    /// # Errors
    /// Beyond the end; another client has the lock; the cluster does not answer.
    pub fn write_at(&self, at: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the image is open, the memory has as many bytes as are told.
        let code = unsafe {
            (self.library().rbd_write)(self.handle, at, from.len(), from.as_ptr().cast::<c_char>())
        };
        self.check(i32::try_from(code).unwrap_or(i32::MAX), "cannot be written").map(drop)
    }

    /// Makes `len` bytes at `at` read as zero, and gives their space back where it can.
    ///
    /// # Errors
    /// As of [`Self::write_at`].
    pub fn zero_at(&self, at: u64, len: u64) -> Result<()> {
        let mut done = 0;
        while done < len {
            // As much as a call can take, on every host.
            let piece = (len - done).min(1 << 30);
            // SAFETY: the image is open.
            let code =
                unsafe { (self.library().rbd_write_zeroes)(self.handle, at + done, piece as usize, 0, 0) };
            self.check(i32::try_from(code).unwrap_or(i32::MAX), "cannot be cleared")?;
            done += piece;
        }
        Ok(())
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn flush(&self) -> Result<()> {
        // SAFETY: the image is open.
        let code = unsafe { (self.library().rbd_flush)(self.handle) };
        self.check(code, "cannot be flushed").map(drop)
    }
}
