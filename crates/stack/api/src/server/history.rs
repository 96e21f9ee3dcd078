//! `GET /rrd_updates`, `/vm_rrd`, `/host_rrd`, `/sr_rrd`: histories as XenServer's clients read them, with the
//! accounts and roles of calls.

use std::collections::BTreeMap;

use hyper::body::Incoming;
use hyper::header::ACCEPT;
use hyper::{Method, Request};
use tapio_model::{ApiError, Value};

use super::calls::Calls;
use super::credentials::{Credentials, Params, header};
use super::limits::ServerLimits;
use super::refusal::refusal;
use super::reply::Reply;
use crate::backend::Peer;

/// Paths, and what `host.export_history` has under them.
const PATHS: [(&str, &str); 4] =
    [("/rrd_updates", "updates"), ("/vm_rrd", "VM"), ("/host_rrd", "host"), ("/sr_rrd", "SR")];

/// Parameters that go on to the call.
const OPTIONS: [&str; 6] = ["start", "interval", "cf", "vm_uuid", "sr_uuid", "uuid"];

/// What a request asks for; none: it asks for something else.
pub(super) fn wanted(method: &Method, path: &str) -> Option<&'static str> {
    let found = PATHS.iter().find(|(known, _)| *method == Method::GET && *known == path);
    found.map(|(_, what)| *what)
}

/// The text, or why not.
pub(super) async fn answer(
    calls: &Calls,
    (peer, limits): (&Peer, &ServerLimits),
    what: &str,
    request: Request<Incoming>,
) -> Reply {
    let params = Params::of(&request);
    let accepts_json = header(&request, ACCEPT).is_some_and(|kinds| kinds.contains("application/json"));
    let is_json = accepts_json || params.has("json");
    let credentials = Credentials::of(&request, &params);
    let entered = match credentials.enter(calls, (peer, limits)).await {
        Ok(entered) => entered,
        Err(error) => return refusal(&error, None),
    };
    let session = entered.session.clone();
    let given =
        OPTIONS.iter().filter_map(|name| Some(((*name).to_owned(), Value::String(params.get(name)?))));
    let mut options: BTreeMap<String, Value> = given.collect();
    for (name, is_set) in [("json", is_json), ("host", params.has("host"))] {
        options.insert(name.to_owned(), Value::string(is_set.to_string()));
    }
    let given = vec![Value::string(&session), Value::string(what), Value::Map(options)];
    let text = match calls.value(peer, limits, "host.export_history", given).await {
        Ok(Value::String(text)) => Ok(text),
        Ok(_) => Err(ApiError::internal("a history is a text")),
        Err(error) => Err(error),
    };
    let kind = if is_json { "application/json" } else { "text/xml" };
    let reply = match text {
        Ok(text) => calls.text(peer, session, kind, text),
        Err(error) => refusal(&error, None),
    };
    entered.leave(calls, (peer, limits)).await;
    reply
}
