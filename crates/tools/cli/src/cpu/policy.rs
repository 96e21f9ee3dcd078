//! Which processors disks and guests get. A function of what is there: nothing is read or changed.
//!
//! * Whole cores are kept for disk processes, and no guest gets them. A host with fewer than four processors has none
//!   to keep: everything runs everywhere.
//! * A guest and the processes of its disks are on one node: that of its mask if it has one, else of its memory, else
//!   of the device of its disks, else the one with most room. A pair is never on two nodes.
//! * A guest's mask (`VCPUs-params:mask`) is obeyed, without the cores of disks as far as something is left.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::topology::{Cpus, Topology};

/// Fewest processors of a host on which some are kept.
const CPUS_MIN: usize = 4;
/// Most that are kept unless told otherwise: the guide's 6 or 8 for its control domain.
const DATA_MAX: usize = 8;

/// A guest that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guest {
    /// UUID of the VM.
    pub vm: String,
    pub vcpus: usize,
    /// `VCPUs-params:mask`.
    pub mask: Option<Cpus>,
    /// Where most of its memory is.
    pub memory_node: Option<usize>,
}

/// A disk process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    pub pid: u32,
    /// UUID of the VM that has its disk; none for a disk of this host.
    pub vm: Option<String>,
    /// Of the block device below its image.
    pub device_node: Option<usize>,
}

/// What is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Processors for disk processes; a quarter of the host, at most 8, unless told.
    pub data: Option<usize>,
    /// Each guest gets processors of its own, as long as there are enough.
    pub exclusive: bool,
}

/// Who runs where.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Kept for disk processes, by node.
    pub data: BTreeMap<usize, Cpus>,
    /// By process.
    pub disks: BTreeMap<u32, Cpus>,
    /// By UUID of the VM.
    pub guests: BTreeMap<String, Cpus>,
    /// What could not be as it should.
    pub notes: Vec<String>,
}

/// The node of each guest.
fn nodes(topology: &Topology, guests: &[Guest], disks: &[Disk]) -> BTreeMap<String, usize> {
    let all = topology.nodes();
    let mut load: BTreeMap<usize, usize> = all.iter().map(|node| (*node, 0)).collect();
    let mut nodes = BTreeMap::new();
    for guest in guests {
        let of_mask = guest.mask.as_ref().and_then(|mask| {
            let common = |node: &usize| topology.of_node(*node).intersection(mask).count();
            all.iter()
                .copied()
                .filter(|node| common(node) > 0)
                .max_by_key(|node| (common(node), usize::MAX - node))
        });
        let of_device = || {
            let own = disks.iter().filter(|disk| disk.vm.as_deref() == Some(&guest.vm));
            own.filter_map(|disk| disk.device_node).next()
        };
        // Vacant processors, most first, then the lower number.
        let roomiest = || {
            let room = |node: &usize| {
                topology.of_node(*node).len() as i64 - load.get(node).copied().unwrap_or(0) as i64
            };
            all.iter().copied().max_by_key(|node| (room(node), std::cmp::Reverse(*node)))
        };
        let known = |node: &usize| all.contains(node);
        let node = of_mask
            .or_else(|| guest.memory_node.filter(known))
            .or_else(|| of_device().filter(known))
            .or_else(roomiest)
            .unwrap_or(0);
        *load.entry(node).or_default() += guest.vcpus.max(1);
        nodes.insert(guest.vm.clone(), node);
    }
    nodes
}

/// Cores for disk processes on these nodes: evenly, at least one on each that leaves another for guests.
fn data(topology: &Topology, wanted: Wanted, on: &BTreeSet<usize>) -> BTreeMap<usize, Cpus> {
    let count = topology.0.len();
    if count < CPUS_MIN || on.is_empty() {
        return BTreeMap::new();
    }
    let total = wanted.data.unwrap_or_else(|| (count / 4).clamp(1, DATA_MAX));
    let each = total.div_ceil(on.len()).max(1);
    let mut kept = BTreeMap::new();
    for node in on {
        let cores = topology.cores(*node);
        let mut cpus = Cpus::new();
        for core in cores.iter().take(cores.len().saturating_sub(1)) {
            if cpus.len() >= each {
                break;
            }
            cpus.extend(core);
        }
        if !cpus.is_empty() {
            kept.insert(*node, cpus);
        }
    }
    kept
}

/// Who is to run where.
pub fn plan(topology: &Topology, guests: &[Guest], disks: &[Disk], wanted: Wanted) -> Plan {
    let nodes = nodes(topology, guests, disks);
    let of_disk = |disk: &Disk| {
        let of_vm = disk.vm.as_ref().and_then(|vm| nodes.get(vm)).copied();
        of_vm.or(disk.device_node.filter(|node| topology.nodes().contains(node)))
    };
    let first = topology.nodes().first().copied().unwrap_or(0);
    let on: BTreeSet<usize> = disks.iter().map(|disk| of_disk(disk).unwrap_or(first)).collect();
    let data = data(topology, wanted, &on);
    let mut plan = Plan { data, ..Plan::default() };
    if plan.data.is_empty() && !disks.is_empty() {
        plan.notes.push("no processor can be kept for disks: all run everywhere on their node".into());
    }
    for disk in disks {
        let node = of_disk(disk).unwrap_or(first);
        let cpus = plan.data.get(&node).cloned().unwrap_or_else(|| topology.of_node(node));
        plan.disks.insert(disk.pid, cpus);
    }
    let kept: Cpus = plan.data.values().flatten().copied().collect();
    let mut taken = Cpus::new();
    for guest in guests {
        let node = nodes.get(&guest.vm).copied().unwrap_or(first);
        let of_node: Cpus = topology.of_node(node).difference(&kept).copied().collect();
        let mut allowed = of_node;
        if let Some(mask) = &guest.mask {
            let within: Cpus = allowed.intersection(mask).copied().collect();
            allowed = if within.is_empty() {
                plan.notes.push(format!("VM {}: its mask leaves it processors of disks alone", guest.vm));
                mask.intersection(&topology.of_node(node)).copied().collect()
            } else {
                within
            };
        }
        if wanted.exclusive {
            let own: Cpus = allowed.difference(&taken).copied().take(guest.vcpus.max(1)).collect();
            if own.len() == guest.vcpus.max(1) {
                allowed = own;
            } else {
                plan.notes.push(format!(
                    "VM {}: node {node} has no {} processors left for it alone",
                    guest.vm, guest.vcpus
                ));
            }
            taken.extend(&allowed);
        }
        plan.guests.insert(guest.vm.clone(), allowed);
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::super::topology::Cpu;
    use super::super::topology::tests::guide;
    use super::*;

    fn guest(vm: &str, vcpus: usize) -> Guest {
        Guest { vm: vm.into(), vcpus, ..Guest::default() }
    }

    fn disk(pid: u32, vm: Option<&str>, device_node: Option<usize>) -> Disk {
        Disk { pid, vm: vm.map(str::to_owned), device_node }
    }

    /// What holds of every plan.
    fn check(topology: &Topology, plan: &Plan, guests: &[Guest], disks: &[Disk]) {
        let node_of = |cpus: &Cpus| -> BTreeSet<usize> {
            topology.0.iter().filter(|cpu| cpus.contains(&cpu.cpu)).map(|cpu| cpu.node).collect()
        };
        let kept: Cpus = plan.data.values().flatten().copied().collect();
        for guest in guests {
            let cpus = &plan.guests[&guest.vm];
            assert_eq!(node_of(cpus).len(), 1, "{guest:?} spans nodes: {cpus:?}");
            if let Some(mask) = &guest.mask {
                assert!(cpus.is_subset(mask), "{cpus:?} of {mask:?}");
            } else {
                assert!(cpus.is_disjoint(&kept), "{guest:?} runs where disks do");
            }
            for disk in disks.iter().filter(|disk| disk.vm.as_deref() == Some(&guest.vm)) {
                assert_eq!(
                    node_of(&plan.disks[&disk.pid]),
                    node_of(cpus),
                    "{disk:?} and its guest are apart"
                );
            }
        }
    }

    #[test]
    fn a_guest_and_its_disks_share_a_node_and_no_processor() {
        let topology = guide();
        let guests = [
            guest("by-device", 2),
            Guest { memory_node: Some(3), ..guest("by-memory", 2) },
            Guest { mask: Some((20..24).collect()), ..guest("by-mask", 2) },
            guest("anywhere", 4),
        ];
        let disks = [
            disk(1, Some("by-device"), Some(1)),
            disk(2, Some("by-memory"), Some(1)),
            disk(3, Some("by-mask"), Some(1)),
            disk(4, Some("anywhere"), None),
            disk(5, None, Some(1)),
        ];
        let plan = plan(&topology, &guests, &disks, Wanted::default());
        check(&topology, &plan, &guests, &disks);
        assert!(plan.guests["by-device"].is_subset(&topology.of_node(1)));
        assert!(plan.guests["by-memory"].is_subset(&topology.of_node(3)));
        assert_eq!(plan.guests["by-mask"], (20..24).collect());
        assert!(plan.guests["anywhere"].is_subset(&topology.of_node(0)), "the node with most room");
        // A quarter of the host is kept, over the nodes that have disks.
        assert_eq!(plan.data.values().map(Cpus::len).sum::<usize>(), 8, "{:?}", plan.data);
        assert_eq!(plan.disks[&5], plan.data[&1], "a disk of this host is at its device");
        assert!(plan.notes.is_empty(), "{:?}", plan.notes);
    }

    #[test]
    fn exclusive_guests_have_processors_of_their_own_while_there_are_some() {
        let topology = guide();
        let guests: Vec<Guest> =
            (0..3).map(|at| Guest { memory_node: Some(0), ..guest(&format!("vm{at}"), 2) }).collect();
        let disks: Vec<Disk> = (0..3).map(|at| disk(at, Some(&format!("vm{at}")), None)).collect();
        let wanted = Wanted { data: Some(2), exclusive: true };
        let plan = plan(&topology, &guests, &disks, wanted);
        check(&topology, &plan, &guests, &disks);
        assert_eq!(plan.data, BTreeMap::from([(0, Cpus::from([0, 1]))]));
        assert_eq!((&plan.guests["vm0"], &plan.guests["vm1"]), (&Cpus::from([2, 3]), &Cpus::from([4, 5])));
        assert_eq!(plan.guests["vm2"], (2..6).collect(), "it shares what the others have");
        assert_eq!(plan.notes.len(), 1, "{:?}", plan.notes);
    }

    #[test]
    fn siblings_stay_together_and_small_hosts_are_left_alone() {
        // Two processors a core.
        let cpu = |cpu: usize| Cpu { cpu, core: cpu / 2, socket: 0, node: 0 };
        let topology = Topology((0..8).map(cpu).collect());
        let plan_of = |topology: &Topology, data| {
            plan(topology, &[guest("a", 2)], &[disk(1, Some("a"), None)], Wanted { data, exclusive: false })
        };
        assert_eq!(plan_of(&topology, None).disks[&1], Cpus::from([0, 1]));
        assert_eq!(plan_of(&topology, Some(3)).disks[&1], Cpus::from([0, 1, 2, 3]), "whole cores");
        assert_eq!(
            plan_of(&topology, Some(99)).guests["a"],
            Cpus::from([6, 7]),
            "one core is left for guests"
        );
        let small = Topology((0..2).map(cpu).collect());
        let plan = plan_of(&small, None);
        assert_eq!((plan.disks[&1].len(), plan.guests["a"].len(), plan.notes.len()), (2, 2, 1));
    }

    #[test]
    fn a_mask_of_disks_processors_alone_is_obeyed_and_told() {
        let topology = guide();
        let guests = [Guest { mask: Some(Cpus::from([0, 6])), memory_node: Some(3), ..guest("a", 2) }];
        let disks = [disk(1, Some("a"), Some(0))];
        let plan = plan(&topology, &guests, &disks, Wanted { data: Some(2), exclusive: false });
        check(&topology, &plan, &guests, &disks);
        assert_eq!(plan.guests["a"], Cpus::from([0]), "a pair is never on two nodes");
        assert!(plan.notes[0].contains("mask"), "{:?}", plan.notes);
    }
}
