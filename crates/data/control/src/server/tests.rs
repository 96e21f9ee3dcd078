use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::atomic::AtomicU32;
use std::sync::mpsc;
use std::time::Instant;

use serde_json::Value;
use tapio_stat::VbdId;

use super::*;
use crate::host::{
    DiskEntry, DiskReport, FrontEntry, FrontRequest, ImageReport, Key, OpenRequest, ResumeRequest, VbdState,
};
use crate::images::{ImageAnswer, ImageWork, SnapshotReport};
use crate::message::{MESSAGE_LEN, Message, MessageKind, flags};
use crate::own::Command;
use crate::stats_text::VbdStats;
use crate::{Body, Client, OpenArguments, OwnClient, ProcessState, ResumeArguments, RunDir, list, processes};
use crate::{DiskInfo, Front, ImageSource, Polling};

/// A disk process without disks.
#[derive(Default)]
struct Double {
    disks: Mutex<BTreeMap<u16, Disk>>,
    log: Mutex<Vec<String>>,
    /// While set, a pause waits.
    busy: AtomicBool,
    gone: AtomicU32,
    inside: AtomicU32,
}

#[derive(Default)]
struct Disk {
    open: Option<OpenRequest>,
    paused: bool,
    fronts: Vec<FrontEntry>,
    fd_count: usize,
    polling: Option<Polling>,
}

fn missing(minor: u16) -> ControlError {
    ControlError::new(Errno::ENODEV, format!("there is no disk {minor}")).next("attach it first")
}

impl Double {
    fn with<T>(&self, minor: u16, run: impl FnOnce(&mut Disk) -> Result<T>) -> Result<T> {
        run(lock(&self.disks).get_mut(&minor).ok_or_else(|| missing(minor))?)
    }

    /// Fails the test when two changes overlap.
    fn alone<T>(&self, run: impl FnOnce() -> T) -> T {
        assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "two changes at a time");
        let out = run();
        self.inside.fetch_sub(1, Ordering::SeqCst);
        out
    }
}

const INFO: DiskInfo = DiskInfo { sectors: 2048, sector_size: 512, info: 0 };

impl DiskHost for Double {
    fn image_work(&self, minor: u16, work: &ImageWork) -> Result<ImageAnswer> {
        self.with(minor, |_| Ok(()))?;
        match work {
            ImageWork::Snapshot { leaf, stall_ms } => Ok(ImageAnswer::Snapshot(SnapshotReport {
                leaf: format!("vhd:{}", leaf.display()),
                parent: "vhd:/old".into(),
                stalled_us: (*stall_ms).into(),
            })),
            _ => Ok(ImageAnswer::Jobs(Vec::new())),
        }
    }

    fn list(&self) -> Vec<DiskEntry> {
        let entry = |(minor, disk): (&u16, &Disk)| DiskEntry {
            minor: *minor,
            state: if disk.paused { VbdState::Paused } else { VbdState::Running },
            image: disk.open.as_ref().map(|open| open.image.text()),
            read_only: disk.open.as_ref().is_some_and(|open| open.read_only),
            fronts: disk.fronts.clone(),
        };
        lock(&self.disks).iter().map(entry).collect()
    }

    fn stats(&self, minor: u16) -> Result<VbdStats> {
        self.with(minor, |disk| {
            let name = disk.open.as_ref().map(|open| open.image.text());
            Ok(VbdStats { name, secs: [8, 16], ..VbdStats::default() })
        })
    }

    fn report(&self, minor: u16) -> Result<DiskReport> {
        self.with(minor, |disk| {
            let image = |open: &OpenRequest| ImageReport {
                image: open.image.text(),
                sectors_read: 0,
                sectors_written: 0,
            };
            Ok(DiskReport {
                minor,
                state: VbdState::Running,
                counters: None,
                in_flight: 3,
                stuck: 1,
                images: disk.open.iter().map(image).collect(),
                beside: Vec::new(),
                blkif: Vec::new(),
            })
        })
    }

    fn fronts(&self, minor: u16) -> Result<Vec<FrontEntry>> {
        self.with(minor, |disk| Ok(disk.fronts.clone()))
    }

    fn attach(&self, minor: u16) -> Result<()> {
        self.alone(|| match lock(&self.disks).insert(minor, Disk::default()) {
            None => Ok(()),
            Some(_) => Err(ControlError::new(Errno::EEXIST, format!("disk {minor} is there"))),
        })
    }

    fn detach(&self, minor: u16) -> Result<()> {
        self.with(minor, |disk| match disk.open {
            None => Ok(()),
            Some(_) => Err(ControlError::new(Errno::EBUSY, format!("disk {minor} is open"))),
        })?;
        lock(&self.disks).remove(&minor);
        Ok(())
    }

    fn is_empty(&self) -> bool {
        lock(&self.disks).is_empty()
    }

    fn open(&self, minor: u16, request: &OpenRequest) -> Result<DiskInfo> {
        self.alone(|| {
            self.with(minor, |disk| match &disk.open {
                Some(_) => Err(ControlError::new(Errno::EALREADY, format!("disk {minor} is open"))),
                None => {
                    disk.open = Some(request.clone());
                    Ok(INFO)
                }
            })
        })
    }

    fn close(&self, minor: u16, _force: bool, _caller: &dyn Caller) -> Result<()> {
        self.with(minor, |disk| {
            disk.open = None;
            Ok(())
        })
    }

    fn pause(&self, minor: u16, caller: &dyn Caller) -> Result<()> {
        self.alone(|| {
            self.with(minor, |_| Ok(()))?;
            while self.busy.load(Ordering::SeqCst) {
                if caller.gone() {
                    self.gone.fetch_add(1, Ordering::SeqCst);
                    return Err(ControlError::new(Errno::ECANCELED, "nobody waits any more"));
                }
                thread::sleep(Duration::from_millis(2));
            }
            self.with(minor, |disk| {
                disk.paused = true;
                Ok(())
            })
        })
    }

    fn resume(&self, minor: u16, request: &ResumeRequest) -> Result<()> {
        self.with(minor, |disk| {
            disk.paused = false;
            if let (Some(open), Some(image)) = (&mut disk.open, &request.image) {
                open.image = image.clone();
                open.log_path = request.log_path.clone();
            }
            Ok(())
        })
    }

    fn grow(&self, minor: u16, len: u64) -> Result<DiskInfo> {
        self.with(minor, |_| Ok(DiskInfo { sectors: len / 512, ..INFO }))
    }

    fn disk_info(&self, minor: u16) -> Result<DiskInfo> {
        self.with(minor, |_| Ok(INFO))
    }

    fn front_add(&self, minor: u16, request: FrontRequest) -> Result<FrontEntry> {
        self.with(minor, |disk| {
            disk.fd_count = request.fds.len();
            let vbd = request.vbd.unwrap_or(VbdId { domid: 0, devid: minor.into() });
            let entry = FrontEntry { id: 1, front: request.front, vbd, connections: 0 };
            disk.fronts.push(entry.clone());
            for mut fd in request.fds.into_iter().map(std::fs::File::from) {
                fd.write_all(b"reached").map_err(|error| ControlError::io("writing", &error))?;
            }
            Ok(entry)
        })
    }

    fn front_remove(&self, minor: u16, id: u32, _force: bool) -> Result<()> {
        self.with(minor, |disk| {
            let before = disk.fronts.len();
            disk.fronts.retain(|front| front.id != id);
            if disk.fronts.len() < before {
                return Ok(());
            }
            Err(ControlError::new(Errno::ENOENT, format!("disk {minor} has no front end {id}")))
        })
    }

    fn set_polling(&self, minor: u16, polling: Polling) -> Result<()> {
        self.with(minor, |disk| {
            disk.polling = Some(polling);
            Ok(())
        })
    }

    fn quit(&self, _force: bool) -> Result<()> {
        lock(&self.disks).clear();
        Ok(())
    }

    fn log(&self, line: &str) {
        lock(&self.log).push(line.to_owned());
    }
}

const ID: i32 = 77;

fn quick() -> Limits {
    Limits { read: Duration::from_millis(300), idle: Duration::from_millis(600), ..Limits::default() }
}

/// Runs a server on a socket of its own beside `test`, then ends it; the test bounds itself by the clients'
/// deadlines.
fn with_server(limits: Limits, test: impl FnOnce(&RunDir, &Double)) -> Ended {
    let dir = tempfile::tempdir().expect("temporary directory");
    let run = RunDir::new(dir.path());
    let listener = UnixListener::bind(run.socket(ID)).expect("bound");
    let host = Double::default();
    let (stop, stopped) = UnixStream::pair().expect("pair");
    thread::scope(|scope| {
        let server = scope.spawn(|| serve(&listener, &host, limits, Some(stopped.as_fd())).expect("served"));
        // Ends the server even when the test fails, so that the failure is seen and not a hang.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&run, &host)));
        host.busy.store(false, Ordering::SeqCst);
        // Whoever asked for the end has its answer a moment before the server has taken notice.
        let asked = Instant::now();
        while outcome.is_ok() && host.is_empty() && !server.is_finished() && asked.elapsed().as_millis() < 200
        {
            thread::yield_now();
        }
        drop(stop);
        let ended = server.join().expect("no panic in the server");
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ended
    })
}

fn second() -> Option<Duration> {
    Some(Duration::from_secs(5))
}

#[test]
fn a_disk_lives_its_life_over_the_tapdisk_protocol() {
    let ended = with_server(quick(), |run, host| {
        let client = Client::new(run, ID);
        assert_eq!(client.pid(), Ok(std::process::id() as i32));
        assert_eq!(client.list(), Ok(vec![]));
        assert_eq!(
            client
                .open(3, &OpenArguments { image: "vhd:/a".into(), ..Default::default() })
                .expect_err("no disk")
                .errno,
            Errno::ENODEV
        );
        client.attach(3).expect("attached");
        assert_eq!(client.attach(3).expect_err("twice").errno, Errno::EEXIST);
        let open = OpenArguments {
            image: "vhd:/a.vhd".into(),
            flags: flags::RDONLY | flags::NO_O_DIRECT,
            parent_minor: Some(2),
            secondary: Some("nbd:/s".into()),
            request_timeout_s: 30,
            log_path: Some("/sr/a.cbtlog".into()),
            key: Some(Key(vec![7; 32])),
        };
        // The parents of a disk that is not there cannot be shared.
        let error = client.open(3, &open).expect_err("no disk 2");
        assert!(error.errno == Errno::ENOENT && error.message.contains("the parents of disk 2"), "{error}");
        let open = OpenArguments { parent_minor: Some(3), ..open };
        assert_eq!(client.open(3, &open), Ok(INFO));
        let seen = lock(&host.disks)[&3].open.clone().expect("open");
        assert_eq!(
            seen,
            OpenRequest {
                read_only: true,
                secondary: Some("nbd:/s".into()),
                request_timeout: Some(Duration::from_secs(30)),
                log_path: Some("/sr/a.cbtlog".into()),
                key: Some(Key(vec![7; 32])),
                default_nbd: true,
                ..OpenRequest::of(ImageSource::Leaf("vhd:/a.vhd".into()))
            }
        );
        assert_eq!(client.open(3, &open).expect_err("twice").errno, Errno::EALREADY);
        assert_eq!(client.disk_info(3), Ok(INFO));
        client.pause(3, second()).expect("paused");
        let listed = client.list().expect("listed");
        assert_eq!((listed[0].minor, listed[0].state, listed[0].path.as_str()), (3, 0x2a, "vhd:/a.vhd"));
        let resume = ResumeArguments {
            image: Some("vhd:/b.vhd".into()),
            log_path: Some("/sr/b.cbtlog".into()),
            ..ResumeArguments::default()
        };
        client.resume(3, &resume).expect("resumed");
        let stats = client.stats(3).expect("stats");
        assert!(
            stats.starts_with(r#"{ "name": "vhd:/b.vhd", "secs": [ 8, 16 ], "images": [  ], "#),
            "{stats}"
        );
        assert_eq!(client.stats(u16::MAX).expect("all"), format!("[ {stats} ]"));
        assert_eq!(client.stats(9).expect_err("no disk").errno, Errno::ENODEV);
        let row = &list(run).expect("listed")[0];
        assert_eq!((row.kind.as_deref(), row.path.as_deref()), (Some("vhd"), Some("/b.vhd")));
        assert_eq!(client.detach(3).expect_err("open").errno, Errno::EBUSY);
        client.close(3, false, second()).expect("closed");
        client.detach(3).expect("detached");
    });
    assert_eq!(ended, Ended::Empty);
}

#[test]
fn the_reason_reaches_the_client_of_tapdisks_protocol() {
    with_server(quick(), |run, _| {
        let error = Client::new(run, ID).detach(5).expect_err("no disk");
        assert_eq!(error.errno, Errno::ENODEV);
        assert!(error.message.contains("there is no disk 5; attach it first"), "{error}");
    });
}

#[test]
fn questions_are_answered_while_a_pause_waits_and_changes_take_turns() {
    with_server(quick(), |run, host| {
        let client = Client::new(run, ID);
        client.attach(1).expect("attached");
        client.attach(2).expect("attached");
        host.busy.store(true, Ordering::SeqCst);
        thread::scope(|scope| {
            let pause = scope.spawn(|| client.pause(1, second()));
            while host.inside.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            let other = scope.spawn(|| client.pause(2, second()));
            assert_eq!(client.list().expect("listed").len(), 2);
            assert!(client.stats(1).is_ok());
            assert!(client.pid().is_ok());
            let mut own = OwnClient::connect(run, ID).expect("greeted");
            let listed: Value = own.call(&Command::List {}, &[], second()).expect("listed");
            assert_eq!(listed.as_array().map(Vec::len), Some(2));
            assert!(!pause.is_finished() && !other.is_finished());
            host.busy.store(false, Ordering::SeqCst);
            assert_eq!(pause.join().expect("no panic"), Ok(()));
            assert_eq!(other.join().expect("no panic"), Ok(()));
        });
    });
}

#[test]
fn a_pause_whose_client_left_is_given_up() {
    with_server(quick(), |run, host| {
        let client = Client::new(run, ID);
        client.attach(1).expect("attached");
        host.busy.store(true, Ordering::SeqCst);
        let error = client.pause(1, Some(Duration::from_millis(50))).expect_err("too slow");
        assert_eq!(error.errno, Errno::ETIMEDOUT);
        let begun = Instant::now();
        while host.gone.load(Ordering::SeqCst) == 0 {
            assert!(begun.elapsed() < Duration::from_secs(30), "the pause still waits");
            thread::yield_now();
        }
    });
}

#[test]
fn too_many_that_wait_are_sent_away() {
    let limits = Limits { waiting: 2, ..quick() };
    with_server(limits, |run, host| {
        let client = Client::new(run, ID);
        client.attach(1).expect("attached");
        host.busy.store(true, Ordering::SeqCst);
        thread::scope(|scope| {
            let pauses: Vec<_> = (0..4).map(|_| scope.spawn(|| client.pause(1, second()))).collect();
            let begun = Instant::now();
            while pauses.iter().filter(|pause| pause.is_finished()).count() < 2 {
                assert!(begun.elapsed() < Duration::from_secs(30), "nobody was sent away");
                thread::yield_now();
            }
            host.busy.store(false, Ordering::SeqCst);
            let results: Vec<_> = pauses.into_iter().map(|pause| pause.join().expect("no panic")).collect();
            assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 2, "{results:?}");
            assert!(
                results
                    .iter()
                    .flat_map(|result| result.as_ref().err())
                    .all(|error| error.errno == Errno::EBUSY)
            );
        });
    });
}

#[test]
fn our_own_protocol_carries_everything() {
    let ended = with_server(quick(), |run, host| {
        let mut own = OwnClient::connect(run, ID).expect("greeted");
        assert_eq!((own.hello().version, own.hello().pid), (1, std::process::id()));
        let mut ask = |command: Command| own.call::<Value>(&command, &[], second());
        ask(Command::Attach { minor: 4 }).expect("attached");
        let image = ImageSource::Leaf("vhd:/a".into());
        let open = |image| Command::Open {
            minor: 4,
            image,
            read_only: true,
            timeout_s: None,
            default_nbd: false,
            secondary: None,
            standby: false,
            log: None,
            key: None,
            key_file: None,
            pool: None,
        };
        assert_eq!(
            ask(open(ImageSource::Leaf("vhd:relative".into()))).expect_err("relative").errno,
            Errno::EINVAL
        );
        assert_eq!(ask(open(image)).expect("open")["sectors"], 2048);
        assert!(!lock(&host.disks)[&4].open.as_ref().expect("open").default_nbd);
        ask(Command::Pause { minor: 4 }).expect("paused");
        assert_eq!(ask(Command::List {}).expect("listed")[0]["state"], "paused");
        ask(Command::Resume { minor: 4, image: None, secondary: None, log: None }).expect("resumed");
        let front =
            Front::NbdUnix { path: "/s".into(), listener: None, export: String::new(), read_only: false };
        let vbd = Some(VbdId { domid: 5, devid: 51712 });
        let added = ask(Command::FrontAdd { minor: 4, front, vbd }).expect("added");
        assert_eq!((&added["front"]["kind"], &added["vbd"]["devid"]), (&"nbd-unix".into(), &51712.into()));
        assert_eq!(ask(Command::FrontList { minor: 4 }).expect("listed").as_array().map(Vec::len), Some(1));
        ask(Command::FrontRemove { minor: 4, front: 1, force: false }).expect("removed");
        let error = ask(Command::FrontRemove { minor: 4, front: 1, force: false }).expect_err("gone");
        assert_eq!((error.errno, error.message.as_str()), (Errno::ENOENT, "disk 4 has no front end 1"));
        let error = ask(Command::FrontFollow { minor: 4, front: 1 }).expect_err("nothing came along");
        assert_eq!(error.errno, Errno::EINVAL);
        ask(Command::SetPolling { minor: 4, max_us: 50, idle_percent: 30 }).expect("set");
        assert_eq!(lock(&host.disks)[&4].polling, Some(Polling { max_us: 50, idle_percent: 30 }));
        assert_eq!(ask(Command::Stats { minor: Some(4) }).expect("stats")["in_flight"], 3);
        assert_eq!(ask(Command::Stats { minor: None }).expect("stats").as_array().map(Vec::len), Some(1));
        assert_eq!(ask(Command::DiskInfo { minor: 4 }).expect("info")["sector_size"], 512);
        let error = ask(Command::Close { minor: 9, force: true }).expect_err("no disk");
        assert_eq!(error.next.as_deref(), Some("attach it first"));
        ask(Command::Quit { force: false }).expect("ends");
    });
    assert_eq!(ended, Ended::Quit);
}

#[test]
fn descriptors_come_along_and_are_closed_when_nobody_takes_them() {
    with_server(quick(), |run, host| {
        Client::new(run, ID).attach(0).expect("attached");
        let mut own = OwnClient::connect(run, ID).expect("greeted");
        let (mut ours, theirs) = UnixStream::pair().expect("pair");
        let front = Front::VhostUser {
            socket: "/v".into(),
            listener: None,
            connection: Some(0),
            queues: 1,
            queue_size: 64,
            read_only: false,
        };
        let add = Command::FrontAdd { minor: 0, front, vbd: None };
        let error = own.call::<Value>(&add, &[], second()).expect_err("none came");
        assert_eq!(error.errno, Errno::EINVAL);
        own.call::<Value>(&add, &[theirs.as_fd()], second()).expect("added");
        assert_eq!(lock(&host.disks)[&0].fd_count, 1);
        own.call::<Value>(&Command::List {}, &[theirs.as_fd(), theirs.as_fd()], second()).expect("listed");
        drop(theirs);
        ours.set_read_timeout(second()).expect("set");
        let mut said = String::new();
        ours.read_to_string(&mut said).expect("all copies at the other end are closed");
        assert_eq!(said, "reached");
    });
}

fn raw(run: &RunDir) -> UnixStream {
    let stream = UnixStream::connect(run.socket(ID)).expect("connected");
    stream.set_read_timeout(second()).expect("set");
    stream
}

#[test]
fn our_protocol_wants_a_greeting_and_answers_nonsense() {
    with_server(quick(), |run, _| {
        let mut stream = raw(run);
        stream.write_all(b"{\"id\":3,\"command\":\"list\"}\n{\"id\":4,\"command\":\"hel").expect("sent");
        stream.write_all(b"lo\",\"version\":0}\n{nonsense}\n{\"id\":5,\"command\":\"hello\",\"version\":9}\n{\"id\":6,\"command\":\"list\"}\n").expect("sent");
        stream.shutdown(std::net::Shutdown::Write).expect("half closed");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("answers");
        let replies: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let codes: Vec<_> = replies.iter().map(|reply| reply["error"]["code"].as_str()).collect();
        assert_eq!(codes, [Some("EPROTO"), Some("EPROTO"), Some("EPROTO"), None, None], "{text}");
        let ids: Vec<_> = replies.iter().map(|reply| reply["id"].as_u64()).collect();
        assert_eq!(ids, [Some(3), Some(4), Some(0), Some(5), Some(6)]);
    });
}

#[test]
fn hostile_bytes_are_survived() {
    with_server(quick(), |run, _| {
        // Endless line.
        let mut stream = raw(run);
        let chunk = [b'{'; 4096];
        let flooded = (0..200).find_map(|_| stream.write_all(&chunk).err());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(flooded.is_some() || String::from_utf8_lossy(&answer).contains("EMSGSIZE"));
        // Every type with random bodies, and announced payloads that never come.
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for number in (0..40u16).chain([u16::MAX]) {
            let mut bytes: Vec<u8> = (0..MESSAGE_LEN)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state as u8
                })
                .collect();
            bytes[..2].copy_from_slice(&number.to_ne_bytes());
            if number == MessageKind::Exit as u16 {
                continue;
            }
            let mut stream = raw(run);
            stream.write_all(&bytes).expect("sent");
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).expect("the connection ends");
            assert!(answer.len() >= MESSAGE_LEN, "type {number} was answered with {} bytes", answer.len());
        }
        // A request that stops half-way, a client that leaves at once, and one that never reads.
        let mut half = raw(run);
        half.write_all(&[7, 0, 0]).expect("sent");
        drop(raw(run));
        let mut answer = Vec::new();
        half.read_to_end(&mut answer).expect("the connection is closed in time");
        assert_eq!(answer.len(), 0);
        assert!(Client::new(run, ID).pid().is_ok(), "still there");
    });
}

#[test]
fn announced_payloads_must_come() {
    with_server(quick(), |run, host| {
        Client::new(run, ID).attach(0).expect("attached");
        for (flag, trailing, errno) in [
            (flags::ADD_LOG, &b"/short"[..], None),
            (flags::OPEN_ENCRYPTED, &[33, 0, 0][..], Some(Errno::EINVAL)),
            (flags::OPEN_ENCRYPTED, &[32, 0, 0][..], None),
            (flags::SECONDARY, &[][..], Some(Errno::EINVAL)),
        ] {
            let params = crate::Params { flags: flag, path: "vhd:/a".into(), ..crate::Params::default() };
            let open = Message { kind: MessageKind::Open, cookie: 0, body: Body::Params(Box::new(params)) };
            let mut stream = raw(run);
            stream.write_all(&open.encode().expect("fits")).expect("sent");
            stream.write_all(trailing).expect("sent");
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).expect("the connection ends");
            let answer: [u8; MESSAGE_LEN] = answer.try_into().expect("one message");
            let Body::Response(response) = Message::decode(&answer).expect("a message").body else {
                panic!("no error for flag {flag:#x}");
            };
            assert_eq!(
                response.error,
                errno.unwrap_or(Errno::ETIMEDOUT).raw(),
                "flag {flag:#x}: {}",
                response.message
            );
        }
        assert!(lock(&host.disks)[&0].open.is_none());
    });
}

#[test]
fn idle_connections_give_their_place_to_others() {
    let limits = Limits { connections: 3, ..quick() };
    with_server(limits, |run, _| {
        let idle: Vec<_> = (0..10).map(|_| raw(run)).collect();
        let begun = Instant::now();
        assert!(Client::new(run, ID).pid().is_ok());
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        drop(idle);
    });
}

#[test]
fn an_idle_server_ends_at_once_when_it_is_stopped() {
    let limits = Limits { idle: Duration::from_secs(60), ..Limits::default() };
    let (sender, receiver) = mpsc::channel();
    let ended = with_server(limits, |run, _| {
        let own = OwnClient::connect(run, ID).expect("greeted");
        sender.send((own, Instant::now())).expect("kept");
    });
    let (_own, begun) = receiver.recv().expect("kept");
    assert_eq!(ended, Ended::Stopped);
    assert!(begun.elapsed() < Duration::from_secs(30), "an open conversation held the server up");
}

#[test]
fn processes_are_found_and_dead_sockets_told_apart() {
    with_server(quick(), |run, _| {
        drop(UnixListener::bind(run.socket(99_999_999)).expect("bound"));
        std::fs::write(run.path().join("ctlx"), "").expect("written");
        std::fs::write(run.path().join("nbd77.0"), "").expect("written");
        let found = processes(run).expect("listed");
        let states: Vec<_> = found.iter().map(|process| (process.id, &process.state)).collect();
        let live = ProcessState::Live { pid: std::process::id() as i32 };
        assert_eq!(states, [(ID, &live), (99_999_999, &ProcessState::Stale)]);
        assert_eq!(crate::remove_stale_sockets(run).expect("listed"), [99_999_999]);
        assert_eq!(processes(run).expect("listed").len(), 1);
        run.minors().allocate().expect("free");
        let rows = list(run).expect("listed");
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].pid, rows[0].minor), (Some(std::process::id() as i32), None));
        assert_eq!((rows[1].pid, rows[1].minor, rows[1].state), (None, Some(0), None));
    });
}
