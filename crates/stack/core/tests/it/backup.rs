//! The database as a file: whole, damaged, of another pool; put in place once, or not at all.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value as Json;
use tapio_core::Toolstack;
use tapio_core::backup::{is_staged, take_over};
use tapio_core::db::{Db, Dump, sealed};
use tapio_fixtures::etcd::{Cluster, is_installed};
use tapio_model::{ApiError, Asked, Transfer};
use tapio_store::{Etcd, EtcdOptions, Memory, Store};

use crate::world::{Client, needed, stack_on};

struct Host {
    dir: tempfile::TempDir,
    stack: Arc<Toolstack>,
    client: Client,
}

impl Host {
    fn new(store: &Arc<Memory>) -> Self {
        let (dir, stack) = stack_on(Db::open(Arc::clone(store) as _).expect("the store opens"));
        std::fs::create_dir_all(dir.path().join("state")).expect("a directory");
        let client = Client::login(&stack, "pool-admin");
        Self { dir, stack, client }
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn put(&self, dump: &[u8], dry_run: bool, force: bool) -> Result<Json, ApiError> {
        self.put_as(&self.client, dump, dry_run, force)
    }

    fn put_as(&self, client: &Client, dump: &[u8], dry_run: bool, force: bool) -> Result<Json, ApiError> {
        let asked = Ok(Asked::ImportDatabase { dry_run, force });
        let (done, said) = self.transfer(client, asked, dump);
        done.map(|()| serde_json::from_slice(&said).expect("a report"))
    }

    fn get(&self) -> Vec<u8> {
        let (done, said) = self.transfer(&self.client, Ok(Asked::ExportDatabase), b"");
        done.expect("the database is sent");
        said
    }

    fn transfer(
        &self,
        client: &Client,
        asked: Result<Asked, ApiError>,
        bytes: &[u8],
    ) -> (Result<(), ApiError>, Vec<u8>) {
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        let transfer = Transfer { session: client.session.clone(), task: None, asked };
        std::thread::scope(|scope| {
            let peer = scope.spawn(move || {
                let mut said = Vec::new();
                // A transfer that is refused does not read.
                let _ = ours.write_all(bytes);
                let _ = ours.shutdown(Shutdown::Write);
                let _ = ours.read_to_end(&mut said);
                said
            });
            let done = self.stack.transfer(&transfer, OwnedFd::from(theirs), &mut |_| {}, &|| true);
            (done, peer.join().expect("the peer reads"))
        })
    }
}

/// The lines of the objects.
fn objects(text: &[u8]) -> Vec<String> {
    let text = std::str::from_utf8(text).expect("text");
    let lines: Vec<&str> = text.lines().collect();
    lines[1..lines.len() - 1].iter().map(|line| (*line).to_owned()).collect()
}

fn of_store(store: &dyn Store) -> Vec<String> {
    objects(Dump::of_store(store).expect("the rows are ours").text().as_bytes())
}

/// The same lines, with something else in one of them, and the last line that fits.
fn with(text: &[u8], from: &str, to: &str) -> Vec<u8> {
    let text = std::str::from_utf8(text).expect("text");
    assert!(text.contains(from), "{from} is in the dump");
    let changed = text.replacen(from, to, 1);
    let end = changed.trim_end().rfind('\n').expect("lines") + 1;
    sealed(&changed.as_bytes()[..end])
}

#[test]
fn all_is_as_it_was_after_changes_and_a_restore() {
    let store = Arc::new(Memory::default());
    let host = Host::new(&store);
    let (kept, gone, other) = (host.client.blob("kept"), host.client.vm("gone"), host.client.vm("other"));
    host.client.call("VM.add_to_other_config", vec![other.as_str().into(), "a".into(), "1".into()]);
    let dump = host.get();
    assert_eq!(Dump::parse(&dump).expect("whole").text().as_bytes(), dump);

    host.client.call("VM.set_name_label", vec![other.as_str().into(), "changed".into()]);
    host.stack.db.destroy("VM", &gone).expect("it is there");
    let new = host.client.blob("new");
    let (_, token) = (new, host.stack.db.generation());
    let dry = host.put(&dump, true, false).expect("it fits");
    assert!(!is_staged(&host.state()));
    let names = |of: &str| {
        let of = dry[of]
            .as_array()
            .expect("a list")
            .iter()
            .map(|object| object["name"].as_str().unwrap_or_default());
        of.filter(|name| !name.is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        (names("comes"), names("goes"), names("changes")),
        (vec!["gone".into()], vec!["new".into()], vec!["changed".into()])
    );
    assert_eq!(
        dry["changes"]
            .as_array()
            .and_then(|all| all.iter().find(|object| object["name"] == "changed"))
            .map(|of| of["fields"].clone()),
        Some(serde_json::json!(["name_label"]))
    );
    assert_eq!(dry["hindrances"], serde_json::json!([]), "nothing is in the way");

    let report = host.put(&dump, false, false).expect("nothing is in the way");
    assert_eq!((&report["dry_run"], &report["restarts"]), (&Json::Bool(false), &Json::Bool(false)));
    assert!(is_staged(&host.state()));
    let mode = std::fs::metadata(host.state().join("database.restore")).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // Nothing comes between.
    assert_eq!(
        host.client.code("VM.set_name_label", vec![other.as_str().into(), "late".into()]),
        "OTHER_OPERATION_IN_PROGRESS"
    );
    assert_eq!(host.put(&dump, false, false).expect_err("one at a time").code, "OTHER_OPERATION_IN_PROGRESS");
    let changed = of_store(&*store);
    let Host { dir, stack, client } = host;
    drop((stack, client));
    let state = dir.path().join("state");
    let staged = std::fs::read(state.join("database.restore")).expect("it is there");
    take_over(&state, &*store, None).expect("it is put in place");
    assert!(!is_staged(&state));
    assert_eq!(of_store(&*store), objects(&dump));
    let before = std::fs::read(state.join("database.before-restore")).expect("what was there");
    assert_eq!(objects(&before), changed);

    // The daemon was killed before the file was gone for good: it is not taken twice.
    let host = Host::new(&store);
    assert!(host.stack.db.get("VM", &gone).is_ok() && host.stack.db.get("blob", &kept).is_ok());
    assert!(host.stack.db.generation() > token, "numbers go on");
    host.client.call("VM.set_name_label", vec![other.as_str().into(), "later".into()]);
    drop(host);
    std::fs::write(state.join("database.restore"), staged).expect("written");
    let later = of_store(&*store);
    take_over(&state, &*store, None).expect("it was taken before");
    assert!(!is_staged(&state));
    assert_eq!(of_store(&*store), later);
}

#[test]
fn a_dump_that_is_damaged_is_refused_and_nothing_changes() {
    let store = Arc::new(Memory::default());
    let host = Host::new(&store);
    host.client.vm("one");
    host.client.blob("two");
    let dump = host.get();
    let before = objects(&host.get()).len();
    let refused = |text: &[u8], what: &str| {
        let error = host.put(text, false, true).expect_err(what);
        assert_eq!(error.code, "INVALID_VALUE", "{what}: {error}");
        assert!(!is_staged(&host.state()), "{what}");
        error.to_string()
    };
    let ends = dump.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
    for end in ends.filter(|end| *end < dump.len()).chain([0, 1, dump.len() - 1]) {
        refused(&dump[..end], "cut off");
    }
    for at in (0..dump.len()).step_by(dump.len() / 200) {
        let mut other = dump.clone();
        other[at] ^= 4;
        refused(&other, "a bit");
    }
    let vm = |field: &str, to: &str| with(&dump, field, to);
    for (text, why) in [
        (vm("\"class\":\"VM\"", "\"class\":\"Cloud\""), "'Cloud'"),
        (vm("\"class\":\"blob\"", "\"class\":\"task\""), "'task'"),
        (vm("\"name_label\":\"one\"", "\"name_label\":[1]"), "name_label"),
        (vm("\"name_label\":\"one\"", "\"name_label\":\"one\",\"_created\":7"), "_created"),
        (vm("\"name_label\":\"one\"", "\"name_label\":\"one\",\"current_operations\":{}"), "is not kept"),
        (vm("{\"tapio_database\":1", "{\"tapio_database\":2"), "version 2"),
        (vm("{\"tapio_database\":1", "{\"database\":1"), "no dump"),
        (vm("\"class\":\"pool\"", "\"class\":\"network\""), "line"),
    ] {
        let said = refused(&text, why);
        assert!(said.contains(why), "{said}");
    }
    let line = objects(&dump).into_iter().find(|line| line.contains("\"blob\"")).expect("a blob");
    let twice = with(&dump, &line, &format!("{line}\n{line}"));
    assert!(refused(&twice, "twice").contains("twice"));
    let no_uuid = with(&dump, &line, &line.replacen("\"uuid\":\"", "\"uuid\":\"x", 1));
    assert!(refused(&no_uuid, "no UUID").contains("no UUID"));
    assert_eq!(objects(&host.get()).len(), before);
    host.client.call("VM.get_all", vec![]);
    host.client.blob("changes are let in");
}

#[test]
fn what_is_odd_needs_force_and_what_rests_on_objects_is_named() {
    let store = Arc::new(Memory::default());
    let host = Host::new(&store);
    let vm = host.client.vm("guest");
    let dump = host.get();
    let state = |state: &str| host.stack.db.set("VM", &vm, "power_state", state).expect("set");
    state("Running");
    let error = host.put(&dump, false, true).expect_err("a VM runs").to_string();
    assert!(error.contains("'guest' is Running: shut it down"), "{error}");
    assert!(
        host.put(&dump, true, false).expect("dry")["hindrances"][0]
            .as_str()
            .is_some_and(|why| why.contains("guest"))
    );
    state("Halted");
    let task = host.client.call("task.create", vec!["mine".into(), "".into()]);
    let error = host.put(&dump, false, true).expect_err("a task").to_string();
    assert!(error.contains("'mine' is not finished"), "{error}");
    host.client.call("task.destroy", vec![task]);
    let fields = needed("VBD", &[("VM", vm.as_str().into()), ("currently_attached", true.into())]);
    let vbd = host.stack.db.create("VBD", &fields).expect("a VBD");
    let error = host.put(&dump, false, true).expect_err("a disk").to_string();
    assert!(error.contains("unplug it first"), "{error}");
    host.stack.db.destroy("VBD", &vbd).expect("it is there");
    host.stack
        .db
        .change(|change| {
            change.put_note("storage/sr-create/x", "{}");
            Ok(())
        })
        .expect("noted");
    let error = host.put(&dump, false, true).expect_err("half done").to_string();
    assert!(error.contains("half done (storage/sr-create/x)"), "{error}");
    host.stack
        .db
        .change(|change| {
            change.drop_note("storage/sr-create/x");
            Ok(())
        })
        .expect("noted");

    let operator = Client::login(&host.stack, "pool-operator");
    assert_eq!(
        host.put_as(&operator, &dump, true, false).expect_err("a role").code,
        "RBAC_PERMISSION_DENIED"
    );

    let pool = host.stack.db.all("pool")[0].text("uuid").to_owned();
    let other = "11111111-1111-4111-8111-111111111111";
    let text = String::from_utf8(dump.clone()).expect("text").replace(&pool, other);
    let other_pool = with(text.as_bytes(), other, other);
    let newer = with(&dump, "\"version\":\"", "\"version\":\"9");
    let unknown = with(&dump, "\"name_label\":\"guest\"", "\"name_label\":\"guest\",\"colour\":\"red\"");
    let dangling = with(&dump, "\"affinity\":\"OpaqueRef:NULL\"", "\"affinity\":\"OpaqueRef:gone\"");
    for (text, why) in
        [(&other_pool, "of the pool"), (&newer, "newer"), (&unknown, "colour"), (&dangling, "affinity")]
    {
        let error = host.put(text, false, false).expect_err(why);
        assert!(error.code == "OPERATION_NOT_ALLOWED" && error.to_string().contains(why), "{error}");
        assert!(!is_staged(&host.state()), "{why}");
    }
    host.put(&unknown, false, true).expect("by force");
    let state = host.state();
    drop((host.stack, host.client, operator));
    take_over(&state, &*store, None).expect("in place");
    // A newer version finds its field again.
    assert!(of_store(&*store).iter().any(|line| line.contains("\"colour\":\"red\"")));
}

#[test]
fn a_dump_that_was_damaged_while_it_waited_is_set_aside() {
    let store = Arc::new(Memory::default());
    let host = Host::new(&store);
    let dump = host.get();
    host.put(&dump, false, false).expect("it is taken");
    host.stack.db.create("blob", &[("name_label", "kept".into())]).expect("a blob");
    let (state, before) = (host.state(), of_store(&*store));
    let staged = state.join("database.restore");
    let mut text = std::fs::read(&staged).expect("it is there");
    let at = text.len() / 2;
    text[at] ^= 1;
    std::fs::write(&staged, text).expect("written");
    let dir = host.dir;
    drop((host.stack, host.client));
    take_over(&state, &*store, None).expect("the daemon starts with what there is");
    assert_eq!(of_store(&*store), before);
    assert!(!is_staged(&state) && Path::new(&state.join("database.refused")).exists());
    drop(dir);
}

#[test]
fn a_dump_of_one_store_goes_into_the_other() {
    if !is_installed() {
        let _ = std::io::stderr().write_all(b"\nskipped: needs etcd [core]\n");
        return;
    }
    let local = Arc::new(Memory::default());
    let host = Host::new(&local);
    for number in 0..200 {
        host.client.blob(&format!("blob {number}"));
    }
    let dump = host.get();
    host.put(&dump, false, false).expect("it is taken");
    let state = host.state();
    let staged = std::fs::read(state.join("database.restore")).expect("it is there");
    let own = host.stack.db.all("host")[0].uuid().expect("a UUID");
    let dir = host.dir;
    drop((host.stack, host.client));
    let cluster_dir = tempfile::tempdir().expect("a directory");
    let cluster = Cluster::start(cluster_dir.path(), 1);
    let options = EtcdOptions {
        endpoints: cluster.endpoints(),
        prefix: "/test".to_owned(),
        writer: own.to_string(),
        ..EtcdOptions::default()
    };
    let etcd = Etcd::open(&options).expect("the cluster answers");
    tapio_core::pool::bring(&*local, &etcd, own).expect("the rows are brought");
    let put = |key: &str, value: &str| {
        let puts = vec![(key.to_owned(), value.to_owned())];
        etcd.commit(tapio_store::Txn { puts, ..tapio_store::Txn::default() }).expect("written");
    };
    put("/blob/33333333-3333-4333-8333-333333333333", r#"{"uuid":"33333333-3333-4333-8333-333333333333"}"#);
    take_over(&state, &etcd, Some((&etcd, own))).expect("etcd takes it");
    assert_eq!(of_store(&etcd), objects(&dump), "larger than a transaction of etcd's, and whole");
    // Another host has an operation half done: the next dump is not taken.
    put("/hosts/44444444-4444-4444-8444-444444444444/note/storage/sr-create/x", "{}");
    let again = String::from_utf8(staged).expect("text").replacen("{\"restore\":\"", "{\"restore\":\"0", 1);
    let first = again.lines().next().expect("a line");
    let again = again.replacen(first, &format!("{{\"restore\":\"{}\"}}", uuid::Uuid::new_v4()), 1);
    std::fs::write(state.join("database.restore"), again).expect("written");
    take_over(&state, &etcd, Some((&etcd, own))).expect("it is set aside");
    assert!(!is_staged(&state) && state.join("database.refused").exists());
    drop(dir);
}
