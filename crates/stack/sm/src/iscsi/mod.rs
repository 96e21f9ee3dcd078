//! Targets of iSCSI, by open-iscsi: discovery, sessions that several SRs share, and the disks behind them.
//!
//! ```text
//! name config    names, portals, device_config     admin record   iscsiadm, and the records that hold passwords
//! session state  what the kernel has, who uses it  documents      what a probe answers
//! ```
//!
//! What the kernel says of sessions and disks is read in sysfs; iscsiadm is for what it alone can do.

mod admin;
pub(crate) mod config;
pub(crate) mod documents;
pub(crate) mod name;
mod record;
mod session;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_types::ApiError;
use uuid::Uuid;

use crate::errors;
use crate::scsi::{Lun, Seen, Tree, group, has_multipathd};
use crate::traits::Ctx;
use admin::{Admin, Host, Login, Outside};
use config::Target;
use name::{Node, Portal};
use session::Session;
use state::State;

/// How long LUNs may take to appear after a login.
const LUN_TIMEOUT: Duration = Duration::from_secs(15);
const TURN: Duration = Duration::from_millis(20);
/// Without a LUN by then, the kernel is told to look once more.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// This host as an initiator.
#[derive(Clone, Debug)]
pub(crate) struct Initiator {
    pub(crate) tree: Tree,
    run_dir: PathBuf,
    outside: Arc<dyn Outside>,
}

/// Sessions that a holder uses.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    holder: String,
    names: Vec<String>,
    sessions: Vec<Session>,
    /// Whether a session was begun for it: what the kernel knew of the target before may be less.
    is_new: bool,
}

/// A hold that ends with its scope.
#[derive(Debug)]
pub(crate) struct Look<'a> {
    initiator: &'a Initiator,
    pub(crate) hold: Hold,
}

impl Drop for Look<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.initiator.release(&self.hold) {
            tracing::warn!("a session stays after a look at {}: {error}", self.hold.names.join(", "));
        }
    }
}

impl Initiator {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { tree: Tree::new(Path::new("/")), run_dir: run_dir.to_path_buf(), outside: Arc::new(Host) }
    }

    fn admin(&self) -> Admin<'_> {
        Admin { outside: &*self.outside, tree: &self.tree }
    }

    /// The targets that the first portal that answers has for this host.
    ///
    /// # Errors
    /// 141: none answers; 83, 70, 71, 97.
    pub(crate) fn discover(&self, target: &Target) -> Result<Vec<Node>, ApiError> {
        let admin = self.admin();
        let mut failed = None;
        for portal in &target.portals {
            if let Err(error) = admin.reach(*portal) {
                failed.get_or_insert(error);
                continue;
            }
            admin.daemon()?;
            return admin.discover(*portal, target.chap.as_ref());
        }
        Err(failed.unwrap_or_else(|| errors::fail(141, "no portal is named")))
    }

    /// Sessions for an SR.
    ///
    /// # Errors
    /// 141: no portal answers; 68: the target refuses this host; those of [`Self::discover`].
    pub(crate) fn hold(&self, ctx: &dyn Ctx, target: &Target, sr: Uuid) -> Result<Hold, ApiError> {
        self.hold_as(ctx, target, sr.to_string())
    }

    /// Sessions for as long as the answer lives.
    ///
    /// # Errors
    /// As [`Self::hold`].
    pub(crate) fn look(&self, ctx: &dyn Ctx, target: &Target) -> Result<Look<'_>, ApiError> {
        Ok(Look { initiator: self, hold: self.hold_as(ctx, target, state::look())? })
    }

    fn hold_as(&self, ctx: &dyn Ctx, target: &Target, holder: String) -> Result<Hold, ApiError> {
        // Several paths to a LUN are several disks where nothing puts a map over them.
        let several = target.multihomed && has_multipathd(&self.tree);
        let mut hold = Hold { holder, names: Vec::new(), sessions: Vec::new(), is_new: false };
        let nodes = match &target.name {
            Some(name) if !several => {
                target.portals.iter().map(|portal| Node { portal: *portal, name: name.clone() }).collect()
            }
            name => {
                let mut found = self.discover(target)?;
                found.retain(|node| name.as_ref().is_none_or(|name| *name == node.name));
                if !several {
                    found.retain(|node| target.portals.contains(&node.portal));
                }
                found
            }
        };
        let names: BTreeSet<&String> = nodes.iter().map(|node| &node.name).collect();
        if names.is_empty() {
            let wanted = target.name.as_deref().unwrap_or("any target");
            return Err(errors::fail(
                83,
                format_args!("{} does not offer {wanted} to this host", target.given),
            ));
        }
        for name in names {
            let portals: Vec<Portal> =
                nodes.iter().filter(|node| node.name == *name).map(|node| node.portal).collect();
            hold.names.push(name.clone());
            if let Err(error) = self.enter(ctx, target, name, &portals, several, &mut hold) {
                if let Err(error) = self.release(&hold) {
                    tracing::warn!("sessions stay after a failure: {error}");
                }
                return Err(error);
            }
        }
        Ok(hold)
    }

    /// Sessions to one target: at all portals, or at the first that answers.
    fn enter(
        &self,
        ctx: &dyn Ctx,
        target: &Target,
        name: &str,
        portals: &[Portal],
        several: bool,
        hold: &mut Hold,
    ) -> Result<(), ApiError> {
        let state = State::lock(Some(ctx), &self.run_dir, name)?;
        state.add_holder(&hold.holder)?;
        let known = state.sessions();
        let mut sessions: Vec<Session> =
            known.iter().filter_map(|id| Session::of_target(&self.tree, *id, name)).collect();
        let mut failed: Option<ApiError> = None;
        for portal in portals {
            if sessions.iter().any(|session| session.node.portal == *portal) {
                continue;
            }
            if !several && !sessions.is_empty() {
                break;
            }
            if ctx.is_cancelled() {
                return Err(errors::cancelled());
            }
            match self.begin(&state, target, &Node { portal: *portal, name: name.to_owned() }, several) {
                Ok((session, is_new)) => {
                    hold.is_new |= is_new;
                    sessions.push(session);
                }
                // Another portal may answer; a target that refuses this host does so at all of them.
                Err(error) if error.code == "SR_BACKEND_FAILURE_141" => {
                    failed.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(error) = failed.filter(|_| sessions.is_empty()) {
            return Err(error);
        }
        state.note_sessions(&sessions)?;
        hold.sessions.extend(sessions);
        Ok(())
    }

    /// A session at one portal, and whether it is a new one.
    fn begin(
        &self,
        state: &State,
        target: &Target,
        node: &Node,
        several: bool,
    ) -> Result<(Session, bool), ApiError> {
        let admin = self.admin();
        admin.reach(node.portal)?;
        admin.daemon()?;
        let mut began = state.began();
        let is_noted = began.contains(&node.portal);
        // A record that nobody of this host uses was left by a kill, or is another program's, as its session may be.
        if record::Record::of_node(&self.tree, node).is_some() {
            let found = Session::newest(&self.tree, &node.name, |found| found.node.portal == node.portal);
            if let Some(found) = found.into_iter().find(|found| found.node.portal == node.portal) {
                return Ok((found, false));
            }
        }
        if !is_noted {
            began.push(node.portal);
            state.note_began(&began)?;
        }
        let before = admin.record(node, target, several)?;
        if let Some(before) = &before {
            state.keep_before(node.portal, before)?;
        }
        let mut undo = |state: &State| {
            admin.forget(node, state.take_before(node.portal).as_deref());
            began.retain(|portal| *portal != node.portal);
            state.note_began(&began)
        };
        let login = admin.login(node);
        let is_new = match login {
            Ok(Login::New) => true,
            Ok(Login::Existed) => false,
            Ok(Login::NoAnswer(why)) => {
                undo(state)?;
                return Err(errors::fail(141, why));
            }
            Err(error) => {
                undo(state)?;
                return Err(error);
            }
        };
        let found = Session::newest(&self.tree, &node.name, |found| found.node.portal == node.portal);
        let Some(found) = found.into_iter().find(|found| found.node.portal == node.portal) else {
            let text = format!("{} at {} was logged in to and has no session", node.name, node.portal);
            return Err(errors::fail(67, text));
        };
        if !is_new {
            undo(state)?;
        }
        Ok((found, is_new))
    }

    /// Ends what a holder uses; the sessions that nothing else of this host uses end, unless another program began
    /// them.
    ///
    /// # Errors
    /// 85: a disk is in use; 69. The holder stays then, and the call can be repeated.
    pub(crate) fn release(&self, hold: &Hold) -> Result<(), ApiError> {
        for name in &hold.names {
            let state = State::lock(None, &self.run_dir, name)?;
            state.remove_holder(&hold.holder);
            if !state.holders().is_empty() {
                continue;
            }
            let ended = self.end(&state, name);
            if let Err(error) = ended {
                state.add_holder(&hold.holder)?;
                return Err(error);
            }
        }
        Ok(())
    }

    fn end(&self, state: &State, name: &str) -> Result<(), ApiError> {
        let began = state.began();
        let admin = self.admin();
        let known = state.sessions().into_iter().filter_map(|id| Session::of_target(&self.tree, id, name));
        let ours: Vec<Session> = known.filter(|session| began.contains(&session.node.portal)).collect();
        let luns = group(ours.iter().flat_map(|session| session.disks(&self.tree)).collect());
        for lun in &luns {
            // The kernel would take the disks away under whatever uses them.
            if lun.is_in_use(&self.tree) {
                let text = format!("{} ({}) is in use", lun.device(&self.tree).display(), lun.scsi_id);
                return Err(errors::fail(85, text));
            }
        }
        for map in luns.iter().filter_map(|lun| lun.map_name(&self.tree)) {
            admin.flush_map(&map)?;
        }
        for portal in began {
            let node = Node { portal, name: name.to_owned() };
            admin.logout(&node)?;
            admin.forget(&node, state.take_before(portal).as_deref());
        }
        state.clear();
        Ok(())
    }

    /// The SRs of this host that use a target.
    pub(crate) fn users(&self, ctx: &dyn Ctx, name: &str) -> Result<Vec<Uuid>, ApiError> {
        let state = State::lock(Some(ctx), &self.run_dir, name)?;
        Ok(state.holders().iter().filter_map(|holder| Uuid::try_parse(holder).ok()).collect())
    }

    /// The LUNs behind sessions, as the kernel knows them now.
    pub(crate) fn luns(&self, hold: &Hold) -> Vec<Lun> {
        let luns = group(hold.sessions.iter().flat_map(|session| session.disks(&self.tree)).collect());
        Seen::new(&self.run_dir).note(&luns);
        luns
    }

    /// As [`Self::luns`], with those that the targets have got since, and what they say of themselves now.
    pub(crate) fn luns_now(&self, hold: &Hold) -> Vec<Lun> {
        for session in &hold.sessions {
            session.scan(&self.tree);
        }
        let luns = self.luns(hold);
        for disk in luns.iter().flat_map(|lun| &lun.paths) {
            disk.ask_again(&self.tree);
        }
        luns
    }

    /// The LUNs behind sessions once there is one: a login returns before the kernel has found them.
    ///
    /// # Errors
    /// `TASK_CANCELLED`.
    pub(crate) fn settled_luns(&self, ctx: &dyn Ctx, hold: &Hold) -> Result<Vec<Lun>, ApiError> {
        self.wait(ctx, hold, |luns| (!luns.is_empty()).then_some(())).map(|_| self.luns(hold))
    }

    /// The LUN of this identity behind sessions.
    ///
    /// # Errors
    /// 67: it does not appear; `TASK_CANCELLED`.
    pub(crate) fn lun(&self, ctx: &dyn Ctx, hold: &Hold, scsi_id: &str) -> Result<Lun, ApiError> {
        let seen = Seen::new(&self.run_dir);
        if !hold.is_new
            && let Some(lun) = seen.find(&self.tree, scsi_id)
            && lun.paths.len() >= hold.sessions.len()
        {
            return Ok(lun);
        }
        let find = |luns: &[Lun]| luns.iter().find(|lun| lun.scsi_id == scsi_id).cloned();
        self.wait(ctx, hold, find)?.ok_or_else(|| {
            let text = format!("{} has no LUN of SCSIid {scsi_id} for this host", hold.names.join(", "));
            errors::fail(67, text)
        })
    }

    fn wait<T>(
        &self,
        ctx: &dyn Ctx,
        hold: &Hold,
        found: impl Fn(&[Lun]) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let began = Instant::now();
        let mut is_told = false;
        loop {
            if let Some(found) = found(&self.luns(hold)) {
                return Ok(Some(found));
            }
            if began.elapsed() > LUN_TIMEOUT {
                return Ok(None);
            }
            if ctx.is_cancelled() {
                return Err(errors::cancelled());
            }
            // One that was mapped to this host after its session began.
            if !is_told && (!hold.is_new || began.elapsed() > LOOK_AGAIN) {
                is_told = true;
                for session in &hold.sessions {
                    session.scan(&self.tree);
                }
            } else {
                std::thread::sleep(TURN);
            }
        }
    }
}
