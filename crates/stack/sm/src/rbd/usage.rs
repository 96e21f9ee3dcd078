//! Sizes of a pool.

use std::sync::Arc;

use serde::Deserialize;
use tapio_rbd::{Pool, RbdError};

use crate::traits::SrStat;

/// A part of what a monitor answers to `df`.
#[derive(Deserialize)]
struct Df {
    #[serde(default)]
    pools: Vec<DfPool>,
}

#[derive(Deserialize)]
struct DfPool {
    name: String,
    stats: DfStats,
}

#[derive(Deserialize)]
struct DfStats {
    #[serde(default)]
    stored: u64,
    #[serde(default)]
    max_avail: u64,
}

#[derive(Deserialize)]
struct Quota {
    #[serde(default)]
    quota_max_bytes: u64,
}

/// Bytes of a pool, and of these in use, without copies. A cluster without a manager does not count, and answers 0.
pub(super) fn pool_use(pool: &Arc<Pool>) -> Result<SrStat, RbdError> {
    let answer = pool.cluster().ask_monitor(r#"{"prefix":"df","format":"json"}"#)?;
    let odd = |error: serde_json::Error| {
        RbdError::new(libc::EPROTO, format!("a monitor's answer cannot be understood: {error}"))
    };
    let df: Df = serde_json::from_str(&answer).map_err(odd)?;
    let found = df.pools.into_iter().find(|known| known.name == pool.name()).map(|known| known.stats);
    let stats = found.unwrap_or(DfStats { stored: 0, max_avail: 0 });
    // Names of pools have no character that JSON would need to escape, or the monitor refuses the question.
    let asked = serde_json::json!({"prefix": "osd pool get-quota", "pool": pool.name(), "format": "json"});
    let quota = pool.cluster().ask_monitor(&asked.to_string()).ok();
    let quota: Option<Quota> = quota.and_then(|quota| serde_json::from_str(&quota).ok());
    let all = stats.stored.saturating_add(stats.max_avail);
    let physical_size = match quota.map_or(0, |quota| quota.quota_max_bytes) {
        0 => all,
        quota if all == 0 => quota,
        quota => all.min(quota),
    };
    Ok(SrStat { physical_size, physical_utilisation: stats.stored, virtual_allocation: 0 })
}
