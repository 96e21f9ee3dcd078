//! A host with many plugged disks is emptied, shut down, and its daemon ended: in a bounded time, with calls answered
//! meanwhile. `TAPIO_DISKS=1000` plugs as many; the guests are simulated, the disk processes are real.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tapio_e2e::left_behind::left_behind;
use tapio_e2e::process::{poll_until, signal};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::toolstack::{END_LIMIT, Session};
use tapio_e2e::world::World;

const NULL: &str = "OpaqueRef:NULL";
/// Disks of each VM.
const PER_VM: usize = 20;
/// What an operation on all of them may take: it takes seconds on an idle host.
const LIMIT: Duration = Duration::from_secs(240);

fn disks() -> usize {
    std::env::var("TAPIO_DISKS").ok().and_then(|text| text.parse().ok()).unwrap_or(100)
}

/// Works on numbers below `count` in a few threads; what it returns is in their order.
fn each<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let (next, made) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let result = work(number);
                    made.lock().expect("no panic").push((number, result));
                }
            });
        }
    });
    let mut made = made.into_inner().expect("no panic");
    made.sort_by_key(|(number, _)| *number);
    made.into_iter().map(|(_, result)| result).collect()
}

/// A host with VMs.
struct Many {
    world: World,
    session: Session,
    host: String,
    vms: Vec<String>,
    disks: usize,
    /// What the program that ends the host was told, a line each time.
    ends: PathBuf,
    _own: Scratch,
}

impl Many {
    fn new() -> Self {
        let own = Scratch::on_disk();
        let (program, told) = (own.join("power"), own.join("told"));
        std::fs::write(&program, format!("#!/bin/sh\necho \"$@\" >> {}\n", told.display())).expect("written");
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("a program");
        let world =
            World::with(|options| options.arg("--set").arg(&format!("host-power={}", program.display())));
        let session = world.daemon().login();
        let sr = session.call("SR.get_all_records_where", &[json!("field \"type\" = \"file\"")]);
        let sr = sr.as_object().and_then(|found| found.keys().next()).expect("the default SR").clone();
        let host = session.call("host.get_all", &[])[0].as_str().expect("a host").to_owned();
        let disks = disks();
        let vms = each(disks.div_ceil(PER_VM), |number| {
            // A shutdown that takes long enough to ask something meanwhile.
            let platform = json!({"sim-front": "vhost-user", "sim-shutdown-ms": "300"});
            let record = json!({"name_label": format!("guest {number}"), "other_config": {"driver": "sim"},
                "platform": platform, "memory_static_max": "67108864", "memory_dynamic_max": "67108864",
                "memory_dynamic_min": "67108864", "memory_static_min": "0"});
            session.text("VM.create", &[record])
        });
        each(disks, |number| {
            let record = json!({"SR": sr, "virtual_size": "8388608", "name_label": "disk", "type": "user"});
            let vdi = session.text("VDI.create", &[record]);
            let record = json!({"VM": vms[number / PER_VM], "VDI": vdi, "mode": "RW", "type": "Disk",
                "userdevice": (number % PER_VM).to_string(), "bootable": false, "empty": false});
            session.text("VBD.create", &[record])
        });
        Self { world, session, host, vms, disks, ends: told, _own: own }
    }

    /// Calls a message as a task and waits for it; how many calls of another session were answered meanwhile.
    #[track_caller]
    fn long(&self, method: &str, params: &[Value]) -> usize {
        let other = Session::begin(&self.world.daemon().socket);
        let (begun, mut answered) = (Instant::now(), 0);
        let task = self.session.text(&format!("Async.{method}"), params);
        let mut longest = Duration::ZERO;
        poll_until(LIMIT, || {
            let asked = Instant::now();
            let vms = other.call("VM.get_all_records", &[]);
            assert!(vms.as_object().is_some_and(|vms| vms.len() >= self.vms.len()), "{vms}");
            longest = asked.elapsed().max(longest);
            let status = self.session.text("task.get_status", &[json!(task)]);
            if status == "pending" {
                answered += 1;
                return None;
            }
            let info = self.session.call("task.get_error_info", &[json!(task)]);
            assert_eq!(status, "success", "{method}: {info}");
            Some(())
        })
        .unwrap_or_else(|| panic!("{method} has not ended within {LIMIT:?}"));
        println!("{method}: {:?}, {answered} calls, the longest {longest:?}", begun.elapsed());
        answered
    }

    fn start(&self) {
        let begun = Instant::now();
        each(self.vms.len(), |number| {
            self.session.call("VM.start", &[json!(self.vms[number]), json!(false), json!(false)])
        });
        println!("{} VMs with {} disks started in {:?}", self.vms.len(), self.disks, begun.elapsed());
        assert_eq!(self.processes(), self.disks);
    }

    fn processes(&self) -> usize {
        left_behind(self.world.scratch.path(), self.world.daemon().process.pid()).len()
    }

    /// How many VBDs are plugged, and VMs halted.
    fn records(&self) -> (usize, usize) {
        let count = |class: &str, is: &dyn Fn(&Value) -> bool| {
            let all = self.session.call(&format!("{class}.get_all_records"), &[]);
            all.as_object().expect("records").values().filter(|record| is(record)).count()
        };
        let ours =
            |record: &Value| record["name_label"].as_str().is_some_and(|name| name.starts_with("guest "));
        let plugged = count("VBD", &|vbd| vbd["currently_attached"] == true);
        (plugged, count("VM", &|vm| ours(vm) && vm["power_state"] == "Halted" && vm["domid"] == -1))
    }

    #[track_caller]
    fn is_empty(&self) {
        assert_eq!(self.records(), (0, self.vms.len()));
        assert_eq!(self.processes(), 0, "no disk process is left");
    }

    fn told(&self) -> Vec<String> {
        let text = std::fs::read_to_string(&self.ends).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

#[test]
fn a_host_with_many_disks_is_emptied_and_ended_while_calls_are_answered() {
    let mut many = Many::new();
    let host = || json!(many.host);
    many.start();
    let answered = many.long("host.evacuate", &[host(), json!(NULL), json!("100")]);
    assert!(answered > 0, "nothing was asked while it ran");
    many.is_empty();

    // A host that lets VMs start is not ended; one that is ended lets none start.
    assert_eq!(many.session.fails("host.shutdown", &[host()]), ["HOST_NOT_DISABLED"]);
    many.start();
    many.session.call("host.disable", &[host()]);
    assert!(many.long("host.shutdown", &[host()]) > 0);
    many.is_empty();
    assert_eq!(many.told(), ["-h now"]);
    let refused = many.session.fails("VM.start", &[json!(many.vms[0]), json!(false), json!(false)]);
    assert_eq!(refused, ["HOST_DISABLED", many.host.as_str()]);
    many.session.call("host.enable", &[host()]);

    // A daemon that is told to end while VMs start: what runs goes on, and the next one puts the rest in order.
    let half = many.vms.len() / 2;
    each(half, |number| {
        many.session.call("VM.start", &[json!(many.vms[number]), json!(false), json!(false)])
    });
    let pids = left_behind(many.world.scratch.path(), many.world.daemon().process.pid());
    assert_eq!(pids.len(), half * PER_VM);
    for vm in &many.vms[half..] {
        many.session.text("Async.VM.start", &[json!(vm), json!(false), json!(false)]);
    }
    let begun = Instant::now();
    many.world.stop_and_restart(END_LIMIT);
    println!("the daemon ended and served again after {:?}", begun.elapsed());
    assert!(pids.iter().all(|pid| signal(*pid, 0).is_ok()), "disks of guests that run go on");
    many.session = many.world.daemon().login();
    let (plugged, halted) = many.records();
    assert_eq!(plugged, (many.vms.len() - halted) * PER_VM, "all disks of a VM or none");
    assert!(halted <= many.vms.len() - half);
    assert_eq!(many.processes(), plugged);

    many.session.call("host.disable", &[json!(many.host)]);
    many.long("host.reboot", &[json!(many.host)]);
    many.is_empty();
    assert_eq!(many.told(), ["-h now", "-r now"]);
    many.world.finish();
}
