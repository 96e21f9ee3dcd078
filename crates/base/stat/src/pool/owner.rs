//! Whether a process lives: by its number and the time of its start.

use std::fs;
use std::io;

use super::layout::Owner;

/// The state letter and the start, in clock ticks since the host's, of a process; from the line of the kernel.
fn parse(stat: &str) -> Option<(u8, u64)> {
    // The name may hold anything, but it ends at the last parenthesis.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// This process.
pub fn ourselves() -> io::Result<Owner> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let (_, start) = parse(&stat).ok_or_else(|| io::Error::other("/proc/self/stat is not understood"))?;
    Ok(Owner::new(std::process::id(), start))
}

/// Whether there is no process of that number: a quick look, which takes another process of the same number for the
/// one that is meant.
pub fn is_gone(owner: Owner) -> bool {
    let Some(pid) = i32::try_from(owner.pid()).ok().filter(|pid| *pid > 0) else { return true };
    // SAFETY: signal 0 is not sent; the call only tells whether it could be.
    let asked = unsafe { libc::kill(pid, 0) };
    asked != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}

/// Whether a process is gone for good. One that cannot be looked at is taken to live.
pub fn is_dead(owner: Owner) -> bool {
    let Some(pid) = i32::try_from(owner.pid()).ok().filter(|pid| *pid > 0) else { return true };
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        // One that has ended and waits for its parent holds nothing any more.
        Ok(stat) => parse(&stat)
            .is_some_and(|(state, start)| start as u32 != owner.start() || matches!(state, b'Z' | b'X')),
        Err(_) => is_gone(owner),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_kernel_is_understood_whatever_the_name_is() {
        let stat = "42 (a) S 1 (b)) R 1 42 42 0 -1 4194560 1 0 0 0 7 8 0 0 20 0 1 0 123456 1000 2 3";
        assert_eq!(parse(stat), Some((b'R', 123_456)));
        for bad in ["", "42 (x)", "42 (x) R 1", "no parenthesis"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn this_process_lives_and_one_of_another_start_does_not() {
        let ours = ourselves().expect("the kernel tells");
        assert!(!is_dead(ours) && !is_gone(ours));
        assert!(is_dead(Owner::new(ours.pid(), u64::from(ours.start()) + 1)));
        assert!(is_dead(Owner::new(u32::MAX, 1)) && is_dead(Owner::new(0, 1)));
        let mut child = std::process::Command::new("true").spawn().expect("a child");
        let owner = Owner::new(child.id(), 0);
        child.wait().expect("it ends");
        assert!(is_dead(owner) && is_gone(owner) && is_gone(Owner::new(0, 1)));
    }
}
