//! The host that decides gives that to another, or one takes it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::ApiError;

use super::Pool;
use super::membership::{COORDINATOR, NEXT};
use crate::call::Call;
use crate::db::reference_of;

/// How long the next one may take.
const LIMIT: Duration = Duration::from_secs(20);

fn failed(error: tapio_store::StoreError) -> ApiError {
    ApiError::internal(format!("the database of the pool: {error}"))
}

/// `pool.designate_new_master`: all writes of this host are done or refused before the next one begins.
pub(super) fn designate(call: &Call<Pool>, host: &str) -> Result<(), ApiError> {
    let pool = &call.part;
    let member = pool.member()?;
    let next = pool.db.get("host", host)?.uuid()?;
    if !pool.is_live(host) {
        return Err(ApiError::new("HOST_OFFLINE", [host]));
    }
    if next == member.access.host {
        return Ok(());
    }
    let Some(held) = *pool.holding.lock() else { return Err(ApiError::new("HOST_OFFLINE", [host])) };
    let turning = pool.turning.lock();
    member.etcd.release(NEXT, None).map_err(failed)?;
    member.etcd.hold(NEXT, &next.to_string(), held.lease).map_err(failed)?;
    let Some(number) = pool.state.write().own.take() else {
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["this host does not decide for the pool"]));
    };
    pool.fence(member, held, None);
    member.etcd.release(COORDINATOR, Some(number)).map_err(failed)?;
    drop(turning);
    let until = Instant::now() + LIMIT;
    let taken = loop {
        let now = member.etcd.holder(COORDINATOR).map_err(failed)?;
        if now.is_some_and(|(now, _)| now == next.to_string()) {
            break true;
        }
        if Instant::now() > until {
            break false;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    member.etcd.release(NEXT, None).map_err(failed)?;
    if taken { Ok(()) } else { Err(ApiError::new("CANNOT_CONTACT_HOST", [host])) }
}

/// `pool.emergency_transition_to_master`: this host decides, if no other does.
pub(super) fn take_over(pool: &Arc<Pool>) -> Result<(), ApiError> {
    let member = pool.member()?;
    let Some(held) = *pool.holding.lock() else {
        return Err(ApiError::internal(
            "the database of the pool does not answer: no host can decide before it does",
        ));
    };
    if pool.campaign(member, held).map_err(failed)? {
        return Ok(());
    }
    let other = member.etcd.holder(COORDINATOR).map_err(failed)?.map(|(other, _)| other);
    let other =
        other.and_then(|other| uuid::Uuid::parse_str(&other).ok()).map(reference_of).unwrap_or_default();
    let what = format!("host {other} decides for the pool, and lives; use pool-designate-new-master");
    Err(ApiError::new("OPERATION_NOT_ALLOWED", [what]))
}
