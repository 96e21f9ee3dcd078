//! `CONTROL`: what an administrator can ask of the daemon itself (`xenstore-control`).

use std::fmt::Write as _;

use tapio_xenstore::wire::{Errno, MessageKind, Pieces, decimal};

use super::{Action, Server};
use crate::quota::QUOTAS;
use crate::tree::walk;
use crate::watches::ConnId;

/// What can be asked.
const COMMANDS: &str = "Supported commands:
check
help
live-update [-f <program>] | [-c <arguments>] | [-s] | [-a]
log on|off
logfile <file>
memreport
print <text>
quota [<domid>] | [set <quota> <value>] | [set <domid> <quota> <value>]
quota-soft
stats
";

impl Server {
    /// Carries a command out. `None`: it is answered later.
    pub(super) fn control(
        &mut self,
        id: ConnId,
        request: u32,
        arguments: &[u8],
    ) -> Result<Option<String>, Errno> {
        let words: Vec<&str> = Pieces::new(arguments)
            .ok_or(Errno::EINVAL)?
            .map(std::str::from_utf8)
            .collect::<Result<_, _>>()
            .map_err(|_| Errno::EINVAL)?;
        let ok = || Ok(Some("OK".to_owned()));
        match words.as_slice() {
            ["help", ..] | [""] => Ok(Some(COMMANDS.into())),
            ["check"] => Ok(Some(self.check())),
            ["log", state @ ("on" | "off")] => {
                self.set_trace(*state == "on").map_err(|_| Errno::EIO)?;
                ok()
            }
            ["logfile", path] => {
                self.set_trace_path(path);
                self.set_trace(true).map_err(|_| Errno::EIO)?;
                ok()
            }
            ["print", text] => {
                crate::say!("{}", text.escape_debug());
                ok()
            }
            ["memreport", ..] => Ok(Some(self.memory_report())),
            ["stats"] => Ok(Some(self.statistics())),
            ["quota"] => Ok(Some(self.quotas())),
            ["quota-soft"] => Ok(Some("There are no soft quotas.\n".into())),
            ["quota", "set", quota, value] => {
                let value = decimal(value.as_bytes()).ok_or(Errno::EINVAL)?;
                self.set_quota(None, quota, value)?;
                ok()
            }
            ["quota", "set", domid, quota, value] => {
                let number = |text: &str| decimal(text.as_bytes()).ok_or(Errno::EINVAL);
                let domid = u32::try_from(number(domid)?).map_err(|_| Errno::EINVAL)?;
                self.set_quota(Some(domid), quota, number(value)?)?;
                ok()
            }
            ["quota", domid] => {
                let domid = decimal(domid.as_bytes()).and_then(|number| u32::try_from(number).ok());
                Ok(Some(self.used(domid.ok_or(Errno::EINVAL)?)))
            }
            ["live-update", rest @ ..] => self.live_update(id, request, rest),
            _ => Err(Errno::EINVAL),
        }
    }

    /// As `xenstore-control live-update` asks: first the program, then perhaps its arguments, then to begin.
    fn live_update(&mut self, id: ConnId, request: u32, words: &[&str]) -> Result<Option<String>, Errno> {
        match words {
            ["-f", program] => self.next_program = Some((*program).into()),
            ["-c", arguments] => self.next_arguments = Some((*arguments).into()),
            ["-a"] => {
                self.next_program = None;
                self.next_arguments = None;
            }
            // `-t SECONDS` and `-F` are for daemons that must wait for transactions to end: here they go along.
            [] | ["-s", ..] => {
                let (program, arguments) = (self.next_program.take(), self.next_arguments.take());
                self.actions.push(Action::LiveUpdate { conn: id, request, program, arguments });
                return Ok(None);
            }
            _ => return Err(Errno::EINVAL),
        }
        Ok(Some("OK".into()))
    }

    /// Counts everything anew and compares it with what was counted along the way.
    fn check(&self) -> String {
        let mut problems = self.trouble.as_ref().map_or_else(String::new, |trouble| format!("{trouble}\n"));
        let counted = crate::store::usage_of(&self.store.live);
        for domid in counted.keys().chain(self.store.usage.keys()) {
            let (found, kept) = (counted.get(domid).copied().unwrap_or_default(), self.store.usage(*domid));
            if found != kept {
                let _ = writeln!(problems, "domain {domid} uses {found:?}, but {kept:?} is remembered");
            }
        }
        for (id, conn) in self.conns.iter().enumerate() {
            let Some(conn) = conn else { continue };
            let watches = self.watches.of(id).count() as u64;
            if watches != conn.watches {
                let _ = writeln!(problems, "connection {id} has {watches} watches, not {}", conn.watches);
            }
        }
        if problems.is_empty() { "OK".into() } else { problems }
    }

    fn memory_report(&self) -> String {
        let (mut nodes, mut values, mut perms, mut names) = (0usize, 0usize, 0usize, 0usize);
        walk("/", self.store.live.root(), |path, node| {
            nodes += 1;
            values += node.value.len();
            perms += node.perms.len();
            names += path.rsplit('/').next().map_or(0, str::len);
        });
        let conns: Vec<_> = self.conns.iter().flatten().collect();
        let sum = |of: fn(&crate::session::Conn) -> usize| conns.iter().map(|conn| of(conn)).sum::<usize>();
        let mut text = format!(
            "{nodes} nodes: {values} bytes of values, {names} of names, {perms} permissions\n\
             {} connections: {} bytes to be sent, {} bytes of unfinished requests\n\
             {} transactions: {} bytes of what they saw and changed\n\
             {} watches\n",
            conns.len(),
            sum(|conn| conn.out.unsent().len()),
            sum(|conn| conn.decoder.pending().len()),
            sum(|conn| conn.transactions.len()),
            sum(|conn| conn.transactions.iter().map(|(_, transaction)| transaction.bytes).sum()),
            conns.iter().map(|conn| conn.watches).sum::<u64>(),
        );
        for (domid, usage) in &self.store.usage {
            let _ = writeln!(text, "domain {domid}: {} nodes, {} bytes", usage.nodes, usage.bytes);
        }
        text
    }

    fn statistics(&self) -> String {
        let mut text = String::new();
        for kind in MessageKind::ALL {
            let count = self.counts.get(*kind as usize).copied().unwrap_or(0);
            if count != 0 {
                let _ = writeln!(text, "{} {count}", kind.name());
            }
        }
        let _ = writeln!(text, "events {}\nconflicts {}", self.events, self.conflicts);
        text
    }

    fn quotas(&self) -> String {
        let mut text = String::from("Default Quota settings:\n");
        for ((name, _, description), value) in QUOTAS.iter().zip(self.domains.general.limits.values()) {
            let _ = writeln!(text, "{name:>20}: {value:>8} {description}");
        }
        text
    }

    fn used(&self, domid: u32) -> String {
        let usage = self.store.usage(domid);
        let mut text = format!("Domain {domid}:\nnodes: {}\nbytes of nodes: {}\n", usage.nodes, usage.bytes);
        for conn in self.conns.iter().flatten().filter(|conn| conn.caller.domid == domid) {
            let _ = writeln!(
                text,
                "watches: {}\ntransactions: {}\noutstanding: {}\nbytes of the connection: {}",
                conn.watches,
                conn.transactions.len(),
                conn.out.messages(),
                conn.memory()
            );
        }
        text
    }
}
