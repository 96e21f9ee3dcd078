use std::fs;
use std::path::PathBuf;

use super::*;

fn peer() -> Peer {
    Peer { superuser: false, address: "192.0.2.1".to_owned(), certificate: None }
}

fn role(result: Result<Opened, ApiError>) -> Result<Role, ApiError> {
    result.map(|opened| opened.role)
}

fn code(result: Result<Opened, ApiError>) -> String {
    result.expect_err("refused").code.into_owned()
}

#[test]
fn own_accounts_log_in_and_wrong_ones_soon_wait() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = AccountFile::new(dir.path().join(FILE));
    file.add(RowKind::Own, "alice", Role::VmAdmin, Some("correct horse")).expect("added");
    let accounts = Accounts::open(dir.path(), None).expect("opened");
    assert_eq!(role(accounts.authenticate("alice", "correct horse", &peer())), Ok(Role::VmAdmin));
    // An account that is added later can log in at once.
    file.add(RowKind::Own, "bob", Role::ReadOnly, Some("long enough")).expect("added");
    assert_eq!(role(accounts.authenticate("bob", "long enough", &peer())), Ok(Role::ReadOnly));
    for _ in 0..3 {
        assert_eq!(code(accounts.authenticate("alice", "wrong", &peer())), "SESSION_AUTHENTICATION_FAILED");
    }
    let error = accounts.authenticate("alice", "correct horse", &peer()).expect_err("too many");
    assert!(error.params[1].contains("wait"), "{error}");
    let elsewhere = Peer { superuser: false, address: "192.0.2.2".to_owned(), certificate: None };
    assert_eq!(role(accounts.authenticate("alice", "correct horse", &elsewhere)), Ok(Role::VmAdmin));
    assert_eq!(code(accounts.authenticate("nobody", "wrong", &elsewhere)), "SESSION_AUTHENTICATION_FAILED");
}

#[test]
fn a_password_is_changed_by_a_client_that_knows_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = AccountFile::new(dir.path().join(FILE));
    file.add(RowKind::Own, "alice", Role::VmAdmin, Some("correct horse")).expect("added");
    let accounts = Accounts::open(dir.path(), None).expect("opened");
    let failed = |result: Result<u64, ApiError>| result.expect_err("refused").code.into_owned();
    assert_eq!(
        failed(accounts.change_password("alice", "wrong", "battery staple")),
        "SESSION_AUTHENTICATION_FAILED"
    );
    assert_eq!(failed(accounts.change_password("alice", "correct horse", "short")), "OPERATION_NOT_ALLOWED");
    assert_eq!(failed(accounts.change_password("root", "x", "battery staple")), "OPERATION_NOT_ALLOWED");
    accounts.change_password("alice", "correct horse", "battery staple").expect("changed");
    assert_eq!(role(accounts.authenticate("alice", "battery staple", &peer())), Ok(Role::VmAdmin));
    assert!(accounts.authenticate("alice", "correct horse", &peer()).is_err());
}

#[test]
fn a_damaged_file_is_told_at_the_start() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(dir.path().join(FILE), "own vm-admin alice\n").expect("written");
    assert!(Accounts::open(dir.path(), None).expect_err("damaged").contains("line 1"));
}

/// Rules of PAM with a program that knows one password; none where this system has no PAM.
fn rules(dir: &Path, account: &str) -> Option<PamOptions> {
    let program = dir.join("check");
    tapio_fixtures::program(&program, b"#!/bin/sh\nread -r word\n[ \"$word\" = 'open sesame' ]\n");
    let text = format!(
        "auth required pam_exec.so expose_authtok quiet {}\naccount required {account}\n",
        program.display()
    );
    fs::write(dir.join("tapio"), text).expect("written");
    let options = PamOptions { service: None, dir: Some(PathBuf::from(dir)) };
    match Pam::open(&options) {
        Ok(_) => Some(options),
        Err(why) => {
            println!("skipped: needs PAM: {why} [{}]", std::thread::current().name().unwrap_or("unnamed"));
            None
        }
    }
}

#[test]
fn accounts_of_the_system_log_in_by_pam_with_the_role_of_the_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(options) = rules(dir.path(), "pam_permit.so") else { return };
    let accounts = Accounts::open(dir.path(), Some(&options)).expect("opened");
    assert!(accounts.has_pam());
    assert_eq!(role(accounts.authenticate("root", "open sesame", &peer())), Ok(Role::PoolAdmin));
    assert_eq!(code(accounts.authenticate("root", "open says me", &peer())), "SESSION_AUTHENTICATION_FAILED");
    assert_eq!(code(accounts.authenticate("root", "", &peer())), "SESSION_AUTHENTICATION_FAILED");
    assert_eq!(code(accounts.authenticate("root", "a\0b", &peer())), "SESSION_AUTHENTICATION_FAILED");
    assert_eq!(code(accounts.authenticate("daemon", "open sesame", &peer())), "SESSION_AUTHORIZATION_FAILED");
    let file = AccountFile::new(dir.path().join(FILE));
    file.add(RowKind::Group, "daemon", Role::VmAdmin, None).expect("added");
    file.add(RowKind::Group, "no-such-group", Role::PoolAdmin, None).expect("added");
    assert_eq!(role(accounts.authenticate("daemon", "open sesame", &peer())), Ok(Role::VmAdmin));
    file.add(RowKind::System, "daemon", Role::PoolOperator, None).expect("added");
    assert_eq!(role(accounts.authenticate("daemon", "open sesame", &peer())), Ok(Role::PoolOperator));
    // A name with a hash of its own is the file's alone.
    file.add(RowKind::Own, "daemon", Role::ReadOnly, Some("correct horse")).expect("added");
    assert_eq!(role(accounts.authenticate("daemon", "correct horse", &peer())), Ok(Role::ReadOnly));
    assert_eq!(
        code(accounts.authenticate("daemon", "open sesame", &peer())),
        "SESSION_AUTHENTICATION_FAILED"
    );
}

#[test]
fn an_account_that_may_not_be_used_now_says_so() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(options) = rules(dir.path(), "pam_deny.so") else { return };
    let accounts = Accounts::open(dir.path(), Some(&options)).expect("opened");
    let error = accounts.authenticate("root", "open sesame", &peer()).expect_err("refused");
    assert!(error.params[1].contains("may not be used now"), "{error}");
}

#[test]
fn without_rules_there_is_no_pam() {
    let dir = tempfile::tempdir().expect("a directory");
    let options = PamOptions { service: None, dir: Some(dir.path().to_path_buf()) };
    assert!(Pam::open(&options).expect_err("no rules").contains("rules for none"));
    assert!(!Accounts::open(dir.path(), Some(&options)).expect("opened").has_pam());
}

#[test]
fn an_account_stands_as_long_as_its_row_does() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = AccountFile::new(dir.path().join(FILE));
    file.add(RowKind::Own, "alice", Role::PoolAdmin, Some("correct horse")).expect("added");
    let accounts = Accounts::open(dir.path(), None).expect("opened");
    let opened = accounts.authenticate("alice", "correct horse", &peer()).expect("right");
    let standing = |print: u64| accounts.standings(&[("alice", print), ("bob", print)]);
    let mut seen = accounts.generation();
    let mut is_new = || {
        let before = std::mem::replace(&mut seen, accounts.generation());
        before != seen
    };
    assert!(!is_new());
    assert_eq!(standing(opened.print), Ok(vec![Some(Role::PoolAdmin), None]));
    // By the command line: another process, of which this one is not told.
    let change = |row: &str, role: &str| {
        let text = fs::read_to_string(dir.path().join(FILE)).expect("read");
        crate::files::replace(&dir.path().join(FILE), text.replace(row, role).as_bytes()).expect("replaced");
    };
    change("own pool-admin", "own read-only");
    assert!(is_new());
    assert_eq!(standing(opened.print), Ok(vec![Some(Role::ReadOnly), None]));
    let renewed = accounts.change_password("alice", "correct horse", "battery staple").expect("changed");
    assert!(is_new() && renewed != opened.print);
    assert_eq!(standing(opened.print), Ok(vec![None, None]), "another password");
    assert_eq!(standing(renewed), Ok(vec![Some(Role::ReadOnly), None]));
    fs::write(dir.path().join(FILE), "own read-only alice\n").expect("written");
    assert!(is_new());
    assert!(standing(renewed).expect_err("damaged").params[0].contains("line 1"));
    fs::remove_file(dir.path().join(FILE)).expect("removed");
    assert!(is_new());
    assert_eq!(standing(renewed), Ok(vec![None, None]));
}

#[test]
fn an_account_of_the_system_stands_by_the_file_and_by_its_groups() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(options) = rules(dir.path(), "pam_permit.so") else { return };
    let file = AccountFile::new(dir.path().join(FILE));
    file.add(RowKind::Group, "daemon", Role::VmAdmin, None).expect("added");
    let accounts = Accounts::open(dir.path(), Some(&options)).expect("opened");
    let opened = accounts.authenticate("daemon", "open sesame", &peer()).expect("right");
    let standing = || accounts.standings(&[("daemon", opened.print)]).expect("readable")[0];
    assert_eq!(standing(), Some(Role::VmAdmin));
    file.add(RowKind::System, "daemon", Role::PoolOperator, None).expect("added");
    assert_eq!(standing(), Some(Role::PoolOperator));
    file.remove(RowKind::System, "daemon").expect("removed");
    file.remove(RowKind::Group, "daemon").expect("removed");
    assert_eq!(standing(), None);
    // An own account of the same name is another account.
    file.add(RowKind::Own, "daemon", Role::PoolAdmin, Some("correct horse")).expect("added");
    assert_eq!(standing(), None);
}

#[test]
fn a_change_of_the_file_is_heard() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join(FILE);
    let mut watch = Watch::new(std::slice::from_ref(&path)).expect("a watch");
    let (heard, hears) = std::sync::mpsc::channel();
    let waiting = std::thread::spawn(move || {
        watch.wait().expect("an event");
        heard.send(()).expect("the test listens");
    });
    crate::files::replace(&path, b"# none\n").expect("replaced");
    hears.recv_timeout(std::time::Duration::from_secs(60)).expect("the watch wakes up");
    waiting.join().expect("no panic");
}
