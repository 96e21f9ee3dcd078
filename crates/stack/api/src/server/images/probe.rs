//! Requests that look for a redirection before a stream is sent.
//!
//! The npm client `xen-api` sends a stream of unknown length behind a request that is the same but for its body, which
//! is empty although 1 PiB was announced. It waits for the answer and closes the connection. Nothing tells the two
//! requests apart but the bytes, so an answer that is waited for comes although nothing has begun; the import begins if
//! bytes follow all the same.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};
use tapio_model::{ApiError, Asked, Transfer};

use super::super::calls::Calls;
use super::super::ended;
use super::super::limits::ServerLimits;
use super::super::refusal::refusal;
use super::super::reply::Reply;
use super::{Images, Running, answered_early, outcome_of, receive};

/// How long a client that has a stream may take to send its first bytes before it is answered. One that takes longer
/// loses nothing but the status of a failure: its connection is cut instead.
const FIRST_BYTES: Duration = Duration::from_millis(500);

/// The first bytes of a body; none where it ended, or none came in time.
pub(super) async fn first_bytes(body: &mut Incoming) -> Option<Bytes> {
    tokio::time::timeout(FIRST_BYTES, next(body)).await.ok().flatten()
}

/// The next bytes of a body.
async fn next(body: &mut Incoming) -> Option<Bytes> {
    loop {
        let frame = body.frame().await?.ok()?;
        match frame.into_data() {
            Ok(bytes) if !bytes.is_empty() => return Some(bytes),
            _ => {}
        }
    }
}

impl Images {
    /// Answers a request that may be no more than a look; its import begins when bytes come.
    pub(super) async fn answer_probe(
        &self,
        calls: &Calls,
        limits: &ServerLimits,
        transfer: Transfer,
        mut body: Incoming,
    ) -> Reply {
        let vdi = match &transfer.asked {
            Ok(Asked::Import { vdi, .. }) => vdi.clone(),
            _ => None,
        };
        let looks =
            Transfer { session: transfer.session.clone(), task: None, asked: Ok(Asked::Probe { vdi }) };
        let looked = match self.start(&calls.backend, looks) {
            Ok(Running { done, .. }) => outcome_of(done).await,
            Err(error) => Err(error),
        };
        if let Err(error) = looked {
            return refusal(&error, None);
        }
        let (images, backend, upload_time) = (self.clone(), calls.backend.clone(), limits.upload_time);
        let ending = calls.ending.clone();
        answered_early(async move {
            let Ok(Some(first)) = tokio::time::timeout(upload_time, next(&mut body)).await else {
                return Ok::<(), ApiError>(());
            };
            let Running { data, done, .. } = images.start(&backend, transfer)?;
            receive(Box::pin(ended(ending)), upload_time, (data, done), (first, body)).await
        })
    }
}
