//! Every column of `xsiostat`, in every format, beside a load whose every request is known.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tapio_control::RingStart;
use tapio_e2e::disk::{DiskOptions, Host, Tap, text};
use tapio_e2e::needs;
use tapio_e2e::process::{Running, poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_types::Movement;
use tapio_xen::blkfront::{Blkfront, Command as Ask, FrontOptions, FrontQueue};
use tapio_xen::blkif::status;

use super::blkif::{DEVID, DOMID, connect};

const LIMIT: Duration = Duration::from_secs(60);
/// What one request of a ring can hold: 11 pages.
const LEN: u32 = 11 * 4096;
const READS: u64 = 300;
const WRITES: u64 = 200;

fn load(queue: &mut FrontQueue, ask: impl Fn(u64) -> Ask, count: u64) {
    for index in 0..count {
        let done = queue.ask(&ask(index * u64::from(LEN))).expect("answered");
        assert_eq!(done.status, status::OKAY);
    }
}

/// The rows of the guest's disk in what was recorded so far.
fn rows(host: &Host, record: &str) -> Vec<Value> {
    let said =
        run(&mut host.tapio(&["xsiostat", "--replay", record, "--json", "-d", &DOMID.to_string()])).ok();
    let samples = said.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    samples.flat_map(|sample| sample["vbds"].as_array().cloned().expect("rows")).collect()
}

/// A rate of all rows as an amount: exact, for counters that were read exactly.
fn amount(rows: &[Value], rate: &str) -> f64 {
    let of = |row: &Value| number(row, rate) * number(row, "elapsed_ms") / 1e3;
    rows.iter().map(of).sum()
}

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {row}"))
}

/// All numbers of a line.
fn numbers(line: &str) -> Vec<f64> {
    let words = line.split(|c: char| !(c.is_ascii_digit() || c == '.' || c == '-'));
    words.filter_map(|word| word.parse().ok()).collect()
}

/// That the lines of a format have these columns of the rows, as they are printed there.
fn assert_lines(host: &Host, record: &str, format: &str, columns: &[&str]) {
    let rows = rows(host, record);
    let domid = DOMID.to_string();
    let said = run(&mut host.tapio(&["xsiostat", "--replay", record, "--format", format, "-d", &domid])).ok();
    let is_row = |line: &&str| line.contains(&format!("{DOMID},{DEVID}"));
    let lines: Vec<&str> = said.lines().filter(is_row).collect();
    assert_eq!(lines.len(), rows.len(), "{format}: {said}");
    for (line, row) in lines.iter().zip(&rows) {
        let (_, values) = line.split_once(&DEVID.to_string()).expect("it was found by that");
        let printed = numbers(values);
        assert_eq!(printed.len(), columns.len(), "{format}: {line}");
        for (printed, column) in printed.iter().zip(columns) {
            let is = row[*column].as_bool().map_or_else(|| number(row, column), |is| f64::from(u8::from(is)));
            assert!((printed - is).abs() <= 0.0051, "{format}: {column} is {is} in {line}");
        }
    }
}

#[test]
fn every_column_is_what_a_known_load_did() {
    needs!("nbdkit");
    let scratch = Scratch::in_memory();
    let host = Host::new(&scratch);
    // A storage that can be stopped.
    let socket = scratch.join("storage.sock");
    let mut nbdkit = Command::new("nbdkit");
    nbdkit.args(["-f", "-U", text(&socket), "memory", "32M"]);
    let mut storage = Running::start(&mut nbdkit, &scratch.join("storage.log"));
    storage.wait_for("its answer", LIMIT, || std::os::unix::net::UnixStream::connect(&socket).ok());
    let image = format!("nbd:{}", socket.display());
    let disk = DiskOptions::image(image).arg("--pool").arg("sr-1").nbd().start_on(&host, scratch.path());
    let listed = host.list().into_iter().find_map(|row| row.args).expect("a disk");
    let tap = Tap::found(&host, &listed);

    let mut front =
        Blkfront::new(FrontOptions { buffer_len: LEN, ..FrontOptions::default() }).expect("a double");
    connect(&scratch, &tap, front.invitation().expect("descriptors"), Movement::Copy, RingStart::Fresh);
    let queue = &mut front.take_queues()[0];
    let other = host.create(&format!("aio:{}", text(&raw(&scratch))));

    let record = scratch.join("record");
    let record = text(&record);
    let mut watch = host.tapio(&["xsiostat", "-i", "100", "-o", record]);
    let mut watch = Running::start(&mut watch, &scratch.join("xsiostat.log"));
    watch.wait_for("a sample of both", LIMIT, || {
        watch_log(&scratch).contains(&format!("{DOMID},{DEVID}: ")).then_some(())
    });

    load(queue, |at| Ask::Write { at, len: LEN }, WRITES);
    load(queue, |at| Ask::Read { at, len: 4096 }, READS);
    let (written, read) = (WRITES as f64 * f64::from(LEN), READS as f64 * 4096.0);
    let seen = |rows: &[Value]| amount(rows, "read_done_per_s").round() as u64 >= READS;
    poll_until(LIMIT, || seen(&rows(&host, record)).then_some(())).expect("a sample of all");
    let all = rows(&host, record);
    for (rate, is) in [
        ("read_per_s", READS as f64),
        ("write_per_s", WRITES as f64),
        ("read_done_per_s", READS as f64),
        ("write_done_per_s", WRITES as f64),
        ("read_mb_per_s", read / 1e6),
        ("write_mb_per_s", written / 1e6),
    ] {
        assert!((amount(&all, rate) - is).abs() < 1e-6 * is, "{rate}: {} of {is}", amount(&all, rate));
    }
    // Queue lengths by the time that all requests together took, as the disk's own histograms have it.
    let stats = run(&mut host.tapio(&["disk", "stats", "--json", "-p", &tap.pid.to_string()])).ok();
    let stats: Value = serde_json::from_str(&stats).expect("JSON");
    for (way, rate) in [(0, "read_queue"), (1, "write_queue")] {
        let took_us = stats[0]["latency"][way][4]["sum_ns"].as_f64().expect("a time") / 1e3;
        let queued_us = amount(&all, rate) * 1e6;
        assert!(took_us > 0.0 && (queued_us - took_us).abs() < 2.0, "{rate}: {queued_us} of {took_us} us");
    }

    // The storage stands still: what the ring, the disk and the pool hold is known to the last slot and page.
    storage.signal(libc::SIGSTOP);
    for index in 0..32u64 {
        let at = index * u64::from(LEN);
        let ask = if index < 20 { Ask::Read { at, len: LEN } } else { Ask::Write { at, len: LEN } };
        queue.submit(&ask).expect("grants are left").expect("a slot is free");
    }
    queue.kick().expect("woken");
    let full = "pool: sr-1 ( 704, 352)\n\
                \x20 DOM   VBD   BLKBKRING   INFLIGHT       BLKTAP REQS/s     BLKTAP MB/s\n\
                \x20       TOT USE    RD  WR         RD    WR         RD    WR\n\
                vbd:   9,51712: ( 32, 32) ( 20, 12) (  0.00,  0.00) (  0.00,  0.00)\n";
    let replay = || {
        run(&mut host.tapio(&["xsiostat", "--replay", record, "--format", "6.1", "-d", &DOMID.to_string()]))
            .ok()
    };
    let is_full = poll_until(LIMIT, || replay().contains(full).then_some(()));
    assert!(is_full.is_some(), "no sample of the full ring: {}", replay());
    let debug = run(&mut host.tapio(&["disk", "debug", "-p", &tap.pid.to_string()])).ok();
    assert!(debug.contains("pool:sr-1 pages:704 free:352\ndisk capacity:65536 sector size:512\n"), "{debug}");
    assert!(debug.contains("begin pending:32\n00: usr_idx:00 op:"), "{debug}");
    assert_eq!(debug.matches(" nr_pages:11 time:").count(), 32, "{debug}");
    let ring = run(&mut host.tapio(&["disk", "ring", "-p", &tap.pid.to_string()])).ok();
    assert!(ring.contains(&format!("vbd-{DOMID}-{DEVID} (pid {} minor 0)\nnr_ents 32\n", tap.pid)), "{ring}");
    assert!(ring.contains(&format!("req prod {} cons {}", 532, 532)), "{ring}");
    assert!(ring.contains(&format!("rsp prod {} pvt {}", 500, 500)), "{ring}");
    storage.signal(libc::SIGCONT);
    let mut done = Vec::new();
    while queue.under_way() > 0 {
        assert!(queue.wait(LIMIT).expect("the ring is whole"), "{} without an answer", queue.under_way());
        queue.reap(&mut done).expect("answers");
    }
    let empty = "vbd:   9,51712: ( 32,  0) (  0,  0) (  0.00,  0.00) (  0.00,  0.00)\n";
    let at_rest = |said: &str| said.rsplit("-----\n").next().is_some_and(|last| last.contains(empty));
    assert!(poll_until(LIMIT, || at_rest(&replay()).then_some(())).is_some(), "{}", replay());

    // VBDs go without -s as well: the other is left, and then there is nothing to say any more.
    let rates = ["read_per_s", "write_per_s", "read_mb_per_s", "write_mb_per_s", "read_queue", "write_queue"];
    other.destroy();
    tap.forget();
    disk.stop();
    assert!(watch.wait(LIMIT).success());
    assert!(watch_log(&scratch).ends_with("No VBDs to report and 'scan' flag not set.\n"));

    assert_lines(&host, record, "6.5", &rates);
    assert_lines(&host, record, "2016", &[&rates[..], &["low_memory"]].concat());
    let of_6_1 = [
        "ring_total",
        "ring_used",
        "read_in_flight",
        "write_in_flight",
        "read_done_per_s",
        "write_done_per_s",
        "read_mb_per_s",
        "write_mb_per_s",
    ];
    assert_lines(&host, record, "6.1", &of_6_1);
    // The live lines are those of the record.
    let replayed = run(&mut host.tapio(&["xsiostat", "--replay", record])).ok();
    assert!(watch_log(&scratch).starts_with(&replayed), "what was printed is what was kept");
    let csv = run(&mut host.tapio(&["xsiostat", "--replay", record, "--format", "csv"])).ok();
    let columns = csv.lines().next().expect("names").split(',').count();
    assert!(csv.lines().all(|line| line.split(',').count() == columns), "{csv}");
    assert!(csv.contains(",20,12,32,32,0,sr-1,704,352\n"), "{csv}");
}

fn watch_log(scratch: &Scratch) -> String {
    std::fs::read_to_string(scratch.join("xsiostat.log")).unwrap_or_default()
}

fn raw(scratch: &Scratch) -> std::path::PathBuf {
    let path = scratch.join("other.raw");
    let file = std::fs::File::create(&path).expect("an image");
    file.set_len(1 << 20).expect("its length");
    path
}
