use std::collections::BTreeSet;
use std::io::Read;
use std::time::{Duration, UNIX_EPOCH};

use flate2::read::GzDecoder;

use super::*;
use crate::lines::Log;

const DAY: Duration = Duration::from_secs(86_400);

fn small() -> Rotation {
    Rotation { len_max: 1_000, kept: 3 }
}

/// All lines of a log, oldest part first; parts that are compressed are unpacked.
fn lines(dir: &Path) -> Vec<String> {
    let mut text = String::new();
    for number in (1..100).rev() {
        // Both are there between two steps of a compression, and have the same lines.
        let plain = dir.join(format!("a.log.{number}"));
        if let Ok(file) = File::open(dir.join(format!("a.log.{number}.gz"))) {
            GzDecoder::new(file).read_to_string(&mut text).unwrap();
        } else if let Ok(part) = fs::read_to_string(plain) {
            text.push_str(&part);
        }
    }
    text.push_str(&fs::read_to_string(dir.join("a.log")).unwrap_or_default());
    text.lines().map(str::to_owned).collect()
}

fn names(dir: &Path) -> BTreeSet<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_log_is_rotated_by_size_and_keeps_so_many_parts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.log");
    let mut log = Rotated::open(&path, small()).unwrap();
    for number in 0..1_000 {
        log.write(format!("line {number:04}\n").as_bytes(), SystemTime::now()).unwrap();
    }
    drop(log);
    assert_eq!(
        names(dir.path()),
        BTreeSet::from(["a.log", "a.log.1.gz", "a.log.2.gz", "a.log.3.gz"].map(String::from))
    );
    let kept = lines(dir.path());
    let last: Vec<String> = (1_000 - kept.len()..1_000).map(|number| format!("line {number:04}")).collect();
    assert_eq!(kept, last, "the newest lines, in order, without a gap");
    assert!(kept.len() >= 300);
    assert!(fs::metadata(&path).unwrap().len() <= 1_000);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    // Fewer are kept from now on.
    let mut log = Rotated::open(&path, Rotation { kept: 1, ..small() }).unwrap();
    log.write(&[b'x'; 999], SystemTime::now()).unwrap();
    drop(log);
    assert_eq!(names(dir.path()), BTreeSet::from(["a.log", "a.log.1.gz"].map(String::from)));
    let mut log = Rotated::open(&path, Rotation { kept: 0, ..small() }).unwrap();
    log.write(&[b'y'; 999], SystemTime::now()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), [b'y'; 999]);
}

#[test]
fn a_log_is_rotated_daily() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.log");
    fs::write(&path, "of an earlier day\n").unwrap();
    let earlier = UNIX_EPOCH + DAY * 20_000;
    File::options().write(true).open(&path).unwrap().set_modified(earlier).unwrap();
    let mut log = Rotated::open(&path, Rotation::default()).unwrap();
    log.write(b"same day\n", earlier + Duration::from_secs(60)).unwrap();
    log.write(b"next day\n", earlier + DAY).unwrap();
    log.write(b"still\n", earlier + DAY).unwrap();
    log.write(b"a week later\n", earlier + DAY * 8).unwrap();
    drop(log);
    assert_eq!(names(dir.path()), BTreeSet::from(["a.log", "a.log.1.gz", "a.log.2.gz"].map(String::from)));
    assert_eq!(lines(dir.path()), ["of an earlier day", "same day", "next day", "still", "a week later"]);
}

#[test]
fn a_file_that_another_program_moves_or_removes_is_begun_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.log");
    let mut log = Rotated::open(&path, Rotation::default()).unwrap();
    let now = SystemTime::now();
    log.write(b"one\n", now).unwrap();
    fs::rename(&path, dir.path().join("moved")).unwrap();
    log.write(b"two\n", now).unwrap();
    fs::remove_file(&path).unwrap();
    log.write(b"three\n", now).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    log.write(b"four\n", now).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "four\n");
    assert_eq!(fs::read_to_string(dir.path().join("moved")).unwrap(), "one\n");
}

/// Every state that a kill between two steps can leave, made by hand: the next rotation loses no line of a part that is
/// to be kept.
#[test]
fn a_kill_between_two_steps_loses_nothing() {
    // Which of the names are there when the process is killed; `both` is a part that was just compressed.
    let states: [&[&str]; 7] = [
        &["a.log", "a.log.1", "a.log.2"],
        &["a.log", "a.log.1", "a.log.3"],
        &["a.log", "a.log.2", "a.log.3"],
        &["a.log", "a.log.2", "a.log.3", "a.log.new"],
        &["a.log.1", "a.log.2", "a.log.new"],
        &["a.log", "a.log.1", "a.log.1.gz", "a.log.2"],
        &["a.log", "a.log.1", "a.log.gz.new", "a.log.2"],
    ];
    for state in states {
        let dir = tempfile::tempdir().unwrap();
        for name in state {
            let path = dir.path().join(name);
            match *name {
                "a.log.new" => fs::write(&path, "").unwrap(),
                "a.log.gz.new" => fs::write(&path, "half").unwrap(),
                "a.log.1.gz" => {
                    let mut encoder = flate2::write::GzEncoder::new(
                        File::create(&path).unwrap(),
                        flate2::Compression::fast(),
                    );
                    encoder.write_all(b"in a.log.1\n").unwrap();
                    encoder.finish().unwrap();
                }
                _ => fs::write(&path, format!("in {name}\n")).unwrap(),
            }
        }
        let before = lines(dir.path());
        let mut log = Rotated::open(&dir.path().join("a.log"), Rotation { len_max: 12, kept: 5 }).unwrap();
        log.write(b"after the kill\n", SystemTime::now()).unwrap();
        log.write(b"and later on\n", SystemTime::now()).unwrap();
        drop(log);
        let mut wanted = before;
        wanted.extend(["after the kill".to_owned(), "and later on".to_owned()]);
        assert_eq!(lines(dir.path()), wanted, "{state:?}");
        assert!(
            names(dir.path()).iter().all(|name| !name.ends_with(".new")),
            "{state:?}: {:?}",
            names(dir.path())
        );
    }
}

#[test]
fn lines_of_many_threads_are_all_there_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = Rotated::open(&dir.path().join("a.log"), Rotation { len_max: 2_000, kept: 90 }).unwrap();
    let log = Log::in_file(file).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let log = &log;
            scope.spawn(move || {
                for number in 0..100 {
                    log.line(format!("thread {thread} line {number:03} {}", "x".repeat(60)));
                }
            });
        }
    });
    assert!(log.flush(Duration::from_secs(60)));
    drop(log);
    let found = lines(dir.path());
    // No more lines than the queue holds were said at a time.
    let distinct: BTreeSet<&String> = found.iter().collect();
    assert_eq!((found.len(), distinct.len()), (800, 800));
}

#[test]
fn a_file_that_cannot_be_rotated_is_bounded_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.log");
    // The name that the older part needs is a directory with something in it.
    fs::create_dir_all(dir.path().join("a.log.1/x")).unwrap();
    let mut log = Rotated::open(&path, Rotation { len_max: 100, kept: 1 }).unwrap();
    let written = (0..100).filter(|_| log.write(&[b'x'; 50], SystemTime::now()).is_ok()).count();
    assert!((2..10).contains(&written), "{written}");
    assert!(fs::metadata(&path).unwrap().len() <= 300);
    fs::remove_dir_all(dir.path().join("a.log.1")).unwrap();
    log.write(b"again\n", SystemTime::now()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"again\n");
}

#[test]
fn what_is_no_file_takes_lines_and_is_not_rotated() {
    let mut log = Rotated::open(Path::new("/dev/null"), small()).unwrap();
    (0..100).for_each(|_| log.write(&[b'x'; 500], SystemTime::now()).unwrap());
    assert!(!Path::new("/dev/null.1").exists());
}
