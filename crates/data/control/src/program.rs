//! The options of the disk program, as data: its own small parser prints its help from them, and the manual page is
//! made of them, so that the process need not carry a library for that.

/// One option.
#[derive(Clone, Copy, Debug)]
pub struct ProgramOption {
    /// With its dashes.
    pub name: &'static str,
    /// What it takes; `None` for a switch.
    pub value: Option<&'static str>,
    /// May be given more than once.
    pub repeats: bool,
    /// What it does.
    pub help: &'static str,
}

const fn switch(name: &'static str, help: &'static str) -> ProgramOption {
    ProgramOption { name, value: None, repeats: false, help }
}

const fn takes(name: &'static str, value: &'static str, help: &'static str) -> ProgramOption {
    ProgramOption { name, value: Some(value), repeats: false, help }
}

const fn repeats(name: &'static str, value: &'static str, help: &'static str) -> ProgramOption {
    ProgramOption { name, value: Some(value), repeats: true, help }
}

/// One sentence.
pub const ABOUT: &str =
    "serves one or more disks: image chains, reached over NBD, vhost-user or a device of this host";

/// What it is for and how to start.
pub const DESCRIPTION: &str = "\
Without arguments the process goes to the background, prints the path of its control socket and waits there for \
commands of 'tap-ctl' or 'tapio disk'. It ends when its last disk is detached.

With --image it serves one image at once. With --blk-file it follows the conventions of vhost-user programs.

An image of type nbd is the export of another NBD server: nbd:nbd://host:10809/export, \
nbd:nbd+unix:///export?socket=/path, or short nbd:/path/to/socket and nbd:address:port. A URI takes the options \
connections=COUNT (when the server allows several; default 1), reconnect=SECONDS (how long requests wait for a server \
that is gone; 0: they fail at once; default 60), timeout=SECONDS (how long it may take for one request; default: for \
ever) and unflushed=fail|keep (whether the first flush after a lost connection fails if answered writes may be gone; \
default fail). With 'nbds:' and 'nbds+unix:' the connection is encrypted: tls-certificates=DIR names a directory \
with ca-cert.pem (and client-cert.pem, client-key.pem if the server asks for one), tls-psk-file=FILE pre-shared \
keys (of the user in nbds://user@host/), tls-hostname=NAME the name in the server's certificate.

An image of type rbd is one of a Ceph cluster, by librbd, which must be installed: rbd:pool/image, \
rbd:pool/namespace/image, or rbd:pool/image@snapshot to be read. Options follow a '?' with '&' between them: conf=FILE \
(default /etc/ceph/ceph.conf), mon_host=ADDRESS:PORT,... (instead of a file), user=NAME (default admin), keyring=FILE, \
timeout=SECONDS (how long the cluster may take for one request; default: for ever). A disk that is written holds the \
image's exclusive lock: another client that opens it for writing is refused.";

/// All options.
pub const OPTIONS: &[ProgramOption] = &[
    switch("--foreground", "Stay in the foreground and write messages to standard error. Also -D."),
    switch(
        "--detach",
        "Leave terminal and session without a second process, once the control socket is printed: the process that \
         started it waits for its end.",
    ),
    switch(
        "--no-clean-up",
        "Leave what dead processes left: for a caller that starts many and cleans up once.",
    ),
    takes(
        "--image",
        "TYPE:PATH",
        "Open this image at once, as vhd:/disks/a.vhd, aio:/disks/a.raw or nbd:nbd://host/export.",
    ),
    repeats("--nbd-unix", "PATH", "Serve the image over NBD on this UNIX socket."),
    repeats("--nbd-tcp", "ADDRESS:PORT", "Serve the image over NBD on this TCP address."),
    repeats("--vhost-user", "PATH", "Serve the image to a VM by vhost-user-blk on this UNIX socket."),
    takes(
        "--device",
        "HOW",
        "Make the image a block device of this host: auto, ublk, nbd, fuse (a loop device over an exported file) or \
         fuse-file (the file alone). Its path is in 'tapio disk list'.",
    ),
    takes("--queues", "COUNT", "Queues of a vhost-user disk, 1 to 64. Default 1."),
    takes(
        "--queue-size",
        "ENTRIES",
        "Most entries of a vhost-user queue, a power of two up to 1024. Default 1024.",
    ),
    takes("--export", "NAME", "Name of the NBD export. Default: any name is served."),
    takes(
        "--tls",
        "required|offered|off",
        "TLS for NBD over TCP. Default: required when there are certificates or keys, off without.",
    ),
    takes(
        "--tls-dir",
        "DIRECTORY",
        "Certificates for TLS: ca-cert.pem, server-cert.pem, server-key.pem; or keys.psk alone.",
    ),
    takes("--tls-psk", "FILE", "Pre-shared keys for TLS instead of certificates, as psktool writes them."),
    switch("--tls-verify-peer", "Clients need a certificate that the authority in ca-cert.pem has signed."),
    switch("--read-only", "Refuse writes."),
    takes("--key-file", "PATH", "A file with the key of an encrypted image, 32 or 64 bytes as they are."),
    takes(
        "--sector-size",
        "512|4096",
        "Bytes of a sector as guests are told. Default: what a raw device has, 512 for other images.",
    ),
    takes(
        "--threads",
        "COUNT",
        "Threads that serve a disk with several queues or connections, 1 to 16. Default: as many as processors, up to 4.",
    ),
    takes("--poll-max", "MICROSECONDS", "Spin this long for new requests before sleeping. Default 0: never."),
    takes("--poll-idle", "PERCENT", "Spin only while at least this share of the host is idle. Default 50."),
    takes(
        "--no-space",
        "fail|wait",
        "When the storage is full: requests fail, or wait until there is space. Default fail.",
    ),
    takes(
        "--request-timeout",
        "SECONDS",
        "A request fails when the storage takes longer; 0 waits for ever. Default 120.",
    ),
    takes(
        "--memory-max",
        "MIB",
        "Take no more memory than this: a disk that does not fit is refused. Default: what the control group allows.",
    ),
    takes("--user", "NAME", "Become this user before images are opened. Default: root with few privileges."),
    repeats(
        "--allow",
        "DIRECTORY",
        "Touch files below this directory only. Default: all but the system's own.",
    ),
    switch("--devices", "Keep the privileges that attaching local block devices needs."),
    switch(
        "--rbd",
        "Open librbd before privileges are given up, for images of Ceph that a command opens later. Implied by such an \
         --image.",
    ),
    takes(
        "--sandbox",
        "on|off",
        "Give up privileges, files and system calls. Default on; off is for debugging.",
    ),
    takes(
        "--limit",
        "LIMITS",
        "What the disk may do a second, as iops=500,read-bps=50MiB,burst=2s: iops, bps, read-iops, read-bps, \
         write-iops, write-bps, and how far it may run ahead. 'tapio disk limit' changes it.",
    ),
    takes(
        "--pool",
        "NAME[:PAGES]",
        "Share the page pool of an SR with its other disks: data in flight takes pages of 4 KiB. Default 704 pages.",
    ),
    takes(
        "--share",
        "off|weight=N,latency-us=N",
        "How the disk shares its device with other disks: what it counts (1 to 1000, default 100), and the mean \
         latency that its requests to the device shall have. off, the default: it takes what the kernel gives it.",
    ),
    takes(
        "--transfers",
        "off|split=SIZE,merge=SIZE",
        "How requests go to the storage: longer ones in pieces of a size, side by side; neighbours that come at the \
         same time as one, up to a size. Both are multiples of 4 KiB, as split=64KiB. 'tapio profile' says what suits \
         a storage, 'tapio disk transfers' changes it. Default off.",
    ),
    takes("--minor", "NUMBER", "Minor number of the disk. Default: the lowest that is free."),
    takes("--socket-path", "PATH", "vhost-user convention: the socket to serve."),
    takes("--fd", "NUMBER", "vhost-user convention: a listening socket to serve."),
    takes("--blk-file", "PATH", "vhost-user convention: the image, raw unless its name ends in .vhd."),
    switch("--print-capabilities", "vhost-user convention: print what the program can do, as JSON, and end."),
    switch("--print-sandbox", "Print what the process may do and why, and end."),
    switch("--print-devices", "Print which kinds of local device work on this host, as JSON, and end."),
    takes(
        "--clean-devices",
        "dead|waiting",
        "Take away the local devices of dead processes, with 'waiting' also those that wait for their process to come \
         back; print their paths as JSON, and end.",
    ),
    switch("--help", "Print this text. Also -h."),
    switch("--version", "Print the version."),
];

/// Environment variables and what they do.
pub const ENVIRONMENT: &[(&str, &str)] = &[
    ("TAPIO_RUN_DIR", "Directory of control sockets. Default /run/blktap-control."),
    ("TAPIO_SHM_DIR", "Directory of statistics and of intent logs. Default /dev/shm."),
    ("TAPIO_ROOM_SOCKET", "Where a disk on a volume that is too short asks for room. Set by tapiod."),
    ("TAPIO_NO_SPACE", "As --no-space, for disks that tap-ctl starts."),
    ("TAPIO_SANDBOX", "As --sandbox, likewise."),
    ("TAPIO_DEVICES", "As --devices when it is 1, likewise."),
    ("TAPIO_RBD", "As --rbd when it is 1, likewise."),
    ("TAPIO_MEMORY_MAX", "As --memory-max, likewise."),
    ("TAPIO_THREADS", "As --threads, likewise."),
    ("NOTIFY_SOCKET", "Where a service manager is told that the process is ready. Set by systemd."),
    ("WATCHDOG_USEC", "How often it wants to hear that the process lives. Set by systemd."),
];
