//! What is collected.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::Value;

use super::BugreportArguments;
use super::archive::Archive;
use crate::xe::{Client, Failure, XeArguments};

/// Classes whose records are collected: none that holds accounts, sessions, secrets or certificates.
const CLASSES: [&str; 15] = [
    "pool",
    "host",
    "SM",
    "SR",
    "PBD",
    "VDI",
    "VBD",
    "VBD_metrics",
    "VM",
    "VM_metrics",
    "VM_guest_metrics",
    "VIF",
    "network",
    "task",
    "message",
];

/// Bytes of a log that are kept: the last.
const LOG_LEN_MAX: u64 = 10 << 20;

/// Entries of a directory that are listed.
const ENTRIES_MAX: usize = 20_000;

/// Directories below a directory that are looked into.
const DEPTH_MAX: usize = 3;

/// How long one part may take: storage that hangs is a reason to make a report.
const PART_LIMIT: Duration = Duration::from_secs(30);

pub(super) fn all(arguments: &BugreportArguments, archive: &mut Archive) -> io::Result<()> {
    // Records first: what is secret in them is left out of the rest.
    let srs = records(arguments, archive)?;
    let version =
        format!("tapio {}, protocol {}", env!("CARGO_PKG_VERSION"), tapio_control::PROTOCOL_VERSION);
    archive.add("versions.txt", Ok(version + "\n"))?;
    for (name, path) in [
        ("host/kernel.txt", "/proc/version"),
        ("host/os.txt", "/etc/os-release"),
        ("host/mounts.txt", "/proc/self/mounts"),
        ("host/block-devices.txt", "/proc/partitions"),
        ("host/memory.txt", "/proc/meminfo"),
    ] {
        archive.add(name, bounded(move || tail(Path::new(path))))?;
    }
    let settings = arguments.settings.clone();
    archive.add("settings/tapiod.conf", bounded(move || tail(&settings)))?;
    archive.add("disks/list.json", ours(&["disk", "list", "--json"]))?;
    archive.add("disks/stats.txt", ours(&["disk", "stats"]))?;
    for (at, dir) in srs.iter().enumerate() {
        let path = dir.clone();
        archive.add(&format!("srs/{at}/files.txt"), bounded(move || Ok(listing(&path))))?;
        let images = dir.join("*.vhd").to_string_lossy().into_owned();
        archive
            .add(&format!("srs/{at}/chains.txt"), ours(&["vhd-util", "scan", "-f", "-p", "-m", &images]))?;
    }
    let mut logs = arguments.log.clone();
    files(&arguments.run_dir, 0, &mut |path, _| {
        if path.extension().is_some_and(|end| end == "log") {
            logs.push(path.to_owned());
        }
    });
    for (at, log) in logs.into_iter().enumerate() {
        let name = log.file_name().unwrap_or_default().to_string_lossy();
        let name: String = name.chars().filter(|c| c.is_ascii_graphic()).take(60).collect();
        archive.add(&format!("logs/{at}-{name}"), bounded(move || tail(&log)))?;
    }
    archive.add("logs/journal.txt", command("journalctl", &["-u", "tapiod", "-n", "20000", "--no-pager"]))
}

/// Adds records and findings; answers the directories of SRs.
fn records(arguments: &BugreportArguments, archive: &mut Archive) -> io::Result<Vec<PathBuf>> {
    let client = XeArguments::read(&arguments.xe).and_then(|xe| Client::connect(&xe.connection));
    let client = match client {
        Ok(client) => client,
        Err(error) => {
            archive.add("records", Err(said(&error)))?;
            return Ok(Vec::new());
        }
    };
    archive.secrets.learn(client.session());
    let mut read = Vec::new();
    for class in CLASSES {
        let mut records = client.call(&format!("{class}.get_all_records"), &[]);
        if let Ok(records) = &mut records {
            archive.secrets.strip(records);
        }
        read.push((class, records));
    }
    let mut srs = Vec::new();
    for (class, records) in read {
        if let (true, Ok(records)) = (class == "PBD", &records) {
            srs.extend(directories(records));
        }
        let text = records.map(|records| format!("{records:#}\n")).map_err(|error| said(&error));
        archive.add(&format!("records/{class}.json"), text)?;
    }
    let findings = client.call("host.get_all", &[]).and_then(|hosts| {
        let host = hosts.get(0).cloned().unwrap_or_default();
        crate::xe::long(&client, "host.diagnose", &[host])
    });
    archive.add("findings.json", findings.map_err(|error| said(&error)))?;
    client.end();
    srs.sort();
    srs.dedup();
    Ok(srs)
}

fn said(error: &Failure) -> String {
    error.text(&|_| None).replace('\n', " ")
}

fn directories(pbds: &Value) -> Vec<PathBuf> {
    let of = |pbd: &Value| {
        let config = pbd.get("device_config")?;
        let path = config.get("location").or_else(|| config.get("path"))?.as_str()?;
        path.starts_with('/').then(|| PathBuf::from(path))
    };
    pbds.as_object().into_iter().flat_map(|all| all.values()).filter_map(of).collect()
}

/// What a part answers, unless it takes too long.
fn bounded(part: impl FnOnce() -> io::Result<String> + Send + 'static) -> Result<String, String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(part()));
    match receiver.recv_timeout(PART_LIMIT) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {} s", PART_LIMIT.as_secs())),
    }
}

fn ours(words: &[&str]) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    command(&program.to_string_lossy(), words)
}

fn command(program: &str, words: &[&str]) -> Result<String, String> {
    // It ends a program that hangs, before this one stops waiting.
    let mut command = Command::new("timeout");
    command.args(["-k", "1", "25", program]).args(words).stdin(Stdio::null());
    let name = program.to_owned();
    bounded(move || {
        let output = command.output()?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
            return Err(io::Error::other(format!("{name}: {}: {why}", output.status)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    })
}

/// The last bytes of a file.
fn tail(path: &Path) -> io::Result<String> {
    let wrong = |error: io::Error| io::Error::other(format!("{}: {error}", path.display()));
    if !fs::metadata(path).map_err(wrong)?.is_file() {
        return Err(io::Error::other(format!("{} is no file", path.display())));
    }
    let mut file = File::open(path).map_err(wrong)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(LOG_LEN_MAX)))?;
    let mut bytes = Vec::new();
    file.take(LOG_LEN_MAX).read_to_end(&mut bytes).map_err(wrong)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn listing(dir: &Path) -> String {
    let mut text = format!("{}\n", dir.display());
    let mut count = 0;
    files(dir, 0, &mut |path, len| {
        count += 1;
        if count <= ENTRIES_MAX {
            let _ = writeln!(text, "{len:>16} {}", path.display());
        }
    });
    let _ = writeln!(text, "{count} files");
    text
}

/// Files of a directory and of those in it; links are not followed.
fn files(dir: &Path, depth: usize, each: &mut impl FnMut(&Path, u64)) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(facts) = entry.metadata() else { continue };
        if facts.is_dir() && depth < DEPTH_MAX {
            files(&entry.path(), depth + 1, each);
        } else if facts.is_file() {
            each(&entry.path(), facts.len());
        }
    }
}
