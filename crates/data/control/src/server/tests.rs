use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::atomic::AtomicU32;
use std::sync::mpsc;
use std::time::Instant;

use serde_json::Value;
use tapio_load::Random;
use tapio_stat::VbdId;

use super::*;
use crate::command::{
    self, Attach, Call, Close, Command, Detach, DiskCommand, Done, FrontAdd, FrontRemove, Grow, Handle, Open,
    Pause,
};
use crate::disk_report::{DiskEntry, DiskReport, DiskReports, FrontEntry, ImageReport, VbdState};
use crate::images::SnapshotReport;
use crate::key::Key;
use crate::message::{Blkif, MESSAGE_LEN, Message, MessageKind, flags};
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
    open: Option<Open>,
    key: Option<Key>,
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
        run(self.disks.lock().get_mut(&minor).ok_or_else(|| missing(minor))?)
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

macro_rules! handles {
    ($($command:ident: $run:expr;)*) => {
        $(impl Handle<command::$command> for Double {
            fn handle(
                &self,
                command: command::$command,
                call: &mut Call<'_>,
            ) -> Result<<command::$command as DiskCommand>::Reply> {
                let run: fn(&Self, command::$command, &mut Call<'_>) -> _ = $run;
                run(self, command, call)
            }
        })*
    };
}

macro_rules! refuses {
    ($($command:ident)*) => {
        handles! { $($command: |_, _, _| Err(ControlError::new(Errno::ENOSYS, "the double cannot"));)* }
    };
}

refuses! {
    FrontFollow FrontAdmit SetLimits SetShare SetTransfers Limits TraceStart TraceStop MirrorStart MirrorStatus
    MirrorResume MirrorRate MirrorPivot MirrorCancel Commit JobList JobCancel JobRate
}

handles! {
    List: |host, _, _| Ok(host.entries());
    Stats: |host, command, _| match command.minor {
        Some(minor) => host.report(minor).map(|report| DiskReports::One(Box::new(report))),
        None => {
            let reports: Result<Vec<_>> = host.entries().iter().map(|disk| host.report(disk.minor)).collect();
            reports.map(DiskReports::All)
        }
    };
    FrontList: |host, command, _| host.with(command.minor, |disk| Ok(disk.fronts.clone()));
    Attach: |host, Attach { minor }, _| {
        host.alone(|| match host.disks.lock().insert(minor, Disk::default()) {
            None => Ok(Done {}),
            Some(_) => Err(ControlError::new(Errno::EEXIST, format!("disk {minor} is there"))),
        })
    };
    Detach: |host, Detach { minor }, _| {
        host.with(minor, |disk| match disk.open {
            None => Ok(()),
            Some(_) => Err(ControlError::new(Errno::EBUSY, format!("disk {minor} is open"))),
        })?;
        host.disks.lock().remove(&minor);
        Ok(Done {})
    };
    Open: |host, command, call| {
        let minor = command.minor;
        host.alone(|| {
            host.with(minor, |disk| match &disk.open {
                Some(_) => Err(ControlError::new(Errno::EALREADY, format!("disk {minor} is open"))),
                None => {
                    disk.open = Some(command);
                    disk.key = call.key.take();
                    Ok(INFO)
                }
            })
        })
    };
    Close: |host, Close { minor, .. }, _| host.with(minor, |disk| {
        disk.open = None;
        Ok(Done {})
    });
    Pause: |host, Pause { minor }, call| host.alone(|| {
        host.with(minor, |_| Ok(()))?;
        while host.busy.load(Ordering::SeqCst) {
            if call.caller.gone() {
                host.gone.fetch_add(1, Ordering::SeqCst);
                return Err(ControlError::new(Errno::ECANCELED, "no caller waits any more"));
            }
            thread::sleep(Duration::from_millis(2));
        }
        host.with(minor, |disk| {
            disk.paused = true;
            Ok(Done {})
        })
    });
    Resume: |host, command, _| host.with(command.minor, |disk| {
        disk.paused = false;
        if let (Some(open), Some(image)) = (&mut disk.open, command.image) {
            open.image = image;
            open.log = command.log;
        }
        Ok(Done {})
    });
    Grow: |host, Grow { minor, len }, _| host.with(minor, |_| Ok(DiskInfo { sectors: len / 512, ..INFO }));
    DiskInfo: |host, command, _| host.with(command.minor, |_| Ok(INFO));
    LookForRoom: |host, command, _| host.with(command.minor, |_| Ok(None));
    Shorten: |host, command, _| host.with(command.minor, |_| Ok(()));
    FrontAdd: |host, FrontAdd { minor, front, vbd }, call| host.with(minor, |disk| {
        disk.fd_count = call.fds.len();
        let vbd = vbd.unwrap_or(VbdId { domid: 0, devid: minor.into() });
        let entry = FrontEntry { id: 1, front, vbd, connections: 0 };
        disk.fronts.push(entry.clone());
        for mut fd in call.fds.drain(..).map(std::fs::File::from) {
            fd.write_all(b"reached").map_err(|error| ControlError::io("writing", &error))?;
        }
        Ok(entry)
    });
    FrontRemove: |host, FrontRemove { minor, front, .. }, _| host.with(minor, |disk| {
        let before = disk.fronts.len();
        disk.fronts.retain(|entry| entry.id != front);
        if disk.fronts.len() < before {
            return Ok(Done {});
        }
        Err(ControlError::new(Errno::ENOENT, format!("disk {minor} has no front end {front}")))
    });
    SetPolling: |host, command, _| host.with(command.minor, |disk| {
        disk.polling = Some(command.polling());
        Ok(Done {})
    });
    Snapshot: |host, command, _| host.with(command.minor, |_| {
        Ok(SnapshotReport {
            leaf: format!("vhd:{}", command.leaf.display()),
            parent: "vhd:/old".into(),
            stalled_us: command.stall_ms.into(),
        })
    });
    SwapLeaf: |host, command, _| host.with(command.minor, |_| {
        let name = |at: usize| command.images.get(at).map_or_else(String::new, ToString::to_string);
        Ok(SnapshotReport { leaf: name(0), parent: name(1), stalled_us: 0 })
    });
    Quit: |host, _, _| {
        host.disks.lock().clear();
        Ok(Done {})
    };
}

impl Double {
    fn entries(&self) -> Vec<DiskEntry> {
        let entry = |(minor, disk): (&u16, &Disk)| DiskEntry {
            minor: *minor,
            state: if disk.paused { VbdState::Paused } else { VbdState::Running },
            image: disk.open.as_ref().map(|open| open.image.text()),
            read_only: disk.open.as_ref().is_some_and(|open| open.read_only),
            fronts: disk.fronts.clone(),
        };
        self.disks.lock().iter().map(entry).collect()
    }

    fn report(&self, minor: u16) -> Result<DiskReport> {
        self.with(minor, |disk| {
            let image =
                |open: &Open| ImageReport { image: open.image.text(), sectors_read: 0, sectors_written: 0 };
            Ok(DiskReport {
                minor,
                state: VbdState::Running,
                counters: None,
                in_flight: 3,
                stuck: 1,
                dropped: 0,
                requests: Vec::new(),
                images: disk.open.iter().map(image).collect(),
                beside: Vec::new(),
                blkif: Vec::new(),
                room: None,
            })
        })
    }
}

impl DiskHost for Double {
    fn stats(&self, minor: u16) -> Result<VbdStats> {
        self.with(minor, |disk| {
            let name = disk.open.as_ref().map(|open| open.image.text());
            Ok(VbdStats { name, secs: [8, 16], ..VbdStats::default() })
        })
    }

    fn connect_ring(&self, _minor: u16, _ring: &Blkif) -> Result<()> {
        Err(ControlError::new(Errno::ENOSYS, "the double has no rings"))
    }

    fn disconnect_ring(&self, _minor: u16, _ring: &Blkif) -> Result<()> {
        Err(ControlError::new(Errno::ENOSYS, "the double has no rings"))
    }

    fn is_empty(&self) -> bool {
        self.disks.lock().is_empty()
    }

    fn log(&self, line: &str) {
        self.log.lock().push(line.to_owned());
    }
}

const ID: i32 = 77;

/// Longer than a busy host keeps a client or the server from going on.
const LONGEST: Duration = Duration::from_secs(60);

/// For tests that wait until a limit is over.
fn quick() -> Limits {
    Limits { read: Duration::from_secs(1), idle: Duration::from_secs(2), ..Limits::default() }
}

/// For all others: a client that a busy host keeps waiting is not cut off.
fn lenient() -> Limits {
    Limits { read: LONGEST, write: LONGEST, idle: LONGEST, ..Limits::default() }
}

/// Runs a server on a socket of its own beside `test`, then ends it; the test bounds itself by the clients'
/// deadlines.
fn with_server(limits: Limits, test: impl FnOnce(&RunDir, &Double)) -> Ended {
    run_server(limits, false, test)
}

/// The same with a server that `test` makes end. The client has its answer a moment before the server has taken notice.
fn with_server_that_ends(limits: Limits, test: impl FnOnce(&RunDir, &Double)) -> Ended {
    run_server(limits, true, test)
}

fn run_server(limits: Limits, ends: bool, test: impl FnOnce(&RunDir, &Double)) -> Ended {
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
        let asked = Instant::now();
        while ends && outcome.is_ok() && !server.is_finished() && asked.elapsed() < LONGEST {
            thread::sleep(Duration::from_millis(1));
        }
        drop(stop);
        let ended = server.join().expect("no panic in the server");
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ended
    })
}

fn longest() -> Option<Duration> {
    Some(LONGEST)
}

#[test]
fn a_disk_lives_its_life_over_the_tapdisk_protocol() {
    let ended = with_server_that_ends(lenient(), |run, host| {
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
        let seen = host.disks.lock()[&3].open.clone().expect("open");
        assert_eq!(
            seen,
            Open {
                read_only: true,
                secondary: Some("nbd:/s".into()),
                timeout_s: Some(30),
                log: Some("/sr/a.cbtlog".into()),
                default_nbd: true,
                ..Open::of(3, ImageSource::Leaf("vhd:/a.vhd".into()))
            }
        );
        assert_eq!(host.disks.lock()[&3].key, Some(Key(vec![7; 32])));
        assert_eq!(client.open(3, &open).expect_err("twice").errno, Errno::EALREADY);
        assert_eq!(client.disk_info(3), Ok(INFO));
        client.pause(3, longest()).expect("paused");
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
        client.close(3, false, longest()).expect("closed");
        client.detach(3).expect("detached");
    });
    assert_eq!(ended, Ended::Empty);
}

#[test]
fn the_reason_reaches_the_client_of_tapdisks_protocol() {
    with_server(lenient(), |run, _| {
        let error = Client::new(run, ID).detach(5).expect_err("no disk");
        assert_eq!(error.errno, Errno::ENODEV);
        assert!(error.message.contains("there is no disk 5; attach it first"), "{error}");
    });
}

#[test]
fn questions_are_answered_while_a_pause_waits_and_changes_take_turns() {
    with_server(lenient(), |run, host| {
        let client = Client::new(run, ID);
        client.attach(1).expect("attached");
        client.attach(2).expect("attached");
        host.busy.store(true, Ordering::SeqCst);
        thread::scope(|scope| {
            let pause = scope.spawn(|| client.pause(1, longest()));
            while host.inside.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            let other = scope.spawn(|| client.pause(2, longest()));
            assert_eq!(client.list().expect("listed").len(), 2);
            assert!(client.stats(1).is_ok());
            assert!(client.pid().is_ok());
            let mut own = OwnClient::connect(run, ID).expect("greeted");
            let listed = own.call(&command::List {}, &[], longest()).expect("listed");
            assert_eq!(listed.len(), 2);
            assert!(!pause.is_finished() && !other.is_finished());
            host.busy.store(false, Ordering::SeqCst);
            assert_eq!(pause.join().expect("no panic"), Ok(()));
            assert_eq!(other.join().expect("no panic"), Ok(()));
        });
    });
}

#[test]
fn a_pause_whose_client_left_is_given_up() {
    with_server(lenient(), |run, host| {
        let client = Client::new(run, ID);
        client.attach(1).expect("attached");
        host.busy.store(true, Ordering::SeqCst);
        let error = client.pause(1, Some(Duration::from_millis(50))).expect_err("too slow");
        assert_eq!(error.errno, Errno::ETIMEDOUT);
        let begun = Instant::now();
        while host.gone.load(Ordering::SeqCst) == 0 {
            assert!(begun.elapsed() < LONGEST, "the pause still waits");
            thread::yield_now();
        }
    });
}

#[test]
fn too_many_that_wait_are_sent_away() {
    let limits = Limits { waiting: 2, ..lenient() };
    with_server(limits, |run, host| {
        let client = Client::new(run, ID);
        client.attach(1).expect("attached");
        host.busy.store(true, Ordering::SeqCst);
        thread::scope(|scope| {
            let pauses: Vec<_> = (0..4).map(|_| scope.spawn(|| client.pause(1, longest()))).collect();
            let begun = Instant::now();
            while pauses.iter().filter(|pause| pause.is_finished()).count() < 2 {
                assert!(begun.elapsed() < LONGEST, "no client was refused");
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
    let ended = with_server_that_ends(lenient(), |run, host| {
        let mut own = OwnClient::connect(run, ID).expect("greeted");
        assert_eq!((own.hello().version, own.hello().pid), (1, std::process::id()));
        let mut ask = |command: Command| -> Result<Value> {
            own.call_all(&[command], longest()).map(|mut answers| answers.remove(0))
        };
        ask(command::Attach { minor: 4 }.into()).expect("attached");
        let image = ImageSource::Leaf("vhd:/a".into());
        let open = |image| Command::from(Open { read_only: true, ..Open::of(4, image) });
        assert_eq!(
            ask(open(ImageSource::Leaf("vhd:relative".into()))).expect_err("relative").errno,
            Errno::EINVAL
        );
        assert_eq!(ask(open(image)).expect("open")["sectors"], 2048);
        assert!(!host.disks.lock()[&4].open.as_ref().expect("open").default_nbd);
        ask(command::Pause { minor: 4 }.into()).expect("paused");
        assert_eq!(ask(command::List {}.into()).expect("listed")[0]["state"], "paused");
        ask(command::Resume { minor: 4, image: None, secondary: None, log: None }.into()).expect("resumed");
        let front =
            Front::NbdUnix { path: "/s".into(), listener: None, export: String::new(), read_only: false };
        let vbd = Some(VbdId { domid: 5, devid: 51712 });
        let added = ask(command::FrontAdd { minor: 4, front, vbd }.into()).expect("added");
        assert_eq!((&added["front"]["kind"], &added["vbd"]["devid"]), (&"nbd-unix".into(), &51712.into()));
        assert_eq!(
            ask(command::FrontList { minor: 4 }.into()).expect("listed").as_array().map(Vec::len),
            Some(1)
        );
        ask(command::FrontRemove { minor: 4, front: 1, force: false }.into()).expect("removed");
        let error = ask(command::FrontRemove { minor: 4, front: 1, force: false }.into()).expect_err("gone");
        assert_eq!((error.errno, error.message.as_str()), (Errno::ENOENT, "disk 4 has no front end 1"));
        let error = ask(command::FrontFollow { minor: 4, front: 1 }.into()).expect_err("nothing came along");
        assert_eq!(error.errno, Errno::EINVAL);
        ask(command::SetPolling { minor: 4, max_us: 50, idle_percent: 30 }.into()).expect("set");
        assert_eq!(host.disks.lock()[&4].polling, Some(Polling { max_us: 50, idle_percent: 30 }));
        assert_eq!(ask(command::Stats { minor: Some(4) }.into()).expect("stats")["in_flight"], 3);
        assert_eq!(
            ask(command::Stats { minor: None }.into()).expect("stats").as_array().map(Vec::len),
            Some(1)
        );
        assert_eq!(ask(command::DiskInfo { minor: 4 }.into()).expect("info")["sector_size"], 512);
        let error = ask(command::Close { minor: 9, force: true }.into()).expect_err("no disk");
        assert_eq!(error.next.as_deref(), Some("attach it first"));
        ask(command::Quit { force: false }.into()).expect("ends");
    });
    assert_eq!(ended, Ended::Quit);
}

#[test]
fn descriptors_come_along_and_are_closed_when_no_command_takes_them() {
    with_server(lenient(), |run, host| {
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
        let add = FrontAdd { minor: 0, front, vbd: None };
        let error = own.call(&add, &[], longest()).expect_err("none came");
        assert_eq!(error.errno, Errno::EINVAL);
        own.call(&add, &[theirs.as_fd()], longest()).expect("added");
        assert_eq!(host.disks.lock()[&0].fd_count, 1);
        own.call(&command::List {}, &[theirs.as_fd(), theirs.as_fd()], longest()).expect("listed");
        drop(theirs);
        ours.set_read_timeout(longest()).expect("set");
        let mut said = String::new();
        ours.read_to_string(&mut said).expect("all copies at the other end are closed");
        assert_eq!(said, "reached");
    });
}

fn raw(run: &RunDir) -> UnixStream {
    let stream = UnixStream::connect(run.socket(ID)).expect("connected");
    stream.set_read_timeout(longest()).expect("set");
    stream
}

#[test]
fn our_protocol_wants_a_greeting_and_answers_nonsense() {
    with_server(lenient(), |run, _| {
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
        let mut random = Random::new(1);
        for number in (0..40u16).chain([u16::MAX]) {
            let mut bytes = vec![0; MESSAGE_LEN];
            random.fill(&mut bytes);
            bytes[..2].copy_from_slice(&number.to_ne_bytes());
            if number == MessageKind::Exit as u16 {
                continue;
            }
            // A client that a busy host keeps from its first byte for longer than the limit has no answer.
            let begun = Instant::now();
            let mut answer = Vec::new();
            while answer.is_empty() {
                assert!(begun.elapsed() < LONGEST, "type {number} was not answered");
                let mut stream = raw(run);
                if stream.write_all(&bytes).is_ok() {
                    let _ = stream.read_to_end(&mut answer);
                }
            }
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
            // In one piece: between two, a busy host might take longer than the limit.
            stream.write_all(&[&open.encode().expect("fits")[..], trailing].concat()).expect("sent");
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
        assert!(host.disks.lock()[&0].open.is_none());
    });
}

#[test]
fn idle_connections_give_their_place_to_others() {
    // Ten that are silent, three at a time: the client that asks waits for the last of them.
    let limits = Limits { connections: 3, read: Duration::from_millis(300), ..quick() };
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
    with_server(lenient(), |run, _| {
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
