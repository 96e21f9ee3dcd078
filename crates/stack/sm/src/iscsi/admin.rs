//! The one place that runs open-iscsi's programs: with a time limit each, judged by their exit status, and without a
//! secret among their arguments.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tapio_types::ApiError;

use super::config::{Chap, Target};
use super::name::{Node, Portal, parse_discovery};
use super::record::Record;
use crate::command::{self, Failure, Output};
use crate::errors;
use crate::scsi::Tree;

/// A portal that is there takes a connection sooner.
const REACH_TIMEOUT: Duration = Duration::from_secs(10);
/// Programs that change the database alone.
const RECORD_TIMEOUT: Duration = Duration::from_secs(30);
/// A login has a retry or two in it, a logout waits for requests.
const SESSION_TIMEOUT: Duration = Duration::from_secs(180);
const DAEMON_TIMEOUT: Duration = Duration::from_secs(20);
const TURN: Duration = Duration::from_millis(20);
/// The socket of iscsid, as `/proc/net/unix` shows it.
const ISCSID: &str = "@ISCSIADM_ABSTRACT_NAMESPACE";
/// Seconds after which requests of a session that is lost fail: never, so that a guest waits until it is back.
const WAIT_FOR_EVER: i64 = -1;
/// The same where other sessions reach the LUN, which take over then.
const WAIT_FOR_OTHERS: i64 = 15;

/// Exit statuses of iscsiadm; iscsiadm(8).
mod status {
    pub(super) const CONNECT: i32 = 4;
    pub(super) const CONNECT_TIMEOUT: i32 = 8;
    pub(super) const PDU_TIMEOUT: i32 = 11;
    pub(super) const NO_TRANSPORT: i32 = 12;
    pub(super) const SESSION_EXISTS: i32 = 15;
    pub(super) const DAEMON_TALK: i32 = 18;
    pub(super) const NO_DAEMON: i32 = 20;
    pub(super) const NOTHING_FOUND: i32 = 21;
    pub(super) const REFUSED: i32 = 24;
}

/// What is outside: programs, and the network.
pub(crate) trait Outside: Send + Sync + fmt::Debug {
    /// Runs a program.
    ///
    /// # Errors
    /// It cannot be run, or does not end in time.
    fn run(&self, program: &str, arguments: &[&str], limit: Duration) -> Result<Output, Failure>;

    /// Whether something takes connections at a portal.
    ///
    /// # Errors
    /// The system's.
    fn reach(&self, portal: Portal) -> io::Result<()>;
}

/// This host.
#[derive(Debug)]
pub(crate) struct Host;

impl Outside for Host {
    fn run(&self, program: &str, arguments: &[&str], limit: Duration) -> Result<Output, Failure> {
        command::run(program, arguments, limit)
    }

    fn reach(&self, portal: Portal) -> io::Result<()> {
        TcpStream::connect_timeout(&SocketAddr::new(portal.address, portal.port), REACH_TIMEOUT).map(drop)
    }
}

/// How a login ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Login {
    /// There is a new session.
    New,
    /// There was one.
    Existed,
    /// The portal does not answer, which another one may do.
    NoAnswer(String),
}

/// Open-iscsi on this host.
#[derive(Debug)]
pub(super) struct Admin<'a> {
    pub(super) outside: &'a dyn Outside,
    pub(super) tree: &'a Tree,
}

impl Admin<'_> {
    fn iscsiadm(&self, arguments: &[&str], limit: Duration) -> Result<Output, ApiError> {
        self.outside.run("iscsiadm", arguments, limit).map_err(|error| {
            let next = if error.is_missing { ": install open-iscsi" } else { "" };
            errors::fail(70, format_args!("{error}{next}"))
        })
    }

    /// Whether something takes connections at a portal; 141 if not.
    pub(super) fn reach(&self, portal: Portal) -> Result<(), ApiError> {
        self.outside.reach(portal).map_err(|error| errors::fail(141, format_args!("{portal}: {error}")))
    }

    /// Starts iscsid where it does not run.
    ///
    /// # Errors
    /// 97: this host has no iSCSI name; 71: it does not start.
    pub(super) fn daemon(&self) -> Result<(), ApiError> {
        if self.has_daemon() {
            return Ok(());
        }
        let file = self.tree.at("/etc/iscsi/initiatorname.iscsi");
        let has_name = self
            .tree
            .text(&file)
            .is_some_and(|text| text.lines().any(|line| line.trim_start().starts_with("InitiatorName=")));
        if !has_name {
            let text = format!(
                "{} has no line InitiatorName=: make one by iscsi-iname, of a name that the target lets in",
                file.display()
            );
            return Err(errors::fail(97, text));
        }
        let by_systemd = self.tree.is_there(&self.tree.at("/run/systemd/system"));
        let (program, arguments): (&str, &[&str]) =
            if by_systemd { ("systemctl", &["start", "iscsid"]) } else { ("iscsid", &[]) };
        let started = self.outside.run(program, arguments, DAEMON_TIMEOUT);
        let said = match started {
            Err(error) => {
                let next = if error.is_missing { ": install open-iscsi" } else { "" };
                return Err(errors::fail(71, format_args!("{error}{next}")));
            }
            Ok(output) => last_line(&output),
        };
        let until = Instant::now() + DAEMON_TIMEOUT;
        while !self.has_daemon() {
            if Instant::now() > until {
                return Err(errors::fail(71, format_args!("'{program}' was run and said: {said}")));
            }
            std::thread::sleep(TURN);
        }
        Ok(())
    }

    fn has_daemon(&self) -> bool {
        self.tree
            .text(&self.tree.at("/proc/net/unix"))
            .is_some_and(|table| table.lines().any(|line| line.ends_with(ISCSID)))
    }

    /// Asks a portal for the targets that it has for this host.
    ///
    /// # Errors
    /// 83, 70.
    pub(super) fn discover(&self, portal: Portal, chap: Option<&Chap>) -> Result<Vec<Node>, ApiError> {
        let place = portal.to_string();
        let output = match chap {
            // Asks without a record, and leaves none.
            None => self.iscsiadm(
                &["-m", "discovery", "-t", "sendtargets", "-p", &place, "-o", "nonpersistent"],
                SESSION_TIMEOUT,
            )?,
            Some(chap) => self.discover_as(portal, chap)?,
        };
        match output.status {
            Some(0) => Ok(parse_discovery(&output.stdout)),
            Some(status::NOTHING_FOUND) => Ok(Vec::new()),
            Some(status::NO_TRANSPORT) => Err(no_transport(&output)),
            Some(status::REFUSED) => {
                let text = format!("{place} refused the discovery: see chapuser and chappassword");
                Err(errors::fail(83, text))
            }
            _ => Err(errors::fail(83, format_args!("{place}: {}", last_line(&output)))),
        }
    }

    /// A discovery by a record, which holds the password. A record that was there is there again afterwards.
    fn discover_as(&self, portal: Portal, chap: &Chap) -> Result<Output, ApiError> {
        let place = portal.to_string();
        let failed = |error: io::Error| errors::fail(70, format_args!("the record of {place}: {error}"));
        let before = match Record::of_discovery(self.tree, portal).filter(|record| !record.is_ours()) {
            Some(record) => Some(record.text().map_err(failed)?),
            None => None,
        };
        let base = ["-m", "discoverydb", "-t", "sendtargets", "-p", &place];
        // The record is made even where the discovery, which comes with it, cannot be.
        let made = self.iscsiadm(&[&base[..], &["-o", "new"]].concat(), RECORD_TIMEOUT)?;
        let Some(record) = Record::of_discovery(self.tree, portal) else {
            let text = format!("iscsiadm made no record for {place}: {}", last_line(&made));
            return Err(errors::fail(70, text));
        };
        let values = [
            ("discovery.sendtargets.auth.authmethod", "CHAP".to_owned()),
            ("discovery.sendtargets.auth.username", chap.user.clone()),
            ("discovery.sendtargets.auth.password", chap.password.clone()),
        ];
        let output = record.set(&values).map_err(failed).and_then(|()| {
            self.iscsiadm(&[&base[..], &["--discover", "-o", "nonpersistent"]].concat(), SESSION_TIMEOUT)
        });
        match before {
            Some(text) => record.put(&text).map_err(failed)?,
            None => record.remove_discovery(),
        }
        output
    }

    /// The record with which a target is logged in to. The text of one that another program made, and that now has
    /// other values, comes with it.
    ///
    /// # Errors
    /// 70.
    pub(super) fn record(
        &self,
        node: &Node,
        target: &Target,
        several: bool,
    ) -> Result<Option<String>, ApiError> {
        let place = node.portal.to_string();
        let failed = |error: io::Error| {
            errors::fail(70, format_args!("the record of {} at {place}: {error}", node.name))
        };
        let found = Record::of_node(self.tree, node);
        let before = match &found {
            Some(record) if !record.is_ours() => Some(record.text().map_err(failed)?),
            _ => None,
        };
        let record = match found {
            Some(record) => record,
            None => {
                let made = self
                    .iscsiadm(&["-m", "node", "-o", "new", "-T", &node.name, "-p", &place], RECORD_TIMEOUT)?;
                Record::of_node(self.tree, node).ok_or_else(|| {
                    let text =
                        format!("iscsiadm made no record of {} at {place}: {}", node.name, last_line(&made));
                    errors::fail(70, text)
                })?
            }
        };
        record.set(&values(target, several)).map_err(failed)?;
        Ok(before)
    }

    /// Begins a session.
    ///
    /// # Errors
    /// 68: the target refuses it; 70, 71, 86.
    pub(super) fn login(&self, node: &Node) -> Result<Login, ApiError> {
        let place = node.portal.to_string();
        let arguments = ["-m", "node", "-T", &node.name, "-p", &place, "--login"];
        let output = self.iscsiadm(&arguments, SESSION_TIMEOUT)?;
        let said = || format!("{} at {place}: {}", node.name, last_line(&output));
        match output.status {
            Some(0) => Ok(Login::New),
            Some(status::SESSION_EXISTS) => Ok(Login::Existed),
            Some(status::CONNECT | status::CONNECT_TIMEOUT | status::PDU_TIMEOUT) => {
                Ok(Login::NoAnswer(said()))
            }
            Some(status::REFUSED) => {
                let text = format!(
                    "{} at {place} refused this host: see chapuser, chappassword and the target's list of initiators",
                    node.name
                );
                Err(errors::fail(68, text))
            }
            Some(status::NO_TRANSPORT) => Err(no_transport(&output)),
            Some(status::NO_DAEMON) => Err(errors::fail(71, said())),
            Some(status::DAEMON_TALK) => Err(errors::fail(86, said())),
            _ => Err(errors::fail(68, said())),
        }
    }

    /// Ends a session; one that has ended is fine.
    ///
    /// # Errors
    /// 69.
    pub(super) fn logout(&self, node: &Node) -> Result<(), ApiError> {
        let place = node.portal.to_string();
        let arguments = ["-m", "node", "-T", &node.name, "-p", &place, "--logout"];
        let output = self.iscsiadm(&arguments, SESSION_TIMEOUT)?;
        match output.status {
            Some(0 | 2 | status::NOTHING_FOUND) => Ok(()),
            _ => Err(errors::fail(69, format_args!("{} at {place}: {}", node.name, last_line(&output)))),
        }
    }

    /// Removes the map over paths that are about to go: without them it would keep requests for ever.
    ///
    /// # Errors
    /// 431.
    pub(super) fn flush_map(&self, map: &str) -> Result<(), ApiError> {
        let failed = |why: String| errors::fail(431, format_args!("the map {map}: {why}"));
        let output = self
            .outside
            .run("multipath", &["-f", map], RECORD_TIMEOUT)
            .map_err(|error| failed(error.to_string()))?;
        match output.status {
            Some(0) => Ok(()),
            _ => Err(failed(last_line(&output))),
        }
    }

    /// Removes the record of a session that has ended, or gives it back the values that another program had given it.
    pub(super) fn forget(&self, node: &Node, before: Option<&str>) {
        let Some(record) = Record::of_node(self.tree, node).filter(Record::is_ours) else { return };
        let place = node.portal.to_string();
        let done = match before {
            Some(text) => record.put(text).map_err(|error| error.to_string()),
            None => self
                .iscsiadm(&["-m", "node", "-T", &node.name, "-p", &place, "-o", "delete"], RECORD_TIMEOUT)
                .map(drop)
                .map_err(|error| error.to_string()),
        };
        if let Err(error) = done {
            tracing::warn!("the record of {} at {place} stays: {error}", node.name);
        }
    }
}

/// What differs from the values of `iscsid.conf`.
fn values(target: &Target, several: bool) -> Vec<(&'static str, String)> {
    let word =
        |chap: &Option<Chap>, of: fn(&Chap) -> &String| chap.as_ref().map(of).cloned().unwrap_or_default();
    let method = if target.chap.is_some() { "CHAP" } else { "None" };
    let waits = if several { WAIT_FOR_OTHERS } else { WAIT_FOR_EVER };
    vec![
        // The toolstack logs in when an SR is attached; nothing else does, at no boot.
        ("node.startup", "manual".into()),
        ("node.session.auth.authmethod", method.into()),
        ("node.session.auth.username", word(&target.chap, |chap| &chap.user)),
        ("node.session.auth.password", word(&target.chap, |chap| &chap.password)),
        ("node.session.auth.username_in", word(&target.incoming, |chap| &chap.user)),
        ("node.session.auth.password_in", word(&target.incoming, |chap| &chap.password)),
        ("node.session.timeo.replacement_timeout", target.replacement_timeout.unwrap_or(waits).to_string()),
        ("iface.initiatorname", target.initiator.clone().unwrap_or_default()),
    ]
}

fn no_transport(output: &Output) -> ApiError {
    errors::fail(70, format_args!("the kernel has no iscsi_tcp: {}", last_line(output)))
}

/// What a program said last.
fn last_line(output: &Output) -> String {
    let lines = output.stderr.lines().chain(output.stdout.lines()).map(str::trim);
    let mut lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    // The reason comes before the line that says that something has failed.
    lines.retain(|line| !line.ends_with("Could not log into all portals"));
    let status = output.status.map_or_else(|| "a signal".into(), |status| format!("status {status}"));
    format!("{} ({status})", lines.last().copied().unwrap_or("it printed nothing"))
}
