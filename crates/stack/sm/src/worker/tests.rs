//! Workers that answer, die, are silent and talk nonsense. They are threads here, so that a test decides what they do.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tapio_fixtures::waiting;
use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::frame::{FRAME_LEN_MAX, Frames, encode};
use super::message::{Answer, FromWorker, Question, Task, ToWorker};
use super::process::{Launch, Process};
use super::remote::{Options, drivers};
use super::{is_unfinished, rights, serve};
use crate::traits::{Config, Ctx, LiveDisk, NewVdi, OpenSpec, Sr, SrDriver};

/// What a worker does with the link that it got.
type Act = fn(&mut UnixStream);

/// A worker as a thread. `acts` are what workers do in turn; once they are used up they serve.
#[derive(Default)]
struct Threads {
    acts: Mutex<Vec<Act>>,
    started: AtomicU32,
    last: Mutex<Option<(UnixStream, Arc<AtomicBool>)>>,
    /// Whether one that is killed ends.
    is_stuck: Arc<AtomicBool>,
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Threads")
    }
}

#[derive(Debug)]
struct Thread {
    number: u32,
    control: UnixStream,
    is_killed: AtomicBool,
    has_ended: Arc<AtomicBool>,
    is_stuck: Arc<AtomicBool>,
}

impl Process for Thread {
    fn id(&self) -> u32 {
        self.number
    }

    fn kill(&self) {
        self.is_killed.store(true, Ordering::SeqCst);
        let _ = self.control.shutdown(std::net::Shutdown::Both);
    }

    fn has_ended(&self) -> bool {
        let ends = self.is_killed.load(Ordering::SeqCst) || self.has_ended.load(Ordering::SeqCst);
        ends && !self.is_stuck.load(Ordering::SeqCst)
    }
}

impl Threads {
    /// Ends the worker that was started last, and waits for that.
    fn end_last(&self) {
        let (control, has_ended) = self.last.lock().unwrap().take().expect("one was started");
        let _ = control.shutdown(std::net::Shutdown::Both);
        let until = Instant::now() + Duration::from_secs(60);
        while !has_ended.load(Ordering::SeqCst) {
            assert!(Instant::now() < until, "a worker goes on without its daemon");
            std::thread::yield_now();
        }
    }
}

impl Launch for Threads {
    fn launch(&self, control: OwnedFd) -> io::Result<Box<dyn Process>> {
        let control = UnixStream::from(control);
        let act = {
            let mut acts = self.acts.lock().unwrap();
            if acts.is_empty() { None } else { Some(acts.remove(0)) }
        };
        let has_ended = Arc::new(AtomicBool::new(false));
        *self.last.lock().unwrap() = Some((control.try_clone()?, Arc::clone(&has_ended)));
        let (other, ended) = (control.try_clone()?, Arc::clone(&has_ended));
        std::thread::spawn(move || {
            match act {
                None => {
                    let dir = std::env::temp_dir().join("tapio-worker-tests");
                    serve(&other, crate::registry(&dir.join("mnt"), &dir.join("run")), |_| ());
                }
                Some(act) => {
                    if let Ok(Some((link, _))) = rights::receive(&other) {
                        act(&mut UnixStream::from(link));
                    }
                }
            }
            ended.store(true, Ordering::SeqCst);
        });
        let number = self.started.fetch_add(1, Ordering::SeqCst) + 1;
        let (is_killed, is_stuck) = (AtomicBool::new(false), Arc::clone(&self.is_stuck));
        Ok(Box::new(Thread { number, control, is_killed, has_ended, is_stuck }))
    }
}

#[derive(Default)]
struct Caller {
    is_cancelled: AtomicBool,
    told: AtomicUsize,
    disk: Option<Arc<Disk>>,
}

#[derive(Default)]
struct Disk(Mutex<Vec<String>>);

struct Live(Arc<Disk>);

impl Ctx for Caller {
    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::SeqCst)
    }

    fn progress(&self, _: f64) {
        self.told.fetch_add(1, Ordering::SeqCst);
    }

    fn live(&self, _: Uuid) -> Option<Box<dyn LiveDisk>> {
        self.disk.clone().map(|disk| Box::new(Live(disk)) as Box<dyn LiveDisk>)
    }

    fn step(&self, _: &'static str) {}
}

impl LiveDisk for Live {
    fn pause(&self) -> Result<(), ApiError> {
        self.0.0.lock().unwrap().push("pause".into());
        Ok(())
    }

    fn resume(&self, disk: &OpenSpec) -> Result<(), ApiError> {
        self.0.0.lock().unwrap().push(format!("resume {}", disk.chain.layers.len()));
        Ok(())
    }

    fn access(&self) -> Access {
        Access::ReadWrite
    }

    fn grow(&self, bytes: u64) -> Result<(), ApiError> {
        self.0.0.lock().unwrap().push(format!("grow {bytes}"));
        Ok(())
    }
}

struct Rig {
    threads: Arc<Threads>,
    driver: Arc<dyn SrDriver>,
    dir: tempfile::TempDir,
    sr: Uuid,
}

impl Rig {
    fn new(limit: Duration, acts: &[Act]) -> Self {
        let threads = Arc::new(Threads { acts: Mutex::new(acts.to_vec()), ..Threads::default() });
        let options = Options { launch: Arc::clone(&threads) as Arc<dyn Launch>, limit };
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sr")).unwrap();
        let local = crate::registry(&dir.path().join("mnt"), &dir.path().join("run"));
        let driver =
            drivers(local, &options).into_iter().find(|driver| driver.info().sr_type == "file").unwrap();
        Self { threads, driver, dir, sr: Uuid::new_v4() }
    }

    fn config(&self) -> Config {
        Config::from([("location".to_owned(), self.dir.path().join("sr").display().to_string())])
    }

    fn attach(&self) -> Result<Box<dyn Sr>, ApiError> {
        self.driver.attach(&Caller::default(), self.sr, &self.config())
    }

    fn started(&self) -> u32 {
        self.threads.started.load(Ordering::SeqCst)
    }
}

const LIMIT: Duration = Duration::from_millis(300);

fn new_vdi() -> NewVdi {
    NewVdi {
        uuid: Uuid::new_v4(),
        virtual_size: 4 << 20,
        sm_config: BTreeMap::new(),
        name_label: String::new(),
        name_description: String::new(),
    }
}

/// Reads the call and says nothing, until the daemon gives up.
fn is_silent(link: &mut UnixStream) {
    let mut piece = [0; 1024];
    while link.read(&mut piece).is_ok_and(|len| len > 0) {}
}

fn hears(link: &mut UnixStream) {
    let mut piece = [0; 1024];
    let _ = link.read(&mut piece);
}

fn dies(link: &mut UnixStream) {
    hears(link);
}

fn talks_nonsense(link: &mut UnixStream) {
    hears(link);
    let _ = link.write_all(b"\x05\0\0\0hello");
    is_silent(link);
}

fn announces_too_much(link: &mut UnixStream) {
    hears(link);
    let _ = link.write_all(&u32::MAX.to_le_bytes());
    is_silent(link);
}

/// Longer than a busy host keeps a thread from a processor.
const PROGRESS_LIMIT: Duration = Duration::from_secs(1);

/// Works for twice as long as an attach may be silent, and says so a hundred times in that span.
fn makes_progress(link: &mut UnixStream) {
    hears(link);
    let began = Instant::now();
    while began.elapsed() < PROGRESS_LIMIT * 8 {
        let _ = link.write_all(&encode(&FromWorker::Progress(0.5)).unwrap());
        std::thread::sleep(PROGRESS_LIMIT / 12);
    }
    let _ = link.write_all(&encode(&FromWorker::Done(Ok(Answer::Nothing))).unwrap());
    is_silent(link);
}

#[test]
fn messages_come_whole_however_they_are_cut() {
    let sent = [
        ToWorker::Begin(Task::Create(new_vdi())),
        ToWorker::Cancel,
        ToWorker::Begin(Task::Attach {
            driver: "file".into(),
            sr: Uuid::new_v4(),
            config: Config::from([("password".into(), "secret".into())]),
        }),
    ];
    let bytes: Vec<u8> = sent.iter().flat_map(|message| encode(message).unwrap()).collect();
    for step in [1, 3, 7, bytes.len()] {
        let (mut frames, mut got) = (Frames::default(), Vec::new());
        for piece in bytes.chunks(step) {
            frames.feed(piece);
            while let Some(message) = frames.take::<ToWorker>().unwrap() {
                got.push(encode(&message).unwrap());
            }
        }
        assert_eq!(got.concat(), bytes);
        assert!(frames.is_empty());
    }
    assert!(!format!("{:?}", sent[2]).contains("secret"), "a configuration may hold passwords");
}

#[test]
fn a_message_that_is_too_long_is_neither_sent_nor_awaited() {
    let huge = ToWorker::Begin(Task::Introduce { vdi: Uuid::nil(), location: "x".repeat(FRAME_LEN_MAX) });
    assert!(encode(&huge).is_err());
    let mut frames = Frames::default();
    frames.feed(&(u32::try_from(FRAME_LEN_MAX).unwrap() + 1).to_le_bytes());
    assert!(frames.take::<ToWorker>().is_err());
}

#[test]
fn an_sr_works_through_a_worker_as_it_does_without() {
    let rig = Rig::new(Duration::from_secs(60), &[]);
    let caller = Caller::default();
    rig.driver.create(&caller, rig.sr, &rig.config(), 0).unwrap();
    let sr = rig.attach().unwrap();
    let made = sr.create(&caller, &new_vdi()).unwrap();
    assert_eq!(sr.scan(&caller).unwrap(), vec![made.clone()]);
    assert_eq!(sr.vdi(&caller, made.uuid).unwrap(), made);
    assert_eq!(sr.activate(&caller, made.uuid, Access::ReadWrite).unwrap().chain.layers.len(), 1);
    sr.deactivate(&caller, made.uuid).unwrap();
    assert!(sr.stat(&caller).unwrap().physical_size > 0);
    // An error of the driver's is the one that it would be here, and says that nothing is half done.
    let gone = sr.vdi(&caller, Uuid::nil()).unwrap_err();
    assert_eq!(gone.code, "VDI_MISSING");
    assert!(!is_unfinished(&gone));
    sr.destroy(&caller, made.uuid).unwrap();
    assert!(sr.scan(&caller).unwrap().is_empty());
    assert_eq!(rig.started(), 2, "one made the SR, one has it attached");
    assert!(sr.detach(&caller).is_ok());
}

#[test]
fn a_driver_asks_about_running_disks_through_its_worker() {
    let rig = Rig::new(Duration::from_secs(60), &[]);
    let disk = Arc::new(Disk::default());
    let caller = Caller { disk: Some(Arc::clone(&disk)), ..Caller::default() };
    rig.driver.create(&caller, rig.sr, &rig.config(), 0).unwrap();
    let sr = rig.attach().unwrap();
    let made = sr.create(&caller, &new_vdi()).unwrap();
    let _ = sr.fork(&caller, made.uuid, Uuid::new_v4(), crate::ForkKind::Single);
    assert!(sr.resize(&caller, made.uuid, 8 << 20).is_ok());
    let heard = disk.0.lock().unwrap().clone();
    assert!(heard.iter().any(|word| word.starts_with("grow") || word == "pause"), "{heard:?}");
}

#[test]
fn a_worker_that_dies_is_an_error_and_the_next_call_has_another() {
    let rig = Rig::new(Duration::from_secs(60), &[dies]);
    let error = rig.attach().err().expect("it died");
    assert!(is_unfinished(&error) && error.params[1].contains("'attach'"), "{error}");
    let sr = rig.attach().unwrap();
    assert!(sr.scan(&Caller::default()).unwrap().is_empty());
    assert_eq!(rig.started(), 2);
}

#[test]
fn a_silent_worker_is_killed_and_the_error_says_what_hangs() {
    let rig = Rig::new(LIMIT, &[is_silent]);
    let began = Instant::now();
    let error = rig.attach().err().expect("nothing answers");
    assert!(began.elapsed() >= LIMIT * 4, "attaching may take four times as long");
    let text = &error.params[1];
    assert!(text.contains(&rig.sr.to_string()) && text.contains("'attach' for 1 s"), "{text}");
    assert!(text.contains("was killed") && text.contains("see to the storage"), "{text}");
    assert!(is_unfinished(&error));
    rig.attach().expect("the storage is back");
}

#[test]
fn one_that_cannot_be_killed_keeps_others_from_its_sr_until_it_ends() {
    let rig = Rig::new(LIMIT, &[is_silent]);
    rig.threads.is_stuck.store(true, Ordering::SeqCst);
    let error = rig.attach().err().expect("nothing answers");
    assert!(error.params[1].contains("was killed and does not end"), "{error}");
    let refused = rig.attach().err().expect("its storage is held");
    assert!(refused.params[1].contains("process 1 waits in the kernel"), "{refused}");
    assert!(refused.params[1].contains(&rig.sr.to_string()), "{refused}");
    assert_eq!(rig.started(), 1, "that is known without a second process that waits for the same storage");
    // Another SR is not concerned.
    let other = rig.dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let config = Config::from([("location".to_owned(), other.display().to_string())]);
    rig.driver.attach(&Caller::default(), Uuid::new_v4(), &config).map(drop).expect("it is another one");
    rig.threads.is_stuck.store(false, Ordering::SeqCst);
    rig.attach().expect("it has ended");
}

#[test]
fn progress_is_a_sign_of_life() {
    let rig = Rig::new(PROGRESS_LIMIT, &[makes_progress]);
    let caller = Caller::default();
    rig.driver.create(&caller, rig.sr, &rig.config(), 0).expect("it was never silent for long");
    assert!(caller.told.load(Ordering::SeqCst) > 1);
}

#[test]
fn nonsense_ends_the_worker() {
    for act in [talks_nonsense as Act, announces_too_much] {
        let rig = Rig::new(Duration::from_secs(60), &[act]);
        let error = rig.attach().err().expect("that was no message");
        assert!(error.params[1].contains("nonsense"), "{error}");
        rig.attach().expect("another one is as it should be");
    }
}

#[test]
fn a_cancelled_call_of_a_worker_that_does_not_listen_ends_all_the_same() {
    let rig = Rig::new(Duration::from_secs(600), &[is_silent]);
    let caller = Caller { is_cancelled: AtomicBool::new(true), ..Caller::default() };
    let began = Instant::now();
    let error = rig.driver.attach(&caller, rig.sr, &rig.config()).err().expect("cancelled");
    assert_eq!(error.code, "TASK_CANCELLED");
    assert!(began.elapsed() < Duration::from_secs(300));
}

#[test]
fn calls_that_wait_for_one_attach_share_what_comes_of_it() {
    static ALL_WAIT: AtomicBool = AtomicBool::new(false);
    fn dies_when_all_wait(link: &mut UnixStream) {
        hears(link);
        while !ALL_WAIT.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let rig = Rig::new(Duration::from_secs(60), &[]);
    let sr = rig.attach().unwrap();
    // The worker of the SR dies, and so does the next one.
    rig.threads.acts.lock().unwrap().push(dies_when_all_wait as Act);
    rig.threads.end_last();
    let callers: [waiting::Caller; 6] = Default::default();
    let failed = std::thread::scope(|scope| {
        let call =
            |caller: &waiting::Caller| caller.calls(|| sr.stat(&Caller::default()).expect_err("it died"));
        let calls: Vec<_> = callers.iter().map(|caller| scope.spawn(move || call(caller))).collect();
        callers.iter().for_each(waiting::Caller::until_it_waits);
        ALL_WAIT.store(true, Ordering::SeqCst);
        calls.into_iter().map(|call| call.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(failed.iter().all(|error| error.params[1].contains("'attach'")), "{failed:?}");
    assert_eq!(rig.started(), 2, "one of them tried, for all");
    sr.stat(&Caller::default()).expect("the storage is back");
}

#[test]
fn a_question_is_no_answer_to_a_call() {
    fn asks_about_nothing(link: &mut UnixStream) {
        hears(link);
        let _ = link.write_all(&encode(&FromWorker::Ask(Question::Pause { disk: 7 })).unwrap());
        let mut frames = Frames::default();
        let mut piece = [0; 1024];
        let len = link.read(&mut piece).unwrap_or(0);
        frames.feed(&piece[..len]);
        let refused =
            matches!(frames.take::<ToWorker>(), Ok(Some(ToWorker::Reply(super::Reply::Done(Err(_))))));
        let done = if refused { Ok(Answer::Nothing) } else { Err(ApiError::internal("it was paused")) };
        let _ = link.write_all(&encode(&FromWorker::Done(done)).unwrap());
        is_silent(link);
    }
    let rig = Rig::new(Duration::from_secs(60), &[asks_about_nothing]);
    rig.driver.create(&Caller::default(), rig.sr, &rig.config(), 0).expect("it was refused, and went on");
}
