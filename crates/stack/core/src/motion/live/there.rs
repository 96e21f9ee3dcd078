//! The other host: what is asked of it.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
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
    /// Where its memory is sent to, if not where the host is known.
    address: Option<String>,
    visit: Mutex<Option<Arc<dyn Visit>>>,
}

impl<'a> There<'a> {
    pub(super) fn new(pool: &'a Pool, host: &'a str, vm: &'a str) -> Self {
        Self { pool, host, vm, address: None, visit: Mutex::default() }
    }

    /// Its memory is sent to this address instead, if there is one.
    pub(super) fn reached_at(self, address: Option<String>) -> Self {
        Self { address, ..self }
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
    pub(super) fn ask(
        &self,
        step: &str,
        args: &[(&str, &str)],
        limit: Duration,
    ) -> Result<BTreeMap<String, String>, ApiError> {
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
        answer.map(|answer| answer.to_string_map()).inspect_err(|error| {
            if matches!(&*error.code, "CANNOT_CONTACT_HOST" | "SESSION_INVALID") {
                *self.visit.lock() = None;
            }
        })
    }

    /// The host's name or address over which memory and disks are sent, without a port.
    ///
    /// # Errors
    /// `CANNOT_CONTACT_HOST`.
    pub(super) fn host_address(&self) -> Result<String, ApiError> {
        match &self.address {
            Some(address) => Ok(address.clone()),
            None => Ok(without_port(&self.pool.destination(self.host)?.address)),
        }
    }

    /// Sends the memory, which comes from a socket, until the other host has read all of it.
    ///
    /// # Errors
    /// The other host's; `CANNOT_CONTACT_HOST`, `TASK_CANCELLED`.
    pub(super) fn put(&self, data: UnixStream, is_broken: &dyn Fn() -> bool) -> Result<(), ApiError> {
        let session = self.visit()?.session().to_owned();
        let path = format!("/receive_memory?session_id={session}&vm={}", self.vm);
        let mut to = self.pool.destination(self.host)?;
        if let Some(address) = &self.address {
            to.address = on_port_of(address, &to.address);
        }
        self.pool.link()?.put(&to, &path, data, is_broken)
    }
}

/// An address, with the port of another one if that names it.
fn on_port_of(address: &str, other: &str) -> String {
    let address = address.parse::<IpAddr>().map_or_else(
        |_| address.to_owned(),
        |address| match address {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        },
    );
    let port = match other.parse::<SocketAddr>() {
        Ok(other) => Some(other.port()),
        Err(_) if other.parse::<IpAddr>().is_ok() => None,
        Err(_) => other.rsplit_once(':').and_then(|(_, port)| port.parse().ok()),
    };
    port.map_or_else(|| address.trim_matches(['[', ']']).to_owned(), |port| format!("{address}:{port}"))
}

/// The host of `HOST`, `ADDRESS` or either with `:PORT`.
fn without_port(text: &str) -> String {
    if let Ok(whole) = text.parse::<SocketAddr>() {
        return whole.ip().to_string();
    }
    match text.rsplit_once(':') {
        Some((host, _)) if text.parse::<IpAddr>().is_err() && !text.ends_with(']') => host.to_owned(),
        _ => text.trim_matches(['[', ']']).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{on_port_of, without_port};

    #[test]
    fn a_host_is_known_without_its_port() {
        for (text, host) in [
            ("10.0.0.2:8443", "10.0.0.2"),
            ("10.0.0.2", "10.0.0.2"),
            ("[fd00::2]:8443", "fd00::2"),
            ("[fd00::2]", "fd00::2"),
            ("fd00::2", "fd00::2"),
            ("host2.example:8443", "host2.example"),
            ("host2.example", "host2.example"),
        ] {
            assert_eq!(without_port(text), host);
        }
    }

    #[test]
    fn an_address_gets_the_port_of_another() {
        assert_eq!(on_port_of("10.1.0.2", "10.0.0.2:8443"), "10.1.0.2:8443");
        assert_eq!(on_port_of("10.1.0.2", "[fd00::2]:8443"), "10.1.0.2:8443");
        assert_eq!(on_port_of("fd00::7", "host2.example:8443"), "[fd00::7]:8443");
        assert_eq!(on_port_of("10.1.0.2", "10.0.0.2"), "10.1.0.2");
        assert_eq!(on_port_of("fd00::7", "fd00::2"), "fd00::7");
    }
}
