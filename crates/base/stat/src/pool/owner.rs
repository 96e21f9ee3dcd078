//! Whether a process lives: by its number and the time of its start.

use std::io;

use tapio_sys::process::{self, Stat};

use super::layout::Owner;

/// This process.
pub fn ourselves() -> io::Result<Owner> {
    Ok(Owner::new(std::process::id(), Stat::of_this()?.start))
}

/// Whether there is no process of that number: a quick look, which takes another process of the same number for the
/// one that is meant.
pub fn is_gone(owner: Owner) -> bool {
    !process::exists(owner.pid())
}

/// Whether a process is gone for good. One that cannot be looked at is taken to live.
pub fn is_dead(owner: Owner) -> bool {
    match Stat::of(owner.pid()) {
        // One that has ended and waits for its parent holds nothing any more.
        Ok(stat) => stat.start as u32 != owner.start() || stat.has_ended(),
        Err(_) => is_gone(owner),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
