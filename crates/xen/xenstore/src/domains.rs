//! What is known of the domains of a host, read in one transaction however many disks they have.
//!
//! Reading each node by itself, or each device in a transaction of its own, made listings of hosts with many disks
//! slow: a transaction costs more than what is read in it. Here a listing is one transaction and a few rounds of
//! questions: the domains, their devices, and the devices' back ends.

use std::fmt;

use super::{Client, Nodes, Path, XenbusState, XsError};

/// Nodes of a domain.
const DOMAIN: [&str; 10] = [
    "name",
    "vm",
    "memory/target",
    "memory/static-max",
    "console/ring-ref",
    "console/port",
    "console/tty",
    "store/port",
    "control/shutdown",
    "image/device-model-pid",
];

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceKind {
    /// A disk.
    Vbd,
    /// A network interface.
    Vif,
}

impl DeviceKind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Vbd, Self::Vif];

    /// Its directory below `device`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vbd => "vbd",
            Self::Vif => "vif",
        }
    }

    const fn front(self) -> &'static [&'static str] {
        match self {
            Self::Vbd => &[
                "backend",
                "state",
                "virtual-device",
                "device-type",
                "protocol",
                "ring-page-order",
                "ring-ref",
                "event-channel",
                "multi-queue-num-queues",
                "feature-persistent",
            ],
            Self::Vif => &["backend", "state", "handle", "mac", "mtu"],
        }
    }

    const fn back(self) -> &'static [&'static str] {
        match self {
            Self::Vbd => &[
                "state",
                "online",
                "mode",
                "type",
                "dev",
                "params",
                "physical-device-path",
                "sectors",
                "sector-size",
                "info",
                "kthread-pid",
                "hotplug-status",
                "removable",
                "sm-data/vdi-uuid",
            ],
            Self::Vif => &["state", "online", "mac", "bridge", "script", "hotplug-status"],
        }
    }
}

/// Values of nodes by their names below some directory. Guests write some of them: they are shown with care.
pub type Named = Vec<(&'static str, String)>;

/// A device, from both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Disk or network interface.
    pub kind: DeviceKind,
    /// Its number.
    pub devid: u32,
    /// The back end's directory, if the front end names one that can be its own.
    pub backend: Option<String>,
    /// Nodes of the front end.
    pub front: Named,
    /// Nodes of the back end.
    pub back: Named,
}

impl Device {
    fn value<'a>(of: &'a Named, name: &str) -> Option<&'a str> {
        of.iter().find(|(other, _)| *other == name).map(|(_, value)| value.as_str())
    }

    /// A node of the front end.
    pub fn front(&self, name: &str) -> Option<&str> {
        Self::value(&self.front, name)
    }

    /// A node of the back end.
    pub fn back(&self, name: &str) -> Option<&str> {
        Self::value(&self.back, name)
    }

    /// Where the front end stands; `None` if it says nothing that is a state.
    pub fn front_state(&self) -> Option<XenbusState> {
        XenbusState::parse(self.front("state")?.as_bytes())
    }

    /// Where the back end stands.
    pub fn back_state(&self) -> Option<XenbusState> {
        XenbusState::parse(self.back("state")?.as_bytes())
    }

    /// The kind of back end, as `vbd3`.
    pub fn backend_kind(&self) -> Option<&str> {
        self.backend.as_deref()?.split('/').nth(5)
    }
}

/// A domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Its number.
    pub domid: u32,
    /// Its nodes.
    pub nodes: Named,
    /// Its disks and network interfaces, by number.
    pub devices: Vec<Device>,
}

impl Domain {
    /// A node of the domain, as `memory/target` (KiB) or `console/tty`.
    pub fn value(&self, name: &str) -> Option<&str> {
        Device::value(&self.nodes, name)
    }

    /// What it is called.
    pub fn name(&self) -> Option<&str> {
        self.value("name")
    }

    /// The VM's UUID, from its path `/vm/UUID`.
    pub fn uuid(&self) -> Option<&str> {
        self.value("vm")?.strip_prefix("/vm/")
    }

    /// Its devices of a kind.
    pub fn devices(&self, kind: DeviceKind) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter(move |device| device.kind == kind)
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "domain {} ({})", self.domid, name.escape_default()),
            None => write!(f, "domain {}", self.domid),
        }
    }
}

/// All domains, at one moment.
///
/// # Errors
/// xenstored refuses.
pub fn all(client: &mut Client) -> Result<Vec<Domain>, XsError> {
    client.transaction(|t| {
        let names = t.directory("/local/domain")?.unwrap_or_default();
        let mut domids: Vec<u32> = names.iter().filter_map(|name| name.parse().ok()).collect();
        domids.sort_unstable();
        read(t, &domids)
    })
}

/// One domain, at one moment; `None` if it is not there.
///
/// # Errors
/// xenstored refuses.
pub fn one(client: &mut Client, domid: u32) -> Result<Option<Domain>, XsError> {
    let mut found = client.transaction(|t| read(t, &[domid]))?;
    Ok(found.pop().filter(|domain| !domain.nodes.is_empty() || !domain.devices.is_empty()))
}

/// These domains: for a caller that does more in the same transaction.
///
/// # Errors
/// xenstored refuses.
pub fn read<N: Nodes>(nodes: &mut N, domids: &[u32]) -> Result<Vec<Domain>, XsError> {
    let dir = |domid: u32| format!("/local/domain/{domid}");
    let paths = |domid: &u32| DOMAIN.map(|name| format!("{}/{name}", dir(*domid)));
    let mut values = nodes.read_many(&domids.iter().flat_map(paths).collect::<Vec<_>>())?.into_iter();
    let device_dirs =
        |domid: &u32| DeviceKind::ALL.map(|kind| format!("{}/device/{}", dir(*domid), kind.name()));
    let listed = nodes.directory_many(&domids.iter().flat_map(device_dirs).collect::<Vec<_>>())?;
    let mut domains = Vec::with_capacity(domids.len());
    for (domid, lists) in domids.iter().zip(listed.chunks(DeviceKind::ALL.len())) {
        let mut devices = Vec::new();
        for (kind, names) in DeviceKind::ALL.into_iter().zip(lists) {
            let mut devids: Vec<u32> = names.iter().flatten().filter_map(|name| name.parse().ok()).collect();
            devids.sort_unstable();
            devices.extend(devids.into_iter().map(|devid| Device {
                kind,
                devid,
                backend: None,
                front: Vec::new(),
                back: Vec::new(),
            }));
        }
        domains.push(Domain { domid: *domid, nodes: named(&DOMAIN, &mut values), devices });
    }
    read_devices(nodes, &mut domains)?;
    Ok(domains)
}

/// A round for all front ends, and one for all back ends.
fn read_devices<N: Nodes>(nodes: &mut N, domains: &mut [Domain]) -> Result<(), XsError> {
    let mut paths = Vec::new();
    for domain in &*domains {
        for device in &domain.devices {
            let dir =
                format!("/local/domain/{}/device/{}/{}", domain.domid, device.kind.name(), device.devid);
            paths.extend(device.kind.front().iter().map(|name| format!("{dir}/{name}")));
        }
    }
    let mut values = nodes.read_many(&paths)?.into_iter();
    let mut paths = Vec::new();
    for domain in &mut *domains {
        for device in &mut domain.devices {
            device.front = named(device.kind.front(), &mut values);
            device.backend = device
                .front("backend")
                .filter(|path| is_backend_of(path, domain.domid, device.devid))
                .map(str::to_owned);
            if let Some(dir) = &device.backend {
                paths.extend(device.kind.back().iter().map(|name| format!("{dir}/{name}")));
            }
        }
    }
    let mut values = nodes.read_many(&paths)?.into_iter();
    for device in domains.iter_mut().flat_map(|domain| &mut domain.devices) {
        if device.backend.is_some() {
            device.back = named(device.kind.back(), &mut values);
        }
    }
    Ok(())
}

fn named(names: &[&'static str], values: &mut impl Iterator<Item = Option<Vec<u8>>>) -> Named {
    let text = |value: Vec<u8>| String::from_utf8_lossy(&value).into_owned();
    let found = names.iter().zip(values.by_ref().take(names.len()));
    found.filter_map(|(name, value)| Some((*name, text(value?)))).collect()
}

/// A guest may write what it likes into `backend`; what is read for it must be a back end of this very device.
fn is_backend_of(path: &str, domid: u32, devid: u32) -> bool {
    let Ok(path) = Path::parse(path) else { return false };
    let parts: Vec<&str> = path.parts().collect();
    matches!(parts.as_slice(), ["local", "domain", back, "backend", _, front, device]
        if back.parse::<u32>().is_ok() && *front == domid.to_string() && *device == devid.to_string())
}
