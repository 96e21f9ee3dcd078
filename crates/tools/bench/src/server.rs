//! The servers that are measured: ours and the peers, and how each is started.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use tapio_control::disk_program;

use super::workload::Workload;

/// The name under which every server exports its disk, where it lets us choose.
pub const EXPORT: &str = "";
/// Microseconds for which ours may spin, where polling is on: QEMU's own default.
const POLL_US: &str = "32";

/// Whose program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// None: io_uring on the file, in this process.
    BareFile,
    Tapio,
    QemuNbd,
    QemuStorageDaemon,
    Nbdkit,
}

/// How clients reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    File,
    Nbd,
    VhostUser,
    /// A file exported by FUSE, past the page cache.
    Fuse,
}

/// What lies behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    Raw,
    Vhd,
    /// A VHD whose parent is an empty VHD. Measured from empty only, as the next two.
    Differencing,
    /// A VHD whose data are encrypted.
    Encrypted,
    /// QEMU's own format.
    Qcow2,
    /// No data at all: the protocol alone. Ours has an empty VHD, which reads as zeroes without touching its file.
    Nothing,
}

/// A server to be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Server {
    /// As `--only` and the output name it.
    pub name: &'static str,
    pub program: Program,
    pub protocol: Protocol,
    pub backing: Backing,
    /// It may spin for requests.
    pub polls: bool,
}

const fn server(name: &'static str, program: Program, protocol: Protocol, backing: Backing) -> Server {
    Server { name, program, protocol, backing, polls: false }
}

const fn polling(of: Server, name: &'static str) -> Server {
    Server { name, polls: true, ..of }
}

use Backing::{Differencing, Encrypted, Nothing, Qcow2, Raw, Vhd};
use Program::{BareFile, Nbdkit, QemuNbd, QemuStorageDaemon, Tapio};
use Protocol::{File, Fuse, Nbd, VhostUser};

/// All of them, in the order of the tables.
pub const SERVERS: [Server; 28] = [
    server("file", BareFile, File, Raw),
    server("tapio-nbd-raw", Tapio, Nbd, Raw),
    polling(server("", Tapio, Nbd, Raw), "tapio-nbd-raw-poll"),
    server("tapio-nbd-vhd", Tapio, Nbd, Vhd),
    server("tapio-nbd-diff", Tapio, Nbd, Differencing),
    server("tapio-nbd-crypt", Tapio, Nbd, Encrypted),
    server("qemu-nbd-raw", QemuNbd, Nbd, Raw),
    server("qemu-nbd-vpc", QemuNbd, Nbd, Vhd),
    server("qsd-nbd-raw", QemuStorageDaemon, Nbd, Raw),
    server("qsd-nbd-qcow2", QemuStorageDaemon, Nbd, Qcow2),
    server("nbdkit-file", Nbdkit, Nbd, Raw),
    server("tapio-nbd-null", Tapio, Nbd, Nothing),
    server("nbdkit-null", Nbdkit, Nbd, Nothing),
    server("tapio-vhost-raw", Tapio, VhostUser, Raw),
    polling(server("", Tapio, VhostUser, Raw), "tapio-vhost-raw-poll"),
    server("tapio-vhost-vhd", Tapio, VhostUser, Vhd),
    polling(server("", Tapio, VhostUser, Vhd), "tapio-vhost-vhd-poll"),
    server("tapio-vhost-diff", Tapio, VhostUser, Differencing),
    server("tapio-vhost-crypt", Tapio, VhostUser, Encrypted),
    server("qsd-vhost-raw", QemuStorageDaemon, VhostUser, Raw),
    polling(server("", QemuStorageDaemon, VhostUser, Raw), "qsd-vhost-raw-poll"),
    server("qsd-vhost-vpc", QemuStorageDaemon, VhostUser, Vhd),
    server("qsd-vhost-qcow2", QemuStorageDaemon, VhostUser, Qcow2),
    server("tapio-vhost-null", Tapio, VhostUser, Nothing),
    server("qsd-vhost-null", QemuStorageDaemon, VhostUser, Nothing),
    server("tapio-fuse-raw", Tapio, Fuse, Raw),
    server("tapio-fuse-vhd", Tapio, Fuse, Vhd),
    server("qsd-fuse-raw", QemuStorageDaemon, Fuse, Raw),
];

/// What a server is started on.
#[derive(Clone, Debug)]
pub struct Stand {
    pub image: PathBuf,
    /// Bytes of the disk, for servers that have no image.
    pub len: u64,
    /// The file with the key of an encrypted image.
    pub key: Option<PathBuf>,
    /// Queues that a front end will use, or connections that clients will make.
    pub lanes: u16,
    pub socket: PathBuf,
    /// The file system is one in memory. Elsewhere every server that can goes past the page cache, as ours does.
    pub in_memory: bool,
    /// Where ours keep their control sockets and counters.
    pub run_dir: PathBuf,
}

impl Server {
    /// Whether it can do this at all.
    pub fn takes(&self, workload: &Workload) -> bool {
        let lanes = workload.lanes == 1 || matches!(self.protocol, Nbd | VhostUser) && !self.polls;
        // A ring has no calls that send requests.
        let sends = !workload.singly || self.protocol == Nbd;
        // Behind nothing there is nothing to write.
        let backed = self.backing != Nothing || !workload.mix.writes();
        // Into a sparse file every other server than the file itself only adds its usual cost.
        let allocates = !matches!(self.backing, Raw | Nothing) && self.protocol != Fuse && !self.polls;
        let filled = !matches!(self.backing, Differencing | Encrypted | Qcow2);
        let state = if workload.fresh { allocates || self.program == BareFile } else { filled };
        lanes && sends && backed && state
    }

    /// It reads from and writes to the page cache, although the storage is a disk and others go past it: what it does
    /// is then no comparison for them.
    pub fn is_cached(&self, in_memory: bool) -> bool {
        self.program == Nbdkit && self.backing == Raw && !in_memory
    }

    /// The program's file, if it is there.
    pub fn program(&self) -> Result<PathBuf, String> {
        let name = match self.program {
            BareFile => return Ok(PathBuf::new()),
            Tapio => return ours(),
            QemuNbd => "qemu-nbd",
            QemuStorageDaemon => "qemu-storage-daemon",
            Nbdkit => "nbdkit",
        };
        find(Path::new(name)).ok_or_else(|| format!("needs {name}"))
    }

    /// The command that starts it in the foreground.
    pub fn command(&self, program: &Path, stand: &Stand) -> Command {
        let mut command = Command::new(program);
        match self.program {
            BareFile => {}
            Tapio => self.tapio(&mut command, stand),
            QemuNbd => {
                let format = self.format();
                command.args(["-t", "-e", "16", "-x", EXPORT, "-f", format]);
                if !stand.in_memory {
                    command.args(["--cache=none", "--aio=io_uring"]);
                }
                command.arg("-k").arg(&stand.socket).arg(&stand.image);
            }
            QemuStorageDaemon => self.storage_daemon(&mut command, stand),
            Nbdkit => {
                command.args(["-f", "-U"]).arg(&stand.socket);
                match self.backing {
                    Nothing => command.arg("null").arg(format!("size={}", stand.len)),
                    _ => command.arg("file").arg(join("file=", &stand.image, "")),
                };
            }
        }
        command
    }

    /// What QEMU calls the format of its image.
    const fn format(&self) -> &'static str {
        match self.backing {
            Vhd | Differencing | Encrypted => "vpc",
            Qcow2 => "qcow2",
            Raw | Nothing => "raw",
        }
    }

    fn tapio(&self, command: &mut Command, stand: &Stand) {
        let kind = if self.backing == Raw { "aio:" } else { "vhd:" };
        command.arg("--foreground").arg("--image").arg(join(kind, &stand.image, ""));
        match self.protocol {
            Fuse => command.args(["--device", "fuse-file"]),
            Nbd => command.arg("--nbd-unix").arg(&stand.socket),
            _ => command
                .arg("--vhost-user")
                .arg(&stand.socket)
                .args(["--queues", &stand.lanes.max(1).to_string()]),
        };
        if let Some(key) = &stand.key {
            command.arg("--key-file").arg(key);
        }
        if self.polls {
            command.args(["--poll-max", POLL_US, "--poll-idle", "0"]);
        }
        command.env("TAPIO_RUN_DIR", stand.run_dir.join("run"));
        command.env("TAPIO_SHM_DIR", stand.run_dir.join("shm"));
    }

    fn storage_daemon(&self, command: &mut Command, stand: &Stand) {
        let direct = if stand.in_memory { "" } else { ",cache.direct=on,aio=io_uring" };
        let node = match self.backing {
            Nothing => {
                OsString::from(format!("driver=null-co,size={},read-zeroes=on,node-name=disk", stand.len))
            }
            _ => {
                let options = format!(",node-name=file{direct}");
                command.arg("--blockdev").arg(join("driver=file,filename=", &stand.image, &options));
                let format = self.format();
                OsString::from(format!("driver={format},file=file,node-name=disk"))
            }
        };
        command.arg("--blockdev").arg(node);
        if self.polls {
            command.args(["--object", "iothread,id=thread"]);
        }
        let thread = if self.polls { ",iothread=thread" } else { "" };
        if self.protocol == Nbd {
            let server = join("addr.type=unix,max-connections=0,addr.path=", &stand.socket, "");
            command.arg("--nbd-server").arg(server);
            command.arg("--export").arg(format!("nbd,id=e,node-name=disk,name={EXPORT},writable=on{thread}"));
        } else if self.protocol == Fuse {
            let export = join("fuse,id=e,node-name=disk,writable=on,mountpoint=", &stand.socket, "");
            command.arg("--export").arg(export);
        } else {
            let queues = stand.lanes.max(1);
            let options = format!("{thread},num-queues={queues},node-name=disk,writable=on");
            let server = join("vhost-user-blk,id=e,addr.type=unix,addr.path=", &stand.socket, &options);
            command.arg("--export").arg(server);
        }
    }
}

/// The file of our disk process, if it is there.
pub fn ours() -> Result<PathBuf, String> {
    let program = disk_program();
    find(&program).ok_or_else(|| format!("needs {}: build it, or set TAPIO_DISK", program.display()))
}

/// A path between two texts, whatever its bytes are.
fn join(before: &str, path: &Path, after: &str) -> OsString {
    let mut all = OsString::from(before);
    all.push(path);
    all.push(after);
    all
}

/// A program by its path, or by its name in the search path.
pub fn find(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return program.is_file().then(|| program.to_path_buf());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::workload::WORKLOADS;

    #[test]
    fn names_are_unique_and_every_workload_has_a_server_of_each_kind() {
        let names: BTreeSet<_> = SERVERS.iter().map(|server| server.name).collect();
        assert_eq!(names.len(), SERVERS.len());
        for workload in &WORKLOADS {
            assert!(["read-", "write-", "allocate-"].iter().any(|kind| workload.name.starts_with(kind)));
            let takes: Vec<_> = SERVERS.iter().filter(|server| server.takes(workload)).collect();
            assert!(takes.iter().any(|server| server.program == Tapio), "{}", workload.name);
            assert!(takes.iter().any(|server| server.program == QemuNbd), "{}", workload.name);
            assert!(takes.iter().any(|server| server.program == BareFile) == (workload.lanes == 1));
            for protocol in if workload.singly { &[Nbd][..] } else { &[Nbd, VhostUser] } {
                let found = |program| {
                    takes.iter().any(|server| (server.program, server.protocol) == (program, *protocol))
                };
                assert!(found(Tapio) && found(QemuStorageDaemon), "{} {protocol:?}", workload.name);
            }
        }
        let kinds = [Differencing, Encrypted, Qcow2];
        assert!(
            kinds.iter().all(|kind| SERVERS.iter().filter(|server| server.backing == *kind).count() == 2)
        );
    }

    #[test]
    fn paths_reach_the_programs_unchanged() {
        let stand = Stand {
            image: "/a b/x.vhd".into(),
            len: 4096,
            key: Some("/k".into()),
            lanes: 2,
            socket: "/s".into(),
            in_memory: false,
            run_dir: "/r".into(),
        };
        for server in SERVERS.iter().filter(|server| server.program != BareFile && server.backing != Nothing)
        {
            let command = server.command(Path::new("program"), &stand);
            let said = format!("{command:?}");
            let ours_by_fuse = (server.program, server.protocol) == (Tapio, Fuse);
            assert!(
                said.contains("/a b/x.vhd")
                    && (said.contains("\"/s") || said.contains("=/s") || ours_by_fuse)
            );
            assert_eq!(said.contains("\"/k\""), server.program == Tapio, "{said}");
            let queues = said.contains("\"--queues\" \"2\"") || said.contains("num-queues=2,");
            assert_eq!(queues, server.protocol == VhostUser, "{said}");
        }
    }
}
