//! How soon all listeners know of a change.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};

use super::daemon::Daemon;
use super::{MIB, ms};
use crate::medians::median;

/// What a change may take until every listener has it.
const HEARD_MAX: Duration = Duration::from_secs(30);
/// How long one `event.from` waits; short, so that listeners end soon after the run.
const LISTEN_SECONDS: f64 = 2.0;
/// The last change says this, and listeners end.
const END: u64 = u64::MAX;

/// Changes of one object, and the listeners.
#[derive(Clone, Debug, Serialize)]
pub struct Events {
    pub listeners: usize,
    pub changes: usize,
    /// From the call that changes to the last listener's answer in hand: medians over changes one at a time.
    pub last_listener_ms: f64,
    pub first_listener_ms: f64,
    /// Changes per second while all listen, as fast as one connection makes them.
    pub changes_per_second: f64,
    /// From the last of those until all listeners have it.
    pub caught_up_ms: f64,
}

/// The last change that each listener has received.
struct Ears {
    heard: Vec<AtomicU64>,
    trouble: Mutex<Option<String>>,
}

impl Ears {
    /// Waits until so many have received this change.
    fn wait(&self, change: u64, listeners: usize) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let count = self.heard.iter().filter(|heard| heard.load(Ordering::Acquire) >= change).count();
            if count >= listeners {
                return Ok(());
            }
            if let Some(trouble) = self.trouble.lock().take() {
                return Err(trouble);
            }
            if begun.elapsed() > HEARD_MAX {
                return Err(format!(
                    "{count} of {listeners} listeners heard of a change within {HEARD_MAX:?}"
                ));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// Listens until the last change.
fn listen(daemon: &Daemon, vdi: &str, heard: &AtomicU64) -> Result<(), String> {
    let mut client = daemon.client()?;
    let mut token = String::new();
    loop {
        let class = json!([format!("vdi/{vdi}")]);
        let answer = client.call("event.from", &[class, json!(token), json!(LISTEN_SECONDS)])?;
        answer["token"].as_str().ok_or("event.from gave no token")?.clone_into(&mut token);
        for event in answer["events"].as_array().into_iter().flatten() {
            let said = event["snapshot"]["name_description"].as_str().unwrap_or_default();
            let change = said.parse().unwrap_or(0);
            heard.fetch_max(change, Ordering::Release);
        }
        if heard.load(Ordering::Relaxed) == END {
            return Ok(());
        }
    }
}

/// Lets `listeners` listen to a disk that is changed: `changes` times one by one, then for `burst`.
pub fn measure(daemon: &Daemon, listeners: usize, changes: usize, burst: Duration) -> Result<Events, String> {
    let mut client = daemon.client()?;
    let vdi = daemon.make_vdi(&mut client, "listened to", 8 * MIB)?;
    let ears = Ears { heard: (0..listeners).map(|_| AtomicU64::new(0)).collect(), trouble: Mutex::default() };
    std::thread::scope(|scope| {
        for heard in &ears.heard {
            let (ears, vdi) = (&ears, &vdi);
            scope.spawn(move || {
                if let Err(error) = listen(daemon, vdi, heard) {
                    *ears.trouble.lock() = Some(error);
                }
            });
        }
        let mut number = 0;
        let mut change = |to: Option<u64>| {
            number += 1;
            let to = to.unwrap_or(number);
            let params: [Value; 2] = [json!(vdi), json!(to.to_string())];
            client.call("VDI.set_name_description", &params).map(|_| to)
        };
        let result = (|| {
            // All have asked for the first time.
            let first = change(None)?;
            ears.wait(first, listeners)?;
            let (mut firsts, mut lasts) = (Vec::new(), Vec::new());
            for _ in 0..changes {
                // They wait again: what is measured is not their way back.
                std::thread::sleep(Duration::from_millis(10));
                let begun = Instant::now();
                let made = change(None)?;
                ears.wait(made, 1)?;
                firsts.push(ms(begun.elapsed()));
                ears.wait(made, listeners)?;
                lasts.push(ms(begun.elapsed()));
            }
            let (begun, mut count, mut last) = (Instant::now(), 0_usize, 0);
            while begun.elapsed() < burst || count == 0 {
                last = change(None)?;
                count += 1;
            }
            let took = begun.elapsed();
            let done = Instant::now();
            ears.wait(last, listeners)?;
            Ok(Events {
                listeners,
                changes,
                last_listener_ms: median(&mut lasts),
                first_listener_ms: median(&mut firsts),
                changes_per_second: count as f64 / took.as_secs_f64(),
                caught_up_ms: ms(done.elapsed()),
            })
        })();
        // Also after a failure, or the listeners would be waited for without end.
        let ended = change(Some(END));
        result.and_then(|events| ended.map(|_| events))
    })
}
