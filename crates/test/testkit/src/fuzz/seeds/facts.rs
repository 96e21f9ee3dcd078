//! Answers of agents in guests.

use super::Shelf;

pub(super) fn put_into(shelf: &mut Shelf) {
    let mut put = |name: &str, text: &str| shelf.put("guest_agent", name, text.as_bytes());
    put(
        "info",
        r#"{"return": {"version": "7.2.0", "supported_commands": [{"name": "guest-fsfreeze-freeze", "enabled": true}]}}"#,
    );
    put(
        "os",
        r#"{"return": {"pretty-name": "Debian GNU/Linux 12", "id": "debian", "version-id": "12", "kernel-release": "6.1"}}"#,
    );
    put(
        "interfaces",
        r#"{"return": [{"name": "ens3", "hardware-address": "02:00:00:00:00:01", "ip-addresses": [{"ip-address-type": "ipv4", "ip-address": "192.0.2.7", "prefix": 24}, {"ip-address": "2001:db8::7"}]}]}"#,
    );
    put(
        "disks",
        r#"{"return": [{"name": "vda1", "mountpoint": "/", "type": "ext4", "total-bytes": 9, "used-bytes": 3}]}"#,
    );
    put("memory", "{\"return\": [{\"online\": true}]}\n{\"return\": {\"size\": 134217728}}");
    put(
        "error",
        r#"{"error": {"class": "CommandNotFound", "desc": "The command guest-x has not been found"}}"#,
    );
    put("words", "kernel=6.1 name=guest os=Debian%2012 total=1024 free=512 ip=192.0.2.9 fs=vda,ext4,/mnt");
}
