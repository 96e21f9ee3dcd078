//! What an agent in a guest reports, and how its answers are read.
//!
//! The guest may be hostile: an answer is any bytes. What is read of it is bounded in number and length, holds no
//! control characters, and is never a name of anything on the host. The protocol of qemu-guest-agent is described in
//! QEMU's `qga/qapi-schema.json`; the lines of our own agent in `guest/agent/serve.rs`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use serde_json::Value;

/// Longest answer of an agent, in bytes: some hundred file systems with the disks below each.
pub const ANSWER_LEN_MAX: usize = 1 << 20;

/// Longest text that is kept of an answer, in characters.
const TEXT_LEN_MAX: usize = 256;
/// Interfaces, addresses of each, and file systems that are kept.
const INTERFACES_MAX: usize = 32;
const ADDRESSES_MAX: usize = 16;
const FILE_SYSTEMS_MAX: usize = 64;
/// Disks and partitions that are looked at.
pub(crate) const DISKS_MAX: usize = 512;
/// Words of our own agent's answer that are looked at.
const WORDS_MAX: usize = 128;

/// A network interface of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// As the guest calls it.
    pub name: String,
    /// In small letters, `02:00:00:00:00:01`; empty if the guest does not say.
    pub mac: String,
    /// Without loopback and link-local ones.
    pub addresses: Vec<IpAddr>,
}

/// A file system of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSystem {
    /// As the guest calls it: `vda1`.
    pub name: String,
    /// Where it is mounted.
    pub mounted: String,
    /// `ext4`
    pub kind: String,
    /// Bytes in all and bytes used; none if the guest does not say.
    pub bytes: Option<(u64, u64)>,
}

/// What a disk has counted in its guest, as the guest's kernel has it in `/sys/block/NAME/stat`. Sectors have 512
/// bytes; what a kernel or an agent does not report is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct GuestDisk {
    /// As the guest calls it: `vda`.
    pub name: String,
    /// Requests that ended.
    pub reads: u64,
    /// Requests that were merged with others before.
    pub reads_merged: u64,
    /// Sectors read.
    pub read_sectors: u64,
    /// Time that reads took together, in milliseconds.
    pub read_ms: u64,
    /// The same of writes.
    pub writes: u64,
    /// See `reads_merged`.
    pub writes_merged: u64,
    /// See `read_sectors`.
    pub write_sectors: u64,
    /// See `read_ms`.
    pub write_ms: u64,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Time during which there was one in flight, in milliseconds.
    pub busy_ms: u64,
    /// The same times their number: the average queue is its growth over time.
    pub weighted_ms: u64,
    /// Flushes.
    pub flushes: u64,
    /// Time that they took together, in milliseconds.
    pub flush_ms: u64,
}

impl GuestDisk {
    /// In the order of the kernel's file.
    fn of(name: &str, numbers: &[u64]) -> Self {
        let number = |at: usize| numbers.get(at).copied().unwrap_or(0);
        Self {
            name: plain(name),
            reads: number(0),
            reads_merged: number(1),
            read_sectors: number(2),
            read_ms: number(3),
            writes: number(4),
            writes_merged: number(5),
            write_sectors: number(6),
            write_ms: number(7),
            in_flight: number(8),
            busy_ms: number(9),
            weighted_ms: number(10),
            flushes: number(15),
            flush_ms: number(16),
        }
    }

    /// Reads the answer of our own agent to `disks`.
    pub fn of_words(answer: &str) -> Vec<Self> {
        let of = |word: &str| {
            let (name, numbers) = word.split_once(',')?;
            let numbers: Vec<u64> = numbers.split(',').take(32).map_while(|one| one.parse().ok()).collect();
            (!numbers.is_empty()).then(|| Self::of(name, &numbers))
        };
        answer.split_ascii_whitespace().take(WORDS_MAX).filter_map(of).collect()
    }

    /// Reads qemu-guest-agent's answer to `guest-get-diskstats`; partitions are left out where a disk is named.
    pub fn of_json(said: &Value) -> Vec<Self> {
        let of = |disk: &Value| {
            let name = disk.get("name")?.as_str()?;
            let number =
                |key: &str| disk.get("stats").and_then(|stats| stats.get(key)?.as_u64()).unwrap_or(0);
            Some(Self {
                name: plain(name),
                reads: number("read-ios"),
                reads_merged: number("read-merges"),
                read_sectors: number("read-sectors"),
                read_ms: number("read-ticks"),
                writes: number("write-ios"),
                writes_merged: number("write-merges"),
                write_sectors: number("write-sectors"),
                write_ms: number("write-ticks"),
                in_flight: number("ios-pgr"),
                busy_ms: number("total-ticks"),
                weighted_ms: number("weight-ticks"),
                flushes: number("flush-ios"),
                flush_ms: number("flush-ticks"),
            })
        };
        said.as_array().into_iter().flatten().take(DISKS_MAX).filter_map(of).collect()
    }
}

/// What a guest reports of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestFacts {
    /// The agent: `qemu-guest-agent` or `tapio`.
    pub agent: String,
    /// Its version.
    pub version: String,
    /// The operating system for people: `Debian GNU/Linux 12 (bookworm)`.
    pub os: String,
    /// Its short name: `debian`.
    pub distro: String,
    /// Its version: `12`.
    pub os_version: String,
    /// The kernel's version.
    pub kernel: String,
    /// The guest's name in the network.
    pub host_name: String,
    /// KiB of memory, in all and available; 0 is unknown.
    pub memory: (u64, u64),
    /// Its network interfaces.
    pub interfaces: Vec<Interface>,
    /// Its file systems on disks.
    pub file_systems: Vec<FileSystem>,
    /// Whether the agent can freeze file systems.
    pub can_freeze: bool,
    /// Whether the agent can discard what file systems do not use.
    pub can_trim: bool,
}

/// Text of a guest as it may be kept and shown.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(TEXT_LEN_MAX).collect()
}

fn text(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).map(plain).unwrap_or_default()
}

fn is_told(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !(v4.is_loopback() || v4.is_link_local() || v4.is_unspecified()),
        IpAddr::V6(v6) => !(v6.is_loopback() || v6.is_unspecified() || v6.segments()[0] & 0xffc0 == 0xfe80),
    }
}

/// One line of qemu-guest-agent.
///
/// # Errors
/// A sentence: the agent's words of an error, or that it is no answer.
pub fn answer(line: &[u8]) -> Result<Value, String> {
    if line.len() > ANSWER_LEN_MAX {
        return Err(format!("the guest agent's answer is longer than {ANSWER_LEN_MAX} bytes"));
    }
    let mut said: Value =
        serde_json::from_slice(line).map_err(|_| "the guest agent's answer is no JSON".to_owned())?;
    if let Some(error) = said.get("error") {
        return Err(format!("the guest agent refuses: {}", text(error, "desc")));
    }
    said.get_mut("return").map(Value::take).ok_or_else(|| "the guest agent's answer has no result".to_owned())
}

impl GuestFacts {
    /// Reads `guest-info`.
    pub fn read_info(&mut self, info: &Value) {
        self.agent = "qemu-guest-agent".to_owned();
        self.version = text(info, "version");
        let commands = info.get("supported_commands").and_then(Value::as_array);
        let can = |name: &str| {
            commands.into_iter().flatten().any(|command| {
                command.get("name").and_then(Value::as_str) == Some(name)
                    && command.get("enabled").and_then(Value::as_bool) == Some(true)
            })
        };
        self.can_freeze = can("guest-fsfreeze-freeze") && can("guest-fsfreeze-thaw");
        self.can_trim = can("guest-fstrim");
    }

    /// Reads `guest-get-osinfo`.
    pub fn read_os(&mut self, os: &Value) {
        self.os = text(os, "pretty-name");
        self.distro = text(os, "id");
        self.os_version = text(os, "version-id");
        self.kernel = text(os, "kernel-release");
    }

    /// Reads `guest-get-host-name`.
    pub fn read_host_name(&mut self, name: &Value) {
        self.host_name = text(name, "host-name");
    }

    /// Reads `guest-network-get-interfaces`.
    pub fn read_interfaces(&mut self, interfaces: &Value) {
        self.interfaces.clear();
        for found in interfaces.as_array().into_iter().flatten().take(INTERFACES_MAX) {
            let mac = text(found, "hardware-address").to_ascii_lowercase();
            let told = found.get("ip-addresses").and_then(Value::as_array).into_iter().flatten();
            let told = told.filter_map(|one| one.get("ip-address")?.as_str()?.parse().ok());
            let addresses: Vec<IpAddr> = told.filter(|one| is_told(*one)).take(ADDRESSES_MAX).collect();
            let name = text(found, "name");
            if name != "lo" || !addresses.is_empty() {
                self.interfaces.push(Interface { name, mac, addresses });
            }
        }
    }

    /// Reads `guest-get-fsinfo`.
    pub fn read_file_systems(&mut self, all: &Value) {
        self.file_systems.clear();
        for found in all.as_array().into_iter().flatten().take(FILE_SYSTEMS_MAX) {
            let number = |key: &str| found.get(key).and_then(Value::as_u64);
            self.file_systems.push(FileSystem {
                name: text(found, "name"),
                mounted: text(found, "mountpoint"),
                kind: text(found, "type"),
                bytes: number("total-bytes").zip(number("used-bytes")),
            });
        }
    }

    /// Reads `guest-get-memory-blocks` and the size of one: blocks that are online, in bytes of each.
    pub fn read_memory(&mut self, blocks: &Value, info: &Value) {
        let online = blocks.as_array().into_iter().flatten();
        let online =
            online.filter(|block| block.get("online").and_then(Value::as_bool) == Some(true)).count();
        let size = info.get("size").and_then(Value::as_u64).unwrap_or(0);
        self.memory = ((online as u64).saturating_mul(size) >> 10, 0);
    }

    /// Reads the answer of our own agent to `facts`: words `KEY=VALUE`, of which `ip` and `fs` may be several.
    pub fn of_words(answer: &str) -> Self {
        let mut facts = Self { agent: "tapio".into(), can_freeze: true, can_trim: true, ..Self::default() };
        let mut lan = Interface { name: "eth0".into(), ..Interface::default() };
        for word in answer.split_ascii_whitespace().take(WORDS_MAX) {
            let Some((key, value)) = word.split_once('=') else { continue };
            let number = || value.parse().unwrap_or(0);
            match key {
                "version" => facts.version = plain(value),
                "os" => facts.os = plain(&value.replace("%20", " ")),
                "distro" => facts.distro = plain(value),
                "release" => facts.os_version = plain(value),
                "kernel" => facts.kernel = plain(value),
                "name" => facts.host_name = plain(value),
                "total" => facts.memory.0 = number(),
                "free" => facts.memory.1 = number(),
                "ip" if lan.addresses.len() < ADDRESSES_MAX => {
                    let address = value.parse::<Ipv4Addr>().ok().map(IpAddr::from);
                    let address = address.filter(|one| is_told(*one) && !lan.addresses.contains(one));
                    lan.addresses.extend(address);
                }
                "fs" if facts.file_systems.len() < FILE_SYSTEMS_MAX => {
                    let mut parts = value.splitn(3, ',').map(plain);
                    let mut next = || parts.next().unwrap_or_default();
                    let (name, kind, mounted) = (next(), next(), next());
                    facts.file_systems.push(FileSystem { name, mounted, kind, bytes: None });
                }
                _ => {}
            }
        }
        if !lan.addresses.is_empty() {
            facts.interfaces.push(lan);
        }
        facts
    }

    /// `VM_guest_metrics.networks`: `0/ip`, `0/ipv4/0`, `0/ipv6/0` ... by the number of the interface. `devices` gives
    /// the number of an address of hardware; other interfaces get numbers that are free, in the guest's order.
    pub fn networks(&self, devices: &BTreeMap<String, u32>) -> BTreeMap<String, String> {
        let mut networks = BTreeMap::new();
        let mut free = (0..).filter(|number| !devices.values().any(|taken| taken == number));
        for interface in &self.interfaces {
            let known = devices.get(&interface.mac).copied();
            if interface.addresses.is_empty() {
                continue;
            }
            let Some(number) = known.or_else(|| free.next()) else { continue };
            let of = |want_v4: bool| interface.addresses.iter().filter(move |one| one.is_ipv4() == want_v4);
            for (at, address) in of(true).enumerate() {
                networks.insert(format!("{number}/ipv4/{at}"), address.to_string());
            }
            for (at, address) in of(false).enumerate() {
                networks.insert(format!("{number}/ipv6/{at}"), address.to_string());
            }
            if let Some(first) = of(true).next() {
                networks.insert(format!("{number}/ip"), first.to_string());
            }
        }
        networks
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn disks_are_read_from_words_and_from_json() {
        let words = " vda,5,1,40,9,2,0,16,4,1,7,13,0,0,0,0,3,2 vdb,1,2 nonsense vdc,x";
        let disks = GuestDisk::of_words(words);
        assert_eq!(disks.len(), 2, "{disks:?}");
        let vda = &disks[0];
        assert_eq!((vda.reads, vda.read_sectors, vda.read_ms, vda.writes), (5, 40, 9, 2));
        assert_eq!((vda.in_flight, vda.busy_ms, vda.weighted_ms), (1, 7, 13));
        assert_eq!((vda.flushes, vda.flush_ms), (3, 2));
        assert_eq!((disks[1].reads_merged, disks[1].weighted_ms), (2, 0), "an old kernel has fewer");
        let said = json!([{"name": "vda", "major": 254, "minor": 0, "stats": {"read-ios": 5, "read-merges": 1,
            "read-sectors": 40, "read-ticks": 9, "write-ios": 2, "write-sectors": 16, "write-ticks": 4, "ios-pgr": 1,
            "total-ticks": 7, "weight-ticks": 13, "flush-ios": 3, "flush-ticks": 2}}, {"major": 1}, 5]);
        assert_eq!(GuestDisk::of_json(&said), disks[..1]);
        assert_eq!(GuestDisk::of_json(&json!("x")), []);
    }

    #[test]
    fn answers_are_results_or_sentences() {
        assert_eq!(answer(br#"{"return": {"a": 1}}"#), Ok(json!({"a": 1})));
        let refused = answer(br#"{"error": {"class": "GenericError", "desc": "no\u0007 such"}}"#);
        assert_eq!(refused, Err("the guest agent refuses: no such".into()));
        assert!(answer(b"hello").is_err() && answer(b"{}").is_err() && answer(b"[1]").is_err());
        assert!(answer(&vec![b'['; 1 << 19]).is_err(), "nesting is bounded");
        assert!(answer(&vec![b' '; ANSWER_LEN_MAX + 1]).unwrap_err().contains("longer"));
    }

    #[test]
    fn addresses_are_numbered_as_the_vm_numbers_its_interfaces() {
        let mut facts = GuestFacts::default();
        facts.read_interfaces(&json!([
            {"name": "lo", "ip-addresses": [{"ip-address": "127.0.0.1"}, {"ip-address": "::1"}]},
            {"name": "ens9", "hardware-address": "02:AA:00:00:00:01", "ip-addresses": [
                {"ip-address": "fe80::1"}, {"ip-address": "2001:db8::1"}, {"ip-address": "192.0.2.7"},
                {"ip-address": "192.0.2.8"}, {"ip-address": "not one"}, {"ip-address": 5}]},
            {"name": "dummy0", "ip-addresses": [{"ip-address": "198.51.100.3"}]},
            {"name": "down", "hardware-address": "02:aa:00:00:00:03"}, 7, null
        ]));
        let devices = BTreeMap::from([("02:aa:00:00:00:01".into(), 3), ("02:aa:00:00:00:02".into(), 0)]);
        let wanted = [
            ("1/ip", "198.51.100.3"),
            ("1/ipv4/0", "198.51.100.3"),
            ("3/ip", "192.0.2.7"),
            ("3/ipv4/0", "192.0.2.7"),
            ("3/ipv4/1", "192.0.2.8"),
            ("3/ipv6/0", "2001:db8::1"),
        ];
        let wanted: BTreeMap<String, String> =
            wanted.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        assert_eq!(facts.networks(&devices), wanted);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let many: Vec<Value> = (0..5000)
            .map(|n| {
                json!({"name": format!("e{n}\n{}", "x".repeat(9000)), "ip-addresses":
                vec![json!({"ip-address": "192.0.2.1"}); 300]})
            })
            .collect();
        let mut facts = GuestFacts::default();
        facts.read_interfaces(&Value::Array(many.clone()));
        assert!(facts.interfaces.len() <= INTERFACES_MAX);
        assert!(facts.interfaces.iter().all(|one| one.addresses.len() <= ADDRESSES_MAX
            && one.name.len() <= TEXT_LEN_MAX
            && !one.name.contains('\n')));
        facts.read_file_systems(&Value::Array(many));
        assert!(facts.file_systems.len() <= FILE_SYSTEMS_MAX);
        let words = "fs=a,b,c ip=192.0.2.1 ".repeat(10_000);
        let facts = GuestFacts::of_words(&words);
        assert!(facts.file_systems.len() <= FILE_SYSTEMS_MAX && facts.interfaces[0].addresses.len() == 1);
    }

    #[test]
    fn our_own_agent_speaks_in_words() {
        let said = "kernel=6.12.1 name=guest total=245760 free=200000 ip=127.0.0.1 ip=192.0.2.9 \
                    fs=vda,ext4,/mnt/a%20b nonsense total";
        let facts = GuestFacts::of_words(said);
        assert_eq!((facts.memory, facts.kernel.as_str()), ((245_760, 200_000), "6.12.1"));
        assert_eq!(facts.networks(&BTreeMap::new()).get("0/ip").map(String::as_str), Some("192.0.2.9"));
        let disk = &facts.file_systems[0];
        assert_eq!(
            (disk.name.as_str(), disk.kind.as_str(), disk.mounted.as_str()),
            ("vda", "ext4", "/mnt/a%20b")
        );
    }

    #[test]
    fn commands_that_an_agent_can_do_are_those_that_are_enabled() {
        let mut facts = GuestFacts::default();
        let command = |name: &str, enabled: bool| json!({"name": name, "enabled": enabled});
        facts.read_info(&json!({"version": "7.2.0", "supported_commands": [
            command("guest-fsfreeze-freeze", true), command("guest-fsfreeze-thaw", true), command("guest-fstrim", false)]}));
        assert!(facts.can_freeze && !facts.can_trim && facts.version == "7.2.0");
        facts.read_memory(
            &json!([{"online": true}, {"online": false}, {"online": true}]),
            &json!({"size": 1 << 27}),
        );
        assert_eq!(facts.memory.0, 262_144);
    }
}
