//! Pools of hosts.

use super::select::host;
use super::{Command, command};
use crate::xe::error::{Failure, Result};
use crate::xe::session::Session;

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
