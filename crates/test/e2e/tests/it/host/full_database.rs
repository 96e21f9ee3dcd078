//! A daemon whose database's file system is full when it starts.

use std::io::Write;

use serde_json::{Value, json};
use tapio_e2e::scratch::{Scratch, SmallFileSystem};
use tapio_e2e::tools::skip;
use tapio_e2e::toolstack::{DaemonOptions, Session};

use super::MIB;

/// Takes all the room there is.
fn fill(small: &SmallFileSystem) {
    let mut ballast = std::fs::File::create(small.path().join("ballast")).expect("a file");
    for len in [4096, 1] {
        while ballast.write_all(&vec![1; len]).is_ok() {}
    }
}

fn pool(session: &Session) -> Value {
    session.call("pool.get_all", &[])[0].clone()
}

fn rename(session: &Session, name: &str) -> Result<Value, String> {
    let renamed = session.try_call("pool.set_name_label", &[pool(session), json!(name)]);
    renamed.map_err(|failure| format!("{failure:?}"))
}

/// `end` is how the daemon before it ended: in order, or killed with the last changes in the database's log.
fn starts_and_recovers(end: &str) {
    let small = match SmallFileSystem::mount(8 * MIB) {
        Ok(small) => small,
        Err(reason) => return skip(&format!("needs root to mount: {reason}")),
    };
    let scratch = Scratch::on_disk();
    std::os::unix::fs::symlink(small.path(), scratch.join("state")).expect("a link");
    let options = DaemonOptions::new(&scratch);
    let daemon = options.start();
    rename(&daemon.login(), "kept").expect("there is room");
    let vm = daemon.login().text("VM.create", &[json!({"name_label": "one"})]);
    let daemon = if end == "killed" {
        fill(&small);
        daemon.kill_and_restart()
    } else {
        daemon.stop();
        fill(&small);
        options.start()
    };

    // What is there is served, to new sessions and by events; what is refused says why, and changed nothing.
    let session = daemon.login();
    assert_eq!(session.text("pool.get_name_label", &[pool(&session)]), "kept");
    assert_eq!(session.text("VM.get_name_label", &[json!(vm)]), "one");
    let batch = session.call("event.from", &[json!(["vm"]), json!(""), json!(5.0)]);
    assert!(batch["events"].as_array().is_some_and(|events| !events.is_empty()), "{batch}");
    let said = session.call("message.get_all_records", &[]);
    let said: Vec<&Value> = said.as_object().into_iter().flat_map(serde_json::Map::values).collect();
    assert!(said.iter().any(|message| message["name"] == "DATABASE_FULL"), "{said:?}");
    for _ in 0..2 {
        let why = rename(&session, "other").expect_err("there is no room");
        assert!(why.contains("is full") && why.contains("tapio.db") && why.contains("make room"), "{why}");
        assert_eq!(session.text("pool.get_name_label", &[pool(&session)]), "kept");
    }

    // Room again: the same daemon writes, and the next one finds it.
    std::fs::remove_file(small.path().join("ballast")).expect("the ballast goes");
    rename(&session, "other").expect("there is room");
    session.call("VM.destroy", &[json!(vm)]);
    let daemon = daemon.kill_and_restart();
    let session = daemon.login();
    assert_eq!(session.text("pool.get_name_label", &[pool(&session)]), "other");
    assert!(session.try_call("VM.get_uuid", &[json!(vm)]).is_err(), "it was destroyed");
    daemon.stop();
}

#[test]
fn after_an_end_in_order() {
    starts_and_recovers("ended");
}

#[test]
fn after_a_kill() {
    starts_and_recovers("killed");
}
