//! Processors of the host on which a guest may run: `VCPUs_params:mask`, a list of their numbers.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

/// Reads a list as `0,2,5-7`.
///
/// # Errors
/// What is wrong, to stand behind the name of the list.
pub(super) fn parse(text: &str) -> Result<BTreeSet<usize>, String> {
    let bad =
        || format!("is {text:?}: numbers of processors are possible, as 0,2,5-7, below {}", CpuSet::MAX_CPU);
    let number =
        |text: &str| text.trim().parse().ok().filter(|&number| number < CpuSet::MAX_CPU).ok_or_else(bad);
    let mut cpus = BTreeSet::new();
    for part in text.split(',') {
        match part.split_once('-') {
            Some((first, last)) => cpus.extend(number(first)?..=number(last)?),
            None => drop(cpus.insert(number(part)?)),
        }
    }
    if cpus.is_empty() { Err(bad()) } else { Ok(cpus) }
}

/// Ties all threads of a process to processors; threads that it starts later are tied by the one that starts them.
///
/// # Errors
/// The kernel's: none of the processors is there, for example.
pub(super) fn set(pid: i32, cpus: &BTreeSet<usize>) -> io::Result<()> {
    let mut wanted = CpuSet::new();
    cpus.iter().for_each(|cpu| wanted.set(*cpu));
    let mut tied = BTreeSet::new();
    // A thread that was not tied yet may have started another one meanwhile: until there is no new one.
    loop {
        let mut is_new = false;
        for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
            let thread =
                entry?.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
            let Some(thread) = thread.filter(|thread| tied.insert(thread.as_raw_nonzero())) else { continue };
            is_new = true;
            match sched_setaffinity(Some(thread), &wanted) {
                // A thread that has ended since.
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if !is_new {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(parse("0,2,5-7").unwrap(), BTreeSet::from([0, 2, 5, 6, 7]));
        assert_eq!(parse(" 3 ").unwrap(), BTreeSet::from([3]));
        for wrong in ["", "a", "3-", "7-5", "-1", "0,,1", "99999999999", "0-4000000"] {
            assert!(parse(wrong).unwrap_err().contains("numbers of processors"), "{wrong}");
        }
    }

    #[test]
    fn a_process_is_tied() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        set(pid, &BTreeSet::from([0])).unwrap();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map(str::trim);
        assert_eq!(allowed, Some("0"));
        assert!(set(pid, &BTreeSet::from([1023])).is_err(), "there is no such processor");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
