//! The queue between the threads that say something and the one that writes it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, SystemTime};

use crate::days::stamp;
use crate::quiet;
use crate::rotated::Rotated;

/// Lines that wait to be written, at most: 8 MiB of the longest.
const QUEUE_MAX: usize = 1_024;

/// Longest line, in bytes; the rest of a longer one is lost.
const LINE_LEN_MAX: usize = 8 << 10;

/// After a line could not be written, the number of lost ones is tried so often.
const RETRY: Duration = Duration::from_secs(1);

/// What takes lines, each with its end.
pub type Sink = Box<dyn FnMut(&str) -> io::Result<()> + Send>;

enum Message {
    Line(String),
    /// All lines before it are written.
    Flush(SyncSender<()>),
}

/// A log. Copies say into the same one; its thread ends with the last.
#[derive(Clone, Debug)]
pub struct Log {
    sender: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

impl Log {
    /// Starts the thread that writes.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start(sink: Sink) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(QUEUE_MAX);
        let lost = Arc::new(AtomicU64::new(0));
        let own = Arc::clone(&lost);
        quiet::spawn("log", move || run(&receiver, sink, &own))?;
        Ok(Self { sender, lost })
    }

    /// A log in a file.
    ///
    /// # Errors
    /// There is no thread.
    pub fn in_file(mut file: Rotated) -> io::Result<Self> {
        Self::start(Box::new(move |line| file.write(line.as_bytes(), SystemTime::now())))
    }

    /// Says a line. Never waits: a line for which there is no room is counted.
    pub fn line(&self, text: impl Into<String>) {
        let mut text: String = text.into();
        if text.len() > LINE_LEN_MAX {
            let mut len = LINE_LEN_MAX;
            while !text.is_char_boundary(len) {
                len -= 1;
            }
            text.truncate(len);
        }
        // One line, whatever is in it: what follows an end of line would look like another's.
        if text.contains('\n') {
            text = text.trim_end_matches('\n').replace('\n', " | ");
        }
        text.push('\n');
        match self.sender.try_send(Message::Line(text)) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Waits until what was said before is written, or `limit` is over; whether it is.
    pub fn flush(&self, limit: Duration) -> bool {
        let (sender, receiver) = sync_channel(1);
        // A queue that is full is not waited for: the sink hangs.
        self.sender.try_send(Message::Flush(sender)).is_ok() && receiver.recv_timeout(limit).is_ok()
    }
}

fn run(receiver: &Receiver<Message>, mut sink: Sink, lost: &AtomicU64) {
    loop {
        let has_lost = lost.load(Ordering::Relaxed) > 0;
        // With lost lines, their number is tried again even if no line comes.
        let message = match has_lost {
            true => receiver.recv_timeout(RETRY),
            false => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let count = lost.swap(0, Ordering::Relaxed);
        if count > 0 {
            let text = format!("{} {count} lines of this log were lost\n", stamp(SystemTime::now()));
            if sink(&text).is_err() {
                lost.fetch_add(count, Ordering::Relaxed);
            }
        }
        match message {
            Ok(Message::Line(text)) => {
                if sink(&text).is_err() {
                    lost.fetch_add(1, Ordering::Relaxed);
                }
            }
            // Its waiter may have gone.
            Ok(Message::Flush(done)) => drop(done.send(())),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn lines_are_bounded_and_stay_lines() {
        let written = Arc::new(Mutex::new(String::new()));
        let into = Arc::clone(&written);
        let log = Log::start(Box::new(move |line| {
            into.lock().unwrap().push_str(line);
            Ok(())
        }))
        .unwrap();
        log.line("one");
        log.line("two\nthree\n");
        log.line("é".repeat(LINE_LEN_MAX));
        assert!(log.flush(LONG));
        let written = written.lock().unwrap();
        assert!(written.starts_with("one\ntwo | three\né"), "{}", &written[..20]);
        assert!(written.len() < 2 * LINE_LEN_MAX);
    }

    #[test]
    fn a_sink_that_hangs_makes_nobody_wait_and_lost_lines_are_counted() {
        let (open, gate) = sync_channel::<()>(0);
        let written = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&written);
        let mut gate = Some(gate);
        let log = Log::start(Box::new(move |line| {
            if let Some(gate) = gate.take() {
                gate.recv().map_err(io::Error::other)?;
            }
            into.lock().unwrap().push(line.to_owned());
            Ok(())
        }))
        .unwrap();
        for number in 0..QUEUE_MAX + 100 {
            log.line(number.to_string());
        }
        assert!(!log.flush(Duration::ZERO));
        open.send(()).unwrap();
        while !log.flush(LONG) {}
        let written = written.lock().unwrap();
        let said: u64 = written.iter().filter_map(|line| line.split(' ').nth(1)?.parse::<u64>().ok()).sum();
        let lines = written.iter().filter(|line| !line.contains("were lost")).count() as u64;
        assert_eq!(said + lines, QUEUE_MAX as u64 + 100, "each is written or counted");
        assert!(said >= 99);
    }

    #[test]
    fn lines_that_could_not_be_written_are_counted_when_there_is_room() {
        let (is_full, written) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(String::new())));
        let (full, into) = (Arc::clone(&is_full), Arc::clone(&written));
        let log = Log::start(Box::new(move |line| {
            if full.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            into.lock().unwrap().push_str(line);
            Ok(())
        }))
        .unwrap();
        log.line("lost");
        log.line("lost too");
        assert!(log.flush(LONG));
        is_full.store(false, Ordering::Relaxed);
        log.line("kept");
        assert!(log.flush(LONG));
        let written = written.lock().unwrap();
        assert!(written.contains(" 2 lines of this log were lost\nkept\n"), "{written}");
    }
}
