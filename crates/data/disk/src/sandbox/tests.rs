//! What the process that restricted itself still can do, tried by this program in a copy of itself.

use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use super::*;

/// Which attempt the copy makes.
const ATTEMPT: &str = "TAPIO_TEST_ATTEMPT";

/// Runs this test program again, with only the test `attempts`, which does what `what` names.
fn attempt(what: &str) -> Output {
    let program = std::env::current_exe().expect("this program has a path");
    Command::new(program)
        .args(["--exact", "sandbox::tests::attempts", "--nocapture", "--test-threads=1"])
        .env(ATTEMPT, what)
        .output()
        .expect("a copy of this program runs")
}

fn died_of_it(what: &str) {
    let output = attempt(what);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGSYS), "{what}: {output:?}");
    assert!(said.contains(&format!("({what})")) && said.contains("--sandbox off"), "{what}: {said}");
}

fn went_well(what: &str) {
    let output = attempt(what);
    assert!(output.status.success(), "{what}: {output:?}");
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Not a test by itself: what a copy of this program tries inside the sandbox.
#[test]
fn attempts() {
    let Ok(what) = std::env::var(ATTEMPT) else { return };
    // Core dumps of processes that die on purpose are of no use.
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
    let (dir, confined) = (std::env::temp_dir(), tapio_sandbox::landlock::version().is_some());
    enter(&Sandbox::default(), &Own { files: vec![dir], ..Own::default() }).expect("the sandbox");
    // SAFETY: calls with plain numbers, static strings and memory of this function; those that would do harm are
    // what must not happen.
    unsafe {
        match what.as_str() {
            "execve" => {
                let arguments = [c"/bin/true".as_ptr(), std::ptr::null()];
                libc::execv(c"/bin/true".as_ptr(), arguments.as_ptr());
            }
            "ptrace" => {
                libc::syscall(libc::SYS_ptrace, 16, 1, 0, 0);
            }
            "mount" => {
                libc::mount(c"none".as_ptr(), c"/mnt".as_ptr(), c"tmpfs".as_ptr(), 0, std::ptr::null());
            }
            "setresuid" => {
                libc::syscall(libc::SYS_setresuid, 0, 0, 0);
            }
            "bpf" => {
                libc::syscall(libc::SYS_bpf, 0, 0, 0);
            }
            "refused" => refused_gently(confined),
            "data" => data_thread(),
            "panic" => {
                let result = std::panic::catch_unwind(|| panic!("on purpose"));
                assert!(result.is_err());
            }
            _ => panic!("no attempt is called {what}"),
        }
    }
    assert!(["refused", "data", "panic"].contains(&what.as_str()), "{what} was possible");
}

/// What fails with an error; `confined`: the kernel has Landlock.
fn refused_gently(confined: bool) {
    // SAFETY: as in `attempts`.
    unsafe {
        for family in [libc::AF_NETLINK, libc::AF_PACKET, libc::AF_VSOCK] {
            assert_eq!(libc::socket(family, libc::SOCK_RAW, 0), -1);
            assert_eq!(errno(), libc::EAFNOSUPPORT);
        }
        let inet = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        assert!(inet >= 0);
        libc::close(inet);
        let code = libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_EXEC,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_eq!((code, errno()), (libc::MAP_FAILED, libc::EACCES));
        assert_eq!(libc::fork(), -1);
        assert_eq!(errno(), libc::EPERM);
        assert_eq!(libc::kill(libc::getpid(), libc::SIGTERM), -1);
        assert_eq!(errno(), libc::EPERM);
        assert_eq!(libc::kill(libc::getpid(), 0), 0);
    }
    if confined {
        let error = fs::write("/etc/tapio-sandbox-test", "x").expect_err("a directory of the system");
        assert!(matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem));
    }
    // Ordinary life goes on: files, threads, sockets.
    let path = std::env::temp_dir().join(format!("tapio-sandbox-{}", std::process::id()));
    fs::write(&path, "ordinary").expect("written");
    assert_eq!(fs::read_to_string(&path).expect("read"), "ordinary");
    fs::remove_file(&path).expect("removed");
    assert_eq!(std::thread::spawn(|| 7).join().expect("no panic"), 7);
    let status = fs::read_to_string("/proc/thread-self/status").expect("readable");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("it is there");
        u64::from_str_radix(line.trim(), 16).expect("a number")
    };
    assert_eq!(field("NoNewPrivs:"), 1);
    assert_eq!(field("Seccomp:"), 2);
    // CAP_DAC_OVERRIDE, CAP_NET_BIND_SERVICE and CAP_IPC_LOCK at most.
    for set in ["CapEff:", "CapPrm:", "CapInh:"] {
        assert_eq!(field(set) & !(1 << 1 | 1 << 10 | 1 << 14), 0, "{set}");
    }
}

fn data_thread() {
    let thread = std::thread::spawn(|| {
        enter_data_thread();
        let listens = || std::net::TcpListener::bind("127.0.0.1:0").is_ok();
        assert!(!listens(), "a data thread listens");
        // Those that it starts are no freer.
        let heir = std::thread::spawn(listens);
        assert!(!heir.join().expect("no panic"), "an heir of a data thread listens");
        fs::read("/proc/stat").expect("it reads files");
    });
    thread.join().expect("no panic");
    std::net::TcpListener::bind("127.0.0.1:0").expect("others may");
}

#[test]
fn forbidden_calls_end_the_process_and_are_named() {
    for what in ["execve", "ptrace", "mount", "setresuid", "bpf"] {
        died_of_it(what);
    }
}

#[test]
fn what_libraries_try_fails_gently_and_ordinary_life_goes_on() {
    went_well("refused");
    went_well("panic");
}

#[test]
fn data_threads_may_do_less() {
    went_well("data");
}

#[test]
fn the_list_can_be_read() {
    let text = describe();
    assert!(
        text.contains("io_uring_enter") && text.contains("not on data threads") && !text.contains("execve")
    );
}

#[test]
fn off_means_nothing_happens() {
    let off = Sandbox { is_off: true, allowed: vec![PathBuf::from("/no/such")], ..Sandbox::default() };
    enter(&off, &Own::default()).expect("nothing to fail");
    assert!(Command::new("true").status().expect("programs can be started").success());
}
