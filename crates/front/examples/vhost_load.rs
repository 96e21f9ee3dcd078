//! Serves a raw image as vhost-user-blk, or puts load on any vhost-user-blk socket.
//!
//! ```text
//! vhost_load serve IMAGE SOCKET [POLL_US]
//! vhost_load load SOCKET SERVER_PID rr|rw|sr|sw BLOCK_LEN DEPTH SECONDS [spin]
//! ```

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use tapio_block::{Disk, DiskOptions};
use tapio_front::vhost_user::driver::{Driver, DriverOptions, Load, Mix};
use tapio_front::vhost_user::{Listen, VhostUserOptions, VhostUserServer};
use tapio_ring::PollingConfig;
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["serve", image, socket, rest @ ..] => serve(image, socket, rest.first().copied()),
        ["load", socket, pid, mix, block, depth, seconds, rest @ ..] => {
            let mix = match *mix {
                "rr" => Mix::RandomRead,
                "rw" => Mix::RandomWrite,
                "sr" => Mix::SequentialRead,
                "sw" => Mix::SequentialWrite,
                other => return Err(format!("unknown mix '{other}'").into()),
            };
            let load = Load {
                mix,
                block_len: block.parse()?,
                depth: depth.parse()?,
                span_len: 0,
                time: Duration::from_secs_f64(seconds.parse()?),
                spin: rest.contains(&"spin"),
                seed: 1,
            };
            run(socket, pid.parse()?, load)
        }
        _ => Err(
            "usage: vhost_load serve IMAGE SOCKET [POLL_US] | load SOCKET PID MIX BLOCK DEPTH SECONDS [spin]"
                .into(),
        ),
    }
}

fn serve(image: &str, socket: &str, poll_us: Option<&str>) -> Result<(), Box<dyn Error>> {
    let max_ns = poll_us.map_or(Ok(0), str::parse::<u64>)? * 1000;
    let options =
        DiskOptions { polling: PollingConfig { max_ns, idle_min_percent: 0 }, ..DiskOptions::default() };
    let layer = LayerSpec { kind: ImageKind::Raw, path: image.into() };
    let disk = Disk::start(ChainSpec { layers: vec![layer], access: Access::ReadWrite }, options)?;
    let server = VhostUserServer::listen(
        Listen::Path(Path::new(socket)),
        VhostUserOptions { queues: 4, serial: "tapio-load".into(), ..VhostUserOptions::default() },
        disk.remote().clone(),
    )?;
    // Until standard input ends.
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let status = disk.status(Duration::from_secs(5))?;
    eprintln!("{:?} {:?}", status.ring, status.polling);
    server.close();
    disk.close(Duration::from_secs(5))?;
    Ok(())
}

fn run(socket: &str, pid: u32, load: Load) -> Result<(), Box<dyn Error>> {
    let options = DriverOptions {
        queue_size: 128,
        depth: u16::try_from(load.depth)?,
        buffer_len: load.block_len,
        ..DriverOptions::default()
    };
    let driver = Driver::connect(Path::new(socket), options)?;
    let mut queue = driver.start(0)?;
    let load = Load { span_len: driver.capacity(), ..load };
    Load { time: Duration::from_millis(200), ..load }.run(&mut queue)?;
    let before = cpu_us(pid)?;
    let report = load.run(&mut queue)?;
    let spent = cpu_us(pid)? - before;
    println!(
        "{:9.0} IOPS {:8.1} MB/s  p50 {:6.1} us  p99 {:6.1} us  server {:5.2} us/request  kicks {:.2}/request  errors {}",
        report.rate(),
        report.rate() * f64::from(load.block_len) / 1e6,
        report.quantile_ns(0.5) as f64 / 1e3,
        report.quantile_ns(0.99) as f64 / 1e3,
        spent / report.count.max(1) as f64,
        report.kicks as f64 / report.count.max(1) as f64,
        report.errors,
    );
    Ok(())
}

/// CPU time of all threads of a process, kernel threads of io_uring included, in microseconds.
fn cpu_us(pid: u32) -> Result<f64, Box<dyn Error>> {
    let mut total = 0.0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        total += text.split(' ').next().unwrap_or("0").parse::<f64>()? / 1e3;
    }
    Ok(total)
}
