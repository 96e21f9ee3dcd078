//! Bodies to calls, answers to bodies.

use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use hyper::body::Bytes;
use tapio_model::{Answer, ApiError, Large, Value};
use tokio::sync::{Semaphore, watch};

use super::budget::{Budget, FREE_LEN, Full, Payer, Share};
use super::fair::Busy;
use super::lanes::{Lane, Lanes};
use super::limits::ServerLimits;
use super::pieces::{cost, pieces};
use super::reply::{Reply, body, failure, held, reply, reply_of, texts};
use crate::backend::{ApiBackend, Peer};
use crate::writer::{Language, Writer};
use crate::{jsonrpc, xmlrpc};

const XML: &str = "text/xml";
const JSON: &str = "application/json";

/// Error of a call that waited when the daemon ended.
const ENDING: &str = "the toolstack's daemon is ending; connect again";

const FULL_SHARE: &str = "answers to this account or address wait to be read, as many as it may have; read them and come back in a second";
const FULL: &str = "too many answers wait to be read; come back in a second";
const BUSY: &str = "too many calls are waiting; come back in a second";
const BUSY_LOGINS: &str = "too many passwords wait to be checked, those of your address among them; keep a session, or come back in a second";

/// Why there is no answer.
enum Refused {
    Busy(Lane),
    Ending,
    Full(Full),
}

impl Refused {
    const fn why(&self) -> &'static str {
        match self {
            Self::Busy(Lane::Login) => BUSY_LOGINS,
            Self::Busy(_) => BUSY,
            Self::Ending => ENDING,
            Self::Full(Full::Share) => FULL_SHARE,
            Self::Full(Full::All) => FULL,
        }
    }

    fn reply(&self) -> Reply {
        failure(StatusCode::SERVICE_UNAVAILABLE, self.why())
    }
}

/// An answer in words, with what it holds.
enum Told {
    Whole(String, Option<Share>),
    Large(Box<Large>, Language, Share),
}

/// What a call came to on its thread.
enum Done {
    Text(String),
    Large(Box<Large>),
}

/// Does calls.
pub(super) struct Calls {
    pub(super) backend: Arc<dyn ApiBackend>,
    pub(super) lanes: Lanes,
    pub(super) budget: Arc<Budget>,
    /// Pieces of large answers that are put into words at a time.
    pub(super) turns: Arc<Semaphore>,
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
        language: Language,
    ) -> Result<Told, Refused> {
        let session = params.first().and_then(Value::as_str).map(str::to_owned);
        if let Some(wait) = self.backend.wait(peer, &method, &mut params) {
            let answer = tokio::select! {
                answer = wait => answer,
                () = super::ended(self.ending.clone()) => return Err(Refused::Ending),
            };
            return self.told(peer, session, done(&language, answer), language);
        }
        let lane = Lane::of(peer, &method);
        let place = self.lanes.enter(lane, peer).await.map_err(|Busy| Refused::Busy(lane))?;
        let (backend, peer_there) = (Arc::clone(&self.backend), peer.clone());
        let work = move || {
            // If the client goes away the call goes on, and keeps its place.
            let _place = place;
            let answer = backend.call(&peer_there, &method, params);
            let refused = lane == Lane::Login && answer.as_ref().is_err_and(is_refusal);
            (done(&language, answer), language, refused)
        };
        let (done, language, refused) = match tokio::task::spawn_blocking(work).await {
            Ok(done) => done,
            // The call panicked: a defect of ours, which costs this call alone.
            Err(error) => {
                tracing::error!("a call ended by a defect: {error}");
                return Err(Refused::Ending);
            }
        };
        if refused && limits.refusal_delay > Duration::ZERO {
            // After a wrong password the client waits, without a thread.
            tokio::time::sleep(limits.refusal_delay).await;
        }
        self.told(peer, session, done, language)
    }

    /// A call that the server makes for a request that is none, in the lane of that call; its value.
    pub(super) async fn value(
        &self,
        peer: &Peer,
        limits: &ServerLimits,
        method: &'static str,
        params: Vec<Value>,
    ) -> Result<Value, ApiError> {
        let lane = Lane::of(peer, method);
        let busy = |Busy| ApiError::bare("TOO_MANY_PENDING_TASKS");
        let place = self.lanes.enter(lane, peer).await.map_err(busy)?;
        let (backend, there) = (Arc::clone(&self.backend), peer.clone());
        let work = move || {
            let _place = place;
            backend.call(&there, method, params).and_then(Answer::whole)
        };
        let done = tokio::task::spawn_blocking(work).await;
        let done = done.unwrap_or_else(|error| Err(ApiError::internal(format!("{method}: {error}"))));
        if lane == Lane::Login && done.as_ref().is_err_and(is_refusal) {
            tokio::time::sleep(limits.refusal_delay).await;
        }
        done
    }

    /// Takes room for an answer.
    fn told(
        &self,
        peer: &Peer,
        session: Option<String>,
        done: Done,
        language: Language,
    ) -> Result<Told, Refused> {
        let len = match &done {
            Done::Text(text) if text.len() <= FREE_LEN => 0,
            Done::Text(text) => text.len(),
            Done::Large(large) => cost(large),
        };
        let take = || {
            let account = session.and_then(|session| self.backend.account_of(&session)).map(Payer::Account);
            let address = Payer::Address(peer.address.clone());
            let payers: Arc<[Payer]> = std::iter::once(address).chain(account).collect();
            self.budget.take(&payers, len).map_err(|full| {
                tracing::debug!("{}: no room for an answer of {len} bytes: {full:?}", peer.address);
                Refused::Full(full)
            })
        };
        Ok(match done {
            Done::Text(text) if len == 0 => Told::Whole(text, None),
            Done::Text(text) => Told::Whole(text, Some(take()?)),
            Done::Large(large) => Told::Large(large, language, take()?),
        })
    }

    /// An answer of text to a request that is no call, which counts like answers to calls.
    pub(super) fn text(&self, peer: &Peer, session: String, kind: &'static str, text: String) -> Reply {
        match self.told(peer, Some(session), Done::Text(text), Language::Xml) {
            Ok(told) => self.reply(kind, told),
            Err(refused) => refused.reply(),
        }
    }

    fn reply(&self, kind: &'static str, told: Told) -> Reply {
        let body = match told {
            Told::Whole(text, None) => body(text),
            Told::Whole(text, Some(share)) => body(held(text, Arc::new(share))),
            Told::Large(large, language, share) => pieces(*large, language, share, Arc::clone(&self.turns)),
        };
        reply_of(StatusCode::OK, kind, body)
    }

    pub(super) async fn xml(&self, peer: &Peer, limits: &ServerLimits, body: &[u8]) -> Reply {
        let call = match xmlrpc::decode_call(body, limits.message) {
            Ok(call) => call,
            Err(wrong) => {
                let why = format!("This is no XML-RPC call: {wrong}");
                return reply(StatusCode::OK, XML, xmlrpc::encode_fault(&why));
            }
        };
        match self.answer(peer, limits, call.method, call.params, Language::Xml).await {
            Ok(told) => self.reply(XML, told),
            Err(refused) => refused.reply(),
        }
    }

    pub(super) async fn json(&self, peer: &Peer, limits: &ServerLimits, body: &[u8]) -> Reply {
        match jsonrpc::decode(body, limits.message) {
            // An error of the protocol is an answer: clients look into the body of a 200 only.
            Err(wrong) => reply(StatusCode::OK, JSON, jsonrpc::encode_malformed(&wrong)),
            Ok(jsonrpc::Body::One(Err(invalid))) => {
                reply(StatusCode::OK, JSON, jsonrpc::encode_invalid(&invalid))
            }
            Ok(jsonrpc::Body::One(Ok(call))) => match self.json_answer(peer, limits, call).await {
                Ok(Some(told)) => self.reply(JSON, told),
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
    ) -> Result<Option<Told>, Refused> {
        let wanted = call.id.is_some();
        let language = Language::Json(call.version, call.id);
        let told = self.answer(peer, limits, call.method, call.params, language).await?;
        Ok(wanted.then_some(told))
    }

    /// One call after the other: a batch is a list in an order.
    async fn batch(
        &self,
        peer: &Peer,
        limits: &ServerLimits,
        calls: Vec<Result<jsonrpc::Call, jsonrpc::Invalid>>,
    ) -> Reply {
        let mut answers: Vec<Bytes> = Vec::new();
        let mut len = 0;
        for call in calls {
            let answer: Option<Bytes> = match call {
                Err(invalid) => Some(jsonrpc::encode_invalid(&invalid).into()),
                Ok(call) => {
                    let (version, id) = (call.version, call.id.clone());
                    let failed = |why: String| {
                        let error = Err(ApiError::new("INTERNAL_ERROR", [why]));
                        id.is_some().then(|| jsonrpc::encode_answer(version, &id, &error).into())
                    };
                    if len > limits.batch_answer_len_max {
                        failed(format!(
                            "not done: the answers before it have {len} bytes; ask for less at a time"
                        ))
                    } else {
                        match self.json_answer(peer, limits, call).await {
                            Ok(None) => None,
                            Ok(Some(told)) => match self.batched(told, limits.batch_answer_len_max).await {
                                Ok((text, None)) => Some(text.into()),
                                Ok((text, Some(share))) => Some(held(text, Arc::new(share))),
                                Err(why) => failed(format!("not told: {why}")),
                            },
                            Err(refused) => failed(format!("not done: {}", refused.why())),
                        }
                    }
                }
            };
            len += answer.as_ref().map_or(0, Bytes::len);
            if let Some(answer) = answer {
                answers.push(Bytes::from_static(if answers.is_empty() { b"[" } else { b"," }));
                answers.push(answer);
            }
        }
        if answers.is_empty() {
            return reply(StatusCode::NO_CONTENT, JSON, "");
        }
        answers.push(Bytes::from_static(b"]"));
        reply_of(StatusCode::OK, JSON, texts(answers))
    }

    /// An answer of a batch, which is made at once.
    async fn batched(&self, told: Told, len_max: usize) -> Result<(String, Option<Share>), String> {
        let (large, language, share) = match told {
            Told::Whole(text, share) => return Ok((text, share)),
            Told::Large(large, language, share) => (large, language, share),
        };
        if large.len > len_max {
            return Err(format!("the answer has about {} bytes: ask for it alone", large.len));
        }
        let Ok(room) = share.try_more(large.len) else { return Err(FULL_SHARE.to_owned()) };
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|error| error.to_string())?;
        let made = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            Writer::new(*large, language).rest()
        });
        let text = made.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        Ok((text, Some(room)))
    }
}

/// An answer in words, unless it is one that is made piece by piece.
fn done(language: &Language, answer: Result<Answer, ApiError>) -> Done {
    let answer = match answer {
        Ok(Answer::Large(large)) => return Done::Large(Box::new(large)),
        Ok(Answer::Whole(value)) => Ok(value),
        Err(error) => Err(error),
    };
    Done::Text(match (language, &answer) {
        (Language::Json(version, id), answer) => jsonrpc::encode_answer(*version, id, answer),
        (Language::Xml, Ok(value)) => xmlrpc::encode_success(value),
        (Language::Xml, Err(error)) => xmlrpc::encode_failure(error),
    })
}

fn is_refusal(error: &ApiError) -> bool {
    error.code.starts_with("SESSION_AUTH")
}
