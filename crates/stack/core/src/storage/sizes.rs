//! Sizes of SRs, brought up to date at intervals: guests that write take room without a call.

use std::sync::Arc;

use tapio_model::ApiError;

use super::attached::Attached;
use super::work::Work;
use super::{Call, Storage};

impl Storage {
    /// Asks all attached storages for their sizes, each on a thread of its own, and waits for none. One that has not
    /// answered the last time, or hangs, is left alone.
    pub fn measure_sizes(self: &Arc<Self>) {
        let attached: Vec<Arc<Attached>> = self.state().attached.values().cloned().collect();
        for attached in attached {
            if attached.is_in_trouble() || !attached.begin_measuring() {
                continue;
            }
            let (same, storage) = (Arc::clone(&attached), Arc::clone(self));
            let measuring = move || {
                if let Err(error) = measure(&Call::own(&storage), &same) {
                    tracing::debug!(sr = %same.uuid, %error, "sizes stay as they were");
                }
                same.end_measuring();
            };
            if let Err(error) = std::thread::Builder::new().name("sr-sizes".to_owned()).spawn(measuring) {
                tracing::warn!(sr = %attached.uuid, %error, "no thread asks for sizes");
                attached.end_measuring();
            }
        }
    }
}

fn measure(call: &Call, attached: &Attached) -> Result<(), ApiError> {
    let Some(sizes) = attached.measure(&Work::new(call)) else { return Ok(()) };
    call.part.db.change(|change| attached.record(change, Some(sizes), 0))
}
