//! VMs to files and from files: XVA archives over HTTP, and OVA packages made of them.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Response};
use serde_json::Value;
use tapio_model::NULL_REF;
use tapio_ova::ExportOptions;

use super::transfer::{Attempt, Bar, PAUSE, Source, file_error, outlive_lost_connections, refused, text_of};
use super::{Command, command, package, select};
use crate::xe::error::{Failure, Result};
use crate::xe::session::Session;

pub(super) static COMMANDS: &[Command] = &[
    command(
        "vm-export",
        &["filename"],
        &["vm", "compress", "preserve-power-state", "metadata", "format", "disk-format", "sums", "progress"],
        "Writes a VM that does not run, with its disks, to a file (compress=true, gzip or zstd), as an OVA package for \
         other products with format=ova (disk-format=vmdk or vhd; sums=sha256 or sha1); its records alone, also while \
         it runs, with metadata=true",
        |s| export(s, &machine(s, "vm")?),
    ),
    command(
        "vm-import",
        &["filename"],
        &["sr-uuid", "preserve", "force", "metadata", "dry-run", "vdi:", "progress"],
        "Makes VMs of a file that vm-export, XenServer or Xen Orchestra wrote, or of an OVA package; preserve=true keeps \
         UUIDs and addresses; metadata=true takes records whose disks are here, or are named (vdi:UUID=UUID)",
        import,
    ),
    command(
        "template-export",
        &["filename"],
        &["template-uuid", "compress", "progress"],
        "Writes a template with its disks to a file",
        |s| export(s, &of(s, "template", "template-uuid")?),
    ),
    command(
        "snapshot-export-to-template",
        &["filename"],
        &["snapshot-uuid", "compress", "preserve-power-state", "progress"],
        "Writes a snapshot of a VM with its disks to a file, from which a template is made",
        |s| export(s, &of(s, "snapshot", "snapshot-uuid")?),
    ),
];

/// Parameters that choose no VM.
const OWN: [&str; 8] =
    ["filename", "compress", "preserve-power-state", "metadata", "format", "disk-format", "sums", "progress"];

fn machine(session: &Session, table: &str) -> Result<String> {
    let mut found = select::of_table(session, table, &OWN)?;
    match (found.pop(), found.is_empty()) {
        (Some(vm), true) => Ok(vm),
        _ => Err(Failure::other("one file has one VM: name it by its UUID")),
    }
}

/// The object that a parameter names by UUID, or that fields choose.
fn of(session: &Session, table: &str, param: &str) -> Result<String> {
    match session.arguments.get(param) {
        Some(uuid) => session.by_uuid("VM", uuid),
        None => machine(session, table),
    }
}

/// How the archive is compressed, as the server takes it.
fn compression(session: &Session) -> Result<&'static str> {
    match session.or("compress", "false") {
        "" | "false" | "none" => Ok("false"),
        "true" | "gzip" => Ok("gzip"),
        "zstd" => Ok("zstd"),
        other => Err(Failure::other(format!("compress={other}: true, false, gzip and zstd are known"))),
    }
}

/// How the file becomes an OVA package, if it shall.
fn package_options(session: &Session) -> Result<Option<ExportOptions>> {
    match session.or("format", "xva") {
        "xva" => match ["disk-format", "sums"].into_iter().find(|name| session.arguments.get(name).is_some())
        {
            Some(name) => Err(Failure::other(format!("{name}: only a package has it; use format=ova"))),
            None => Ok(None),
        },
        "ova" => {
            for (name, without) in
                [("compress", "false"), ("preserve-power-state", "false"), ("metadata", "false")]
            {
                if session.or(name, without) != without {
                    return Err(Failure::other(format!(
                        "format=ova: a package cannot have {name}; leave it out"
                    )));
                }
            }
            package::options(session).map(Some)
        }
        other => Err(Failure::other(format!("format={other}: xva and ova are known"))),
    }
}

/// Where the file goes: a name that nothing has, in a directory that is there.
fn target(session: &Session) -> Result<(PathBuf, PathBuf)> {
    let path = PathBuf::from(session.need("filename")?);
    let name =
        path.file_name().ok_or_else(|| Failure::other(format!("{} is no name of a file", path.display())))?;
    if path.symlink_metadata().is_ok() {
        return Err(Failure::other(format!("{} is there already", path.display())));
    }
    let mut part = name.to_owned();
    part.push(".part");
    Ok((path.with_file_name(part), path))
}

fn export(session: &Session, vm: &str) -> Result<()> {
    outlive_lost_connections();
    let compression = compression(session)?;
    let preserve = session.truth("preserve-power-state", false)?;
    let package = package_options(session)?;
    let (part, path) = target(session)?;
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&part);
    let file = file.map_err(|error| file_error(&part, &error))?;
    let query = match session.truth("metadata", false)? {
        true => format!("/export_metadata?ref={vm}"),
        false => {
            format!("/export?ref={vm}&use_compression={compression}&preserve_power_state={preserve}")
        }
    };
    let received = if let Some(options) = package {
        let (archive, writing) = package::write(file, options)?;
        writing.end(download(session, &query, archive, &part), &path)
    } else {
        let synced = |file: File| file.sync_all().map_err(|error| file_error(&part, &error));
        let copy = file.try_clone().map_err(|error| file_error(&part, &error))?;
        download(session, &query, file, &part).and_then(|()| synced(copy))
    };
    let written =
        received.and_then(|()| std::fs::rename(&part, &path).map_err(|error| file_error(&path, &error)));
    written.inspect_err(|_| {
        // A part of an archive is of no use.
        let _ = std::fs::remove_file(&part);
    })
}

/// The progress of a task, in thousandths.
async fn progress(session: &Session, task: &str) -> Option<u64> {
    let asked = session.client.call_async("task.get_progress", &[Value::from(task)]).await;
    asked.ok().as_ref().and_then(Value::as_f64).map(|done| (done.clamp(0.0, 1.0) * 1000.0) as u64)
}

/// The next piece of an answer; the bar follows the task meanwhile. None at its end.
async fn piece(
    session: &Session,
    task: &str,
    answer: &mut Response<Incoming>,
    bar: &mut Bar,
) -> Option<std::result::Result<Bytes, hyper::Error>> {
    loop {
        tokio::select! {
            frame = answer.body_mut().frame() => match frame? {
                Ok(frame) => if let Ok(data) = frame.into_data() { return Some(Ok(data)) },
                Err(error) => return Some(Err(error)),
            },
            () = tokio::time::sleep(PAUSE) => {
                if let Some(done) = progress(session, task).await {
                    bar.at(done, 1000);
                }
            }
        }
    }
}

fn download(session: &Session, query: &str, mut file: File, part: &Path) -> Result<()> {
    let attempt = Attempt::new(session, "xe vm-export")?;
    let mut bar = Bar::of_task(session, "vm-export")?;
    let query = format!("{query}&task_id={}", attempt.task);
    let received = session.client.wait(async {
        let answer = session.client.http(Method::GET, &query, &[], Empty::<Bytes>::new()).await?;
        let mut answer =
            answer.map_err(|error| Failure::other(format!("the connection is lost: {error}")))?;
        if !answer.status().is_success() {
            return Ok(Some((answer.status(), text_of(answer).await)));
        }
        let mut looked = std::time::Instant::now();
        while let Some(data) = piece(session, &attempt.task, &mut answer, &mut bar).await {
            let data = data.map_err(|error| Failure::other(format!("the connection is lost: {error}")))?;
            file.write_all(&data).map_err(|error| file_error(part, &error))?;
            if looked.elapsed() > PAUSE {
                looked = std::time::Instant::now();
                if let Some(done) = progress(session, &attempt.task).await {
                    bar.at(done, 1000);
                }
            }
        }
        Ok(None)
    });
    match received {
        Ok(None) => {
            bar.at(1000, 1000);
            bar.bar.finish_and_clear();
            attempt.end()?.0.map(drop)
        }
        Ok(Some((status, text))) => Err(refused(attempt, status, &text)),
        Err(failure) => Err(ended(attempt, failure)),
    }
}

/// Why a transfer failed whose connection was lost: what its task says, if it has failed.
fn ended(attempt: Attempt<'_>, lost: Failure) -> Failure {
    match attempt.drop_unseen() {
        Ok(false) => match attempt.end() {
            Ok((Err(failure), _)) => failure,
            _ => lost,
        },
        _ => lost,
    }
}

fn import(session: &Session) -> Result<()> {
    outlive_lost_connections();
    let path = PathBuf::from(session.need("filename")?);
    let failed = |error| file_error(&path, &error);
    let file = File::open(&path).map_err(failed)?;
    let facts = file.metadata().map_err(failed)?;
    if !facts.is_file() || facts.len() == 0 {
        return Err(Failure::other(format!("{} is no archive: it is empty, or no file", path.display())));
    }
    let (preserve, force) = (session.truth("preserve", false)?, session.truth("force", false)?);
    let is_metadata = session.truth("metadata", false)?;
    let (body, reading) = if package::is_package(&path) {
        if preserve || is_metadata {
            return Err(Failure::other(
                "an OVA package has no UUIDs or records to keep: leave out preserve and metadata",
            ));
        }
        let (body, reading) = package::read(session, file, &path, !force)?;
        (body, Some(reading))
    } else {
        (Source { file, left: facts.len() }, None)
    };
    let sent = upload(session, body, (preserve, force, is_metadata));
    let made = match reading {
        Some(reading) => reading.end(sent, &path)?,
        None => sent?,
    };
    let mut uuids = Vec::new();
    for vm in references(&made) {
        uuids.push(session.text("VM.get_uuid", &[vm.into()])?);
    }
    session.print_values(&[&uuids.join(",")])
}

/// Sends an archive; the result of the import's task.
fn upload(
    session: &Session,
    body: Source,
    (preserve, force, is_metadata): (bool, bool, bool),
) -> Result<String> {
    let sr = session.optional("SR", "sr-uuid")?;
    let sr = if sr == NULL_REF { String::new() } else { format!("&sr_id={sr}") };
    let attempt = Attempt::new(session, "xe vm-import")?;
    let mut bar = Bar::of_task(session, "vm-import")?;
    let mut query = format!("restore={preserve}&force={force}&task_id={}{sr}", attempt.task);
    query = match is_metadata {
        true => {
            let dry_run = session.truth("dry-run", false)?;
            let named = session.arguments.map("vdi").into_iter();
            let named = named.map(|(from, to)| Ok(format!("&vdi:{}={}", uuid(&from)?, uuid(&to)?)));
            let named: String = named.collect::<Result<_>>()?;
            format!("/import_metadata?{query}&dry_run={dry_run}{named}")
        }
        false => format!("/import?{query}"),
    };
    let sent = session.client.wait(async {
        let answer = session.client.http(Method::PUT, &query, &[], body).await?;
        let mut answer =
            answer.map_err(|error| Failure::other(format!("the connection is lost: {error}")))?;
        if !answer.status().is_success() {
            return Ok(Some((answer.status(), text_of(answer).await)));
        }
        // The answer ends when the import does.
        while let Some(data) = piece(session, &attempt.task, &mut answer, &mut bar).await {
            data.map_err(|error| Failure::other(format!("the connection is lost: {error}")))?;
        }
        Ok(None)
    });
    let made = match sent {
        Ok(None) => attempt.end()?.0?,
        Ok(Some((status, text))) => return Err(refused(attempt, status, &text)),
        Err(failure) => return Err(ended(attempt, failure)),
    };
    bar.at(1000, 1000);
    bar.bar.finish_and_clear();
    Ok(made)
}

/// A UUID as it may stand in a query.
fn uuid(text: &str) -> Result<&str> {
    let is_plain = text.len() == 36 && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    if is_plain { Ok(text) } else { Err(Failure::other(format!("vdi: '{text}' is no UUID of a disk"))) }
}

/// The references in the result of a task.
fn references(result: &str) -> impl Iterator<Item = &str> {
    result.match_indices("OpaqueRef:").map(|(at, _)| {
        let rest = &result[at..];
        rest.find('<').map_or(rest, |end| &rest[..end])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_found_in_a_result() {
        let result =
            "<value><array><data><value>OpaqueRef:a</value><value>OpaqueRef:b</value></data></array></value>";
        assert_eq!(references(result).collect::<Vec<_>>(), ["OpaqueRef:a", "OpaqueRef:b"]);
        assert_eq!(references("OpaqueRef:c").collect::<Vec<_>>(), ["OpaqueRef:c"]);
    }
}
