//! A raw image into a new raw image: the kernel moves the data, and shares them where the file system can.

use std::io;
use std::os::fd::AsRawFd;

use tapio_format::FileMedium;
use tapio_format::vhd::offline::{Chain, Layer};
use tapio_types::ApiError;

use super::plan::seek;
use super::target::Target;
use crate::errors;
use crate::traits::Ctx;

/// Moved by one call, so that a cancel is heard.
const CALL_LEN: u64 = 32 << 20;

fn source_of(chain: &Chain<FileMedium>) -> Option<(&FileMedium, u64)> {
    match chain.layers() {
        [Layer::Raw { medium, len }] => Some((medium, *len)),
        _ => None,
    }
}

/// Whether both are single raw files and the target is empty.
pub(super) fn is_possible(source: &Chain<FileMedium>, target: &Target) -> bool {
    source_of(source).is_some_and(|(medium, _)| medium.file().metadata().is_ok_and(|data| data.is_file()))
        && target.is_fresh()
        && target.raw().is_some()
}

/// Copies everything but holes.
///
/// # Errors
/// Those of the system, `TASK_CANCELLED`.
pub(super) fn copy(ctx: &dyn Ctx, source: &Chain<FileMedium>, target: &mut Target) -> Result<(), ApiError> {
    let (Some((from, len)), Some((into, path))) = (source_of(source), target.raw()) else {
        return Err(ApiError::internal("a raw copy of something that is not raw"));
    };
    let fail = |error: io::Error| errors::io(200, "cannot copy into", path, &error);
    let (mut at, mut by_kernel, mut half) = (0, true, false);
    while at < len {
        if ctx.is_cancelled() {
            return Err(errors::cancelled());
        }
        at = match seek(from, at, libc::SEEK_DATA) {
            Ok(data) => data,
            Err(libc::ENXIO) => break,
            Err(_) => at,
        };
        let hole = seek(from, at, libc::SEEK_HOLE).ok().filter(|hole| *hole > at).unwrap_or(len);
        let wanted = (hole.min(len) - at).min(CALL_LEN);
        let moved =
            if by_kernel { copy_range(from, into, at, wanted) } else { by_hand(from, into, at, wanted) };
        match moved {
            // The file was cut off meanwhile.
            Ok(0) => break,
            Ok(moved) => at += moved,
            Err(error) if by_kernel && is_refusal(&error) => by_kernel = false,
            Err(error) => return Err(fail(error)),
        }
        ctx.progress(at as f64 / len as f64);
        if !half && at >= len / 2 {
            half = true;
            ctx.step("fill:half");
        }
    }
    Ok(())
}

/// The two files, or the kernel, cannot do it this way.
fn is_refusal(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EXDEV | libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP | libc::ETXTBSY | libc::EBADF)
    )
}

fn copy_range(from: &FileMedium, into: &FileMedium, at: u64, len: u64) -> io::Result<u64> {
    let start = i64::try_from(at).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    let (mut from_at, mut into_at) = (start, start);
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    // SAFETY: both descriptors are open for as long as the media live, and both places are valid for writing.
    let moved = unsafe {
        libc::copy_file_range(
            from.file().as_raw_fd(),
            &raw mut from_at,
            into.file().as_raw_fd(),
            &raw mut into_at,
            len,
            0,
        )
    };
    u64::try_from(moved).map_err(|_| io::Error::last_os_error())
}

fn by_hand(from: &FileMedium, into: &FileMedium, at: u64, len: u64) -> io::Result<u64> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; usize::try_from(len.min(1 << 20)).unwrap_or(1 << 20)];
    let there = from.file().read_at(&mut bytes, at)?;
    into.file().write_all_at(&bytes[..there], at)?;
    Ok(there as u64)
}
