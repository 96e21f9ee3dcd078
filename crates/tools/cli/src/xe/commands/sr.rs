//! Storage repositories and their connections.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::select::host;
use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::out;
use crate::xe::printer::Cell;
use crate::xe::session::{Session, object, print};
use crate::xe::size;

pub(super) static COMMANDS: &[Command] = &[
    command(
        "sr-create",
        &["name-label", "type"],
        &[
            "name-description",
            "host-uuid",
            "device-config:",
            "shared",
            "physical-size",
            "content-type",
            "sm-config:",
            "other-config:",
            "settings",
        ],
        "Makes an SR; what lies on its storage is lost",
        create,
    ),
    command(
        "sr-introduce",
        &["name-label", "type", "uuid"],
        &["name-description", "shared", "content-type"],
        "Makes an SR known that exists already",
        introduce,
    ),
    command(
        "sr-probe",
        &["type"],
        &["host-uuid", "device-config:", "sm-config:"],
        "Looks for SRs on a storage; prints XML",
        probe,
    ),
    command(
        "sr-probe-ext",
        &["type"],
        &["host-uuid", "device-config:", "sm-config:"],
        "Looks for SRs on a storage",
        probe_ext,
    ),
    command("sr-scan", &["uuid"], &[], "Looks what lies in an SR, and brings its VDIs up to date", |s| {
        on_sr(s, "SR.scan")
    }),
    command(
        "sr-gc",
        &["uuid"],
        &["dry-run"],
        "Begins a garbage collection of an SR; prints what it will do, and why the rest stays",
        collect_garbage,
    ),
    command(
        "lvhd-enable-thin-provisioning",
        &["sr-uuid", "initial-allocation", "allocation-quantum"],
        &[],
        "Makes VDIs thin that are made from now on in an SR of type lvm, lvmoiscsi or lvmohba; those that are there stay \
         as they are (vdi-convert). Sizes as 1GiB, or 0: space for so much data at once (0), and by how much a disk \
         becomes longer at least (64MiB)",
        enable_thin,
    ),
    command("sr-update", &["uuid"], &[], "Brings the sizes of an SR up to date", |s| on_sr(s, "SR.update")),
    command("sr-forget", &["uuid"], &[], "Forgets an SR and leaves what it holds", |s| on_sr(s, "SR.forget")),
    command("sr-destroy", &["uuid"], &[], "Destroys an SR with all it holds", |s| on_sr(s, "SR.destroy")),
    command(
        "pbd-create",
        &["host-uuid", "sr-uuid"],
        &["device-config:"],
        "Says how a host reaches an SR",
        pbd_create,
    ),
    command("pbd-destroy", &["uuid"], &[], "Forgets how a host reaches an SR", |s| on_pbd(s, "PBD.destroy")),
    command("pbd-plug", &["uuid"], &[], "Attaches an SR to a host", |s| on_pbd(s, "PBD.plug")),
    command("pbd-unplug", &["uuid"], &[], "Detaches an SR from a host", |s| on_pbd(s, "PBD.unplug")),
];

fn on_sr(session: &Session, method: &str) -> Result<()> {
    let sr = session.reference("SR", "uuid")?;
    session.long(method, &[sr.into()]).map(drop)
}

fn on_pbd(session: &Session, method: &str) -> Result<()> {
    let pbd = session.reference("PBD", "uuid")?;
    session.long(method, &[pbd.into()]).map(drop)
}

/// `device-config:`, with what `KEY-filename=FILE` reads from a file here.
fn device_config(session: &Session) -> Result<Value> {
    let mut config = session.arguments.map("device-config");
    let named: Vec<String> = config.keys().filter(|key| key.ends_with("-filename")).cloned().collect();
    for key in named {
        let Some(path) = config.remove(&key) else { continue };
        let text =
            out::text_of(&path).map_err(|error| Failure::other(format!("device-config:{key}: {error}")))?;
        config.insert(key.trim_end_matches("-filename").to_owned(), text);
    }
    Ok(object(&config))
}

/// An error with the types there are, where there is none of the type that was asked for.
fn known_type<T>(session: &Session, answer: Result<T>) -> Result<T> {
    let is_unknown =
        |failure: &Failure| matches!(failure, Failure::Api(code, _) if code == "SR_UNKNOWN_DRIVER");
    let Err(failure) = answer else { return answer };
    if !is_unknown(&failure) {
        return Err(failure);
    }
    // What went wrong is said even where the types cannot be asked for.
    let Ok(types) = session.call("SR.get_supported_types", &[]) else { return Err(failure) };
    let mut types: Vec<&str> = types.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    types.sort_unstable();
    let asked = session.need("type")?;
    Err(Failure::other(format!("type: there is no SR type '{asked}'; there are: {}", types.join(", "))))
}

/// Asks every host that has the SR attached: each knows by itself how it gives space.
fn enable_thin(session: &Session) -> Result<()> {
    let sr = session.reference("SR", "sr-uuid")?;
    let sizes = [session.size("initial-allocation")?, session.size("allocation-quantum")?];
    let all = session.call("PBD.get_all_records", &[])?;
    let pbds = all.as_object().into_iter().flat_map(|pbds| pbds.values());
    let attached = pbds.filter(|pbd| pbd["SR"] == *sr && pbd["currently_attached"] == true);
    let hosts: Vec<Value> = attached.map(|pbd| pbd["host"].clone()).collect();
    if hosts.is_empty() {
        return Err(Failure::other("no host has the SR attached: use pbd-plug first"));
    }
    for host in hosts {
        let params = [host, sr.as_str().into(), sizes[0].into(), sizes[1].into()];
        session.long("LVHD.enable_thin_provisioning", &params)?;
    }
    Ok(())
}

fn collect_garbage(session: &Session) -> Result<()> {
    let sr = session.reference("SR", "uuid")?;
    let only_look = session.truth("dry-run", false)?;
    let lines = session.call("SR.collect_garbage", &[sr.into(), only_look.into()])?;
    let lines: Vec<&str> = lines.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    lines.iter().try_for_each(|line| print(&format!("{line}\n")))
}

fn create(session: &Session) -> Result<()> {
    let size =
        session.arguments.get("physical-size").map_or(Ok(0), |text| size::bytes("physical-size", text))?;
    let params = [
        host(session)?.into(),
        device_config(session)?,
        size.into(),
        session.need("name-label")?.into(),
        session.or("name-description", "").into(),
        session.need("type")?.into(),
        session.or("content-type", "").into(),
        session.truth("shared", false)?.into(),
        session.map("sm-config"),
    ];
    // Read before anything is made.
    let settings = settings(session)?;
    let sr = known_type(session, session.long("SR.create", &params))?;
    for (key, value) in settings {
        let set =
            session.call("SR.add_to_other_config", &[sr.as_str().into(), key.as_str().into(), value.into()]);
        set.map_err(|error| {
            let why = error.text(&|_| None);
            Failure::other(format!("the SR is made, but other-config:{key} is not set: {}", why.trim_end()))
        })?;
    }
    session.print_uuid("SR", &sr)
}

/// `other-config:` and, below it, the lines `KEY=VALUE` of the file that `settings` names, as 'tapio profile
/// --write-settings' writes it.
fn settings(session: &Session) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    if let Some(path) = session.arguments.get("settings") {
        let text = out::text_of(path).map_err(|error| Failure::other(format!("settings: {error}")))?;
        all = settings_of(&text).map_err(|error| Failure::other(format!("settings: {path}, {error}")))?;
    }
    all.extend(session.arguments.map("other-config"));
    Ok(all)
}

fn settings_of(text: &str) -> std::result::Result<BTreeMap<String, String>, String> {
    let mut all = BTreeMap::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (key, value) = line
            .split_once('=')
            .filter(|(key, _)| !key.trim().is_empty())
            .ok_or_else(|| format!("line {}: KEY=VALUE is expected, not '{line}'", number + 1))?;
        all.insert(key.trim().to_owned(), value.trim().to_owned());
    }
    Ok(all)
}

fn introduce(session: &Session) -> Result<()> {
    let params = [
        session.need("uuid")?.into(),
        session.need("name-label")?.into(),
        session.or("name-description", "").into(),
        session.need("type")?.into(),
        session.or("content-type", "").into(),
        session.truth("shared", false)?.into(),
        json!({}),
    ];
    let sr = known_type(session, session.long("SR.introduce", &params))?;
    session.print_uuid("SR", &sr)
}

fn probed(session: &Session) -> Result<[Value; 4]> {
    let kind = session.need("type")?;
    Ok([host(session)?.into(), device_config(session)?, kind.into(), session.map("sm-config")])
}

fn probe(session: &Session) -> Result<()> {
    let xml = known_type(session, session.text("SR.probe", &probed(session)?))?;
    session.print_values(&[&xml])
}

fn probe_ext(session: &Session) -> Result<()> {
    let found = known_type(session, session.call("SR.probe_ext", &probed(session)?))?;
    let cell = |name: &str, qualifier, value: &Value| Cell {
        name: name.to_owned(),
        qualifier,
        text: crate::xe::objects::text(value, tapio_model::Type::Any, "; "),
        value: value.clone(),
    };
    let mut records = Vec::new();
    for result in found.as_array().into_iter().flatten() {
        let mut record = Vec::new();
        let sr = result.get("sr").filter(|sr| sr.is_object());
        if let Some(sr) = sr {
            for name in
                ["uuid", "name_label", "name_description", "free_space", "total_space", "clustered", "health"]
            {
                if let Some(value) = sr.get(name) {
                    record.push(cell(&format!("sr-{}", name.replace('_', "-")), " ( RO)", value));
                }
            }
        }
        for (name, qualifier) in
            [("configuration", " (MRO)"), ("complete", " ( RO)"), ("extra_info", " (MRO)")]
        {
            if let Some(value) = result.get(name) {
                record.push(cell(&name.replace('_', "-"), qualifier, value));
            }
        }
        records.push(record);
    }
    session.print_records(&records)
}

fn pbd_create(session: &Session) -> Result<()> {
    let record = json!({
        "host": session.reference("host", "host-uuid")?,
        "SR": session.reference("SR", "sr-uuid")?,
        "device_config": device_config(session)?,
        "other_config": {},
    });
    let pbd = session.text("PBD.create", &[record])?;
    session.print_uuid("PBD", &pbd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_lines_of_keys_and_values() {
        let found = settings_of("# why\n\nscheduler=none\n nr_requests = 64 \nscheduler-tunables=a=1,b=2\n");
        let found = found.expect("settings");
        let pairs: Vec<_> = found.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(pairs, [("nr_requests", "64"), ("scheduler", "none"), ("scheduler-tunables", "a=1,b=2")]);
        for bad in ["scheduler", "=none", "# x\nnone"] {
            assert!(settings_of(bad).expect_err("no setting").contains("KEY=VALUE is expected"), "{bad}");
        }
    }
}
