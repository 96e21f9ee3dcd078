//! A daemon that ends and comes back on the same store.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_core::Toolstack;
use tapio_core::db::Db;
use tapio_model::Value;
use tapio_store::Memory;

use crate::world::{Client, map, needed, stack_on, text, texts};

fn run(store: &Arc<Memory>) -> (tempfile::TempDir, Arc<Toolstack>) {
    stack_on(Db::open(Arc::clone(store) as _).expect("the store opens"))
}

/// Operations by reference, and the token after them.
fn from(client: &Client, classes: &[&str], token: &str) -> (BTreeMap<String, String>, String) {
    let params = vec![Value::strings(classes.iter().copied()), token.into(), 0.0.into()];
    let batch = client.call("event.from", params);
    let events = map(&batch)["events"].as_set().expect("a set");
    let events = events.iter().map(|event| (text(&map(event)["ref"]), text(&map(event)["operation"])));
    (events.collect(), text(&map(&batch)["token"]))
}

#[test]
fn tokens_of_before_are_answered_rightly() {
    let store = Arc::new(Memory::default());
    let (_dir, stack) = run(&store);
    let client = Client::login(&stack, "pool-admin");
    let (kept, gone_before, gone_after) = (client.blob("kept"), client.blob("gone"), client.blob("gone"));
    let (_, token) = from(&client, &["blob"], "");
    stack.db.destroy("blob", &gone_before).expect("it is there");
    let made_after = client.blob("new");
    let short = client.blob("short");
    stack.db.destroy("blob", &short).expect("it is there");
    let (_, late) = from(&client, &["blob"], &token);
    assert_eq!(
        client.code("event.from", vec![Value::strings(["blob"]), "7,0,0".into(), 0.0.into()]),
        "EVENT_FROM_TOKEN_PARSE_FAILURE"
    );
    drop((client, stack));

    let (_dir, stack) = run(&store);
    stack.db.destroy("blob", &gone_after).expect("it is there");
    let client = Client::login(&stack, "pool-admin");
    let operation = |of: &str, operation: &str| (of.to_owned(), operation.to_owned());
    let (events, next) = from(&client, &["blob"], &token);
    let expected = BTreeMap::from([
        operation(&kept, "mod"),
        operation(&gone_before, "del"),
        operation(&gone_after, "del"),
        operation(&made_after, "add"),
    ]);
    assert_eq!(events, expected);
    let (events, _) = from(&client, &["blob"], &late);
    let expected = BTreeMap::from([
        operation(&kept, "mod"),
        operation(&gone_after, "del"),
        operation(&made_after, "mod"),
    ]);
    assert_eq!(events, expected);
    assert_eq!(from(&client, &["blob"], &next).0, BTreeMap::new());
    drop((client, stack));

    // Twice more, without a change between: the oldest token is still good.
    for _ in 0..2 {
        let (_dir, stack) = run(&store);
        let client = Client::login(&stack, "pool-admin");
        let (events, _) = from(&client, &["blob"], &token);
        assert_eq!(events[&gone_before], "del");
        assert_eq!(events[&made_after], "add");
        assert_eq!(events[&kept], "mod");
        assert_eq!(events.len(), 4);
    }
}

#[test]
fn what_vanished_with_the_daemon_is_lost_with_a_word() {
    let store = Arc::new(Memory::default());
    let (_dir, stack) = run(&store);
    let client = Client::login(&stack, "pool-admin");
    stack.db.change(|change| change.create_volatile("task", &[])).expect("a volatile task");
    let (seen, token) = from(&client, &["task"], "");
    assert_eq!(seen.len(), 1);
    let (_, others) = from(&client, &["blob"], "");
    drop((client, stack));
    let (_dir, stack) = run(&store);
    let client = Client::login(&stack, "pool-admin");
    let code = client.code("event.from", vec![Value::strings(["task"]), token.into(), 0.0.into()]);
    assert_eq!(code, "EVENTS_LOST", "no client can name that task any more");
    assert_eq!(from(&client, &["blob"], &others).0, BTreeMap::new());
}

#[test]
fn a_task_that_is_taken_up_again_goes_on() {
    let store = Arc::new(Memory::default());
    let (_dir, stack) = run(&store);
    let client = Client::login(&stack, "pool-admin");
    let task = text(&client.call("task.create", vec!["long".into(), "".into()]));
    drop((client, stack));
    let dir = tempfile::tempdir().expect("a scratch directory");
    let db = Db::open(Arc::clone(&store) as _).expect("the store opens");
    let stack = Toolstack::with_accounts(crate::world::config(dir.path()), db, Box::new(crate::world::Six));
    let running = stack.tasks.resume(&task).expect("it was pending");
    stack.start().expect("a toolstack starts");
    let client = Client::login(&stack, "pool-admin");
    let status = || text(&client.call("task.get_status", vec![task.as_str().into()]));
    assert_eq!(status(), "pending");
    stack.tasks.finish(&running, &Ok(Value::Int(3)), tapio_model::Type::Int);
    assert_eq!(status(), "success");
    assert_eq!(text(&client.call("task.get_result", vec![task.as_str().into()])), "<value>3</value>");
    assert_eq!(stack.tasks.resume(&task).expect_err("it is over").code, "OPERATION_NOT_ALLOWED");
}

#[test]
fn unfinished_tasks_have_failed_and_sessions_are_gone() {
    let store = Arc::new(Memory::default());
    let (_dir, stack) = run(&store);
    let client = Client::login(&stack, "pool-admin");
    let task = text(&client.call("task.create", vec!["long".into(), "".into()]));
    let done = text(&client.call("task.create", vec!["done".into(), "".into()]));
    client.call("task.set_status", vec![done.as_str().into(), "success".into()]);
    let pool = texts(&client.call("pool.get_all", vec![]));
    let hosts = texts(&client.call("host.get_all", vec![]));
    let old = client.session.clone();
    drop((client, stack));

    let (_dir, stack) = run(&store);
    let client = Client::login(&stack, "pool-admin");
    let stale = Client { session: old, ..client.clone() };
    assert_eq!(stale.code("pool.get_all", vec![]), "SESSION_INVALID");
    assert_eq!(texts(&client.call("pool.get_all", vec![])), pool);
    assert_eq!(texts(&client.call("host.get_all", vec![])), hosts);
    let record = client.call("task.get_record", vec![task.as_str().into()]);
    assert_eq!(text(&map(&record)["status"]), "failure");
    assert_eq!(texts(&map(&record)["error_info"])[0], "INTERNAL_ERROR");
    let record = client.call("task.get_record", vec![done.as_str().into()]);
    assert_eq!((text(&map(&record)["status"]), &map(&record)["progress"]), ("success".into(), &1.0.into()));
    let vm = needed("VM", &[]);
    stack.db.create("VM", &vm).expect("it goes on");
}
