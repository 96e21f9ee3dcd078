//! TLS 1.3 with an external pre-shared key and a key exchange (`psk_dhe_ke`), and nothing else: no certificates, no
//! tickets, no early data, no other version.
//!
//! The TLS library that does certificates (rustls) cannot take external keys, and others that can are large C
//! libraries. What remains of TLS 1.3 when the two sides share a key is small: two messages each way, one hash, two
//! ciphers, two key exchanges. The primitives are those of `ring`; nothing here computes on secrets by itself.
//!
//! Source: RFC 8446; keys as GnuTLS's `psktool` writes them, whose hash is SHA-256.

mod message;
mod record;
mod schedule;

use std::fmt;
use std::sync::Arc;

use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, agree_ephemeral};
use ring::digest;
use ring::rand::{SecureRandom, SystemRandom};

use super::files::Keys;
use message::{ClientHello, Group, PROOFS_LEN, ServerHello, client_hello, kind, message, server_hello};
use record::{Input, Protection, content};
use schedule::{Early, HASH_LEN, Handshake, Secret};

/// The longest message of a handshake that is collected.
const MESSAGE_LEN_MAX: usize = 32 << 10;

/// What one side tells the other when it gives up (RFC 8446 section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alert(pub u8);

#[allow(missing_docs)]
impl Alert {
    pub const CLOSE_NOTIFY: Self = Self(0);
    pub const UNEXPECTED_MESSAGE: Self = Self(10);
    pub const BAD_RECORD_MAC: Self = Self(20);
    pub const RECORD_OVERFLOW: Self = Self(22);
    pub const HANDSHAKE_FAILURE: Self = Self(40);
    pub const ILLEGAL_PARAMETER: Self = Self(47);
    pub const DECODE_ERROR: Self = Self(50);
    pub const DECRYPT_ERROR: Self = Self(51);
    pub const PROTOCOL_VERSION: Self = Self(70);
    pub const INTERNAL_ERROR: Self = Self(80);
    pub const UNSUPPORTED_EXTENSION: Self = Self(110);
}

impl fmt::Display for Alert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            0 => "the end",
            10 => "unexpected message",
            20 => "bad record",
            40 => "handshake failure: no common way, or no such user",
            47 => "illegal parameter",
            51 => "decrypt error: the keys differ",
            70 => "protocol version",
            80 => "internal error",
            115 => "unknown user of a pre-shared key",
            number => return write!(f, "alert {number}"),
        };
        f.write_str(name)
    }
}

/// Why a session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What to tell the peer, unless the peer's own alert was the cause.
    pub alert: Option<Alert>,
    /// For people.
    pub why: String,
}

impl Failure {
    fn ours(alert: Alert, why: &str) -> Self {
        Self { alert: Some(alert), why: why.to_owned() }
    }
}

/// Where a session is.
#[derive(Debug)]
enum State {
    /// A server waits for the client's first message.
    ServerStart(Arc<Keys>),
    /// A server waits for the client's Finished; with the client's secret for data.
    ServerFinish(Secret),
    /// A client waits for the server's first message.
    ClientStart(Box<ClientStart>),
    /// A client waits for the rest of the server's messages.
    ClientExtensions(Handshake),
    ClientFinish(Handshake),
    /// Data flows.
    Open,
    /// The other side has said its last.
    Closed,
}

struct ClientStart {
    early: Early,
    halves: Vec<(Group, EphemeralPrivateKey)>,
}

impl fmt::Debug for ClientStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientStart(..)")
    }
}

/// One side of a connection, as bytes in and bytes out.
#[derive(Debug)]
pub struct Session {
    state: State,
    suite: record::Suite,
    transcript: Transcript,
    input: Input,
    messages: Vec<u8>,
    reading: Option<Protection>,
    writing: Option<Protection>,
    random: SystemRandom,
}

struct Transcript(digest::Context);

impl fmt::Debug for Transcript {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transcript(..)")
    }
}

impl Transcript {
    fn hash(&self) -> digest::Digest {
        self.0.clone().finish()
    }
}

impl Session {
    fn new(state: State) -> Self {
        Self {
            state,
            suite: record::Suite::Aes128,
            transcript: Transcript(digest::Context::new(&digest::SHA256)),
            input: Input::default(),
            messages: Vec::new(),
            reading: None,
            writing: None,
            random: SystemRandom::new(),
        }
    }

    /// A server's side, for clients that have one of these keys.
    pub fn server(keys: Arc<Keys>) -> Self {
        Self::new(State::ServerStart(keys))
    }

    /// A client's side; its first message goes to `wire`.
    pub fn client(user: &str, key: &[u8], wire: &mut Vec<u8>) -> Result<Self, Failure> {
        let random = SystemRandom::new();
        let mut halves = Vec::new();
        let mut shares = Vec::new();
        for group in Group::ALL {
            let half = EphemeralPrivateKey::generate(group.algorithm(), &random).map_err(|_| no_random())?;
            shares.push((group, half.compute_public_key().map_err(|_| no_random())?));
            halves.push((group, half));
        }
        let shares: Vec<_> = shares.iter().map(|(group, key)| (*group, key.as_ref())).collect();
        let early = Early::new(key);
        let mut hello = client_hello(random_bytes(&random)?, &shares, user.as_bytes());
        let proven = digest::digest(&digest::SHA256, &hello[..hello.len() - PROOFS_LEN]);
        let proof = early.binder_key().finished(&proven);
        let end = hello.len();
        hello[end - HASH_LEN..].copy_from_slice(&proof);
        let mut session = Self::new(State::ClientStart(Box::new(ClientStart { early, halves })));
        session.say(&hello, wire)?;
        Ok(session)
    }

    /// Whether data may flow.
    pub const fn is_open(&self) -> bool {
        matches!(self.state, State::Open)
    }

    /// Whether the other side has said its last.
    pub const fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    /// Takes bytes of the stream; data goes to `plain`, what is to be sent in return to `wire`, which must be sent
    /// also when this fails.
    pub fn receive(&mut self, bytes: &[u8], plain: &mut Vec<u8>, wire: &mut Vec<u8>) -> Result<(), Failure> {
        let result = self.take(bytes, plain, wire);
        if let Err(Failure { alert: Some(alert), .. }) = &result {
            // The last words: whether they can be said or not changes nothing.
            let _ = record::put(self.writing.as_mut(), content::ALERT, &[2, alert.0], wire);
        }
        result
    }

    fn take(&mut self, bytes: &[u8], plain: &mut Vec<u8>, wire: &mut Vec<u8>) -> Result<(), Failure> {
        self.input.add(bytes);
        loop {
            if self.is_closed() {
                return Ok(());
            }
            let open = matches!(self.state, State::Open);
            let Some((kind, body)) = self.input.next(self.reading.as_mut())? else { return Ok(()) };
            match kind {
                content::APPLICATION_DATA if open && self.messages.is_empty() => {
                    plain.extend_from_slice(body);
                }
                content::CHANGE_CIPHER_SPEC if !open && body == [1] => {}
                content::HANDSHAKE if !body.is_empty() => {
                    if self.messages.len() + body.len() > MESSAGE_LEN_MAX {
                        return Err(Failure::ours(Alert::DECODE_ERROR, "a message is too long"));
                    }
                    self.messages.extend_from_slice(body);
                    self.converse(wire)?;
                }
                content::ALERT if body.len() == 2 => match Alert(body[1]) {
                    Alert::CLOSE_NOTIFY => self.state = State::Closed,
                    alert => {
                        let why = format!("the other side gave up: {alert}");
                        return Err(Failure { alert: None, why });
                    }
                },
                _ => {
                    return Err(Failure::ours(
                        Alert::UNEXPECTED_MESSAGE,
                        "a record that does not belong here",
                    ));
                }
            }
        }
    }

    /// Protects data.
    pub fn send(&mut self, data: &[u8], wire: &mut Vec<u8>) -> Result<(), Failure> {
        if self.writing.as_ref().is_some_and(Protection::is_worn) {
            self.update_writing(wire)?;
        }
        record::put(self.writing.as_mut(), content::APPLICATION_DATA, data, wire)
    }

    /// Sends the closing alert.
    pub fn close(&mut self, wire: &mut Vec<u8>) {
        // A peer that does not read it sees the end of the stream.
        let _ = record::put(self.writing.as_mut(), content::ALERT, &[1, Alert::CLOSE_NOTIFY.0], wire);
    }

    /// Every whole message that has come.
    fn converse(&mut self, wire: &mut Vec<u8>) -> Result<(), Failure> {
        while self.messages.len() >= 4 {
            let len = usize::from(self.messages[1]) << 16
                | usize::from(self.messages[2]) << 8
                | usize::from(self.messages[3]);
            if len > MESSAGE_LEN_MAX {
                return Err(Failure::ours(Alert::DECODE_ERROR, "a message is too long"));
            }
            if self.messages.len() < 4 + len {
                return Ok(());
            }
            let rest = self.messages.split_off(4 + len);
            let whole = std::mem::replace(&mut self.messages, rest);
            let keys_change = self.message(&whole, wire)?;
            if keys_change && !self.messages.is_empty() {
                // What follows would have come under the new keys.
                return Err(Failure::ours(Alert::UNEXPECTED_MESSAGE, "a message under the wrong keys"));
            }
        }
        Ok(())
    }

    /// One message; returns whether the next has to come under other keys.
    fn message(&mut self, whole: &[u8], wire: &mut Vec<u8>) -> Result<bool, Failure> {
        let body = &whole[4..];
        match (std::mem::replace(&mut self.state, State::Closed), whole[0]) {
            (State::ServerStart(keys), kind::CLIENT_HELLO) => self.answer(whole, &keys, wire)?,
            (State::ServerFinish(client), kind::FINISHED) => {
                self.check_finished(body)?;
                self.reading = Some(Protection::new(self.suite, client)?);
                self.state = State::Open;
            }
            (State::ClientStart(start), kind::SERVER_HELLO) => self.hear(whole, *start)?,
            (State::ClientExtensions(secrets), kind::ENCRYPTED_EXTENSIONS) => {
                self.transcript.0.update(whole);
                self.state = State::ClientFinish(secrets);
                return Ok(false);
            }
            (State::ClientFinish(secrets), kind::FINISHED) => self.finish(whole, &secrets, wire)?,
            (State::Open, kind::KEY_UPDATE) => {
                self.state = State::Open;
                self.update_reading(body, wire)?;
            }
            (State::Open, kind::NEW_SESSION_TICKET) => {
                // Sessions are not resumed: a connection that is lost begins anew.
                self.state = State::Open;
                return Ok(false);
            }
            _ => return Err(Failure::ours(Alert::UNEXPECTED_MESSAGE, "a message that does not belong here")),
        }
        Ok(true)
    }

    /// Sends a message of the handshake.
    fn say(&mut self, whole: &[u8], wire: &mut Vec<u8>) -> Result<(), Failure> {
        self.transcript.0.update(whole);
        record::put(self.writing.as_mut(), content::HANDSHAKE, whole, wire)
    }

    fn check_finished(&self, body: &[u8]) -> Result<(), Failure> {
        let secret = self.reading.as_ref().map(Protection::secret);
        if secret.is_some_and(|secret| secret.is_finished(&self.transcript.hash(), body)) {
            return Ok(());
        }
        Err(Failure::ours(Alert::DECRYPT_ERROR, "the other side's word on the handshake is wrong"))
    }

    /// A server's answer to the first message: everything it has to say.
    fn answer(&mut self, whole: &[u8], keys: &Keys, wire: &mut Vec<u8>) -> Result<(), Failure> {
        let hello = ClientHello::parse(&whole[4..])?;
        let proven = digest::digest(&digest::SHA256, &whole[..hello.truncated_len]);
        let known = hello.offers.iter().enumerate().find_map(|(index, (name, proof))| {
            let name = std::str::from_utf8(name).ok()?;
            keys.of(name).map(|key| (index, name, Early::new(key), *proof))
        });
        let Some((selected, user, early, proof)) = known else {
            // The same alert as for a wrong key: a client shall not learn which users there are.
            return Err(Failure::ours(Alert::DECRYPT_ERROR, "the client named no user that has a key here"));
        };
        if !early.binder_key().is_finished(&proven, proof) {
            let why = format!("the client has another key for user '{}'", user.escape_debug());
            return Err(Failure::ours(Alert::DECRYPT_ERROR, &why));
        }
        self.suite = hello.suite;
        let (group, theirs) = hello.share;
        let half = EphemeralPrivateKey::generate(group.algorithm(), &self.random).map_err(|_| no_random())?;
        let ours = half.compute_public_key().map_err(|_| no_random())?;
        self.transcript.0.update(whole);
        let answer = server_hello(random_bytes(&self.random)?, &hello, ours.as_ref(), selected as u16);
        self.say(&answer, wire)?;
        if !hello.session_id.is_empty() {
            record::put(None, content::CHANGE_CIPHER_SPEC, &[1], wire)?;
        }
        let secrets = agree(group, half, theirs, |shared| early.handshake(shared, &self.transcript.hash()))?;
        self.writing = Some(Protection::new(self.suite, secrets.server.clone())?);
        self.reading = Some(Protection::new(self.suite, secrets.client.clone())?);
        self.say(&message(kind::ENCRYPTED_EXTENSIONS, |out| out.extend_from_slice(&[0, 0])), wire)?;
        let proof = secrets.server.finished(&self.transcript.hash());
        self.say(&message(kind::FINISHED, |out| out.extend_from_slice(&proof)), wire)?;
        let (client, server) = secrets.application(&self.transcript.hash());
        self.writing = Some(Protection::new(self.suite, server)?);
        self.state = State::ServerFinish(client);
        Ok(())
    }

    /// A client reads which of its offers the server took.
    fn hear(&mut self, whole: &[u8], start: ClientStart) -> Result<(), Failure> {
        let hello = ServerHello::parse(&whole[4..])?;
        self.transcript.0.update(whole);
        self.suite = hello.suite;
        let (group, theirs) = hello.share;
        let half = start.halves.into_iter().find(|(other, _)| *other == group).map(|(_, half)| half);
        let half = half.ok_or_else(no_random)?;
        let transcript = self.transcript.hash();
        let secrets = agree(group, half, theirs, |shared| start.early.handshake(shared, &transcript))?;
        self.reading = Some(Protection::new(self.suite, secrets.server.clone())?);
        self.state = State::ClientExtensions(secrets);
        Ok(())
    }

    /// A client's last message.
    fn finish(&mut self, whole: &[u8], secrets: &Handshake, wire: &mut Vec<u8>) -> Result<(), Failure> {
        self.check_finished(&whole[4..])?;
        self.transcript.0.update(whole);
        let (client, server) = secrets.application(&self.transcript.hash());
        self.writing = Some(Protection::new(self.suite, secrets.client.clone())?);
        let proof = secrets.client.finished(&self.transcript.hash());
        self.say(&message(kind::FINISHED, |out| out.extend_from_slice(&proof)), wire)?;
        self.writing = Some(Protection::new(self.suite, client)?);
        self.reading = Some(Protection::new(self.suite, server)?);
        self.state = State::Open;
        Ok(())
    }

    /// The other side goes on with its next keys, and may want us to do the same.
    fn update_reading(&mut self, body: &[u8], wire: &mut Vec<u8>) -> Result<(), Failure> {
        let [wanted @ (0 | 1)] = body else {
            return Err(Failure::ours(Alert::ILLEGAL_PARAMETER, "a key update that says nothing"));
        };
        self.reading = self.reading.as_ref().map(Protection::updated).transpose()?;
        if *wanted == 1 { self.update_writing(wire) } else { Ok(()) }
    }

    fn update_writing(&mut self, wire: &mut Vec<u8>) -> Result<(), Failure> {
        let update = message(kind::KEY_UPDATE, |out| out.push(0));
        record::put(self.writing.as_mut(), content::HANDSHAKE, &update, wire)?;
        self.writing = self.writing.as_ref().map(Protection::updated).transpose()?;
        Ok(())
    }
}

fn agree<T>(
    group: Group,
    half: EphemeralPrivateKey,
    theirs: &[u8],
    derive: impl FnOnce(&[u8]) -> T,
) -> Result<T, Failure> {
    let theirs = UnparsedPublicKey::new(group.algorithm(), theirs);
    agree_ephemeral(half, &theirs, derive)
        .map_err(|_| Failure::ours(Alert::ILLEGAL_PARAMETER, "the other half of the key exchange is no key"))
}

fn no_random() -> Failure {
    Failure::ours(Alert::INTERNAL_ERROR, "the system gives no random numbers")
}

fn random_bytes(random: &SystemRandom) -> Result<[u8; 32], Failure> {
    let mut bytes = [0; 32];
    random.fill(&mut bytes).map_err(|_| no_random())?;
    Ok(bytes)
}

#[cfg(test)]
#[path = "psk_tests.rs"]
mod tests;
