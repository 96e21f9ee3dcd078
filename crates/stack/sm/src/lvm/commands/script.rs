//! Several of LVM's commands in one process: a script, which `lvm` reads line by line. One start of the program and one
//! reading of its configuration serve all lines. It ends at the first command that fails.
//!
//! The script is a file in memory of this process, by its path below `/proc`, so that nothing is left when the process
//! dies. `lvm` closes descriptors that it inherits beyond the first three; standard input holds the lock.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};

use super::{UDEV, filter};
use crate::command::{self, Failure};
use crate::lock;

/// Bytes that `lvm` takes of a line of a script, its end included.
const LINE_MAX: usize = 255;
/// Words that it takes of one.
const WORDS_MAX: usize = 63;

/// [`filter`], with one pattern for devices that lie in `/dev`.
fn short_filter(devices: &[String]) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '-' | ':');
    let names: Option<Vec<&str>> = devices
        .iter()
        .map(|name| name.strip_prefix("/dev/").filter(|name| name.chars().all(is_plain)))
        .collect();
    match names {
        Some(names) => format!("filter=[\"a!^/dev/({})$!\",\"r!.*!\"]", names.join("|")),
        None => filter(devices),
    }
}

/// The script of these lines of words; none where one of them is longer than `lvm` reads.
pub(super) fn text(devices: &[String], lines: &[Vec<String>]) -> Option<String> {
    // Devices by their names without links, which are short: `/dev/mapper/3600...` is `/dev/dm-3`.
    let short = |name: &String| -> String {
        let real = std::fs::canonicalize(name).ok().and_then(|path| path.to_str().map(str::to_owned));
        real.filter(|real| real.len() < name.len()).unwrap_or_else(|| name.clone())
    };
    let devices: Vec<String> = devices.iter().map(short).collect();
    let devices =
        if devices.is_empty() { String::new() } else { format!("devices{{{}}}", short_filter(&devices)) };
    // LVM keeps what it archives for a month, and disks grow every few seconds. Its backup is of the last state.
    let settings = format!("{devices}backup{{archive=0}}");
    let mut text = String::from("#!lvm\n");
    for line in lines {
        let (program, words) = line.split_first()?;
        let is_plain = |word: &String| {
            !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_graphic() && !b"'\"#".contains(&byte))
        };
        if line.len() + 2 > WORDS_MAX || !line.iter().all(is_plain) {
            return None;
        }
        let said = format!("{program} --config '{settings}' {}\n", words.join(" "));
        if said.len() > LINE_MAX {
            return None;
        }
        text.push_str(&said);
    }
    Some(text)
}

/// Runs a script.
///
/// # Errors
/// A command of it fails: a sentence with what that said. The program does not end in time, or is not installed.
pub(super) fn run(text: &str, limit: Duration) -> Result<(), Failure> {
    let made = memfd_create("lvm-script", MemfdFlags::CLOEXEC).map_err(std::io::Error::from).and_then(|fd| {
        let mut file = File::from(fd);
        file.write_all(text.as_bytes())?;
        Ok(file)
    });
    let file = made.map_err(|error| Failure::new(format!("cannot make a script for 'lvm': {error}")))?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    // What `settings` says for a single program is too long for a line.
    let variable = (!Path::new(UDEV).exists()).then_some(("DM_DISABLE_UDEV", "1"));
    command::run_holding("lvm", &[&path], variable, lock::of_this_thread(), limit).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn what_fits_is_a_script_and_what_does_not_is_none() {
        let group = format!("VG_XenStorage-{}", uuid::Uuid::nil());
        let journal = format!("inflate_{}_1099511627776", uuid::Uuid::nil());
        let lines = [
            line(&format!("lvcreate -y -an -Wn -Zn -n {journal} -L 4194304b --addtag journaler {group}")),
            line(&format!("lvextend -y -L 8388608b {group}/VHD-{}", uuid::Uuid::nil())),
        ];
        let devices = ["/dev/xvdz", "/dev/xvdy"].map(str::to_owned);
        let script = text(&devices, &lines).unwrap();
        let said: Vec<&str> = script.lines().collect();
        assert_eq!(said[0], "#!lvm");
        let settings = r#"--config 'devices{filter=["a!^/dev/(xvdz|xvdy)$!","r!.*!"]}backup{archive=0}'"#;
        assert!(said[1].starts_with(&format!("lvcreate {settings} -y -an ")), "{script}");
        assert!(said[2].starts_with(&format!("lvextend {settings} -y -L ")), "{script}");
        assert!(said.len() == 3 && said.iter().all(|line| line.len() < LINE_MAX), "{script}");
        let many: Vec<String> = (0..8).map(|at| format!("/dev/mapper/3600a098038303{at}")).collect();
        assert_eq!(text(&many, &lines), None, "too long");
        let odd = ["/tmp/a disk".to_owned()];
        assert!(text(&odd, &lines).unwrap().contains(r#"filter=["a|^/tmp/a.disk$|","r|.*|"]"#));
        assert!(text(&[], &lines).unwrap().contains("--config 'backup{archive=0}'"));
        for bad in ["lvcreate a'b", "lvcreate a#b", "lvcreate  x"] {
            assert_eq!(text(&[], &[line(bad)]), None, "{bad}");
        }
        assert_eq!(text(&[], &[Vec::new()]), None);
    }
}
