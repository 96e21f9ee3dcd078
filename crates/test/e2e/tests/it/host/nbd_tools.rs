//! nbdinfo, nbdcopy, qemu-img and qemu-io as their users run them.

use std::net::TcpListener;

use serde_json::json;
use tapio_e2e::client::{copy_out, nbd_map, nbdinfo, nbdsh, random_file, sha256, tool};
use tapio_e2e::disk::{DiskOptions, assert_vhd_valid, create_vhd, text};
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;

use super::MIB;

#[test]
fn nbdinfo_finds_every_promised_capability() {
    needs!("nbdinfo");
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    let export = nbdinfo(&disk.uri());
    assert_eq!(export["export-size"], json!(64 * MIB));
    for capability in ["can_flush", "can_fua", "can_trim", "can_zero", "can_multi_conn", "can_df"] {
        assert_eq!(export[capability], json!(true), "{capability} in {export}");
    }
    assert_eq!(export["is_read_only"], json!(false));
    assert_eq!(export["is_rotational"], json!(false));
    let contexts = export["contexts"].as_array().expect("nbdinfo lists contexts");
    assert!(contexts.contains(&json!("base:allocation")), "{contexts:?}");
    // The questions one at a time, which nbdinfo answers by its exit code.
    for question in ["flush", "fua", "trim", "zero", "multi-conn", "structured-reply"] {
        tool("nbdinfo", &["--can", question, &disk.uri()]).ok();
    }
    assert_eq!(tool("nbdinfo", &["--is", "read-only", &disk.uri()]).status.code(), Some(2));
    assert_eq!(tool("nbdinfo", &["--size", &disk.uri()]).ok().trim(), (64 * MIB).to_string());
    disk.stop();
}

#[test]
fn nbdinfo_lists_the_exports() {
    needs!("nbdinfo");
    let scratch = Scratch::on_disk();
    let disk = DiskOptions::raw(&scratch.raw_image("a.raw", 8 * MIB)).nbd().start(scratch.path());
    let listed = tool("nbdinfo", &["--list", "--json", &disk.uri()]).ok();
    let value: serde_json::Value = serde_json::from_str(&listed).expect("nbdinfo prints JSON");
    assert_eq!(value["protocol"], json!("newstyle-fixed"), "{listed}");
    assert_eq!(value["structured"], json!(true), "{listed}");
    let exports = value["exports"].as_array().expect("a list");
    assert!(exports.iter().any(|export| export["export-size"] == json!(8 * MIB)), "{listed}");
    disk.stop();
}

#[test]
fn the_map_of_a_vhd_is_its_allocation() {
    needs!("nbdinfo", "nbdsh");
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    let hole = 3;
    assert_eq!(nbd_map(&disk.uri()), [(0, 64 * MIB, hole)], "a fresh image is one hole");
    nbdsh(&disk.uri(), "h.pwrite(b'x' * 65536, 10 << 20)\nh.flush()");
    let map = nbd_map(&disk.uri());
    assert_eq!(map.iter().map(|extent| extent.1).sum::<u64>(), 64 * MIB, "{map:?}");
    let data: Vec<_> = map.iter().filter(|extent| extent.2 & hole == 0).collect();
    let (first, last) = (data.first().expect("data"), data.last().expect("data"));
    assert!(first.0 <= 10 * MIB && last.0 + last.1 >= 10 * MIB + 65536, "{map:?}");
    // A VHD allocates by blocks of 2 MiB; what is a hole outside that one block must still be called a hole.
    assert!(first.0 >= 10 * MIB && last.0 + last.1 <= 12 * MIB, "{map:?}");
    disk.stop();
    assert_vhd_valid(&image);
}

#[test]
fn the_map_of_a_raw_image_knows_its_holes() {
    needs!("nbdinfo", "nbdsh");
    let scratch = Scratch::on_disk();
    let disk = DiskOptions::raw(&scratch.raw_image("a.raw", 64 * MIB)).nbd().start(scratch.path());
    nbdsh(&disk.uri(), "h.pwrite(b'x' * 65536, 10 << 20)\nh.flush()");
    let map = nbd_map(&disk.uri());
    let data: u64 = map.iter().filter(|extent| extent.2 == 0).map(|extent| extent.1).sum();
    assert_eq!(data, 65536, "{map:?}");
    disk.stop();
}

#[test]
fn nbdcopy_there_and_back() {
    needs!("nbdcopy");
    let scratch = Scratch::on_disk();
    let (original, copy) = (scratch.join("original.raw"), scratch.join("copy.raw"));
    random_file(&original, 48 * MIB);
    for vhd in [true, false] {
        let options = if vhd {
            DiskOptions::vhd(&create_vhd(scratch.join("a.vhd"), 48))
        } else {
            DiskOptions::raw(&scratch.raw_image("a.raw", 48 * MIB))
        };
        let disk = options.nbd().start(scratch.path());
        tool("nbdcopy", &["--flush", "--connections=4", text(&original), &disk.uri()]).ok();
        copy_out(&disk.uri(), &copy);
        assert_eq!(sha256(&original), sha256(&copy), "vhd: {vhd}");
        disk.stop();
    }
    assert_vhd_valid(&scratch.join("a.vhd"));
}

#[test]
fn qemu_img_reads_over_nbd_what_it_reads_from_the_file() {
    needs!("qemu-img", "qemu-io");
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 64);
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    let info = tool("qemu-img", &["info", "--output=json", &disk.uri()]).ok();
    let info: serde_json::Value = serde_json::from_str(&info).expect("qemu-img prints JSON");
    assert_eq!(info["virtual-size"], json!(64 * MIB));
    let commands = [
        "write -P 0x11 0 64k",
        "write -P 0x22 3M 4M",
        "write -z 4M 1M",
        "write -P 0x33 5000k 513",
        "discard 6M 1M",
        "writev -P 0x44 40M 4k 8k 512",
        "aio_write -P 0x55 60M 1M",
        "aio_flush",
        "flush",
        "read -P 0x11 0 64k",
        "read -P 0x22 3M 1M",
        "read -P 0 4M 900k",
        "read -P 0x33 5000k 513",
        "read -P 0x44 40M 12800",
        "read -P 0x55 60M 1M",
        "read -P 0 50M 1M",
    ];
    let mut arguments = vec!["-f", "raw"];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    let uri = disk.uri();
    arguments.push(&uri);
    let said = tool("qemu-io", &arguments).ok();
    assert!(!said.contains("verification failed"), "{said}");
    let copy = scratch.join("copy.raw");
    tool("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, text(&copy)]).ok();
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &uri, text(&copy)]).ok();
    disk.stop();
    // The same bytes from the file itself, by QEMU's own reader of the format.
    tool("qemu-img", &["compare", "-f", "vpc", "-F", "raw", text(&image), text(&copy)]).ok();
    assert_vhd_valid(&image);
}

#[test]
fn tcp_serves_as_the_socket_file_does() {
    needs!("nbdinfo", "nbdcopy");
    let scratch = Scratch::on_disk();
    // Asked from the kernel and given back: nothing else on the host is given it again so soon.
    let address =
        TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
    let image = scratch.raw_image("a.raw", 16 * MIB);
    let options = DiskOptions::raw(&image).nbd().arg("--nbd-tcp").arg(&address.to_string());
    let disk = options.start(scratch.path());
    let uri = format!("nbd://{address}/");
    assert_eq!(nbdinfo(&uri)["export-size"], json!(16 * MIB));
    let original = scratch.join("original.raw");
    random_file(&original, 16 * MIB);
    tool("nbdcopy", &["--flush", text(&original), &uri]).ok();
    let copy = scratch.join("copy.raw");
    copy_out(&disk.uri(), &copy);
    assert_eq!(sha256(&original), sha256(&copy));
    disk.stop();
}

#[test]
fn a_read_only_export_says_so_and_means_it() {
    needs!("nbdinfo", "nbdsh");
    let scratch = Scratch::on_disk();
    let image = scratch.raw_image("a.raw", 8 * MIB);
    let disk = DiskOptions::raw(&image).arg("--read-only").nbd().start(scratch.path());
    assert_eq!(nbdinfo(&disk.uri())["is_read_only"], json!(true));
    nbdsh(
        &disk.uri(),
        "
import errno
h.set_strict_mode(0)
for attempt in (lambda: h.pwrite(b'x' * 512, 0), lambda: h.trim(4096, 0), lambda: h.zero(4096, 0)):
    try:
        attempt()
        raise SystemExit('a write was accepted')
    except nbd.Error as error:
        assert error.errnum == errno.EPERM, error
assert h.pread(512, 0) == bytes(512)
",
    );
    disk.stop();
}
