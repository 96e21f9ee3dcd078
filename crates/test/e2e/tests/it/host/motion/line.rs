//! The network between two hosts: a port that leads to the daemon of one, and that can be cut.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

#[derive(Default)]
struct State {
    to: Mutex<Option<String>>,
    is_cut: AtomicBool,
    passed: AtomicU64,
    open: Mutex<Vec<TcpStream>>,
}

/// A port of this host that stays the same when the daemon behind it starts again.
pub struct Line {
    pub address: String,
    state: Arc<State>,
}

impl Line {
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address").to_string();
        let state = Arc::new(State::default());
        let taking = Arc::clone(&state);
        // It ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&taking);
                thread::spawn(move || take(&state, stream));
            }
        });
        Self { address, state }
    }

    /// It leads to this address now.
    pub fn leads_to(&self, https: &str) {
        let address = https.trim_start_matches("https://").to_owned();
        *self.state.to.lock().expect("no panic") = Some(address);
    }

    /// Ends all connections, and takes no new ones until [`Self::mend`].
    pub fn cut(&self) {
        self.state.is_cut.store(true, Ordering::SeqCst);
        for stream in self.state.open.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub fn mend(&self) {
        self.state.is_cut.store(false, Ordering::SeqCst);
    }

    /// Bytes that went to the daemon so far.
    pub fn passed(&self) -> u64 {
        self.state.passed.load(Ordering::SeqCst)
    }
}

fn take(state: &Arc<State>, client: TcpStream) {
    let to = state.to.lock().expect("no panic").clone();
    let is_cut = || state.is_cut.load(Ordering::SeqCst);
    let Some(daemon) = to.filter(|_| !is_cut()).and_then(|to| TcpStream::connect(to).ok()) else { return };
    let twin = |stream: &TcpStream| stream.try_clone().expect("a second descriptor");
    state.open.lock().expect("no panic").extend([twin(&client), twin(&daemon)]);
    if is_cut() {
        let _ = client.shutdown(Shutdown::Both);
        return;
    }
    let back = (twin(&daemon), twin(&client));
    let backward = thread::spawn(move || pass(back.0, back.1, None));
    pass(client, daemon, Some(&state.passed));
    let _ = backward.join();
}

fn pass(mut from: TcpStream, mut to: TcpStream, count: Option<&AtomicU64>) {
    let mut piece = vec![0; 64 << 10];
    while let Ok(len) = from.read(&mut piece) {
        if len == 0 || to.write_all(&piece[..len]).is_err() {
            break;
        }
        if let Some(count) = count {
            count.fetch_add(len as u64, Ordering::SeqCst);
        }
    }
    let _ = from.shutdown(Shutdown::Read);
    let _ = to.shutdown(Shutdown::Write);
}
