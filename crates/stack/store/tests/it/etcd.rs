//! What is special about etcd: members that die, requests that are lost, commits larger than it takes, several hosts.

use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use tapio_fixtures::etcd::{Cluster, is_installed};
use tapio_store::{Etcd, EtcdOptions, Expect, Store, StoreError, Taken, Txn};
use tempfile::TempDir;

use crate::{put, put_if, value};

const LATER: Duration = Duration::from_secs(60);

fn options(cluster: &Cluster, prefix: &str, writer: &str) -> EtcdOptions {
    EtcdOptions {
        endpoints: cluster.endpoints(),
        prefix: prefix.to_owned(),
        writer: writer.to_owned(),
        ..EtcdOptions::default()
    }
}

fn open(cluster: &Cluster, prefix: &str, writer: &str) -> Etcd {
    Etcd::open(&options(cluster, prefix, writer)).expect("the cluster answers")
}

fn is_missing() -> bool {
    static SAID: AtomicBool = AtomicBool::new(false);
    let missing = !is_installed();
    if missing && !SAID.swap(true, Ordering::Relaxed) {
        // Past the harness's capture, so that it is always seen.
        let _ = std::io::stderr().write_all(b"\nskipped: needs etcd [store]\n");
    }
    missing
}

/// A member that all cases share. The test's process leaves no member behind: the last case to end takes it along.
fn shared<T>(with: impl FnOnce(&Cluster) -> T) -> T {
    static SHARED: Mutex<Option<(Cluster, TempDir)>> = Mutex::new(None);
    static AT_END: OnceLock<()> = OnceLock::new();
    extern "C" fn end() {
        let mut shared = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        drop(shared.take());
    }
    let mut held = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (cluster, _) = held.get_or_insert_with(|| {
        let dir = tempfile::tempdir().expect("a scratch directory");
        (Cluster::start(dir.path(), 1), dir)
    });
    AT_END.get_or_init(|| {
        // SAFETY: the function takes no arguments, does not unwind past its own lock, and lives as long as the program.
        let registered = unsafe { libc::atexit(end) };
        assert_eq!(registered, 0);
    });
    with(cluster)
}

/// An empty store in a cluster of one member; none without etcd.
pub fn fresh() -> Option<Etcd> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    if is_missing() {
        return None;
    }
    let prefix = format!("/test/{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    Some(shared(|cluster| open(cluster, &prefix, "one")))
}

fn pair(prefix: &str) -> Option<[Etcd; 2]> {
    (!is_missing()).then(|| shared(|cluster| ["a", "b"].map(|writer| open(cluster, prefix, writer))))
}

/// Follows a store until a row has a value.
fn wait_for(store: &Etcd, key: &str, text: &str) {
    let until = Instant::now() + LATER;
    let mut after = 0;
    loop {
        let rows = match store.changes(after, Duration::from_millis(200)) {
            Ok(rows) => rows,
            Err(StoreError::Forgotten(oldest)) => {
                after = oldest;
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        after = rows.iter().map(|row| row.revision).max().unwrap_or(after);
        if rows.iter().any(|row| row.key == key && row.value.as_deref() == Some(text)) {
            return;
        }
        assert!(Instant::now() < until, "{key} does not become {text}");
    }
}

#[test]
fn a_commit_of_many_rows_is_whole_for_another_host() {
    const ROWS: usize = 400;
    let Some([a, b]) = pair("/many") else { return };
    let many = |text: &str| Txn {
        expect: vec![("/guard".into(), Expect::Absent)],
        puts: (0..ROWS).map(|at| (format!("/n/{at:04}"), text.to_owned())).collect(),
        deletes: Vec::new(),
    };
    let guard = a.commit(put("/guard", "")).expect("a commit");
    // Not as much as a row of it is there when the expectation fails.
    assert!(
        matches!(a.commit(many("x")), Err(StoreError::Conflict(key, at)) if key == "/guard" && at == Some(guard))
    );
    assert_eq!(b.list("/n/").expect("the store reads"), []);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let seen = b.list("/n/").expect("the store reads").len();
                assert!(seen == 0 || seen == ROWS, "{seen} rows of a commit are seen");
            }
        });
        let following = scope.spawn(|| {
            let rows = b.changes(guard, LATER).expect("it is remembered");
            assert_eq!(rows.len(), ROWS, "they come together");
            rows[0].revision
        });
        let txn = Txn { expect: vec![("/guard".into(), Expect::At(guard))], ..many("1") };
        let revision = a.commit(txn).expect("a commit");
        assert_eq!(following.join().expect("no panic"), revision);
        done.store(true, Ordering::Relaxed);
        reading.join().expect("no panic");
        for store in [&a, &b] {
            assert_eq!(value(store, "/n/0399"), Some(("1".into(), revision)), "its rows have its revision");
        }
        // Both know by which revision to change them.
        let next = b.commit(put_if("/n/0001", Expect::At(revision), "2")).expect("the expectation holds");
        assert!(a.commit(put_if("/n/0001", Expect::At(revision), "3")).is_err());
        a.commit(put_if("/n/0001", Expect::At(next), "3")).expect("the expectation holds");
        a.commit(put_if("/n/0002", Expect::At(revision), "3")).expect("the expectation holds");
    });
    let big = "x".repeat(700 << 10);
    let rows = (0..4).map(|at| (format!("/big/{at}"), big.clone())).collect();
    b.commit(Txn { puts: rows, ..Txn::default() }).expect("2.8 MB of rows");
    assert_eq!(a.list("/big/").expect("the store reads").len(), 4);
    match b.commit(put("/huge", &"x".repeat(2 << 20))) {
        Err(StoreError::Failed(why)) => assert!(why.contains("/huge"), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_lost_what_it_held_writes_nothing() {
    let Some([a, b]) = pair("/fence") else { return };
    let lease = a.grant(Duration::from_secs(60)).expect("a lease");
    let Ok(Taken::Held(number)) = a.hold("coordinator", "a", lease) else { panic!("it is free") };
    a.fence_by(&[("coordinator", number)]);
    a.commit(put("/row", "a")).expect("it is held");
    let other = b.grant(Duration::from_secs(60)).expect("a lease");
    assert_eq!(b.hold("coordinator", "b", other).expect("an answer"), Taken::By("a".into()));
    assert!(a.beat(lease, Instant::now() + LATER).expect("an answer"));
    b.revoke(lease).expect("it ends");
    assert!(!a.beat(lease, Instant::now() + LATER).expect("an answer"));
    assert!(matches!(a.commit(put("/row", "late")), Err(StoreError::Fenced(_))));
    let Ok(Taken::Held(next)) = b.hold("coordinator", "b", other) else { panic!("it is free") };
    assert!(next > number, "numbers of holdings grow");
    // It is held again, by another holding.
    assert!(matches!(a.commit(put("/row", "late")), Err(StoreError::Fenced(_))));
    assert!(!a.is_in().expect("an answer"));
    b.fence_by(&[("coordinator", next)]);
    b.commit(put("/row", "b")).expect("it is held");
    assert_eq!(value(&a, "/row").map(|(text, _)| text), Some("b".into()));
}

#[test]
fn a_watch_goes_on_behind_a_compaction() {
    if is_missing() {
        return;
    }
    let dir = tempfile::tempdir().expect("a scratch directory");
    let mut cluster = Cluster::start(dir.path(), 1);
    let [a, b] = ["a", "b"].map(|writer| open(&cluster, "/x", writer));
    a.commit(put("/gone", "1")).expect("a commit");
    wait_for(&b, "/gone", "1");
    // The watches end, changes are made and forgotten before they are back.
    cluster.kill(0);
    cluster.restart(0);
    let c = open(&cluster, "/x", "c");
    for at in 0..20 {
        c.commit(put("/n", &at.to_string())).expect("a commit");
    }
    c.commit(Txn { deletes: vec!["/gone".into()], ..Txn::default() }).expect("a commit");
    cluster.compact();
    wait_for(&b, "/n", "19");
    c.commit(put("/n", "20")).expect("a commit");
    wait_for(&b, "/n", "20");
    assert_eq!(value(&b, "/gone"), None);
}

#[test]
fn three_members_lose_their_leader_and_no_commit() {
    if is_missing() {
        return;
    }
    let dir = tempfile::tempdir().expect("a scratch directory");
    let mut cluster = Cluster::start(dir.path(), 3);
    let [a, b] = ["a", "b"].map(|writer| open(&cluster, "/x", writer));
    let started = a.commit(put("/count", "0")).expect("a commit");
    let done = AtomicBool::new(false);
    let committed = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let (mut count, mut at) = (0_u32, started);
            while !done.load(Ordering::Relaxed) {
                count += 1;
                // A commit that was done and reported as a conflict would end this.
                at = a.commit(put_if("/count", Expect::At(at), &count.to_string())).expect("a commit");
                committed.store(count, Ordering::Relaxed);
            }
        });
        let more = |than: u32| {
            let until = Instant::now() + LATER;
            while committed.load(Ordering::Relaxed) < than + 5 {
                assert!(!writing.is_finished() && Instant::now() < until, "commits go on");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        more(0);
        for _ in 0..2 {
            let leader = cluster.leader();
            cluster.kill(leader);
            more(committed.load(Ordering::Relaxed));
            cluster.restart(leader);
        }
        done.store(true, Ordering::Relaxed);
        writing.join().expect("no panic");
    });
    let last = committed.load(Ordering::Relaxed).to_string();
    assert_eq!(value(&b, "/count").map(|(text, _)| text), Some(last.clone()));
    wait_for(&b, "/count", &last);
}

fn post(cluster: &Cluster, path: &str, body: &str) {
    let answer = cluster.post(0, path, body).expect("an answer");
    assert!(answer.contains(" 200 "), "{path}: {answer}");
}

#[test]
fn logins_are_renewed_and_rights_are_asked_for() {
    if is_missing() {
        return;
    }
    let dir = tempfile::tempdir().expect("a scratch directory");
    let cluster = Cluster::start(dir.path(), 1);
    for (path, body) in [
        ("auth/user/add", r#"{"name":"root","password":"r"}"#),
        ("auth/role/add", r#"{"name":"root"}"#),
        ("auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("auth/user/add", r#"{"name":"tapio","password":"secret"}"#),
        ("auth/role/add", r#"{"name":"tapio"}"#),
        // From /own to /owo.
        (
            "auth/role/grant",
            r#"{"name":"tapio","perm":{"permType":"READWRITE","key":"L293bg==","range_end":"L293bw=="}}"#,
        ),
        ("auth/user/grant", r#"{"user":"tapio","role":"tapio"}"#),
        ("auth/enable", "{}"),
    ] {
        post(&cluster, path, body);
    }
    let password = dir.path().join("password");
    std::fs::write(&password, "secret\n").expect("a file");
    let login = |prefix: &str, password: &Path| EtcdOptions {
        account: Some(("tapio".into(), password.to_path_buf())),
        ..options(&cluster, prefix, "a")
    };
    let store = Etcd::open(&login("/own", &password)).expect("the login is good");
    store.commit(put("/a", "1")).expect("a commit");
    // Tokens of this cluster live two seconds.
    std::thread::sleep(Duration::from_secs(4));
    store.commit(put("/a", "2")).expect("the login is renewed");
    wait_for(&store, "/a", "2");
    let wrong = dir.path().join("wrong");
    std::fs::write(&wrong, "guess").expect("a file");
    for (options, word) in [
        (login("/own", &wrong), "login"),
        (login("/foreign", &password), "permission"),
        (options(&cluster, "/own", "a"), "user name"),
    ] {
        match Etcd::open(&options) {
            Err(StoreError::Failed(why)) => {
                assert!(why.contains(word) && !why.contains("guess"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn members_and_clients_check_each_others_certificates() {
    if is_missing() {
        return;
    }
    let dir = tempfile::tempdir().expect("a scratch directory");
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    for certificates in [&ours, &theirs] {
        tapio_fixtures::certificates::make(certificates, true, "DNS:localhost,IP:127.0.0.1", 2);
    }
    let cluster = Cluster::start_tls(dir.path(), &ours);
    let with = |ca: &Path, own: Option<&Path>| EtcdOptions {
        ca: Some(ca.join("ca-cert.pem")),
        identity: own.map(|own| (own.join("client-cert.pem"), own.join("client-key.pem"))),
        ..options(&cluster, "/x", "a")
    };
    let store = Etcd::open(&with(&ours, Some(&ours))).expect("all certificates are good");
    store.commit(put("/a", "1")).expect("a commit");
    wait_for(&store, "/a", "1");
    let wrong = options(&cluster, "/x", "a");
    assert!(matches!(Etcd::open(&wrong), Err(StoreError::Failed(why)) if why.contains("certificates")));
}
