//! A resize that was interrupted: the next process that opens the image undoes it.

use std::path::{Path, PathBuf};

use tapio_types::Access;

use super::footer::read_footer;
use super::resize::revert_path;
use crate::error::{FormatError, FormatErrorKind, Result};
use crate::medium::{FileMedium, Medium};
use crate::vhd::journal::{HEADER_LEN, JournalHeader};

/// Where the journal of a resize lies that a disk process does on its own: beside the image.
pub fn journal_beside(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".resize-journal");
    name.into()
}

/// Looks for a journal beside the image at `path`, and brings the image back to what it was before the resize that left
/// it, or removes a journal that the image does not need any more. Says what was done.
///
/// # Errors
/// `Exists` where a file of that name is no journal of this image; those of [`revert_path`] and of the system.
pub fn finish_resize(path: &Path) -> Result<Option<&'static str>> {
    let journal = journal_beside(path);
    if std::fs::symlink_metadata(&journal).is_err() {
        return Ok(None);
    }
    let (footer, ..) = read_footer(&FileMedium::open(path, Access::ReadOnly)?, false)
        .map_err(|error| error.with_path(path))?;
    if footer.is_disabled() {
        revert_path(path, &journal)?;
        return Ok(Some("a resize was broken off: the image is as it was before"));
    }
    // The resize had not begun, or was done: the image is whole either way.
    let medium = FileMedium::open(&journal, Access::ReadOnly)?;
    let mut bytes = [0; HEADER_LEN];
    let is_ours = match medium.read_at(0, &mut bytes) {
        Ok(()) if bytes.iter().any(|&byte| byte != 0) => {
            JournalHeader::decode(&bytes).is_ok_and(|header| header.uuid == footer.uuid)
        }
        // Its header comes last.
        _ => true,
    };
    drop(medium);
    if !is_ours {
        let detail = "lies where the journal of a resize would be, and is none of this image: move it away";
        return Err(FormatError::new(FormatErrorKind::Exists, detail).with_path(&journal));
    }
    std::fs::remove_file(&journal)
        .map_err(|error| FormatError::io("cannot remove the journal", error).with_path(&journal))?;
    Ok(Some("the journal of a resize that had not begun, or was done, is removed"))
}

#[cfg(test)]
mod tests {
    use super::super::resize::{ResizeStep, resize_journalled};
    use super::super::{Shape, create};
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The resize panics at `step`, as a kill would stop it there; the image is then put in order.
    fn broken_off_at(step: Option<ResizeStep>) -> (u64, Option<&'static str>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.vhd");
        create(&path, &Shape::Dynamic, 64 * MIB, 0).unwrap();
        let journal = journal_beside(&path);
        let resize = || {
            resize_journalled(&path, 1024 * MIB, &journal, |at| {
                if Some(at) == step {
                    std::panic::resume_unwind(Box::new(()));
                }
            })
        };
        let outcome = std::panic::catch_unwind(resize);
        assert_eq!(outcome.is_err(), step.is_some());
        let done = finish_resize(&path).unwrap();
        assert!(!journal.exists());
        let image = super::super::Image::open(&path, super::super::OpenOptions::READ).unwrap();
        (image.virtual_len(), done)
    }

    #[test]
    fn a_resize_is_taken_back_or_done_wherever_it_stopped() {
        for step in [ResizeStep::Begin, ResizeStep::DataMoved, ResizeStep::MetadataMoved] {
            let (len, done) = broken_off_at(Some(step));
            assert_eq!((len, done.is_some()), (64 * MIB, true), "{step:?}");
        }
        let (len, done) = broken_off_at(Some(ResizeStep::End));
        assert_eq!((len, done.is_some()), (1024 * MIB, true));
        assert_eq!(broken_off_at(None), (1024 * MIB, None));
    }

    #[test]
    fn a_file_that_is_no_journal_of_the_image_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.vhd");
        create(&path, &Shape::Dynamic, 64 * MIB, 0).unwrap();
        std::fs::write(journal_beside(&path), vec![7; 4096]).unwrap();
        let refused = finish_resize(&path).unwrap_err();
        assert!(refused.to_string().contains("resize-journal"), "{refused}");
        assert!(journal_beside(&path).exists());
    }
}
