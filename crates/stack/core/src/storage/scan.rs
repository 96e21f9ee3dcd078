//! An SR is scanned, when a client asks or devices come and go.

use tapio_model::ApiError;

use super::attached::{Attached, HOT_PLUG};
use super::transaction::Transaction;
use super::{Call, queues, reconcile};
use crate::operations::on_sr;

/// Scans an attached SR. One whose devices come and go has their queues set as well.
///
/// # Errors
/// `OTHER_OPERATION_IN_PROGRESS`, the driver's, the store's.
pub(super) fn scan(call: &Call, attached: &Attached) -> Result<(), ApiError> {
    let operation = Transaction::enter(call, &[on_sr(&attached.reference, "scan")], |_| Ok(()))?;
    operation.note(None, None)?;
    reconcile::scan(call, attached)?;
    operation.commit(None, |_| Ok(()))?;
    if attached.can(HOT_PLUG) {
        queues::apply(call, attached);
    }
    Ok(())
}
