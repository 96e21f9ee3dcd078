//! An operation from its beginning to the commit of its result.

use std::cell::Cell;

use tapio_model::ApiError;
use tapio_sm::worker::is_unfinished;

use super::attached::Attached;
use super::notes::Note;
use super::state::StorageState;
use super::{Call, allowed};
use crate::db::Change;
use crate::operations::{Held, Target};
use crate::plan::steps::step;

/// An operation that runs; clients see it in `current_operations`. When this goes before [`Self::commit`] succeeded,
/// the operation is over without a result.
#[derive(Debug)]
pub(super) struct Transaction<'a> {
    call: &'a Call,
    held: Held,
    /// Whether records show it.
    is_shown: Cell<bool>,
}

impl<'a> Transaction<'a> {
    /// Begins an operation; `check` sees the state as it is at that moment.
    ///
    /// # Errors
    /// See [`crate::operations::Operations::enter`].
    pub(super) fn enter(
        call: &'a Call,
        targets: &[Target<'_>],
        mut check: impl FnMut(&mut StorageState) -> Result<(), ApiError>,
    ) -> Result<Self, ApiError> {
        let storage = &call.part;
        loop {
            match storage.operations.enter(&*call.progress, targets, || check(&mut storage.state())) {
                Ok(held) => return Ok(Self { call, held, is_shown: Cell::new(false) }),
                Err(error) if storage.has_yielded(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The task, or a name that stands for one.
    pub(super) fn task(&self) -> &str {
        self.held.task()
    }

    /// Shows the operation to clients and writes what will be half done, then comes to the place `name`.
    ///
    /// # Errors
    /// The store's; then nothing was noted.
    pub(super) fn note(&self, note: Option<&Note>, name: Option<&'static str>) -> Result<(), ApiError> {
        self.is_shown.set(true);
        self.call.part.db.change(|change| {
            self.refresh(change)?;
            note.map_or(Ok(()), |note| note.put(change))
        })?;
        if let Some(name) = name {
            step(name);
        }
        Ok(())
    }

    /// [`Self::note`] of a note that is made by the same change.
    ///
    /// # Errors
    /// What `make` answers, or the store's; then nothing was noted.
    pub(super) fn note_made(
        &self,
        make: impl FnOnce(&mut Change<'_>) -> Result<Note, ApiError>,
        name: &'static str,
    ) -> Result<Note, ApiError> {
        self.is_shown.set(true);
        let note = self.call.part.db.change(|change| {
            let note = make(change)?;
            self.refresh(change)?;
            note.put(change)?;
            Ok(note)
        })?;
        step(name);
        Ok(note)
    }

    /// Writes the result: what `make` changes, together with the end of the operation and of its note.
    ///
    /// # Errors
    /// What `make` answers, or the store's; then nothing was changed.
    pub(super) fn commit<T>(
        &self,
        note: Option<&Note>,
        make: impl FnOnce(&mut Change<'_>) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let answer = self.call.part.db.change(|change| {
            let answer = make(change)?;
            note.inspect(|note| note.drop_from(change));
            self.held.is_ending();
            self.refresh(change)?;
            Ok(answer)
        })?;
        self.is_shown.set(false);
        Ok(answer)
    }

    /// Ends it without a result; the note goes as well, because nothing is half done. Where the store fails the note
    /// stays, and the next start finds out.
    pub(super) fn give_up(&self, note: Option<&Note>) {
        if let Err(error) = self.commit(note, |_| Ok(())) {
            tracing::warn!(task = self.task(), %error, "the end of an operation could not be written");
        }
    }

    /// Ends it where its image was not made. Where it is not known whether it was, the note stays: if there is such an
    /// image, it is removed when the storage answers.
    pub(super) fn not_made(&self, note: &Note, attached: &Attached, error: &ApiError) {
        if is_unfinished(error) {
            attached.owe(note.clone());
        } else {
            self.give_up(Some(note));
        }
    }

    fn refresh(&self, change: &mut Change<'_>) -> Result<(), ApiError> {
        for (class, reference) in self.held.objects() {
            allowed::refresh(&self.call.part, change, class, reference)?;
        }
        Ok(())
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if self.is_shown.get() {
            self.give_up(None);
        }
    }
}
