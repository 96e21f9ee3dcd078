//! The other host: what is asked of it.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use parking_lot::Mutex;
use tapio_model::{ApiError, Value};

use crate::pool::{Pool, Visit};

/// The host that receives.
pub(super) struct There<'a> {
    pool: &'a Pool,
    host: &'a str,
    vm: &'a str,
    visit: Mutex<Option<Arc<dyn Visit>>>,
}

impl<'a> There<'a> {
    pub(super) fn new(pool: &'a Pool, host: &'a str, vm: &'a str) -> Self {
        Self { pool, host, vm, visit: Mutex::default() }
    }

    fn visit(&self) -> Result<Arc<dyn Visit>, ApiError> {
        let mut visit = self.visit.lock();
        if let Some(known) = &*visit {
            return Ok(Arc::clone(known));
        }
        let new: Arc<dyn Visit> = self.pool.visit(self.host)?.into();
        *visit = Some(Arc::clone(&new));
        Ok(new)
    }

    /// Asks for a step, once. A host that has not answered within `limit` counts as lost: it may do the step all the
    /// same.
    ///
    /// # Errors
    /// The other host's; `CANNOT_CONTACT_HOST`.
    pub(super) fn ask(&self, step: &str, args: &[(&str, &str)], limit: Duration) -> Result<(), ApiError> {
        let lost = |why: String| ApiError::new("CANNOT_CONTACT_HOST", [format!("{}: {why}", self.host)]);
        let visit = self.visit()?;
        let args = Value::string_map(args.iter().map(|(name, value)| (*name, *value)));
        let params = vec![Value::string(self.vm), Value::string(step), args];
        let (tell, told) = mpsc::channel();
        let asking = move || drop(tell.send(visit.call("host.receive_guest", params)));
        let thread = std::thread::Builder::new().name("motion-step".to_owned()).spawn(asking);
        thread.map_err(|error| lost(format!("there is no thread: {error}")))?;
        let answer = told.recv_timeout(limit);
        let answer = answer.unwrap_or_else(|_| Err(lost(format!("no answer to '{step}' within {limit:?}"))));
        answer.map(drop).inspect_err(|error| {
            if matches!(&*error.code, "CANNOT_CONTACT_HOST" | "SESSION_INVALID") {
                *self.visit.lock() = None;
            }
        })
    }

    /// Sends the memory, which comes from a socket, until the other host has read all of it.
    ///
    /// # Errors
    /// The other host's; `CANNOT_CONTACT_HOST`, `TASK_CANCELLED`.
    pub(super) fn put(&self, data: UnixStream, is_broken: &dyn Fn() -> bool) -> Result<(), ApiError> {
        let session = self.visit()?.session().to_owned();
        let path = format!("/receive_memory?session_id={session}&vm={}", self.vm);
        self.pool.link()?.put(&self.pool.destination(self.host)?, &path, data, is_broken)
    }
}
