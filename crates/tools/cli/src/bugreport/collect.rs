//! What is collected, and in which order.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::BugreportArguments;
use super::archive::Archive;
use super::chains::chains;
use super::limit::{Asked, Limit};
use super::records::{CLASSES, Seen};
use super::redact::Known;
use super::{disks, files, host};
use crate::xe::{Client, Failure, XeArguments};

/// Images whose headers are read in one SR.
const IMAGES_MAX: usize = 2_000;

/// The journal's lines.
const JOURNAL_LINES: &str = "20000";

pub(super) fn all(arguments: &BugreportArguments, archive: &mut Archive) -> io::Result<()> {
    let limit = Limit::new(arguments.limit());
    let mut daemon: Asked<Client> = Asked::new(connect, arguments.xe.clone());
    // Records and directories first: their UUIDs stay in the texts that follow, and what is left out of them is looked
    // for there.
    let (records, seen) = ask_records(&mut daemon, &limit);
    let disks = disks::list(&limit);
    let images: Vec<PathBuf> = disks.iter().flat_map(disks::images).collect();
    let mut srs = directories(records.get("PBD").and_then(|pbds| pbds.as_ref().ok()));
    if srs.is_empty() {
        // Without a daemon: where the images of running disks lie.
        let dirs: BTreeSet<&Path> = images.iter().filter_map(|image| image.parent()).collect();
        srs.extend(dirs.into_iter().map(|dir| ("unknown".to_owned(), dir.to_owned())));
    }
    let listings: Vec<_> = srs
        .iter()
        .map(|(_, dir)| {
            let dir = dir.clone();
            limit.run(move || files::listing(&dir))
        })
        .collect();
    let uuids = listings.iter().flatten().flat_map(|(_, uuids)| uuids);
    let named: BTreeSet<String> = images.iter().flat_map(|image| files::uuids(image)).collect();
    seen.uuids.iter().chain(uuids).chain(&named).for_each(|uuid| archive.redactor.keep_uuid(uuid));
    archive.redactor.know(Known::new(seen.left_out.iter().map(String::as_str), &seen.own));

    of_host(arguments, archive, &limit)?;
    let vdis = records.get("VDI").and_then(|vdis| vdis.as_ref().ok());
    archive.add("chains.txt", vdis.map(chains).ok_or_else(|| "no records of VDIs".to_owned()))?;
    for (class, records) in records {
        archive.add_json(&format!("records/{class}.json"), records)?;
    }
    findings(&mut daemon, archive, &limit, &srs)?;
    let metrics = daemon.ask(&limit, |client| {
        let text = call(client, "host.export_metrics", &[])?;
        text.as_str().map(str::to_owned).ok_or_else(|| "the answer is no text".to_owned())
    });
    archive.add("metrics.txt", metrics)?;
    // The session ends; without an answer it ends by itself some day.
    let _ = daemon.ask(&limit, |client| {
        client.end();
        Ok(())
    });
    archive.add_json("disks/list.json", disks)?;
    archive.add("disks/stats.txt", ours(&limit, &["disk", "stats"]))?;
    for (at, ((sr, dir), listing)) in srs.iter().zip(listings).enumerate() {
        let count = listing.as_ref().map_or(0, |(text, _)| text.lines().count());
        archive.add(&format!("srs/{at}/sr.txt"), Ok(format!("{sr}\n{}\n", dir.display())))?;
        archive.add(&format!("srs/{at}/files.txt"), listing.map(|(text, _)| text))?;
        let images = dir.join("*.vhd").to_string_lossy().into_owned();
        let scanned = match count <= IMAGES_MAX {
            true => ours(&limit, &["vhd-util", "scan", "-f", "-p", "-m", &images]),
            false => {
                Err(format!("{count} files are more than {IMAGES_MAX}: chains.txt has the records' chains"))
            }
        };
        archive.add(&format!("srs/{at}/images.txt"), scanned)?;
    }
    logs(arguments, archive, &limit)
}

fn of_host(arguments: &BugreportArguments, archive: &mut Archive, limit: &Limit) -> io::Result<()> {
    let version =
        format!("tapio {}, protocol {}", env!("CARGO_PKG_VERSION"), tapio_control::PROTOCOL_VERSION);
    archive.add("versions.txt", Ok(version + "\n"))?;
    for (name, path) in host::FILES {
        archive.add(name, limit.run(move || files::tail(Path::new(path), files::FILE_LEN_MAX)))?;
    }
    let mounts = limit.run(|| files::tail(Path::new("/proc/self/mounts"), files::FILE_LEN_MAX));
    archive.add("host/mounts.txt", mounts.map(|text| host::mounts(&text)))?;
    let path = arguments.settings.clone();
    let settings = limit.run(move || files::tail(&path, files::FILE_LEN_MAX));
    archive.add("settings/tapiod.conf", settings.map(|text| host::settings(&text)))
}

fn logs(arguments: &BugreportArguments, archive: &mut Archive, limit: &Limit) -> io::Result<()> {
    let dirs = [&arguments.run_dir, &arguments.log_dir].map(PathBuf::clone);
    let found = limit.run(move || Ok(dirs.iter().flat_map(|dir| files::logs(dir)).collect::<BTreeSet<_>>()));
    let mut logs = arguments.log.clone();
    match found {
        Ok(found) => logs.extend(found),
        Err(why) => archive.add("logs", Err(why))?,
    }
    for (at, log) in logs.into_iter().enumerate() {
        let name = log.file_name().unwrap_or_default().to_string_lossy();
        let name: String =
            name.chars().filter(|c| c.is_ascii_alphanumeric() || ".-_".contains(*c)).take(60).collect();
        archive.add(&format!("logs/{at}-{name}"), limit.run(move || files::log(&log)))?;
    }
    for unit in ["tapiod", "tapio-tapback", "tapio-xenstored", "tapio-disk@*"] {
        let words = ["-u", unit, "-n", JOURNAL_LINES, "--no-pager", "-o", "short-iso"];
        archive.add(
            &format!("logs/journal-{}.txt", unit.trim_end_matches("@*")),
            limit.command("journalctl", &words),
        )?;
    }
    // Disk processes that the daemon started have no unit.
    let words = ["-t", "tapio-disk", "-n", JOURNAL_LINES, "--no-pager", "-o", "short-iso"];
    archive.add("logs/journal-disks.txt", limit.command("journalctl", &words))
}

fn connect(words: &std::sync::Arc<Vec<String>>) -> Result<Client, String> {
    XeArguments::read(words).and_then(|xe| Client::connect(&xe.connection)).map_err(|error| said(&error))
}

fn call(client: &Client, method: &str, params: &[Value]) -> Result<Value, String> {
    client.call(method, params).map_err(|error| said(&error))
}

fn said(error: &Failure) -> String {
    error.text(&|_| None).replace('\n', " ")
}

type Records = BTreeMap<&'static str, Result<Value, String>>;

/// What is taken of the records of all classes, and what was left out.
fn ask_records(daemon: &mut Asked<Client>, limit: &Limit) -> (Records, Seen) {
    let mut seen = Seen::default();
    let mut records = Records::new();
    for class in CLASSES {
        let answer = daemon.ask(limit, move |client| call(client, &format!("{class}.get_all_records"), &[]));
        records.insert(class, answer.map(|all| seen.records(class, &all)));
    }
    let session = daemon.ask(limit, |client| Ok(client.session().to_owned()));
    seen.left_out.extend(session);
    // Read to be found elsewhere, and never written. An account that may not read them has the patterns alone.
    let secrets = daemon.ask(limit, |client| call(client, "secret.get_all_records", &[]));
    for secret in secrets.iter().filter_map(Value::as_object).flat_map(|all| all.values()) {
        seen.left_out.extend(secret.get("value").and_then(Value::as_str).map(str::to_owned));
    }
    (records, seen)
}

/// UUIDs of SRs, and their directories.
fn directories(pbds: Option<&Value>) -> Vec<(String, PathBuf)> {
    let of = |pbd: &Value| {
        let config = pbd.get("device_config")?;
        let path = config.get("location").or_else(|| config.get("path"))?.as_str()?;
        let sr = pbd.get("SR")?.as_str()?.to_owned();
        path.starts_with('/').then(|| (sr, PathBuf::from(path)))
    };
    let all = pbds.and_then(Value::as_object).into_iter().flat_map(|all| all.values());
    all.filter_map(of).collect::<BTreeSet<_>>().into_iter().collect()
}

/// What a diagnosis finds: of the host, or of each SR if the storage of one hangs.
fn findings(
    daemon: &mut Asked<Client>,
    archive: &mut Archive,
    limit: &Limit,
    srs: &[(String, PathBuf)],
) -> io::Result<()> {
    let parsed =
        |text: String| serde_json::from_str(&text).map_err(|error| format!("the answer is no JSON: {error}"));
    let found = daemon.ask(limit, |client| {
        let hosts = call(client, "host.get_all", &[])?;
        let host = hosts.get(0).cloned().unwrap_or_default();
        crate::xe::long(client, "host.diagnose", &[host]).map_err(|error| said(&error))
    });
    let is_whole = found.is_ok();
    archive.add_json("findings.json", found.and_then(parsed))?;
    if is_whole {
        return Ok(());
    }
    for (at, (sr, _)) in srs.iter().enumerate() {
        let of = json!(sr);
        let found = daemon.ask(limit, move |client| {
            crate::xe::long(client, "SR.diagnose", &[of]).map_err(|error| said(&error))
        });
        archive.add_json(&format!("srs/{at}/findings.json"), found.and_then(parsed))?;
    }
    Ok(())
}

fn ours(limit: &Limit, words: &[&str]) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    limit.command(&program.to_string_lossy(), words)
}
