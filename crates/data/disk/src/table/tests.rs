use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use tapio_control::command::{
    self, Attach, Call, Caller, Close, Detach, DiskCommand, Done, FrontAdd, FrontList, FrontRemove,
    MirrorPivot, Pause, Quit, Resume, SecretName, Stats,
};
use tapio_control::{DiskReport, DiskReports, Errno, SnapshotReport};
use tapio_ring::dropped::{Dropped, OnDrop, set_on_drop};
use tapio_stat::{Stages, vbds};

use super::*;

/// A data plane without data: requests exist while `busy` is set.
#[derive(Default)]
struct Double {
    busy: Arc<AtomicBool>,
    fail_resume: Arc<AtomicBool>,
    fail_front: Arc<AtomicBool>,
    closed: Arc<AtomicU32>,
    moved: Arc<Mutex<Option<Vec<LayerSpec>>>>,
}

struct DoubleDisk {
    busy: Arc<AtomicBool>,
    fail_resume: Arc<AtomicBool>,
    fail_front: Arc<AtomicBool>,
    closed: Arc<AtomicU32>,
    moved: Arc<Mutex<Option<Vec<LayerSpec>>>>,
    stats: Mutex<DiskStats>,
    image: Mutex<Option<String>>,
    taps: Mutex<TapRequest>,
}

impl Plane for Double {
    type Disk = DoubleDisk;

    fn open(&self, spec: &OpenSpec<'_>, stats: DiskStats) -> Result<DoubleDisk> {
        if spec.key.is_some_and(|key| key.0 != [7; 32]) {
            return Err(ControlError::new(Errno::EINVAL, "another key"));
        }
        if spec.command.image.text().contains("missing") {
            return Err(ControlError::new(
                Errno::ENOENT,
                format!("{} does not exist", spec.command.image.text()),
            ));
        }
        Ok(DoubleDisk {
            busy: Arc::clone(&self.busy),
            fail_resume: Arc::clone(&self.fail_resume),
            fail_front: Arc::clone(&self.fail_front),
            closed: Arc::clone(&self.closed),
            moved: Arc::clone(&self.moved),
            stats: Mutex::new(stats),
            image: Mutex::new(Some(spec.command.image.text())),
            taps: Mutex::new(spec.taps.clone()),
        })
    }
}

impl DoubleDisk {
    fn wait(&self, is_cancelled: &dyn Fn() -> bool) -> Result<()> {
        let begun = Instant::now();
        while self.busy.load(Ordering::SeqCst) && begun.elapsed().as_secs() < 60 {
            if is_cancelled() {
                return Err(ControlError::new(Errno::ECANCELED, "no caller waits"));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Handle<Grow> for DoubleDisk {
    fn handle(&self, command: Grow, _: &mut Call<'_>) -> Result<DiskInfo> {
        Ok(DiskInfo { sectors: command.len / 512, ..self.info() })
    }
}

impl Handle<Snapshot> for DoubleDisk {
    fn handle(&self, command: Snapshot, _: &mut Call<'_>) -> Result<SnapshotReport> {
        Ok(SnapshotReport {
            leaf: format!("vhd:{}", command.leaf.display()),
            parent: self.image.lock().clone().unwrap_or_default(),
            stalled_us: 1,
        })
    }
}

impl Handle<SwapLeaf> for DoubleDisk {
    fn handle(&self, command: SwapLeaf, _: &mut Call<'_>) -> Result<SnapshotReport> {
        let [leaf, parent] = [0, 1].map(|at| command.images[at].to_string());
        Ok(SnapshotReport { leaf, parent, stalled_us: 1 })
    }
}

impl PlaneDisk for DoubleDisk {
    fn moved(&self) -> Option<Vec<LayerSpec>> {
        self.moved.lock().take()
    }

    fn info(&self) -> DiskInfo {
        DiskInfo { sectors: 4096, sector_size: 512, info: 0 }
    }

    fn status(&self) -> Result<PlaneStatus> {
        let image = self.image.lock();
        let standby = self.taps.lock().secondary.clone();
        let layer = |image: &String| PlaneImage {
            kind: ImageKind::Raw,
            path: image.split_once(':').map_or_else(String::new, |(_, path)| path.to_owned()),
            hits: [8, 0],
            fail: [0, 0],
        };
        Ok(PlaneStatus {
            paused: image.is_none(),
            in_flight: 2,
            stuck: 0,
            oldest: Vec::new(),
            images: image.iter().map(layer).collect(),
            redirected: 0,
            on_standby: false,
            mirror_lost: false,
            standby_waited: standby.is_some_and(|standby| standby.marker.is_some()),
            rings: Vec::new(),
            room: None,
        })
    }

    fn pause(&self, is_cancelled: &dyn Fn() -> bool) -> Result<()> {
        self.wait(is_cancelled)?;
        *self.image.lock() = None;
        Ok(())
    }

    fn resume(&self, image: &ImageSource, taps: &TapRequest) -> Result<()> {
        if self.fail_resume.load(Ordering::SeqCst) {
            return Err(ControlError::new(Errno::EIO, "the image cannot be read"));
        }
        *self.image.lock() = Some(image.text());
        *self.taps.lock() = taps.clone();
        Ok(())
    }

    fn close(&self, force: bool) -> Result<()> {
        assert!(force || self.image.lock().is_none(), "closed without a drain");
        self.closed.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn publish(&self, pages: Box<VbdPages>) -> Result<usize> {
        let stats = &mut *self.stats.lock();
        let slot = stats.add_vbd(pages).map_err(|_| ControlError::new(Errno::E2BIG, "no slot"))?;
        stats.submitted_by(slot, RequestKind::Read, 4096);
        stats.completed_by(slot, RequestKind::Read, 4096, &Stages::default(), true);
        Ok(slot)
    }

    fn withdraw(&self, slot: usize) -> Option<Box<VbdPages>> {
        self.stats.lock().remove_vbd(slot)
    }

    fn front_add(&self, _id: u32, front: Front, _fds: Vec<OwnedFd>, _slot: usize) -> Result<Front> {
        match self.fail_front.load(Ordering::SeqCst) {
            true => Err(ControlError::new(Errno::EACCES, "cannot bind")),
            false => Ok(front),
        }
    }

    fn front_remove(&self, _id: u32) -> Result<()> {
        Ok(())
    }

    fn connections(&self, id: u32) -> u32 {
        id * 10
    }

    fn front_claimed(&self, _id: u32) -> bool {
        false
    }

    fn front_follow(&self, id: u32, _news: UnixStream) -> Result<()> {
        Err(ControlError::new(Errno::ENOENT, format!("there is no front end {id}")))
    }

    fn front_admit(&self, id: u32, _names: &[SecretName], _cut: &[SecretName]) -> Result<()> {
        Err(ControlError::new(Errno::ENOENT, format!("there is no front end {id}")))
    }

    fn mirror_pivot(&self) -> Result<(ImageSource, MirrorPivoted)> {
        Err(ControlError::new(Errno::EOPNOTSUPP, "the double has no mirrors"))
    }
}

struct Gone;
impl Caller for Gone {
    fn gone(&self) -> bool {
        true
    }
}

/// Commands of a client that waits for the answer, and of one that leaves.
impl Table<Double> {
    fn ask<C: DiskCommand>(&self, command: C) -> Result<C::Reply>
    where
        Self: Handle<C>,
    {
        Handle::handle(self, command, &mut Call::of_itself())
    }

    fn ask_and_go<C: DiskCommand>(&self, command: C) -> Result<C::Reply>
    where
        Self: Handle<C>,
    {
        Handle::handle(self, command, &mut Call::of(&Gone))
    }

    fn full_stats(&self, minor: u16) -> DiskReport {
        match self.ask(Stats { minor: Some(minor) }) {
            Ok(DiskReports::One(report)) => *report,
            other => panic!("{other:?}"),
        }
    }
}

struct Setting {
    table: Table<Double>,
    run: RunDir,
    shm: ShmRoot,
    minor: u16,
    _dir: tempfile::TempDir,
}

/// A table with one attached disk.
fn setting() -> Setting {
    let dir = tempfile::tempdir().expect("temporary directory");
    let (run, shm) = (RunDir::new(dir.path().join("run")), ShmRoot::new(dir.path()));
    let (minor, _) = run.minors().allocate().expect("free");
    let table = Table::new(Double::default(), run.clone(), shm.clone());
    table.ask(Attach { minor }).expect("attached");
    Setting { table, run, shm, minor, _dir: dir }
}

fn image(minor: u16, text: &str) -> Open {
    Open::of(minor, ImageSource::Leaf(text.into()))
}

fn unix(minor: u16, path: &str, vbd: Option<VbdId>) -> FrontAdd {
    let front = Front::NbdUnix { path: path.into(), listener: None, export: String::new(), read_only: false };
    FrontAdd { minor, front, vbd }
}

fn errno<T: std::fmt::Debug>(result: Result<T>) -> Errno {
    result.expect_err("must fail").errno
}

#[test]
fn the_documented_errors_come_in_every_state() {
    let Setting { table, run, minor, .. } = &setting();
    assert_eq!(errno(table.ask(Attach { minor: *minor })), Errno::EEXIST);
    assert_eq!(errno(table.ask(Attach { minor: 9 })), Errno::ENOENT);
    assert_eq!(errno(table.ask(Attach { minor: MINOR_MAX })), Errno::EINVAL);
    assert_eq!(errno(table.ask(image(9, "vhd:/a"))), Errno::EINVAL);
    assert_eq!(errno(table.ask(image(*minor, "vhd:/missing"))), Errno::ENOENT);
    assert_eq!(errno(table.ask(image(*minor, "tar:/a"))), Errno::EINVAL);
    assert_eq!(errno(table.ask(Pause { minor: *minor })), Errno::ENODEV);
    assert_eq!(errno(table.ask(command::DiskInfo { minor: *minor })), Errno::ENODEV);
    assert_eq!(errno(table.ask(unix(*minor, "/s", None))), Errno::ENODEV);
    for result in [
        table.ask(Close { minor: 9, force: false }),
        table.ask(Detach { minor: 9 }),
        table.ask(Resume::of(9)),
    ] {
        assert_eq!(errno(result), Errno::ENODEV);
    }
    assert_eq!(
        table.ask(Close { minor: *minor, force: false }),
        Ok(Done {}),
        "closing what is not open is no error"
    );
    assert_eq!(errno(table.ask(Resume::of(*minor))), Errno::EINVAL);
    assert_eq!(table.list()[0].state.bits(), 0);
    table.ask(image(*minor, "vhd:/a")).expect("opens");
    assert_eq!(errno(table.ask(image(*minor, "vhd:/a"))), Errno::EALREADY);
    assert_eq!(errno(table.ask(Detach { minor: *minor })), Errno::EBUSY);
    assert_eq!(errno(table.ask(Resume::of(*minor))), Errno::EINVAL);
    assert_eq!(errno(run.minors().free(*minor)), Errno::EAGAIN);
    table.ask(Close { minor: *minor, force: false }).expect("closes");
    assert_eq!(table.list()[0].state.bits(), 0x2, "closed");
    table.ask(Detach { minor: *minor }).expect("detaches");
    assert!(table.is_empty());
    run.minors().free(*minor).expect("the number is free again");
}

#[test]
fn requests_that_would_lose_data_are_refused_and_the_others_granted() {
    let Setting { table, minor, .. } = &setting();
    for request in [
        (Open { secondary: Some("tar:/s".into()), ..image(*minor, "vhd:/a") }, Errno::EINVAL),
        (Open { standby: true, ..image(*minor, "vhd:/a") }, Errno::EINVAL),
    ] {
        assert_eq!(errno(table.ask(request.0)), request.1);
    }
    table.ask(image(*minor, "vhd:/a")).expect("opens");
}

#[test]
fn second_images_and_logs_reach_the_disk_and_are_given_anew_at_each_resume() {
    let Setting { table, minor, run, .. } = &setting();
    let second = |path: &str| Some(format!("vhd:{path}"));
    let request =
        Open { secondary: second("/s"), standby: true, log: Some("/l".into()), ..image(*minor, "vhd:/a") };
    table.ask(request).expect("opens");
    let plane = table.disk(*minor).expect("there").opened().expect("open");
    let marker = Some(run.enospc_marker(*minor));
    let standby = Secondary { image: ImageSource::Leaf("vhd:/s".into()), marker };
    assert_eq!(*plane.taps.lock(), TapRequest { secondary: Some(standby), log: Some("/l".into()) });
    table.ask(Pause { minor: *minor }).expect("pauses");
    assert_eq!(errno(table.ask(MirrorPivot { minor: *minor })), Errno::EINVAL);
    table.ask(Resume { secondary: second("/t"), ..Resume::of(*minor) }).expect("goes on");
    let mirror = Secondary { image: ImageSource::Leaf("vhd:/t".into()), marker: None };
    assert_eq!(*plane.taps.lock(), TapRequest { secondary: Some(mirror), log: None });
    assert_eq!(errno(table.ask(MirrorPivot { minor: *minor })), Errno::EOPNOTSUPP);
}

#[test]
fn a_standby_that_waits_stays_until_another_second_image_or_none_is_named() {
    let Setting { table, minor, run, .. } = &setting();
    let request = Open { secondary: Some("vhd:/s".into()), standby: true, ..image(*minor, "vhd:/a") };
    table.ask(request).expect("opens");
    let plane = table.disk(*minor).expect("there").opened().expect("open");
    let marker = Some(run.enospc_marker(*minor));
    let standby = Secondary { image: ImageSource::Leaf("vhd:/s".into()), marker };
    let again = |secondary: Option<&str>| {
        table.ask(Pause { minor: *minor }).expect("pauses");
        let secondary = secondary.map(str::to_string);
        table.ask(Resume { secondary, ..Resume::of(*minor) }).expect("goes on");
        plane.taps.lock().secondary.clone()
    };
    assert_eq!(again(None), Some(standby.clone()));
    assert_eq!(again(None), Some(standby));
    assert_eq!(again(Some("null")), None);
    assert_eq!(again(None), None);
}

#[test]
fn a_key_reaches_the_images() {
    let Setting { table, minor, .. } = &setting();
    let with_key = |byte| {
        let mut call = Call { key: Some(Key(vec![byte; 32])), ..Call::of_itself() };
        table.handle(image(*minor, "vhd:/a"), &mut call)
    };
    assert_eq!(errno(with_key(8)), Errno::EINVAL);
    with_key(7).expect("opens");
}

#[test]
fn a_disk_grows_while_it_runs() {
    let Setting { table, minor, .. } = &setting();
    assert_eq!(errno(table.ask(Grow { minor: *minor, len: 1 << 30 })), Errno::ENODEV);
    table.ask(image(*minor, "vhd:/a")).expect("opens");
    assert_eq!(table.ask(Grow { minor: *minor, len: 1 << 30 }).expect("grows").sectors, 1 << 21);
    table.ask(Pause { minor: *minor }).expect("pauses");
    let refused = table.ask(Grow { minor: *minor, len: 1 << 31 }).expect_err("it is paused");
    assert!(refused.errno == Errno::EINVAL && refused.to_string().contains("resume"), "{refused}");
}

#[test]
fn a_pause_can_be_left_and_seen_to_end() {
    let Setting { table, minor, .. } = &setting();
    let busy = Arc::clone(&table.plane.busy);
    table.ask(image(*minor, "vhd:/a")).expect("opens");
    busy.store(true, Ordering::SeqCst);
    assert_eq!(errno(table.ask_and_go(Pause { minor: *minor })), Errno::ECANCELED);
    assert_eq!(table.list()[0].state, VbdState::Pausing);
    assert_eq!(errno(table.ask(Resume::of(*minor))), Errno::EINVAL);
    busy.store(false, Ordering::SeqCst);
    let plane = table.disk(*minor).expect("there").opened().expect("open");
    plane.pause(&|| false).expect("the drain ends on its own");
    assert_eq!(table.list()[0].state, VbdState::Paused);
    assert_eq!(table.ask(Pause { minor: *minor }), Ok(Done {}), "twice is no error");
    assert_eq!(table.stats(*minor).expect("stats").images, []);
}

#[test]
fn a_disk_resumes_onto_another_image_or_says_why_not() {
    let Setting { table, minor, .. } = &setting();
    table.ask(image(*minor, "vhd:/a")).expect("opens");
    table.ask(Pause { minor: *minor }).expect("paused");
    table.plane.fail_resume.store(true, Ordering::SeqCst);
    let other = Resume { image: Some(ImageSource::Leaf("vhd:/b".into())), ..Resume::of(*minor) };
    assert_eq!(errno(table.ask(other.clone())), Errno::EIO);
    let listed = &table.list()[0];
    assert_eq!((listed.state.bits(), listed.image.as_deref()), (0x22a, Some("vhd:/a")));
    table.plane.fail_resume.store(false, Ordering::SeqCst);
    table.ask(other).expect("resumed");
    let listed = &table.list()[0];
    assert_eq!((listed.state.bits(), listed.image.as_deref()), (0, Some("vhd:/b")));
}

#[test]
fn front_ends_publish_the_disk_under_their_numbers() {
    let Setting { table, run, shm, minor, .. } = &setting();
    let published = || -> Vec<_> {
        vbds(shm).expect("listed").into_iter().map(|vbd| (vbd.id.domid, vbd.id.devid)).collect()
    };
    table.ask(Open { default_nbd: true, ..image(*minor, "vhd:/a") }).expect("opens");
    let fronts = table.ask(FrontList { minor: *minor }).expect("fronts");
    assert_eq!(fronts[0].front.address(), run.nbd_socket(std::process::id(), *minor).display().to_string());
    assert_eq!(fronts[0].connections, 10);
    assert_eq!(published(), [(0, u32::from(*minor))]);
    table.ask(unix(*minor, "/t", None)).expect("added");
    let guest = VbdId { domid: 5, devid: 51712 };
    let front = table.ask(unix(*minor, "/u", Some(guest))).expect("added");
    assert_eq!(published(), [(0, u32::from(*minor)), (5, 51712)]);
    assert_eq!(errno(table.ask(unix(*minor, "/u", None))), Errno::EADDRINUSE);

    table.ask(FrontRemove { minor: *minor, front: fronts[0].id, force: false }).expect("removed");
    assert_eq!(published().len(), 2, "another front end still has these numbers");
    table.ask(FrontRemove { minor: *minor, front: front.id, force: false }).expect("removed");
    assert_eq!(published(), [(0, u32::from(*minor))]);
    assert_eq!(errno(table.ask(FrontRemove { minor: *minor, front: front.id, force: false })), Errno::ENOENT);
    table.plane.fail_front.store(true, Ordering::SeqCst);
    assert_eq!(errno(table.ask(unix(*minor, "/v", Some(guest)))), Errno::EACCES);
    assert_eq!(published(), [(0, u32::from(*minor))], "a front end that failed is not published");
    table.ask(Close { minor: *minor, force: false }).expect("closes");
    assert_eq!(published(), []);
}

#[test]
fn numbers_that_another_process_has_are_refused_or_done_without() {
    let Setting { table, shm, minor, .. } = &setting();
    let guest = VbdId { domid: 5, devid: 51712 };
    let own = VbdId { domid: 0, devid: u32::from(*minor) };
    let others = [guest, own].map(|id| VbdPages::create(shm, 99_999_999, 0, id, false).expect("pages"));
    table.ask(image(*minor, "vhd:/a")).expect("opens");
    assert_eq!(errno(table.ask(unix(*minor, "/s", Some(guest)))), Errno::EEXIST);
    table.ask(unix(*minor, "/s", None)).expect("serves without being seen");
    assert!(vbds(shm).expect("listed").iter().all(|vbd| vbd.pid == 99_999_999));
    drop(others);
}

#[test]
fn a_disk_that_cannot_be_reached_does_not_stay_open() {
    let Setting { table, minor, .. } = &setting();
    table.plane.fail_front.store(true, Ordering::SeqCst);
    let open = Open { default_nbd: true, ..image(*minor, "vhd:/a") };
    assert_eq!(errno(table.ask(open.clone())), Errno::EACCES);
    assert_eq!(table.plane.closed.load(Ordering::SeqCst), 1);
    table.plane.fail_front.store(false, Ordering::SeqCst);
    table.ask(open).expect("opens now");
}

#[test]
fn a_read_only_disk_says_so() {
    let Setting { table, minor, .. } = &setting();
    table.ask(Open { read_only: true, ..image(*minor, "aio:/a") }).expect("opens");
    assert_eq!(table.ask(command::DiskInfo { minor: *minor }).expect("info").info, DiskInfo::READ_ONLY);
    assert!(table.list()[0].read_only);
    let stats = table.stats(*minor).expect("stats");
    assert_eq!((stats.outstanding, stats.images[0].driver), (2, DriverType::Aio));
    let report = table.full_stats(*minor);
    assert_eq!((report.images[0].image.as_str(), report.in_flight), ("aio:/a", 2));
    assert_eq!(report.counters.expect("open").image, "aio:/a");
}

#[test]
fn a_close_can_be_left_and_keeps_its_clients() {
    let Setting { table, minor, .. } = &setting();
    table.ask(Open { default_nbd: true, ..image(*minor, "vhd:/a") }).expect("opens");
    table.plane.busy.store(true, Ordering::SeqCst);
    assert_eq!(errno(table.ask_and_go(Close { minor: *minor, force: false })), Errno::ECANCELED);
    assert_eq!(table.list()[0].state, VbdState::Pausing);
    assert_eq!(table.ask(FrontList { minor: *minor }).expect("still open").len(), 1);
    table.ask_and_go(Close { minor: *minor, force: true }).expect("by force");
    assert_eq!(table.plane.closed.load(Ordering::SeqCst), 1);
}

#[test]
fn what_the_process_dropped_before_its_end_is_in_the_statistics() {
    let Setting { table, minor, .. } = &setting();
    let before = table.full_stats(*minor).dropped;
    set_on_drop(OnDrop::Count);
    assert!(Dropped::Request.is_fault());
    assert_eq!(table.full_stats(*minor).dropped, before + 1);
}

#[test]
fn the_end_does_not_wait_for_a_stuck_storage_for_ever() {
    let mut setting = setting();
    setting.table.quit_time = Duration::from_millis(50);
    let Setting { table, minor, .. } = &setting;
    table.ask(image(*minor, "vhd:/a")).expect("opens");
    table.plane.busy.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    table.ask(Quit { force: false }).expect("ends");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert_eq!(table.plane.closed.load(Ordering::SeqCst), 1);
}

#[test]
fn the_end_closes_everything_and_gives_its_own_numbers_back() {
    let Setting { table, run, minor, .. } = &setting();
    let own = run.minors().claim(7).expect("free");
    table.attach_own(own).expect("attached");
    table.ask(image(own, "vhd:/a")).expect("opens");
    table.ask(image(*minor, "vhd:/b")).expect("opens");
    table.ask(Quit { force: false }).expect("ends");
    assert!(table.is_empty());
    assert_eq!(table.plane.closed.load(Ordering::SeqCst), 2);
    assert_eq!(run.minors().allocated(), Ok(vec![*minor]));
}

#[test]
fn a_commit_of_the_leaf_is_noted_wherever_the_image_is_asked_for() {
    let Setting { table, minor, .. } = &setting();
    table.ask(image(*minor, "vhd:/d/leaf.vhd")).expect("opened");
    let parent = LayerSpec { kind: ImageKind::Vhd, path: "/d/base.vhd".into() };
    *table.plane.moved.lock() = Some(vec![parent.clone()]);
    assert_eq!(table.list()[0].image.as_deref(), Some("vhd:/d/base.vhd"));
    // While it was being paused: the disk goes on with what it is on.
    table.ask(Pause { minor: *minor }).expect("paused");
    *table.plane.moved.lock() = Some(vec![LayerSpec { path: "/d/root.vhd".into(), ..parent }]);
    table.ask(Resume::of(*minor)).expect("resumed");
    assert_eq!(table.list()[0].image.as_deref(), Some("vhd:/d/root.vhd"));
}

#[test]
fn a_snapshot_makes_another_image_the_leaf() {
    let Setting { table, minor, .. } = &setting();
    table.ask(image(*minor, "vhd:/d/a.vhd")).expect("opened");
    let snapshot = |minor| Snapshot { minor, leaf: "/d/b.vhd".into(), stall_ms: 1 };
    table.ask(snapshot(*minor)).expect("taken");
    assert_eq!(table.list()[0].image.as_deref(), Some("vhd:/d/b.vhd"));
    assert_eq!(errno(table.ask(snapshot(minor + 1))), Errno::ENODEV);
}

#[test]
fn a_disk_whose_leaf_was_swapped_is_resumed_on_the_new_names() {
    let Setting { table, minor, .. } = &setting();
    table.ask(image(*minor, "vhd:/d/a.vhd")).expect("opened");
    let layer = |path: &str| LayerSpec { kind: ImageKind::Vhd, path: path.into() };
    let swap = |minor| SwapLeaf::of(minor, vec![layer("/d/a.vhd"), layer("/d/base.vhd")]);
    let report = table.ask(swap(*minor)).expect("swapped");
    assert_eq!((&*report.leaf, &*report.parent), ("vhd:/d/a.vhd", "vhd:/d/base.vhd"));
    let disk = table.disk(*minor).expect("there");
    let names = |disk: &Disk<DoubleDisk>| disk.now.lock().open.as_ref().map(|open| open.image.clone());
    assert_eq!(names(&disk), Some(ImageSource::Chain(swap(0).images)));
    assert_eq!(errno(table.ask(swap(minor + 1))), Errno::ENODEV);
}

/// Rings of guests by the messages of the tapdisk protocol.
#[test]
fn a_ring_is_connected_and_disconnected_by_its_numbers() {
    let Setting { table, shm, minor, .. } = &setting();
    let ring = tapio_control::Blkif {
        domid: 5,
        devid: 51712,
        gref: [8, 9, 0, 0, 0, 0, 0, 0],
        order: 1,
        proto: 2,
        port: 12,
        ..tapio_control::Blkif::default()
    };
    assert_eq!(errno(table.connect_ring(*minor, &ring)), Errno::ENODEV);
    table.ask(image(*minor, "vhd:/a")).expect("opens");
    table.connect_ring(*minor, &ring).expect("connected");
    let fronts = table.ask(FrontList { minor: *minor }).expect("fronts");
    let id = VbdId { domid: 5, devid: 51712 };
    assert_eq!((fronts.len(), fronts[0].vbd), (1, id));
    let Front::Blkif(front) = &fronts[0].front else { panic!("{fronts:?}") };
    assert_eq!((&front.queues[0].ring, front.queues[0].port), (&vec![8, 9], 12));
    assert!(shm.vbd(5, 51712).join("io_ring").exists(), "published under the guest's numbers");
    assert_eq!(errno(table.connect_ring(*minor, &ring)), Errno::EADDRINUSE);
    assert_eq!(
        errno(table.connect_ring(*minor, &tapio_control::Blkif { order: 4, ..ring.clone() })),
        Errno::EINVAL
    );
    let other = tapio_control::Blkif { devid: 51728, ..ring.clone() };
    assert_eq!(errno(table.disconnect_ring(*minor, &other)), Errno::ENODEV);
    table.connect_ring(*minor, &other).expect("a second device of the same disk");
    table.disconnect_ring(*minor, &ring).expect("disconnected");
    assert_eq!(table.ask(FrontList { minor: *minor }).expect("fronts")[0].vbd, VbdId { devid: 51728, ..id });
    assert!(!shm.vbd(5, 51712).exists());
}
