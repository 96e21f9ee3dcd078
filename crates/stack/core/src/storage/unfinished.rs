//! Operations that were broken off because a storage hangs, or its process died.
//!
//! The caller got its error at once. The driver finishes or undoes what is half done on the storage, when the next
//! process attaches the SR; what the note of the operation says about records is done after that.

use std::sync::Arc;
use std::time::Duration;

use tapio_model::ApiError;

use super::attached::Attached;
use super::notes::Note;
use super::records::Alert;
use super::work::Work;
use super::{Call, Storage, half_done, relocate};

/// How long a storage that does not answer is left alone.
const AGAIN: Duration = Duration::from_secs(5);

impl Storage {
    /// Looks after SRs whose operations were broken off: tells of each, and waits on a thread for the storage to
    /// answer. Waits for nothing itself.
    pub(crate) fn tend(self: &Arc<Self>) {
        let attached: Vec<Arc<Attached>> = self.state().attached.values().cloned().collect();
        for attached in attached {
            let Some(trouble) = attached.tend() else { continue };
            let (same, storage) = (Arc::clone(&attached), Arc::clone(self));
            let waiting = move || {
                wait(&Call::own(&storage), &same, &trouble);
                same.is_tended();
            };
            if let Err(error) = std::thread::Builder::new().name("sr-hangs".to_owned()).spawn(waiting) {
                tracing::error!(sr = %attached.uuid, %error, "no thread to wait for a storage that hangs");
                attached.is_tended();
            }
        }
    }

    fn is_attached(&self, attached: &Attached) -> bool {
        let state = self.state();
        state
            .attached
            .get(&attached.reference)
            .is_some_and(|known| std::ptr::eq(&raw const **known, attached))
    }
}

fn wait(call: &Call, attached: &Attached, trouble: &ApiError) {
    let about = attached.uuid.to_string();
    let body = format!(
        "SR {about}: an operation was broken off: {trouble}. Other SRs are not concerned. The SR is tried again until \
         its storage answers."
    );
    Alert { name: "SR_NOT_ANSWERING", priority: 2, class: "SR", about: &about }.post(&call.part.db, &body);
    while let Err(error) = attached.with(|sr| sr.stat(&Work::new(call))) {
        if !call.part.is_attached(attached) {
            return;
        }
        tracing::warn!(sr = about, %error, "the storage does not answer yet");
        std::thread::sleep(AGAIN);
    }
    for note in attached.owed() {
        let done = match &note {
            Note::Move(moving) => relocate::again(call, moving),
            _ => half_done::image(call, attached, &note),
        };
        if let Err(error) = done {
            tracing::warn!(?note, %error, "what was half done stays so until the SR is attached again");
        }
    }
    let body = format!("SR {about}: its storage answers again, and what was broken off is in order.");
    Alert { name: "SR_ANSWERS_AGAIN", priority: 4, class: "SR", about: &about }.post(&call.part.db, &body);
}
