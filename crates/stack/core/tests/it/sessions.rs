//! Logins, roles, and sessions that end.

use std::time::{Duration, Instant};

use tapio_core::Peer;
use tapio_fixtures::waiting::Caller;
use tapio_model::{Role, Value};

use crate::world::{Client, map, stack, text, texts};

const LOGIN: &str = "session.login_with_password";

#[test]
fn only_a_client_that_knows_the_password_gets_in() {
    let (_dir, stack) = stack();
    let login = |user: &str, password: &str, peer: &Peer| {
        stack.call(peer, LOGIN, vec![user.into(), password.into(), "1.0".into(), "a test".into()])
    };
    let stranger = Peer { superuser: false, address: "192.0.2.1".into(), certificate: None };
    for (user, password) in [("pool-admin", "wrong"), ("nobody", "secret"), ("pool-admin", &"x".repeat(5000))]
    {
        let error = login(user, password, &stranger).expect_err("it is wrong");
        assert_eq!(error.code, "SESSION_AUTHENTICATION_FAILED");
        assert!(!error.params.concat().contains(password) || password == "wrong");
    }
    let root = Peer { superuser: true, address: "unix".into(), certificate: None };
    let session = text(&login("root", "", &root).expect("no password is needed"));
    let session = || Value::from(session.as_str());
    let record = stack.call(&root, "session.get_record", vec![session(), session()]).expect("one's own");
    assert_eq!(map(&record)["is_local_superuser"], true.into());
    assert_eq!(text(&map(&record)["auth_user_name"]), "root");
    assert_eq!(text(&map(&record)["originator"]), "a test");
    let host = stack.call(&root, "session.get_this_host", vec![session(), session()]).expect("a host");
    assert_eq!(vec![text(&host)], texts(&stack.call(&root, "host.get_all", vec![session()]).expect("hosts")));
}

#[test]
fn each_role_does_what_it_may() {
    let (_dir, stack) = stack();
    let client = |role: &str| Client::login(&stack, role);
    let pool = texts(&client("read-only").call("pool.get_all", vec![]))[0].clone();
    let set = |role: &str, value: &str| {
        client(role).try_call("pool.set_name_label", vec![pool.as_str().into(), value.into()])
    };
    for role in ["read-only", "vm-admin"] {
        let error = set(role, "theirs").expect_err("it may not");
        assert_eq!(
            (error.code.as_ref(), error.params[0].as_str()),
            ("RBAC_PERMISSION_DENIED", "pool.set_name_label")
        );
    }
    for role in ["pool-operator", "pool-admin"] {
        set(role, role).expect("it may");
    }
    assert_eq!(
        text(&client("read-only").call("pool.get_name_label", vec![pool.as_str().into()])),
        "pool-admin"
    );
    for role in ["read-only", "vm-admin"] {
        assert_eq!(client(role).code("secret.get_all_records", vec![]), "RBAC_PERMISSION_DENIED");
        let events = client(role).call("event.from", vec![Value::strings(["secret"]), "".into(), 0.0.into()]);
        assert!(map(&map(&events)["valid_ref_counts"]).is_empty(), "secrets are not counted for {role}");
    }
    client("pool-operator").call("secret.get_all_records", vec![]);
    let roles = client("read-only").call("role.get_all_records", vec![]);
    let mut names: Vec<String> = map(&roles).values().map(|role| text(&map(role)["name_label"])).collect();
    names.sort();
    let mut all = Role::ALL.map(Role::name);
    all.sort_unstable();
    assert_eq!(names, all);
}

#[test]
fn sessions_are_not_for_others_to_see() {
    let (_dir, stack) = stack();
    let (one, other) = (Client::login(&stack, "pool-admin"), Client::login(&stack, "pool-admin"));
    assert_eq!(one.code("session.get_all", vec![]), "MESSAGE_METHOD_UNKNOWN");
    assert_eq!(one.code("session.get_record", vec![other.session.as_str().into()]), "RBAC_PERMISSION_DENIED");
    let events = one.call("event.from", vec![Value::strings(["*"]), "".into(), 0.0.into()]);
    assert!(!format!("{events:?}").contains(&other.session));
    assert_eq!(
        one.code("event.inject", vec!["session".into(), other.session.as_str().into()]),
        "VALUE_NOT_SUPPORTED"
    );
    one.call("session.set_other_config", vec![one.session.as_str().into(), Value::string_map([("a", "b")])]);
}

#[test]
fn an_idle_session_ends_and_a_used_one_does_not() {
    let (_dir, stack) = stack();
    // Long enough that a busy host lets the used one be used in time.
    let limit = Duration::from_secs(4);
    stack.sessions.set_idle_limit(limit);
    let (used, idle) = (Client::login(&stack, "pool-admin"), Client::login(&stack, "read-only"));
    let since = Instant::now();
    while since.elapsed() <= limit {
        std::thread::sleep(Duration::from_millis(50));
        used.call("pool.get_all", vec![]);
    }
    let error = idle.try_call("pool.get_all", vec![]).expect_err("it was idle");
    assert_eq!(
        (error.code.as_ref(), error.params.as_slice()),
        ("SESSION_INVALID", &[idle.session.clone()][..])
    );
    assert_eq!(stack.sessions.count(), 1);
    // A call that is in progress when the session ends of age ends as it should; the next one does not begin.
    let token =
        text(&map(&used.call("event.from", vec![Value::strings(["pool"]), "".into(), 0.0.into()]))["token"]);
    let caller = Caller::default();
    let under_way = std::thread::scope(|scope| {
        let params = vec![Value::strings(["pool"]), token.into(), 1.0.into()];
        let under_way = scope.spawn(|| caller.calls(|| used.call("event.from", params)));
        caller.until_it_waits();
        stack.sessions.set_idle_limit(Duration::from_millis(1));
        under_way.join().expect("no panic")
    });
    assert!(map(&under_way)["events"].as_set().expect("a set").is_empty());
    assert_eq!(used.code("pool.get_all", vec![]), "SESSION_INVALID");
}

#[test]
fn a_logout_ends_a_session_at_once() {
    let (_dir, stack) = stack();
    let client = Client::login(&stack, "pool-admin");
    client.call("session.logout", vec![]);
    assert_eq!(client.code("pool.get_all", vec![]), "SESSION_INVALID");
    assert_eq!(stack.db.count("session"), 0);
    let admin = Client::login(&stack, "pool-admin");
    let (one, two) = (Client::login(&stack, "vm-admin"), Client::login(&stack, "vm-admin"));
    assert_eq!(texts(&admin.call("session.get_all_subject_identifiers", vec![])), ["pool-admin", "vm-admin"]);
    admin.call("session.logout_subject_identifier", vec!["vm-admin".into()]);
    assert_eq!(one.code("pool.get_all", vec![]), "SESSION_INVALID");
    assert_eq!(two.code("pool.get_all", vec![]), "SESSION_INVALID");
}

#[test]
fn an_account_has_so_many_sessions_and_no_more() {
    let (_dir, stack) = stack();
    let other = Client::login(&stack, "read-only");
    let first = Client::login(&stack, "vm-admin");
    std::thread::sleep(Duration::from_millis(5));
    let second = Client::login(&stack, "vm-admin");
    std::thread::sleep(Duration::from_millis(5));
    for _ in 0..499 {
        Client::login(&stack, "vm-admin");
    }
    assert_eq!(stack.sessions.count(), 501);
    assert_eq!(first.code("pool.get_all", vec![]), "SESSION_INVALID");
    second.call("pool.get_all", vec![]);
    other.call("pool.get_all", vec![]);
}

#[test]
fn passwords_are_changed_by_the_accounts() {
    let (_dir, stack) = stack();
    let client = Client::login(&stack, "vm-admin");
    client.call("session.change_password", vec!["secret".into(), "better".into()]);
    assert_eq!(
        client.code("session.change_password", vec!["x".into(), "y".into()]),
        "SESSION_AUTHENTICATION_FAILED"
    );
}
