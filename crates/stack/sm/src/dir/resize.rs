//! A larger disk.

use std::fs::OpenOptions;

use tapio_format::vhd::offline::{self, ResizeStep};
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::ImageDir;
use super::create::rounded;
use super::facts::FileKind;
use crate::errors;
use crate::lock::Share;
use crate::traits::{Ctx, LiveDisk, Notice, VdiInfo};

impl ImageDir {
    pub(super) fn resize_image(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError> {
        let _held = self.lock(ctx, Share::Exclusive)?;
        let live = ctx.live(vdi);
        if live.is_none() {
            self.check_unused(ctx, vdi, "resize")?;
            self.finish_resize(vdi)?;
        }
        let facts = self.whole_image(vdi)?;
        let size = rounded(facts.kind, bytes)?;
        if bytes < facts.virtual_size {
            let text = format!(
                "{bytes} bytes are fewer than the {} it has: a VDI is not made smaller",
                facts.virtual_size
            );
            return Err(errors::fail(79, text));
        }
        let info = self.info_now(vdi, &facts)?;
        if !info.managed {
            return Err(errors::fail(110, format_args!("{vdi} is a base copy: its size is for good")));
        }
        if size == facts.virtual_size {
            return Ok(info);
        }
        let path = self.file(facts.kind, vdi);
        ctx.step("resize:begin");
        let is_live = live.is_some();
        match (live, facts.kind) {
            (Some(disk), _) => self.grow_live(ctx, vdi, disk.as_ref(), size)?,
            (None, FileKind::Vhd) => {
                let named = |step| match step {
                    ResizeStep::Begin => "resize:journal-written",
                    ResizeStep::DataMoved => "resize:data-moved",
                    ResizeStep::MetadataMoved => "resize:metadata-moved",
                    ResizeStep::End => "resize:done",
                };
                offline::resize_journalled(&path, size, &offline::journal_beside(&path), |step| {
                    ctx.step(named(step));
                })
                .map_err(|error| errors::image(110, &error))?;
            }
            (None, FileKind::Raw) => {
                let grown = OpenOptions::new().write(true).open(&path).and_then(|file| {
                    file.set_len(size)?;
                    file.sync_all()
                });
                grown.map_err(|error| match error.raw_os_error() {
                    Some(libc::EFBIG) => errors::io(79, "cannot make longer", &path, &error),
                    _ => errors::io(110, "cannot make longer", &path, &error),
                })?;
                ctx.step("resize:done");
            }
        }
        // A running disk makes its log longer itself. A log that is left shorter grows when the disk is opened.
        if !is_live && self.has_log(vdi) {
            self.grow_log(ctx, vdi, size)?;
            ctx.step("resize:log-grown");
        }
        self.info_of(vdi, 0)
    }

    /// A log that cannot be made longer does not keep its VDI from that: it is given up.
    fn grow_log(&self, ctx: &dyn Ctx, vdi: Uuid, size: u64) -> Result<(), ApiError> {
        match self.settled(ctx, vdi, size) {
            Err(error) if error.code != "SR_BACKEND_FAILURE_46" => {
                self.drop_logs(ctx, &[vdi])?;
                ctx.notice(vdi, Notice::ResizeUntracked, &error.to_string());
                Ok(())
            }
            done => done.map(drop),
        }
    }

    /// Makes a running disk longer, which makes its log longer first. If it fails, it is tried again with a log that is
    /// long enough, or with none.
    fn grow_live(&self, ctx: &dyn Ctx, vdi: Uuid, disk: &dyn LiveDisk, size: u64) -> Result<(), ApiError> {
        match disk.grow(size) {
            Err(_) if disk.access() == Access::ReadWrite && self.has_log(vdi) => {
                self.with_closed_log(ctx, vdi, || self.grow_log(ctx, vdi, size), || Ok(()))?;
                disk.grow(size)
            }
            done => done,
        }
    }

    /// Takes back a resize that was broken off, where there is one.
    pub(super) fn finish_resize(&self, vdi: Uuid) -> Result<(), ApiError> {
        let path = self.file(FileKind::Vhd, vdi);
        if let Some(done) = offline::finish_resize(&path).map_err(|error| errors::image(65, &error))? {
            tracing::info!("{}: {done}", path.display());
        }
        Ok(())
    }
}
