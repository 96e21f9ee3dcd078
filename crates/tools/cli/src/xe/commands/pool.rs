//! Pools of hosts.

use super::select::host;
use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::{Session, print};

pub(super) static COMMANDS: &[Command] = &[
    command(
        "pool-join",
        &["master-address", "master-username"],
        &["master-password", "master-password-file", "force"],
        "Lets this host join the pool of another, which must be alone; master-password-file keeps the password out of \
         lists of processes",
        join,
    ),
    command(
        "pool-eject",
        &["host-uuid"],
        &["force"],
        "Lets a host leave the pool; it starts again alone, with a new database. --force asks nothing",
        eject,
    ),
    command("pool-designate-new-master", &["host-uuid"], &[], "Lets another host decide for the pool", |s| {
        let host = s.reference("host", "host-uuid")?;
        s.long("pool.designate_new_master", &[host.into()]).map(drop)
    }),
    command(
        "pool-emergency-transition-to-master",
        &[],
        &[],
        "Lets this host decide for the pool, if no other host does",
        |s| s.long("pool.emergency_transition_to_master", &[]).map(drop),
    ),
    command(
        "pool-recover-slaves",
        &[],
        &[],
        "Prints the other hosts that follow the one that decides, which they do by themselves",
        |s| {
            let hosts = s.call("pool.recover_slaves", &[])?;
            let uuids: Result<Vec<String>> = hosts
                .as_array()
                .into_iter()
                .flatten()
                .map(|host| s.text("host.get_uuid", std::slice::from_ref(host)))
                .collect();
            println!("{}", uuids?.join(","));
            Ok(())
        },
    ),
    command(
        "pool-ha-enable",
        &[],
        &["heartbeat-sr-uuids", "ha-config:"],
        "Has VMs of hosts that die started on others: those with ha-restart-priority=restart, whose disks are on shared \
         SRs. heartbeat-sr-uuids names SRs that every host must have attached, separated by commas",
        |s| {
            let uuids = s.or("heartbeat-sr-uuids", "").split(',').filter(|uuid| !uuid.is_empty());
            let srs: Result<Vec<String>> = uuids.map(|uuid| s.by_uuid("SR", uuid)).collect();
            s.long("pool.enable_ha", &[srs?.into(), s.map("ha-config")]).map(drop)
        },
    ),
    command("pool-ha-disable", &[], &[], "VMs of hosts that die are not started on others any more", |s| {
        s.long("pool.disable_ha", &[]).map(drop)
    }),
    command(
        "pool-ha-prevent-restarts-for",
        &["seconds"],
        &[],
        "Starts no VM of a host that died for so many seconds",
        |s| s.call("pool.ha_prevent_restarts_for", &[s.need("seconds")?.into()]).map(drop),
    ),
    command(
        "pool-ha-compute-max-host-failures-to-tolerate",
        &[],
        &[],
        "Prints how many hosts may fail so that VMs with ha-restart-priority=restart still have memory",
        |s| print(&s.text("pool.ha_compute_max_host_failures_to_tolerate", &[])?),
    ),
    command(
        "pool-ha-compute-hypothetical-max-host-failures-to-tolerate",
        &["vm-uuid", "restart-priority"],
        &[],
        "Prints how many hosts may fail so that these VMs (vm-uuid=VM,VM) still have memory, if each had the \
         ha-restart-priority in its place (restart-priority=restart,best-effort) and all others none",
        hypothetical,
    ),
    command(
        "host-forget",
        &[],
        &["host-uuid", "host", "force"],
        "Forgets a host of the pool that does not live any more",
        |s| {
            let host = host(s)?;
            s.long("host.destroy", &[host.into()]).map(drop)
        },
    ),
];

/// VMs and what each is to want, by their places in two lists.
fn hypothetical(session: &Session) -> Result<()> {
    let list =
        |name: &str| Ok::<_, Failure>(session.need(name)?.split(',').map(str::trim).collect::<Vec<_>>());
    let (vms, priorities) = (list("vm-uuid")?, list("restart-priority")?);
    if vms.len() != priorities.len() {
        let counts = format!("vm-uuid has {} values and restart-priority {}", vms.len(), priorities.len());
        return Err(Failure::other(format!("{counts}: give as many of both, with commas between them")));
    }
    let mut wanted = serde_json::Map::new();
    for (vm, priority) in vms.into_iter().zip(priorities) {
        wanted.insert(session.by_uuid("VM", vm)?, priority.into());
    }
    let method = "pool.ha_compute_hypothetical_max_host_failures_to_tolerate";
    print(&format!("{}\n", session.text(method, &[wanted.into()])?))
}

fn join(session: &Session) -> Result<()> {
    let given = |name: &str| session.arguments.get(name).map(str::to_owned);
    let password = match (given("master-password"), given("master-password-file")) {
        (Some(password), None) => password,
        (None, Some(path)) => {
            let text = std::fs::read_to_string(&path);
            let text =
                text.map_err(|error| Failure::other(format!("reading the password from {path}: {error}")))?;
            text.lines().next().unwrap_or_default().to_owned()
        }
        _ => return Err(Failure::Missing("master-password-file".into())),
    };
    let address = given("master-address").unwrap_or_default();
    let user = given("master-username").unwrap_or_default();
    let force = session.truth("force", false)?;
    let method = if force { "pool.join_force" } else { "pool.join" };
    session.call(method, &[address.into(), user.into(), password.into()]).map(drop)
}

fn eject(session: &Session) -> Result<()> {
    let host = session.reference("host", "host-uuid")?;
    if !session.truth("force", false)? {
        let what = "the host's database, and the records of SRs that only it has, are removed; its disks stay where \
                    they are. Repeat the command with --force";
        return Err(Failure::other(what));
    }
    session.call("pool.eject", &[host.into()]).map(drop)
}
