//! What is there at the first start: templates, and the VM that stands for this host.

use std::sync::Arc;

use tapio_model::{ApiError, Value};
use tapio_vm::VmSpec;

use super::{Vms, lookup, power, vm};

use crate::basics::{may_be_here, this_host};
use crate::db::Change;

const MIB: i64 = 1 << 20;

struct Template {
    name: &'static str,
    description: &'static str,
    driver: &'static str,
    memory: i64,
    disks: &'static str,
    bios: bool,
    /// Only where its driver can run guests.
    optional: bool,
}

/// A small disk to play with.
const ONE_GIB: &str =
    r#"<provision><disk device="0" size="1073741824" sr="" bootable="false" type="system"/></provision>"#;
/// A disk to install onto.
const EIGHT_GIB: &str =
    r#"<provision><disk device="0" size="8589934592" sr="" bootable="true" type="system"/></provision>"#;

const TEMPLATES: &[Template] = &[
    Template {
        name: "Tapio UML guest",
        description: "User-mode Linux with a shell on its console; runs on any host",
        driver: "uml",
        memory: 128 * MIB,
        disks: ONE_GIB,
        bios: false,
        optional: false,
    },
    Template {
        name: "Tapio QEMU guest",
        description: "A Linux kernel (PV_kernel) in QEMU with a shell on its console",
        driver: "qemu",
        memory: 512 * MIB,
        disks: ONE_GIB,
        bios: false,
        optional: false,
    },
    Template {
        name: "Tapio Xen guest",
        description: "A Linux kernel (PV_kernel) in a domain of Xen with a shell on its console",
        driver: "xen",
        memory: 256 * MIB,
        disks: ONE_GIB,
        bios: false,
        optional: true,
    },
    Template {
        name: "Other install media",
        description: "A VM in QEMU that boots from its disk or CD by its BIOS",
        driver: "qemu",
        memory: 1024 * MIB,
        disks: EIGHT_GIB,
        bios: true,
        optional: false,
    },
    Template {
        name: "Simulated guest",
        description: "No guest at all, for trying out the toolstack and its scale",
        driver: "sim",
        memory: 64 * MIB,
        disks: "",
        bios: false,
        optional: false,
    },
];

/// Makes what is missing.
///
/// # Errors
/// The store's.
pub fn ensure(vms: &Arc<Vms>) -> Result<(), ApiError> {
    let is_possible = |template: &&Template| {
        !template.optional || vms.driver(template.driver).is_some_and(|driver| driver.check().is_ok())
    };
    let possible: Vec<&Template> = TEMPLATES.iter().filter(is_possible).collect();
    vms.db.change(|change| {
        for template in possible {
            let same = change.find("VM", "name_label", template.name);
            if !same.iter().any(|vm| vm.bool("is_default_template")) {
                make(change, template)?;
            }
        }
        Ok(())
    })?;
    control_domain(vms)
}

fn make(change: &mut Change<'_>, template: &Template) -> Result<(), ApiError> {
    let mut config = vec![
        ("driver", template.driver),
        ("default_template", "true"),
        ("install-methods", if template.bios { "cdrom" } else { "" }),
    ];
    config.extend((!template.disks.is_empty()).then_some(("disks", template.disks)));
    let policy = if template.bios { "BIOS order" } else { "" };
    let fields = vec![
        ("name_label", Value::string(template.name)),
        ("name_description", Value::string(template.description)),
        ("is_a_template", Value::Bool(true)),
        ("is_default_template", Value::Bool(true)),
        ("memory_static_min", Value::Int(64 * MIB)),
        ("memory_dynamic_min", Value::Int(template.memory)),
        ("memory_dynamic_max", Value::Int(template.memory)),
        ("memory_static_max", Value::Int(template.memory)),
        ("VCPUs_max", Value::Int(1)),
        ("VCPUs_at_startup", Value::Int(1)),
        ("HVM_boot_policy", Value::string(policy)),
        ("other_config", Value::string_map(config)),
    ];
    vm::create_in(change, fields).map(drop)
}

/// The VM to which disks of this host itself are plugged.
fn control_domain(vms: &Arc<Vms>) -> Result<(), ApiError> {
    let host = this_host(&vms.db);
    let domain = vms.db.change(|change| {
        let found =
            change.all("VM").into_iter().find(|vm| vm.bool("is_control_domain") && may_be_here(&vms.db, vm));
        if let Some(found) = found {
            return Ok(found);
        }
        let name = change.get("host", &host).map(|host| host.text("name_label").to_owned());
        let fields = vec![
            ("name_label", Value::string(format!("Control domain on host: {}", name.unwrap_or_default()))),
            ("name_description", Value::string("The host itself: disks plugged here are its block devices")),
            ("is_control_domain", Value::Bool(true)),
            ("power_state", Value::string("Running")),
            ("resident_on", Value::string(&host)),
            ("domid", Value::Int(0)),
        ];
        let made = vm::create_in(change, fields)?;
        if let Ok(host) = change.get("host", &host)
            && host.is_null("control_domain")
        {
            change.set("host", &host.reference, "control_domain", Value::string(&made))?;
        }
        change.get("VM", &made)
    })?;
    if let Ok(driver) = lookup::driver(vms, &domain) {
        driver.create(&VmSpec { ..power::spec(&domain)? })?;
    }
    Ok(())
}
