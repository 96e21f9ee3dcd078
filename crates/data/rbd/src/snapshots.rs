//! Snapshots of images, and the images that begin at them.

use std::ffi::c_int;
use std::ptr;

use crate::Result;
use crate::cluster::text_of;
use crate::error::{RbdError, c_text};
use crate::image::Image;
use crate::library::{LinkedImage, SNAPSHOT_OF_USER, SnapInfo, SnapSpec};

/// Snapshots that an image may have before this driver refuses to list them.
const SNAPSHOTS_MAX: c_int = 1 << 16;

/// A snapshot of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Grows with each snapshot of the pool.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Bytes of the image when it was taken.
    pub len: u64,
    /// Whether it was removed, and stays only as long as images begin at it.
    pub is_removed: bool,
}

/// Where an image begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The image, by its name in the same namespace; none where it is in the trash.
    pub image: Option<String>,
    /// The snapshot.
    pub snapshot: String,
}

impl Image {
    /// Its snapshots, the oldest first. Those that are removed and still carry images come too.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let mut count: c_int = 32;
        loop {
            let empty = SnapInfo { id: 0, size: 0, name: ptr::null() };
            let mut list = vec![empty; count as usize + 1];
            let mut max = count;
            // SAFETY: the image is open, and there are as many places as are told.
            let code =
                unsafe { (self.library().rbd_snap_list)(self.handle, list.as_mut_ptr(), &raw mut max) };
            if code == -libc::ERANGE && max > count && max <= SNAPSHOTS_MAX {
                count = max;
                continue;
            }
            let found = self.check(code, "its snapshots cannot be listed")?;
            let found = usize::try_from(found).unwrap_or(0).min(count as usize);
            let mut snapshots = Vec::with_capacity(found);
            for info in &list[..found] {
                let mut kind = SNAPSHOT_OF_USER;
                // SAFETY: the image is open, and there is a place for the answer.
                let code = unsafe {
                    (self.library().rbd_snap_get_namespace_type)(self.handle, info.id, &raw mut kind)
                };
                // One that went meanwhile is not there.
                let is_there = code >= 0;
                if let (true, Some(name)) = (is_there, text_of(info.name)) {
                    let is_removed = kind != SNAPSHOT_OF_USER;
                    snapshots.push(Snapshot { id: info.id, name, len: info.size, is_removed });
                }
            }
            // SAFETY: the library has filled the list, whose last entry has no name.
            unsafe { (self.library().rbd_snap_list_end)(list.as_mut_ptr()) };
            snapshots.sort_by_key(|snapshot| snapshot.id);
            return Ok(snapshots);
        }
    }

    /// Takes a snapshot, also while another client writes: that one's writes before it are in it.
    ///
    /// # Errors
    /// `EEXIST`; the cluster does not answer.
    pub fn create_snapshot(&self, name: &str) -> Result<()> {
        let text = c_text(name)?;
        // SAFETY: the image is open, the name is terminated.
        let code = unsafe { (self.library().rbd_snap_create)(self.handle, text.as_ptr()) };
        self.check(code, "no snapshot can be taken").map(drop)
    }

    /// Removes a snapshot; one that is gone is fine. If images begin at it, it stays without its name until they go or
    /// are made independent.
    ///
    /// # Errors
    /// `EBUSY` while it is protected; the cluster does not answer.
    pub fn remove_snapshot(&self, name: &str) -> Result<()> {
        let text = c_text(name)?;
        // SAFETY: the image is open, the name is terminated.
        match unsafe { (self.library().rbd_snap_remove)(self.handle, text.as_ptr()) } {
            code if code == -libc::ENOENT => Ok(()),
            code => self.check(code, "its snapshot cannot be removed").map(drop),
        }
    }

    /// Protects a snapshot from being removed, as clones of the first format need it; or no longer.
    ///
    /// # Errors
    /// `EBUSY` where it is so already, or has clones.
    pub fn protect_snapshot(&self, name: &str, wanted: bool) -> Result<()> {
        let text = c_text(name)?;
        let call = if wanted { self.library().rbd_snap_protect } else { self.library().rbd_snap_unprotect };
        // SAFETY: the image is open, the name is terminated.
        let code = unsafe { call(self.handle, text.as_ptr()) };
        self.check(code, "the protection of its snapshot cannot be changed").map(drop)
    }

    /// The snapshot that the image begins at, if it does.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn parent(&self) -> Result<Option<Parent>> {
        let mut image = LinkedImage {
            pool_id: 0,
            pool_name: ptr::null_mut(),
            pool_namespace: ptr::null_mut(),
            image_id: ptr::null_mut(),
            image_name: ptr::null_mut(),
            trash: false,
        };
        let mut snapshot = SnapSpec { id: 0, namespace_type: 0, name: ptr::null_mut() };
        // SAFETY: the image is open, and there are places for the answer.
        let code = unsafe { (self.library().rbd_get_parent)(self.handle, &raw mut image, &raw mut snapshot) };
        if code == -libc::ENOENT {
            return Ok(None);
        }
        self.check(code, "its parent cannot be found")?;
        let is_here = !image.trash
            && text_of(image.pool_name).as_deref() == Some(self.pool.name())
            && text_of(image.pool_namespace).unwrap_or_default() == self.pool.namespace().unwrap_or_default();
        let name = text_of(image.image_name).filter(|_| is_here);
        let of = text_of(snapshot.name);
        // SAFETY: the library has filled both, and each is freed once.
        unsafe {
            (self.library().rbd_linked_image_spec_cleanup)(&raw mut image);
            (self.library().rbd_snap_spec_cleanup)(&raw mut snapshot);
        }
        let snapshot =
            of.ok_or_else(|| RbdError::new(libc::EIO, "a parent's snapshot has no usable name"))?;
        Ok(Some(Parent { image: name, snapshot }))
    }
}
