//! Calls that are watched: tasks, their ends, and cancel.

use std::time::{Duration, Instant};

use tapio_core::Toolstack;
use tapio_core::call::Handlers;
use tapio_model::{ApiError, Value};

use crate::world::{Client, map, stack, text, texts};

fn record(client: &Client, task: &str) -> std::collections::BTreeMap<String, Value> {
    map(&client.call("task.get_record", vec![task.into()])).clone()
}

fn wait(client: &Client, task: &str) -> std::collections::BTreeMap<String, Value> {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let record = record(client, task);
        if !matches!(text(&record["status"]).as_str(), "pending" | "cancelling") {
            return record;
        }
        assert!(Instant::now() < until, "{record:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A toolstack whose `host.compute_free_memory` works until it is cancelled, and answers at once for no host.
fn slow() -> (tempfile::TempDir, std::sync::Arc<Toolstack>) {
    let (dir, _) = stack();
    let mut made = Toolstack::new(crate::world::config(dir.path()), tapio_core::db::Db::default());
    let inner = std::sync::Arc::get_mut(&mut made).expect("there is no other reference yet");
    let part = std::sync::Arc::new(());
    inner.handlers.of(&part).replace("host.compute_free_memory", |call, args| {
        if args.text(0)? == tapio_model::NULL_REF {
            return Ok(Value::Int(7));
        }
        // Ten minutes: longer than any test waits.
        for step in 1..=12_000 {
            if call.progress.is_cancelled() {
                return Err(ApiError::new("TASK_CANCELLED", [call.progress.task().unwrap_or_default()]));
            }
            call.progress.set(f64::from(step) / 12_000.0);
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(Value::Void)
    });
    inner.handlers.of(&part).replace("host.compute_memory_overhead", |_, _| panic!("a defect"));
    let handlers: &Handlers = &inner.handlers;
    inner.methods = tapio_core::Methods::new(handlers);
    (dir, made)
}

fn root(stack: &std::sync::Arc<Toolstack>) -> Client {
    let peer = tapio_core::Peer { superuser: true, address: String::new(), certificate: None };
    let session = stack.call(&peer, "session.login_with_password", vec!["root".into(), "".into()]);
    Client { stack: stack.clone(), session: text(&session.expect("root needs no password")) }
}

#[test]
fn an_async_call_ends_in_its_task() {
    let (_dir, stack) = stack();
    let admin = Client::login(&stack, "pool-admin");
    let host = texts(&admin.call("host.get_all", vec![]))[0].clone();
    let task = text(&admin.call("Async.host.disable", vec![host.as_str().into()]));
    let ended = wait(&admin, &task);
    assert_eq!(text(&ended["status"]), "success");
    assert_eq!(text(&ended["name_label"]), "Async.host.disable");
    assert_eq!((&ended["progress"], &ended["result"]), (&1.0.into(), &"".into()));
    assert_eq!(texts(&ended["allowed_operations"]), ["destroy"]);
    let date = |field: &str| match ended[field] {
        Value::DateTime(seconds) => seconds,
        ref other => panic!("{other:?}"),
    };
    assert!(date("finished") >= date("created") && date("created") > 0);
    assert_eq!(admin.call("host.get_enabled", vec![host.into()]), false.into());

    let secret = Value::Map([("value".to_owned(), "pw".into())].into());
    let task = text(&admin.call("Async.secret.create", vec![secret]));
    let made = texts(&Value::Set(vec![wait(&admin, &task)["result"].clone()]))[0].clone();
    let made = made
        .strip_prefix("<value>")
        .and_then(|made| made.strip_suffix("</value>"))
        .expect("an XML-RPC value");
    assert_eq!(text(&admin.call("secret.get_value", vec![made.into()])), "pw");

    let task = text(&admin.call("Async.host.disable", vec!["OpaqueRef:no".into()]));
    let ended = wait(&admin, &task);
    assert_eq!(text(&ended["status"]), "failure");
    assert_eq!(texts(&ended["error_info"]), ["HANDLE_INVALID", "host", "OpaqueRef:no"]);
    admin.call("task.destroy", vec![task.as_str().into()]);
    assert_eq!(admin.code("task.get_record", vec![task.into()]), "HANDLE_INVALID");
}

#[test]
fn wrong_async_calls_fail_at_once() {
    let (_dir, stack) = stack();
    let reader = Client::login(&stack, "read-only");
    assert_eq!(reader.code("Async.host.disable", vec!["x".into()]), "RBAC_PERMISSION_DENIED");
    let admin = Client::login(&stack, "pool-admin");
    assert_eq!(admin.code("Async.host.disable", vec![]), "MESSAGE_PARAMETER_COUNT_MISMATCH");
    assert_eq!(admin.code("Async.host.disable", vec![Value::Int(1)]), "FIELD_TYPE_ERROR");
    assert_eq!(stack.db.count("task"), 0);
}

#[test]
fn a_cancelled_call_ends_soon() {
    let (_dir, stack) = slow();
    let root = root(&stack);
    let task = text(&root.call("Async.host.compute_free_memory", vec!["OpaqueRef:any".into()]));
    let until = Instant::now() + Duration::from_secs(60);
    while record(&root, &task)["progress"] == 0.0.into() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(texts(&record(&root, &task)["allowed_operations"]), ["cancel"]);
    assert_eq!(
        root.code("task.set_status", vec![task.as_str().into(), "success".into()]),
        "OPERATION_NOT_ALLOWED"
    );
    root.call("task.cancel", vec![task.as_str().into()]);
    let ended = wait(&root, &task);
    assert_eq!(text(&ended["status"]), "cancelled");
    assert_eq!(texts(&ended["error_info"]), ["TASK_CANCELLED", &task]);
    assert_eq!(root.code("task.cancel", vec![task.into()]), "OPERATION_NOT_ALLOWED");
}

#[test]
fn a_call_that_its_client_waits_for_is_a_task_meanwhile() {
    let (_dir, stack) = slow();
    let client = root(&stack);
    std::thread::scope(|scope| {
        let calling =
            scope.spawn(|| client.try_call("host.compute_free_memory", vec!["OpaqueRef:any".into()]));
        let until = Instant::now() + Duration::from_secs(60);
        let task = loop {
            let tasks = client.call("task.get_all_records", vec![]);
            let found = map(&tasks)
                .iter()
                .find(|(_, task)| text(&map(task)["name_label"]) == "host.compute_free_memory");
            if let Some((task, _)) = found {
                break task.clone();
            }
            assert!(Instant::now() < until);
        };
        client.call("task.cancel", vec![task.as_str().into()]);
        assert_eq!(calling.join().expect("no panic").expect_err("it was cancelled").code, "TASK_CANCELLED");
        assert_eq!(client.code("task.get_record", vec![task.into()]), "HANDLE_INVALID");
    });
    assert_eq!(client.call("host.compute_free_memory", vec!["".into()]), Value::Int(7));
    assert_eq!(stack.db.count("task"), 0);
}

#[test]
fn a_defect_fails_one_call() {
    let (_dir, stack) = slow();
    let client = root(&stack);
    assert_eq!(client.code("host.compute_memory_overhead", vec!["".into()]), "INTERNAL_ERROR");
    let task = text(&client.call("Async.host.compute_memory_overhead", vec!["".into()]));
    assert_eq!(texts(&wait(&client, &task)["error_info"])[0], "INTERNAL_ERROR");
}

#[test]
fn clients_bring_their_own_tasks_forward() {
    let (_dir, stack) = stack();
    let client = Client::login(&stack, "vm-admin");
    let task = text(&client.call("task.create", vec!["backup".into(), "of everything".into()]));
    let this = || Value::from(task.as_str());
    client.call("task.add_to_other_config", vec![this(), "k".into(), "v".into()]);
    client.call("task.set_progress", vec![this(), "0.25".into()]);
    assert_eq!(record(&client, &task)["progress"], 0.25.into());
    assert_eq!(client.code("task.set_progress", vec![this(), 1.5.into()]), "INVALID_VALUE");
    assert_eq!(client.code("task.set_status", vec![this(), "done".into()]), "VALUE_NOT_SUPPORTED");
    client.call("task.set_result", vec![this(), "<value>1</value>".into()]);
    client.call("task.set_error_info", vec![this(), Value::strings(["X", "y"])]);
    client.call("task.set_status", vec![this(), "success".into()]);
    let ended = record(&client, &task);
    assert_eq!(
        (text(&ended["status"]), texts(&ended["error_info"])),
        ("success".into(), vec!["X".into(), "y".into()])
    );
    assert_ne!(ended["finished"], Value::DateTime(0));
    let other = text(&client.call("task.create", vec!["x".into(), "".into()]));
    client.call("task.cancel", vec![other.as_str().into()]);
    assert_eq!(text(&record(&client, &other)["status"]), "cancelled");
}

#[test]
fn old_tasks_and_too_many_go() {
    let (_dir, stack) = stack();
    let client = Client::login(&stack, "pool-admin");
    let now = tapio_core::dates::now();
    let made = stack
        .db
        .change(|change| {
            let mut made = Vec::new();
            for n in 0..1_010_i64 {
                let finished = if n < 5 { now - 25 * 3600 } else { now - 2_000 + n };
                let fields = [("status", Value::from("success")), ("finished", Value::DateTime(finished))];
                made.push(change.create("task", &fields)?);
            }
            made.push(change.create("task", &[("status", "pending".into())])?);
            Ok(made)
        })
        .expect("many tasks");
    stack.tasks.sweep(now).expect("the store writes");
    let left = texts(&client.call("task.get_all", vec![]));
    assert_eq!(left.len(), 1_001);
    assert!(made[..10].iter().all(|gone| !left.contains(gone)), "the oldest went");
    assert!(made[10..].iter().all(|kept| left.contains(kept)), "the youngest and the pending stayed");
}

/// A task whose account is not the superuser's.
fn made_by(client: &Client) -> String {
    text(&client.call("task.create", vec!["x".into(), "".into()]))
}

#[test]
fn an_account_has_so_many_tasks_and_leaves_room_for_others() {
    let (_dir, stack) = stack();
    let (reader, admin) = (Client::login(&stack, "read-only"), Client::login(&stack, "vm-admin"));
    let first = made_by(&reader);
    for _ in 1..2_000 {
        made_by(&reader);
    }
    let another = || reader.code("task.create", vec!["x".into(), "".into()]);
    assert_eq!(another(), "TOO_MANY_PENDING_TASKS");
    made_by(&admin);
    // One that is over counts no longer.
    reader.call("task.set_status", vec![first.into(), "success".into()]);
    made_by(&reader);
    assert_eq!(another(), "TOO_MANY_PENDING_TASKS");
}

#[test]
fn tasks_of_all_are_bounded_and_what_only_looks_goes_on() {
    let (_dir, stack) = stack();
    let client = Client::login(&stack, "pool-admin");
    let made = stack.db.change(|change| {
        let make = |_| change.create("task", &[("status", "pending".into())]);
        (0..20_000).map(make).collect::<Result<Vec<_>, _>>()
    });
    let made = made.expect("many tasks");
    assert_eq!(client.code("task.create", vec!["x".into(), "".into()]), "TOO_MANY_PENDING_TASKS");
    assert_eq!(
        client.code("Async.VM.start", vec!["OpaqueRef:NULL".into(), false.into(), false.into()]),
        "TOO_MANY_PENDING_TASKS"
    );
    client.call("pool.get_all_records", vec![]);
    client.call("task.destroy", vec![made[0].as_str().into()]);
    made_by(&client);
    assert_eq!(client.code("task.create", vec!["x".into(), "".into()]), "TOO_MANY_PENDING_TASKS");
}

#[test]
fn pending_tasks_that_are_not_touched_go_after_a_day() {
    let (_dir, stack) = stack();
    let client = Client::login(&stack, "vm-admin");
    let now = tapio_core::dates::now();
    let hours = |hours: i64| now + hours * 3600;
    let (left, tended) = (made_by(&client), made_by(&client));
    let sweep = |at: i64| stack.tasks.sweep(at).expect("the store writes");
    sweep(hours(0));
    sweep(hours(23));
    client.call("task.set_progress", vec![tended.as_str().into(), 0.5.into()]);
    sweep(hours(24) - 1);
    assert_eq!(texts(&client.call("task.get_all", vec![])).len(), 2, "a day is not over");
    sweep(hours(24));
    assert_eq!(texts(&client.call("task.get_all", vec![])), [tended.as_str()], "{left} was left alone");
    sweep(hours(46));
    assert_eq!(text(&record(&client, &tended)["status"]), "pending");
    client.call("task.set_status", vec![tended.as_str().into(), "success".into()]);
    // A finished one is kept for its clients to look at, for a little more than an hour.
    sweep(now + 60 * 60);
    assert_eq!(text(&record(&client, &tended)["status"]), "success");
    sweep(now + 66 * 60);
    assert_eq!(stack.db.count("task"), 0);
    assert_eq!(stack.db.notes("task/"), [], "nothing of them is left in the store");
}

#[test]
fn work_that_runs_is_never_swept() {
    let (_dir, stack) = slow();
    let root = root(&stack);
    let task = text(&root.call("Async.host.compute_free_memory", vec!["OpaqueRef:any".into()]));
    let now = tapio_core::dates::now();
    for days in 0..5 {
        stack.tasks.sweep(now + days * 24 * 3600).expect("the store writes");
    }
    root.call("task.cancel", vec![task.as_str().into()]);
    assert_eq!(text(&wait(&root, &task)["status"]), "cancelled");
}

#[test]
fn tasks_of_others_are_for_pool_operators() {
    let (_dir, stack) = stack();
    let login = |role: &str| Client::login(&stack, role);
    let (reader, admin) = (login("read-only"), login("vm-admin"));
    let changes = |task: &str| -> Vec<(&str, Vec<Value>)> {
        vec![
            ("task.set_progress", vec![task.into(), 0.5.into()]),
            ("task.set_result", vec![task.into(), "r".into()]),
            ("task.set_error_info", vec![task.into(), Value::strings(["E"])]),
            ("task.set_other_config", vec![task.into(), Value::string_map([("a", "b")])]),
            ("task.add_to_other_config", vec![task.into(), "k".into(), "v".into()]),
            ("task.remove_from_other_config", vec![task.into(), "k".into()]),
            ("task.set_status", vec![task.into(), "pending".into()]),
            ("task.cancel", vec![task.into()]),
            ("task.destroy", vec![task.into()]),
        ]
    };
    // Whatever a role may do, an account may do it to its own: also by another session of it.
    for (owner, other) in [(&reader, &admin), (&admin, &reader)] {
        let task = made_by(owner);
        for (method, params) in changes(&task) {
            let error = other.try_call(method, params).expect_err(method);
            assert_eq!(error.code, "RBAC_PERMISSION_DENIED", "{method}");
            assert!(error.params[1].contains("of another account"), "{error}");
        }
        assert_eq!(text(&record(owner, &task)["status"]), "pending");
        let again = login(if std::ptr::eq(owner, &reader) { "read-only" } else { "vm-admin" });
        for (method, params) in changes(&task) {
            again.call(method, params);
        }
        assert_eq!(other.code("task.cancel", vec![task.into()]), "HANDLE_INVALID");
    }
    let (one, other) = (made_by(&reader), made_by(&admin));
    for task in [one, other] {
        for (method, params) in changes(&task) {
            login("pool-operator").call(method, params);
        }
    }
    assert_eq!(stack.db.notes("task/"), []);
}

#[test]
fn work_of_others_is_not_for_everybody_to_cancel() {
    let (_dir, stack) = slow();
    let root = root(&stack);
    let task = text(&root.call("Async.host.compute_free_memory", vec!["OpaqueRef:any".into()]));
    // The same daemon with accounts: a user that is no superuser owns nothing of the superuser's, whatever its name.
    let (_other_dir, other) = crate::world::stack();
    let reader = Client::login(&other, "read-only");
    let seen = other
        .db
        .change(|change| change.create("task", &[("status", Value::from("pending"))]))
        .expect("a task of the toolstack's own");
    assert_eq!(reader.code("task.cancel", vec![seen.as_str().into()]), "RBAC_PERMISSION_DENIED");
    assert_eq!(reader.code("task.destroy", vec![seen.into()]), "RBAC_PERMISSION_DENIED");
    root.call("task.cancel", vec![task.as_str().into()]);
    assert_eq!(text(&wait(&root, &task)["status"]), "cancelled");
}
