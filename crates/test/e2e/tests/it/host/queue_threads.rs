//! A disk with several connections, served by several threads, while its images change under them.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{DiskOptions, Host, Tap, assert_vhd_valid, create_vhd, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::{poll_until, run};
use tapio_e2e::scratch::Scratch;

const LIMIT: Duration = Duration::from_secs(120);
const CONNECTIONS: usize = 4;

/// Clients on connections of their own, each on its part of the disk, and all of them on blocks that they share: writes
/// of a number, reads that must find the last one, trims, flushes, and block status, until a file says that it is
/// enough. At the end everything is read once more.
fn clients(uri: &str, enough: &Path, progress: &Path) -> String {
    format!(
        r#"
import nbd, os, random, struct, threading
failures, counts = [], [0] * {CONNECTIONS}
def client(number):
    try:
        h = nbd.NBD()
        h.add_meta_context('base:allocation')
        h.connect_uri('{uri}')
        random.seed(number)
        # Sectors of 4 KiB: every fourth of the first 8 MiB, and 16 MiB of its own.
        places = [i * 4096 for i in range(number, 2048, {CONNECTIONS})]
        own = (16 + 16 * number) << 20
        places += [own + i * 4096 for i in range(4096)]
        content = {{}}
        def want(at):
            return struct.pack('<Q', content.get(at, 0)) * 512
        label = number << 32
        while not os.path.exists('{enough}'):
            at, what = random.choice(places[:900] if random.random() < 0.8 else places), random.random()
            if what < 0.5:
                label += 1
                h.pwrite(struct.pack('<Q', label) * 512, at)
                content[at] = label
            elif what < 0.95:
                assert h.pread(4096, at) == want(at), 'sector %d' % (at // 512)
            elif what < 0.96:
                # A block of its own.
                at = own + (random.randrange(8) << 21)
                h.zero(1 << 21, at)
                for i in range(512):
                    content.pop(at + i * 4096, None)
            elif what < 0.98:
                h.flush()
            else:
                seen = []
                h.block_status(1 << 20, own, lambda *extents: seen.append(extents) or 0)
                assert seen
            counts[number] += 1
            if number == 0 and counts[0] % 50 == 0:
                open('{progress}', 'w').write(str(min(counts)))
        h.flush()
        for at in places:
            assert h.pread(4096, at) == want(at), 'at the end: sector %d' % (at // 512)
        h.shutdown()
    except BaseException as error:
        failures.append('connection %d: %r' % (number, error))
        open('{enough}', 'w').close()
threads = [threading.Thread(target=client, args=(n,)) for n in range({CONNECTIONS})]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
"#,
        enough = text(enough),
        progress = text(progress),
    )
}

/// The directories of the threads of the process that serve queues beside the data thread.
fn directories(pid: u32) -> Vec<PathBuf> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process lives");
    let name = |task: &PathBuf| fs::read_to_string(task.join("comm")).unwrap_or_default();
    let tasks = tasks.flatten().map(|task| task.path());
    tasks.filter(|task| name(task).starts_with("tapio-queue")).collect()
}

/// Whether there are `count` of them, a little later if need be: a thread gives itself its name when it begins.
pub(super) fn has_queue_threads(pid: u32, count: usize) -> bool {
    poll_until(Duration::from_secs(60), || (directories(pid).len() == count).then_some(())).is_some()
}

/// How often they slept, all together: a thread that serves a client does so again and again.
pub(super) fn queue_thread_switches(pid: u32) -> u64 {
    let of = |task: &PathBuf| {
        let status = fs::read_to_string(task.join("status")).unwrap_or_default();
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        count.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    directories(pid).iter().map(of).sum()
}

pub(super) fn change(host: &Host, tap: &Tap, arguments: &[&str]) {
    let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
    run(host.tapio(&["disk", arguments[0], "-p", &pid, "-m", &minor]).args(&arguments[1..])).ok();
}

#[test]
fn connections_on_several_threads_keep_every_write_while_images_change() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let base = create_vhd(scratch.join("base.vhd"), 128);
    let disk = DiskOptions::vhd(&base).nbd().arg("--threads=3");
    // Fewer pages than the clients want now and then: most requests take theirs by themselves, the rest in turn.
    let disk = disk.arg("--pool=queues:3").start_on(&host, scratch.path());
    let tap = Tap::found(&host, &format!("vhd:{}", text(&base)));
    let (enough, progress) = (scratch.join("enough"), scratch.join("progress"));
    let script = clients(&disk.uri(), &enough, &progress);
    let uri = disk.uri();
    let load = thread::spawn(move || nbdsh(&uri, &script));
    let mut before = 0;
    let mut some_work = || {
        let count = || fs::read_to_string(&progress).ok()?.parse::<u64>().ok();
        let reached = poll_until(LIMIT, || {
            assert!(!load.is_finished(), "the clients have ended: see the output of the test");
            count().filter(|count| *count >= before + 100)
        });
        before = reached.expect("every connection gets on");
    };
    some_work();
    assert!(has_queue_threads(tap.pid, 2), "three threads serve four connections");
    let images: Vec<PathBuf> = (1..=3).map(|index| scratch.join(&format!("{index}.vhd"))).collect();
    for image in &images {
        change(&host, &tap, &["snapshot", text(image)]);
        some_work();
    }
    // The disk is limited, and then it is not.
    let minor = tap.minor.to_string();
    run(&mut host.tapio(&["disk", "limit", &minor, "--iops", "2000"])).ok();
    some_work();
    run(&mut host.tapio(&["disk", "limit", &minor, "--iops", "0"])).ok();
    some_work();
    for image in &images[..2] {
        change(&host, &tap, &["commit", text(image)]);
        some_work();
    }
    tap.ctl("pause", &[]).ok();
    tap.ctl("unpause", &[]).ok();
    some_work();
    fs::write(&enough, "").expect("written");
    load.join().expect("every read found what was written");
    let pools = run(&mut host.tapio(&["disk", "pool", "--json"])).ok();
    let pools: Value = serde_json::from_str(&pools).expect("JSON");
    assert_eq!((&pools[0]["name"], &pools[0]["used"]), (&"queues".into(), &0.into()), "{pools}");
    tap.forget();
    disk.stop();
    assert_vhd_valid(&images[2]);
    vhd_util(&["check", "-n", text(&images[2]), "-p", "-t"]).ok();
}
