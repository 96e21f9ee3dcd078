//! What clients may call this host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Names and addresses of a certificate; more would make it too large for some clients.
const NAMES_MAX: usize = 64;

/// The host's name, `localhost`, and the addresses of its interfaces.
pub(super) fn of_this_host() -> Vec<String> {
    let mut names = vec![host_name(), "localhost".to_owned()];
    names.extend(addresses().into_iter().map(|address| address.to_string()));
    names.extend(
        [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)].map(|ip| ip.to_string()),
    );
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| !name.is_empty() && name.is_ascii() && seen.insert(name.clone()));
    names.truncate(NAMES_MAX);
    names
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn addresses() -> Vec<IpAddr> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: getifaddrs(3) fills in the pointer, or fails and leaves it.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut at = first;
    while !at.is_null() {
        // SAFETY: the list is the one that getifaddrs made, and it is freed after this loop.
        let entry = unsafe { &*at };
        // SAFETY: an entry's address is null, or a sockaddr of the family it says.
        let family = (!entry.ifa_addr.is_null()).then(|| i32::from(unsafe { (*entry.ifa_addr).sa_family }));
        match family {
            Some(libc::AF_INET) => {
                // SAFETY: of this family it is a sockaddr_in; it may lie anywhere.
                let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                found.push(IpAddr::from(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr))));
            }
            Some(libc::AF_INET6) => {
                // SAFETY: of this family it is a sockaddr_in6; it may lie anywhere.
                let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                let address = Ipv6Addr::from(address.sin6_addr.s6_addr);
                // A client elsewhere cannot use an address that needs an interface's name.
                if !address.is_unicast_link_local() {
                    found.push(IpAddr::from(address));
                }
            }
            _ => {}
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list of getifaddrs, freed once.
    unsafe { libc::freeifaddrs(first) };
    found
}
