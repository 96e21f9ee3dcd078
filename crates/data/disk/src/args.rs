//! The command line, parsed by hand: the program must start in a millisecond and stay small.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tapio_block::{NoSpace, QUEUE_THREADS_MAX};
use tapio_control::program::{ABOUT, DESCRIPTION, ENVIRONMENT, OPTIONS};
use tapio_control::{Front, ImageSource, MINOR_MAX, Polling, PoolSpec, ShareSpec, TlsSettings};
use tapio_types::{DeviceHow, IoLimits, TransferSizes};

use crate::sandbox::Sandbox;

/// What `--print-capabilities` prints, by the conventions of vhost-user programs.
pub const CAPABILITIES: &str = r#"{"type":"block","features":["read-only","blk-file"]}"#;

/// What the command line asks for.
#[derive(Debug, PartialEq)]
pub enum Invocation {
    Help,
    Version,
    Capabilities,
    Sandbox,
    Devices,
    /// Also those that wait for their process.
    CleanDevices {
        waiting: bool,
    },
    Serve(Box<Options>),
}

/// How to serve.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    pub foreground: bool,
    /// Leaves the terminal as a process in the background does, without being another process.
    pub detach: bool,
    /// Takes away what dead processes left.
    pub clean_up: bool,
    /// The image to open at once.
    pub image: Option<ImageSource>,
    pub fronts: Vec<Front>,
    /// A vhost-user socket that the starter left open, by its number.
    pub vhost_user_fd: Option<i32>,
    pub read_only: bool,
    pub sector_size: Option<u32>,
    /// The file with the key of an encrypted image.
    pub key_file: Option<PathBuf>,
    pub polling: Polling,
    pub minor: Option<u16>,
    pub no_space: NoSpace,
    /// For the image of the command line; `Duration::MAX` for ever.
    pub request_timeout: Option<Duration>,
    /// Bytes.
    pub memory_max: Option<u64>,
    /// Threads for each disk; by itself without.
    pub threads: Option<usize>,
    pub sandbox: Sandbox,
    pub limits: IoLimits,
    pub pool: Option<PoolSpec>,
    pub share: Option<ShareSpec>,
    pub transfers: TransferSizes,
}

#[derive(Default)]
struct Raw {
    foreground: bool,
    detach: bool,
    no_clean_up: bool,
    image: Option<String>,
    blk_file: Option<String>,
    nbd_unix: Vec<String>,
    nbd_tcp: Vec<String>,
    vhost_user: Vec<String>,
    device: Option<DeviceHow>,
    queues: Option<u16>,
    queue_size: Option<u16>,
    export: Option<String>,
    tls: Option<String>,
    tls_dir: Option<String>,
    tls_psk: Option<String>,
    tls_verify_peer: bool,
    read_only: bool,
    sector_size: Option<u32>,
    key_file: Option<PathBuf>,
    poll_max: Option<u32>,
    poll_idle: Option<u8>,
    minor: Option<u16>,
    fd: Option<i32>,
    no_space: Option<NoSpace>,
    request_timeout: Option<u64>,
    memory_max: Option<u64>,
    threads: Option<u16>,
    user: Option<String>,
    allow: Vec<String>,
    devices: bool,
    rbd: bool,
    sandbox: Option<bool>,
    limits: Option<IoLimits>,
    pool: Option<PoolSpec>,
    share: Option<ShareSpec>,
    transfers: Option<TransferSizes>,
}

/// Reads the arguments after the program's name.
pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Invocation, String> {
    let mut raw = Raw::default();
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let (name, inline) = match argument.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name.to_owned(), Some(value.to_owned())),
            _ => (argument, None),
        };
        let name = match name.as_str() {
            "-D" => "--foreground",
            "-h" => "--help",
            other => other,
        };
        let option = OPTIONS
            .iter()
            .find(|option| option.name == name)
            .ok_or_else(|| format!("'{name}' is not an option"))?;
        let value = match (option.value, inline) {
            (None, None) => String::new(),
            (None, Some(_)) => return Err(format!("'{name}' takes no value")),
            (Some(_), Some(value)) => value,
            (Some(what), None) => {
                arguments.next().ok_or_else(|| format!("'{name}' needs a value: {what}"))?
            }
        };
        match name {
            "--help" => return Ok(Invocation::Help),
            "--version" => return Ok(Invocation::Version),
            "--print-capabilities" => return Ok(Invocation::Capabilities),
            "--print-sandbox" => return Ok(Invocation::Sandbox),
            "--print-devices" => return Ok(Invocation::Devices),
            "--clean-devices" => {
                return match value.as_str() {
                    "dead" => Ok(Invocation::CleanDevices { waiting: false }),
                    "waiting" => Ok(Invocation::CleanDevices { waiting: true }),
                    other => Err(format!("'{name}' takes 'dead' or 'waiting', not '{other}'")),
                };
            }
            _ => raw.take(name, value)?,
        }
    }
    raw.finish().map(|options| Invocation::Serve(Box::new(options)))
}

fn once<T>(slot: &mut Option<T>, name: &str, value: T) -> Result<(), String> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("'{name}' was given twice")),
    }
}

fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("'{name}' needs a whole number in its range, not '{value}'"))
}

impl Raw {
    fn take(&mut self, name: &str, value: String) -> Result<(), String> {
        match name {
            "--foreground" => self.foreground = true,
            "--detach" => self.detach = true,
            "--no-clean-up" => self.no_clean_up = true,
            "--read-only" => self.read_only = true,
            "--tls" => once(&mut self.tls, name, value)?,
            "--tls-dir" => once(&mut self.tls_dir, name, absolute(&value)?)?,
            "--tls-psk" => once(&mut self.tls_psk, name, absolute(&value)?)?,
            "--tls-verify-peer" => self.tls_verify_peer = true,
            "--image" => once(&mut self.image, name, value)?,
            "--blk-file" => once(&mut self.blk_file, name, value)?,
            "--nbd-unix" => self.nbd_unix.push(value),
            "--nbd-tcp" => self.nbd_tcp.push(value),
            "--vhost-user" => self.vhost_user.push(value),
            "--device" => once(&mut self.device, name, value.parse()?)?,
            "--socket-path" => {
                self.foreground = true;
                self.vhost_user.push(value);
            }
            "--fd" => {
                self.foreground = true;
                once(&mut self.fd, name, number(name, &value)?)?;
            }
            "--queues" => once(&mut self.queues, name, number(name, &value)?)?,
            "--queue-size" => once(&mut self.queue_size, name, number(name, &value)?)?,
            "--key-file" => once(&mut self.key_file, name, PathBuf::from(absolute(&value)?))?,
            "--sector-size" => once(&mut self.sector_size, name, sector_size(&value)?)?,
            "--export" => once(&mut self.export, name, value)?,
            "--poll-max" => once(&mut self.poll_max, name, number(name, &value)?)?,
            "--poll-idle" => once(&mut self.poll_idle, name, number(name, &value)?)?,
            "--no-space" => once(&mut self.no_space, name, no_space(&value)?)?,
            "--request-timeout" => once(&mut self.request_timeout, name, number(name, &value)?)?,
            "--memory-max" => once(&mut self.memory_max, name, mebibytes(name, &value)?)?,
            "--threads" => once(&mut self.threads, name, threads(name, &value)?)?,
            "--user" => once(&mut self.user, name, value)?,
            "--allow" => self.allow.push(absolute(&value)?),
            "--devices" => self.devices = true,
            "--rbd" => self.rbd = true,
            "--sandbox" => once(&mut self.sandbox, name, on_off(&value)?)?,
            "--limit" => {
                let limits = value.parse().map_err(|error| format!("'{name}': {error}"))?;
                once(&mut self.limits, name, limits)?;
            }
            "--share" => {
                let share = value.parse().map_err(|error| format!("'{name}': {error}"))?;
                once(&mut self.share, name, share)?;
            }
            "--transfers" => {
                let sizes = value.parse().map_err(|error| format!("'{name}': {error}"))?;
                once(&mut self.transfers, name, sizes)?;
            }
            "--pool" => {
                let pool = value.parse().map_err(|error| format!("'{name}': {error}"))?;
                once(&mut self.pool, name, pool)?;
            }
            "--minor" => once(&mut self.minor, name, number(name, &value)?)?,
            _ => return Err(format!("'{name}' is not an option")),
        }
        Ok(())
    }

    fn finish(self) -> Result<Options, String> {
        let image = self.image()?;
        let fronts = self.fronts()?;
        self.check(image.is_some(), &fronts)?;
        let rbd = self.rbd
            || image.as_ref().is_some_and(ImageSource::is_of_ceph)
            || std::env::var("TAPIO_RBD").is_ok_and(|value| value == "1");
        Ok(Options {
            foreground: self.foreground,
            detach: self.detach,
            clean_up: !self.no_clean_up,
            image,
            fronts,
            vhost_user_fd: self.fd,
            read_only: self.read_only,
            sector_size: self.sector_size,
            polling: self.polling()?,
            minor: self.minor,
            no_space: match self.no_space {
                Some(no_space) => no_space,
                None => from_env("TAPIO_NO_SPACE", no_space)?.unwrap_or(NoSpace::Fail),
            },
            request_timeout: self.request_timeout.map(|seconds| match seconds {
                0 => Duration::MAX,
                seconds => Duration::from_secs(seconds),
            }),
            memory_max: match self.memory_max {
                Some(max) => Some(max),
                None => from_env("TAPIO_MEMORY_MAX", |value| mebibytes("TAPIO_MEMORY_MAX", value))?,
            },
            threads: match self.threads {
                Some(count) => Some(count),
                None => from_env("TAPIO_THREADS", |value| threads("TAPIO_THREADS", value))?,
            }
            .map(usize::from),
            sandbox: Sandbox {
                is_off: match self.sandbox {
                    Some(on) => !on,
                    None => from_env("TAPIO_SANDBOX", on_off)? == Some(false),
                },
                user: self.user,
                allowed: self.allow.into_iter().map(PathBuf::from).collect(),
                // The device is attached when the process has given up its privileges already.
                devices: self.devices
                    || self.device.is_some()
                    || std::env::var("TAPIO_DEVICES").is_ok_and(|value| value == "1"),
                rbd,
            },
            key_file: self.key_file,
            limits: self.limits.unwrap_or_default(),
            pool: self.pool,
            share: self.share,
            transfers: self.transfers.unwrap_or_default(),
        })
    }

    fn image(&self) -> Result<Option<ImageSource>, String> {
        let leaf = match (&self.image, &self.blk_file) {
            (Some(_), Some(_)) => return Err("give --image or --blk-file, not both".into()),
            (Some(image), None) => image.clone(),
            // The convention has no way to name a format, so the file's name does, never its content.
            (None, Some(file)) if file.ends_with(".vhd") => format!("vhd:{}", absolute(file)?),
            (None, Some(file)) => format!("aio:{}", absolute(file)?),
            (None, None) => return Ok(None),
        };
        let image = ImageSource::Leaf(leaf);
        image.check().map_err(|error| error.to_string())?;
        Ok(Some(image))
    }

    fn fronts(&self) -> Result<Vec<Front>, String> {
        let mut fronts = Vec::new();
        let export = self.export.clone().unwrap_or_default();
        let read_only = self.read_only;
        for path in &self.nbd_unix {
            let path = PathBuf::from(absolute(path)?);
            fronts.push(Front::NbdUnix { path, listener: None, export: export.clone(), read_only });
        }
        let tls = TlsSettings::from_options(
            self.tls.as_deref(),
            self.tls_dir.clone().map(PathBuf::from),
            self.tls_psk.clone().map(PathBuf::from),
            self.tls_verify_peer,
        )
        .map_err(|error| error.to_string())?;
        if tls.is_some() && self.nbd_tcp.is_empty() {
            return Err("TLS is for NBD over TCP: give --nbd-tcp".into());
        }
        for addr in &self.nbd_tcp {
            let addr: SocketAddr = addr
                .parse()
                .map_err(|_| format!("'{addr}' is not an address and port, as 127.0.0.1:10809"))?;
            fronts.push(Front::NbdTcp {
                addr,
                tls: tls.clone(),
                export: export.clone(),
                read_only,
                guard: None,
            });
        }
        let vhost_user = |socket: PathBuf, connection: Option<u32>| Front::VhostUser {
            socket,
            listener: None,
            connection,
            queues: self.queues.unwrap_or(1),
            queue_size: self.queue_size.unwrap_or(1024),
            read_only,
        };
        for path in &self.vhost_user {
            fronts.push(vhost_user(PathBuf::from(absolute(path)?), None));
        }
        if let Some(how) = self.device {
            fronts.push(Front::Block { how, device: None, read_only, owner: None });
        }
        if let Some(fd) = self.fd {
            if fd < 0 {
                return Err(format!("'--fd {fd}' is not a descriptor"));
            }
            fronts.push(vhost_user(PathBuf::from(format!("/proc/self/fd/{fd}")), Some(0)));
        }
        for front in &fronts {
            front.check(usize::from(self.fd.is_some())).map_err(|error| error.to_string())?;
        }
        Ok(fronts)
    }

    fn polling(&self) -> Result<Polling, String> {
        let polling =
            Polling { max_us: self.poll_max.unwrap_or(0), idle_percent: self.poll_idle.unwrap_or(50) };
        if polling.max_us > 1_000_000 || polling.idle_percent > 100 {
            return Err("--poll-max goes up to 1000000 microseconds and --poll-idle to 100 percent".into());
        }
        Ok(polling)
    }

    /// Options that need one another, or exclude one another.
    fn check(&self, has_image: bool, fronts: &[Front]) -> Result<(), String> {
        if !has_image && !fronts.is_empty() {
            return Err("a front end needs an image: give --image".into());
        }
        if !has_image && self.sector_size.is_some() {
            return Err("--sector-size is about an image: give --image".into());
        }
        if !has_image && self.key_file.is_some() {
            return Err("--key-file is the key of an image: give --image".into());
        }
        if has_image && fronts.is_empty() {
            return Err(
                "an image needs a front end: give --nbd-unix, --nbd-tcp, --vhost-user or --device".into()
            );
        }
        if let Some(minor) = self.minor.filter(|minor| *minor >= MINOR_MAX) {
            return Err(format!("minor numbers end below {MINOR_MAX}, so {minor} is none"));
        }
        if self.foreground && self.detach {
            return Err("--detach leaves the terminal, in which --foreground stays".into());
        }
        Ok(())
    }
}

/// What stands in an environment variable, for processes that are started by others.
fn from_env<T>(name: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
    match std::env::var(name) {
        Ok(value) if !value.is_empty() => parse(&value).map(Some).map_err(|why| format!("{name}: {why}")),
        _ => Ok(None),
    }
}

fn on_off(value: &str) -> Result<bool, String> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("the sandbox is 'on' or 'off', not '{value}'")),
    }
}

/// Threads for a disk.
fn threads(name: &str, value: &str) -> Result<u16, String> {
    let count: u16 = number(name, value)?;
    if count == 0 || usize::from(count) > QUEUE_THREADS_MAX + 1 {
        return Err(format!("'{name} {count}': a disk has 1 to {} threads", QUEUE_THREADS_MAX + 1));
    }
    Ok(count)
}

fn mebibytes(name: &str, value: &str) -> Result<u64, String> {
    number::<u64>(name, value)?.checked_mul(1 << 20).ok_or_else(|| format!("'{name}' is too large"))
}

fn sector_size(value: &str) -> Result<u32, String> {
    match value {
        "512" => Ok(512),
        "4096" => Ok(4096),
        _ => Err(format!("sectors have 512 or 4096 bytes, not '{value}'")),
    }
}

fn no_space(value: &str) -> Result<NoSpace, String> {
    match value {
        "fail" => Ok(NoSpace::Fail),
        "wait" => Ok(NoSpace::Wait),
        _ => Err(format!("a full storage is met with 'fail' or 'wait', not '{value}'")),
    }
}

/// A path from the root: the process leaves its directory when it goes to the background.
fn absolute(path: &str) -> Result<String, String> {
    let absolute = std::path::absolute(path).map_err(|error| format!("'{path}' is not a path: {error}"))?;
    absolute.into_os_string().into_string().map_err(|_| format!("'{path}' is not UTF-8"))
}

/// The text of `--help`.
pub fn help() -> String {
    let mut text =
        format!("tapio-disk {ABOUT}\n\nusage: tapio-disk [OPTIONS]\n\n{DESCRIPTION}\n\nOptions:\n");
    for option in OPTIONS {
        let name = match option.value {
            Some(value) => format!("{} {value}", option.name),
            None => option.name.to_owned(),
        };
        let repeats = if option.repeats { " May be given more than once." } else { "" };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {name:<24}  {}{repeats}", option.help);
    }
    text.push_str("\nEnvironment:\n");
    for (name, help) in ENVIRONMENT {
        let _ = writeln!(text, "  {name:<24}  {help}");
    }
    text.push_str("\nExample:\n  tapio-disk --foreground --image vhd:/disks/a.vhd --nbd-unix /run/a.sock\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_all(line: &str) -> Result<Invocation, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    fn options(line: &str) -> Options {
        match parse_all(line) {
            Ok(Invocation::Serve(options)) => *options,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn every_option_of_the_table_is_understood() {
        for option in OPTIONS {
            let value = match option.value {
                None => "",
                Some("COUNT" | "ENTRIES" | "MICROSECONDS" | "PERCENT" | "NUMBER" | "SECONDS" | "MIB") => {
                    " 16"
                }
                Some("fail|wait") => " wait",
                Some("512|4096") => " 4096",
                Some("dead|waiting") => " dead",
                Some("HOW") => " auto",
                Some("on|off") => " off",
                Some("LIMITS") => " iops=500,read-bps=50MiB,burst=2s",
                Some("off|weight=N,latency-us=N") => " weight=300,latency-us=2000",
                Some("off|split=SIZE,merge=SIZE") => " split=64KiB,merge=64KiB",
                Some("NAME[:PAGES]") => " sr:704",
                Some("ADDRESS:PORT") => " 127.0.0.1:1",
                Some("required|offered|off") => " off",
                Some("TYPE:PATH") => " vhd:/a",
                Some(_) => " /x",
            };
            let image = if option.name.contains("image") || option.name.contains("blk-file") {
                ""
            } else {
                " --image vhd:/a"
            };
            let tcp = if option.name.starts_with("--tls") { " --nbd-tcp 127.0.0.1:2" } else { "" };
            let dir = if option.name == "--tls-verify-peer" { " --tls-dir /pki" } else { "" };
            let line = format!("{}{value} --nbd-unix /n{image}{tcp}{dir}", option.name);
            assert!(parse_all(&line).is_ok(), "{line}: {:?}", parse_all(&line));
            assert!(help().contains(option.name));
        }
    }

    #[test]
    fn devices_are_cleaned_of_the_dead_or_of_those_that_wait_too() {
        let waiting = |line: &str| match parse_all(line) {
            Ok(Invocation::CleanDevices { waiting }) => Some(waiting),
            _ => None,
        };
        assert_eq!(waiting("--clean-devices dead"), Some(false));
        assert_eq!(waiting("--clean-devices=waiting"), Some(true));
        assert!(parse_all("--clean-devices all").is_err_and(|why| why.contains("'all'")));
    }

    #[test]
    fn one_image_can_be_served_in_several_ways() {
        let options = options(
            "-D --image=vhd:/x.vhd --nbd-unix /tmp/s --nbd-unix=/tmp/t --vhost-user /tmp/v --queues 4 --read-only --poll-max 50",
        );
        assert!(options.foreground && options.read_only);
        assert_eq!(options.image, Some(ImageSource::Leaf("vhd:/x.vhd".into())));
        let kinds: Vec<_> = options.fronts.iter().map(Front::kind).collect();
        assert_eq!(kinds, ["nbd-unix", "nbd-unix", "vhost-user"]);
        assert_eq!(options.polling, Polling { max_us: 50, idle_percent: 50 });
    }

    #[test]
    fn a_process_that_detaches_has_no_terminal() {
        let options = options("--detach --no-clean-up");
        assert!(options.detach && !options.clean_up && !options.foreground);
        assert!(parse_all("--detach -D").is_err());
    }

    #[test]
    fn the_conventions_of_vhost_user_programs_hold() {
        let options = options("--socket-path=/tmp/v --blk-file /d.img --read-only");
        assert!(options.foreground);
        assert_eq!(options.image, Some(ImageSource::Leaf("aio:/d.img".into())));
        assert_eq!(parse_all("--fd 7 --blk-file /d.vhd").map(|_| ()), Ok(()));
        assert_eq!(parse_all("--print-capabilities"), Ok(Invocation::Capabilities));
        assert!(serde_json::from_str::<serde_json::Value>(CAPABILITIES).is_ok());
    }

    #[test]
    fn limits_and_the_sandbox_are_read() {
        let options = options(
            "--image aio:/a --nbd-unix /n --memory-max 64 --request-timeout 0 --user nobody --allow /a --allow /b",
        );
        assert_eq!((options.memory_max, options.threads), (Some(64 << 20), None));
        assert_eq!(options.request_timeout, Some(Duration::MAX));
        assert_eq!(options.sandbox.user.as_deref(), Some("nobody"));
        assert_eq!(options.sandbox.allowed, [PathBuf::from("/a"), PathBuf::from("/b")]);
        assert!(!options.sandbox.is_off && !options.sandbox.devices);
    }

    #[test]
    fn nonsense_is_refused_with_a_reason() {
        for (line, reason) in [
            ("--image vhd:/a --nbd-unix /s --threads 0", "1 to 16"),
            ("--imgae vhd:/a", "not an option"),
            ("--image vhd:/a --nbd-unix /n --sector-size 1024", "512 or 4096 bytes, not '1024'"),
            ("--sector-size 4096", "is about an image"),
            ("--image", "needs a value: TYPE:PATH"),
            ("--foreground=1", "takes no value"),
            ("--image vhd:/a --image vhd:/b", "given twice"),
            ("--image vhd:/a", "needs a front end"),
            ("--nbd-unix /s", "needs an image"),
            ("--image tar:/a --nbd-unix /s", "unknown image type"),
            ("--image vhd:/a --nbd-tcp here", "not an address"),
            ("--image vhd:/a --nbd-unix /s --tls-dir /pki", "TLS is for NBD over TCP"),
            ("--image vhd:/a --nbd-tcp 127.0.0.1:1 --tls required", "needs certificates or keys"),
            ("--image vhd:/a --nbd-tcp 127.0.0.1:1 --tls maybe", "not 'maybe'"),
            ("--image vhd:/a --nbd-unix /s --minor 16384", "minor numbers end below"),
            ("--image vhd:/a --vhost-user /s --queue-size 100", "power of two"),
            ("--image vhd:/a --nbd-unix /s --poll-idle 101", "100 percent"),
            ("--image vhd:/a --nbd-unix /s --queues many", "whole number"),
            ("--image vhd:/a --blk-file /b --nbd-unix /s", "not both"),
            ("--image vhd:/a --fd -1", "not a descriptor"),
            ("--image vhd:/a --device loop", "no kind of device"),
            ("--image vhd:/a --device auto --device fuse", "given twice"),
            ("--sandbox maybe", "'on' or 'off'"),
            ("--memory-max much", "whole number"),
            ("--memory-max 18446744073709551615", "too large"),
            ("--request-timeout 1 --request-timeout 2", "given twice"),
            ("--image vhd:/a --nbd-unix /s --limit iops", "is no limit"),
            ("--image vhd:/a --nbd-unix /s --limit iops=1 --limit bps=1", "given twice"),
            ("--image vhd:/a --nbd-unix /s --pool a/b", "cannot name a pool"),
            ("--image vhd:/a --nbd-unix /s --pool a:0", "1 to 65535 pages"),
            ("stray", "not an option"),
        ] {
            let error = parse_all(line).expect_err(line);
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
