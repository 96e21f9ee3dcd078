//! What is refused to clients, in the log: the first of a storm at once, what follows it as numbers.
//!
//! A line for each request of a hostile client would be another thing that it can fill.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use parking_lot::Mutex;

/// Between two lines.
const EVERY: Duration = Duration::from_secs(10);

/// Refusals that the log has not heard of; none between storms.
#[derive(Clone, Debug, Default)]
pub(super) struct Notices(Arc<Mutex<Option<u64>>>);

impl Notices {
    /// Something was refused to a client.
    pub(super) fn refused(&self, client: impl Display, why: impl Display) {
        if !self.is_first() {
            return tracing::debug!("{client}: {why}");
        }
        tracing::warn!("{client}: {why}");
        let this = self.clone();
        tokio::spawn(async move {
            while let Some(more) = {
                tokio::time::sleep(EVERY).await;
                this.rest()
            } {
                tracing::warn!("{more} other requests or connections were refused in the last {EVERY:?}");
            }
        });
    }

    /// A request was answered: some answers say that a bound was reached.
    pub(super) fn answered(&self, client: &str, status: StatusCode) {
        let is_bound = matches!(
            status,
            StatusCode::REQUEST_TIMEOUT
                | StatusCode::PAYLOAD_TOO_LARGE
                | StatusCode::TOO_MANY_REQUESTS
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
        );
        if is_bound {
            self.refused(client, format_args!("a request was refused with {status}"));
        }
    }

    /// Counts one; whether it begins a storm.
    fn is_first(&self) -> bool {
        let mut untold = self.0.lock();
        let is_first = untold.is_none();
        *untold = Some(untold.map_or(0, |untold| untold + 1));
        is_first
    }

    /// How many came since the last line; none: the storm is over.
    fn rest(&self) -> Option<u64> {
        let mut untold = self.0.lock();
        let more = untold.take().filter(|more| *more > 0);
        *untold = more.map(|_| 0);
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_is_two_lines() {
        let notices = Notices::default();
        assert!(notices.is_first(), "the first is told at once");
        assert!((0..1000).all(|_| !notices.is_first()));
        assert_eq!(notices.rest(), Some(1000));
        assert!(!notices.is_first());
        assert_eq!((notices.rest(), notices.rest()), (Some(1), None));
        assert!(notices.is_first(), "another storm");
    }
}
