//! Bodies to calls, answers to bodies.

use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use tapio_model::{ApiError, Value};
use tokio::sync::watch;

use super::lanes::{Busy, Lane, Lanes};
use super::limits::ServerLimits;
use super::reply::{Reply, failure, reply};
use crate::door::{Door, Peer};
use crate::{jsonrpc, xmlrpc};

const XML: &str = "text/xml";
const JSON: &str = "application/json";

/// Error of a call that waited when the daemon ended.
const ENDING: &str = "the toolstack's daemon is ending; connect again";

const BUSY: &str = "too many calls are waiting; come back in a second";

/// Why there is no answer.
enum Refused {
    Busy,
    Ending,
}

impl Refused {
    const fn why(&self) -> &'static str {
        match self {
            Self::Busy => BUSY,
            Self::Ending => ENDING,
        }
    }

    fn reply(&self) -> Reply {
        failure(StatusCode::SERVICE_UNAVAILABLE, self.why())
    }
}

/// Does calls.
pub(super) struct Calls {
    pub(super) door: Arc<dyn Door>,
    pub(super) lanes: Lanes,
    pub(super) ending: watch::Receiver<bool>,
}

impl Calls {
    /// Does a call and puts its answer into words, both off the threads that serve connections.
    async fn answer(
        &self,
        peer: &Peer,
        limits: &ServerLimits,
        method: String,
        mut params: Vec<Value>,
        encode: impl FnOnce(&Result<Value, ApiError>) -> String + Send + 'static,
    ) -> Result<String, Refused> {
        if let Some(wait) = self.door.wait(peer, &method, &mut params) {
            let answer = tokio::select! {
                answer = wait => answer,
                () = super::ended(self.ending.clone()) => return Err(Refused::Ending),
            };
            // The first answer of a listener is everything there is: worth a thread.
            return tokio::task::spawn_blocking(move || encode(&answer)).await.map_err(|_| Refused::Ending);
        }
        let lane = Lane::of(&method);
        let place = self.lanes.enter(lane).await.map_err(|Busy| Refused::Busy)?;
        let (door, peer) = (Arc::clone(&self.door), peer.clone());
        let work = move || {
            // If the client goes away the call goes on, and keeps its place.
            let _place = place;
            let answer = door.call(&peer, &method, params);
            let refused = lane == Lane::Login && answer.as_ref().is_err_and(is_refusal);
            (encode(&answer), refused)
        };
        let done = tokio::task::spawn_blocking(work).await;
        let (text, refused) = match done {
            Ok(done) => done,
            // The call panicked: a defect of ours, which costs this call alone.
            Err(error) => {
                tracing::error!("a call ended by a defect: {error}");
                return Err(Refused::Ending);
            }
        };
        if refused && limits.refusal_delay > Duration::ZERO {
            // Who guesses waits, without a thread.
            tokio::time::sleep(limits.refusal_delay).await;
        }
        Ok(text)
    }

    pub(super) async fn xml(&self, peer: &Peer, limits: &ServerLimits, body: &[u8]) -> Reply {
        let call = match xmlrpc::decode_call(body, limits.message) {
            Ok(call) => call,
            Err(wrong) => {
                let why = format!("This is no XML-RPC call: {wrong}");
                return failure(StatusCode::INTERNAL_SERVER_ERROR, &why);
            }
        };
        let encode = |answer: &Result<Value, ApiError>| match answer {
            Ok(value) => xmlrpc::encode_success(value),
            Err(error) => xmlrpc::encode_failure(error),
        };
        match self.answer(peer, limits, call.method, call.params, encode).await {
            Ok(text) => reply(StatusCode::OK, XML, text),
            Err(refused) => refused.reply(),
        }
    }

    pub(super) async fn json(&self, peer: &Peer, limits: &ServerLimits, body: &[u8]) -> Reply {
        match jsonrpc::decode(body, limits.message) {
            Err(wrong) => reply(StatusCode::INTERNAL_SERVER_ERROR, JSON, jsonrpc::encode_malformed(&wrong)),
            Ok(jsonrpc::Body::One(Err(invalid))) => {
                reply(StatusCode::INTERNAL_SERVER_ERROR, JSON, jsonrpc::encode_invalid(&invalid))
            }
            Ok(jsonrpc::Body::One(Ok(call))) => match self.json_answer(peer, limits, call).await {
                Ok(Some(text)) => reply(StatusCode::OK, JSON, text),
                Ok(None) => reply(StatusCode::NO_CONTENT, JSON, ""),
                Err(refused) => refused.reply(),
            },
            Ok(jsonrpc::Body::Batch(calls)) => self.batch(peer, limits, calls).await,
        }
    }

    /// None where the caller wants no answer.
    async fn json_answer(
        &self,
        peer: &Peer,
        limits: &ServerLimits,
        call: jsonrpc::Call,
    ) -> Result<Option<String>, Refused> {
        let (version, id) = (call.version, call.id);
        let wanted = id.is_some();
        let encode = move |answer: &Result<Value, ApiError>| jsonrpc::encode_answer(version, &id, answer);
        let text = self.answer(peer, limits, call.method, call.params, encode).await?;
        Ok(wanted.then_some(text))
    }

    /// One call after the other: a batch is a list in an order.
    async fn batch(
        &self,
        peer: &Peer,
        limits: &ServerLimits,
        calls: Vec<Result<jsonrpc::Call, jsonrpc::Invalid>>,
    ) -> Reply {
        let mut answers = Vec::new();
        let mut len = 0;
        for call in calls {
            let answer = match call {
                Err(invalid) => Some(jsonrpc::encode_invalid(&invalid)),
                Ok(call) => {
                    let (version, id) = (call.version, call.id.clone());
                    let failed = |why: String| {
                        let error = Err(ApiError::new("INTERNAL_ERROR", [why]));
                        id.is_some().then(|| jsonrpc::encode_answer(version, &id, &error))
                    };
                    if len > limits.batch_answer_len_max {
                        failed(format!(
                            "not done: the answers before it have {len} bytes; ask for less at a time"
                        ))
                    } else {
                        match self.json_answer(peer, limits, call).await {
                            Ok(answer) => answer,
                            Err(refused) => failed(format!("not done: {}", refused.why())),
                        }
                    }
                }
            };
            len += answer.as_ref().map_or(0, String::len);
            answers.extend(answer);
        }
        if answers.is_empty() {
            return reply(StatusCode::NO_CONTENT, JSON, "");
        }
        reply(StatusCode::OK, JSON, jsonrpc::encode_batch(&answers))
    }
}

fn is_refusal(error: &ApiError) -> bool {
    error.code.starts_with("SESSION_AUTH")
}
