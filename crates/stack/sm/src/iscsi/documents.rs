//! What a probe of a target answers while its configuration is not complete, as clients parse it. sm-layout.md
//! section 9.

use uuid::Uuid;

use super::config::Target;
use super::name::{Node, PORT};
use crate::probe::document;
use crate::scsi::{Lun, Tree};

/// The targets at an address; the last entry stands for all of them.
pub(crate) fn targets(target: &Target, found: &[Node]) -> String {
    let entry = |index: usize, address: String, port: u16, name: &str| {
        let mut fields = vec![("Index", index.to_string()), ("IPAddress", address)];
        if port != PORT {
            fields.push(("Port", port.to_string()));
        }
        fields.push(("TargetIQN", name.to_owned()));
        ("TGT", fields)
    };
    let mut items: Vec<_> = found
        .iter()
        .enumerate()
        .map(|(index, node)| entry(index, node.portal.address.to_string(), node.portal.port, &node.name))
        .collect();
    items.push(entry(found.len(), target.given.clone(), target.port, "*"));
    document("iscsi-target-iqns", &items)
}

/// The LUNs of a target.
pub(crate) fn luns(tree: &Tree, luns: &[Lun]) -> String {
    let items: Vec<_> = luns
        .iter()
        .filter_map(|lun| {
            let disk = lun.first()?;
            let mut fields = vec![
                ("vendor", disk.vendor(tree)),
                ("serial", disk.serial(tree)),
                ("LUNid", lun.number().to_string()),
                ("size", disk.size(tree).to_string()),
                ("SCSIid", lun.scsi_id.clone()),
            ];
            fields.retain(|(_, value)| !value.is_empty());
            Some(("LUN", fields))
        })
        .collect();
    document("iscsi-target", &items)
}

/// The SRs of LUNs that use a target.
pub(crate) fn users(target: &Target, users: &[Uuid]) -> String {
    let items: Vec<_> = users
        .iter()
        .map(|uuid| {
            let name = target.name.clone().unwrap_or_else(|| "*".into());
            ("SR", vec![("UUID", uuid.to_string()), ("Target", target.given.clone()), ("TargetIQN", name)])
        })
        .collect();
    document("SRlist", &items)
}
