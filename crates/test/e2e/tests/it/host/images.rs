//! The images of a disk change under its clients: snapshots, commits, and a kill in between.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_e2e::client::{copy_out, nbdsh, random_file, sha256};
use tapio_e2e::disk::{Host, Tap, assert_vhd_valid, create_vhd, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::{Finished, Running, poll_until, run};
use tapio_e2e::scratch::Scratch;

use super::control::start_recorder;

fn tapio_disk(host: &Host, tap: &Tap, args: &[&str]) -> Finished {
    let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
    let mut all = vec!["disk"];
    let words = if args[0] == "job" { 2 } else { 1 };
    all.extend(&args[..words]);
    all.extend(["-p", &pid, "-m", &minor]);
    all.extend(&args[words..]);
    run(&mut host.tapio(&all))
}

fn snapshot(host: &Host, tap: &Tap, leaf: PathBuf) -> PathBuf {
    let said = tapio_disk(host, tap, &["snapshot", text(&leaf), "--json"]).ok();
    let taken: serde_json::Value = serde_json::from_str(&said).expect("it is JSON");
    assert_eq!(taken["leaf"], format!("vhd:{}", text(&leaf)).as_str());
    println!("the guest waited {} us", taken["stalled_us"]);
    leaf
}

fn assert_chain_valid(leaf: &Path, depth: usize) {
    vhd_util(&["check", "-n", text(leaf), "-p", "-t"]).ok();
    let said = vhd_util(&["query", "-n", text(leaf), "-d"]).ok();
    assert_eq!(said.trim(), format!("chain depth: {depth}"));
}

#[test]
fn snapshots_and_commits_under_load_keep_every_write() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let base = create_vhd(scratch.join("base.vhd"), 32);
    let tap = host.create(&format!("vhd:{}", text(&base)));
    let (mut recorder, stop) = start_recorder(&tap, &scratch);
    // Counted from where the load is now: it may have got far while something else was waited for, and each image is to
    // hold writes of its own.
    let some_work = |recorder: &Running| {
        let count = || recorder.log().lines().filter_map(|line| line.trim().parse::<u64>().ok()).next_back();
        let enough = count().unwrap_or(0) + 200;
        let reached = poll_until(Duration::from_secs(60), || count().filter(|count| *count >= enough));
        assert!(reached.is_some(), "the load does not get on: {}", recorder.log());
    };
    some_work(&recorder);
    let mut images = vec![base];
    for number in 0..3 {
        images.push(snapshot(&host, &tap, scratch.join(&format!("leaf{number}.vhd"))));
        some_work(&recorder);
    }
    let leaf = images[3].clone();
    let row = tap.row().expect("it is listed");
    assert_eq!(row.args, Some(format!("vhd:{}", text(&leaf))));
    let again = tapio_disk(&host, &tap, &["snapshot", text(&images[1])]);
    assert_eq!(again.status.code(), Some(libc::EEXIST), "{again}");
    // One commit is slowed down, watched and stopped; nothing has changed then.
    let said =
        tapio_disk(&host, &tap, &["commit", text(&images[1]), "--rate", "4K", "--detach", "--json"]).ok();
    let job: serde_json::Value = serde_json::from_str(&said).expect("it is JSON");
    let busy = tapio_disk(&host, &tap, &["commit", text(&images[2])]);
    assert_eq!(busy.status.code(), Some(libc::EBUSY), "{busy}");
    let id = job["id"].to_string();
    assert!(tapio_disk(&host, &tap, &["job", "list"]).ok().contains("running"));
    tapio_disk(&host, &tap, &["job", "cancel", &id]).ok();
    let ended = tapio_disk(&host, &tap, &["job", "wait", &id]);
    assert_eq!(ended.status.code(), Some(libc::ECANCELED), "{ended}");
    assert_chain_valid(&leaf, 4);
    // The image in the middle first, then the one below the leaf: the parent of an inner image changes, then that of
    // the leaf.
    for (image, depth) in [(&images[1], 3), (&images[2], 2)] {
        tapio_disk(&host, &tap, &["commit", text(image)]).ok();
        some_work(&recorder);
        std::fs::remove_file(image).expect("it is not needed any more");
        assert_chain_valid(&leaf, depth);
    }
    let refused = tapio_disk(&host, &tap, &["commit", text(&images[0])]);
    assert_eq!(refused.status.code(), Some(libc::EINVAL), "{refused}");
    std::fs::write(&stop, "").expect("the stop file");
    assert!(recorder.wait(Duration::from_secs(60)).success(), "{}", recorder.log());
    assert!(recorder.log().contains("verified"), "{}", recorder.log());
    tap.destroy();
    for image in [&images[0], &leaf] {
        assert_vhd_valid(image);
    }
}

#[test]
fn a_commit_that_is_killed_loses_nothing_and_is_repeated() {
    needs!("nbdsh", "nbdcopy");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let base = create_vhd(scratch.join("base.vhd"), 64);
    let tap = host.create(&format!("vhd:{}", text(&base)));
    let data = scratch.join("data");
    random_file(&data, 8 << 20);
    let write = format!("h.pwrite(open({:?}, 'rb').read()[:4 << 20], OFFSET)\nh.flush()", text(&data));
    nbdsh(&tap.uri(), &format!("OFFSET = 0\n{write}"));
    let middle = snapshot(&host, &tap, scratch.join("middle.vhd"));
    nbdsh(&tap.uri(), &format!("OFFSET = 3 << 20\n{write}"));
    nbdsh(&tap.uri(), &format!("OFFSET = 40 << 20\n{write}"));
    let leaf = snapshot(&host, &tap, scratch.join("leaf.vhd"));
    // Answered, not flushed.
    nbdsh(&tap.uri(), "h.pwrite(b'l' * 65536, 5 << 20)");
    let before = scratch.join("before");
    copy_out(&tap.uri(), &before);
    tapio_disk(&host, &tap, &["commit", text(&middle), "--rate", "256K", "--detach"]).ok();
    let begun = || {
        let said = tapio_disk(&host, &tap, &["job", "list", "--json"]).ok();
        let jobs: serde_json::Value = serde_json::from_str(&said).expect("it is JSON");
        jobs[0]["done_bytes"].as_u64().filter(|done| *done > 1 << 20)
    };
    poll_until(Duration::from_secs(60), begun).expect("the commit gets on");
    let minor = tap.minor.to_string();
    tap.kill();
    host.tap_ctl(&["free", "-m", &minor]);
    let tap = host.create(&format!("vhd:{}", text(&leaf)));
    let after = scratch.join("after");
    copy_out(&tap.uri(), &after);
    assert_eq!(sha256(&before), sha256(&after), "the kill changed the disk");
    tapio_disk(&host, &tap, &["commit", text(&middle)]).ok();
    copy_out(&tap.uri(), &after);
    assert_eq!(sha256(&before), sha256(&after), "the commit changed the disk");
    std::fs::remove_file(&middle).expect("it is not needed any more");
    tap.destroy();
    assert_chain_valid(&leaf, 2);
    assert_vhd_valid(&base);
}

/// A disk on a base, with a child that has been written to.
fn with_a_leaf(host: &Host, scratch: &Scratch, base: PathBuf) -> (Tap, PathBuf) {
    let tap = host.create(&format!("vhd:{}", text(&base)));
    let leaf = snapshot(host, &tap, scratch.join("leaf.vhd"));
    (tap, leaf)
}

fn holds_nothing(leaf: &Path) {
    let said = vhd_util(&["query", "-n", text(leaf), "-a"]).ok();
    assert_eq!(said.trim(), "0", "the old leaf holds nothing any more");
}

#[test]
fn the_leaf_is_committed_under_load() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let base = create_vhd(scratch.join("base.vhd"), 32);
    let (tap, leaf) = with_a_leaf(&host, &scratch, base.clone());
    // Behind what the recorder writes.
    nbdsh(&tap.uri(), "h.pwrite(b'd' * (6 << 20), 25 << 20)");
    let (mut recorder, stop) = start_recorder(&tap, &scratch);
    let count = |log: String| log.lines().filter_map(|line| line.trim().parse::<u64>().ok()).next_back();
    let reached = |recorder: &Running, least: u64| {
        let found =
            poll_until(Duration::from_secs(60), || count(recorder.log()).filter(|count| *count >= least));
        found.unwrap_or_else(|| panic!("the load does not get on: {}", recorder.log()))
    };
    let before = reached(&recorder, 200);
    // One is slowed down, watched and stopped; meanwhile nothing else may change.
    let said = tapio_disk(&host, &tap, &["commit", text(&leaf), "--rate", "4K", "--detach", "--json"]).ok();
    let job: serde_json::Value = serde_json::from_str(&said).expect("it is JSON");
    assert!(job["total_bytes"].as_u64() > Some(0), "{job}");
    let busy = tapio_disk(&host, &tap, &["snapshot", text(&scratch.join("other.vhd"))]);
    assert_eq!(busy.status.code(), Some(libc::EBUSY), "{busy}");
    let target = scratch.raw_image("mirror.raw", 32 << 20);
    let mirror = ["mirror", "start", "-p", &tap.pid.to_string(), "-m", &tap.minor.to_string(), "--target"];
    let busy = run(host.tapio(&["disk"]).args(mirror).arg(format!("aio:{}", text(&target))));
    assert_eq!(busy.status.code(), Some(libc::EBUSY), "{busy}");
    let before = reached(&recorder, before + 200);
    let id = job["id"].to_string();
    tapio_disk(&host, &tap, &["job", "cancel", &id]).ok();
    let ended = tapio_disk(&host, &tap, &["job", "wait", &id]);
    assert_eq!(ended.status.code(), Some(libc::ECANCELED), "{ended}");
    assert_chain_valid(&leaf, 2);
    // The next one finishes.
    tapio_disk(&host, &tap, &["commit", text(&leaf)]).ok();
    let row = tap.row().expect("it is listed");
    assert_eq!(row.args, Some(format!("vhd:{}", text(&base))));
    // A disk that still has the old leaf on top of it loses nothing by that.
    holds_nothing(&leaf);
    std::fs::remove_file(&leaf).expect("it is not needed any more");
    let before = reached(&recorder, before + 200);
    // A pause opens what the disk is on now.
    let (pid, minor) = (tap.pid.to_string(), tap.minor.to_string());
    assert!(host.tap_ctl(&["pause", "-p", &pid, "-m", &minor]).status.success());
    assert!(host.tap_ctl(&["unpause", "-p", &pid, "-m", &minor]).status.success());
    reached(&recorder, before + 200);
    std::fs::write(&stop, "").expect("the stop file");
    assert!(recorder.wait(Duration::from_secs(60)).success(), "{}", recorder.log());
    assert!(recorder.log().contains("verified"), "{}", recorder.log());
    tap.destroy();
    assert_vhd_valid(&base);
}

#[test]
fn a_commit_of_the_leaf_that_is_killed_loses_nothing_and_is_repeated() {
    needs!("nbdsh", "nbdcopy");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let base = create_vhd(scratch.join("base.vhd"), 64);
    let (tap, leaf) = with_a_leaf(&host, &scratch, base.clone());
    let data = scratch.join("data");
    random_file(&data, 8 << 20);
    let write = format!("h.pwrite(open({:?}, 'rb').read()[:4 << 20], OFFSET)\nh.flush()", text(&data));
    nbdsh(&tap.uri(), &format!("OFFSET = 3 << 20\n{write}"));
    nbdsh(&tap.uri(), &format!("OFFSET = 40 << 20\n{write}"));
    tapio_disk(&host, &tap, &["commit", text(&leaf), "--rate", "256K", "--detach"]).ok();
    let begun = || {
        let said = tapio_disk(&host, &tap, &["job", "list", "--json"]).ok();
        let jobs: serde_json::Value = serde_json::from_str(&said).expect("it is JSON");
        jobs[0]["done_bytes"].as_u64().filter(|done| *done > 1 << 20)
    };
    poll_until(Duration::from_secs(60), begun).expect("the commit gets on");
    // Answered by both, not flushed: to what was copied already, and to what was not.
    nbdsh(&tap.uri(), "h.pwrite(b'l' * 65536, 4 << 20)\nh.pwrite(b'm' * 65536, 43 << 20)");
    nbdsh(&tap.uri(), "h.pwrite(b'n' * 65536, 20 << 20)");
    let (before, after) = (scratch.join("before"), scratch.join("after"));
    copy_out(&tap.uri(), &before);
    let minor = tap.minor.to_string();
    tap.kill();
    host.tap_ctl(&["free", "-m", &minor]);
    let tap = host.create(&format!("vhd:{}", text(&leaf)));
    copy_out(&tap.uri(), &after);
    assert_eq!(sha256(&before), sha256(&after), "the kill changed the disk");
    tapio_disk(&host, &tap, &["commit", text(&leaf)]).ok();
    copy_out(&tap.uri(), &after);
    assert_eq!(sha256(&before), sha256(&after), "the commit changed the disk");
    holds_nothing(&leaf);
    tap.destroy();
    assert_chain_valid(&leaf, 2);
    assert_vhd_valid(&base);
}
