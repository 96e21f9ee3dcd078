//! Whose a request is that is no call, and what its query says.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::Request;
use hyper::header::{AUTHORIZATION, COOKIE, HeaderName};
use percent_encoding::percent_decode_str;
use tapio_model::{ApiError, Value};

use super::calls::Calls;
use super::limits::ServerLimits;
use crate::backend::Peer;

/// Parameters of the query, and cookies behind them.
pub(super) struct Params(Vec<(String, String)>);

impl Params {
    pub(super) fn of<B>(request: &Request<B>) -> Self {
        let cookies = header(request, COOKIE).unwrap_or_default();
        let query = request.uri().query().unwrap_or_default();
        Self::of_pairs(query.split('&').chain(cookies.split(';').map(str::trim)))
    }

    /// Those of a form in a body. A space stands there as a plus sign, which no name here has.
    pub(super) fn of_form(body: &[u8]) -> Self {
        Self::of_pairs(String::from_utf8_lossy(body).trim().split('&'))
    }

    fn of_pairs<'a>(pairs: impl Iterator<Item = &'a str>) -> Self {
        let decode = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let pairs = pairs.filter(|pair| !pair.is_empty());
        Self(
            pairs
                .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
                .map(|(name, value)| (decode(name), decode(value)))
                .collect(),
        )
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        let found = self.0.iter().find(|(known, value)| known == name && !value.is_empty());
        found.map(|(_, value)| value.clone())
    }

    /// Parameters whose name begins so: what follows, and their values.
    pub(super) fn beginning_with(&self, prefix: &str) -> Vec<(String, String)> {
        let found = self.0.iter().filter_map(|(name, value)| Some((name.strip_prefix(prefix)?, value)));
        found.map(|(name, value)| (name.to_owned(), value.clone())).collect()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(known, value)| known == name && value != "false")
    }
}

/// A header that is text.
pub(super) fn header<B>(request: &Request<B>, name: HeaderName) -> Option<&str> {
    request.headers().get(name)?.to_str().ok()
}

fn account<B>(request: &Request<B>) -> Option<(String, String)> {
    let (scheme, text) = header(request, AUTHORIZATION)?.split_once(' ')?;
    let bytes = scheme.eq_ignore_ascii_case("basic").then(|| STANDARD.decode(text.trim()).ok())??;
    let text = String::from_utf8(bytes).ok()?;
    let (user, password) = text.split_once(':')?;
    Some((user.to_owned(), password.to_owned()))
}

/// Whose a request is: a session's, or that of an account which has none yet.
pub(super) struct Credentials {
    /// `session_id` of the query or of a cookie.
    pub(super) session: Option<String>,
    /// Name and password.
    pub(super) account: Option<(String, String)>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // No secrets.
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

/// The session of a request.
pub(super) struct Entered {
    pub(super) session: String,
    /// It was made for the request.
    is_ours: bool,
}

impl Credentials {
    /// Those of a request.
    pub(super) fn of<B>(request: &Request<B>, params: &Params) -> Self {
        Self { session: params.get("session_id"), account: account(request) }
    }

    /// The session, made if there is none; [`Entered::leave`] ends it.
    pub(super) async fn enter(
        &self,
        calls: &Calls,
        (peer, limits): (&Peer, &ServerLimits),
    ) -> Result<Entered, ApiError> {
        if let Some(session) = &self.session {
            return Ok(Entered { session: session.clone(), is_ours: false });
        }
        let (user, password) = match &self.account {
            Some((user, password)) => (user.clone(), password.clone()),
            None if peer.superuser => ("root".to_owned(), String::new()),
            None => return Err(ApiError::new("SESSION_INVALID", [tapio_model::NULL_REF])),
        };
        let params = vec![Value::String(user), Value::String(password)];
        match calls.value(peer, limits, "session.login_with_password", params).await? {
            Value::String(session) => Ok(Entered { session, is_ours: true }),
            _ => Err(ApiError::internal("a login answers a session")),
        }
    }
}

impl Entered {
    /// One that a client has.
    pub(super) fn of(session: &str) -> Self {
        Self { session: session.to_owned(), is_ours: false }
    }

    /// Ends a session that was made for the request.
    pub(super) async fn leave(self, calls: &Calls, (peer, limits): (&Peer, &ServerLimits)) {
        if !self.is_ours {
            return;
        }
        let logout = vec![Value::String(self.session)];
        if let Err(error) = calls.value(peer, limits, "session.logout", logout).await {
            tracing::debug!("{}: {error}", peer.address);
        }
    }
}
