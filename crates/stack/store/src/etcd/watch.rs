//! The watch that keeps the copy current: it outlives members, leaders and compactions.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;

use super::http::{Client, is_login};
use super::mirror::{Mirror, Names};
use super::wire::{self, WatchLine};
use super::{Look, look_at_all};

/// Pause before a watch is made again.
const PAUSE: Duration = Duration::from_millis(100);

/// A watch that is silent for so long is held against the cluster: a member that was cut off says nothing.
const SILENCE: Duration = Duration::from_secs(3);

/// Deadline of a request of the watch's own.
const LIMIT: Duration = Duration::from_secs(5);

/// Longest line, in bytes: the events of one transaction.
const LINE_LEN_MAX: usize = 64 << 20;

/// How a watch ended.
enum End {
    /// It can be made again behind what was seen.
    Lost(String),
    /// What was not seen is compacted.
    Compacted,
}

/// Follows the keys of a store until its owner has gone.
pub async fn follow(client: Weak<Client>, mirror: Weak<Mirror>, names: Names) {
    loop {
        let (Some(client), Some(mirror)) = (client.upgrade(), mirror.upgrade()) else { return };
        match once(&client, &mirror, &names).await {
            End::Lost(why) => tracing::debug!("etcd: the watch ended: {why}; it is made again"),
            End::Compacted => {
                tracing::info!("etcd: changes that were not seen are compacted: all rows are read again");
                match look_at_all(&client, &names, LIMIT).await {
                    Ok(Look::Rows(rows, at)) => mirror.reset(&rows, &names, at),
                    Ok(Look::Locked) => {}
                    Err(why) => tracing::warn!("etcd: reading all rows again: {why}"),
                }
            }
        }
        drop((client, mirror));
        tokio::time::sleep(PAUSE).await;
    }
}

async fn once(client: &Arc<Client>, mirror: &Arc<Mirror>, names: &Names) -> End {
    let request = wire::watch(&format!("{}/", names.prefix), mirror.seen() + 1);
    let (member, mut body) = match client.stream("watch", &request, LIMIT).await {
        Ok(begun) => begun,
        Err(failure) => {
            let why = failure.to_string();
            if is_login(&why) {
                client.forget_login();
            }
            return End::Lost(why);
        }
    };
    let mut held = Vec::new();
    let mut heard = Instant::now();
    loop {
        let frame = match tokio::time::timeout(SILENCE, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(error))) => {
                client.leave(member);
                return End::Lost(error.to_string());
            }
            Ok(None) => return End::Lost("the member closed it".into()),
            Err(_) => {
                let seen = mirror.seen();
                if is_behind(client, names, seen).await && mirror.seen() == seen && heard.elapsed() > SILENCE
                {
                    client.leave(member);
                    return End::Lost("it is silent about changes".into());
                }
                continue;
            }
        };
        heard = Instant::now();
        let Ok(data) = frame.into_data() else { continue };
        held.extend_from_slice(&data);
        if held.len() > LINE_LEN_MAX {
            return End::Lost("a line is too long".into());
        }
        while let Some(end) = held.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = held.drain(..=end).collect();
            match wire::watch_line(&line) {
                Ok(WatchLine::Created) => {}
                Ok(WatchLine::Events(upto, events)) => {
                    // What a line reports is whole up to its last event; the header may be ahead of it.
                    let last = events.last().map(|event| event.revision);
                    mirror.take(events, names, last.unwrap_or(upto));
                }
                Ok(WatchLine::Canceled(Some(_), _)) => return End::Compacted,
                Ok(WatchLine::Canceled(None, why)) => {
                    client.forget_login();
                    return End::Lost(why);
                }
                Ok(WatchLine::Broken(why)) => {
                    client.leave(member);
                    return End::Lost(why);
                }
                Err(why) => return End::Lost(format!("a line of it is not understood: {why}")),
            }
        }
    }
}

/// Whether the cluster has a commit that was not seen.
async fn is_behind(client: &Client, names: &Names, seen: u64) -> bool {
    let newest = wire::newest_of(&names.writers());
    let Ok(answer) = client.send("kv/range", &newest, LIMIT).await else { return false };
    wire::kvs(&answer).is_ok_and(|found| found.iter().any(|kv| kv.changed > seen))
}
