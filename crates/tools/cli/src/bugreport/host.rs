//! What is taken of this host's files and of the daemon's settings: lines and words that a list names.

use std::fmt::Write as _;

use super::redact::LEFT_OUT;

/// Files of this host that are taken whole.
pub(super) const FILES: [(&str, &str); 4] = [
    ("host/kernel.txt", "/proc/version"),
    ("host/os.txt", "/etc/os-release"),
    ("host/block-devices.txt", "/proc/partitions"),
    ("host/memory.txt", "/proc/meminfo"),
];

/// Options of mounts that keep their values; any other option keeps its name.
const MOUNT_OPTIONS: [&str; 24] = [
    "acdirmax",
    "acdirmin",
    "acregmax",
    "acregmin",
    "actimeo",
    "addr",
    "commit",
    "data",
    "errors",
    "logbufs",
    "logbsize",
    "mode",
    "nfsvers",
    "port",
    "proto",
    "resilient",
    "retrans",
    "rsize",
    "sec",
    "size",
    "stripe",
    "timeo",
    "vers",
    "wsize",
];

/// Settings of the daemon that are taken. None holds a secret, or the name of a file that does.
const SETTINGS: [&str; 45] = [
    "answers-size-max",
    "answers-size-per-client",
    "body-time",
    "call-size-max",
    "calls-size-max",
    "command-lines-max",
    "command-users",
    "connections-max",
    "connections-per-peer",
    "console-log-size",
    "cors-origins",
    "guest-sandbox",
    "guest-users",
    "head-time",
    "http",
    "idle-time",
    "kernel-dirs",
    "listen",
    "log-dir",
    "log-file",
    "log-kept",
    "log-level",
    "log-size",
    "logins",
    "long-calls",
    "mount-dir",
    "nbd-client-time",
    "nbd-lease-time",
    "nbd-ports",
    "pam",
    "pam-service",
    "per-vm-parallel",
    "polling-duration",
    "polling-idle-threshold",
    "run-dir",
    "session-idle",
    "short-calls",
    "state-dir",
    "storage-timeout",
    "tapback",
    "transfers-max",
    "unix-socket",
    "unix-socket-mode",
    "waiting-calls",
    "worker-pool-size",
];

/// Lines of settings: those that a list names, without comments.
pub(super) fn settings(text: &str) -> String {
    let mut taken = String::new();
    for line in text.lines().map(str::trim) {
        let Some((key, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) else { continue };
        let (key, value) = (key.trim(), value.trim());
        let is_name = key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
        // Writing to a string cannot fail, here and below.
        let _ = match (SETTINGS.contains(&key), is_name) {
            (true, _) => writeln!(taken, "{key} = {value}"),
            (false, true) => writeln!(taken, "{key} = {LEFT_OUT}"),
            (false, false) => writeln!(taken, "{LEFT_OUT}"),
        };
    }
    taken
}

/// Lines of mounts: device, directory, file system, and options, with the values of those that a list names.
pub(super) fn mounts(text: &str) -> String {
    let mut taken = String::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        let (Some(device), Some(point), Some(kind), Some(options)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        let options = options.split(',').map(|option| match option.split_once('=') {
            None => option.to_owned(),
            Some((name, value)) if MOUNT_OPTIONS.contains(&name) => format!("{name}={value}"),
            // The sign would announce a secret, and cost the line.
            Some((name, _)) => name.to_owned(),
        });
        let _ = writeln!(taken, "{device} {point} {kind} {}", options.collect::<Vec<_>>().join(" "));
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_taken_by_name() {
        let text = "# old password = planted-a\nlog-level = info\npsk = planted-b\nPlanted C = planted-d\nplanted-e\n";
        assert_eq!(settings(text), "log-level = info\npsk = (left out)\n(left out)\n");
    }

    #[test]
    fn options_of_mounts_are_taken_by_name() {
        let text = "//srv/share /mnt cifs rw,vers=3.0,username=me,password=planted,soft 0 0\n";
        assert_eq!(mounts(text), "//srv/share /mnt cifs rw vers=3.0 username password soft\n");
    }
}
