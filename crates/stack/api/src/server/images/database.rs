//! A database that comes: the answer is the report of what it changes, or why it is refused.

use std::time::Duration;

use hyper::StatusCode;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, HeaderValue};
use tapio_model::ApiError;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::refusal::refusal;
use super::super::reply::{Reply, reply};
use super::{Running, defect, feed, outcome_of};
use crate::backend::BoxFuture;

/// Longest report, in bytes; it names each object that changes.
const REPORT_LEN_MAX: u64 = 256 << 20;

/// Gives a database to the toolstack; its report.
pub(super) async fn receive(
    mut ending: BoxFuture<()>,
    upload_time: Duration,
    running: Running,
    (first, mut body): (Bytes, Incoming),
) -> Result<String, ApiError> {
    let Running { mut data, mut done, .. } = running;
    let early = tokio::select! {
        biased;
        done = &mut done => Some(done),
        () = feed(&mut ending, upload_time, &mut data, (first, &mut body)) => None,
    };
    if let Some(done) = early {
        return done.unwrap_or_else(|_| Err(defect())).map(|()| String::new());
    }
    let mut text = String::new();
    // A toolstack that refuses has closed its end, and says why.
    if data.shutdown().await.is_ok() {
        let _ = (&mut data).take(REPORT_LEN_MAX).read_to_string(&mut text).await;
    }
    outcome_of(done).await.map(|()| text)
}

pub(super) fn answer(received: Result<String, ApiError>) -> Reply {
    match received {
        Ok(report) => {
            let mut reply = reply(StatusCode::OK, "application/json", report);
            reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            reply
        }
        Err(error) => refusal(&error, None),
    }
}
