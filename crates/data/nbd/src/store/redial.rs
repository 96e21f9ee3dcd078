//! One connection after the other: dialling and serving.

use std::rc::Rc;

use super::connection::Connection;
use super::dial::dial;
use super::{Inner, receiver, sender};

/// The first wait before another attempt, and the longest; each is twice the one before.
const BACKOFF_MIN_NS: u64 = 20_000_000;
const BACKOFF_MAX_NS: u64 = 2_000_000_000;
/// A connection that lasted this long was a good one: the next attempt waits for nothing.
const GOOD_NS: u64 = 1_000_000_000;

/// Keeps one connection for as long as the storage is open. `next` is there already.
pub(super) async fn run(inner: Rc<Inner>, mut next: Option<Rc<Connection>>) {
    let mut wait_ns = 0;
    while !inner.closing.get() {
        if wait_ns > 0 {
            let until = inner.tasks().turn_ns() + wait_ns;
            inner.stopped.wait_until(inner.tasks(), until).await;
            if inner.closing.get() {
                return;
            }
        }
        let entered = match next.take() {
            Some(connection) => Ok(connection),
            None => dial(&inner.uring, &inner.target, inner.tls.as_ref())
                .await
                .and_then(|dialled| inner.enter(dialled)),
        };
        let longer = (wait_ns * 2).clamp(BACKOFF_MIN_NS, BACKOFF_MAX_NS);
        match entered {
            Ok(connection) => {
                let since = inner.tasks().turn_ns();
                serve(&inner, connection).await;
                wait_ns = if inner.tasks().turn_ns() - since >= GOOD_NS { 0 } else { longer };
            }
            Err(error) => {
                inner.note_failure(&error.to_string());
                wait_ns = longer;
            }
        }
    }
}

async fn serve(inner: &Rc<Inner>, connection: Rc<Connection>) {
    inner.tasks().spawn(sender::run(Rc::clone(inner), Rc::clone(&connection)));
    let mut why = receiver::run(inner, &connection).await;
    if let Some(failure) = connection.tls_failure() {
        why = format!("TLS: {failure}");
    }
    inner.break_off(&connection, &why);
    // The kernel may still read what is being sent.
    while !connection.sender_gone.get() {
        connection.changed.wait(inner.tasks()).await;
    }
    inner.lost(&connection);
}
