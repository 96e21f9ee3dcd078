//! What a guest was made with and its record need not say any more: its emulator's machine type, and keys of
//! [`MADE`]. An emulator that reads the guest's memory is made with the same.
//!
//! A memory image names all that by one word: `pc-i440fx-7.2_cpus-max.4_cpus.2_ram.512`. Images of earlier versions
//! name the machine type alone, and were written by emulators without anything else.

use std::collections::BTreeMap;

use super::command::MACHINE;
use crate::traits::{MADE, VCPUS_NOW, VmSpec};

/// What the keys begin with, which the word leaves out.
const PREFIX: &str = "made-";

/// The word for a machine type and what else the guest was made with.
pub(super) fn word(machine: &str, made: &BTreeMap<String, String>) -> String {
    let parts = MADE
        .iter()
        .filter_map(|key| made.get(*key).map(|value| format!("_{}.{value}", key.trim_start_matches(PREFIX))));
    std::iter::once(machine.to_owned()).chain(parts).collect()
}

/// Changes a VM to be made as a word says; an empty one says nothing.
pub(super) fn as_word(spec: &mut VmSpec, word: &str) {
    if word.is_empty() {
        return;
    }
    MADE.iter().for_each(|key| drop(spec.platform.remove(*key)));
    let mut parts = word.split('_');
    spec.platform.insert(MACHINE.into(), parts.next().unwrap_or_default().to_owned());
    for (key, value) in parts.filter_map(|part| part.split_once('.')) {
        spec.platform.insert(format!("{PREFIX}{key}"), value.to_owned());
    }
}

/// Changes a VM whose memory comes to have the processors that its guest had.
pub(super) fn as_it_was(spec: &mut VmSpec) {
    if let Some(count) = spec.platform.remove(VCPUS_NOW).and_then(|text| text.parse().ok()) {
        spec.vcpus = count;
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::traits::{MEMORY_MAX, VCPUS_MAX};

    fn spec(platform: &[(&str, &str)]) -> VmSpec {
        VmSpec {
            uuid: Uuid::nil(),
            name: String::new(),
            memory: 256 << 20,
            vcpus: 1,
            kernel: None,
            ramdisk: None,
            kernel_args: String::new(),
            platform: platform.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            drives: Vec::new(),
        }
    }

    #[test]
    fn a_vm_is_made_as_the_one_whose_memory_it_reads() {
        let made = [(VCPUS_MAX, "4"), (VCPUS_NOW, "2"), (MEMORY_MAX, "512"), ("accel", "tcg")];
        let made = made.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let word = word("pc-i440fx-7.2", &made);
        assert_eq!(word, "pc-i440fx-7.2_cpus-max.4_cpus.2_ram.512");
        let mut read = spec(&[(VCPUS_MAX, "8"), ("machine", "pc"), ("vnc", "true")]);
        as_word(&mut read, &word);
        as_it_was(&mut read);
        let as_it_was_made =
            spec(&[(VCPUS_MAX, "4"), (MEMORY_MAX, "512"), ("machine", "pc-i440fx-7.2"), ("vnc", "true")]);
        assert_eq!(read, VmSpec { vcpus: 2, ..as_it_was_made });
        // An image of an earlier version: its emulator had no room for more.
        let mut earlier = spec(&[(VCPUS_MAX, "8")]);
        as_word(&mut earlier, "pc-i440fx-6.0");
        as_it_was(&mut earlier);
        assert_eq!(earlier, spec(&[("machine", "pc-i440fx-6.0")]));
        let mut unknown = spec(&[("vnc", "true")]);
        as_word(&mut unknown, "");
        assert_eq!(unknown, spec(&[("vnc", "true")]));
    }
}
