//! Images that go.

use std::io;
use std::path::Path;

use tapio_format::vhd::offline::journal_beside;
use tapio_types::ApiError;
use uuid::Uuid;

use super::facts::{Facts, FileKind};
use super::index::{Listing, Own};
use super::journal::{foreign_journal, unfinished};
use super::{ImageDir, moved};
use crate::errors;
use crate::lock::Share;
use crate::traits::Ctx;

impl ImageDir {
    /// Removes the image of a VDI, and its log of changed blocks unless that is kept.
    pub(super) fn destroy_image(&self, ctx: &dyn Ctx, vdi: Uuid, keeps_log: bool) -> Result<(), ApiError> {
        let held = self.lock(ctx, Share::Exclusive)?;
        self.check_unused(ctx, vdi, "destroy")?;
        if let Some(journal) = foreign_journal(&self.path, vdi) {
            return Err(errors::fail(46, unfinished(&journal)));
        }
        if !keeps_log {
            self.finish_fork_after(ctx, vdi)?;
        }
        let own = self.index.begin();
        if let Some(facts) = self.lone(&own, vdi)? {
            self.remove_one(ctx, facts.kind, vdi, keeps_log)?;
            self.index.end(&own, &[vdi]);
            return self.sync();
        }
        let mut listing = self.list()?;
        if listing.leftovers.iter().any(|name| *name == format!("clone_{vdi}")) {
            self.recover_locked(ctx, &listing)?;
            listing = self.list()?;
        }
        let Some(facts) = listing.images.get(&vdi).cloned() else {
            if !listing.logs.contains(&vdi) {
                return Err(errors::vdi_missing(self.sr, vdi));
            }
            return if keeps_log { Ok(()) } else { self.remove_log(ctx, vdi) };
        };
        let children = listing.children().get(&vdi).copied().unwrap_or(0);
        if children > 0 {
            let text = format!("{vdi} carries {children} other images: destroy those first");
            return Err(errors::fail(80, text));
        }
        let parent = listing.parent_of(&facts);
        let own = self.index.begin();
        self.remove_one(ctx, facts.kind, vdi, keeps_log)?;
        listing.images.remove(&vdi);
        let mut gone = vec![vdi];
        self.remove_garbage(ctx, &mut listing, parent, &mut gone)?;
        self.index.end(&own, &gone);
        drop(held);
        Ok(())
    }

    /// An image that can go without a look at all others: it carries none, and no base copy goes with it. A visible
    /// VHD that carries others is known from a look at the directory; so is a raw image.
    fn lone(&self, own: &Own, vdi: Uuid) -> Result<Option<Facts>, ApiError> {
        let Some(known) = self.index.lone(own, vdi) else { return Ok(None) };
        if std::fs::symlink_metadata(self.path.join(format!("clone_{vdi}"))).is_ok() {
            return Ok(None);
        }
        let facts = self.image(vdi)?;
        let is_as_known = (facts.kind, facts.footer_uuid, &facts.parent)
            == (known.kind, known.footer_uuid, &known.parent)
            && facts.damage.is_none()
            && !facts.hidden;
        Ok(is_as_known.then_some(facts))
    }

    /// Removes the files of one image.
    fn remove_one(&self, ctx: &dyn Ctx, kind: FileKind, vdi: Uuid, keeps_log: bool) -> Result<(), ApiError> {
        ctx.step("destroy:begin");
        let path = self.file(kind, vdi);
        remove(&path)?;
        self.sync()?;
        ctx.step("destroy:image-gone");
        remove(&journal_beside(&path))?;
        // A disk that left it for another image needs no way there any more.
        moved::forget(kind, &path)?;
        if keeps_log { Ok(()) } else { self.remove_log(ctx, vdi) }
    }

    /// Removes `first` and the images below it as far as they are base copies that carry nothing any more.
    ///
    /// Adds what goes to `gone`. None goes while some image cannot be read: its parent is not known, and may be this.
    fn remove_garbage(
        &self,
        ctx: &dyn Ctx,
        listing: &mut Listing,
        first: Option<Uuid>,
        gone: &mut Vec<Uuid>,
    ) -> Result<(), ApiError> {
        let mut next = first;
        let is_known = listing.images.values().all(|facts| facts.damage.is_none());
        while let Some(vdi) = next.take().filter(|_| is_known) {
            let Some(facts) = listing.images.get(&vdi).cloned() else { break };
            // A raw image has no flag: one that carried the image just removed was a base copy.
            let is_garbage = (facts.hidden || facts.kind == FileKind::Raw)
                && listing.children().get(&vdi).copied().unwrap_or(0) == 0;
            if !is_garbage || self.check_unused(ctx, vdi, "destroy").is_err() {
                break;
            }
            remove(&self.file(facts.kind, vdi))?;
            self.sync()?;
            ctx.step("destroy:parent-gone");
            listing.images.remove(&vdi);
            gone.push(vdi);
            next = listing.parent_of(&facts);
        }
        self.sync()
    }

    /// Removes hidden images that carry nothing: a destroy that was killed left them.
    pub(super) fn remove_all_garbage(&self, ctx: &dyn Ctx, listing: &mut Listing) -> Result<(), ApiError> {
        let children = listing.children();
        let garbage: Vec<Uuid> = listing
            .images
            .iter()
            .filter(|(vdi, facts)| facts.hidden && !children.contains_key(vdi))
            .map(|(vdi, _)| *vdi)
            .collect();
        for vdi in garbage {
            tracing::info!("SR {}: base copy {vdi} carries nothing and is removed", self.sr);
            self.remove_garbage(ctx, listing, Some(vdi), &mut Vec::new())?;
        }
        Ok(())
    }

    /// Refuses unless the SR is empty; base copies without children are removed first.
    pub(super) fn erase_images(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let mut listing = self.list()?;
        self.remove_all_garbage(ctx, &mut listing)?;
        if !listing.images.is_empty() || !listing.logs.is_empty() {
            return Err(errors::sr_not_empty());
        }
        ctx.step("sr-erase:begin");
        Ok(())
    }
}

/// Removes a file; one that is not there is gone.
pub(super) fn remove(path: &Path) -> Result<(), ApiError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(errors::io(64, "cannot remove", path, &error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tapio_format::vhd::offline::{self, SnapshotOptions};
    use tapio_types::ApiError;
    use uuid::Uuid;

    use super::super::{Backing, ImageDir};
    use super::FileKind;
    use crate::traits::{Config, Ctx, ForkKind, LiveDisk, NewVdi, Sr};

    struct Quiet;

    impl Ctx for Quiet {
        fn is_cancelled(&self) -> bool {
            false
        }

        fn progress(&self, _: f64) {}

        fn live(&self, _: Uuid) -> Option<Box<dyn LiveDisk>> {
            None
        }

        fn step(&self, _: &'static str) {}
    }

    struct Nothing;

    impl Backing for Nothing {
        fn detach(&self) -> Result<(), ApiError> {
            Ok(())
        }

        fn erase(&self, _: &dyn Ctx) -> Result<(), ApiError> {
            Ok(())
        }
    }

    fn open(dir: &tempfile::TempDir) -> ImageDir {
        let images = dir.path().join("images");
        fs::create_dir_all(&images).unwrap();
        let (sr, run_dir) = (Uuid::from_u128(7), dir.path().join("run"));
        ImageDir::open(&Quiet, sr, &images, &run_dir, &Config::new(), Box::new(Nothing)).unwrap()
    }

    fn make(sr: &ImageDir, format: &str) -> Uuid {
        let new = NewVdi {
            uuid: Uuid::new_v4(),
            virtual_size: 4 << 20,
            sm_config: [("image-format".to_string(), format.to_string())].into(),
            name_label: String::new(),
            name_description: String::new(),
        };
        sr.create(&Quiet, &new).unwrap().uuid
    }

    /// Files that an SR with so many images asks for while it makes, forks and removes some of them.
    fn asked(others: usize) -> u64 {
        let dir = tempfile::tempdir().unwrap();
        let sr = open(&dir);
        for at in 0..others {
            make(&sr, if at % 2 == 0 { "vhd" } else { "raw" });
        }
        let before = sr.index.asked();
        for _ in 0..5 {
            for format in ["vhd", "raw"] {
                let vdi = make(&sr, format);
                let snapshot = sr.fork(&Quiet, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap();
                let base = snapshot.base.expect("a base copy").uuid;
                sr.destroy(&Quiet, snapshot.made.uuid).unwrap();
                assert!(sr.vdi(&Quiet, base).unwrap().read_only, "{format}: it still carries the VDI");
                let plain = make(&sr, format);
                sr.destroy(&Quiet, plain).unwrap();
                assert!(!sr.file(FileKind::Vhd, plain).exists() && !sr.file(FileKind::Raw, plain).exists());
            }
        }
        let asked = sr.index.asked() - before;
        assert_eq!(sr.scan(&Quiet).unwrap().len(), others + 5 * 2 * 2, "each VDI and its base copy");
        asked
    }

    #[test]
    fn a_destroy_asks_for_as_many_files_in_a_large_sr_as_in_a_small_one() {
        let (few, many) = (asked(2), asked(200));
        assert_eq!(few, many);
    }

    #[test]
    fn a_child_that_another_program_made_is_seen() {
        for format in ["vhd", "raw"] {
            let dir = tempfile::tempdir().unwrap();
            let sr = open(&dir);
            let vdi = make(&sr, format);
            let kind = if format == "vhd" { FileKind::Vhd } else { FileKind::Raw };
            let (path, child) = (sr.file(kind, vdi), Uuid::new_v4());
            // Times of the directory must differ, and the clock of its file system may tick slowly.
            let before = fs::metadata(&sr.path).unwrap().modified().unwrap();
            let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
            while fs::metadata(&sr.path).unwrap().modified().unwrap() == before {
                assert!(std::time::Instant::now() < until, "the clock of the file system stands");
                fs::write(sr.path.join("tick"), "").unwrap();
                fs::remove_file(sr.path.join("tick")).unwrap();
            }
            let options = SnapshotOptions { raw_parent: kind == FileKind::Raw, ..SnapshotOptions::default() };
            offline::snapshot(&sr.file(FileKind::Vhd, child), &path, &options).unwrap();
            let refused = sr.destroy(&Quiet, vdi).expect_err("it carries a child");
            assert!(refused.to_string().contains("carries 1 other"), "{refused}");
            assert!(path.exists());
            sr.destroy(&Quiet, child).unwrap();
            assert!(
                !path.exists() || format == "vhd",
                "a raw image that was a base copy goes with its child"
            );
        }
    }

    #[test]
    fn the_last_vdi_takes_its_base_copy_along() {
        let dir = tempfile::tempdir().unwrap();
        let sr = open(&dir);
        let vdi = make(&sr, "vhd");
        let snapshot = sr.fork(&Quiet, vdi, Uuid::new_v4(), ForkKind::Snapshot).unwrap();
        sr.destroy(&Quiet, vdi).unwrap();
        sr.destroy(&Quiet, snapshot.made.uuid).unwrap();
        assert_eq!(fs::read_dir(&sr.path).unwrap().count(), 0);
        assert_eq!(sr.stat(&Quiet).unwrap().virtual_allocation, 0);
    }
}
