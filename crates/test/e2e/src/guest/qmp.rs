//! Commands to QEMU by QMP, the QEMU Machine Protocol, as far as the tests need it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::process::poll_until;

/// How long QEMU may take to answer.
const LIMIT: Duration = Duration::from_secs(60);

/// A connection to a QEMU that listens for commands.
#[derive(Debug)]
pub struct Qmp {
    lines: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects, as soon as QEMU listens.
    #[track_caller]
    pub fn connect(path: &Path) -> Self {
        let stream = poll_until(LIMIT, || UnixStream::connect(path).ok());
        let stream = stream.unwrap_or_else(|| panic!("QEMU does not listen at {}", path.display()));
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout can be set");
        let mut qmp = Self { lines: BufReader::new(stream) };
        let greeting = qmp.line();
        assert!(greeting.get("QMP").is_some(), "QEMU greets with {greeting}");
        qmp.run("qmp_capabilities", json!({}));
        qmp
    }

    /// Runs a command that must succeed; gives its result.
    #[track_caller]
    pub fn run(&mut self, command: &str, arguments: Value) -> Value {
        let asked = json!({ "execute": command, "arguments": arguments });
        writeln!(self.lines.get_mut(), "{asked}").expect("QEMU takes commands");
        loop {
            let mut line = self.line();
            // Anything else is an event.
            if line.get("return").is_some() {
                return line["return"].take();
            }
            assert!(line.get("error").is_none(), "{asked} failed: {line}");
        }
    }

    #[track_caller]
    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("QEMU answers in time");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("QEMU said {line:?}: {error}"))
    }

    /// Sends the guest to the QEMU that waits at `path`, and waits until it is there. Its memory goes at
    /// `bytes_per_second`, so that it changes on the way.
    #[track_caller]
    pub fn migrate(&mut self, path: &Path, bytes_per_second: u64) {
        self.run("migrate-set-parameters", json!({ "max-bandwidth": bytes_per_second }));
        self.run("migrate", json!({ "uri": format!("unix:{}", path.display()) }));
        let done = poll_until(LIMIT, || {
            let state = self.run("query-migrate", json!({}));
            let status = state["status"].as_str().unwrap_or_default().to_string();
            assert!(!matches!(status.as_str(), "failed" | "cancelled"), "the migration failed: {state}");
            (status == "completed").then_some(())
        });
        assert!(done.is_some(), "the migration does not end: {}", self.run("query-migrate", json!({})));
    }
}
