//! What stays in the directory of the images when a disk is closed: its images, and nothing that a killed process
//! began.

use std::fs::{self, File};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use super::subject::{Outcome, Subject};

/// After so long, what a killed process left unfinished is cleared away by the next that starts: before that, another
/// host of the same storage may still be at it.
const QUIET: Duration = Duration::from_secs(120);

/// Files beside the images of the disk.
fn others(subject: &Subject<'_>) -> Outcome<Vec<PathBuf>> {
    let wrong = |error: std::io::Error| subject.finding(format!("the directory of the images: {error}"));
    let mut others = Vec::new();
    for entry in fs::read_dir(subject.images()).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        if !subject.chain.iter().any(|image| image.path == path) {
            others.push(path);
        }
    }
    others.sort();
    Ok(others)
}

/// Makes what is there look as if no process had touched it for a while.
pub fn age(subject: &Subject<'_>) -> Outcome {
    for path in others(subject)? {
        let aged = File::options().write(true).open(&path);
        let aged = aged.and_then(|file| file.set_modified(SystemTime::now() - QUIET));
        aged.map_err(|error| subject.finding(format!("{}: {error}", path.display())))?;
    }
    Ok(())
}

/// The disk was started once more since [`age`], and closed: only its images are left, and notes that lead to its leaf.
pub fn assert_none(subject: &Subject<'_>) -> Outcome {
    let is_note = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "continued");
    let left: Vec<PathBuf> = others(subject)?.into_iter().filter(|path| !is_note(path)).collect();
    if left.is_empty() {
        return Ok(());
    }
    Err(subject.finding(format!("left beside the images {:?}: {left:?}", subject.chain)))
}
