//! Names and addresses of iSCSI targets, as clients and targets write them. They become arguments of a program and
//! names of files, so that what could be read as something else is refused.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// The port of iSCSI.
pub const PORT: u16 = 3260;
/// Longest iSCSI name; RFC 7143, 4.2.7.1.
const NAME_LEN_MAX: usize = 223;

/// Whether a text is the iSCSI name of a target or an initiator.
pub fn is_iscsi_name(text: &str) -> bool {
    let starts = ["iqn.", "eui.", "naa."].iter().any(|start| text.starts_with(start));
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-:_".contains(&byte);
    starts && (5..=NAME_LEN_MAX).contains(&text.len()) && text.bytes().all(allowed)
}

/// An address at which a target listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Portal {
    /// Its address.
    pub address: IpAddr,
    /// Its TCP port.
    pub port: u16,
}

impl fmt::Display for Portal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            IpAddr::V4(address) => write!(f, "{address}:{}", self.port),
            IpAddr::V6(address) => write!(f, "[{address}]:{}", self.port),
        }
    }
}

impl Portal {
    /// As [`fmt::Display`] writes it.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, port) = text.rsplit_once(':')?;
        let inner = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let address = match inner {
            Some(inner) => IpAddr::V6(inner.parse::<Ipv6Addr>().ok()?),
            None => IpAddr::V4(address.parse().ok()?),
        };
        let port = port.parse().ok().filter(|port| *port > 0)?;
        Some(Self { address, port })
    }
}

/// A target at one of its portals.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Node {
    /// Where.
    pub portal: Portal,
    /// Its iSCSI name.
    pub name: String,
}

/// The targets that `iscsiadm` prints after a discovery, one in each line: `portal,tag name`. Lines that are none, or
/// whose name could be something else than a name, are left out.
pub fn parse_discovery(text: &str) -> Vec<Node> {
    let line = |line: &str| {
        let (place, name) = line.trim().split_once(' ')?;
        let (portal, _tag) = place.rsplit_once(',')?;
        let portal = Portal::parse(portal)?;
        is_iscsi_name(name).then(|| Node { portal, name: name.to_owned() })
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_names() {
        for good in ["iqn.2003-01.org.linux-iscsi.x:sn.1", "eui.02004567A425678D", "naa.52004567BA64678D"] {
            assert!(is_iscsi_name(good), "{good}");
        }
        let long = format!("iqn.{}", "x".repeat(220));
        for bad in ["", "*", "iqn.", "x.y", "iqn./../x", "iqn.a b", "-T", "iqn.a\n", "iqn.a,b", &long] {
            assert!(!is_iscsi_name(bad), "{bad}");
        }
    }

    #[test]
    fn a_discovery_is_read_by_lines() {
        let text = "10.0.0.1:3260,1 iqn.2001-04.com.example:a\n[fd00::1]:860,2 iqn.2001-04.com.example:b\n\
                    nonsense\n10.0.0.1:3260,1 ../x\n10.0.0.1:0,1 iqn.x:y\n10.0.0.1,1 iqn.x:y\n";
        let found = parse_discovery(text);
        let shown: Vec<String> = found.iter().map(|node| format!("{} {}", node.portal, node.name)).collect();
        assert_eq!(
            shown,
            ["10.0.0.1:3260 iqn.2001-04.com.example:a", "[fd00::1]:860 iqn.2001-04.com.example:b"]
        );
        assert_eq!(Portal::parse("[fd00::1]:860"), Some(found[1].portal));
    }
}
