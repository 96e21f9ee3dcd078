//! Every file of `fuzz/corpus`, and mutations of them, through the fuzz target of its directory.
//!
//! What a fuzzer has found is kept there as a file, so that it stays found. The mutations are no fuzzing; they make
//! sure that the targets see more than the files, on every host and without a fuzzer.

use std::collections::BTreeSet;
use std::fs;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tapio_testkit::fuzz::{INPUT_LEN_MAX, TARGETS, mutate, run, seeds};

/// Mutations of each target's files, all together; `TAPIO_MUTATIONS` says how many in a long run.
const MUTATIONS: u64 = 400;
/// What one target may take of a processor. A target that needs longer has lost its bounds.
const TIME_MAX: Duration = Duration::from_secs(20);
/// What one input may take of a processor.
const INPUT_TIME_MAX: Duration = Duration::from_secs(5);
/// What one input may take on the clock: a busy host runs other things meanwhile.
const INPUT_WAIT_MAX: Duration = Duration::from_secs(60);
/// A corpus file is kept in the repository for ever.
const FILE_LEN_MAX: usize = 32 << 10;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../fuzz/corpus")
}

/// Name and content of each file of a target, in the order of names.
fn files(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = corpus().join(target);
    let entries =
        fs::read_dir(&dir).unwrap_or_else(|error| panic!("no corpus in {}: {error}", dir.display()));
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("a directory entry"))
        .map(|entry| {
            (entry.file_name().into_string().expect("a plain name"), fs::read(entry.path()).expect("a file"))
        })
        .collect();
    files.sort();
    files
}

/// What this thread has used of a processor.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is written to during the call.
    let asked = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(asked, 0, "the kernel counts the time of threads");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs one input, and where it fails keeps it and says which it was.
fn feed(target: &str, what: &str, bytes: &[u8]) {
    let (started, used) = (Instant::now(), processor_time());
    let result = panic::catch_unwind(AssertUnwindSafe(|| run(target, bytes)));
    let in_time = processor_time() - used <= INPUT_TIME_MAX && started.elapsed() <= INPUT_WAIT_MAX;
    if result.is_err() || !in_time {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{target}-failed"));
        fs::write(&path, bytes).expect("room for the input");
        let took = started.elapsed();
        panic!("{target} fails on {what} ({took:?}); the input is in {}", path.display());
    }
}

fn try_target(target: &str) {
    let files = files(target);
    assert!(!files.is_empty(), "{target} has no corpus: run the example 'seeds' of tapio-testkit");
    let used = processor_time();
    for (name, bytes) in &files {
        feed(target, name, bytes);
    }
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let base: u64 = number("TAPIO_SEED").unwrap_or(1);
    let long: Option<u64> = number("TAPIO_MUTATIONS");
    for turn in 0..long.unwrap_or(MUTATIONS) {
        let in_time = long.is_some() || processor_time() - used < TIME_MAX;
        assert!(in_time, "{target} came only to mutation {turn} in {TIME_MAX:?}");
        let seed = base.wrapping_mul(1_000_003).wrapping_add(turn);
        let (name, bytes) = &files[turn as usize % files.len()];
        let other = &files[(seed >> 3) as usize % files.len()].1;
        let changed = mutate(bytes, other, seed, INPUT_LEN_MAX);
        feed(target, &format!("mutation {turn} of {name} (TAPIO_SEED={base})"), &changed);
    }
}

macro_rules! targets {
    ($($name:ident)*) => {
        const TESTED: &[&str] = &[$(stringify!($name)),*];
        $(#[test] fn $name() { try_target(stringify!($name)); })*
    };
}

targets! {
    vhd_open vhd_live vhd_footer vhd_header batmap locator vhd_journal vhd_stream nbd_handshake
    nbd_requests nbd_replies vhost_user_message vring packed_vring virtio_blk tapdisk_message own_protocol
    xsiostat_replay stat_pages xmlrpc jsonrpc thin_cli blkif_request blkif_ring blkif_backend
    xenstored_session xenstored_state xenstore_wire nbd_store tls_psk fuse_request netlink_answer cbt_log
    memory_head websocket query sm_journal sm_image sm_worker xva xva_decoded xva_document guest_agent
    history_file perfmon bugreport_text ova ova_descriptor ova_image sm_plugin_v1 sm_plugin_v3 rbd_names
    device_marks sm_volumes scsi_pages iscsi_discovery room_bell etcd_answers lease_sectors log_writes
    ova_packed rfb_viewer screen_picture database_dump host_archive database_replica
}

#[test]
fn every_target_has_a_test_a_corpus_and_a_program() {
    let names: BTreeSet<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(names, TESTED.iter().copied().collect());
    let dirs: Vec<String> = fs::read_dir(corpus())
        .unwrap()
        .map(|entry| entry.expect("a directory entry").file_name().into_string().expect("a plain name"))
        .collect();
    assert_eq!(names, dirs.iter().map(String::as_str).collect(), "directories of fuzz/corpus");
    let manifest = fs::read_to_string(corpus().join("../Cargo.toml")).expect("the manifest");
    for name in names {
        let program =
            fs::read_to_string(corpus().join(format!("../fuzz_targets/{name}.rs"))).expect("the target");
        assert!(program.contains(&format!("run(\"{name}\"")), "{name}.rs runs another target");
        assert!(manifest.contains(&format!("name = \"{name}\"")), "fuzz/Cargo.toml does not name {name}");
        for (file, bytes) in files(name) {
            assert!(bytes.len() <= FILE_LEN_MAX, "{name}/{file} has {} bytes", bytes.len());
        }
    }
}

#[test]
fn the_seeds_are_what_the_example_makes() {
    for seed in seeds::all() {
        let path = corpus().join(seed.target).join(&seed.name);
        let found = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(found == seed.bytes, "{} is out of date: run the example 'seeds'", path.display());
    }
}
