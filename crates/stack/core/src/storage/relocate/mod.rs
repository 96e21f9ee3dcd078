//! VDIs move to another SR, or are made anew within theirs, also while VMs use them.
//!
//! ```text
//! plan       which images are made, in which order: what several VDIs are based on is made once
//! build      the images are made and filled, beside what is there
//! live       the disk process of a VM mirrors its disk onto its new image
//! switch     a VDI becomes another one: its record, its VBDs, its snapshots, the note of its holder
//! settle     what a move leaves that failed, or whose daemon was killed
//! request    VDI.pool_migrate and its relatives
//! evacuate   SR.evacuate
//! ```
//!
//! A VDI that moves gets another UUID, as XenServer's does: its image is named after it, and for a while there are two.
//! Everything that leads to the VDI (VBDs, snapshots, VMs whose memory it has) leads to the new one after the
//! switch, by one commit. The old image and its record are removed after that, as by `VDI.destroy`; until then nothing
//! of the source was changed but the note of the disk process that it went on elsewhere.
//!
//! What decides where a disk is that is being switched: its process, while it lives; then the note that the process
//! made beside the old image, durably and before it wrote to the new one ([`tapio_sm::Sr::continued`]).

mod build;
mod evacuate;
mod live;
pub(crate) mod plan;
mod request;
mod settle;
mod switch;

pub(crate) use live::{look_at_mirror, lost_of, make_whole, said};
pub(crate) use request::with_snapshots;
pub(super) use settle::{again, recover};
pub(crate) use switch::becomes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tapio_control::MirrorCopy;
use tapio_model::ApiError;
use tapio_types::Access;
use uuid::Uuid;

use super::attached::{Attached, Building};
use super::copy::Reading;
use super::notes::{Move, Moving, Note};
use super::transaction::Transaction;
use super::vdi::{Subject, made_note};
use super::work::{Names, Work};
use super::{Call, half_done, tracking};
use crate::operations::{MOVE, SWITCH, on_sr, on_vdi};
use crate::plan::steps::step;
use plan::{Facts, Plan, Source};

/// Registers the messages.
pub(super) fn register(handlers: &mut super::Handlers<'_>) {
    request::register(handlers);
    evacuate::register(handlers);
}

/// What operations and errors call it.
const OP: &str = MOVE;

/// Where VDIs go.
#[derive(Debug)]
pub(crate) struct Wish<'a> {
    /// The SR's reference; that of the VDIs' own for one that is made anew.
    pub(crate) to: &'a str,
    /// `sm_config` of the lowest image that is made, in place of what the source is.
    pub(crate) shape: Option<BTreeMap<String, String>>,
    /// The part of the call's progress that this is.
    pub(crate) part: (f64, f64),
}

/// VDIs that move.
struct Moved<'a> {
    call: &'a Call,
    from: Arc<Attached>,
    to: Arc<Attached>,
    members: Vec<Subject>,
    /// The VBDs whose disk processes write to members, by the members' references.
    writers: BTreeMap<String, Writer>,
    wish: &'a Wish<'a>,
}

/// A VBD whose disk process writes to a VDI.
#[derive(Clone, Debug)]
struct Writer {
    holder: String,
    vbd: Uuid,
}

/// Moves VDIs of one SR; what they have in common is made once. Answers the new references in their order.
///
/// # Errors
/// Those of `VDI.pool_migrate`. All VDIs are then where they were, but for those that were switched before: then the
/// error is of another one.
pub(crate) fn relocate(call: &Call, vdis: &[String], wish: &Wish<'_>) -> Result<Vec<String>, ApiError> {
    let members = vdis.iter().map(|vdi| Subject::find(call, vdi)).collect::<Result<Vec<_>, _>>()?;
    let Some(first) = members.first() else { return Ok(Vec::new()) };
    let (from, to) = (Arc::clone(&first.sr), call.part.attached(wish.to)?);
    from.needs("VDI_DELETE")?;
    to.needs("VDI_CREATE")?;
    for member in &members {
        may_move(call, &from, member)?;
    }
    // A collection changes the chains that are copied, and those that are made.
    let _idle = [call.part.hold_off(&from.reference), call.part.hold_off(&to.reference)];
    let mut targets: Vec<_> = members.iter().map(|member| on_vdi(member.reference(), OP)).collect();
    targets.extend([on_sr(&from.reference, "vdi_mirror"), on_sr(&to.reference, "vdi_create")]);
    let mut writers = BTreeMap::new();
    // Where a disk went on whose move was broken off, a note beside its image says. Plugins keep none.
    let keeps_no_notes = [&from, &to].into_iter().find(|sr| sr.origin.is_some());
    let operation = Transaction::enter(call, &targets, |state| {
        writers.clear();
        for vdi in members.iter().map(Subject::reference) {
            let refused = || ApiError::new("VDI_IN_USE", [vdi, OP]);
            match (state.use_of(vdi), state.holders.get(vdi)) {
                (None, _) | (_, None) => {}
                _ if keeps_no_notes.is_some() => {
                    let sr = keeps_no_notes.map_or("", |sr| sr.reference.as_str());
                    return Err(ApiError::new("SR_OPERATION_NOT_SUPPORTED", [sr]));
                }
                (Some(Access::ReadWrite), Some(holders)) if holders.len() == 1 => {
                    let holder = holders.keys().next().cloned().unwrap_or_default();
                    writers.insert(vdi.to_owned(), holder);
                }
                _ => return Err(refused()),
            }
        }
        Ok(())
    })?;
    let writers = writers.into_iter().map(|(vdi, holder)| {
        let vbd = call.part.db.get("VBD", &holder).and_then(|vbd| vbd.uuid());
        let vbd = vbd.map_err(|_| ApiError::new("VDI_IN_USE", [vdi.as_str(), OP]))?;
        Ok((vdi, Writer { holder, vbd }))
    });
    let writers = writers.collect::<Result<_, ApiError>>()?;
    let moved = Moved { call, from, to, members, writers, wish };
    moved.run(&operation)
}

/// What of a VDI's record forbids that it moves. pool-and-motion, `VDI.pool_migrate`.
fn may_move(call: &Call, from: &Attached, member: &Subject) -> Result<(), ApiError> {
    let vdi = member.reference();
    tracking::has_data(&member.vdi)?;
    if member.sr.reference != from.reference {
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the VDIs lie in different SRs"]));
    }
    if member.vdi.text("on_boot") == "reset" {
        return Err(ApiError::bare("VDI_ON_BOOT_MODE_INCOMPATIBLE_WITH_OPERATION"));
    }
    if member.vdi.bool("cbt_enabled") {
        return Err(ApiError::new("VDI_CBT_ENABLED", [vdi]));
    }
    // An operation on a VM has just made it and goes on with it.
    if !call.part.db.notes(&made_note(vdi)).is_empty() {
        return Err(ApiError::new("VDI_IN_USE", [vdi, OP]));
    }
    Ok(())
}

impl Moved<'_> {
    fn told(&self, error: ApiError) -> ApiError {
        let vdi = self.members.first().map_or("", Subject::reference);
        Names { sr: &self.to.reference, vdi, op: OP }.translate(self.call, error)
    }

    fn run(&self, operation: &Transaction<'_>) -> Result<Vec<String>, ApiError> {
        let mut reading = Reading::new(self.call, operation);
        let mut sources = Vec::new();
        for member in &self.members {
            let writer = self.writers.get(member.reference());
            let chain = match writer {
                Some(writer) => live::chain(self.call, member, writer)?,
                None => reading.open(member)?,
            };
            let size = u64::try_from(member.vdi.int("virtual_size")).unwrap_or_default();
            sources.push(Source { layers: chain.layers, size, is_live: writer.is_some() });
        }
        let plan = plan::plan(&sources, &|layer| self.facts(layer));
        self.has_room(&plan)?;
        let moving = self.members.iter().zip(&plan.places).map(|(member, place)| Moving {
            vdi: member.reference().to_owned(),
            image: place.image,
            vbd: self.writers.get(member.reference()).map(|writer| writer.vbd),
        });
        let mut note = Move {
            id: Uuid::new_v4(),
            sr: self.from.reference.clone(),
            to: self.to.reference.clone(),
            members: moving.collect(),
            images: plan.images.clone(),
            switching: None,
        };
        let mut building: Vec<Building<'_>> = plan.images.iter().map(|image| self.to.build(*image)).collect();
        operation.note(Some(&Note::Move(note.clone())), Some("vdi-move:noted"))?;
        let moved = self.steps(&mut note, &plan, &mut building, reading);
        let moved = match moved {
            Ok(()) => self.references(&plan),
            Err(error) => {
                settle::after_failure(self.call, &self.to, note);
                Err(self.told(error))
            }
        };
        drop(building);
        for sr in BTreeSet::from([&self.from.reference, &self.to.reference]) {
            self.call.part.collect_later(sr);
        }
        moved
    }

    fn references(&self, plan: &Plan) -> Result<Vec<String>, ApiError> {
        let references = plan.places.iter().map(|place| crate::db::reference_of(place.image));
        references.map(|vdi| self.call.part.db.get("VDI", &vdi).map(|_| vdi)).collect()
    }

    /// From the note of what is to come to the removal of what was.
    fn steps<'a>(
        &'a self,
        note: &mut Move,
        plan: &Plan,
        building: &mut Vec<Building<'a>>,
        reading: Reading<'_>,
    ) -> Result<(), ApiError> {
        let bases = self.build(plan, building)?;
        step("vdi-move:copied");
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        order.sort_by_key(|at| std::cmp::Reverse(plan.places[*at].depth));
        let mut left: Vec<Note> = Vec::new();
        for at in &order {
            let (member, place) = (&self.members[*at], plan.places[*at]);
            let Some(writer) = self.writers.get(member.reference()) else { continue };
            let copy = if place.has_below { MirrorCopy::Leaf } else { MirrorCopy::Allocated };
            left.push(self.move_live(note, (member, writer), (place, copy), (&bases, plan))?);
        }
        let still: Vec<&Subject> = order.iter().map(|at| &self.members[*at]).collect();
        let still: Vec<&Subject> =
            still.into_iter().filter(|member| !self.writers.contains_key(member.reference())).collect();
        if still.is_empty() {
            drop(reading);
        } else {
            left.extend(self.move_still(note, &still, &bases, reading)?);
        }
        step("vdi-move:switched");
        for old in &left {
            if let Err(error) = half_done::image(self.call, &self.from, old) {
                tracing::warn!(note = ?old, %error, "an image that was moved stays until its SR is attached again");
                if self.from.is_in_trouble() {
                    self.from.owe(old.clone());
                }
            }
        }
        Ok(())
    }

    /// VDIs that no disk process writes to become what was copied.
    fn move_still(
        &self,
        note: &mut Move,
        still: &[&Subject],
        bases: &[Uuid],
        reading: Reading<'_>,
    ) -> Result<Vec<Note>, ApiError> {
        let call = self.call;
        if call.progress.is_cancelled() {
            return Err(ApiError::bare("TASK_CANCELLED"));
        }
        let targets: Vec<_> = still.iter().map(|member| on_vdi(member.reference(), SWITCH)).collect();
        let _switch = call.part.operations.enter(&*call.progress, &targets, || {
            let state = call.part.state();
            let is_alone = |member: &&&Subject| {
                state.holders.get(member.reference()).is_none_or(|holders| holders.len() <= 1)
            };
            match still.iter().find(|member| !is_alone(member)) {
                Some(member) => Err(ApiError::new("VDI_IN_USE", [member.reference(), OP])),
                None => Ok(()),
            }
        })?;
        // Nothing opens them from here on.
        drop(reading);
        switch::records(call, (&self.from, &self.to), note, still, bases)
    }

    /// What the records know of an image.
    fn facts(&self, layer: &tapio_types::LayerSpec) -> Option<Facts> {
        let uuid = Uuid::parse_str(layer.path.file_stem()?.to_str()?).ok()?;
        let vdi = self.call.part.db.get("VDI", &crate::db::reference_of(uuid)).ok()?;
        let size = |field: &str| u64::try_from(vdi.int(field)).unwrap_or_default();
        (vdi.text("SR") == self.from.reference).then(|| (size("virtual_size"), size("physical_utilisation")))
    }

    /// Refuses what surely has no room: better now than when half of it is copied.
    fn has_room(&self, plan: &Plan) -> Result<(), ApiError> {
        let stat = self.to.with(|sr| sr.stat(&Work::new(self.call))).map_err(|error| self.told(error))?;
        let free = stat.physical_size.saturating_sub(stat.physical_utilisation);
        let is_thick = self.wish.shape.as_ref().is_some_and(|shape| shape.contains_key("allocation"));
        let sizes = self.members.iter().map(|member| member.vdi.int("virtual_size"));
        let whole = sizes.filter_map(|size| u64::try_from(size).ok()).fold(0, u64::saturating_add);
        let wanted = if is_thick { whole } else { plan.bytes };
        if stat.physical_size > 0 && wanted > free {
            return Err(ApiError::new("SR_FULL", [wanted.to_string(), free.to_string()]));
        }
        Ok(())
    }
}
