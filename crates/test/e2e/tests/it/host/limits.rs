//! I/O limits and page pools, under real load.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{Disk, DiskOptions, Host, text};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, poll_until, run, run_within};
use tapio_e2e::scratch::Scratch;

const LIMIT: Duration = Duration::from_secs(60);

fn fio(uri: &str, rw: &str, bs: &str, depth: u32, seconds: f64) -> Command {
    let mut fio = Command::new("fio");
    // One process, so that its end is the end of the load.
    fio.args(["--thread", "--name=load", "--ioengine=nbd", &format!("--uri={uri}"), &format!("--rw={rw}")]);
    fio.args([&format!("--bs={bs}"), &format!("--iodepth={depth}"), "--size=32m", "--time_based"]);
    fio.args([&format!("--runtime={}ms", (seconds * 1000.0) as u64), "--output-format=terse"]);
    fio
}

/// The highest rate of ten attempts, or that of the first which has `least`: a busy host may keep fio or the disk from
/// their work. What a limit allows is no less in one attempt than in another.
fn rate(uri: &str, rw: &str, bs: &str, dir: &Path, least: f64) -> f64 {
    let mut highest = 0.0;
    for _ in 0..10 {
        highest = rate_once(uri, rw, bs, dir).max(highest);
        if highest > least {
            break;
        }
    }
    highest
}

/// Requests a second that fio reports.
fn rate_once(uri: &str, rw: &str, bs: &str, dir: &Path) -> f64 {
    let said = run_within(fio(uri, rw, bs, 16, 2.0).current_dir(dir), LIMIT).ok();
    let line = said.lines().find(|line| line.contains(";load;")).unwrap_or_else(|| panic!("fio said {said}"));
    let fields: Vec<&str> = line.split(';').collect();
    // Terse output, version 3: 5 fields, 41 of reads, 41 of writes; the rate is the third of each.
    let field = fields[if rw.contains("write") { 48 } else { 7 }];
    field.parse().unwrap_or_else(|_| panic!("'{field}' in {line}"))
}

/// `tapio ... --json` about processes of this test.
fn json(command: &mut Command) -> Value {
    let said = run(command).ok();
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error} in {said}"))
}

#[test]
fn a_limited_disk_does_what_it_may_and_the_limit_can_be_changed() {
    needs!("fio");
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    let image = scratch.raw_image("a.raw", 64 << 20);
    let options = DiskOptions::raw(&image).arg("--minor").arg("3").arg("--limit").arg("iops=500");
    let options = options.arg("--transfers").arg("merge=8KiB");
    let disk = start_on(&host, &options, &scratch);
    // The simulator holds the limit to a few percent; here a busy host may do less, and what it does is measured by
    // another process.
    let close = |measured: f64, wanted: f64| measured < wanted * 1.25 && measured > wanted * 0.2;
    let measured = rate(&disk.uri(), "randread", "4k", scratch.path(), 250.0);
    assert!(close(measured, 500.0), "{measured} reads a second with iops=500");
    let tell =
        |arguments: &[&str]| json(&mut host.tapio(&[&["disk", "limit", "3", "--json"], arguments].concat()));
    let delayed = || tell(&[])["delayed"].as_u64() > Some(500);
    let waited = poll_until(LIMIT, || {
        if !delayed() {
            rate_once(&disk.uri(), "randread", "4k", scratch.path());
        }
        delayed().then_some(())
    });
    assert!(waited.is_some(), "requests do not wait: {}", tell(&[]));
    let report = tell(&["--write-bps", "50MiB", "--burst", "10ms"]);
    assert_eq!(report["limits"]["write-bps"], 50 << 20, "{report}");
    assert_eq!(report["limits"]["iops"], 0, "{report}");
    let measured = rate(&disk.uri(), "write", "1m", scratch.path(), 25.0);
    assert!(close(measured, 50.0), "{measured} MiB/s written with write-bps=50MiB");
    let free = rate(&disk.uri(), "randread", "4k", scratch.path(), 600.0);
    assert!(free > 600.0, "only {free} reads a second without a limit on reads");
    let stats = run(&mut host.tapio(&["disk", "stats", "-m", "3"])).ok();
    assert!(stats.contains("limits: write-bps=50MiB,burst=10ms; "), "{stats}");
    assert_eq!(tell(&["--off"])["limits"]["write-bps"], 0);
    let transfers =
        |arguments: &[&str]| run(&mut host.tapio(&[&["disk", "transfers", "3"], arguments].concat())).ok();
    assert_eq!(transfers(&[]), "transfers: merge=8KiB\n", "as its command line says");
    assert_eq!(transfers(&["--split", "64KiB"]), "transfers: split=64KiB\n");
    rate_once(&disk.uri(), "write", "1m", scratch.path());
    assert!(run(&mut host.tapio(&["disk", "limit", "3"])).ok().contains("transfers: split=64KiB\n"));
    let error = run(&mut host.tapio(&["disk", "limit", "4"])).fails();
    assert!(error.contains("has a disk 4") && error.contains("tapio disk list"), "{error}");
    let error = run(&mut host.tapio(&["disk", "limit", "3", "--bps", "much"])).fails();
    assert!(error.contains("number of bytes"), "{error}");
    disk.stop();
}

/// Starts a disk whose control socket and counters are those of `host`.
fn start_on(host: &Host, options: &DiskOptions, scratch: &Scratch) -> Disk {
    options.clone().nbd().start_on(host, scratch.path())
}

#[test]
fn disks_of_a_pool_get_the_same_number_of_pages_whatever_their_requests() {
    needs!("fio");
    needs!("nbdkit");
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    // A storage that takes its time: what is in flight decides what a disk gets.
    let mut disks = Vec::new();
    let mut storages = Vec::new();
    for number in 0..4 {
        let socket = scratch.join(&format!("storage{number}.sock"));
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.args(["-f", "-t", "32", "-U", text(&socket), "--filter=delay", "memory", "32M", "rdelay=4ms"]);
        let mut storage = Running::start(&mut nbdkit, &scratch.join(&format!("storage{number}.log")));
        // A socket is there before it listens.
        storage.wait_for("its answer", LIMIT, || UnixStream::connect(&socket).ok());
        storages.push(storage);
        let pool = if number == 0 { "sr-7:100" } else { "sr-7" };
        let options = DiskOptions::image(format!("nbd:{}", socket.display())).arg("--pool").arg(pool);
        disks.push(start_on(&host, &options.arg("--read-only"), &scratch));
    }
    let loads: Vec<Running> = disks
        .iter()
        .enumerate()
        .map(|(number, disk)| {
            let (bs, depth) = if number % 2 == 0 { ("4k", 64) } else { ("1m", 4) };
            // Longer than anything here takes; they are ended below.
            let mut load = fio(&disk.uri(), "read", bs, depth, 300.0);
            load.current_dir(scratch.path());
            Running::start(&mut load, &scratch.join(&format!("load{number}.log")))
        })
        .collect();
    let bytes = || -> Vec<u64> {
        let stats = json(&mut host.tapio(&["disk", "stats", "--json"]));
        let stats = stats.as_array().expect("a list");
        let of = |disk: &Disk| {
            let pid = u64::from(disk.process.pid());
            let page = stats.iter().find(|page| page["pid"].as_u64() == Some(pid)).expect("it has counters");
            page["kinds"][0]["bytes"].as_u64().expect("a number")
        };
        disks.iter().map(of).collect()
    };
    let works = || bytes().iter().all(|done| *done > 1 << 20).then_some(());
    poll_until(LIMIT, works).expect("every load works");
    let before = bytes();
    // The simulator holds it to two percent. Here processes wait for processors too, some longer than others, until
    // enough was done; without the pool large requests would get sixteen times what small ones get all the time.
    let mut done = Vec::new();
    let fair = poll_until(LIMIT, || {
        std::thread::sleep(Duration::from_secs(1));
        done = bytes().iter().zip(&before).map(|(after, before)| after - before).collect::<Vec<u64>>();
        let (least, most) = (*done.iter().min()?, *done.iter().max()?);
        (least > 64 << 20 && most < least * 4 + (512 << 10)).then_some(())
    });
    assert!(fair.is_some(), "bytes in the same time: {done:?}");
    let said = run(&mut host.tapio(&["xsiostat", "-s", "-c", "1", "--format", "6.1"])).ok();
    assert!(said.contains("pool: sr-7 ( 100,"), "{said}");
    assert_eq!(said.matches("vbd:").count(), 4, "{said}");
    let pools = json(&mut host.tapio(&["disk", "pool", "--json"]));
    assert_eq!((&pools[0]["name"], &pools[0]["pages"]), (&"sr-7".into(), &100.into()));
    assert_eq!(pools[0]["disks"].as_array().map(Vec::len), Some(4), "{pools}");
    // One dies with what it holds; the others go on, and take that back.
    let victim = disks.remove(1);
    victim.crash();
    let whole = poll_until(LIMIT, || {
        let pools = json(&mut host.tapio(&["disk", "pool", "--json"]));
        (pools[0]["disks"].as_array().map(Vec::len) == Some(3)).then_some(())
    });
    assert!(whole.is_some(), "the dead disk keeps its place");
    drop(loads);
    let idle = poll_until(LIMIT, || {
        let pools = json(&mut host.tapio(&["disk", "pool", "--json"]));
        (pools[0]["used"] == 0).then_some(())
    });
    let pools = json(&mut host.tapio(&["disk", "pool", "--json"]));
    assert!(idle.is_some(), "pages are in use though there are no readers: {pools}");
    disks.into_iter().for_each(Disk::stop);
    assert!(!scratch.join("shm/tapio-pool").exists(), "the last disk of a pool leaves it behind");
}

#[test]
fn a_pool_that_cannot_be_is_refused() {
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    let image = scratch.raw_image("a.raw", 1 << 20);
    let first = start_on(&host, &DiskOptions::raw(&image).arg("--pool").arg("sr:50"), &scratch);
    let other = scratch.raw_image("b.raw", 1 << 20);
    let mut second = Command::new(tapio_e2e::tools::our("tapio-disk"));
    second.args(["--foreground", "--image", &format!("aio:{}", text(&other)), "--pool", "sr:60"]);
    second.arg("--nbd-unix").arg(scratch.join("second.sock"));
    let error = run(host.on_host(&mut second)).fails();
    assert!(error.contains("pool sr has 50 pages, not 60"), "{error}");
    first.stop();
}

#[test]
fn front_ends_under_different_numbers_count_their_own_requests() {
    needs!("nbdsh");
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    let image = scratch.raw_image("a.raw", 1 << 20);
    let disk = start_on(&host, &DiskOptions::raw(&image).arg("--minor").arg("2"), &scratch);
    let (pid, second) = (disk.process.pid().to_string(), scratch.join("second.sock"));
    let add = ["disk", "front", "add", "-p", &pid, "-m", "2", "--nbd-unix", text(&second)];
    run(&mut host.tapio(&[&add[..], &["--domid", "5", "--devid", "51712"]].concat())).ok();
    nbdsh(&disk.uri(), "for _ in range(3): h.pread(4096, 0)");
    nbdsh(&format!("nbd+unix:///?socket={}", text(&second)), "for _ in range(4): h.pwrite(b'x' * 512, 0)");
    // What the published layout says: reads and writes submitted.
    let counts = |name: &str| {
        let bytes =
            std::fs::read(scratch.join("shm").join(format!("td3-{pid}")).join(name)).expect("published");
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        (word(16), word(48))
    };
    assert_eq!(counts("vdi-2"), (3, 4), "the whole disk");
    assert_eq!(counts("vbd-0-2"), (3, 0), "the first front end");
    assert_eq!(counts("vbd-5-51712"), (0, 4), "the second front end");
    disk.stop();
}
