//! Disks of guests of a real Xen: the hypervisor, dom0 and the guests run in QEMU's emulator, our programs in dom0.
//!
//! The stories are in `tests/guest/xen-stories.sh`. What needs no judgement from outside (bytes that differ, an image
//! that is broken, a process that does not end) fails there.

use tapio_e2e::guest::Report;
use tapio_e2e::tools::skip;
use tapio_e2e::xen::{Lane, XenHost};

/// What an emulated host with the stories has to report, or nothing when there is no Xen here.
#[track_caller]
fn told(host: &XenHost) -> Option<Report> {
    match Lane::find() {
        Ok(lane) => Some(host.run(&lane)),
        Err(reason) => {
            skip(&reason);
            None
        }
    }
}

/// A value among the words `name=value name=value` that a guest said of its disk.
#[track_caller]
fn fact<'a>(report: &'a Report, key: &str, name: &str) -> &'a str {
    let words = report.text(key).split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    words.unwrap_or_else(|| panic!("{key} has no {name}: {report:?}"))
}

/// The lane itself, with no disk of ours: Xen boots, its toolstack runs, a guest starts, and the kernel's own back end
/// serves it what our words plug. And grants and events by our own calls, without a guest.
#[test]
fn the_devices_of_xen_and_a_guest_on_the_kernels_back_end() {
    let Some(report) = told(&XenHost::new("devices stock").programs(&["examples/on_xen"])) else { return };
    assert!(report.text("xen").starts_with("4.17"), "{report:?}");
    for part in ["mapping", "read-only", "copying", "events"] {
        assert_eq!(report.text(&format!("devices.{part}")), "ok");
    }
    assert_eq!(report.text("stock.said"), "hello from guest");
    assert_eq!(fact(&report, "stock.facts", "sectors"), "131072");
    assert_eq!(report.number("stock.domains"), 1, "only dom0 is left");
}

/// What every guest with a disk of ours needs in dom0.
const DISKS: [&str; 3] = ["tapio", "tapio-disk", "tapio-tapback"];

/// SHA-256 of 2 MiB of zeros.
const ZEROS: &str = "5647f05ec18958947d32874eeb788fa396a05d0bab7c1b71f112ceb7e9b31eee";

/// Counters of a disk as `tap-ctl stats` or `tapio disk stats --json` prints them.
#[track_caller]
fn stats(report: &Report, key: &str) -> serde_json::Value {
    let text = report.text(key);
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{key} is no JSON ({error}): {text}"))
}

/// Rows of `xsiostat` for a guest's first disk.
#[track_caller]
fn assert_seen_by_xsiostat(report: &Report, key: &str, domid: u64) {
    let row = format!("{domid:5},51712: ");
    let text = report.text(key);
    assert!(text.split('|').any(|line| line.starts_with(&row)), "no row {row:?} in {text}");
}

/// Each writer of a storm wrote something, and what it wrote was there afterwards.
#[track_caller]
fn assert_written(report: &Report, key: &str, writers: usize) {
    let counts: Vec<u64> = report.text(key).split(' ').filter_map(|word| word.parse().ok()).collect();
    assert!(counts.len() == writers && counts.iter().all(|count| *count > 0), "{key}: {counts:?}");
}

/// A program of guests that wants memory of its own to be read and written.
const IN_GUESTS: [&str; 1] = ["examples/unaligned"];

/// A disk whose chain grows under the guest, rings of every order, and sectors of 4096 bytes.
#[test]
fn guests_read_and_write_chains_through_rings_of_every_order() {
    let host = XenHost::new("chain rings sectors").programs(&DISKS).in_guests(&IN_GUESTS);
    let Some(report) = told(&host) else { return };
    assert_eq!(report.number("chain.depth"), 3, "{report:?}");
    assert_eq!(fact(&report, "chain.facts", "sectors"), "131072");
    assert_eq!(report.text("chain.read_only"), "1");
    let chain = stats(&report, "chain.stats");
    assert_eq!(chain["xenbus"]["devid"], 51712, "{chain}");
    assert_eq!(chain["xenbus"]["reqs"][0], chain["xenbus"]["reqs"][1], "a request has no answer: {chain}");
    assert_eq!(chain["images"].as_array().map(Vec::len), Some(3), "{chain}");
    for kind in ["msg", "map", "vbd", "img"] {
        assert_eq!(chain["xenbus"]["errors"][kind], 0, "{chain}");
    }
    assert_seen_by_xsiostat(&report, "chain.xsiostat", chain["xenbus"]["domid"].as_u64().unwrap_or_default());
    for (order, depth) in ["64", "128", "256", "256"].iter().enumerate() {
        assert_eq!(report.text(&format!("rings.{order}")), order.to_string());
        // Linux takes twice as many requests as the ring has slots, up to 256.
        assert_eq!(fact(&report, &format!("rings.{order}.facts"), "depth"), *depth);
        assert_written(&report, &format!("rings.{order}.written"), 3);
    }
    assert_eq!(fact(&report, "sectors.facts", "sectors"), "131072");
    assert_eq!(fact(&report, "sectors.facts", "logical_block"), "4096");
    assert_eq!(report.text("sectors.unaligned"), "ok");
    assert_eq!(report.text("sectors.zeros"), ZEROS, "discarded blocks read as zeros");
    let sectors = &stats(&report, "sectors.stats")["xenbus"];
    assert_eq!(sectors["reqs"][0], sectors["reqs"][1], "a request has no answer: {sectors}");
    assert_eq!(sectors["errors"]["msg"], 0, "{sectors}");
}

/// What a front end may do without, and with more of; the three ways of data side by side; then disks that come and go,
/// a guest that is destroyed and disk processes that are killed, while it writes.
#[test]
fn disks_have_what_guests_ask_for_and_survive_what_happens_to_them() {
    let Some(report) = told(&XenHost::new("features moves restart hotplug").programs(&DISKS)) else {
        return;
    };
    assert_eq!(fact(&report, "features.plain.facts", "max_segments"), "11");
    assert_eq!(fact(&report, "features.plain.facts", "queues"), "1");
    assert_eq!(report.text("features.plain.persistent"), "0");
    assert_eq!(fact(&report, "features.queues.facts", "max_segments"), "128");
    assert_eq!(fact(&report, "features.queues.facts", "queues"), "2");
    assert_eq!(report.text("features.queues.persistent"), "1");
    for how in ["plain", "queues"] {
        let key = |name: &str| format!("features.{how}.{name}");
        assert_eq!(fact(&report, &key("facts"), "write_cache"), "write-back");
        assert_eq!(report.text(&key("zeros")), ZEROS, "discarded blocks read as zeros");
        assert_eq!(report.number(&key("given_back")), 2048, "KiB of a discarded block");
    }
    // 8 MiB read and written: 44 KiB a request at most without indirect ones, 512 KiB with.
    let requests = |how: &str| stats(&report, &format!("features.{how}.stats"))["xenbus"]["reqs"][0].as_u64();
    assert!(requests("plain") > requests("queues").map(|count| 2 * count), "{report:?}");
    for how in ["copy", "persistent", "map"] {
        assert_written(&report, &format!("moves.{how}.written"), 1);
        let moved = &stats(&report, &format!("moves.{how}.stats"))[0]["blkif"][0];
        assert_eq!(moved["movement"], how, "{moved}");
        let count = |name: &str| moved["counts"][name].as_u64().unwrap_or_default();
        // 2 MiB written and as many read, at least; where they are not copied, segments of indirect requests still are.
        assert_eq!(count("copied-bytes") >= 4 << 20, how == "copy", "{moved}");
        assert_eq!(count("maps") > 0, how != "copy", "{moved}");
        assert_eq!(count("mapped-pages") >= count("requests"), how != "copy", "{moved}");
        assert_eq!(count("persistent-hits") > 0, how == "persistent", "{moved}");
        assert_eq!([count("errors-message"), count("errors-map"), count("errors-disk")], [0; 3], "{moved}");
    }
    for round in 1..=2 {
        assert_written(&report, &format!("restart.written.{round}"), 3);
    }
    assert_written(&report, "hotplug.written", 2);
    assert_eq!(report.number("hotplug.left"), 0, "disk processes are left");
}

/// Our xenstored in the place of the stock one, under the stock toolstack, which creates, saves, restores and
/// destroys; it replaces itself under a guest that writes.
#[test]
fn our_xenstored_serves_the_toolstack_guests_and_disks() {
    let programs = [&DISKS[..], &["tapio-xenstored"]].concat();
    let Some(report) = told(&XenHost::new("update save").programs(&programs).with("xenstored", "ours"))
    else {
        return;
    };
    assert_eq!(report.text("xenstored"), "/sbin/tapio-xenstored");
    assert_written(&report, "update.written", 2);
    assert_written(&report, "save.written", 2);
}

/// The toolstack's daemon in dom0 makes the domain and plugs its disks.
#[test]
fn the_toolstack_starts_guests_of_xen() {
    let programs = [&DISKS[..], &["tapiod"]].concat();
    let Some(report) = told(&XenHost::new("toolstack").programs(&programs)) else { return };
    assert_eq!(report.text("toolstack.power"), "running");
    assert_eq!(report.number("toolstack.disks"), 2, "{report:?}");
    assert_eq!(report.number("toolstack.order"), 2);
    assert_eq!(fact(&report, "toolstack.facts", "sectors"), "131072");
    assert_written(&report, "toolstack.written", 2);
    assert!(report.number("toolstack.depth") >= 2, "a snapshot was taken");
    assert_eq!(report.text("toolstack.after"), "halted");
    assert_eq!(report.number("toolstack.domains"), 1, "only dom0 is left");
    assert_eq!(report.number("toolstack.left"), 0, "disk processes are left");
}

/// Guests with many disks, in a container of the processor's, and without a ramdisk of their own.
#[test]
fn the_toolstack_starts_guests_of_every_kind() {
    let programs = [&DISKS[..], &["tapiod"]].concat();
    let Some(report) = told(&XenHost::new("many pvh embedded").programs(&programs)) else { return };
    assert_eq!((report.number("many.disks"), report.number("many.without")), (20, 19));
    assert_eq!((report.number("many.marked"), report.number("many.again")), (20, 20));
    assert_eq!(report.number("many.processes"), 20);
    assert_eq!((report.text("many.1"), report.text("many.19")), ("xvdb", "xvdt"));
    assert_eq!(report.number("many.left"), 0, "disk processes are left");
    assert_eq!(report.text("pvh.type"), "PVH");
    assert!(report.number("embedded.size") > 0, "a guest with our ramdisk sees no disk");
    assert_eq!(report.text("embedded.power"), "halted");
}

/// For work on the lane: `TAPIO_STORIES="chain rings" TAPIO_PROGRAMS="tapio tapio-disk tapio-tapback"`, and
/// `TAPIO_XENSTORED=ours` for our xenstored, `TAPIO_DISKS=64` for the story `many`.
#[test]
#[ignore = "by hand: stories named in TAPIO_STORIES"]
fn stories_that_are_named() {
    let words = |name: &str| std::env::var(name).unwrap_or_default();
    let programs = words("TAPIO_PROGRAMS");
    let host = XenHost::new(&words("TAPIO_STORIES"))
        .once()
        .programs(&programs.split_whitespace().collect::<Vec<_>>())
        .in_guests(&IN_GUESTS)
        .with("xenstored", &words("TAPIO_XENSTORED"))
        .with("disks", &words("TAPIO_DISKS"));
    if let Some(report) = told(&host) {
        eprintln!("{report:#?}");
    }
}
