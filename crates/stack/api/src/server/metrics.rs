//! `GET /metrics`: figures for Prometheus, with the accounts and roles of calls.

use hyper::Request;
use hyper::body::Incoming;
use tapio_model::{ApiError, Value};

use super::calls::Calls;
use super::credentials::{Credentials, Params};
use super::limits::ServerLimits;
use super::refusal::refusal;
use super::reply::Reply;
use crate::backend::Peer;

/// What Prometheus asks for, and other programs understand.
const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The figures, or why not.
pub(super) async fn answer(
    calls: &Calls,
    (peer, limits): (&Peer, &ServerLimits),
    request: Request<Incoming>,
) -> Reply {
    let credentials = Credentials::of(&request, &Params::of(&request));
    let entered = match credentials.enter(calls, (peer, limits)).await {
        Ok(entered) => entered,
        Err(error) => return refusal(&error, None),
    };
    let session = entered.session.clone();
    let params = vec![Value::string(&session)];
    let text = match calls.value(peer, limits, "host.export_metrics", params).await {
        Ok(Value::String(text)) => Ok(text),
        Ok(_) => Err(ApiError::internal("metrics are a text")),
        Err(error) => Err(error),
    };
    let reply = match text {
        Ok(text) => calls.text(peer, session, KIND, text),
        Err(error) => refusal(&error, None),
    };
    entered.leave(calls, (peer, limits)).await;
    reply
}
