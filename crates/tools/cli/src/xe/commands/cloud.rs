//! A medium with the settings of a cloud image's first start, in a CD drive of the VM.

use std::path::Path;

use http_body_util::Full;
use hyper::Method;
use hyper::body::Bytes;
use serde_json::{Value, json};
use tapio_model::NULL_REF;

use super::select::machines;
use super::transfer::{Attempt, file_error, refused, text_of};
use super::{Command, command, drive};
use crate::xe::error::{Failure, Result};
use crate::xe::seed;
use crate::xe::session::Session;

pub(super) static COMMANDS: &[Command] = &[command(
    "vm-cloud-init-add",
    &["user-data"],
    &["vm", "meta-data", "network-config", "sr-uuid", "device"],
    "Puts files for cloud-init (NoCloud) on a medium in a CD drive of a VM, for the first start of a cloud image",
    add,
)];

/// Parameters that choose no VM.
const OWN: [&str; 5] = ["user-data", "meta-data", "network-config", "sr-uuid", "device"];

fn file(session: &Session, name: &str) -> Result<Option<Vec<u8>>> {
    let Some(path) = session.arguments.get(name).filter(|path| !path.is_empty()) else { return Ok(None) };
    let path = Path::new(path);
    let len = std::fs::metadata(path).map_err(|error| file_error(path, &error))?.len();
    if len > seed::FILE_LEN_MAX as u64 {
        return Err(Failure::other(format!("{} has {len} bytes: that is no {name}", path.display())));
    }
    std::fs::read(path).map(Some).map_err(|error| file_error(path, &error))
}

fn add(session: &Session) -> Result<()> {
    let mut found = machines(session, &OWN)?;
    let (Some(vm), true) = (found.pop(), found.is_empty()) else {
        return Err(Failure::other("one medium is for one VM: name it by its UUID"));
    };
    let user = file(session, "user-data")?.unwrap_or_default();
    let (uuid, name) = (
        session.text("VM.get_uuid", &[vm.as_str().into()])?,
        session.text("VM.get_name_label", &[vm.as_str().into()])?,
    );
    let meta = match file(session, "meta-data")? {
        Some(meta) => meta,
        // JSON is YAML, whatever the name of the VM has in it.
        None => json!({ "instance-id": uuid, "local-hostname": host_name(&name) }).to_string().into_bytes(),
    };
    let network = file(session, "network-config")?;
    let mut files: Vec<(&str, &[u8])> = vec![("user-data", &user), ("meta-data", &meta)];
    files.extend(network.as_deref().map(|network| ("network-config", network)));
    let image = seed::image(&files).map_err(Failure::other)?;
    let sr = match session.optional("SR", "sr-uuid")? {
        sr if sr != NULL_REF => sr,
        _ => default_sr(session)?,
    };
    let record = json!({
        "SR": sr, "virtual_size": image.len().to_string(), "type": "user", "read_only": false, "sharable": false,
        "name_label": format!("cloud-init of {name}"),
        "name_description": "Settings for the first start of a cloud image",
        "other_config": {},
    });
    let vdi = session.long("VDI.create", &[record])?;
    let made = send(session, &vdi, image).and_then(|()| {
        let device = session.or("device", "autodetect").to_owned();
        drive::make(session, &vm, &vdi, &device, "CD", "RO", &["owner"])
    });
    let vbd = made.inspect_err(|_| {
        // Nothing leads to it.
        let _ = session.long("VDI.destroy", &[vdi.as_str().into()]);
    })?;
    session.print_uuid("VBD", &vbd)
}

/// A name as a host may have it: letters, digits and hyphens.
fn host_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let text: String = name.chars().map(plain).take(63).collect();
    let text = text.trim_matches('-');
    if text.is_empty() { "guest".to_owned() } else { text.to_owned() }
}

fn default_sr(session: &Session) -> Result<String> {
    let pools = session.call("pool.get_all", &[])?;
    let pool = pools.as_array().and_then(|pools| pools.first()).cloned().unwrap_or(Value::Null);
    let sr = session.text("pool.get_default_SR", &[pool])?;
    match session.text("SR.get_uuid", &[sr.as_str().into()]) {
        Ok(_) => Ok(sr),
        Err(_) => Err(Failure::other("the pool has no default SR: name one by sr-uuid")),
    }
}

fn send(session: &Session, vdi: &str, image: Vec<u8>) -> Result<()> {
    let attempt = Attempt::new(session, "xe vm-cloud-init-add")?;
    let target = format!("/import_raw_vdi?vdi={vdi}&format=raw&task_id={}", attempt.task);
    let answer = session.client.wait(async {
        let sent = session.client.http(Method::PUT, &target, &[], Full::new(Bytes::from(image))).await?;
        let answer = sent.map_err(|error| Failure::other(format!("the connection is lost: {error}")))?;
        let status = answer.status();
        Ok((status, if status.is_success() { String::new() } else { text_of(answer).await }))
    });
    match answer? {
        (status, _) if status.is_success() => attempt.end()?.0.map(drop),
        (status, text) => Err(refused(attempt, status, &text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_vms_become_names_of_hosts() {
        assert_eq!((host_name("Web server #1"), host_name("  ")), ("web-server--1".into(), "guest".into()));
    }
}
