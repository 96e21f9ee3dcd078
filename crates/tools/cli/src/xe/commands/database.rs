//! The database, and the host with it, to a file and from a file.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, StatusCode};
use serde_json::Value;

use super::transfer::{file_error, outlive_lost_connections, text_of};
use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::out;
use crate::xe::session::{Session, print};

pub(super) static COMMANDS: &[Command] = &[
    command(
        "pool-dump-database",
        &["file-name"],
        &[],
        "Writes all objects (SRs, VDIs, VMs, settings) to a file that only its owner reads, or to standard output \
         (file-name=-); no data of disks. The file holds secrets, such as passwords of storages",
        |session| keep(session, &DATABASE),
    ),
    command(
        "pool-restore-database",
        &["file-name"],
        &["dry-run", "force"],
        "Puts the objects of a file of pool-dump-database (- is standard input) in the place of all: no VM may run, \
         tapiod starts again, and every session ends. dry-run=true says what would change, and changes nothing; \
         --force takes one of another pool or a newer version. The objects of before are kept in \
         database.before-restore in the state directory",
        |session| restore(session, &DATABASE),
    ),
    command(
        "host-backup",
        &["file-name"],
        &[],
        "Writes this host to an archive that only its owner reads, or to standard output (file-name=-): its database, \
         tapiod.conf, its certificate with the key, its accounts; no data of disks. The archive holds secrets",
        |session| keep(session, &HOST),
    ),
    command(
        "host-restore",
        &["file-name"],
        &["dry-run", "force"],
        "Puts the archive of host-backup (- is standard input) in the place of this host's database, settings, \
         certificate and accounts: no VM may run, tapiod starts again, and every session ends. dry-run=true says what \
         would change, and changes nothing; --force takes one of another host or a newer version, and leaves files as \
         they are that tapiod would not start with. What was there before is kept in the state directory",
        |session| restore(session, &HOST),
    ),
];

/// What is kept in a file.
struct Kept {
    /// Where it is read, and where it is written.
    from: &'static str,
    to: &'static str,
    /// In sentences.
    name: &'static str,
    secrets: &'static str,
    /// Its name in a report.
    file: &'static str,
}

static DATABASE: Kept = Kept {
    from: "/pool/xmldbdump",
    to: "/pool/xmldbdump",
    name: "the database",
    secrets: "such as passwords of storages",
    file: "the dump",
};

static HOST: Kept = Kept {
    from: "/host_backup",
    to: "/host_restore",
    name: "the host",
    secrets: "such as the host's key and passwords of storages",
    file: "the backup",
};

/// Standard output, or standard input.
const STANDARD: &str = "-";

/// Longest file and report that are read, in bytes.
const LEN_MAX: usize = (256 << 20) + (4 << 20);

/// What the name of a file means at this host, and for a client of another kind.
fn no_standard_there(name: &str) -> Result<()> {
    match name {
        STANDARD => Err(Failure::other("file-name=-: this xe has files alone; name one")),
        _ => Ok(()),
    }
}

fn lost(error: &dyn std::fmt::Display) -> Failure {
    Failure::other(format!("the connection is lost: {error}"))
}

fn refused(status: StatusCode, text: &str) -> Failure {
    let text = text.split_once("</h1>").map_or(text, |(_, rest)| rest);
    let text = text.split_once("</body>").map_or(text, |(text, _)| text).trim();
    Failure::other(format!("the server answered {status}: {text}"))
}

fn keep(session: &Session, kept: &Kept) -> Result<()> {
    outlive_lost_connections();
    let name = session.need("file-name")?;
    let query = &format!("{}?", kept.from);
    if out::is_served() {
        no_standard_there(name)?;
        let path = format!("{query}session_id={}", session.client.session());
        return match out::fetch(name, &path).map_err(Failure::Other)? {
            true => Ok(()),
            false => {
                let why = format!("the client could not fetch {}, or not write the file", kept.name);
                Err(Failure::other(why))
            }
        };
    }
    if name == STANDARD {
        return download(session, query, &mut std::io::stdout(), Path::new("standard output"));
    }
    let path = PathBuf::from(name);
    if path.exists() {
        return Err(Failure::other(format!("{} is there already: name another file", path.display())));
    }
    let mut part = path.clone().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part);
    let mut file = file.map_err(|error| file_error(&part, &error))?;
    let written = download(session, query, &mut file, &part).and_then(|()| {
        let named = file.sync_all().and_then(|()| std::fs::rename(&part, &path));
        named.map_err(|error| file_error(&path, &error))
    });
    written.inspect_err(|_| {
        // A part is of no use.
        let _ = std::fs::remove_file(&part);
    })?;
    out::complain(&format!("{name} holds secrets, {}: keep it as you keep those\n", kept.secrets));
    Ok(())
}

fn download(session: &Session, query: &str, to: &mut dyn Write, path: &Path) -> Result<()> {
    session.client.wait(async {
        let answer = session.client.http(Method::GET, query, &[], Empty::<Bytes>::new()).await?;
        let mut answer = answer.map_err(|error| lost(&error))?;
        if !answer.status().is_success() {
            return Err(refused(answer.status(), &text_of(answer).await));
        }
        while let Some(frame) = answer.body_mut().frame().await {
            let Ok(data) = frame.map_err(|error| lost(&error))?.into_data() else { continue };
            to.write_all(&data).map_err(|error| file_error(path, &error))?;
        }
        to.flush().map_err(|error| file_error(path, &error))
    })
}

fn read(name: &str) -> Result<Vec<u8>> {
    let path = Path::new(name);
    let mut bytes = Vec::new();
    let limit = LEN_MAX as u64 + 1;
    let read = match name {
        STANDARD => std::io::stdin().take(limit).read_to_end(&mut bytes),
        _ => File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes)),
    };
    read.map_err(|error| file_error(path, &error))?;
    if bytes.len() > LEN_MAX {
        return Err(Failure::other(format!("{name} is longer than the {LEN_MAX} bytes that are read")));
    }
    Ok(bytes)
}

fn restore(session: &Session, kept: &Kept) -> Result<()> {
    outlive_lost_connections();
    let name = session.need("file-name")?;
    let (dry_run, force) = (session.truth("dry-run", false)?, session.truth("force", false)?);
    let query = format!("{}?dry_run={dry_run}&force={force}", kept.to);
    if out::is_served() {
        no_standard_there(name)?;
        if dry_run {
            return Err(Failure::other("dry-run: this xe shows no report; use the xe of Tapio"));
        }
        let path = format!("{query}&early=true&session_id={}", session.client.session());
        return match out::put(name, &path).map_err(Failure::Other)? {
            true => Ok(()),
            false => Err(Failure::other("the client could not send all of the file, or it was refused")),
        };
    }
    let bytes = read(name)?;
    let report = session.client.wait(async {
        let body = Full::new(Bytes::from(bytes));
        let answer = session.client.http(Method::PUT, &query, &[], body).await?;
        let answer = answer.map_err(|error| lost(&error))?;
        if !answer.status().is_success() {
            return Err(refused(answer.status(), &text_of(answer).await));
        }
        let body = Limited::new(answer.into_body(), LEN_MAX).collect().await.map_err(|error| lost(&error))?;
        serde_json::from_slice::<Value>(&body.to_bytes()).map_err(|error| lost(&error))
    })?;
    if session.arguments.json {
        return print(&format!("{report:#}\n"));
    }
    print(&told(&report, kept.file))
}

fn text<'a>(of: &'a Value, name: &str) -> &'a str {
    of.get(name).and_then(Value::as_str).unwrap_or_default()
}

fn list<'a>(of: &'a Value, name: &str) -> &'a [Value] {
    of.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// A report as lines for people.
fn told(report: &Value, file: &str) -> String {
    let number = |name: &str| report.get(name).and_then(Value::as_u64).unwrap_or_default();
    let mut lines = vec![format!(
        "{file} of {} by Tapio {} of the pool {}: {} objects",
        text(report, "date"),
        text(report, "version"),
        text(report, "pool"),
        number("objects")
    )];
    for (name, sign) in [("comes", '+'), ("goes", '-'), ("changes", '~')] {
        for object in list(report, name) {
            let fields: Vec<&str> = list(object, "fields").iter().filter_map(Value::as_str).collect();
            let fields = if fields.is_empty() { String::new() } else { format!(": {}", fields.join(", ")) };
            let (class, uuid, label) = (text(object, "class"), text(object, "uuid"), text(object, "name"));
            let label = if label.is_empty() { String::new() } else { format!(" ({label})") };
            lines.push(format!("{sign} {class} {uuid}{label}{fields}"));
        }
    }
    let counts = [("comes", "come"), ("goes", "go"), ("changes", "change")];
    let counts = counts.map(|(name, verb)| format!("{} {verb}", list(report, name).len()));
    lines.push(format!("{}, {} are the same", counts.join(", "), number("same")));
    for file in list(report, "files") {
        let changes = file.get("changes").and_then(Value::as_bool).unwrap_or_default();
        let what = match text(file, "why") {
            _ if changes => "changes",
            "" => "is the same",
            why => &format!("stays: {why}"),
        };
        lines.push(format!("{} {what}", text(file, "path")));
    }
    for (name, what) in [("odd", "needs --force"), ("hindrances", "in the way")] {
        lines.extend(list(report, name).iter().filter_map(Value::as_str).map(|why| format!("{what}: {why}")));
    }
    let is = |name: &str| report.get(name).and_then(Value::as_bool).unwrap_or_default();
    lines.push(match (is("dry_run"), is("restarts")) {
        (true, _) => "a dry run: nothing was changed".to_owned(),
        (false, true) => "tapiod starts again, with these objects".to_owned(),
        (false, false) => "start tapiod again: it begins with these objects".to_owned(),
    });
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_is_told_line_by_line() {
        let report = json!({
            "pool": "p", "version": "0.1.0", "date": "d", "objects": 3, "same": 1, "dry_run": true, "restarts": false,
            "comes": [{"class": "VM", "uuid": "v", "name": "web"}], "goes": [],
            "changes": [{"class": "SR", "uuid": "s", "name": "", "fields": ["name_label", "tags"]}],
            "odd": ["it is of another pool"], "hindrances": ["the VM a is Running"],
        });
        assert_eq!(
            told(&report, "the dump"),
            "the dump of d by Tapio 0.1.0 of the pool p: 3 objects\n+ VM v (web)\n~ SR s: name_label, tags\n\
             1 come, 0 go, 1 change, 1 are the same\nneeds --force: it is of another pool\n\
             in the way: the VM a is Running\na dry run: nothing was changed\n"
        );
        let report = json!({"files": [
            {"name": "a", "path": "/a", "changes": true, "why": ""},
            {"name": "b", "path": "/b", "changes": false, "why": "it has no end"},
        ]});
        let said = told(&report, "the backup");
        assert!(said.contains("\n/a changes\n/b stays: it has no end\n"), "{said}");
    }
}
