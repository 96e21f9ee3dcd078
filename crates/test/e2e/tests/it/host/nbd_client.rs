//! Disks on exports of other servers, and TLS, as their users start them.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use tapio_e2e::client::{copy_out, nbdinfo, random_file, sha256, tool};
use tapio_e2e::disk::{DiskOptions, Host, assert_vhd_valid, create_vhd, text};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;

use super::MIB;

fn free_port() -> SocketAddr {
    // Asked from the kernel and given back: nothing else on the host is given it again so soon.
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port")
}

fn keys(scratch: &Scratch) -> PathBuf {
    let path = scratch.join("keys.psk");
    fs::write(&path, format!("alice:{}\n", "4b".repeat(32))).expect("keys can be written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("keys can be protected");
    path
}

fn remote(uri: &str, dir: &Path) -> tapio_e2e::disk::Disk {
    DiskOptions::remote(uri).nbd().start(dir)
}

#[test]
fn a_disk_on_a_disk_behind_tls() {
    needs!("nbdcopy", "nbdinfo");
    let scratch = Scratch::on_disk();
    let (image, keys) = (create_vhd(scratch.join("a.vhd"), 32), keys(&scratch));
    let address = free_port();
    let lower = DiskOptions::vhd(&image)
        .nbd()
        .arg("--nbd-tcp")
        .arg(&address.to_string())
        .arg("--tls-psk")
        .arg(text(&keys))
        .start(scratch.path());
    let uri = format!("nbds://alice@{address}/?tls-psk-file={}", keys.display());
    assert_eq!(nbdinfo(&uri)["export-size"], json!(32 * MIB));
    tool("nbdinfo", &[&format!("nbd://{address}/")]).fails();
    let upper = remote(&format!("{uri}&connections=4"), scratch.path());
    let (original, copy) = (scratch.join("original.raw"), scratch.join("copy.raw"));
    random_file(&original, 32 * MIB);
    tool("nbdcopy", &["--flush", "--connections=4", text(&original), &upper.uri()]).ok();
    copy_out(&lower.uri(), &copy);
    assert_eq!(sha256(&original), sha256(&copy), "below");
    copy_out(&upper.uri(), &copy);
    assert_eq!(sha256(&original), sha256(&copy), "above");
    upper.stop();
    lower.stop();
    assert_vhd_valid(&image);
}

#[test]
fn a_front_end_with_tls_is_added_to_a_running_disk() {
    needs!("nbdinfo");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let (image, keys) = (create_vhd(scratch.join("a.vhd"), 8), keys(&scratch));
    let tap = host.create(&format!("vhd:{}", text(&image)));
    let (pid, minor, address) = (tap.pid.to_string(), tap.minor.to_string(), free_port().to_string());
    let add = ["disk", "front", "add", "-p", &pid, "-m", &minor, "--nbd-tcp", &address];
    let said = run(host.tapio(&add).args(["--tls", "required"])).fails();
    assert!(said.contains("needs certificates or keys"), "{said}");
    run(host.tapio(&add).args(["--tls-psk", text(&keys)])).ok();
    let uri = format!("nbds://alice@{address}/?tls-psk-file={}", keys.display());
    assert_eq!(nbdinfo(&uri)["export-size"], json!(8 * MIB));
    tap.destroy();
}

#[test]
fn a_server_that_is_not_there_or_refuses_is_named_with_the_reason() {
    let scratch = Scratch::on_disk();
    let keys = keys(&scratch);
    for (uri, why) in [
        (format!("nbd://{}/", free_port()), "refused"),
        ("nbd+unix:///?socket=/nonexistent/nbd.sock".to_string(), "No such file"),
        ("nbd://127.0.0.1/?reconect=5".to_string(), "'reconect' is no option"),
        (format!("nbds://bob@127.0.0.1/?tls-psk-file={}", keys.display()), "no key of user 'bob'"),
        ("nbds://127.0.0.1/?tls-certificates=/nonexistent".to_string(), "no such directory"),
    ] {
        let said = DiskOptions::remote(&uri).nbd().refused(scratch.path());
        assert!(said.contains(why) && said.contains("cannot open"), "{uri}: {said}");
    }
}
