//! Events: what happened to which objects since a client looked last.
//!
//! A token is `<generation>,<n>`: the change up to which the client knows everything, and how many of the objects it
//! knows would vanish with the daemon. Those cannot be named after a restart, so that a token from before it is good
//! as long as it knows none of them. Nothing is queued for a client: an answer is computed from when objects were made,
//! changed and removed last, so a slow client costs nothing and finds each object once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::{Answer, ApiError, Role, Shape, Value};

use crate::answers::Reader;
use crate::args::Args;
use crate::call::{Call, Handlers};
use crate::db::{Db, History};
use crate::roles;
use crate::sessions::{Session, Sessions};
use crate::subscriptions::{Registration, has_events};

pub use crate::subscriptions::{Filter, Token};

/// Longest wait of `event.from`; what asks for more is answered after that.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// What messages of events need: the objects, and the sessions that they happen for.
#[derive(Debug)]
pub struct Events {
    db: Arc<Db>,
    sessions: Arc<Sessions>,
}

/// A client that waits.
#[derive(Debug)]
pub(crate) struct Wait {
    session: Arc<Session>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    From { filter: Filter, token: Token, until: Instant },
    Next,
}

impl Events {
    /// Those of this database, for these sessions.
    pub(crate) fn new(db: &Arc<Db>, sessions: &Arc<Sessions>) -> Self {
        Self { db: Arc::clone(db), sessions: Arc::clone(sessions) }
    }
}

impl Wait {
    /// Begins `event.from` or `event.next`.
    ///
    /// # Errors
    /// The parameters are wrong.
    pub(crate) fn new(session: Arc<Session>, method: &str, args: &Args) -> Result<Self, ApiError> {
        if method == "event.next" {
            return Ok(Self { session, kind: Kind::Next });
        }
        let filter = Filter::parse(args.value(0)?)?;
        let token = Token::parse(args.text(1)?)?;
        let seconds = match args.value(2)? {
            Value::Float(seconds) => *seconds,
            _ => 0.0,
        };
        let wait = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(WAIT_MAX).min(WAIT_MAX);
        Ok(Self { session, kind: Kind::From { filter, token, until: Instant::now() + wait } })
    }

    /// When it is answered at the latest.
    pub(crate) fn until(&self) -> Option<Instant> {
        match &self.kind {
            Kind::From { until, .. } => Some(*until),
            Kind::Next => None,
        }
    }

    /// Whether the answer may be long to compute.
    pub(crate) fn is_large(&self) -> bool {
        matches!(&self.kind, Kind::From { token, .. } if token.generation == 0)
    }

    /// The answer, when there is one; `is_late` when the time is over.
    ///
    /// # Errors
    /// `SESSION_INVALID` after a logout, `EVENTS_LOST`, `SESSION_NOT_REGISTERED`.
    pub(crate) fn poll(&mut self, events: &Events, is_late: bool) -> Result<Option<Answer>, ApiError> {
        let session = &self.session;
        session.admit(events.sessions.review())?;
        if session.is_over() {
            return Err(ApiError::new("SESSION_INVALID", [session.reference.as_str()]));
        }
        match &mut self.kind {
            Kind::From { filter, token, .. } => {
                let history = look(&events.db, session.role(), filter, *token)
                    .ok_or_else(|| ApiError::bare("EVENTS_LOST"))?;
                if history.happenings.is_empty() && !is_late && token.generation != 0 {
                    // Nothing that concerns this one: the next look starts here.
                    *token = Token::of(&history);
                    return Ok(None);
                }
                let reader = Reader { db: Arc::clone(&events.db), session: Arc::clone(session) };
                batch(reader, history).map(Some)
            }
            Kind::Next => {
                let mut registration = session.registration.lock();
                let Some(Registration { filter, token }) = registration.as_mut() else {
                    return Err(ApiError::new("SESSION_NOT_REGISTERED", [session.reference.as_str()]));
                };
                let Some(history) = look(&events.db, session.role(), filter, *token) else {
                    token.generation = events.db.generation();
                    return Err(ApiError::bare("EVENTS_LOST"));
                };
                *token = Token::of(&history);
                if history.happenings.is_empty() {
                    return Ok(None);
                }
                let reader = Reader { db: Arc::clone(&events.db), session: Arc::clone(session) };
                reader.events(Shape::List, history.happenings).map(Some)
            }
        }
    }
}

fn look(db: &Db, role: Role, filter: &Filter, token: Token) -> Option<History> {
    let classes = filter.classes(role);
    db.history(token.generation, token.volatile, &classes, |class, reference| {
        filter.wants(class, reference) && classes.iter().any(|wanted| wanted.name == class.name)
    })
}

/// What `event.from` answers.
fn batch(reader: Reader, history: History) -> Result<Answer, ApiError> {
    let counts = history.counts.iter().map(|(class, count)| {
        (class.to_ascii_lowercase(), Value::Int(i64::try_from(*count).unwrap_or(i64::MAX)))
    });
    let rest = BTreeMap::from([
        ("valid_ref_counts".to_owned(), Value::Map(counts.collect())),
        ("token".to_owned(), Value::string(Token::of(&history).text())),
    ]);
    reader.events(Shape::Batch(rest), history.happenings)
}

/// Registers the messages of events; those that wait are the dispatcher's.
pub(crate) fn register(handlers: &mut Handlers, events: &Arc<Events>) {
    let mut handlers = handlers.of(events);
    handlers.on("event.register", |call, args| {
        let filter = Filter::parse(args.value(0)?)?;
        let session = session_of(call)?;
        let mut registration = session.registration.lock();
        match registration.as_mut() {
            Some(registration) => registration.filter.add(filter),
            None => {
                let token = Token { generation: call.part.db.generation(), volatile: 0 };
                *registration = Some(Registration { filter, token });
            }
        }
        Ok(Value::Void)
    });
    handlers.on("event.unregister", |call, args| {
        let filter = Filter::parse(args.value(0)?)?;
        let session = session_of(call)?;
        let mut registration = session.registration.lock();
        if let Some(known) = registration.as_mut() {
            known.filter.remove(&filter);
            if known.filter.is_empty() {
                *registration = None;
            }
        }
        drop(registration);
        call.part.db.announce();
        Ok(Value::Void)
    });
    handlers.on("event.get_current_id", |call, _| {
        Ok(Value::Int(i64::try_from(call.part.db.generation()).unwrap_or(i64::MAX)))
    });
    handlers.on("event.inject", |call, args| {
        let (class, reference) = (args.text(0)?, args.text(1)?);
        let known = tapio_model::class(class).filter(|class| has_events(class));
        let class = known.ok_or_else(|| {
            ApiError::new("VALUE_NOT_SUPPORTED", ["class", class, "there are no events of such a class"])
        })?;
        if call.caller.role < class.reader_role {
            return Err(roles::denied("event.inject"));
        }
        call.part.db.change(|change| change.touch(class.name, reference))?;
        // From before it, so that a client that asks with this token hears of it at once.
        let generation = call.part.db.get(class.name, reference)?.modified.saturating_sub(1);
        Ok(Value::string(Token { generation, volatile: 0 }.text()))
    });
}

fn session_of(call: &Call<Events>) -> Result<Arc<Session>, ApiError> {
    call.part.sessions.enter(&call.caller.session)
}
