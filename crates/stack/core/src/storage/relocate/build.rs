//! The images of a move are made and filled, beside what is there.

use std::collections::BTreeMap;

use tapio_model::ApiError;
use tapio_sm::{ForkKind, NewVdi};
use uuid::Uuid;

use super::super::attached::Building;
use super::super::work::Work;
use super::Moved;
use super::plan::{Op, Plan};

/// The part of the progress that belongs to copying; the rest is for mirrors and switches.
pub(super) const COPYING: f64 = 0.9;

impl Moved<'_> {
    /// The part of the call's progress between two fractions of the move.
    pub(super) fn work(&self, from: f64, to: f64) -> Work<'_> {
        let (first, last) = self.wish.part;
        let at = |fraction: f64| first + (last - first) * fraction;
        Work::part(self.call, at(from), at(to))
    }

    /// Makes all images; answers the base copies that came with them.
    ///
    /// # Errors
    /// No room, a storage that fails, `TASK_CANCELLED`.
    pub(super) fn build<'a>(
        &'a self,
        plan: &Plan,
        building: &mut Vec<Building<'a>>,
    ) -> Result<Vec<Uuid>, ApiError> {
        let to = &self.to;
        let all = plan.bytes.max(1) as f64;
        let (mut done, mut bases) = (0.0, Vec::new());
        for op in &plan.ops {
            if self.call.progress.is_cancelled() {
                return Err(ApiError::bare("TASK_CANCELLED"));
            }
            match op {
                Op::Create { image, size, is_raw } => {
                    let new = self.lowest(*image, *size, *is_raw);
                    to.with(|sr| sr.create(&Work::new(self.call), &new))?;
                }
                Op::Grow { image, size } => {
                    to.with(|sr| sr.resize(&Work::new(self.call), *image, *size))?;
                }
                Op::Fill { image, from, base, bytes } => {
                    let next = done + *bytes as f64 / all;
                    let work = self.work(done * COPYING, next.min(1.0) * COPYING);
                    to.with(|sr| sr.fill(&work, *image, from, base.as_ref()))?;
                    done = next;
                }
                Op::Fork { image, new } => {
                    let fork = to.with(|sr| sr.fork(&Work::new(self.call), *image, *new, ForkKind::Clone))?;
                    if let Some(base) = fork.base {
                        building.push(to.build(base.uuid));
                        bases.push(base.uuid);
                    }
                }
            }
        }
        Ok(bases)
    }

    /// The lowest image: of the kind of the source where the SR has it, or of the kind that is wished for.
    fn lowest(&self, uuid: Uuid, virtual_size: u64, is_raw: bool) -> NewVdi {
        let first = self.members.first();
        let name = |field: &str| first.map_or_else(String::new, |member| member.vdi.text(field).to_owned());
        let mut sm_config = self.wish.shape.clone().unwrap_or_default();
        if self.wish.shape.is_none() && is_raw {
            sm_config = BTreeMap::from([("type".to_owned(), "raw".to_owned())]);
        }
        let (name_label, name_description) = (name("name_label"), name("name_description"));
        NewVdi { uuid, virtual_size, sm_config, name_label, name_description }
    }
}
