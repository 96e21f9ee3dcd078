//! The driver against a real xenstored, with a double of xl and of everything behind it: the hypervisor, guests and
//! their back ends. What is true of real ones is asked in the lane `xen`.

mod host;

use std::fs;

use super::*;
use crate::settings::XenSettings;
use crate::traits::{DiskFacts, VmState};

use self::host::{Habit, Host};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn shortly() -> Instant {
    Instant::now() + Duration::from_millis(150)
}

fn disk(position: u8) -> PluggedDisk {
    let spec = DiskSpec {
        vbd: Uuid::new_v4(),
        position,
        read_only: false,
        is_cd: false,
        is_bootable: position == 0,
    };
    let facts = DiskFacts {
        vdi: Some(Uuid::new_v4()),
        polling_us: 8_000,
        polling_idle: 50,
        rings: Default::default(),
    };
    let node = Some(format!("/run/control/nbd77.{position}").into());
    PluggedDisk { spec, front: FrontSpec::Xen, node, size: 1 << 20, facts }
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = soon();
    while !is_so() {
        assert!(Instant::now() < until, "waited in vain: {what}");
        poll(&mut [], Instant::now() + Duration::from_millis(2));
    }
}

#[test]
fn a_guest_lives_and_its_disks_come_and_go() {
    let host = Host::new();
    let driver = host.driver();
    driver.check().unwrap();
    let vm = host.spec("first");
    driver.create(&vm).unwrap();
    assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Paused);
    assert_eq!(driver.create(&vm).unwrap_err().code, "VM_BAD_POWER_STATE");
    let domid = driver.domid(vm.uuid).expect("a number");
    assert_eq!(driver.console(vm.uuid), Some(format!("/dev/pts/{domid}").into()));
    // Before it runs: no front end replies, and no call waits for one.
    let (root, data, late) = (disk(0), disk(1), disk(20));
    for disk in [&root, &data] {
        assert_eq!(driver.front(vm.uuid, &disk.spec).unwrap(), FrontSpec::Xen);
        driver.plug(vm.uuid, disk).unwrap();
    }
    assert_eq!(driver.plug(vm.uuid, &disk(1)).unwrap_err().code, "DEVICE_ALREADY_EXISTS");
    let (back, front) = (
        format!("/local/domain/0/backend/vbd3/{domid}/51712"),
        format!("/local/domain/{domid}/device/vbd/51712"),
    );
    assert_eq!(host.read(&format!("{back}/state")).as_deref(), Some("1"));
    assert_eq!(host.read(&format!("{back}/frontend")), Some(front.clone()));
    assert_eq!(host.read(&format!("{front}/backend")), Some(back.clone()));
    // Both directories, and what is in them, is its owner's and shown to the other side alone.
    for key in ["", "/state", "/online", "/sm-data/vdi-uuid"] {
        assert_eq!(host.permissions(&format!("{back}{key}")), format!("n0 r{domid}"), "{key}");
    }
    for key in ["", "/state", "/backend"] {
        assert_eq!(host.permissions(&format!("{front}{key}")), format!("n{domid} r0"), "{key}");
    }
    driver.unpause(vm.uuid).unwrap();
    assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Running);
    wait("the root to connect", || host.read(&format!("{front}/state")).as_deref() == Some("4"));
    // While it runs, it is there when plug answers.
    driver.plug(vm.uuid, &late).unwrap();
    let number = (1_u32 << 28) | (20 << 8);
    let late_back = format!("/local/domain/0/backend/vbd3/{domid}/{number}");
    assert_eq!(host.read(&format!("{late_back}/state")).as_deref(), Some("4"));
    driver.plug(vm.uuid, &late).expect("the same disk again");
    driver.pause(vm.uuid).unwrap();
    assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Paused);
    let refused = driver.unplug(vm.uuid, &late.spec, false, soon()).unwrap_err();
    assert_eq!(refused.code, "DEVICE_DETACH_REJECTED");
    driver.unpause(vm.uuid).unwrap();
    driver.unplug(vm.uuid, &late.spec, false, soon()).unwrap();
    assert_eq!(host.read(&format!("{late_back}/online")), None);
    assert_eq!(host.read(&format!("/local/domain/{domid}/device/vbd/{number}/state")), None);
    driver.unplug(vm.uuid, &late.spec, false, soon()).expect("it is gone already");
    driver.shutdown(vm.uuid, ShutdownKind::Clean, soon()).unwrap();
    assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Halted);
    assert_eq!(host.read(&format!("{back}/state")), None, "its back ends are gone with it");
    assert_eq!(host.domains(), 0);
    driver.unplug(vm.uuid, &root.spec, true, soon()).expect("nothing is left");
    assert_eq!(driver.wait_event(shortly()), None, "what was asked for is no event");
    driver.create(&vm).unwrap();
    driver.shutdown(vm.uuid, ShutdownKind::Hard, soon()).unwrap();
    assert_eq!(host.domains(), 0);
}

#[test]
fn a_guest_that_keeps_a_disk_or_says_nothing_keeps_it_until_it_is_forced() {
    let host = Host::new();
    let driver = host.driver();
    let (vm, disk) = (host.spec("stubborn"), disk(1));
    driver.create(&vm).unwrap();
    driver.plug(vm.uuid, &disk).unwrap();
    driver.unpause(vm.uuid).unwrap();
    let domid = driver.domid(vm.uuid).unwrap();
    let back = format!("/local/domain/0/backend/vbd3/{domid}/51728");
    let state = |side: &str| host.read(&format!("{side}/state"));
    wait("it to connect", || state(&back).as_deref() == Some("4"));
    host.behave(Habit::Refuse);
    let error = driver.unplug(vm.uuid, &disk.spec, false, soon()).unwrap_err();
    assert_eq!(error.code, "DEVICE_DETACH_REJECTED");
    assert!(error.params[2].contains("refusing to close"), "{error}");
    assert_eq!(
        (state(&back).as_deref(), host.read(&format!("{back}/online")).as_deref()),
        (Some("4"), Some("1"))
    );
    host.behave(Habit::Silent);
    let begun = Instant::now();
    let error = driver.unplug(vm.uuid, &disk.spec, false, shortly()).unwrap_err();
    assert_eq!(error.code, "DEVICE_DETACH_TIMEOUT");
    assert!(begun.elapsed() < Duration::from_secs(30), "in the time that was given");
    assert_eq!(
        (state(&back).as_deref(), host.read(&format!("{back}/online")).as_deref()),
        (Some("4"), Some("1"))
    );
    // A guest that ignores clean shutdowns finds no request left behind.
    let error = driver.shutdown(vm.uuid, ShutdownKind::Clean, shortly()).unwrap_err();
    assert_eq!(error.code, "VM_SHUTDOWN_TIMEOUT");
    assert_eq!(host.read(&format!("/local/domain/{domid}/control/shutdown")).as_deref(), Some(""));
    assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Running);
    driver.unplug(vm.uuid, &disk.spec, true, soon()).unwrap();
    assert_eq!(state(&back), None);
    // One that asks for what is never answered: not there afterwards.
    host.behave(Habit::Complain);
    let error = driver.plug(vm.uuid, &disk).unwrap_err();
    assert_eq!(error.code, "DEVICE_ATTACH_TIMEOUT");
    assert!(error.params[2].contains("no memory for the ring"), "{error}");
    assert_eq!(state(&back), None);
    host.behave(Habit::Willing);
    driver.plug(vm.uuid, &disk).unwrap();
    driver.shutdown(vm.uuid, ShutdownKind::Hard, soon()).unwrap();
}

#[test]
fn another_disk_process_is_named_and_nothing_else_changes() {
    let host = Host::new();
    let driver = host.driver();
    let (vm, mut disk) = (host.spec("replaced"), disk(0));
    driver.create(&vm).unwrap();
    driver.plug(vm.uuid, &disk).unwrap();
    driver.unpause(vm.uuid).unwrap();
    let back = format!("/local/domain/0/backend/vbd3/{}/51712", driver.domid(vm.uuid).unwrap());
    wait("it to connect", || host.read(&format!("{back}/state")).as_deref() == Some("4"));
    let before = host.directory(&back);
    disk.node = Some("/run/control/nbd99.4".into());
    disk.facts.polling_us = 0;
    driver.plug(vm.uuid, &disk).unwrap();
    let mut wanted = before;
    for (key, value) in [
        ("params", "/run/control/nbd99.4"),
        ("physical-device-path", "/run/control/nbd99.4"),
        ("polling-duration", "0"),
    ] {
        wanted.insert(key.into(), value.into());
    }
    assert_eq!(host.directory(&back), wanted);
    disk.node = None;
    assert!(driver.plug(vm.uuid, &disk).is_err(), "a process must be named");
    driver.shutdown(vm.uuid, ShutdownKind::Hard, soon()).unwrap();
}

#[test]
fn disks_come_and_go_in_parallel() {
    let host = Host::new();
    let driver = host.driver();
    let vm = host.spec("parallel");
    driver.create(&vm).unwrap();
    driver.unpause(vm.uuid).unwrap();
    let disks: Vec<PluggedDisk> = (0..40).map(disk).collect();
    let each = |act: &(dyn Fn(&PluggedDisk) + Sync)| {
        std::thread::scope(|scope| {
            for some in disks.chunks(4) {
                scope.spawn(move || some.iter().for_each(act));
            }
        });
    };
    let backs = format!("/local/domain/0/backend/vbd3/{}", driver.domid(vm.uuid).unwrap());
    each(&|disk| driver.plug(vm.uuid, disk).unwrap());
    assert_eq!(host.names(&backs).len(), 40);
    assert_eq!(driver.0.find(vm.uuid).unwrap().saved().disks.len(), 40);
    each(&|disk| driver.unplug(vm.uuid, &disk.spec, false, soon()).unwrap());
    assert_eq!(host.names(&backs).len(), 0);
    driver.shutdown(vm.uuid, ShutdownKind::Hard, soon()).unwrap();
}

#[test]
fn what_happens_by_itself_is_told_and_tidied() {
    let host = Host::new();
    let driver = host.driver();
    let specs: Vec<VmSpec> = ["-", "r", "c", "gone"].iter().map(|how| host.spec(how)).collect();
    for vm in &specs {
        driver.create(vm).unwrap();
        driver.plug(vm.uuid, &disk(0)).unwrap();
        driver.unpause(vm.uuid).unwrap();
    }
    for vm in &specs {
        let domid = driver.domid(vm.uuid).unwrap();
        host.end(domid, &vm.name);
        let event = driver.wait_event(soon()).expect("an event");
        match vm.name.as_str() {
            "-" => assert_eq!(event, VmEvent::Halted(vm.uuid)),
            "r" => assert_eq!(event, VmEvent::Rebooted(vm.uuid)),
            _ => assert!(matches!(&event, VmEvent::Crashed(of, _) if *of == vm.uuid), "{event:?}"),
        }
        assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Halted);
        assert_eq!(host.read(&format!("/local/domain/0/backend/vbd3/{domid}/51712/state")), None);
        driver.shutdown(vm.uuid, ShutdownKind::Hard, soon()).expect("there is nothing to end");
        // As the toolstack does with one that rebooted.
        driver.create(vm).unwrap();
        driver.shutdown(vm.uuid, ShutdownKind::Hard, soon()).unwrap();
    }
    assert_eq!(host.domains(), 0);
}

#[test]
fn another_daemon_finds_its_guests_and_their_ends() {
    let host = Host::new();
    let driver = host.driver();
    let (goes_on, ends, half) = (host.spec("goes on"), host.spec("ends"), host.spec("half made"));
    let (first, second) = (disk(0), disk(1));
    for vm in [&goes_on, &ends, &half] {
        driver.create(vm).unwrap();
    }
    driver.plug(goes_on.uuid, &first).unwrap();
    driver.unpause(goes_on.uuid).unwrap();
    driver.unpause(ends.uuid).unwrap();
    driver.plug(goes_on.uuid, &second).unwrap();
    let domid = driver.domid(goes_on.uuid).unwrap();
    let (ended, made) = (driver.domid(ends.uuid).unwrap(), driver.domid(half.uuid).unwrap());
    let place = driver.0.find(half.uuid).unwrap().place.clone();
    drop(driver);
    // It died before it wrote down which domain xl had made.
    let mut record = place.load().unwrap().unwrap();
    record.domid = None;
    place.save(&record).unwrap();
    host.end(ended, "-");
    let driver = host.driver();
    assert_eq!(driver.wait_event(soon()), Some(VmEvent::Halted(ends.uuid)));
    assert_eq!(driver.state(ends.uuid).unwrap(), VmState::Halted);
    assert_eq!(
        (driver.domid(goes_on.uuid), driver.state(goes_on.uuid).unwrap()),
        (Some(domid), VmState::Running)
    );
    assert_eq!((driver.domid(half.uuid), driver.state(half.uuid).unwrap()), (Some(made), VmState::Paused));
    driver.unplug(goes_on.uuid, &second.spec, false, soon()).expect("a disk that an earlier daemon plugged");
    for vm in [&goes_on, &half] {
        driver.shutdown(vm.uuid, ShutdownKind::Hard, soon()).unwrap();
    }
    assert_eq!(host.domains(), 0);
}

#[test]
fn a_domain_is_read_in_one_transaction_however_many_disks_it_has() {
    let host = Host::new();
    let driver = host.driver();
    let vm = host.spec("many");
    driver.create(&vm).unwrap();
    let domid = driver.domid(vm.uuid).unwrap();
    let disks: Vec<PluggedDisk> = (0..=254).map(disk).collect();
    for (at, disk) in disks.iter().enumerate() {
        let mut bus = driver.0.bus().unwrap();
        let device = Device::of(domid, disk.spec.position);
        let written = bus.plug(vm.uuid, &device, disk, Path::new("/run/control/nbd1.1")).unwrap();
        assert_eq!(written, Written::New);
        assert_eq!(bus.into_client().counts().transactions, 1);
        if at == 0 || at == 254 {
            let known: Vec<(u8, Uuid)> =
                disks.iter().map(|disk| (disk.spec.position, disk.spec.vbd)).collect();
            let mut bus = driver.0.bus().unwrap();
            assert_eq!(bus.present(domid, &known).unwrap().len(), at + 1);
            let counts = bus.into_client().counts();
            assert_eq!(counts.transactions, 1, "for {} disks", at + 1);
        }
    }
    let backs = host.names(&format!("/local/domain/0/backend/vbd3/{domid}"));
    let fronts = host.names(&format!("/local/domain/{domid}/device/vbd"));
    assert_eq!((backs.len(), &backs), (255, &fronts), "255 numbers of both sides");
    driver.shutdown(vm.uuid, ShutdownKind::Hard, soon()).unwrap();
    assert!(host.names(&format!("/local/domain/0/backend/vbd3/{domid}")).is_empty());
}

#[test]
fn what_is_missing_is_told_with_the_next_step() {
    let host = Host::new();
    let said = |change: &dyn Fn(&mut XenSettings)| {
        let mut settings = host.settings.clone();
        change(&mut settings.xen);
        Xen::new(&settings).check().unwrap_err().to_string()
    };
    assert!(said(&|xen| xen.capabilities = "/no/such/file".into()).contains("boot this system"));
    fs::write(host.dir.path().join("domu"), "\n").unwrap();
    assert!(said(&|xen| xen.capabilities = host.dir.path().join("domu")).contains("no control domain"));
    assert!(said(&|xen| xen.xl = "/no/such/xl".into()).contains("install xen-utils"));
    assert!(said(&|xen| xen.store = Some("/no/such/socket".into())).contains("start xenstored"));
    let driver = host.driver();
    let mut vm = host.spec("no kernel");
    vm.kernel = None;
    assert!(driver.create(&vm).unwrap_err().to_string().contains("VM.PV_kernel"));
    vm.kernel = Some("/no/such/kernel".into());
    assert!(driver.create(&vm).unwrap_err().to_string().contains("/no/such/kernel"));
    vm.kernel = Some(host.dir.path().join("kernel"));
    host.refuse_creation("not enough memory");
    let error = driver.create(&vm).unwrap_err().to_string();
    assert!(error.contains("not enough memory"), "{error}");
    assert_eq!(driver.state(vm.uuid).unwrap(), VmState::Halted, "nothing is left");
}
