//! Measures the NBD server beside its peers, in turn, on one file, with one load generator.
//!
//! `nbd_bench DIR [SECONDS]` makes a file in DIR (a tmpfs shows the server, a disk shows the disk), serves it by this
//! program, by `nbdkit file` and by `qemu-nbd` where they are installed, and prints a table.
//! `nbd_bench serve FILE SOCKET` is what it starts as the server to be measured.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tapio_block::{Disk, DiskOptions};
use tapio_front::nbd::client::{Address, Wishes};
use tapio_front::nbd::load::{Load, run};
use tapio_front::nbd::wire::Style;
use tapio_front::nbd::{Export, NbdServer};
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};

const FILE_LEN: u64 = 1 << 30;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", file, socket] => serve(file, socket),
        [dir] => compare(Path::new(dir), 2.0, ""),
        [dir, seconds] => compare(Path::new(dir), seconds.parse()?, ""),
        [dir, seconds, only] => compare(Path::new(dir), seconds.parse()?, only),
        _ => Err("usage: nbd_bench DIR [SECONDS [SERVER]] | nbd_bench serve FILE SOCKET".into()),
    }
}

fn serve(file: &str, socket: &str) -> Result<(), Failure> {
    let layer = LayerSpec { kind: ImageKind::Raw, path: file.into() };
    let spec = ChainSpec { layers: vec![layer], access: Access::ReadWrite };
    let mut options = DiskOptions::default();
    if let Ok(max) = std::env::var("POLL_US") {
        options.polling.max_ns = max.parse::<u64>()? * 1000;
    }
    let disk = Disk::start(spec, options)?;
    let server = NbdServer::new()?;
    server.add_export(Export::new("", disk.remote().clone()))?;
    server.listen_unix(Path::new(socket), 0o600)?;
    // Until the parent closes the pipe.
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let ring = disk.status(Duration::from_secs(1))?.ring;
    eprintln!("{ring:?}");
    Ok(())
}

struct Peer {
    name: &'static str,
    child: Child,
    socket: PathBuf,
}

impl Peer {
    fn start(name: &'static str, dir: &Path, file: &Path) -> Option<Self> {
        let socket = dir.join(format!("{name}.sock"));
        let _ = std::fs::remove_file(&socket);
        let (file_arg, socket_arg) = (file.to_str()?, socket.to_str()?);
        let mut command = match name {
            "tapio" => {
                let mut command = Command::new(std::env::current_exe().ok()?);
                command.args(["serve", file_arg, socket_arg]);
                command
            }
            "nbdkit" => {
                let mut command = Command::new("nbdkit");
                command.args(["-f", "-U", socket_arg, "file", &format!("file={file_arg}")]);
                command
            }
            _ => {
                let mut command = Command::new("qemu-nbd");
                command.args(["-f", "raw", "-t", "-e", "8", "-x", "", "-k", socket_arg, file_arg]);
                command
            }
        };
        let child = command.stdin(Stdio::piped()).spawn().ok()?;
        let begin = Instant::now();
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            if begin.elapsed() > Duration::from_secs(5) {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(Self { name, child, socket })
    }

    /// CPU seconds so far, user and system.
    fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or("").split(' ').collect();
        let ticks =
            |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
        (ticks(11) + ticks(12)) / 100.0
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if self.name != "tapio" {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

fn compare(dir: &Path, seconds: f64, only: &str) -> Result<(), Failure> {
    let file = dir.join("nbd-bench.raw");
    let block = vec![0x5a; 1 << 20];
    let mut out = std::fs::File::create(&file)?;
    for _ in 0..FILE_LEN >> 20 {
        std::io::Write::write_all(&mut out, &block)?;
    }
    drop(out);
    let loads = [
        ("4k read q1", false, 4096, 1, 1),
        ("4k write q1", true, 4096, 1, 1),
        ("4k read q32", false, 4096, 32, 1),
        ("4k write q32", true, 4096, 32, 1),
        ("4k read q32 x4", false, 4096, 32, 4),
        ("1M read q8", false, 1 << 20, 8, 1),
        ("1M write q8", true, 1 << 20, 8, 1),
    ];
    println!(
        "{:<16}{:<10}{:>10}{:>10}{:>9}{:>9}{:>9}",
        "load", "server", "IOPS", "MB/s", "p50 us", "p99 us", "cpu us"
    );
    for (name, write, block_len, depth, connections) in loads {
        for server in ["tapio", "nbdkit", "qemu-nbd"] {
            if !only.is_empty() && only != server
                || std::env::var("LOAD").is_ok_and(|wanted| !name.contains(&wanted))
            {
                continue;
            }
            let Some(peer) = Peer::start(server, dir, &file) else {
                println!("{name:<16}{server:<10} skipped: needs {server}");
                continue;
            };
            let load = Load {
                write,
                block_len,
                depth,
                connections,
                random: block_len == 4096,
                span_len: 0,
                time: Duration::from_secs_f64(seconds),
                seed: 7,
            };
            let style = if std::env::var_os("SIMPLE").is_some() { Style::Simple } else { Style::Structured };
            let wishes = Wishes { export: String::new(), style, allocation: false };
            let before = peer.cpu_seconds();
            let report = run(&Address::Unix(peer.socket.clone()), &wishes, &load)?;
            let cpu = peer.cpu_seconds() - before;
            println!(
                "{name:<16}{server:<10}{:>10.0}{:>10.0}{:>9.1}{:>9.1}{:>9.2}{}",
                report.iops(),
                report.bytes_per_second() / 1e6,
                report.p50_ns as f64 / 1e3,
                report.p99_ns as f64 / 1e3,
                cpu * 1e6 / report.requests.max(1) as f64,
                if report.errors > 0 { format!("  {} errors", report.errors) } else { String::new() },
            );
        }
    }
    std::fs::remove_file(&file)?;
    Ok(())
}
