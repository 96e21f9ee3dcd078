//! What agents in guests answer.

use std::collections::BTreeMap;

use tapio_vm::facts::answer;
use tapio_vm::{GuestDisk, GuestFacts};

/// Lines of qemu-guest-agent, each as the answer to every question, and the whole as a line of our own agent.
pub fn guest_agent(bytes: &[u8]) {
    let mut facts = GuestFacts::default();
    let mut before = serde_json::Value::Null;
    for line in bytes.split(|byte| *byte == b'\n') {
        match answer(line) {
            Ok(said) => {
                facts.read_info(&said);
                facts.read_os(&said);
                facts.read_host_name(&said);
                facts.read_interfaces(&said);
                facts.read_file_systems(&said);
                facts.read_memory(&before, &said);
                GuestDisk::of_json(&said).iter().for_each(check_disk);
                before = said;
                check(&facts);
            }
            Err(why) => assert!(why.len() < 2048 && !why.contains(char::is_control), "{why:?}"),
        }
    }
    check(&GuestFacts::of_words(&String::from_utf8_lossy(bytes)));
    GuestDisk::of_words(&String::from_utf8_lossy(bytes)).iter().for_each(check_disk);
}

fn check_disk(disk: &GuestDisk) {
    assert!(disk.name.len() < 2048 && !disk.name.contains(char::is_control), "{disk:?}");
}

/// What is kept is bounded, and of one line.
fn check(facts: &GuestFacts) {
    let texts = [
        &facts.agent,
        &facts.version,
        &facts.os,
        &facts.distro,
        &facts.os_version,
        &facts.kernel,
        &facts.host_name,
    ];
    let of_disks = facts.file_systems.iter().flat_map(|disk| [&disk.name, &disk.mounted, &disk.kind]);
    let of_lines = facts.interfaces.iter().flat_map(|line| [&line.name, &line.mac]);
    for text in texts.into_iter().chain(of_disks).chain(of_lines) {
        assert!(text.chars().count() <= 256 && !text.contains(char::is_control), "{text:?}");
    }
    let devices = BTreeMap::from([("02:00:00:00:00:01".to_owned(), 7)]);
    let networks = facts.networks(&devices);
    assert!(networks.len() <= 32 * 17, "{} addresses", networks.len());
    for (key, address) in networks {
        assert!(key.contains("/ip") && address.parse::<std::net::IpAddr>().is_ok(), "{key}: {address}");
    }
}
