//! The client against scripted daemons: what they say is written here byte for byte.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use super::*;
use crate::wire::{HEADER_LEN, Permission, frame};

/// A daemon that answers each request by a function.
fn daemon(
    mut answer: impl FnMut(Header, &[u8]) -> Vec<(MessageKind, Vec<u8>)> + Send + 'static,
) -> (Client, JoinHandle<Vec<MessageKind>>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut asked = Vec::new();
        let mut decoder = Decoder::new();
        let mut bytes = [0; 4096];
        loop {
            match theirs.read(&mut bytes) {
                Ok(0) | Err(_) => return asked,
                Ok(len) => decoder.push(&bytes[..len]),
            }
            while let Some(message) = decoder.next().unwrap() {
                asked.push(message.kind().unwrap());
                let mut out = Vec::new();
                for (kind, payload) in answer(message.header, message.payload) {
                    let (request, transaction) = match kind {
                        MessageKind::WatchEvent => (0, 0),
                        _ => (message.header.request, message.header.transaction),
                    };
                    frame(kind, request, transaction, &payload, &mut out).unwrap();
                }
                if theirs.write_all(&out).is_err() {
                    return asked;
                }
            }
        }
    });
    (Client::from_socket(OwnedFd::from(ours)).unwrap(), thread)
}

fn error(errno: Errno) -> Vec<(MessageKind, Vec<u8>)> {
    vec![(MessageKind::Error, reply::error(errno))]
}

fn event(path: &str, token: &str) -> (MessageKind, Vec<u8>) {
    (MessageKind::WatchEvent, reply::event(path, token.as_bytes()))
}

#[test]
fn many_reads_are_one_round_trip() {
    let (mut client, thread) = daemon(|_, payload| match payload {
        b"/missing\0" => error(Errno::ENOENT),
        path => vec![(MessageKind::Read, path[..path.len() - 1].to_vec())],
    });
    let paths: Vec<String> =
        (0..500).map(|n| if n == 250 { "/missing".into() } else { format!("/n/{n}") }).collect();
    let values = client.read_many(&paths).unwrap();
    for (path, value) in paths.iter().zip(&values) {
        assert_eq!(value.as_deref(), (path != "/missing").then_some(path.as_bytes()));
    }
    assert_eq!(client.counts(), Counts { requests: 500, transactions: 0, round_trips: 1 });
    assert!(client.read_many::<&str>(&[]).unwrap().is_empty());
    assert_eq!(client.counts().round_trips, 1);
    drop(client);
    assert_eq!(thread.join().unwrap().len(), 500);
}

#[test]
fn events_come_between_answers_and_are_kept_once() {
    let (mut client, _thread) = daemon(|_, _| {
        vec![
            event("/a/b", "t1"),
            event("/a/c", "t1"),
            (MessageKind::Read, b"1".to_vec()),
            event("/a/b", "t1"),
        ]
    });
    assert_eq!(client.read_u64("/x").unwrap(), Some(1));
    assert_eq!(client.read_text("/x").unwrap().as_deref(), Some("1"));
    let mut seen = Vec::new();
    let until = Instant::now() + Duration::from_millis(100);
    while let Some(event) = client.wait_event(Some(until)).unwrap() {
        assert_eq!(event.token, "t1");
        seen.push(event.path);
    }
    // Those of the second answer may come while the first's are still there, so they may be one or two.
    assert_eq!(seen.iter().filter(|path| *path == "/a/c").count(), 1, "{seen:?}");
    assert!((1..=2).contains(&seen.iter().filter(|path| *path == "/a/b").count()), "{seen:?}");
    assert_eq!(client.next_event().unwrap(), None);
}

#[test]
fn a_transaction_is_tried_again_when_others_were_in_the_way() {
    let mut ends = 0;
    let (mut client, thread) =
        daemon(move |header, payload| match MessageKind::from_number(header.kind).unwrap() {
            MessageKind::TransactionStart => vec![(MessageKind::TransactionStart, b"7\0".to_vec())],
            MessageKind::TransactionEnd => {
                assert_eq!((header.transaction, payload), (7, &b"T\0"[..]));
                ends += 1;
                if ends < 3 {
                    error(Errno::EAGAIN)
                } else {
                    vec![(MessageKind::TransactionEnd, reply::OK.to_vec())]
                }
            }
            kind => {
                assert_eq!(header.transaction, 7);
                vec![(kind, reply::OK.to_vec())]
            }
        });
    let mut tries = 0;
    let value = client.transaction(|t| {
        tries += 1;
        t.write_many(&[("/a", "1"), ("/b", "2")])?;
        Ok(tries)
    });
    assert_eq!(value.unwrap(), 3);
    assert_eq!(client.counts(), Counts { requests: 12, transactions: 3, round_trips: 9 });
    drop(client);
    assert_eq!(thread.join().unwrap().len(), 12);
}

#[test]
fn a_transaction_that_fails_is_taken_back() {
    let (mut client, thread) =
        daemon(|header, payload| match MessageKind::from_number(header.kind).unwrap() {
            MessageKind::TransactionStart => vec![(MessageKind::TransactionStart, b"4294967295\0".to_vec())],
            MessageKind::TransactionEnd => {
                assert_eq!(payload, b"F\0");
                vec![(MessageKind::TransactionEnd, reply::OK.to_vec())]
            }
            _ => error(Errno::EACCES),
        });
    let failed = client.transaction(|t| t.write("/a", "1")).unwrap_err();
    assert_eq!(failed.to_string(), "xenstored answered EACCES to WRITE /a");
    drop(client);
    use MessageKind::{TransactionEnd, TransactionStart, Write};
    assert_eq!(thread.join().unwrap(), [TransactionStart, Write, TransactionEnd]);
}

#[test]
fn a_transaction_gives_up_some_day() {
    let (mut client, _thread) = daemon(|header, _| match MessageKind::from_number(header.kind).unwrap() {
        MessageKind::TransactionStart => vec![(MessageKind::TransactionStart, b"7\0".to_vec())],
        _ => error(Errno::EAGAIN),
    });
    let failed = client.transaction(|_| Ok(())).unwrap_err();
    assert!(matches!(failed, XsError::Contended { tries: 30 }), "{failed}");
    assert!(failed.is_harmless());
}

#[test]
fn a_directory_of_any_length_is_read() {
    let names: Vec<String> = (0..2000).map(|n| format!("{n}")).collect();
    let all = reply::strings(&names);
    let mut asked = 0;
    let (mut client, _thread) = daemon(move |header, payload| {
        if header.kind == MessageKind::Directory as u32 {
            return error(Errno::E2BIG);
        }
        asked += 1;
        let Ok(Request::DirectoryPart { offset, .. }) = Request::parse(header.kind, payload) else {
            panic!("{payload:?}")
        };
        // It changes once, in the middle.
        let generation = if asked <= 2 { 1 } else { 2 };
        vec![(MessageKind::DirectoryPart, reply::directory_part(generation, &all, offset as usize).unwrap())]
    });
    assert_eq!(client.directory("/local/domain").unwrap().unwrap(), names);
}

#[test]
fn what_a_daemon_should_not_say_is_an_error_and_no_panic() {
    // Another type, a name that is none, a part that never ends.
    let (mut client, _thread) = daemon(|header, _| match MessageKind::from_number(header.kind).unwrap() {
        MessageKind::Read => vec![(MessageKind::Write, reply::OK.to_vec())],
        MessageKind::TransactionStart => vec![(MessageKind::TransactionStart, b"x\0".to_vec())],
        MessageKind::Directory => error(Errno::E2BIG),
        MessageKind::DirectoryPart => vec![(MessageKind::DirectoryPart, b"1\0a".to_vec())],
        kind => vec![(kind, b"\xff".to_vec())],
    });
    assert!(matches!(client.read("/a").unwrap_err(), XsError::Nonsense(_)));
    assert!(matches!(client.transaction(|_| Ok(())).unwrap_err(), XsError::Nonsense(_)));
    assert!(matches!(client.directory("/a").unwrap_err(), XsError::Nonsense(_)));
    assert!(matches!(client.domain_path(1).unwrap_err(), XsError::Nonsense(_)));
    assert!(!client.is_introduced(1).unwrap());
}

#[test]
fn a_path_or_value_that_is_too_long_is_refused_here() {
    let (mut client, _thread) = daemon(|_, _| panic!("nothing was to be sent"));
    let failed = client.write("/a", vec![0; 5000]).unwrap_err();
    assert!(failed.to_string().contains("WRITE /a: a xenstore message of 5003 bytes"), "{failed}");
}

#[test]
fn a_daemon_that_is_silent_or_gone_is_told_apart() {
    let (mut client, thread) = daemon(|_, _| Vec::new());
    client.set_timeout(Duration::from_millis(30));
    let failed = client.read("/local/domain/0/name").unwrap_err();
    assert!(failed.to_string().contains("has not answered READ /local/domain/0/name"), "{failed}");
    assert!(!failed.is_harmless());
    drop(client);
    thread.join().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut client = Client::from_socket(ours.into()).unwrap();
    drop(theirs);
    assert!(matches!(client.read("/a").unwrap_err(), XsError::Io { .. }));
    let missing = Client::connect(FilePath::new("/nonexistent/socket")).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/socket"), "{missing}");
}

#[test]
fn an_answer_that_comes_too_late_is_not_taken_for_another() {
    let mut held: Option<u32> = None;
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        for turn in 0..2 {
            let mut header = [0; HEADER_LEN];
            theirs.read_exact(&mut header).unwrap();
            let header = Header::decode(&header);
            theirs.read_exact(&mut vec![0; header.len as usize]).unwrap();
            if turn == 0 {
                held = Some(header.request);
                continue;
            }
            let mut out = Vec::new();
            frame(MessageKind::Read, held.take().unwrap(), 0, b"old", &mut out).unwrap();
            frame(MessageKind::Read, header.request, 0, b"new", &mut out).unwrap();
            theirs.write_all(&out).unwrap();
        }
    });
    let mut client = Client::from_socket(ours.into()).unwrap();
    client.set_timeout(Duration::from_millis(30));
    assert!(matches!(client.read("/a").unwrap_err(), XsError::Timeout { .. }));
    client.set_timeout(Duration::from_secs(60));
    assert_eq!(client.read("/b").unwrap().unwrap(), b"new");
    thread.join().unwrap();
}

#[test]
fn values_are_what_they_should_be() {
    let (mut client, _thread) =
        daemon(|header, payload| match (MessageKind::from_number(header.kind), payload) {
            (Some(MessageKind::Read), b"/text\0") => vec![(MessageKind::Read, b"\xff\xfe".to_vec())],
            (Some(MessageKind::Read), _) => vec![(MessageKind::Read, b"12x".to_vec())],
            (Some(MessageKind::GetPerms), _) => vec![(MessageKind::GetPerms, b"n0\0r7\0".to_vec())],
            (Some(MessageKind::Rm), _) => error(Errno::ENOENT),
            _ => error(Errno::EINVAL),
        });
    let failed = client.read_u64("/number").unwrap_err();
    assert_eq!(failed.to_string(), "the node /number holds '12x', which is no number");
    assert!(client.read_text("/text").unwrap_err().to_string().contains("/text"));
    let permissions = client.permissions("/a").unwrap().unwrap();
    assert_eq!(permissions.iter().map(Permission::to_string).collect::<Vec<_>>(), ["n0", "r7"]);
    client.remove("/a").unwrap();
    assert_eq!(client.mkdir("/a").unwrap_err().errno(), Some(Errno::EINVAL));
}
