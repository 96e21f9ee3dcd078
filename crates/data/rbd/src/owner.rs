//! The process that has an image's lock, as it notes itself in the image's metadata: so that its successor on the same
//! host knows at once that it is dead, and need not wait until the cluster does.

use std::fs;

/// The key of the note of a process that writes.
pub(crate) const WRITER: &str = "tapio.writer";
/// The key of the note of a process that takes snapshots and changes sizes: librbd takes the lock for that, if no
/// writer has it.
pub(crate) const MANAGER: &str = "tapio.manager";

/// A process, and the client that it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// The cluster's number of the client.
    pub(crate) client: u64,
    /// The run of the host's kernel.
    boot: String,
    /// The namespace of process numbers.
    numbers: String,
    pid: u32,
    /// When it began, in ticks of the host.
    started: u64,
}

fn boot() -> Option<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| is_plain(id))
}

fn numbers() -> Option<String> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(link.to_str()?.chars().filter(char::is_ascii_digit).collect())
}

fn is_plain(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 64
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// When a process began; none where there is no such process.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    // A process that has ended and was not waited for writes no more.
    if fields.next()? == "Z" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

impl Owner {
    /// This process as the client of that number; none where the system does not tell.
    pub(crate) fn this(client: u64) -> Option<Self> {
        let pid = std::process::id();
        Some(Self { client, boot: boot()?, numbers: numbers()?, pid, started: started(pid)? })
    }

    /// The note.
    pub(crate) fn text(&self) -> String {
        format!("{} {} {} {} {}", self.client, self.boot, self.numbers, self.pid, self.started)
    }

    /// Reads a note, which any client of the cluster may have written.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let [client, boot, numbers, pid, started]: [&str; 5] =
            text.split(' ').collect::<Vec<_>>().try_into().ok()?;
        if !is_plain(boot) || !is_plain(numbers) {
            return None;
        }
        Some(Self {
            client: client.parse().ok()?,
            boot: boot.to_owned(),
            numbers: numbers.to_owned(),
            pid: pid.parse().ok()?,
            started: started.parse().ok()?,
        })
    }

    /// Whether it was a process of this host that has ended.
    pub(crate) fn is_dead(&self) -> bool {
        let is_ours = boot().as_ref() == Some(&self.boot) && numbers().as_ref() == Some(&self.numbers);
        is_ours && started(self.pid) != Some(self.started)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_ended_is_known_dead_and_one_of_another_host_is_not() {
        let this = Owner::this(7).expect("proc(5)");
        assert_eq!(Owner::parse(&this.text()), Some(this.clone()));
        assert!(!this.is_dead());
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("a process");
        let began = started(child.id()).expect("it runs");
        let other = Owner { pid: child.id(), started: began, ..this.clone() };
        assert!(!other.is_dead());
        child.kill().expect("killed");
        while started(child.id()).is_some() {
            std::thread::yield_now();
        }
        assert!(other.is_dead(), "a zombie");
        child.wait().expect("waited for");
        assert!(other.is_dead());
        let elsewhere = Owner { boot: "another".into(), ..other };
        assert!(!elsewhere.is_dead(), "another host's processes are not known here");
        for text in ["", "1 2 3 4", "x boot 1 2 3", "1 bo/ot 1 2 3", "1 boot 1 2 3 4"] {
            assert_eq!(Owner::parse(text), None, "{text}");
        }
    }
}
