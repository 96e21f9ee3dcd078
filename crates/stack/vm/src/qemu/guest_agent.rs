//! What the agents in a guest of QEMU are asked: qemu-guest-agent where it has opened its port, else our own in our
//! initramfs.

use std::time::{Duration, Instant};

use serde_json::json;
use tapio_types::ApiError;

use super::qga::{Conversation, Trouble};
use super::qmp::AGENT_PORT;
use super::{DriverVm, has_agent};
use crate::errors::{failed, lacks_feature, quiesce};
use crate::facts::{GuestDisk, GuestFacts};
use crate::place::Phase;

/// How long an agent is waited for that is asked to end its guest.
const END_LIMIT: Duration = Duration::from_secs(2);

impl DriverVm {
    /// Whether the guest has the port of qemu-guest-agent open. VMs of earlier versions have none.
    fn has_port(&self) -> bool {
        if self.phase() != Phase::Running {
            return false;
        }
        let Ok(all) = self.run("query-chardev", json!({})) else { return false };
        let mut all = all.as_array().into_iter().flatten();
        all.any(|one| one["label"] == AGENT_PORT && one["frontend-open"] == true)
    }

    /// Talks to qemu-guest-agent.
    fn talk<T>(
        &self,
        until: Instant,
        about: impl FnOnce(&mut Conversation) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        let Some(_held) = self.own.port.try_lock_until(until) else { return Err(Trouble::Silent) };
        about(&mut Conversation::begin(&self.place.own().join(AGENT_PORT), until)?)
    }

    /// What the guest reports of itself.
    pub(super) fn facts(&self, until: Instant) -> Result<Option<GuestFacts>, ApiError> {
        if self.has_port() {
            let told = |why: Trouble| failed(self.vm, "its guest is not known", why);
            return self.talk(until, Conversation::facts).map(Some).map_err(told);
        }
        if self.phase() != Phase::Running || !has_agent(&self.saved().spec) {
            return Ok(None);
        }
        self.agent.facts(self.vm, until)
    }

    /// Freezes the guest's file systems.
    pub(super) fn freeze(&self, until: Instant) -> Result<(), ApiError> {
        if !self.has_port() {
            return self.own_agent()?.freeze(self.vm, until);
        }
        let frozen = self.talk(until, |agent| agent.ask("guest-fsfreeze-freeze", &json!({})));
        frozen.map(drop).map_err(|why| self.not_quiet(&why))
    }

    /// Thaws them.
    pub(super) fn thaw(&self, until: Instant) -> Result<bool, ApiError> {
        if !self.has_port() {
            return self.own_agent()?.thaw(self.vm, until);
        }
        let thawed = self.talk(until, |agent| {
            let were_frozen = agent.ask("guest-fsfreeze-status", &json!({}))?.as_str() == Some("frozen");
            agent.ask("guest-fsfreeze-thaw", &json!({}))?;
            Ok(were_frozen)
        });
        thawed.map_err(|why| self.not_quiet(&why))
    }

    /// Discards what the guest's file systems do not use.
    pub(super) fn trim(&self, until: Instant) -> Result<Option<u64>, ApiError> {
        if !self.has_port() {
            let why = "no guest agent answers: install qemu-guest-agent in the guest";
            if !has_agent(&self.saved().spec) {
                return Err(lacks_feature(self.vm, why));
            }
            return self.agent.trim(self.vm, until);
        }
        let said = self.talk(until, |agent| agent.ask("guest-fstrim", &json!({})));
        let said = said.map_err(|why| failed(self.vm, "its file systems are not trimmed", why))?;
        let paths = said["paths"].as_array().into_iter().flatten();
        Ok(Some(paths.filter_map(|path| path["trimmed"].as_u64()).fold(0, u64::saturating_add)))
    }

    /// What the guest's disks have counted.
    pub(super) fn guest_disks(&self, until: Instant) -> Result<Vec<GuestDisk>, ApiError> {
        if !self.has_port() {
            if !has_agent(&self.saved().spec) {
                let why = "no guest agent answers: install qemu-guest-agent in the guest";
                return Err(lacks_feature(self.vm, why));
            }
            return self.agent.disks(self.vm, until);
        }
        let said = self.talk(until, |agent| agent.ask("guest-get-diskstats", &json!({})));
        let said = said.map_err(|why| failed(self.vm, "what its disks have counted is not known", why))?;
        Ok(GuestDisk::of_json(&said))
    }

    /// Asks the guest to end, as the button of the VM does for guests that watch it. Nothing is answered.
    pub(super) fn ask_agent_to_end(&self) {
        if self.has_port() {
            let until = Instant::now() + END_LIMIT;
            let _ = self.talk(until, |agent| agent.order("guest-shutdown", &json!({"mode": "powerdown"})));
        }
    }

    fn own_agent(&self) -> Result<&crate::agent::Agent, ApiError> {
        if has_agent(&self.saved().spec) && self.phase() == Phase::Running {
            return Ok(&self.agent);
        }
        let why = "no guest agent answers: install qemu-guest-agent in the guest, and look whether it runs";
        Err(quiesce("NOT_SUPPORTED", self.vm, why))
    }

    fn not_quiet(&self, why: &Trouble) -> ApiError {
        let what = match why {
            Trouble::Silent => "PLUGIN_DEOS_NOT_RESPOND",
            Trouble::Refused(_) => "FAILED",
        };
        quiesce(what, self.vm, why)
    }
}
