//! Which host does a call.

use std::sync::Arc;

use tapio_model::{ApiError, NULL_REF, Type, Value};

use super::{Pool, apart};
use crate::args::{Args, text_in};
use crate::call::Caller;
use crate::db::Object;
use crate::methods::Method;

/// Messages of hosts that any host does.
const OF_ANY_HOST: [&str; 4] = ["host.enable", "host.disable", "host.destroy", "host.list_methods"];

/// Messages that begin with the host that does them.
const BY_FIRST: [&str; 7] = [
    "LVHD.enable_thin_provisioning",
    "SR.create",
    "SR.make",
    "SR.probe",
    "SR.probe_ext",
    "VDI.generate_config",
    "pool.eject",
];

/// Messages whose second parameter is the host that does them.
const BY_SECOND: [&str; 3] = ["VM.start_on", "VM.resume_on", "VM.assert_can_boot_here"];

/// Messages for which the host of a VM of an anti-affinity group is chosen.
const APART: [&str; 2] = ["VM.start", "VM.resume"];

/// Messages in or about sessions of this host, of databases that were opened.
const OF_SESSIONS: [&str; 4] =
    ["VDI.open_database", "VM.recover", "VM.assert_can_be_recovered", "VM.get_SRs_required_for_recovery"];

impl Pool {
    /// The host that has to do a call; none: this one.
    pub(crate) fn host_for(&self, caller: &Caller, method: &Method, args: &Args) -> Option<String> {
        let name = method.name.as_str();
        let first = args.text(0).unwrap_or_default();
        let found = match method.class.name {
            _ if OF_SESSIONS.contains(&name) => None,
            _ if BY_FIRST.contains(&name) => Some(first.to_owned()),
            _ if BY_SECOND.contains(&name) => args.text(1).ok().map(str::to_owned),
            "host" if OF_ANY_HOST.contains(&name) => None,
            "host" => matches!(method.params.first()?.1, Type::Ref("host")).then(|| first.to_owned()),
            // Who decides gives that up itself.
            "pool" if name == "pool.designate_new_master" => {
                self.state.read().coordinator.map(crate::db::reference_of)
            }
            // Only its host knows what it does; the task of a host that is gone is ended here.
            "task" if name == "task.cancel" => {
                self.text_of("task", first, "resident_on").filter(|host| self.is_live(host))
            }
            "PBD" => {
                let is_place = matches!(name, "PBD.plug" | "PBD.unplug" | "PBD.set_device_config");
                is_place.then(|| self.text_of("PBD", first, "host")).flatten()
            }
            "SR" => self.host_of_sr(first),
            "VM" => self.host_of_vm(name, first, caller.is_host()),
            "VBD" => self.host_of_device("VBD", first),
            "VIF" => {
                let is_place = matches!(name, "VIF.plug" | "VIF.move" | "VIF.unplug" | "VIF.unplug_force");
                is_place.then(|| self.host_of_device("VIF", first)).flatten()
            }
            "VDI" => match args.record() {
                Ok(record) => self.host_of_sr(text_in(record, "SR")),
                Err(_) => self.host_of_vdi(first),
            },
            _ => None,
        };
        found.filter(|host| self.is_other(host))
    }

    /// Whether this is the reference of a host of the pool that is not this one.
    pub(super) fn is_other(&self, host: &str) -> bool {
        self.db.own_host().is_some_and(|own| host != own)
            && host != NULL_REF
            && self.db.get("host", host).is_ok()
    }

    fn text_of(&self, class: &str, reference: &str, field: &str) -> Option<String> {
        self.db.get(class, reference).ok().map(|object| object.text(field).to_owned())
    }

    /// A host that has an SR attached: this one if it has.
    pub(super) fn host_of_sr(&self, sr: &str) -> Option<String> {
        let own = self.db.own_host()?;
        let pbds = self.db.find("PBD", "SR", sr);
        let attached = || pbds.iter().filter(|pbd| pbd.bool("currently_attached"));
        if attached().any(|pbd| pbd.text("host") == own) {
            return None;
        }
        let live = attached().find(|pbd| self.is_live(pbd.text("host")));
        live.or_else(|| pbds.iter().find(|pbd| pbd.text("host") != own))
            .map(|pbd| pbd.text("host").to_owned())
    }

    pub(super) fn host_of_vdi(&self, vdi: &str) -> Option<String> {
        let vbds = self.db.find("VBD", "VDI", vdi);
        let plugged = vbds.iter().find(|vbd| vbd.bool("currently_attached"));
        let runs = plugged.and_then(|vbd| self.text_of("VM", vbd.text("VM"), "resident_on"));
        match runs.filter(|host| host != NULL_REF && !host.is_empty()) {
            Some(host) => Some(host),
            None => self.host_of_sr(&self.text_of("VDI", vdi, "SR")?),
        }
    }

    /// The host that runs the VM of a VBD or a VIF.
    fn host_of_device(&self, class: &str, device: &str) -> Option<String> {
        self.text_of("VM", &self.text_of(class, device, "VM")?, "resident_on")
    }

    /// The VDIs that a VM needs where it runs, its memory while it is suspended among them.
    fn disks_of(&self, vm: &str) -> Vec<Arc<Object>> {
        let vbds = self.db.find("VBD", "VM", vm);
        let disks = vbds.iter().filter(|vbd| !vbd.bool("empty")).map(|vbd| vbd.text("VDI").to_owned());
        let memory = self.text_of("VM", vm, "suspend_VDI");
        disks.chain(memory).filter_map(|vdi| self.db.get("VDI", &vdi).ok()).collect()
    }

    /// Whether a host has the SRs of all these VDIs attached.
    fn reaches(&self, host: &str, disks: &[Arc<Object>]) -> bool {
        disks.iter().all(|vdi| {
            let pbds = self.db.find("PBD", "SR", vdi.text("SR"));
            pbds.iter().any(|pbd| pbd.text("host") == host && pbd.bool("currently_attached"))
        })
    }

    /// The hosts that live, are enabled, and have the SRs of all disks of a VM attached.
    pub(crate) fn hosts_that_reach(&self, vm: &str) -> Vec<String> {
        let disks = self.disks_of(vm);
        let hosts = self.db.all("host").into_iter().filter(|host| host.bool("enabled"));
        let good =
            |host: &Arc<Object>| self.is_live(&host.reference) && self.reaches(&host.reference, &disks);
        hosts.filter(good).map(|host| host.reference.clone()).collect()
    }

    /// Starts a VM on another host, and waits until that is known here.
    ///
    /// # Errors
    /// Those of `VM.start_on`; `CANNOT_CONTACT_HOST`.
    pub(crate) fn start_on(&self, host: &str, vm: &str) -> Result<(), ApiError> {
        let params = vec![vm.into(), host.into(), Value::Bool(false), Value::Bool(false)];
        let answer = self.visit(host)?.call("VM.start_on", params);
        self.catch_up();
        answer.map(drop)
    }

    /// Where a VM runs; for one that does not, where its disks are, and of several such hosts this one, or the one that
    /// the VM wants. One of an anti-affinity group starts apart from the others; `is_sent` says that another host
    /// decided that already.
    pub(super) fn host_of_vm(&self, name: &str, vm: &str, is_sent: bool) -> Option<String> {
        let record = self.db.get("VM", vm).ok()?;
        if !record.is_null("resident_on") {
            let resident = record.text("resident_on");
            // An administrator knows that its host is gone.
            let is_gone = name == "VM.power_state_reset" && !self.is_live(resident);
            return (!is_gone).then(|| resident.to_owned());
        }
        if name == "VM.get_possible_hosts" {
            return None;
        }
        let own = self.db.own_host()?;
        let usual = self.usual_host(&record, own);
        if !APART.contains(&name) || !apart::has_group(&self.db, &record) {
            return usual;
        }
        if is_sent && self.hosts_that_reach(vm).iter().any(|host| host == own) {
            return None;
        }
        self.start_apart(&record, usual.as_deref().unwrap_or(own)).or(usual)
    }

    /// Where a VM without a host is worked on; none: here.
    fn usual_host(&self, record: &Object, own: &str) -> Option<String> {
        let disks = self.disks_of(&record.reference);
        let reaches = |host: &str| self.reaches(host, &disks);
        let wanted = record.text("affinity");
        let is_good = |host: &str| self.is_live(host) && reaches(host);
        if wanted != own
            && is_good(wanted)
            && self.db.get("host", wanted).is_ok_and(|host| host.bool("enabled"))
        {
            return Some(wanted.to_owned());
        }
        if reaches(own) {
            return None;
        }
        self.db.all("host").iter().find(|host| is_good(&host.reference)).map(|host| host.reference.clone())
    }
}
