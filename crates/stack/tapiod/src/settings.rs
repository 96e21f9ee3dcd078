//! What the daemon is told: defaults, then the configuration file, then the command line.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_api::accounts::PamOptions;
use tapio_api::server::ServerLimits;
use tapio_core::config::{self, PER_VM, POLLING_IDLE, POLLING_US, VMS_AT_A_TIME};
use tapio_core::exports::ExportOptions;
use tapio_log::Rotation;
use tapio_vm::{GuestSandbox, KERNEL_DIRS, UserRange};

use crate::args::Options;

mod pool;

pub use pool::PoolSettings;

/// Where settings are without `--config`.
pub const CONFIG_FILE: &str = "/etc/tapio/tapiod.conf";

/// Where the settings are.
pub fn config_file(options: &Options) -> &Path {
    options.config.as_deref().unwrap_or(Path::new(CONFIG_FILE))
}

/// Behind the users of guests.
const COMMAND_USERS: UserRange =
    UserRange { first: UserRange::DEFAULT.first + UserRange::DEFAULT.count, count: 0x100 };

/// A larger file is no configuration.
const CONFIG_LEN_MAX: u64 = 1 << 20;

/// Everything that can be set.
#[derive(Clone, Debug)]
pub struct Settings {
    pub run_dir: PathBuf,
    pub state_dir: PathBuf,
    pub mount_dir: PathBuf,
    /// None: by the rule, from the memory of the host.
    pub worker_pool_size: Option<usize>,
    pub per_vm_parallel: usize,
    /// How long disks may spin, in microseconds, and how idle the host must be for it, in percent.
    pub polling_us: u32,
    pub polling_idle: u8,
    pub tapback: Tapback,
    /// Where kernels and ramdisks may lie that clients name.
    pub kernel_dirs: Vec<PathBuf>,
    /// Whether guests are confined, and the users they run as; `None`: as the daemon.
    pub guest_sandbox: GuestSandbox,
    pub guest_users: Option<UserRange>,
    /// The users of commands of clients, and first their group; `None`: as the daemon.
    pub command_users: Option<UserRange>,
    /// How long an operation on a storage may be silent.
    pub storage_timeout: Duration,
    /// Where storage plugins of version 3 and of version 1 lie; none: there are none.
    pub storage_scripts: Option<PathBuf>,
    pub storage_programs: Option<PathBuf>,
    /// HTTPS.
    pub listen: Vec<SocketAddr>,
    /// HTTP, on loopback.
    pub http: Vec<SocketAddr>,
    pub unix_sockets: Vec<PathBuf>,
    pub unix_socket_mode: u32,
    pub cors_origins: Vec<String>,
    /// Whether accounts of the system can log in.
    pub pam: bool,
    pub pam_service: Option<String>,
    pub session_idle: Duration,
    pub log_level: String,
    /// Where the daemon's log goes; none: standard error.
    pub log_file: Option<PathBuf>,
    /// Logs of what it starts, where no journal is; none: the run directory.
    pub log_dir: Option<PathBuf>,
    /// When log files are rotated.
    pub rotation: Rotation,
    /// Bytes from which on consoles are rotated.
    pub console_log_size: u64,
    pub limits: ServerLimits,
    /// VDIs that are read by NBD.
    pub exports: ExportOptions,
    pub default_sr: Option<PathBuf>,
    /// The pool of hosts.
    pub pool: PoolSettings,
    /// The program that shuts the host down.
    pub host_power: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            run_dir: "/run/tapio".into(),
            state_dir: "/var/lib/tapio".into(),
            mount_dir: "/run/sr-mount".into(),
            worker_pool_size: None,
            per_vm_parallel: PER_VM,
            polling_us: POLLING_US,
            polling_idle: POLLING_IDLE,
            tapback: Tapback::Auto,
            kernel_dirs: KERNEL_DIRS.map(PathBuf::from).into(),
            guest_sandbox: GuestSandbox::On,
            guest_users: Some(UserRange::DEFAULT),
            command_users: Some(COMMAND_USERS),
            storage_timeout: Duration::from_secs(180),
            storage_scripts: Some("/usr/libexec/xapi-storage-script".into()),
            storage_programs: Some("/opt/xensource/sm".into()),
            listen: vec![([0, 0, 0, 0], 443).into()],
            http: vec![([127, 0, 0, 1], 80).into()],
            unix_sockets: Vec::new(),
            unix_socket_mode: 0o600,
            cors_origins: Vec::new(),
            pam: true,
            pam_service: None,
            session_idle: Duration::from_secs(86_400),
            log_level: "info".to_owned(),
            log_file: None,
            log_dir: None,
            rotation: Rotation::default(),
            console_log_size: tapio_vm::CONSOLE_LOG_SIZE,
            limits: ServerLimits::default(),
            exports: ExportOptions::default(),
            default_sr: None,
            pool: PoolSettings::default(),
            host_power: None,
        }
    }
}

/// The program that connects Xen's guests to disk processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tapback {
    /// `tapio-tapback` as it is installed, started if no process serves the back end.
    Auto,
    /// It is never started: another one serves the back end.
    None,
    /// This program.
    Program(PathBuf),
}

/// One key of the file.
struct Key {
    name: &'static str,
    doc: &'static str,
    set: fn(&mut Settings, &str) -> Result<(), String>,
    show: fn(&Settings) -> String,
}

fn number<T: std::str::FromStr + PartialOrd + std::fmt::Display>(
    text: &str,
    min: T,
    max: T,
) -> Result<T, String> {
    let number = text.parse::<T>().ok().filter(|number| *number >= min && *number <= max);
    number.ok_or_else(|| format!("'{text}': a whole number from {min} to {max} is expected"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    number(text, 1, 31_536_000).map(Duration::from_secs)
}

fn directory(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err(format!("'{text}': a path from the root is expected")) }
}

fn list(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|word| !word.is_empty() && *word != "none")
}

fn addresses(text: &str) -> Result<Vec<SocketAddr>, String> {
    let address = |word: &str| {
        word.parse()
            .map_err(|_| format!("'{word}': ADDRESS:PORT is expected, as 0.0.0.0:443 or [::]:443, or none"))
    };
    list(text).map(address).collect()
}

fn shown<T: ToString>(items: &[T]) -> String {
    if items.is_empty() {
        return "none".to_owned();
    }
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

macro_rules! count {
    ($name:literal, $doc:literal, $min:literal..=$max:literal, $($field:ident).+) => {
        Key {
            name: $name,
            doc: $doc,
            set: |settings, text| number(text, $min, $max).map(|value| settings.$($field).+ = value),
            show: |settings| settings.$($field).+.to_string(),
        }
    };
}

macro_rules! path {
    ($name:literal, $doc:literal, $field:ident) => {
        Key {
            name: $name,
            doc: $doc,
            set: |settings, text| directory(text).map(|path| settings.$field = path),
            show: |settings| settings.$field.display().to_string(),
        }
    };
}

macro_rules! time {
    ($name:literal, $doc:literal, $($field:ident).+) => {
        Key {
            name: $name,
            doc: $doc,
            set: |settings, text| seconds(text).map(|time| settings.$($field).+ = time),
            show: |settings| settings.$($field).+.as_secs().to_string(),
        }
    };
}

/// All keys.
fn keys() -> impl Iterator<Item = &'static Key> {
    KEYS.iter().chain(pool::KEYS)
}

const KEYS: &[Key] = &[
    path!("run-dir", "sockets and pid files; empty after a reboot", run_dir),
    path!("state-dir", "what survives a reboot: the database, the certificate, accounts", state_dir),
    path!("mount-dir", "SRs are mounted below it", mount_dir),
    Key {
        name: "worker-pool-size",
        doc: "steps of operations at a time on this host: a number, or auto, which is per-vm-parallel x 4 VMs at a time, \
              bounded by a sixteenth of the memory; 'xe host-worker-pool' advises",
        set: |settings, text| {
            settings.worker_pool_size = match text {
                "auto" => None,
                text => Some(number(text, 1, 1024).map_err(|why| format!("{why}, or auto"))?),
            };
            Ok(())
        },
        show: |settings| settings.worker_pool_size.map_or_else(|| "auto".to_owned(), |size| size.to_string()),
    },
    count!("per-vm-parallel", "steps of operations at a time for one VM", 1..=255, per_vm_parallel),
    count!(
        "default-vbd3-polling-duration",
        "microseconds for which a disk spins after its last request, if neither VBD nor SR set it; 0: never",
        0..=1_000_000,
        polling_us
    ),
    count!(
        "default-vbd3-polling-idle-threshold",
        "percent of the host's processors that must be idle for it",
        0..=100,
        polling_idle
    ),
    Key {
        name: "tapback",
        doc: "the program that connects Xen's guests to their disks, started if none serves vbd3: auto \
              (tapio-tapback), a path, or none if another one always serves vbd3",
        set: |settings, text| {
            settings.tapback = match text {
                "auto" => Tapback::Auto,
                "none" => Tapback::None,
                path => Tapback::Program(directory(path)?),
            };
            Ok(())
        },
        show: |settings| match &settings.tapback {
            Tapback::Auto => "auto".to_owned(),
            Tapback::None => "none".to_owned(),
            Tapback::Program(path) => path.display().to_string(),
        },
    },
    time!(
        "storage-timeout",
        "seconds of silence after which an operation on a storage fails and its process is killed; attaching, scanning \
         and making an SR may take four times as long",
        storage_timeout
    ),
    Key {
        name: "storage-scripts",
        doc: "where storage plugins of SMAPIv3 lie, in volume/NAME and datapath/SCHEME; root's alone to change; or none",
        set: |settings, text| {
            settings.storage_scripts = list(text).next().map(directory).transpose()?;
            Ok(())
        },
        show: |settings| path_or_none(settings.storage_scripts.as_deref()),
    },
    Key {
        name: "storage-programs",
        doc: "where storage plugins of SMAPIv1 lie, programs NAMESR; root's alone to change; or none. They look for the \
              API at /var/lib/xcp/xapi: let unix-socket name it",
        set: |settings, text| {
            settings.storage_programs = list(text).next().map(directory).transpose()?;
            Ok(())
        },
        show: |settings| path_or_none(settings.storage_programs.as_deref()),
    },
    Key {
        name: "host-power",
        doc: "the program that host.shutdown and host.reboot run when all VMs have ended, with '-h now' or '-r now', as \
              /sbin/shutdown; none: clients cannot end this host",
        set: |settings, text| {
            settings.host_power = match text {
                "none" => None,
                path => Some(directory(path)?),
            };
            Ok(())
        },
        show: |settings| {
            settings.host_power.as_ref().map_or_else(|| "none".to_owned(), |path| path.display().to_string())
        },
    },
    Key {
        name: "kernel-dirs",
        doc: "where kernels and ramdisks may lie that VM.PV_kernel and VM.PV_ramdisk name: directories or files that \
              only root can change, or none; linux.uml of this host is always one",
        set: |settings, text| {
            settings.kernel_dirs = list(text).map(directory).collect::<Result<_, _>>()?;
            Ok(())
        },
        show: |settings| {
            shown(&settings.kernel_dirs.iter().map(|path| path.display().to_string()).collect::<Vec<_>>())
        },
    },
    Key {
        name: "guest-sandbox",
        doc: "whether guests of User-mode Linux and QEMU see nothing of this host but their own (root, namespaces, \
              Landlock, system calls): on, as far as this host can; require, or they do not start; off",
        set: |settings, text| {
            settings.guest_sandbox = match text {
                "on" => GuestSandbox::On,
                "require" => GuestSandbox::Require,
                "off" => GuestSandbox::Off,
                _ => return Err(format!("'{text}': on, require or off is expected")),
            };
            Ok(())
        },
        show: |settings| {
            match settings.guest_sandbox {
                GuestSandbox::On => "on",
                GuestSandbox::Require => "require",
                GuestSandbox::Off => "off",
            }
            .to_owned()
        },
    },
    Key {
        name: "guest-users",
        doc: "numbers of users and groups that nothing else uses: each guest runs as one of its own; none: all run \
              as the daemon does. Without root there is none",
        set: |settings, text| {
            settings.guest_users = if text == "none" { None } else { Some(UserRange::parse(text)?) };
            Ok(())
        },
        show: |settings| settings.guest_users.map_or_else(|| "none".to_owned(), |range| range.to_string()),
    },
    Key {
        name: "command-users",
        doc: "numbers of users that nothing else uses: each command of a client with XenServer's xe runs as one of \
              them, in the group of the first; none: all run as the daemon does. Without root there is none",
        set: |settings, text| {
            let range = if text == "none" { None } else { Some(UserRange::parse(text)?) };
            if range.is_some_and(|range| range.count < 2) {
                return Err(format!("'{text}': a group and a user are two numbers"));
            }
            settings.command_users = range;
            Ok(())
        },
        show: |settings| settings.command_users.map_or_else(|| "none".to_owned(), |range| range.to_string()),
    },
    Key {
        name: "listen",
        doc: "addresses for HTTPS, or none",
        set: |settings, text| addresses(text).map(|all| settings.listen = all),
        show: |settings| shown(&settings.listen),
    },
    Key {
        name: "http",
        doc: "loopback addresses for plain HTTP, or none",
        set: |settings, text| addresses(text).map(|all| settings.http = all),
        show: |settings| shown(&settings.http),
    },
    Key {
        name: "unix-socket",
        doc: "UNIX sockets; root needs no password there. Clients of XenServer look at /var/lib/xcp/xapi",
        set: |settings, text| {
            settings.unix_sockets = list(text).map(directory).collect::<Result<_, _>>()?;
            Ok(())
        },
        show: |settings| {
            shown(&settings.sockets().iter().map(|path| path.display().to_string()).collect::<Vec<_>>())
        },
    },
    Key {
        name: "unix-socket-mode",
        doc: "their permissions, which say which users may connect; users other than root still have to log in",
        set: |settings, text| {
            let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
            settings.unix_socket_mode =
                mode.ok_or_else(|| format!("'{text}': a mode as 0600 is expected"))?;
            Ok(())
        },
        show: |settings| format!("{:04o}", settings.unix_socket_mode),
    },
    Key {
        name: "cors-origins",
        doc: "web pages of these origins may call (https://a.example, or * for all)",
        set: |settings, text| {
            settings.cors_origins = list(text).map(str::to_owned).collect();
            Ok(())
        },
        show: |settings| shown(&settings.cors_origins),
    },
    Key {
        name: "pam",
        doc: "whether accounts of the system may log in: on or off",
        set: |settings, text| {
            settings.pam = match text {
                "on" => true,
                "off" => false,
                _ => return Err(format!("'{text}': on or off is expected")),
            };
            Ok(())
        },
        show: |settings| if settings.pam { "on" } else { "off" }.to_owned(),
    },
    Key {
        name: "pam-service",
        doc: "whose rules PAM goes by; none: tapio where /etc/pam.d has it, otherwise login, otherwise common-auth",
        set: |settings, text| {
            settings.pam_service = list(text).next().map(str::to_owned);
            Ok(())
        },
        show: |settings| settings.pam_service.clone().unwrap_or_else(|| "none".to_owned()),
    },
    time!("session-idle", "seconds after which an unused session ends", session_idle),
    Key {
        name: "log-level",
        doc: "error, warn, info, debug, trace, or per part as info,tapio_api=debug",
        set: |settings, text| {
            crate::logs::check(text)?;
            text.clone_into(&mut settings.log_level);
            Ok(())
        },
        show: |settings| settings.log_level.clone(),
    },
    Key {
        name: "log-file",
        doc: "the daemon's log, a file that it rotates; none: standard error, which is the journal under systemd",
        set: |settings, text| {
            settings.log_file = list(text).next().map(directory).transpose()?;
            Ok(())
        },
        show: |settings| path_or_none(settings.log_file.as_deref()),
    },
    Key {
        name: "log-dir",
        doc: "where the logs of disk processes and of tapback are, which these programs rotate, on hosts without \
              a journal; none: the run directory",
        set: |settings, text| {
            settings.log_dir = list(text).next().map(directory).transpose()?;
            Ok(())
        },
        show: |settings| path_or_none(settings.log_dir.as_deref()),
    },
    count!(
        "log-size",
        "bytes from which on these logs are rotated; they also are each day",
        4_096..=1_099_511_627_776,
        rotation.len_max
    ),
    count!("log-kept", "older parts of each log that are kept, compressed", 0..=999, rotation.kept),
    count!(
        "console-log-size",
        "bytes from which on consoles of VMs and the words of their emulators are rotated: they are in memory",
        4_096..=1_073_741_824,
        console_log_size
    ),
    count!("connections-max", "connections of all clients", 1..=100_000, limits.connections_max),
    count!("connections-per-peer", "connections of one client", 1..=100_000, limits.connections_per_peer_max),
    count!("call-size-max", "bytes of a call", 65_536..=67_108_864, limits.body_len_max),
    count!(
        "calls-size-max",
        "bytes of all calls that are being received",
        1_048_576..=4_294_967_296,
        limits.bodies_len_max
    ),
    count!(
        "answers-size-max",
        "bytes that all answers hold that clients have not read yet; what is beyond is refused with HTTP 503",
        8_388_608..=17_179_869_184,
        limits.answers_len_max
    ),
    count!(
        "answers-size-per-client",
        "of these, bytes that the answers of one account hold, or those to one address",
        4_194_304..=17_179_869_184,
        limits.answers_len_per_client_max
    ),
    count!("short-calls", "short calls at work at a time", 1..=1024, limits.quick.running_max),
    count!("long-calls", "calls that work on disks and VMs, at a time", 1..=4096, limits.slow.running_max),
    count!("logins", "passwords that are checked at a time", 1..=64, limits.login.running_max),
    count!(
        "command-lines-max",
        "commands of XenServer's own xe at a time",
        1..=256,
        limits.command_lines_max
    ),
    count!("transfers-max", "disks that come and go over HTTP at a time", 1..=4096, limits.transfers_max),
    count!(
        "waiting-calls",
        "long calls that wait for others to end; more are refused",
        1..=65_536,
        limits.slow.waiting_max
    ),
    time!("head-time", "seconds for a TLS handshake and for a request's head", limits.head_time),
    time!("body-time", "seconds for a call to arrive", limits.body_time),
    time!("write-time", "seconds in which a client takes some of its answer", limits.write_time),
    time!("upload-time", "seconds in which a client sends some more of a disk", limits.upload_time),
    Key {
        name: "nbd-ports",
        doc: "first and last TCP port of VDIs that are read by NBD (VDI.get_nbd_info), and of disks that come with a guest; \
              each has one",
        set: |settings, text| {
            let port = |word: &str| number(word.trim(), 1, u16::MAX);
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let ports = (port(first)?, port(last)?);
            if ports.0 > ports.1 {
                return Err(format!("'{text}': the first port is expected before the last, as 10809-11064"));
            }
            settings.exports.ports = ports;
            Ok(())
        },
        show: |settings| format!("{}-{}", settings.exports.ports.0, settings.exports.ports.1),
    },
    time!(
        "nbd-lease-time",
        "seconds for which a VDI that no NBD client reads stays ready for those that may, if nothing else needs it",
        exports.lease
    ),
    time!(
        "nbd-client-time",
        "seconds in which an NBD client of a VDI sends a request or takes something",
        exports.client_time
    ),
    time!("idle-time", "seconds between two requests on one connection", limits.idle_time),
];

fn path_or_none(path: Option<&Path>) -> String {
    path.map_or_else(|| "none".to_owned(), |path| path.display().to_string())
}

impl Settings {
    /// Where the logs of what the daemon starts are, where no journal is.
    pub fn logs(&self) -> &Path {
        self.log_dir.as_deref().unwrap_or(&self.run_dir)
    }

    /// The sockets that are to be made.
    pub fn sockets(&self) -> Vec<PathBuf> {
        if self.unix_sockets.is_empty() { vec![self.run_dir.join("xapi")] } else { self.unix_sockets.clone() }
    }

    /// The users of commands, which only root can make use of.
    ///
    /// # Errors
    /// Some of them are guests', too.
    pub fn command_users(&self) -> Result<Option<UserRange>, String> {
        let Some(range) = self.command_users.filter(|_| tapio_sys::process::is_root()) else {
            return Ok(None);
        };
        let end = |range: UserRange| u64::from(range.first) + u64::from(range.count);
        match self.guest_users {
            Some(guests) if u64::from(guests.first) < end(range) && u64::from(range.first) < end(guests) => {
                Err(format!(
                    "command-users ({range}) and guest-users ({guests}) have numbers in common; change one"
                ))
            }
            _ => Ok(Some(range)),
        }
    }

    /// How PAM is asked; none: not at all.
    pub fn pam(&self) -> Option<PamOptions> {
        self.pam.then(|| PamOptions { service: self.pam_service.clone(), dir: None })
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let key = keys().find(|key| key.name == name).ok_or_else(|| {
            let all: Vec<&str> = keys().map(|key| key.name).collect();
            format!("there is no key '{name}'; there are {}", all.join(", "))
        })?;
        (key.set)(self, value).map_err(|why| format!("{name}: {why}"))
    }

    fn read(&mut self, path: &Path, must_exist: bool) -> Result<(), String> {
        let told = |error: io::Error| format!("{}: {error}", path.display());
        match fs::metadata(path) {
            Ok(data) if data.len() > CONFIG_LEN_MAX => return Err(format!("{}: too large", path.display())),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound && !must_exist => return Ok(()),
            Err(error) => return Err(told(error)),
        }
        let text = fs::read_to_string(path).map_err(told)?;
        self.read_text(&text, path)
    }

    /// Reads the text of a file; `path` is for what is wrong with it.
    fn read_text(&mut self, text: &str, path: &Path) -> Result<(), String> {
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let place = |why: String| format!("{}, line {}: {why}", path.display(), at + 1);
            let (name, value) =
                line.split_once('=').ok_or_else(|| place("'key = value' is expected".to_owned()))?;
            self.set(name.trim(), value.trim()).map_err(place)?;
        }
        Ok(())
    }

    /// What file and command line say together.
    ///
    /// # Errors
    /// A sentence with the place of what is wrong.
    pub fn gather(options: &Options) -> Result<Self, String> {
        let mut settings = Self::default();
        match &options.config {
            Some(path) => settings.read(path, true)?,
            None => settings.read(Path::new(CONFIG_FILE), false)?,
        }
        settings.with(options)
    }

    /// What another text of the file and the command line say together.
    ///
    /// # Errors
    /// A sentence with the place of what is wrong.
    pub fn gather_of(options: &Options, text: &str) -> Result<Self, String> {
        let mut settings = Self::default();
        settings.read_text(text, config_file(options))?;
        settings.with(options)
    }

    fn with(self, options: &Options) -> Result<Self, String> {
        let mut settings = self;
        for pair in &options.set {
            let (name, value) =
                pair.split_once('=').ok_or_else(|| format!("--set {pair}: KEY=VALUE is expected"))?;
            settings.set(name.trim(), value.trim()).map_err(|why| format!("--set {why}"))?;
        }
        let given = |path: &PathBuf| {
            std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()))
        };
        for (option, place) in [
            (&options.run_dir, &mut settings.run_dir),
            (&options.state_dir, &mut settings.state_dir),
            (&options.mount_dir, &mut settings.mount_dir),
        ] {
            if let Some(path) = option {
                *place = given(path)?;
            }
        }
        if !options.listen.is_empty() {
            settings.listen =
                addresses(&options.listen.join(",")).map_err(|why| format!("--listen {why}"))?;
        }
        if options.no_tls {
            settings.listen.clear();
        }
        if !options.http.is_empty() {
            settings.http = addresses(&options.http.join(",")).map_err(|why| format!("--http {why}"))?;
        }
        if !options.unix_socket.is_empty() {
            settings.unix_sockets = options.unix_socket.iter().map(given).collect::<Result<_, _>>()?;
        }
        if let Some(level) = &options.log_level {
            settings.set("log-level", level).map_err(|why| format!("--{why}"))?;
        }
        settings.default_sr = options.default_sr.as_ref().map(given).transpose()?;
        if let Some(open) = settings.http.iter().find(|address| !address.ip().is_loopback()) {
            return Err(format!(
                "http {open}: plain HTTP is for loopback addresses, because passwords travel as they are; use listen"
            ));
        }
        Ok(settings)
    }

    /// Steps of operations at a time.
    pub fn pool_size(&self) -> usize {
        let rule =
            || config::worker_pool_size(self.per_vm_parallel, VMS_AT_A_TIME, tapio_core::host_memory());
        self.worker_pool_size.unwrap_or_else(rule)
    }

    /// All keys as a file that says the same.
    pub fn as_file(&self) -> String {
        let mut text = String::from("# Settings of tapiod; see tapiod --help.\n");
        for key in keys() {
            // Writing to a String cannot fail.
            let _ = write!(text, "\n# {}\n{} = {}\n", key.doc, key.name, (key.show)(self));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_can_be_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("tapiod.conf");
        let mut settings = Settings::default();
        settings.set("worker-pool-size", "32").expect("set");
        settings.set("host-power", "/sbin/shutdown").expect("set");
        settings.set("listen", "0.0.0.0:1443, [::1]:2443").expect("set");
        settings.set("http", "none").expect("set");
        settings.set("pam", "off").expect("set");
        settings.set("guest-sandbox", "require").expect("set");
        settings.set("guest-users", "300000-300999").expect("set");
        settings.set("kernel-dirs", "/srv/kernels, /boot/vmlinuz").expect("set");
        settings.set("tapback", "/opt/tapback").expect("set");
        settings.set("default-vbd3-polling-duration", "0").expect("set");
        settings.set("unix-socket-mode", "0660").expect("set");
        fs::write(&path, settings.as_file()).expect("written");
        let options = Options { config: Some(path), ..Options::default() };
        let read = Settings::gather(&options).expect("read");
        assert_eq!(read.as_file(), settings.as_file());
        assert_eq!((read.worker_pool_size, read.pool_size()), (Some(32), 32));
        assert_eq!(read.guest_sandbox, GuestSandbox::Require);
        assert_eq!(read.guest_users, Some(UserRange { first: 300_000, count: 1000 }));
        assert_eq!(read.kernel_dirs, ["/srv/kernels", "/boot/vmlinuz"].map(PathBuf::from));
        assert_eq!((read.polling_us, read.tapback), (0, Tapback::Program("/opt/tapback".into())));
        assert_eq!(read.host_power, Some("/sbin/shutdown".into()));
        assert_eq!(read.listen.len(), 2);
        assert!(read.http.is_empty());
    }

    #[test]
    fn options_win_over_the_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("tapiod.conf");
        fs::write(&path, "# a comment\n\nrun-dir = /run/a\nworker-pool-size=4\nlog-level = warn\n")
            .expect("written");
        let options = Options {
            config: Some(path),
            run_dir: Some("/run/b".into()),
            set: vec!["worker-pool-size=5".into()],
            no_tls: true,
            ..Options::default()
        };
        let read = Settings::gather(&options).expect("read");
        assert_eq!(
            (read.run_dir.to_str(), read.worker_pool_size, read.log_level.as_str()),
            (Some("/run/b"), Some(5), "warn")
        );
        assert!(read.listen.is_empty());
        assert_eq!(read.sockets(), [PathBuf::from("/run/b/xapi")]);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("tapiod.conf");
        for (line, says) in [
            ("nonsense", "'key = value' is expected"),
            ("worker-pool = 3", "there is no key 'worker-pool'; there are run-dir"),
            ("worker-pool-size = 0", "worker-pool-size: '0': a whole number from 1 to 1024"),
            ("run-dir = here", "a path from the root"),
            ("listen = everywhere", "ADDRESS:PORT"),
            ("pam = maybe", "on or off"),
            ("worker-pool-size = many", "whole number from 1 to 1024 is expected, or auto"),
            ("host-power = shutdown", "a path from the root"),
            ("tapback = here", "a path from the root"),
            ("kernel-dirs = /boot, kernels", "a path from the root"),
            ("guest-sandbox = maybe", "on, require or off"),
            ("guest-users = 0-5", "FIRST-LAST"),
            ("default-vbd3-polling-idle-threshold = 101", "a whole number from 0 to 100"),
            ("unix-socket-mode = 999", "a mode"),
            ("log-level = loud=very=much", "log-level"),
            ("session-idle = never", "whole number"),
        ] {
            fs::write(&path, format!("\n{line}\n")).expect("written");
            let options = Options { config: Some(path.clone()), ..Options::default() };
            let said = Settings::gather(&options).expect_err(line);
            assert!(said.contains(says) && said.contains("line 2"), "{line}: {said}");
        }
        let absent = Options { config: Some(dir.path().join("absent")), ..Options::default() };
        assert!(Settings::gather(&absent).expect_err("absent").contains("absent"));
        let open = Options { http: vec!["0.0.0.0:80".into()], ..Options::default() };
        assert!(Settings::gather(&open).expect_err("open").contains("loopback"));
    }
}
