//! A writer that is killed: what it was told is done is there.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use tapio_store::{Expect, Sqlite, Store, Txn};

const DIR: &str = "TAPIO_STORE_KILL_DIR";

/// The longest time between two commits of a busy host.
const LIMIT: Duration = Duration::from_secs(60);

/// Not a test of its own: what the killed process does. Two rows of one commit count together.
#[test]
fn writer() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let store = Sqlite::open(&Path::new(&dir).join("db")).expect("a store");
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let store = &store;
            scope.spawn(move || {
                let (a, b) = (format!("/{thread}/a"), format!("/{thread}/b"));
                let row = store.get(&a).expect("the store reads");
                let mut at = row.as_ref().map_or(Expect::Absent, |row| Expect::At(row.revision));
                let mut number: u64 = row.and_then(|row| row.value?.parse().ok()).unwrap_or(0);
                loop {
                    number += 1;
                    let value = number.to_string();
                    let txn = Txn {
                        expect: vec![(a.clone(), at)],
                        puts: vec![(a.clone(), value.clone()), (b.clone(), value)],
                        deletes: Vec::new(),
                    };
                    at = Expect::At(store.commit(txn).expect("a commit"));
                    // One write, so that a line is whole or not there.
                    let line = format!("done {thread} {number}\n");
                    std::io::stdout().write_all(line.as_bytes()).expect("the test listens");
                }
            });
        }
    });
}

#[test]
fn what_was_acknowledged_survives_a_kill() {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let mut acknowledged = [0_u64; 3];
    for round in 0..25_u64 {
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "kill::writer", "--nocapture", "--test-threads=1"])
            .env(DIR, dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a child");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (told, hears) = channel();
        let reader = std::thread::spawn(move || {
            let mut last = [0_u64; 3];
            for line in output.lines().map_while(Result::ok) {
                let words: Vec<&str> = line.split_whitespace().collect();
                if let ["done", thread, number] = words[..] {
                    last[thread.parse::<usize>().expect("a thread")] = number.parse().expect("a number");
                    let _ = told.send(());
                }
            }
            last
        });
        // While it opens, and in the midst of writing: however long a busy host takes to come so far.
        if round % 3 == 0 {
            std::thread::sleep(Duration::from_millis(5 + round * 37 % 120));
        } else {
            for _ in 0..round * 7 % 20 + 1 {
                hears.recv_timeout(LIMIT).expect("it writes");
            }
        }
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        for (thread, number) in reader.join().expect("no panic").into_iter().enumerate() {
            acknowledged[thread] = acknowledged[thread].max(number);
        }
        let store = Sqlite::open(&dir.path().join("db")).expect("a store that was killed opens");
        for (thread, acknowledged) in acknowledged.iter().enumerate() {
            let read = |name: &str| {
                let row = store.get(&format!("/{thread}/{name}")).expect("the store reads");
                row.map_or(0, |row| row.value.expect("a value").parse::<u64>().expect("a number"))
            };
            let (a, b) = (read("a"), read("b"));
            assert_eq!(a, b, "half a commit in round {round}");
            assert!(a >= *acknowledged, "round {round}: {a} is there, {acknowledged} was acknowledged");
        }
    }
    assert!(acknowledged.iter().sum::<u64>() > 50, "the writers did next to nothing: {acknowledged:?}");
}
