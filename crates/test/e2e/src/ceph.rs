//! A Ceph cluster of one monitor and one OSD, of this test alone: own directory, own ports of loopback, no services of
//! the host. Its daemons end with the test.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::process::{Finished, Running, poll_until, run_within};

/// How long any step of the cluster may take. It takes seconds; the margin is for a busy host.
const LIMIT: Duration = Duration::from_secs(300);

/// What a cluster needs, in the order in which it is missed.
pub const TOOLS: &[&str] = &["ceph-mon", "ceph-osd", "ceph", "rbd", "monmaptool"];

/// A cluster that runs.
#[derive(Debug)]
pub struct Cluster {
    dir: PathBuf,
    /// Address and port of the monitor, as `mon_host` takes it.
    pub monitor: String,
    osd: Option<Running>,
    _monitor: Running,
    starts: u32,
}

fn free_port() -> u16 {
    // Asked from the kernel and given back: nothing else on the host is given it again so soon.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its number").port()
}

fn uuid() -> String {
    fs::read_to_string("/proc/sys/kernel/random/uuid").expect("a UUID").trim().to_owned()
}

impl Cluster {
    /// Makes one in `dir`, which must be empty, and waits until it serves.
    #[track_caller]
    pub fn start(dir: &Path) -> Self {
        for name in ["mon", "osd", "run", "tmp"] {
            fs::create_dir_all(dir.join(name)).expect("directories of the cluster");
        }
        let (fsid, v2, v1) = (uuid(), free_port(), free_port());
        let monitors = format!("[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]");
        let at = dir.display();
        // One copy of everything, no authentication, nothing that reaches out of the directory.
        let conf = format!(
            "[global]\nfsid = {fsid}\nmon host = {monitors}\npublic network = 127.0.0.0/8\n\
             auth cluster required = none\nauth service required = none\nauth client required = none\n\
             osd pool default size = 1\nosd pool default min size = 1\nosd pool default pg num = 8\n\
             osd pool default pgp num = 8\nosd pool default pg autoscale mode = off\nosd crush chooseleaf type = 0\n\
             osd memory target = 939524096\nmon allow pool size one = true\nmon allow pool delete = true\n\
             mon data avail warn = 0\nmon data avail crit = 0\n\
             log file = {at}/run/$name.log\npid file =\nadmin socket =\n\
             [client]\nlog file =\n\
             [mon]\nmon data = {at}/mon\nmon cluster log file = {at}/run/cluster.log\n\
             [osd]\nosd data = {at}/osd\nosd objectstore = bluestore\nbluestore block create = true\n\
             bluestore block size = 2147483648\n"
        );
        fs::write(dir.join("ceph.conf"), conf).expect("the configuration");
        let map = dir.join("monmap").display().to_string();
        let tool = |program: &str, args: &[&str]| run_tool(dir, program, args).ok();
        tool("monmaptool", &["--create", "--addv", "a", &monitors, "--fsid", &fsid, &map]);
        tool("ceph-mon", &["-i", "a", "--mkfs", "--monmap", &map]);
        let monitor = daemon(dir, "ceph-mon", &["-i", "a"], "mon.out");
        let osd = uuid();
        tool("ceph", &["osd", "new", &osd]);
        tool("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", &osd]);
        let monitors = format!("127.0.0.1:{v1}");
        let mut cluster =
            Self { dir: dir.to_path_buf(), monitor: monitors, osd: None, _monitor: monitor, starts: 0 };
        cluster.start_osd();
        cluster.wait_osd(true);
        cluster
    }

    /// The configuration file.
    pub fn conf(&self) -> PathBuf {
        self.dir.join("ceph.conf")
    }

    /// A tool of Ceph's, on this cluster.
    #[track_caller]
    pub fn tool(&self, program: &str, args: &[&str]) -> Finished {
        run_tool(&self.dir, program, args)
    }

    /// Kills the OSD as a power cut would.
    pub fn kill_osd(&mut self) {
        if let Some(mut osd) = self.osd.take() {
            osd.kill();
        }
    }

    /// Starts the OSD on what it has written.
    #[track_caller]
    pub fn start_osd(&mut self) {
        self.starts += 1;
        let log = format!("osd{}.out", self.starts);
        self.osd = Some(daemon(&self.dir, "ceph-osd", &["-i", "0"], &log));
    }

    /// Waits until the monitor knows that the OSD serves, or that it does not.
    #[track_caller]
    pub fn wait_osd(&self, is_up: bool) {
        let count = usize::from(is_up);
        let known = || {
            let stat = self.tool("ceph", &["osd", "stat", "-f", "json"]).ok();
            let stat: serde_json::Value = serde_json::from_str(&stat).ok()?;
            (stat["num_up_osds"] == count).then_some(())
        };
        poll_until(LIMIT, known).unwrap_or_else(|| panic!("the OSD does not come to be up: {is_up}"));
    }
}

fn command(dir: &Path, program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(["-c", &dir.join("ceph.conf").display().to_string()]).args(args);
    // What others remove from the common directory for temporary files is not the cluster's.
    command.env("TMPDIR", dir.join("tmp")).env_remove("CEPH_CONF").env_remove("CEPH_ARGS");
    command
}

#[track_caller]
fn run_tool(dir: &Path, program: &str, args: &[&str]) -> Finished {
    let mut command = match program {
        // It has no configuration.
        "monmaptool" => {
            let mut command = Command::new(program);
            command.args(args);
            command
        }
        _ => command(dir, program, args),
    };
    run_within(&mut command, LIMIT)
}

fn daemon(dir: &Path, program: &str, args: &[&str], log: &str) -> Running {
    Running::start(command(dir, program, args).arg("-f"), &dir.join("run").join(log))
}
