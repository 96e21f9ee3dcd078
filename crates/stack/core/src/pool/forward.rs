//! Calls that another host does, for a client of this one: their progress is shown here, and they are cancelled from
//! here.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};

use super::{Pool, Visit};
use crate::args::Args;
use crate::call::Caller;
use crate::check::coerce;
use crate::methods::Method;
use crate::progress::Progress;

/// How often a call is looked at: whether it was cancelled here.
const LOOK: Duration = Duration::from_millis(250);
/// How often the other host is asked how far it is.
const ASK: Duration = Duration::from_secs(1);

impl Pool {
    /// Does a call on another host, and waits until its effects are known here.
    ///
    /// # Errors
    /// The call's; `CANNOT_CONTACT_HOST`.
    pub(crate) fn forward(
        &self,
        caller: &Caller,
        progress: &dyn Progress,
        host: &str,
        method: &Method,
        args: &Args,
    ) -> Result<Value, ApiError> {
        // A host that was asked by another and would ask a third: the two see different places for one object.
        if caller.is_host() {
            let why =
                format!("{} belongs to host {host}, but was sent elsewhere: repeat the call", method.name);
            return Err(ApiError::internal(why));
        }
        let answer = self.have_done(progress, host, &method.name, args)?;
        coerce(answer, method.result, "result")
    }

    /// Has another host do a part of a call of this one: a message that it does itself.
    ///
    /// # Errors
    /// The message's; `CANNOT_CONTACT_HOST`.
    pub(crate) fn have_done(
        &self,
        progress: &dyn Progress,
        host: &str,
        message: &str,
        args: &Args,
    ) -> Result<Value, ApiError> {
        let visit = self.visit(host)?;
        let answer = match progress.task() {
            Some(task) => self.watched(&*visit, (progress, task), host, message, args),
            None => visit.call(message, args.0.clone()),
        };
        self.catch_up();
        answer
    }

    /// Does the call in a thread, and follows it meanwhile.
    fn watched(
        &self,
        visit: &dyn Visit,
        (progress, task): (&dyn Progress, &str),
        host: &str,
        message: &str,
        args: &Args,
    ) -> Result<Value, ApiError> {
        let (tell, told) = mpsc::channel();
        let mut follower = Follower { pool: self, host, of: visit.session(), visit: None };
        let (mut asked, mut is_cancelled) = (Instant::now(), false);
        let answer = std::thread::scope(|scope| {
            let calling = move || drop(tell.send(visit.call(message, args.0.clone())));
            let thread =
                std::thread::Builder::new().name("forwarded".to_owned()).spawn_scoped(scope, calling);
            thread.map_err(|error| ApiError::internal(format!("no thread for a call: {error}")))?;
            loop {
                match told.recv_timeout(LOOK) {
                    Ok(answer) => return answer,
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(ApiError::internal("a call of another host ended without an answer"));
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
                let is_new = progress.is_cancelled() && !is_cancelled;
                if !is_new && asked.elapsed() < ASK {
                    continue;
                }
                if let Some(fraction) = follower.ask(progress.is_cancelled()) {
                    progress.set(fraction);
                    is_cancelled = progress.is_cancelled();
                }
                asked = Instant::now();
            }
        });
        match answer {
            // The other host knows its own task alone.
            Err(error) if error.code == "TASK_CANCELLED" => Err(ApiError::new("TASK_CANCELLED", [task])),
            answer => answer,
        }
    }
}

/// A second login, which the first use of makes.
struct Follower<'a> {
    pool: &'a Pool,
    host: &'a str,
    /// The session whose call is followed.
    of: &'a str,
    visit: Option<Box<dyn Visit>>,
}

impl Follower<'_> {
    /// How far the call is; none if that is not known now: it has ended, or the other host does not answer.
    fn ask(&mut self, is_cancelled: bool) -> Option<f64> {
        if self.visit.is_none() {
            self.visit = self.pool.visit(self.host).ok();
        }
        let params = vec![Value::string(self.of), Value::Bool(is_cancelled)];
        match self.visit.as_ref()?.call("task.follow", params) {
            Ok(Value::Float(fraction)) => Some(fraction),
            Ok(Value::Int(fraction)) => Some(fraction as f64),
            Ok(_) => None,
            Err(error) => {
                tracing::debug!(host = self.host, %error, "another host does not say how far a call is");
                if error.code != "HANDLE_INVALID" {
                    self.visit = None;
                }
                None
            }
        }
    }
}
