//! More disks than the kernel has interrupts for: the ones beyond are files of the host.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use tapio_e2e::disk::Host;
use tapio_e2e::guest::Uml;
use tapio_e2e::local::lacks_fuse;
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;

use crate::machines::Guest;

const LIMIT: Duration = Duration::from_secs(180);

/// Disks of the VM, and those that the kernel has interrupts for.
const DISKS: u64 = 50;
const BY_INTERRUPT: usize = 40;

/// Each has a size of its own, by which the guest tells them apart.
fn size(position: u64) -> u64 {
    (8 + 2 * position) << 20
}

#[test]
fn a_guest_has_more_disks_than_interrupts() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], "nbdcopy");
    let scratch = Scratch::in_memory();
    if let Some(why) = lacks_fuse(&Host::new(&scratch)) {
        return tapio_e2e::tools::skip(&why);
    }
    let guest = Guest::install("Tapio UML guest", LIMIT, &[]);
    guest.ok(&["vm-memory-set", "vm=guest", "memory=512MiB"]);
    let session = guest.world.daemon().login();
    let vm =
        session.text("VM.get_by_uuid", &[json!(guest.value(&["vm-list", "name-label=guest", "--minimal"]))]);
    let sr = session.text("SR.get_by_uuid", &[json!(guest.value(&["sr-list", "--minimal"]))]);
    for vbd in session.call("VM.get_VBDs", &[json!(vm)]).as_array().expect("a list") {
        session.call("VBD.destroy", std::slice::from_ref(vbd));
    }
    let made: Vec<(String, String)> = (0..DISKS)
        .map(|position| {
            let record = json!({"SR": sr, "virtual_size": size(position).to_string(), "name_label": "disk",
                "type": "user"});
            let vdi = session.text("VDI.create", &[record]);
            let record = json!({"VM": vm, "VDI": vdi, "mode": "RW", "type": "Disk", "bootable": position == 0,
                "userdevice": position.to_string(), "empty": false});
            (session.text("VBD.create", &[record]), session.text("VDI.get_uuid", &[json!(vdi)]))
        })
        .collect();
    guest.start();
    // Each disk is told its own size; the files are those beyond the interrupts.
    let named = guest.shell(
        "cd /sys/block; for d in vd* ubd*; do read -r size <$d/size; echo \"size $size.\" >/dev/$d; echo \"= $d $size\"; \
         done; cd /; sync",
    );
    let sizes: BTreeSet<u64> = named
        .iter()
        .filter_map(|line| Some(line.split_once(' ')?.1.parse::<u64>().expect("a size") * 512))
        .collect();
    assert_eq!(sizes, (0..DISKS).map(size).collect(), "{named:?}");
    let files = named.iter().filter(|line| line.starts_with("ubd")).count();
    assert_eq!(files, DISKS as usize - BY_INTERRUPT, "{named:?}");
    let is_file = |position: u64| {
        let sectors = format!(" {}", size(position) / 512);
        named.iter().any(|line| line.starts_with("ubd") && line.ends_with(&sectors))
    };
    let of_files: Vec<u64> = (0..DISKS).filter(|position| is_file(*position)).collect();
    // A file that is in use stays, one that is not goes, and comes with the next start alone.
    let (last, first) = (of_files[files - 1], of_files[0]);
    let device =
        named.iter().find(|line| line.ends_with(&format!(" {}", size(last) / 512))).expect("it is there");
    let device = device.split_once(' ').expect("its name").0;
    let vbd = &made[last as usize].0;
    let held = format!(
        "mke2fs /dev/{device} >/dev/null && mkdir -p /mnt/d && mount -t ext4 /dev/{device} /mnt/d && \
                        echo kept >/mnt/d/word && sync && echo '= mounted'"
    );
    assert_eq!(guest.shell(&held), ["mounted"]);
    let refused = format!("{:?}", session.fails("VBD.unplug", &[json!(vbd)]));
    assert!(refused.contains("DEVICE_DETACH_REJECTED"), "{refused}");
    assert_eq!(guest.shell("umount /mnt/d && echo '= free'"), ["free"]);
    session.call("VBD.unplug", &[json!(vbd)]);
    assert_eq!(guest.shell(&format!("[ -e /sys/block/{device} ] || echo '= gone'")), ["gone"]);
    let refused = format!("{:?}", session.fails("VBD.plug", &[json!(vbd)]));
    assert!(refused.contains("shut it down and plug"), "{refused}");
    session.call("VM.clean_shutdown", &[json!(vm)]);
    let begins = |position: u64| {
        let copy = guest.content(&made[position as usize].1);
        let bytes = std::fs::read(copy).expect("the copy");
        String::from_utf8_lossy(&bytes[..16]).split_once('.').map(|(text, _)| text.to_owned())
    };
    for position in [0, first] {
        let expected = format!("size {}", size(position) / 512);
        assert_eq!(begins(position).as_deref(), Some(&*expected), "disk {position}");
    }
    guest.world.finish();
}
