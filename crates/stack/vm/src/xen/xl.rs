//! Runs xl(1), for the life of domains alone.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use uuid::Uuid;

use crate::poll::{poll, polled};
use crate::process::pidfd;

/// Most of what xl says that is looked at: some hundred bytes for each domain, of which a host may have thousands.
const SAID_LEN_MAX: u64 = 4 << 20;

/// How long a program that was killed may take to be gone.
const KILLED: Duration = Duration::from_secs(5);

/// Why a domain shut down (`SHUTDOWN_*` of Xen's public `sched.h`), by the letter that xl has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// It shut down.
    Poweroff,
    /// It wants to be started again.
    Reboot,
    /// It waits to be saved.
    Suspend,
    /// Its kernel panicked, or its watchdog bit.
    Crash,
}

/// A domain as `xl list -v` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    /// Its number.
    pub domid: u32,
    /// What it was made with.
    pub uuid: Uuid,
    /// Whether its processors are held.
    pub is_paused: bool,
    /// Whether it is being taken apart: nothing can be done with it any more.
    pub is_dying: bool,
    /// Whether it shut down, and why.
    pub ended: Option<Reason>,
}

/// The program.
#[derive(Clone, Debug)]
pub(super) struct Xl(pub PathBuf);

/// A file without a name, in memory.
fn scratch() -> io::Result<File> {
    Ok(memfd_create(c"xl", MemfdFlags::CLOEXEC)?.into())
}

fn said(mut file: File) -> io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    let mut bytes = Vec::new();
    file.take(SAID_LEN_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Xl {
    /// Runs it; answers what it said on its standard output.
    ///
    /// # Errors
    /// A sentence: it does not start, ends with an error (what it said on its error output), or is not done by
    /// `until`; it is killed then.
    pub(super) fn run<S: AsRef<OsStr>>(&self, arguments: &[S], until: Instant) -> Result<String, String> {
        let shown = || {
            let words: Vec<_> = arguments.iter().map(|word| word.as_ref().to_string_lossy()).collect();
            format!("{} {}", self.0.display(), words.join(" "))
        };
        let told = |error: io::Error| format!("{}: {error}", shown());
        let (out, err) = (scratch().map_err(told)?, scratch().map_err(told)?);
        let mut command = Command::new(&self.0);
        command.args(arguments).stdin(Stdio::null()).process_group(0);
        command.stdout(out.try_clone().map_err(told)?).stderr(err.try_clone().map_err(told)?);
        let mut child = command.spawn().map_err(told)?;
        let ended = pidfd(child.id().cast_signed()).map(|fd| {
            use std::os::fd::AsRawFd;
            poll(&mut [polled(fd.as_raw_fd(), libc::POLLIN)], until)
        });
        if !ended.unwrap_or(false) {
            let _ = child.kill();
            let until = Instant::now() + KILLED;
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
                poll(&mut [], Instant::now() + Duration::from_millis(10));
            }
            let words = said(err).unwrap_or_default();
            return Err(format!("{}: it was not done in time and was killed; {}", shown(), words.trim()));
        }
        let status = child.wait().map_err(told)?;
        if status.success() {
            return said(out).map_err(told);
        }
        let words = said(err).unwrap_or_default();
        let lines: Vec<&str> = words.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let last = lines[lines.len().saturating_sub(6)..].join(" | ");
        Err(format!("{}: {status}: {last}", shown()))
    }

    /// Makes a domain, paused; no xl process stays to supervise it.
    pub(super) fn create(&self, config: &Path, until: Instant) -> Result<(), String> {
        let arguments = [OsStr::new("create"), OsStr::new("-p"), OsStr::new("-e"), config.as_os_str()];
        self.run(&arguments, until).map(drop)
    }

    /// Does something that takes nothing but a domain: `pause`, `unpause`, `destroy`.
    pub(super) fn act(&self, what: &str, domid: u32, until: Instant) -> Result<(), String> {
        self.run(&[what, &domid.to_string()], until).map(drop)
    }

    /// All domains.
    pub(super) fn list(&self, until: Instant) -> Result<Vec<Listed>, String> {
        Ok(self.run(&["list", "-v"], until)?.lines().filter_map(listed).collect())
    }
}

/// A line of `xl list -v`: name, number, MiB, processors, state, seconds, UUID, reason and more. Names may have spaces,
/// and could look like the rest: the last UUID is the domain's.
fn listed(line: &str) -> Option<Listed> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().rposition(|word| word.len() == 36 && Uuid::try_parse(word).is_ok())?;
    let uuid = Uuid::try_parse(words[at]).ok()?;
    let state = words.get(at.checked_sub(2)?)?.as_bytes();
    let domid = words.get(at.checked_sub(5)?)?.parse().ok()?;
    let [_, _, paused, shutdown, reason, dying] = *state else { return None };
    let ended = (shutdown == b's').then_some(match reason {
        b'-' => Reason::Poweroff,
        b'r' | b'S' => Reason::Reboot,
        b's' => Reason::Suspend,
        _ => Reason::Crash,
    });
    Some(Listed { domid, uuid, is_paused: paused == b'p', is_dying: dying == b'd', ended })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Columns are set further apart by xl; what separates them does not matter.
    const LIST: &str = "\
Name      ID   Mem VCPUs\tState\tTime(s)   UUID        Reason-Code\tSecurity Label
Domain-0   0   768     1     r-----      12.3 00000000-0000-0000-0000-000000000000  -   -
guest.0a   1   192     1     -b----       2.0 0a000000-0000-0000-0000-000000000001  -   -
two 9 9 9 --p--- 1 0a000000-0000-0000-0000-000000000001 0  2 192 1 --p--- 0.0 0a000000-0000-0000-0000-000000000002 - -
off        3   192     1     ---s--       9.1 0a000000-0000-0000-0000-000000000003  0   -
again      4   192     1     ---sr-       9.1 0a000000-0000-0000-0000-000000000004  1   -
panic      5   192     1     ---sc-       9.1 0a000000-0000-0000-0000-000000000005  3   -  Capabilities
(null)     6     0     1     --psd        0.1 0a000000-0000-0000-0000-000000000006  -
(null)     7     0     1     --p--d       0.1 0a000000-0000-0000-0000-000000000007  -
";

    #[test]
    fn lines_are_domains() {
        let all: Vec<Listed> = LIST.lines().filter_map(listed).collect();
        let number = |domid: u32| all.iter().find(|found| found.domid == domid);
        assert_eq!(all.len(), 7, "a state of five letters is none");
        let plain = |domid: u32, last: u128| Listed {
            domid,
            uuid: Uuid::from_u128(if last == 0 { 0 } else { (0x0a00_0000_u128 << 96) | last }),
            is_paused: false,
            is_dying: false,
            ended: None,
        };
        assert_eq!(number(0), Some(&plain(0, 0)));
        assert_eq!(number(1), Some(&plain(1, 1)));
        assert_eq!(
            number(2),
            Some(&Listed { is_paused: true, ..plain(2, 2) }),
            "a name that looks like a line"
        );
        assert_eq!(number(3), Some(&Listed { ended: Some(Reason::Poweroff), ..plain(3, 3) }));
        assert_eq!(number(4), Some(&Listed { ended: Some(Reason::Reboot), ..plain(4, 4) }));
        assert_eq!(number(5), Some(&Listed { ended: Some(Reason::Crash), ..plain(5, 5) }));
        assert_eq!(number(7), Some(&Listed { is_paused: true, is_dying: true, ..plain(7, 7) }));
    }

    #[test]
    fn what_it_says_and_how_it_fails_is_told() {
        let soon = || Instant::now() + Duration::from_secs(60);
        let shell = Xl("/bin/sh".into());
        assert_eq!(shell.run(&["-c", "echo out; echo err >&2"], soon()).unwrap(), "out\n");
        let error = shell.run(&["-c", "echo no such domain >&2; exit 3"], soon()).unwrap_err();
        assert!(error.contains("no such domain") && error.contains("exit status: 3"), "{error}");
        let begun = Instant::now();
        let late = shell.run(&["-c", "sleep 600"], Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert!(late.contains("not done in time"), "{late}");
        assert!(begun.elapsed() < Duration::from_secs(300));
        let absent = Xl("/no/such/xl".into()).run(&["list"], soon()).unwrap_err();
        assert!(absent.contains("/no/such/xl list"), "{absent}");
    }
}
