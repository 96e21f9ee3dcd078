//! Events as clients use them.

use std::time::{Duration, Instant};

use tapio_core::{Peer, Toolstack};
use tapio_fixtures::waiting::Caller;
use tapio_model::Value;

use crate::world::{Client, map, needed, stack, text, texts};

/// What `event.from` answered.
#[derive(Debug)]
struct Batch {
    token: String,
    /// Operation, class, reference, name.
    events: Vec<(String, String, String, String)>,
    counts: std::collections::BTreeMap<String, Value>,
}

fn from(client: &Client, classes: &[&str], token: &str, timeout: f64) -> Batch {
    let params = vec![Value::strings(classes.iter().copied()), token.into(), timeout.into()];
    read(&client.call("event.from", params))
}

fn event(event: &Value) -> (String, String, String, String) {
    let event = map(event);
    let name = event.get("snapshot").and_then(|snapshot| map(snapshot).get("name_label").map(text));
    assert_eq!(text(&event["timestamp"]), "0.0");
    assert!(text(&event["id"]).parse::<u64>().is_ok());
    (text(&event["operation"]), text(&event["class"]), text(&event["ref"]), name.unwrap_or_default())
}

fn read(answer: &Value) -> Batch {
    let answer = map(answer);
    let events: Vec<_> = answer["events"].as_set().expect("a set").iter().map(event).collect();
    let mut objects: Vec<_> = events.iter().map(|event| (&event.1, &event.2)).collect();
    objects.sort();
    let all = objects.len();
    objects.dedup();
    assert_eq!(objects.len(), all, "an object came twice");
    Batch { token: text(&answer["token"]), events, counts: map(&answer["valid_ref_counts"]).clone() }
}

fn pool(client: &Client) -> String {
    texts(&client.call("pool.get_all", vec![]))[0].clone()
}

fn note(client: &Client, class: &str, reference: &str, value: &str) {
    let params = vec![reference.into(), Value::string_map([("k", value)])];
    client.call(&format!("{class}.set_other_config"), params);
}

#[test]
fn an_empty_token_shows_everything_and_the_next_one_what_changed() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let (one, two) = (admin.blob("one"), admin.blob("two"));
    let all = from(&admin, &["blob", "Pool"], "", 10.0);
    assert_eq!(all.events.len(), 3);
    assert!(all.events.iter().all(|event| event.0 == "add"));
    assert_eq!(
        (&all.counts["blob"], &all.counts["pool"], all.counts.len()),
        (&Value::Int(2), &Value::Int(1), 2)
    );
    let nothing = from(&admin, &["blob"], &all.token, 0.0);
    assert!(nothing.events.is_empty());
    let three = admin.blob("three");
    stack.db.set("blob", &one, "name_label", "ONE").expect("a field");
    stack.db.set("blob", &one, "name_description", "x").expect("a field");
    stack.db.destroy("blob", &two).expect("it is there");
    let short = admin.blob("short-lived");
    stack.db.destroy("blob", &short).expect("it is there");
    let changed = from(&admin, &["blob"], &nothing.token, 10.0);
    let expected =
        [("add", "blob", three.as_str(), "three"), ("mod", "blob", &one, "ONE"), ("del", "blob", &two, "")]
            .map(|(a, b, c, d)| (a.to_owned(), b.to_owned(), c.to_owned(), d.to_owned()));
    assert_eq!(changed.events, expected);
    let everything = from(&admin, &["*"], "", 0.0);
    assert!(everything.events.len() > 5 && !everything.counts.contains_key("session"));
}

#[test]
fn an_object_that_went_and_came_back_is_one_change() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let vm = admin.vm("before");
    let token = from(&admin, &["vm"], "", 0.0).token;
    let uuid = Value::from(vm.strip_prefix("OpaqueRef:").expect("a reference"));
    for name in ["between", "after"] {
        stack.db.destroy("VM", &vm).expect("it is there");
        let fields = needed("VM", &[("uuid", uuid.clone()), ("name_label", name.into())]);
        assert_eq!(stack.db.create("VM", &fields), Ok(vm.clone()));
    }
    let seen = from(&admin, &["vm"], &token, 0.0);
    assert_eq!(seen.events, [("mod".into(), "vm".into(), vm.clone(), "after".into())]);
    stack.db.destroy("VM", &vm).expect("it is there");
    let seen = from(&admin, &["vm"], &token, 0.0);
    assert_eq!(seen.events, [("del".into(), "vm".into(), vm, String::new())]);
}

#[test]
fn one_object_can_be_watched_alone() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let (one, two) = (admin.vm("one"), admin.vm("two"));
    let filter = format!("vM/{}", one.to_ascii_uppercase());
    let first = from(&admin, &[&filter], "", 0.0);
    assert_eq!(first.events, [("add".into(), "vm".into(), one.clone(), "one".into())]);
    note(&admin, "VM", &two, "x");
    assert!(from(&admin, &[&filter], &first.token, 0.05).events.is_empty());
    note(&admin, "VM", &one, "x");
    assert_eq!(from(&admin, &[&filter], &first.token, 5.0).events.len(), 1);
}

#[test]
fn a_blocked_call_is_answered_when_something_happens_and_not_before() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let pool = pool(&admin);
    let token = from(&admin, &["pool"], "", 0.0).token;
    let began = Instant::now();
    assert!(from(&admin, &["pool"], &token, 0.1).events.is_empty());
    assert!(began.elapsed() >= Duration::from_millis(100));
    let caller = Caller::default();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| caller.calls(|| from(&admin, &["pool"], &token, 3600.0)));
        caller.until_it_waits();
        let vm = admin.vm("of no concern");
        note(&admin, "VM", &vm, "x");
        caller.until_it_waits();
        note(&admin, "pool", &pool, "x");
        assert_eq!(waiting.join().expect("no panic").events.len(), 1);
    });
    assert!(began.elapsed() < Duration::from_secs(600), "the event ended the wait");
}

#[test]
fn inverse_fields_make_events() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let vm = admin.vm("vm");
    let token = from(&admin, &["vm"], "", 0.0).token;
    let fields = needed("VBD", &[("VM", vm.as_str().into()), ("userdevice", "0".into())]);
    let vbd = stack.db.create("VBD", &fields).expect("a VBD");
    let seen = from(&admin, &["vm", "vbd"], &token, 0.0);
    assert_eq!(seen.events.iter().map(|event| event.1.as_str()).collect::<Vec<_>>(), ["vbd", "vm"]);
    stack.db.destroy("VBD", &vbd).expect("it is there");
    assert_eq!(from(&admin, &["vm"], &seen.token, 0.0).events.len(), 1);
}

#[test]
fn registered_events_come_by_next() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let pool = pool(&admin);
    assert_eq!(admin.code("event.next", vec![]), "SESSION_NOT_REGISTERED");
    admin.call("event.register", vec![Value::strings(["pool"])]);
    let token = from(&admin, &["pool"], "", 0.0).token;
    note(&admin, "pool", &pool, "x");
    let next = admin.call("event.next", vec![]);
    let next: Vec<_> = next.as_set().expect("a set").iter().map(event).collect();
    assert_eq!(next, [("mod".into(), "pool".into(), pool.clone(), String::new())]);
    // The same change is there for a listener that does it the other way, in the same session.
    assert_eq!(from(&admin, &["pool"], &token, 0.0).events.len(), 1);
    let caller = Caller::default();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| caller.calls(|| admin.call("event.next", vec![])));
        // Each change comes once.
        caller.until_it_waits();
        note(&admin, "pool", &pool, "y");
        waiting.join().expect("no panic");
    });
    admin.call("event.unregister", vec![Value::strings(["Pool"])]);
    assert_eq!(admin.code("event.next", vec![]), "SESSION_NOT_REGISTERED");
}

#[test]
fn a_logout_releases_waiters() {
    let (_dir, stack) = stack();
    for method in ["event.next", "event.from"] {
        let client = Client::login(&stack, "pool-admin");
        client.call("event.register", vec![Value::strings(["pool"])]);
        let token = from(&client, &["pool"], "", 0.0).token;
        let params = match method {
            "event.next" => vec![],
            _ => vec![Value::strings(["pool"]), token.as_str().into(), 3600.0.into()],
        };
        let caller = Caller::default();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| caller.calls(|| client.code(method, params)));
            caller.until_it_waits();
            let began = Instant::now();
            client.call("session.logout", vec![]);
            assert_eq!(waiting.join().expect("no panic"), "SESSION_INVALID");
            assert!(began.elapsed() < Duration::from_secs(600), "{method}");
        });
    }
}

#[test]
fn an_injected_event_comes_to_clients_with_an_older_token() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let pool = pool(&admin);
    let before = from(&admin, &["pool"], "", 0.0).token;
    let token = text(&admin.call("event.inject", vec!["pool".into(), pool.as_str().into()]));
    for older in [before, token] {
        let seen = from(&admin, &["pool"], &older, 10.0);
        assert_eq!(seen.events, [("mod".into(), "pool".into(), pool.clone(), String::new())]);
        assert!(from(&admin, &["pool"], &seen.token, 0.0).events.is_empty());
    }
    assert_eq!(admin.code("event.inject", vec!["pool".into(), "OpaqueRef:no".into()]), "HANDLE_INVALID");
    assert!(admin.call("event.get_current_id", vec![]).as_int() > Some(0));
}

#[test]
fn messages_come_as_events() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let pool = pool(&admin);
    let uuid = admin.call("pool.get_uuid", vec![pool.as_str().into()]);
    let token = from(&admin, &["message"], "", 0.0).token;
    let since = Value::DateTime(tapio_core::dates::now() - 1);
    let made = vec!["TEST".into(), Value::Int(3), "Pool".into(), uuid.clone(), "body".into()];
    let message = text(&admin.call("message.create", made));
    let seen = from(&admin, &["message"], &token, 0.0);
    assert_eq!(seen.events, [("add".into(), "message".into(), message.clone(), String::new())]);
    for (method, params) in [
        ("message.get", vec!["Pool".into(), uuid, since.clone()]),
        ("message.get_since", vec![since]),
        ("message.get_all_records", vec![]),
    ] {
        assert!(map(&admin.call(method, params)).contains_key(&message), "{method}");
    }
    admin.call("message.destroy", vec![message.as_str().into()]);
    let seen = from(&admin, &["message"], &seen.token, 0.0);
    assert_eq!(seen.events, [("del".into(), "message".into(), message, String::new())]);
    let wrong = |priority: i64, uuid: &str| {
        admin.code(
            "message.create",
            vec!["T".into(), Value::Int(priority), "Pool".into(), uuid.into(), "".into()],
        )
    };
    assert_eq!(wrong(3, "no uuid"), "UUID_INVALID");
    assert_eq!(wrong(9, "no uuid"), "INVALID_VALUE");
}

#[test]
fn bad_and_lost_tokens_are_told_apart() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let code =
        |classes: Value, token: &str| admin.code("event.from", vec![classes, token.into(), 0.0.into()]);
    for token in ["x", "1", "1,", ",1", "1,2,3", "-1,0", "99999999999999999999999,0"] {
        assert_eq!(code(Value::strings(["*"]), token), "EVENT_FROM_TOKEN_PARSE_FAILURE", "{token}");
    }
    assert_eq!(code(Value::strings(["*"]), "9999999,0"), "EVENTS_LOST");
    for subscription in ["", "/", "vm/"] {
        assert_eq!(
            code(Value::strings([subscription]), ""),
            "EVENT_SUBSCRIPTION_PARSE_FAILURE",
            "{subscription}"
        );
    }
    assert_eq!(code("vm".into(), ""), "FIELD_TYPE_ERROR");
    assert!(from(&admin, &["class_of_2031"], "", 0.0).events.is_empty());
}

#[test]
fn deletions_beyond_memory_are_lost_with_a_word() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let token = from(&admin, &["vm"], "", 0.0).token;
    admin.call("event.register", vec![Value::strings(["vm"])]);
    for _ in 0..5 {
        let vms = stack.db.change(|change| {
            let fields = needed("VM", &[]);
            (0..5_000).map(|_| change.create("VM", &fields)).collect::<Result<Vec<_>, _>>()
        });
        let vms = vms.expect("many VMs");
        stack
            .db
            .change(|change| vms.iter().try_for_each(|vm| change.destroy("VM", vm)))
            .expect("they are there");
    }
    assert_eq!(
        admin.code("event.from", vec![Value::strings(["vm"]), token.into(), 0.0.into()]),
        "EVENTS_LOST"
    );
    assert_eq!(admin.code("event.next", vec![]), "EVENTS_LOST");
    let vm = admin.vm("new");
    let next = admin.call("event.next", vec![]);
    assert_eq!(event(&next.as_set().expect("a set")[0]).2, vm);
}

#[test]
fn a_thousand_listeners_wait_without_a_thread_each() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let pool = pool(&admin);
    let token = from(&admin, &["pool"], "", 0.0).token;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let threads = || std::fs::read_dir("/proc/self/task").expect("threads").count();
    let params = |timeout: f64| {
        vec![admin.session.as_str().into(), Value::strings(["pool"]), token.as_str().into(), timeout.into()]
    };
    let wait = |timeout: f64| {
        let stack = std::sync::Arc::clone(&stack);
        stack.call_waiting(Peer::default(), "event.from".into(), params(timeout))
    };
    assert!(
        Toolstack::waits("event.from") && Toolstack::waits("event.next") && !Toolstack::waits("VM.start")
    );
    runtime.block_on(async {
        let before = threads();
        let late = tokio::spawn(wait(0.05));
        let waiting: Vec<_> = (0..1000).map(|_| tokio::spawn(wait(60.0))).collect();
        let dropped = tokio::spawn(wait(60.0));
        assert!(
            read(&late.await.expect("no panic").expect("an answer").whole().expect("its parts"))
                .events
                .is_empty()
        );
        dropped.abort();
        assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
        // Other tests run beside this one in the same process.
        assert!(threads() < before + 200, "{} threads, {before} before", threads());
        note(&admin, "pool", &pool, "x");
        for waiting in waiting {
            assert_eq!(
                read(&waiting.await.expect("no panic").expect("an answer").whole().expect("its parts"))
                    .events
                    .len(),
                1
            );
        }
        let next = std::sync::Arc::clone(&stack).call_waiting(
            Peer::default(),
            "event.next".into(),
            vec![admin.session.as_str().into()],
        );
        assert_eq!(next.await.expect_err("nothing is registered").code, "SESSION_NOT_REGISTERED");
    });
}
