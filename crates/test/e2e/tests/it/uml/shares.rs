//! `nfs`, `smb` and `iso` SRs on servers: `tapiod` and `xe` in a guest that has both sides of NFS, and Samba. The
//! stories are in `tests/guest/uml-shares.sh`.

use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

/// A minute where nothing else runs.
const LIMIT: Duration = Duration::from_secs(300);

#[test]
fn srs_and_libraries_on_servers_live_through_outages_and_kills() {
    needs!(
        Uml::TOOLS[0],
        Uml::TOOLS[1],
        Uml::TOOLS[2],
        "mount.nfs",
        "rpc.nfsd",
        "rpcbind",
        "mount.cifs",
        "smbd"
    );
    let scratch = Scratch::on_disk();
    let disk =
        DiskOptions::raw(&scratch.raw_image("share.raw", 512 << 20)).vhost_user().start(scratch.path());
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    let guest = Uml::new("shares", &disk.vhost).with("bin", &programs).within(LIMIT);
    let report = guest.run(&scratch);
    disk.stop();
    for part in ["nfs3", "nfs41", "outage", "iso", "smb", "kills"] {
        report.text(part);
    }
}
