//! The use of each SR over time: a point each half hour, for two weeks, in the store.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tapio_model::{ApiError, Value};

use super::attached::Attached;
use super::forecast::{Points, forecast};
use super::work::Work;
use super::{Call, Handlers, Storage, records};
use crate::args::Args;

/// Where the points lie in the store.
const PREFIX: &str = "sr-use/";
/// Seconds from one point to the next.
const EVERY: i64 = 1800;
/// Points that are kept of an SR: two weeks.
const KEPT: usize = 672;

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("SR.get_forecast", get_forecast);
}

fn get_forecast(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let sr = call.part.db.get("SR", args.text(0)?)?;
    let bytes = |field: &str| u64::try_from(sr.int(field)).unwrap_or_default();
    let now = records::now();
    let figures = (now, bytes("physical_utilisation"), bytes("physical_size"));
    let told = forecast(&call.part.points(&sr.reference), figures).told(now);
    Ok(Value::string_map(told))
}

impl Points for Storage {
    fn points(&self, sr: &str) -> Vec<(i64, u64)> {
        let key = format!("{PREFIX}{sr}");
        let text = self.db.notes(&key).into_iter().find(|(known, _)| *known == key).map(|(_, text)| text);
        // Points that cannot be read are of another version: they begin anew.
        text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
    }
}

impl Storage {
    /// Adds a point for each attached SR that is due for one, on a thread of its own: a storage may hang. At most one
    /// such thread is there.
    pub(crate) fn sample(self: &Arc<Self>) {
        let now = records::now();
        let is_due = |sr: &Attached| {
            self.points(&sr.reference).last().is_none_or(|(time, _)| now.saturating_sub(*time) >= EVERY)
        };
        let mut due: Vec<Arc<Attached>> = self.state().attached.values().cloned().collect();
        due.retain(|sr| is_due(sr));
        if due.is_empty() || self.is_sampling.swap(true, Ordering::AcqRel) {
            return;
        }
        let storage = Arc::clone(self);
        let work = move || {
            let call = Call::own(&storage);
            for sr in due {
                if let Err(error) = add(&call, &sr, now) {
                    tracing::warn!(sr = %sr.uuid, %error, "no point of its use was taken");
                }
            }
            storage.is_sampling.store(false, Ordering::Release);
        };
        if let Err(error) = std::thread::Builder::new().name("sr-use".to_owned()).spawn(work) {
            self.is_sampling.store(false, Ordering::Release);
            tracing::warn!(%error, "no thread to look at the use of SRs");
        }
    }
}

/// Adds a point of an SR, and drops those of SRs that are no more.
fn add(call: &Call, sr: &Attached, now: i64) -> Result<(), ApiError> {
    let used = sr.with(|device| device.stat(&Work::new(call)))?.physical_utilisation;
    let mut points = call.part.points(&sr.reference);
    points.push((now, used));
    points.drain(..points.len().saturating_sub(KEPT));
    let text = serde_json::to_string(&points).map_err(|error| ApiError::internal(error.to_string()))?;
    let known = call.part.db.notes(PREFIX);
    call.part.db.change(|change| {
        for (key, _) in &known {
            if change.get("SR", key.trim_start_matches(PREFIX)).is_err() {
                change.drop_note(key.clone());
            }
        }
        // It may have gone meanwhile.
        if change.get("SR", &sr.reference).is_ok() {
            change.put_note(format!("{PREFIX}{}", sr.reference), text);
        }
        Ok(())
    })
}
