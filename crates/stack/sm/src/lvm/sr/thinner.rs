//! An SR becomes thin: VDIs that are made from now on, while those that are there keep the shape that they have.

use tapio_types::ApiError;

use super::VolumeSr;
use crate::errors;
use crate::lock::Share;
use crate::lvm::metadata::{Allocation, SrEntry};
use crate::lvm::thin::{Provision, Wanted};
use crate::traits::{Config, Ctx};

/// Volumes that one process of LVM marks.
const AT_ONCE: usize = 100;

impl VolumeSr {
    /// See [`crate::Sr::make_thin`]. What is there is marked before the SR says what it is: a kill between the two
    /// leaves it thick.
    pub(super) fn become_thin(&self, ctx: &dyn Ctx, config: &Config) -> Result<(), ApiError> {
        let asked = crate::lvm::allocation(config)?;
        let provision = Provision::of_sr(Allocation::Thin, &asked);
        let _held = self.lock(ctx, Share::Exclusive)?;
        ctx.step("lv:thin-begin");
        // Another host may have made it thin: what was made since is thin, and stays so.
        if self.metadata().is_none_or(|said| said.sr.allocation == Allocation::Thick) {
            let listed = self.group.list()?;
            let images = listed.volumes.iter().filter(|(name, _)| name.starts_with("VHD-"));
            let unmarked = images.filter(|(_, volume)| Wanted::of(volume).allocation.is_none());
            let unmarked: Vec<&str> = unmarked.map(|(name, _)| name.as_str()).collect();
            let mark = if self.provision().is_thin { Allocation::Thin } else { Allocation::Thick };
            for some in unmarked.chunks(AT_ONCE) {
                self.group.add_tag(some, &format!("allocation={}", mark.word()))?;
            }
            ctx.step("lv:thin-marked");
            let said = self.try_change(|said, medium| {
                let sr = SrEntry { allocation: Allocation::Thin, ..said.sr.clone() };
                said.set_sr(medium, sr)
            });
            said.map_err(|why| errors::fail(181, format_args!("{}: {why}", self.group.name)))?;
        }
        ctx.step("lv:thin-said");
        *self.provision.write() = provision;
        Ok(())
    }
}
