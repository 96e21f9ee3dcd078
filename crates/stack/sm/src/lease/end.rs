//! The end of a storage worker whose host lost the lease.

use tapio_types::ApiError;

use super::Fence;

/// The status of a worker that ended because of its lease.
const LOST: i32 = 75;

/// Ends the process: what is half done belongs to the host that has the lease, or to the next worker here.
pub(super) fn lost(fence: &dyn Fence, error: &ApiError) -> ! {
    let number = fence.number();
    tracing::error!("the storage worker ends in the middle of its work: fencing number {number}: {error}");
    std::process::exit(LOST);
}
