//! What clients may take.

use std::time::Duration;

use crate::limits::MessageLimits;

/// Bounds of the server. None of them costs a request anything but a comparison.
#[derive(Clone, Debug)]
pub struct ServerLimits {
    /// Connections of all peers.
    pub connections_max: usize,
    /// Connections of one peer: an address, or a user of this host.
    pub connections_per_peer_max: usize,
    /// Bytes of a request's head. At least 8 KiB.
    pub head_len_max: usize,
    /// Bytes of a call. The largest that a client needs are records of a few KiB.
    pub body_len_max: usize,
    /// Bytes of all calls that are being received.
    pub bodies_len_max: usize,
    /// Bytes of the answers to one batch.
    pub batch_answer_len_max: usize,
    /// Bytes that all answers hold that clients have not taken yet.
    pub answers_len_max: usize,
    /// Of these, bytes that the answers of one account hold, or those to one address.
    pub answers_len_per_client_max: usize,
    /// Large answers at a time of which a piece is being put into words.
    pub encoding_max: usize,
    /// What a call may hold.
    pub message: MessageLimits,
    /// For a TLS handshake, and for a request's head from its first byte on.
    pub head_time: Duration,
    /// For the body of a call.
    pub body_time: Duration,
    /// For the client to take some of what it is sent.
    pub write_time: Duration,
    /// Between two requests on one connection.
    pub idle_time: Duration,
    /// After the last answer, for the client to read it and to end what it is still sending: the rest of a call that
    /// was refused before it was read is taken and dropped so long.
    pub linger_time: Duration,
    /// Disks that come and go at a time.
    pub transfers_max: usize,
    /// Commands of `POST /cli` at a time: each is a process.
    pub command_lines_max: usize,
    /// For the client to send some more of a disk.
    pub upload_time: Duration,
    /// Answers that refuse a password come so much later.
    pub refusal_delay: Duration,
    /// Short calls at a time.
    pub quick: LaneLimits,
    /// Calls that work on disks and VMs, at a time.
    pub slow: LaneLimits,
    /// Logins, at a time; those that wait take turns by address.
    pub login: LaneLimits,
}

/// Bounds of one kind of call.
#[derive(Clone, Copy, Debug)]
pub struct LaneLimits {
    /// At work.
    pub running_max: usize,
    /// Waiting for one of those to end; one more is told to come back.
    pub waiting_max: usize,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections_max: 2048,
            connections_per_peer_max: 512,
            head_len_max: 64 << 10,
            body_len_max: 4 << 20,
            bodies_len_max: 64 << 20,
            batch_answer_len_max: 16 << 20,
            answers_len_max: 128 << 20,
            answers_len_per_client_max: 48 << 20,
            encoding_max: 2,
            message: MessageLimits::default(),
            head_time: Duration::from_secs(20),
            body_time: Duration::from_secs(30),
            write_time: Duration::from_secs(60),
            idle_time: Duration::from_secs(300),
            linger_time: Duration::from_secs(2),
            // Each is a thread here, and one in the worker of its SR.
            transfers_max: 64,
            command_lines_max: 16,
            upload_time: Duration::from_secs(120),
            refusal_delay: Duration::from_secs(1),
            // A short call waits for one fsync at most, which those that are at work share.
            quick: LaneLimits { running_max: 32, waiting_max: 1024 },
            // A long call waits for its steps, of which the toolstack runs few at a time: the thread sleeps.
            slow: LaneLimits { running_max: 256, waiting_max: 1024 },
            // One of them is hashed at a time; or a module of PAM takes its time.
            login: LaneLimits { running_max: 4, waiting_max: 64 },
        }
    }
}

impl ServerLimits {
    /// Threads that calls may hold at a time.
    pub const fn threads_max(&self) -> usize {
        self.quick.running_max + self.slow.running_max + self.login.running_max
    }
}
