//! Transactions: reads see one moment, writes become visible together or not at all.

use std::time::Duration;

use super::{Answer, Client, Nodes, XsError};
use crate::wire::{Errno, MessageKind, Request, decimal, reply};

/// How often a transaction is tried.
const TRIES_MAX: u32 = 30;
/// Times that it is tried again at once; later it waits a little.
const TRIES_AT_ONCE: u32 = 4;
/// Longest wait between two tries.
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// A transaction that has begun; [`Client::transaction`] begins and ends it.
#[derive(Debug)]
pub struct Transaction<'a> {
    client: &'a mut Client,
    id: u32,
}

impl Nodes for Transaction<'_> {
    fn ask(&mut self, requests: &[Request<'_>]) -> Result<Vec<Answer>, XsError> {
        self.client.exchange(self.id, requests)
    }
}

pub(super) fn run<T>(
    client: &mut Client,
    mut work: impl FnMut(&mut Transaction<'_>) -> Result<T, XsError>,
) -> Result<T, XsError> {
    let mut pause = Duration::from_millis(1);
    for tried in 1..=TRIES_MAX {
        let mut transaction = begin(client)?;
        let done = work(&mut transaction);
        match (done, transaction.id) {
            (Ok(value), id) => {
                if end(client, id, true)? {
                    return Ok(value);
                }
            }
            (Err(error), id) => {
                // After a failed connection there is nothing to take back; the daemon does it by itself.
                if error.is_harmless() {
                    end(client, id, false)?;
                }
                if error.errno() != Some(Errno::EAGAIN) {
                    return Err(error);
                }
            }
        }
        if tried > TRIES_AT_ONCE {
            std::thread::sleep(pause);
            pause = PAUSE_MAX.min(pause * 2);
        }
    }
    Err(XsError::Contended { tries: TRIES_MAX })
}

fn begin(client: &mut Client) -> Result<Transaction<'_>, XsError> {
    client.counts.transactions += 1;
    let payload = client.one(&Request::TransactionStart)?;
    let text = reply::read_text(MessageKind::TransactionStart, &payload)?;
    let id = decimal(text.as_bytes()).and_then(|id| u32::try_from(id).ok()).filter(|id| *id != 0);
    match id {
        Some(id) => Ok(Transaction { client, id }),
        None => Err(XsError::Nonsense(format!("a transaction is called {:?}", text.escape_default()))),
    }
}

/// False if others have changed the same.
fn end(client: &mut Client, id: u32, commit: bool) -> Result<bool, XsError> {
    let request = Request::TransactionEnd { commit };
    match client.exchange(id, std::slice::from_ref(&request))?.into_iter().next() {
        Some(Ok(_)) => Ok(true),
        Some(Err(Errno::EAGAIN)) => Ok(false),
        Some(Err(errno)) => Err(XsError::refused(errno, &request)),
        None => Err(XsError::Nonsense("no answer".into())),
    }
}
