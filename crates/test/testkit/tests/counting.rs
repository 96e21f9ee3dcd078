//! The last line of a test run is a claim; here is its proof: `scripts/count.sh` on logs whose truth is known.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const LOG: &str = "\
running 4 tests
test a ... ok
test b ...
skipped: needs fio [b]
ok
test c ... ignored, takes hours
test d ... FAILED

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.10s

     Running tests/it/main.rs
test result: ok. 10 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s
The words skipped: in the middle of a line are no skip, and test result: neither.
";

/// Runs the functions on a log with this list of allowed skips, and gives what they found.
fn judge(allowed: &str) -> String {
    let script = "trouble=()
        count log
        judge_skips log lane
        echo \"$tests_passed $tests_failed $tests_skipped\"
        printf '%s\\n' \"${trouble[@]}\"";
    on_log(LOG, allowed, script)
}

/// What a script says that has the functions of `scripts/count.sh` and a log.
fn on_log(log: &str, allowed: &str, script: &str) -> String {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).expect("three levels below the top");
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(dir.path().join("tests")).expect("a directory");
    std::fs::write(dir.path().join("tests/skips.allowed"), allowed).expect("the list");
    std::fs::write(dir.path().join("log"), log).expect("the log");
    let script = format!(". {}/scripts/count.sh\n{script}", top.display());
    let mut bash = Command::new("bash")
        .current_dir(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("bash starts");
    bash.stdin.take().expect("piped").write_all(script.as_bytes()).expect("bash reads");
    let output = bash.wait_with_output().expect("bash ends");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn skipped_tests_are_not_counted_as_passed() {
    let found = judge("needs fio  it is optional\nignored: c  takes hours\n");
    assert_eq!(found.trim(), "11 1 2");
}

#[test]
fn a_skip_that_is_not_allowed_is_trouble() {
    let found = judge("# needs fio  a comment allows nothing\nneeds fi  a pattern matches whole reasons\n");
    let mut lines = found.lines();
    assert_eq!(lines.next(), Some("11 1 2"));
    let trouble: Vec<&str> = lines.collect();
    assert_eq!(trouble.len(), 2, "{found}");
    assert!(trouble[0].contains("needs fio") && trouble[1].contains("ignored test: c"), "{found}");
}

#[test]
fn a_lane_that_is_late_names_the_tests_and_stories_that_were_not_over() {
    let log = "\
xen chain+rings: boot took 29.6 s; chain begins and may take 137 s (its VM booted in 29.6 s)
xen chain+rings: chain took 3.0 s; rings begins and may take 270 s (its VM booted in 29.6 s)
xen devices: devices took 1.0 s; end begins and may take 67 s (its VM booted in 29.6 s)
test xen::first has been running for over 60 seconds
test xen::second has been running for over 60 seconds
test xen::first ... ok
";
    let found = on_log(log, "", "late log");
    let expected = "; xen::second was not over; \
                    chain+rings: rings begins and may take 270 s (its VM booted in 29.6 s)";
    assert_eq!(found, expected);
}

#[test]
fn the_last_lines_of_a_run_say_why_tests_failed_and_nothing_of_those_that_passed() {
    let log = "\
successes:

---- passes stdout ----
thread 'passes' panicked at lib.rs:1:1:
as it should

failures:

---- fails stdout ----
starts
thread 'fails' (7) panicked at lib.rs:2:2:
no answer

expected: 1
stack backtrace:
   0: begin_unwind

---- late stdout ----
thread 'late' panicked at lib.rs:3:3:
no end
note: run with `RUST_BACKTRACE=1`


failures:
    fails
    late

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s
thread 'other' panicked at lib.rs:4:4:
";
    let expected = "\
fails:
  thread 'fails' (7) panicked at lib.rs:2:2:
  no answer
  expected: 1
late:
  thread 'late' panicked at lib.rs:3:3:
  no end
";
    assert_eq!(on_log(log, "", "causes log"), expected);
}
