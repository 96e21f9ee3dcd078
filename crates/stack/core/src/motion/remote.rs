//! The other host: steps that are asked of it, again and again while the network is away or its daemon starts.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_model::{ApiError, Value};
use uuid::Uuid;

use super::notes::Place;
use crate::pool::{Destination, Link, Visit};
use crate::progress::Progress;
use crate::sessions::MOTION_LOGIN;

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(500);

/// The host that receives a VM.
pub(super) struct Remote {
    link: Arc<dyn Link>,
    id: Uuid,
    to: Destination,
    secret: String,
    visit: Mutex<Option<Arc<dyn Visit>>>,
    /// How long it is tried again.
    timeout: Duration,
    progress: Arc<dyn Progress>,
}

/// Whether the same may succeed later: the network is away, the daemon starts, its session has gone with it.
pub(super) fn is_passing(error: &ApiError) -> bool {
    matches!(
        &*error.code,
        "CANNOT_CONTACT_HOST" | "SESSION_INVALID" | "HOST_STILL_BOOTING" | "IMPORT_ERROR_PREMATURE_EOF"
    )
}

fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    if !hex.is_ascii() || hex.is_empty() || !hex.len().is_multiple_of(2) {
        return None;
    }
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok()).collect()
}

/// Where the receiver is, as `host.migrate_receive` has told, and the name of the motion.
///
/// # Errors
/// `INVALID_VALUE`: a host that says neither its certificate nor the motion, as XenServer's do not.
pub(super) fn place(dest: &BTreeMap<String, String>) -> Result<(Uuid, Place), ApiError> {
    let get = |key: &str| dest.get(key).map(String::as_str).unwrap_or_default();
    let wrong =
        |key: &str, why: &str| ApiError::new("INVALID_VALUE", [format!("dest:{key}"), why.to_owned()]);
    let certificate = get("certificate");
    if bytes_of(certificate).is_none() {
        let why = "the receiver's certificate is missing: take the answer of its host.migrate_receive, \
                   which only hosts of Tapio give";
        return Err(wrong("certificate", why));
    }
    let named =
        get("session_id").split_once('/').and_then(|(id, secret)| Some((Uuid::parse_str(id).ok()?, secret)));
    let (id, secret) = named.ok_or_else(|| wrong("session_id", "it names no motion"))?;
    let address = get("master").trim_start_matches("https://").trim_end_matches('/');
    if address.is_empty() {
        return Err(wrong("master", "it names no host"));
    }
    let (address, certificate) = (address.to_owned(), certificate.to_owned());
    Ok((id, Place { address, certificate, secret: secret.to_owned() }))
}

impl Remote {
    pub(super) fn new(
        link: &Arc<dyn Link>,
        (id, place): (Uuid, &Place),
        timeout: Duration,
        progress: &Arc<dyn Progress>,
    ) -> Self {
        let certificate = bytes_of(&place.certificate);
        Self {
            link: Arc::clone(link),
            id,
            // Without a certificate any host would do.
            to: Destination { address: place.address.clone(), certificate: certificate.or(Some(Vec::new())) },
            secret: place.secret.clone(),
            visit: Mutex::default(),
            timeout,
            progress: Arc::clone(progress),
        }
    }

    fn visit(&self) -> Result<Arc<dyn Visit>, ApiError> {
        let mut visit = self.visit.lock();
        if let Some(known) = &*visit {
            return Ok(Arc::clone(known));
        }
        let user = format!("{MOTION_LOGIN}{}", self.id);
        let new: Arc<dyn Visit> = self.link.visit(&self.to, &user, &self.secret)?.into();
        *visit = Some(Arc::clone(&new));
        Ok(new)
    }

    fn leave(&self) {
        *self.visit.lock() = None;
    }

    /// Does it until it succeeds, fails for good, the task is cancelled, or it was tried for long enough.
    fn again<T>(&self, mut attempt: impl FnMut(&dyn Visit) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let mut until = None;
        loop {
            let error = match self.visit().and_then(|visit| attempt(&*visit)) {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            if !is_passing(&error) {
                return Err(error);
            }
            self.leave();
            if self.progress.is_cancelled() {
                return Err(self.cancelled());
            }
            // The time begins with the first loss.
            if Instant::now() >= *until.get_or_insert_with(|| Instant::now() + self.timeout) {
                return Err(error);
            }
            tracing::info!(motion = %self.id, %error, "the receiver does not answer; it is tried again");
            std::thread::sleep(PAUSE);
        }
    }

    fn cancelled(&self) -> ApiError {
        ApiError::new("TASK_CANCELLED", [self.progress.task().unwrap_or_default()])
    }

    /// Asks for a step, for as long as was said.
    ///
    /// # Errors
    /// The receiver's; `CANNOT_CONTACT_HOST`, `TASK_CANCELLED`.
    pub(super) fn ask(
        &self,
        what: &str,
        args: &[(&str, &str)],
    ) -> Result<BTreeMap<String, String>, ApiError> {
        let args = Value::string_map(args.iter().map(|(name, value)| (*name, *value)));
        let params = [Value::string(self.id.to_string()), Value::string(what), args];
        let answer = self.again(|visit| visit.call("host.receive_motion", params.to_vec()))?;
        Ok(answer.to_string_map())
    }

    /// Sends pieces of a disk, once; where they end early, `is_broken`.
    ///
    /// # Errors
    /// The receiver's; `CANNOT_CONTACT_HOST`, `TASK_CANCELLED`.
    pub(super) fn put(&self, vdi: &str, data: UnixStream, is_broken: &AtomicBool) -> Result<(), ApiError> {
        let visit = self.again(|visit| Ok(visit.session().to_owned()))?;
        let path = format!("/import_raw_vdi?session_id={visit}&vdi={vdi}&chunked=true&part=true");
        let sent = self.link.put(&self.to, &path, data, &|| {
            self.progress.is_cancelled() || is_broken.load(Ordering::Relaxed)
        });
        sent.inspect_err(|error| {
            if is_passing(error) {
                self.leave();
            }
        })
    }

    /// How long a lost network is tried again.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }
}
