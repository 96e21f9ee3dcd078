//! The addresses of this host at which VDIs are exported.

use std::net::IpAddr;

use crate::basics::this_host;
use crate::db::Db;
use crate::disks::Place;

/// A purpose of a network: exports there need TLS.
const SECURE: &str = "nbd";
/// A purpose of a network: exports there offer TLS.
const INSECURE: &str = "insecure_nbd";

/// Whether clients elsewhere can use it: not one that needs an interface's name.
fn is_usable(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => true,
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    }
}

/// The addresses of this host's interfaces on networks that are for NBD.
pub(super) fn of_this_host(db: &Db) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::new();
    for pif in db.find("PIF", "host", &this_host(db)) {
        let Ok(network) = db.get("network", pif.text("network")) else { continue };
        let purposes = network.get("purpose").as_set().unwrap_or_default();
        let is_for = |purpose: &str| purposes.iter().any(|known| known.as_str() == Some(purpose));
        let secure = is_for(SECURE);
        if !secure && !is_for(INSECURE) {
            continue;
        }
        let ipv6 = pif.get("IPv6").as_set().unwrap_or_default().iter().filter_map(|text| text.as_str());
        let texts = std::iter::once(pif.text("IP")).chain(ipv6);
        for address in texts.filter_map(|text| text.parse().ok()).filter(is_usable) {
            if !places.iter().any(|known| known.address == address) {
                places.push(Place { address, secure });
            }
        }
    }
    places
}
