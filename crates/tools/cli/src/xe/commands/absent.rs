//! Commands of XenServer's `xe` that are not here, with the reason and the next step.

use std::collections::BTreeSet;

use super::{all, find};
use crate::xe::generic::VERBS;
use tapio_model::columns::TABLES;

/// Commands that are absent for one reason.
struct Absent {
    /// What they are about.
    topic: &'static str,
    /// Why they are not here.
    reason: &'static str,
    /// What to do instead.
    next: &'static str,
    /// The commands.
    names: &'static [&'static str],
}

static ABSENT: &[Absent] = &[
    Absent {
        topic: "Hosts that died",
        reason: "hosts of a pool are known to be dead by their leases, and the others elect the one that decides",
        next: "nothing needs to be told; host-forget forgets one that does not come back and had no VMs",
        names: &["host-declare-dead", "pool-emergency-reset-master"],
    },
    Absent {
        topic: "Networks",
        reason: "Tapio sets up no networks, and guests of QEMU are connected to bridges that the host has",
        next: "use the host's own tools for networks, such as ip and nmcli",
        names: &[
            "bond-create",
            "bond-destroy",
            "bond-set-mode",
            "diagnostic-net-stats",
            "host-emergency-management-reconfigure",
            "host-management-disable",
            "host-management-reconfigure",
            "host-signal-networking-change",
            "network-attach",
            "network-sriov-create",
            "network-sriov-destroy",
            "pif-db-forget",
            "pif-forget",
            "pif-introduce",
            "pif-plug",
            "pif-reconfigure-ip",
            "pif-reconfigure-ipv6",
            "pif-scan",
            "pif-set-primary-address-type",
            "pif-unplug",
            "pool-management-reconfigure",
            "pool-set-vswitch-controller",
            "pool-vlan-create",
            "sdn-controller-forget",
            "sdn-controller-introduce",
            "tunnel-create",
            "tunnel-destroy",
            "vif-configure-ipv4",
            "vif-configure-ipv6",
            "vlan-create",
            "vlan-destroy",
        ],
    },
    Absent {
        topic: "Accounts and directories",
        reason: "accounts are files of the host, or its PAM; there is no directory service",
        next: "use 'tapiod user add NAME --role ROLE' on the host",
        names: &[
            "host-disable-external-auth",
            "host-enable-external-auth",
            "host-external-auth-set-ldaps",
            "pool-disable-client-certificate-auth",
            "pool-disable-external-auth",
            "pool-enable-client-certificate-auth",
            "pool-enable-external-auth",
            "pool-external-auth-set-ldaps",
            "subject-add",
            "subject-remove",
            "subject-role-add",
            "subject-role-remove",
        ],
    },
    Absent {
        topic: "Certificates of others",
        reason: "hosts of a pool know each other by their certificates, which its database has, and tapiod trusts no others",
        next: "use host-server-certificate-install for the certificate that a host shows",
        names: &[
            "host-emergency-disable-tls-verification",
            "host-emergency-reenable-tls-verification",
            "pool-certificate-install",
            "pool-certificate-list",
            "pool-certificate-sync",
            "pool-certificate-uninstall",
            "pool-crl-install",
            "pool-crl-list",
            "pool-crl-uninstall",
            "pool-disable-ssl-legacy",
            "pool-enable-tls-verification",
            "pool-install-ca-certificate",
            "pool-install-trusted-certificate",
            "pool-secret-rotate",
            "pool-uninstall-ca-certificate",
            "pool-uninstall-trusted-certificate",
        ],
    },
    Absent {
        topic: "Updates and drivers of the host",
        reason: "the host's package manager updates Tapio and the host",
        next: "use it, such as apt",
        names: &[
            "host-apply-updates",
            "host-emergency-clear-mandatory-guidance",
            "host-refresh-pack-info",
            "hostdriver-deselect",
            "hostdriver-rescan",
            "hostdriver-select",
            "hostdriver-variant-select",
            "patch-apply",
            "patch-clean",
            "patch-destroy",
            "patch-pool-apply",
            "patch-pool-clean",
            "patch-precheck",
            "patch-upload",
            "pool-configure-repository-proxy",
            "pool-configure-update-sync",
            "pool-disable-repository-proxy",
            "pool-set-update-sync-enabled",
            "pool-sync-bundle",
            "pool-sync-updates",
            "repository-forget",
            "repository-introduce",
            "repository-introduce-bundle",
            "repository-introduce-remote-pool",
            "repository-set-gpgkey-path",
            "update-apply",
            "update-destroy",
            "update-introduce",
            "update-pool-apply",
            "update-pool-clean",
            "update-precheck",
            "update-resync-host",
            "update-upload",
        ],
    },
    Absent {
        topic: "Licences",
        reason: "Tapio has no licences and one edition",
        next: "nothing needs to be done",
        names: &[
            "diagnostic-license-status",
            "host-all-editions",
            "host-apply-edition",
            "host-license-add",
            "host-license-remove",
            "host-license-view",
            "pool-apply-edition",
        ],
    },
    Absent {
        topic: "The host itself",
        reason: "tapiod does not control the host it runs on",
        next: "log in to the host and use its own tools, such as systemctl and journalctl",
        names: &[
            "audit-log-get",
            "host-crashdump-destroy",
            "host-crashdump-upload",
            "host-disable-display",
            "host-disable-ssh",
            "host-enable-display",
            "host-enable-ssh",
            "host-logs-download",
            "host-notify",
            "host-power-on",
            "host-prepare-for-poweroff",
            "host-send-debug-keys",
            "host-set-hostname-live",
            "host-set-power-on-mode",
            "host-shutdown-agent",
            "host-sync-data",
            "host-syslog-reconfigure",
            "host-update-firewalld-service-status",
            "pool-disable-ssh",
            "pool-enable-ssh",
        ],
    },
    Absent {
        topic: "The database",
        reason: "the database is in tapiod's state directory, or in etcd, and no log of its changes is kept on an SR",
        next: "let an SR have a copy of it with sr-enable-database-replication, or write it to a file with \
               pool-dump-database",
        names: &["pool-disable-redo-log", "pool-enable-redo-log"],
    },
    Absent {
        topic: "Clusters, recovery of sites",
        reason: "hosts of a pool know of each other by its database and their leases of shared SRs",
        next: "use pool-ha-enable for VMs of hosts that die, and sr-enable-database-replication with vm-recover for a site",
        names: &[
            "cluster-create",
            "cluster-destroy",
            "cluster-host-create",
            "cluster-host-destroy",
            "cluster-host-disable",
            "cluster-host-enable",
            "cluster-host-force-destroy",
            "cluster-pool-create",
            "cluster-pool-destroy",
            "cluster-pool-force-destroy",
            "cluster-pool-resync",
            "drtask-create",
            "drtask-destroy",
            "host-emergency-ha-disable",
            "host-ha-xapi-healthcheck",
        ],
    },
    Absent {
        topic: "Balancing of load",
        reason: "there is no service that places VMs by load",
        next: "use vm-start with on=HOST",
        names: &[
            "host-retrieve-wlb-evacuate-recommendations",
            "pool-deconfigure-wlb",
            "pool-initialize-wlb",
            "pool-retrieve-wlb-configuration",
            "pool-retrieve-wlb-diagnostics",
            "pool-retrieve-wlb-recommendations",
            "pool-retrieve-wlb-report",
            "pool-send-wlb-configuration",
            "vm-retrieve-wlb-recommendations",
        ],
    },
    Absent {
        topic: "Devices of the host in guests",
        reason: "guests get disks and network interfaces, and no devices of the host",
        next: "attach the storage of a device as an SR",
        names: &[
            "gpu-group-create",
            "gpu-group-destroy",
            "gpu-group-get-remaining-capacity",
            "pci-disable-dom0-access",
            "pci-enable-dom0-access",
            "pci-get-dom0-access-status",
            "pgpu-disable-dom0-access",
            "pgpu-enable-dom0-access",
            "pusb-scan",
            "vgpu-create",
            "vgpu-destroy",
            "vtpm-create",
            "vtpm-destroy",
            "vusb-create",
            "vusb-destroy",
            "vusb-unplug",
        ],
    },
    Absent {
        topic: "Firmware of guests",
        reason: "the firmware of guests checks no signatures: secure boot needs a machine type that has no bridges for 255 disks",
        next: "use HVM-boot-params:firmware=uefi without secure boot",
        names: &[
            "pool-get-guest-secureboot-readiness",
            "vm-get-secureboot-readiness",
            "vm-set-uefi-mode",
            "vm-update-secureboot-certificates-on-boot",
        ],
    },
    Absent {
        topic: "Programs in guests and plugins",
        reason: "Tapio calls no programs inside guests",
        next: "log in to the guest",
        names: &["vm-call-host-plugin", "vm-query-services", "vm-sysprep"],
    },
    Absent {
        topic: "Provisioning over the network, caches",
        reason: "disks are read from their SR alone",
        next: "put an SR on a fast local disk",
        names: &[
            "host-disable-local-storage-caching",
            "host-enable-local-storage-caching",
            "pool-disable-local-storage-caching",
            "pool-enable-local-storage-caching",
            "pvs-cache-storage-create",
            "pvs-cache-storage-destroy",
            "pvs-proxy-create",
            "pvs-proxy-destroy",
            "pvs-server-forget",
            "pvs-server-introduce",
            "pvs-site-forget",
            "pvs-site-introduce",
        ],
    },
    Absent {
        topic: "Locks and internals of XenServer's storage",
        reason: "disks are held by their processes, and tapiod frees what a process that died held",
        next: "see 'tapio disk list' and diagnostic-vdi-status",
        names: &["host-get-thread-diagnostics"],
    },
    Absent {
        topic: "Internals of XenServer's daemon",
        reason: "the daemon shows its figures in another way",
        next: "read GET /metrics, and 'tapio timeline' for the steps of a task",
        names: &[
            "caller-create",
            "caller-destroy",
            "caller-list-usage",
            "caller-query-usage",
            "diagnostic-compact",
            "diagnostic-db-stats",
            "diagnostic-gc-stats",
            "diagnostic-timing-stats",
            "observer-create",
            "observer-destroy",
            "rate-limit-add-caller",
            "rate-limit-create",
            "rate-limit-destroy",
            "rate-limit-remove-caller",
        ],
    },
    Absent {
        topic: "Reports to a vendor",
        reason: "Tapio sends nothing to a vendor",
        next: "write an archive with host-get-system-status or 'tapio bugreport', look into it, and send it yourself",
        names: &[
            "host-bugreport-upload",
            "host-get-system-status-capabilities",
            "pool-reset-telemetry-uuid",
            "pool-send-test-post",
        ],
    },
    Absent {
        topic: "Blobs",
        reason: "Tapio keeps no files for clients",
        next: "keep small texts in other-config",
        names: &[
            "blob-create",
            "blob-get",
            "blob-put",
            "pool-disable-binary-storage",
            "pool-enable-binary-storage",
        ],
    },
];

/// Why a command of XenServer's is not here, and what to do instead; none for a name that XenServer does not know.
pub fn why_absent(name: &str) -> Option<String> {
    let group = ABSENT.iter().find(|group| group.names.contains(&name))?;
    Some(format!("there is no {name}: {}; {}", group.reason, group.next))
}

/// All commands that are here and all of XenServer's that are not, as Markdown.
pub fn catalogue() -> String {
    let mut text = String::from(
        "# Commands of `xe`\n\nMade by `xe help --markdown=true > docs/xe.md`. `xe help COMMAND` says what a command takes.\n\n\
         ## Present\n\n| command | what it does |\n|---|---|\n",
    );
    let mut commands: Vec<_> = all().collect();
    commands.sort_by_key(|command| command.name);
    for command in commands {
        text.push_str(&format!("| `{}` | {} |\n", command.name, command.about.replace('|', "\\|")));
    }
    let tables: BTreeSet<&str> = TABLES.iter().map(|table| table.name).collect();
    let tables: Vec<String> = tables.into_iter().map(|name| format!("`{name}`")).collect();
    text.push_str(&format!(
        "\nFor each NAME of {}:\n\n| command | what it does |\n|---|---|\n",
        tables.join(", ")
    ));
    for made in VERBS {
        text.push_str(&format!("| `NAME{}` | {} |\n", made.ending, made.about));
    }
    text.push_str("\n## Absent\n\n| about | of XenServer's | reason | next step |\n|---|---|---|---|\n");
    for group in ABSENT {
        let names = group.names.iter().filter(|name| find(name).is_none());
        let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
        if !names.is_empty() {
            let row = [group.topic, &names.join(", "), group.reason, group.next].join(" | ");
            text.push_str(&format!("| {row} |\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The commands of XenServer's `xe`, beside those that every table has.
    const XENSERVER: &str = include_str!("xenserver.txt");

    #[test]
    fn every_command_of_xenserver_is_here_or_has_a_reason() {
        let names: Vec<&str> = XENSERVER.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(names.len() > 370, "{}", names.len());
        for name in &names {
            assert!(find(name).is_some() || why_absent(name).is_some(), "{name} is neither here nor absent");
        }
        let mut seen = BTreeSet::new();
        for group in ABSENT {
            for name in group.names {
                assert!(names.contains(name), "{name} is no command of XenServer's");
                assert!(seen.insert(name), "{name} is absent twice");
                assert!(find(name).is_none(), "{name} is here and absent");
            }
        }
        let said = why_absent("host-power-on").expect("absent");
        assert!(
            said.contains("no host-power-on: tapiod does not control") && said.contains("; log in"),
            "{said}"
        );
        assert_eq!(why_absent("vdi-create"), None);
    }

    #[test]
    fn the_catalogue_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/xe.md");
        let there = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            there == catalogue(),
            "docs/xe.md differs from the commands: xe help --markdown=true > docs/xe.md"
        );
    }
}
