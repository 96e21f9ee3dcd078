//! The processors of this host: cores, sockets, NUMA nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::Serialize;

/// Numbers of processors.
pub type Cpus = BTreeSet<usize>;

/// A processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cpu {
    pub cpu: usize,
    /// In its socket; processors of one core share it.
    pub core: usize,
    pub socket: usize,
    pub node: usize,
}

/// All processors that are online, by number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Topology(pub Vec<Cpu>);

/// Reads a list as `0-3,8`; `None` for anything else.
pub fn parse_list(text: &str) -> Option<Cpus> {
    let mut cpus = Cpus::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // As many as the kernel can be built for.
        if last < first || last >= 8192 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Writes a list as the kernel and xl take it.
pub fn list(cpus: &Cpus) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => parts.push((cpu, cpu)),
        }
    }
    let text = |(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

impl Topology {
    /// As the kernel has it below `/sys/devices/system`, or another directory like it.
    pub fn read(system: &Path) -> Option<Self> {
        let text = |path: &Path| fs::read_to_string(path).ok();
        let online = parse_list(&text(&system.join("cpu/online"))?)?;
        let mut nodes: BTreeMap<usize, usize> = BTreeMap::new();
        for entry in fs::read_dir(system.join("node")).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(node) = name.to_str().and_then(|name| name.strip_prefix("node")?.parse().ok()) else {
                continue;
            };
            let cpus = text(&entry.path().join("cpulist")).and_then(|list| parse_list(&list));
            nodes.extend(cpus.unwrap_or_default().into_iter().map(|cpu| (cpu, node)));
        }
        let cpu = |cpu: usize| {
            let number = |name: &str| -> Option<usize> {
                text(&system.join(format!("cpu/cpu{cpu}/topology/{name}")))?.trim().parse().ok()
            };
            Cpu {
                cpu,
                core: number("core_id").unwrap_or(cpu),
                socket: number("physical_package_id").unwrap_or(0),
                node: nodes.get(&cpu).copied().unwrap_or(0),
            }
        };
        Some(Self(online.into_iter().map(cpu).collect()))
    }

    /// Of this host.
    pub fn of_host() -> Option<Self> {
        Self::read(Path::new("/sys/devices/system"))
    }

    /// All processors.
    pub fn all(&self) -> Cpus {
        self.0.iter().map(|cpu| cpu.cpu).collect()
    }

    /// The NUMA nodes that have processors.
    pub fn nodes(&self) -> BTreeSet<usize> {
        self.0.iter().map(|cpu| cpu.node).collect()
    }

    /// The processors of a node.
    pub fn of_node(&self, node: usize) -> Cpus {
        self.0.iter().filter(|cpu| cpu.node == node).map(|cpu| cpu.cpu).collect()
    }

    /// The cores of a node, each with its processors, the first ones first.
    pub fn cores(&self, node: usize) -> Vec<Cpus> {
        let mut cores: BTreeMap<(usize, usize), Cpus> = BTreeMap::new();
        for cpu in self.0.iter().filter(|cpu| cpu.node == node) {
            cores.entry((cpu.socket, cpu.core)).or_default().insert(cpu.cpu);
        }
        let mut cores: Vec<Cpus> = cores.into_values().collect();
        cores.sort();
        cores
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// That of the storage guide's example: two sockets, four nodes, six cores each.
    pub fn guide() -> Topology {
        let node = |cpu: usize| [0, 1, 3, 2][cpu / 6];
        Topology((0..24).map(|cpu| Cpu { cpu, core: cpu % 12, socket: cpu / 12, node: node(cpu) }).collect())
    }

    #[test]
    fn lists_are_read_and_written_as_the_kernel_does() {
        for text in ["", "0", "0-3,8", "1,3,5-7"] {
            assert_eq!(list(&parse_list(text).expect(text)), text);
        }
        for bad in ["x", "3-1", "1-", "9999", "-1"] {
            assert_eq!(parse_list(bad), None, "{bad}");
        }
    }

    #[test]
    fn processors_are_read_with_their_siblings() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, text).expect("written");
        };
        write("cpu/online", "0-3\n");
        for (cpu, core, socket) in [(0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 0, 1)] {
            write(&format!("cpu/cpu{cpu}/topology/core_id"), &format!("{core}\n"));
            write(&format!("cpu/cpu{cpu}/topology/physical_package_id"), &format!("{socket}\n"));
        }
        write("node/node0/cpulist", "0-1\n");
        write("node/node1/cpulist", "2-3\n");
        let found = Topology::read(dir.path()).expect("a topology");
        assert_eq!(found.nodes(), BTreeSet::from([0, 1]));
        assert_eq!(found.cores(1), [Cpus::from([2, 3])], "two processors of one core");
        assert_eq!(Topology::read(&dir.path().join("nothing")), None);
        assert_eq!(guide().of_node(2), (18..24).collect());
        assert_eq!(guide().cores(3).len(), 6);
    }
}
