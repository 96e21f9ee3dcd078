//! The networks of this host, in the shape that clients list: one for each real interface.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tapio_model::{ApiError, Value};

use crate::db::Db;

/// One interface with its addresses.
#[derive(Clone, Debug, Default)]
struct Interface {
    name: String,
    mac: String,
    mtu: i64,
    is_up: bool,
    is_physical: bool,
    /// With its netmask.
    ipv4: Option<(Ipv4Addr, Ipv4Addr)>,
    ipv6: Vec<Ipv6Addr>,
}

fn read(name: &str, file: &str) -> String {
    std::fs::read_to_string(format!("/sys/class/net/{name}/{file}")).unwrap_or_default().trim().to_owned()
}

/// Interfaces of this host, without loopback, in order of their names.
fn interfaces() -> Vec<Interface> {
    let mut addresses = addresses();
    let Ok(listed) = std::fs::read_dir("/sys/class/net") else { return Vec::new() };
    let mut names: Vec<String> =
        listed.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    // Host ends of guests' network interfaces lead to guests alone.
    let is_of_guest = |name: &String| {
        ["tun_flags", "brport"]
            .iter()
            .all(|part| std::path::Path::new("/sys/class/net").join(name).join(part).exists())
    };
    names.retain(|name| read(name, "type") == "1" && !is_of_guest(name));
    let interface = |name: String| {
        let (ipv4, ipv6) = addresses.remove(&name).unwrap_or_default();
        Interface {
            mac: read(&name, "address"),
            mtu: read(&name, "mtu").parse().unwrap_or(1500),
            is_up: read(&name, "operstate") == "up",
            is_physical: std::path::Path::new(&format!("/sys/class/net/{name}/device")).exists(),
            ipv4,
            ipv6,
            name,
        }
    };
    names.into_iter().map(interface).collect()
}

type Addresses = (Option<(Ipv4Addr, Ipv4Addr)>, Vec<Ipv6Addr>);

/// Addresses by the name of their interface.
fn addresses() -> BTreeMap<String, Addresses> {
    let mut found: BTreeMap<String, Addresses> = BTreeMap::new();
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is a place for one pointer, which the call fills on success.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return found;
    }
    let mut next = list;
    while !next.is_null() {
        // SAFETY: the list that `getifaddrs` made stays valid until `freeifaddrs`, below the loop.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        // SAFETY: the name is a C string of that list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        let of = found.entry(name).or_default();
        match ip_of(entry.ifa_addr) {
            Some(IpAddr::V4(address)) if of.0.is_none() => {
                let mask = match ip_of(entry.ifa_netmask) {
                    Some(IpAddr::V4(mask)) => mask,
                    _ => Ipv4Addr::BROADCAST,
                };
                of.0 = Some((address, mask));
            }
            Some(IpAddr::V6(address)) => of.1.push(address),
            _ => {}
        }
    }
    // SAFETY: `list` came from `getifaddrs` and nothing borrows from it any more.
    unsafe { libc::freeifaddrs(list) };
    found
}

fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: a socket address that the kernel's list points to begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says that it is one of IPv4; it may not be aligned as such.
            let ipv4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(ipv4.sin_addr.s_addr))))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is one of IPv6; it may not be aligned as such.
            let ipv6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(IpAddr::V6(Ipv6Addr::from(ipv6.sin6_addr.s6_addr)))
        }
        _ => None,
    }
}

/// The gateway of the default route, and its interface.
fn gateway() -> Option<(String, Ipv4Addr)> {
    let routes = std::fs::read_to_string("/proc/net/route").ok()?;
    routes.lines().skip(1).find_map(|line| {
        let mut words = line.split_whitespace();
        let (interface, target, gateway) = (words.next()?, words.next()?, words.next()?);
        let gateway = u32::from_str_radix(gateway, 16).ok()?;
        (target == "00000000" && gateway != 0)
            .then(|| (interface.to_owned(), Ipv4Addr::from(u32::from_be(gateway))))
    })
}

/// The address that others reach this host by, as far as it can know.
pub(super) fn address() -> Option<String> {
    let interfaces = interfaces();
    let main = gateway().map(|(name, _)| name);
    let of_main = interfaces.iter().find(|interface| Some(&interface.name) == main.as_ref());
    let any = || interfaces.iter().find(|interface| interface.ipv4.is_some());
    let found = of_main.filter(|interface| interface.ipv4.is_some()).or_else(any)?;
    found.ipv4.map(|(address, _)| address.to_string())
}

/// A record for each interface and its network; the records of an interface that vanished
/// are removed, unless its network is in use.
pub(super) fn make_records(db: &Db, host: &str) -> Result<(), ApiError> {
    let interfaces = interfaces();
    let gateway = gateway();
    let dns = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let dns: Vec<&str> =
        dns.lines().filter_map(|line| line.trim().strip_prefix("nameserver")).map(str::trim).collect();
    let dns = dns.join(",");
    db.change(|change| {
        let mut known: BTreeMap<String, String> = change
            .find("PIF", "host", host)
            .iter()
            .map(|pif| (pif.text("device").to_owned(), pif.reference.clone()))
            .collect();
        for interface in &interfaces {
            let name = interface.name.as_str();
            let pif = match known.remove(name) {
                Some(pif) => pif,
                None => {
                    let network = change.create(
                        "network",
                        &[
                            ("name_label", format!("Pool-wide network associated with {name}").into()),
                            ("bridge", name.into()),
                            ("MTU", Value::Int(interface.mtu)),
                        ],
                    )?;
                    let fields =
                        [("device", name.into()), ("host", host.into()), ("network", network.into())];
                    change.create("PIF", &fields)?
                }
            };
            let is_main = gateway.as_ref().is_some_and(|(main, _)| main == name);
            let (ip, netmask) = interface.ipv4.map(|(ip, mask)| (ip.to_string(), mask.to_string())).unzip();
            let route = gateway.as_ref().filter(|_| is_main).map(|(_, gateway)| gateway.to_string());
            let mode = if ip.is_some() { "Static" } else { "None" };
            for (field, value) in [
                ("MAC", interface.mac.as_str().into()),
                ("MTU", Value::Int(interface.mtu)),
                ("physical", interface.is_physical.into()),
                ("currently_attached", interface.is_up.into()),
                ("management", is_main.into()),
                ("ip_configuration_mode", mode.into()),
                ("IP", ip.unwrap_or_default().into()),
                ("netmask", netmask.unwrap_or_default().into()),
                ("gateway", route.unwrap_or_default().into()),
                ("DNS", if is_main { dns.as_str() } else { "" }.into()),
                ("IPv6", Value::strings(interface.ipv6.iter().map(ToString::to_string))),
            ] {
                change.set("PIF", &pif, field, value)?;
            }
        }
        for pif in known.values() {
            let network = change.get("PIF", pif)?.text("network").to_owned();
            change.destroy("PIF", pif)?;
            let is_used = !change.find("VIF", "network", &network).is_empty()
                || !change.find("PIF", "network", &network).is_empty();
            if !is_used && change.get("network", &network).is_ok() {
                change.destroy("network", &network)?;
            }
        }
        Ok(())
    })
}
