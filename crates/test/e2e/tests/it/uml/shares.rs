//! `nfs`, `smb` and `iso` SRs on servers: `tapiod` and `xe` in a guest that has both sides of NFS, and Samba. The
//! stories are in `tests/guest/uml-shares.sh`.

use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

/// Half of a minute where nothing else runs, without the outage.
const LIMIT: Duration = Duration::from_secs(180);

/// Seconds that the NFS server is away. 30 and 120 are tried by hand.
fn away_s() -> u64 {
    std::env::var("TAPIO_OUTAGE_S")
        .map_or(5, |text| text.parse().expect("TAPIO_OUTAGE_S is a number of seconds"))
}

fn run(case: &str, parts: &[&str]) {
    run_within(LIMIT, case, parts);
}

fn run_within(limit: Duration, case: &str, parts: &[&str]) {
    let scratch = Scratch::on_disk();
    let disk =
        DiskOptions::raw(&scratch.raw_image("share.raw", 512 << 20)).vhost_user().start(scratch.path());
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    let guest = Uml::new(case, &disk.vhost).with("bin", &programs).with("away", &away_s().to_string());
    let report = guest.within(limit + Duration::from_secs(2 * away_s())).run(&scratch);
    disk.stop();
    for part in parts {
        report.text(part);
    }
}

macro_rules! needs_nfs {
    () => {
        needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "mount.nfs", "rpc.nfsd", "rpcbind");
    };
}

#[test]
fn nfs_srs_and_libraries_live() {
    needs_nfs!();
    run("nfs", &["nfs3", "nfs41", "iso"]);
}

#[test]
fn nfs_servers_go_away_and_come_back() {
    needs_nfs!();
    run("nfs_outages", &["outage", "soft"]);
}

#[test]
fn what_a_kill_leaves_of_a_share_is_finished_or_undone() {
    needs_nfs!();
    run("nfs_kills", &["kills"]);
}

#[test]
fn smb_srs_and_libraries_live() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "mount.cifs", "smbd");
    run("smb", &["smb", "iso"]);
}

#[test]
#[ignore = "half of a minute: for a developer who changes the leases of shared SRs"]
fn two_hosts_share_an_export_and_one_is_killed_in_a_snapshot() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "mount.nfs", "rpc.nfsd", "rpcbind", "ip");
    run_within(3 * LIMIT, "nfs_hosts", &["shared", "survived"]);
}
