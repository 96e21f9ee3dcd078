//! Hashes of passwords, and the one thread that makes them.
//!
//! argon2 takes 19 MiB for each password, and a client that knows none can ask for checks. So all passwords
//! of a daemon are checked by one thread, one after the other, in memory that is taken once, wiped after each, and
//! given back when no password came for some seconds. What a hash of the file asks for is bounded before it is used.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use argon2::password_hash::{Output, PasswordHash, SaltString};
use argon2::{Algorithm, Argon2, Block, Params, Version};
use rustix::rand::{GetRandomFlags, getrandom};
use zeroize::Zeroize;

/// Shortest password, in characters: what a rate limit makes hopeless to guess.
const PASSWORD_MIN: usize = 8;
/// Longest password in bytes.
const PASSWORD_MAX: usize = 1024;
/// Bytes of a salt that is made here.
const SALT_LEN: usize = 16;
/// Bytes of a salt in a file; as text it has at most 64 characters.
const SALT_LEN_MAX: usize = 48;
/// KiB that a hash may ask for.
pub(super) const MEMORY_KIB_MAX: u32 = 64 << 10;
/// Rounds that a hash may ask for.
const ROUNDS_MAX: u32 = 8;
/// Lanes that a hash may ask for.
const LANES_MAX: u32 = 4;
/// Jobs in the thread's channel, at most: the queue of logins is the server's.
const JOBS_MAX: usize = 1;
/// The memory is given back after so long without a login.
const KEPT: Duration = Duration::from_secs(10);

/// Of a password that no client knows: an account that is not there takes as long as one that is.
const UNKNOWN_USER_HASH: &str =
    "$argon2id$v=19$m=19456,t=2,p=1$bm9ib2R5bm9ib2R5bm8$6Dn1UEcWrqW4ESXVDoBm4jmBmgPf7zNjDYhLT9Gf4nM";

/// A hash that this module can check, at a bounded cost.
struct Known {
    hasher: Argon2<'static>,
    blocks: usize,
    salt: Vec<u8>,
    hash: Output,
}

impl Known {
    fn read(text: &str) -> Result<Self, String> {
        let told = |error: argon2::password_hash::Error| format!("the hash cannot be read: {error}");
        let parsed = PasswordHash::new(text).map_err(told)?;
        let algorithm = Algorithm::try_from(parsed.algorithm).map_err(told)?;
        let version = parsed.version.map_or(Ok(Version::V0x13), Version::try_from);
        let version = version.map_err(|error| told(error.into()))?;
        let params = Params::try_from(&parsed).map_err(told)?;
        if params.m_cost() > MEMORY_KIB_MAX || params.t_cost() > ROUNDS_MAX || params.p_cost() > LANES_MAX {
            return Err(format!(
                "the hash asks for {} KiB, {} rounds and {} lanes; at most {MEMORY_KIB_MAX} KiB, {ROUNDS_MAX} \
                 rounds and {LANES_MAX} lanes are granted: give the account another password with 'tapiod user \
                 passwd'",
                params.m_cost(),
                params.t_cost(),
                params.p_cost()
            ));
        }
        let (Some(salt), Some(hash)) = (parsed.salt, parsed.hash) else {
            return Err("the hash has no salt or no end".to_owned());
        };
        let mut bytes = [0; SALT_LEN_MAX];
        let salt = salt.decode_b64(&mut bytes).map_err(told)?.to_vec();
        let blocks = params.block_count();
        Ok(Self { hasher: Argon2::new(algorithm, version, params), blocks, salt, hash })
    }
}

/// Whether a hash of the file can be checked, and at what cost.
///
/// # Errors
/// A sentence.
pub(super) fn check(hash: &str) -> Result<(), String> {
    Known::read(hash).map(drop)
}

/// The memory of argon2: zeroes between two passwords.
#[derive(Default)]
pub(super) struct Memory {
    blocks: Vec<Block>,
    /// Blocks that were computed, of all passwords.
    #[cfg(test)]
    work: u64,
}

impl Memory {
    /// Hashes a new password: argon2id with 19 MiB and two rounds (RFC 9106's shape, OWASP's numbers), tens of
    /// milliseconds.
    pub(super) fn hash(&mut self, password: &str) -> Result<String, String> {
        if password.chars().count() < PASSWORD_MIN || password.len() > PASSWORD_MAX {
            return Err(format!(
                "a password has at least {PASSWORD_MIN} characters, and at most {PASSWORD_MAX} bytes"
            ));
        }
        let mut salt = [0_u8; SALT_LEN];
        if getrandom(&mut salt[..], GetRandomFlags::empty()) != Ok(SALT_LEN) {
            return Err("the system gives no random numbers".to_owned());
        }
        let told = |error: argon2::password_hash::Error| format!("the password cannot be hashed: {error}");
        let params = Params::default();
        let hasher = Argon2::new(Algorithm::Argon2id, Version::V0x13, params.clone());
        let hash = self.fill(&hasher, params.block_count(), password, &salt, Params::DEFAULT_OUTPUT_LEN);
        let text = SaltString::encode_b64(&salt).map_err(told)?;
        let hash = PasswordHash {
            algorithm: Algorithm::Argon2id.ident(),
            version: Some(Version::V0x13.into()),
            params: (&params).try_into().map_err(told)?,
            salt: Some(text.as_salt()),
            hash: Some(hash.map_err(told)?),
        };
        Ok(hash.to_string())
    }

    /// Whether a password is the one of a hash. Without a hash it takes as long, and is not.
    pub(super) fn verify(&mut self, hash: Option<&str>, password: &str) -> bool {
        let Ok(known) = Known::read(hash.unwrap_or(UNKNOWN_USER_HASH)) else { return false };
        if password.len() > PASSWORD_MAX {
            return false;
        }
        let made = self.fill(&known.hasher, known.blocks, password, &known.salt, known.hash.len());
        // Compared in constant time.
        made.is_ok_and(|made| made == known.hash) && hash.is_some()
    }

    fn fill(
        &mut self,
        hasher: &Argon2<'_>,
        blocks: usize,
        password: &str,
        salt: &[u8],
        len: usize,
    ) -> Result<Output, argon2::password_hash::Error> {
        if self.blocks.len() < blocks {
            // What is there is zeroes: it need not be wiped. The old memory goes before the new is taken.
            self.blocks = Vec::new();
            self.blocks = vec![Block::new(); blocks];
        }
        #[cfg(test)]
        {
            self.work += blocks as u64 * u64::from(hasher.params().t_cost());
        }
        let memory = &mut self.blocks[..blocks];
        let made = Output::init_with(len, |out| {
            Ok(hasher.hash_password_into_with_memory(password.as_bytes(), salt, out, &mut *memory)?)
        });
        memory.iter_mut().for_each(|block| block.zeroize());
        made
    }
}

type Job = Box<dyn FnOnce(&mut Memory) + Send>;

/// The thread that hashes.
#[derive(Debug)]
pub(super) struct Hasher(SyncSender<Job>);

impl Hasher {
    /// Starts it; it ends with this.
    ///
    /// # Errors
    /// There can be no more threads.
    pub(super) fn start() -> Result<Self, String> {
        let (sender, jobs) = sync_channel(JOBS_MAX);
        let thread = thread::Builder::new().name("tapiod-password".into()).spawn(move || run(&jobs));
        thread.map_err(|error| format!("no thread for passwords: {error}"))?;
        Ok(Self(sender))
    }

    /// What `work` comes to, when its turn has come.
    ///
    /// # Errors
    /// It ended by a defect.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Memory) -> T + Send + 'static,
    ) -> Result<T, String> {
        let (done, answer) = sync_channel(1);
        let job: Job = Box::new(move |memory| drop(done.send(work(memory))));
        let gone = || "the thread that checks passwords has ended; restart tapiod".to_owned();
        self.0.send(job).map_err(|_| gone())?;
        answer.recv().map_err(|_| gone())
    }
}

fn run(jobs: &Receiver<Job>) {
    let mut memory = Memory::default();
    loop {
        let wait = if memory.blocks.is_empty() { Duration::MAX } else { KEPT };
        match jobs.recv_timeout(wait) {
            Ok(job) => job(&mut memory),
            Err(RecvTimeoutError::Timeout) => memory = Memory::default(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_once_and_wiped_after_each_password() {
        let mut memory = Memory::default();
        let hash = memory.hash("correct horse").expect("a hash");
        let place = memory.blocks.as_ptr();
        let is_wiped = |memory: &Memory| memory.blocks.iter().all(|block| block.as_ref() == [0; 128]);
        assert!(is_wiped(&memory) && memory.blocks.len() == 19_456);
        assert!(memory.verify(Some(&hash), "correct horse"));
        assert!(!memory.verify(Some(&hash), "correct horsf"));
        assert!(is_wiped(&memory), "something of a password is left");
        assert_eq!(memory.blocks.as_ptr(), place, "the memory is another one");
    }

    #[test]
    fn an_unknown_name_takes_as_long_as_a_wrong_password() {
        let mut memory = Memory::default();
        let hash = memory.hash("correct horse").expect("a hash");
        let mut work = |hash: Option<&str>| {
            let before = memory.work;
            assert!(!memory.verify(hash, "wrong password"));
            memory.work - before
        };
        let known = work(Some(&hash));
        assert!(known > 0);
        assert_eq!(work(None), known);
    }

    #[test]
    fn hashes_of_others_are_checked_and_what_costs_too_much_is_refused() {
        // Of the reference implementation: echo -n password | argon2 somesalt -id -t 2 -k 65536 -p 1 -e
        let known = "$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc";
        check(known).expect("as much as is granted");
        let mut memory = Memory::default();
        assert!(memory.verify(Some(known), "password"));
        for (from, to) in
            [("m=65536", "m=65537"), ("m=65536", "m=4294967295"), ("t=2", "t=9"), ("p=1", "p=5")]
        {
            let why = check(&known.replace(from, to)).expect_err(to);
            assert!(why.contains("at most 65536 KiB") && why.contains("tapiod user passwd"), "{why}");
            assert!(!memory.verify(Some(&known.replace(from, to)), "password"));
        }
        for wrong in
            ["", "nohash", "$scrypt$ln=1$c29tZXNhbHQ$AAAA", "$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ"]
        {
            assert!(check(wrong).is_err(), "{wrong}");
        }
        assert_eq!(memory.blocks.len(), 65_536, "none of them was granted more");
    }

    #[test]
    fn one_thread_hashes_for_all() {
        let hasher = Hasher::start().expect("a thread");
        let id = |hasher: &Hasher| hasher.run(|_| thread::current().id()).expect("done");
        let ids = thread::scope(|scope| {
            let asked: Vec<_> = (0..8).map(|_| scope.spawn(|| id(&hasher))).collect();
            asked.into_iter().map(|asked| asked.join().expect("no panic")).collect::<Vec<_>>()
        });
        assert!(ids.iter().all(|other| *other == ids[0]) && ids[0] != thread::current().id());
    }
}
