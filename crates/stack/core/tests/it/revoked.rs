//! Accounts that change while sessions of them are open.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tapio_core::db::Db;
use tapio_core::{Accounts, Credential, Login, Peer, Toolstack};
use tapio_fixtures::waiting::Caller;
use tapio_model::{ApiError, Role, Value};

use crate::world::{Client, config, map, text};

/// Accounts by name: role and password. None: they cannot be read.
#[derive(Default)]
struct Book {
    rows: Mutex<Option<BTreeMap<String, (Role, String)>>>,
    generation: AtomicU64,
}

impl Book {
    fn set(&self, rows: &[(&str, Role, &str)]) {
        let rows = rows.iter().map(|(name, role, word)| ((*name).to_owned(), (*role, (*word).to_owned())));
        *self.rows.lock().expect("no panic") = Some(rows.collect());
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    fn damage(&self) {
        *self.rows.lock().expect("no panic") = None;
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    fn print(password: &str) -> Credential {
        Credential(password.bytes().fold(7, |sum, byte| sum * 31 + u64::from(byte)))
    }
}

struct Shared(Arc<Book>);

impl Accounts for Shared {
    fn authenticate(&self, user: &str, password: &str, _: &Peer) -> Result<Login, ApiError> {
        let rows = self.0.rows.lock().expect("no panic");
        let row = rows.as_ref().and_then(|rows| rows.get(user)).filter(|(_, known)| known == password);
        row.map(|(role, _)| Login { role: *role, credential: Book::print(password) })
            .ok_or_else(|| ApiError::new("SESSION_AUTHENTICATION_FAILED", [user]))
    }

    fn change_password(&self, user: &str, _: &str, new: &str) -> Result<Credential, ApiError> {
        let mut rows = self.0.rows.lock().expect("no panic");
        rows.as_mut().and_then(|rows| rows.get_mut(user)).expect("it is there").1 = new.to_owned();
        self.0.generation.fetch_add(1, Ordering::SeqCst);
        Ok(Book::print(new))
    }

    fn generation(&self) -> u64 {
        self.0.generation.load(Ordering::SeqCst)
    }

    fn standings(&self, asked: &[(&str, Credential)]) -> Result<Vec<Option<Role>>, ApiError> {
        let rows = self.0.rows.lock().expect("no panic");
        let rows = rows.as_ref().ok_or_else(|| ApiError::internal("the accounts have a wrong line"))?;
        let standing = |(user, credential): &(&str, Credential)| {
            let (role, password) = rows.get(*user)?;
            (Book::print(password) == *credential).then_some(*role)
        };
        Ok(asked.iter().map(standing).collect())
    }
}

struct World {
    _dir: tempfile::TempDir,
    book: Arc<Book>,
    stack: Arc<Toolstack>,
}

fn world() -> World {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let book = Arc::new(Book::default());
    book.set(&[("alice", Role::PoolAdmin, "secret"), ("bob", Role::PoolOperator, "secret")]);
    let accounts = Box::new(Shared(Arc::clone(&book)));
    let mut stack = Toolstack::with_accounts(config(dir.path()), Db::default(), accounts);
    let inner = Arc::get_mut(&mut stack).expect("there is no other reference yet");
    // Work that goes on until it is cancelled.
    inner.handlers.of(&Arc::new(())).replace("host.compute_free_memory", |call, _| {
        let until = Instant::now() + Duration::from_secs(600);
        while !call.progress.is_cancelled() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        Err(ApiError::new("TASK_CANCELLED", [call.progress.task().unwrap_or_default()]))
    });
    inner.methods = tapio_core::Methods::new(&inner.handlers);
    stack.start().expect("a toolstack starts");
    World { _dir: dir, book, stack }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

const NAME: &str = "pool.set_name_label";

fn pool(stack: &Toolstack) -> Value {
    stack.db.all("pool")[0].reference.as_str().into()
}

#[test]
fn a_session_has_the_role_that_its_account_has_now() {
    let world = world();
    let (alice, bob) = (Client::login(&world.stack, "alice"), Client::login(&world.stack, "bob"));
    let name = || vec![pool(&world.stack), "n".into()];
    alice.call(NAME, name());
    world.book.set(&[("alice", Role::ReadOnly, "secret"), ("bob", Role::PoolOperator, "secret")]);
    assert_eq!(alice.code(NAME, name()), "RBAC_PERMISSION_DENIED");
    alice.call("pool.get_all", vec![]);
    bob.call(NAME, name());
    world.book.set(&[("alice", Role::PoolOperator, "secret"), ("bob", Role::PoolOperator, "secret")]);
    alice.call(NAME, name());
}

#[test]
fn a_session_ends_with_its_account_and_with_its_password() {
    let world = world();
    let (alice, bob) = (Client::login(&world.stack, "alice"), Client::login(&world.stack, "bob"));
    world.book.set(&[("bob", Role::PoolOperator, "another")]);
    for client in [&alice, &bob] {
        assert_eq!(client.code("pool.get_all", vec![]), "SESSION_INVALID");
    }
    assert_eq!(world.stack.sessions.count(), 0);
    // An account of the same name that is made anew does not bring the session back.
    world.book.set(&[("alice", Role::PoolAdmin, "secret")]);
    assert_eq!(alice.code("pool.get_all", vec![]), "SESSION_INVALID");
}

#[test]
fn a_session_that_changes_its_password_goes_on_and_the_users_other_sessions_do_not() {
    let world = world();
    let (here, there) = (Client::login(&world.stack, "alice"), Client::login(&world.stack, "alice"));
    here.call("session.change_password", vec!["secret".into(), "better".into()]);
    here.call("pool.get_all", vec![]);
    assert_eq!(there.code("pool.get_all", vec![]), "SESSION_INVALID");
    world.book.set(&[("alice", Role::PoolAdmin, "secret")]);
    assert_eq!(here.code("pool.get_all", vec![]), "SESSION_INVALID");
}

#[test]
fn the_local_superuser_is_no_account() {
    let world = world();
    let root = Peer { superuser: true, address: String::new(), certificate: None };
    let login = vec!["alice".into(), "".into()];
    let session = world.stack.call(&root, "session.login_with_password", login).expect("no password");
    let client = Client { stack: Arc::clone(&world.stack), session: text(&session) };
    world.book.set(&[]);
    client.call(NAME, vec![pool(&world.stack), "n".into()]);
    world.book.damage();
    client.call(NAME, vec![pool(&world.stack), "n".into()]);
}

#[test]
fn accounts_that_cannot_be_read_let_no_user_do_anything_and_end_nothing() {
    let world = world();
    let alice = Client::login(&world.stack, "alice");
    world.book.damage();
    assert!(alice.try_call("pool.get_all", vec![]).expect_err("refused").params[0].contains("wrong line"));
    world.book.set(&[("alice", Role::PoolAdmin, "secret")]);
    alice.call("pool.get_all", vec![]);
}

#[test]
fn calls_that_wait_end_or_see_what_they_may() {
    let world = world();
    let stack = &world.stack;
    let (alice, bob) = (Client::login(stack, "alice"), Client::login(stack, "bob"));
    let secrets = || Value::strings(["secret"]);
    let token = |client: &Client| {
        let batch = client.call("event.from", vec![secrets(), "".into(), 0.0.into()]);
        text(&map(&batch)["token"])
    };
    let (at_alice, at_bob) = (token(&alice), token(&bob));
    let (of_alice, of_bob) = (Caller::default(), Caller::default());
    std::thread::scope(|scope| {
        let params = vec![secrets(), at_alice.into(), 3600.0.into()];
        let waiting = scope.spawn(|| of_alice.calls(|| alice.try_call("event.from", params)));
        let params = vec![secrets(), at_bob.into(), 5.0.into()];
        let demoted = scope.spawn(|| of_bob.calls(|| bob.call("event.from", params)));
        of_alice.until_it_waits();
        of_bob.until_it_waits();
        // What the daemon's watch of the file does.
        world.book.set(&[("bob", Role::ReadOnly, "secret")]);
        stack.sessions.review().expect("readable");
        assert_eq!(
            waiting.join().expect("no panic").expect_err("its account is gone").code,
            "SESSION_INVALID"
        );
        stack.db.create("secret", &[("value", "s".into())]).expect("a secret");
        let seen = demoted.join().expect("no panic");
        assert_eq!(map(&seen)["events"], Value::Set(Vec::new()), "secrets are not for it any more");
    });
}

#[test]
fn work_under_way_is_cancelled_when_its_account_may_not_do_it_any_more() {
    let world = world();
    let stack = &world.stack;
    let (alice, bob) = (Client::login(stack, "alice"), Client::login(stack, "bob"));
    let begin =
        |client: &Client| text(&client.call("Async.host.compute_free_memory", vec!["OpaqueRef:x".into()]));
    let (of_alice, of_bob) = (begin(&alice), begin(&bob));
    // Its session has ended in order: the work goes on, and is still the account's.
    alice.call("session.logout", vec![]);
    let status = |task: &str| stack.db.get("task", task).expect("it is kept").text("status").to_owned();
    assert_eq!((status(&of_alice), status(&of_bob)), ("pending".into(), "pending".into()));
    world.book.set(&[("bob", Role::PoolOperator, "secret")]);
    bob.call("pool.get_all", vec![]);
    until("alice's work is cancelled", || status(&of_alice) == "cancelled");
    assert_eq!(status(&of_bob), "pending");
    world.book.set(&[]);
    stack.sessions.review().expect("readable");
    until("bob's work is cancelled", || status(&of_bob) == "cancelled");
}

#[test]
fn a_console_is_lost_with_the_session_or_the_role() {
    let world = world();
    let bob = || ("bob", Role::PoolOperator, "secret");
    let lost = |client: &Client| {
        let waiting = Arc::clone(&world.stack).console_lost(client.session.clone());
        std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(waiting);
        })
    };
    let alice = Client::login(&world.stack, "alice");
    let open = lost(&alice);
    // Another role that is enough, and whatever else happens.
    world.book.set(&[("alice", Role::VmOperator, "secret"), bob()]);
    alice.call("pool.get_all", vec![]);
    assert!(!open.is_finished());
    alice.call("session.logout", vec![]);
    open.join().expect("a logout ends it");
    let alice = Client::login(&world.stack, "alice");
    let open = lost(&alice);
    world.book.set(&[("alice", Role::ReadOnly, "secret"), bob()]);
    world.stack.sessions.review().expect("the accounts can be read");
    open.join().expect("a lower role ends it");
    let bob = Client::login(&world.stack, "bob");
    let open = lost(&bob);
    world.book.set(&[("alice", Role::ReadOnly, "secret")]);
    world.stack.sessions.review().expect("the accounts can be read");
    open.join().expect("the end of the account ends it");
    lost(&bob).join().expect("a session that is no more has no console");
}
