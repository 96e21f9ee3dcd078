//! Host bus adapters, and the disks behind them.

use std::collections::BTreeMap;

use super::disk::Disk;
use super::lun::{Lun, Seen, group};
use super::tree::Tree;
use crate::probe::document;

/// Drivers whose disks are no LUNs of a storage network: disks of the host itself, and what iSCSI has a type of its own
/// for.
const LOCAL: &[&str] = &["ata_", "sata_", "pata_", "ahci", "pdc_adma", "iscsi_tcp", "usb-storage", "uas"];
const HOSTS: &str = "class/scsi_host";

/// An adapter of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Adapter {
    number: u32,
    driver: String,
}

/// Adapters whose driver's name begins with `wanted`, by their numbers; `any` stands for all.
fn adapters(tree: &Tree, wanted: &str) -> BTreeMap<u32, Adapter> {
    let hosts = tree.names(&tree.sys(HOSTS)).into_iter();
    hosts
        .filter_map(|name| {
            let number = name.strip_prefix("host")?.parse().ok()?;
            let driver = tree.text(&tree.sys(HOSTS).join(&name).join("proc_name"))?;
            let is_local = LOCAL.iter().any(|local| driver.starts_with(local));
            let is_wanted = wanted == "any" || driver.starts_with(wanted);
            let is_known = !matches!(driver.as_str(), "" | "<NULL>" | "(null)" | "(NULL)");
            (!is_local && is_wanted && is_known).then_some((number, Adapter { number, driver }))
        })
        .collect()
}

/// What is reached by adapters of a kind.
#[derive(Clone, Debug)]
pub(crate) struct Adapters {
    tree: Tree,
    wanted: String,
}

impl Adapters {
    /// Those whose driver's name begins with `wanted`, `any` for all.
    pub(crate) fn new(tree: Tree, wanted: &str) -> Self {
        Self { tree, wanted: wanted.to_owned() }
    }

    /// Whether there is one.
    pub(crate) fn are_there(&self) -> bool {
        !adapters(&self.tree, &self.wanted).is_empty()
    }

    /// The LUNs behind them, as the kernel knows them now.
    pub(crate) fn luns(&self) -> Vec<Lun> {
        let adapters = adapters(&self.tree, &self.wanted);
        let mut disks = super::disk::all(&self.tree);
        disks.retain(|disk| adapters.contains_key(&disk.address.host));
        group(disks)
    }

    /// The same after the kernel has looked for new ones.
    pub(crate) fn luns_now(&self) -> Vec<Lun> {
        for adapter in adapters(&self.tree, &self.wanted).values() {
            let path = self.tree.sys(HOSTS).join(format!("host{}/scan", adapter.number));
            if let Err(error) = self.tree.write(&path, "- - -") {
                tracing::warn!("{} could not be told to look for LUNs: {error}", path.display());
            }
        }
        let luns = self.luns();
        for disk in luns.iter().flat_map(|lun| &lun.paths) {
            disk.ask_again(&self.tree);
        }
        luns
    }

    /// LUNs that nothing of this host uses, and the adapters, as clients parse them. sm-layout.md section 9.
    pub(crate) fn document(&self) -> String {
        let adapters = adapters(&self.tree, &self.wanted);
        let luns = self.luns_now();
        let free = luns.iter().filter(|lun| !lun.is_in_use(&self.tree));
        let mut items: Vec<(&str, Vec<(&str, String)>)> = free
            .filter_map(|lun| {
                let disk = lun.first()?;
                let driver = adapters.get(&disk.address.host)?.driver.clone();
                Some(("BlockDevice", self.fields(lun, disk, driver)))
            })
            .collect();
        items.extend(adapters.values().map(|adapter| {
            let host = format!("host{}", adapter.number);
            let symbolic = self.tree.sys("class/fc_host").join(&host).join("symbolic_name");
            let manufacturer = self.tree.text(&symbolic).filter(|text| !text.is_empty());
            let fields = vec![
                ("host", host),
                ("name", adapter.driver.clone()),
                ("manufacturer", manufacturer.unwrap_or_else(|| adapter.driver.clone())),
                ("id", adapter.number.to_string()),
            ];
            ("Adapter", fields)
        }));
        document("Devlist", &items)
    }

    fn fields(&self, lun: &Lun, disk: &Disk, driver: String) -> Vec<(&'static str, String)> {
        let mut path = disk.node(&self.tree).display().to_string();
        for other in lun.paths.iter().skip(1) {
            path.push_str(&format!(" [{}]", other.name));
        }
        vec![
            ("path", path),
            ("numpaths", lun.paths.len().to_string()),
            ("SCSIid", lun.scsi_id.clone()),
            ("vendor", disk.vendor(&self.tree)),
            ("serial", disk.serial(&self.tree)),
            ("size", disk.size(&self.tree).to_string()),
            ("adapter", disk.address.host.to_string()),
            ("channel", disk.address.channel.to_string()),
            ("id", disk.address.target.to_string()),
            ("lun", disk.address.lun.to_string()),
            ("hba", driver),
        ]
    }
}
/// The LUN of this identity among all SCSI disks of the host: where it was seen last, else by a look at all of them.
pub(crate) fn find(tree: &Tree, seen: &Seen, scsi_id: &str) -> Option<Lun> {
    if let Some(lun) = seen.find(tree, scsi_id) {
        return Some(lun);
    }
    let luns = group(super::disk::all(tree));
    seen.note(&luns);
    luns.into_iter().find(|lun| lun.scsi_id == scsi_id)
}
