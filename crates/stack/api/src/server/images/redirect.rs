//! Transfers that another host of the pool has to do.
//!
//! Clients follow the answer 302: the npm client `xen-api` and Xen Orchestra by hand, curl with `-L`. A session is
//! known to the host at which it was opened, so the address carries a name in its place that the other host has lent:
//! it is good for one transfer, within a minute, by the account that was checked here. The client's task is ended by
//! the host that does the transfer.

use hyper::header::{CONNECTION, HeaderValue, LOCATION};
use hyper::{StatusCode, Uri};
use tapio_model::{ApiError, Asked, OtherHost, Transfer};
use tokio::sync::oneshot;

use super::super::calls::Calls;
use super::super::refusal::refusal;
use super::super::reply::{Reply, reply};
use super::request::Wanted;
use super::{Images, OCTETS, defect, outcome_of};

/// The host that has to do the transfer; none: this one.
///
/// # Errors
/// The session may not do it; the other host cannot be reached.
pub(super) async fn elsewhere(
    calls: &Calls,
    wanted: &Wanted,
    session: &str,
) -> Result<Option<OtherHost>, ApiError> {
    let Some(place) = wanted.place.clone().filter(|_| calls.backend.has_others()) else { return Ok(None) };
    // The transfer itself says what is wrong with it.
    if wanted.asked.is_err() {
        return Ok(None);
    }
    let (backend, session, task) = (calls.backend.clone(), session.to_owned(), wanted.task.clone());
    let (tell, told) = oneshot::channel();
    let work = move || drop(tell.send(backend.elsewhere(&session, &place, task.as_deref())));
    std::thread::Builder::new()
        .name("tapiod-elsewhere".into())
        .spawn(work)
        .map_err(|error| ApiError::internal(format!("the host of a transfer is not looked up: {error}")))?;
    told.await.unwrap_or_else(|_| Err(defect()))
}

/// Sends the client to another host: the same request, under the name that it has lent.
pub(super) fn answer(uri: &Uri, other: &OtherHost) -> Reply {
    let is_session = |pair: &&str| pair.split_once('=').is_some_and(|(name, _)| name == "session_id");
    let query = uri.query().unwrap_or_default().split('&');
    let mut pairs: Vec<&str> = query.filter(|pair| !pair.is_empty() && !is_session(pair)).collect();
    let lent = format!("session_id={}", other.session);
    pairs.push(&lent);
    let place = format!("https://{}{}?{}", other.address, uri.path(), pairs.join("&"));
    let Ok(place) = HeaderValue::from_str(&place) else {
        return refusal(&ApiError::internal("the address of another host is no text for a header"), None);
    };
    let mut reply = reply(StatusCode::FOUND, OCTETS, "");
    reply.headers_mut().insert(LOCATION, place);
    // What the client has begun to send is for the other host.
    reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    reply
}

/// The answer to a client that cannot be sent to the host that has to do its transfer. Its task fails with that.
pub(super) async fn refused(
    images: &Images,
    calls: &Calls,
    (wanted, session): (&Wanted, &str),
    error: &ApiError,
) -> Reply {
    if wanted.task.is_some() && !matches!(wanted.asked, Ok(Asked::Probe { .. })) {
        let asked = Err(error.clone());
        let transfer = Transfer { session: session.to_owned(), task: wanted.task.clone(), asked };
        if let Ok(running) = images.start(&calls.backend, transfer) {
            let _ = outcome_of(running.done).await;
        }
    }
    refusal(error, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_has_everything_but_the_session_of_here() {
        let place = |uri: &str| {
            let other = OtherHost { address: "192.0.2.7:8443".into(), session: "OpaqueRef:lent".into() };
            let reply = answer(&uri.parse().expect("a URI"), &other);
            assert_eq!(reply.status(), StatusCode::FOUND);
            reply.headers()[LOCATION].to_str().expect("text").to_owned()
        };
        assert_eq!(
            place("/export_raw_vdi/?session_id=OpaqueRef:own&format=vhd&vdi=OpaqueRef%3Aa"),
            "https://192.0.2.7:8443/export_raw_vdi/?format=vhd&vdi=OpaqueRef%3Aa&session_id=OpaqueRef:lent"
        );
        assert_eq!(
            place("/import?sr_uuid=b"),
            "https://192.0.2.7:8443/import?sr_uuid=b&session_id=OpaqueRef:lent"
        );
    }
}
