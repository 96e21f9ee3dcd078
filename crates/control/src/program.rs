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
pub const ABOUT: &str = "serves one or more disks: image chains, reached over NBD or vhost-user";

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
default fail).";

/// All options.
pub const OPTIONS: &[ProgramOption] = &[
    switch("--foreground", "Stay in the foreground and write messages to standard error. Also -D."),
    takes(
        "--image",
        "TYPE:PATH",
        "Open this image at once, as vhd:/disks/a.vhd, aio:/disks/a.raw or nbd:nbd://host/export.",
    ),
    repeats("--nbd-unix", "PATH", "Serve the image over NBD on this UNIX socket."),
    repeats("--nbd-tcp", "ADDRESS:PORT", "Serve the image over NBD on this TCP address."),
    repeats(
        "--vhost-user",
        "PATH",
        "Serve the image to a virtual machine by vhost-user-blk on this UNIX socket.",
    ),
    takes("--queues", "COUNT", "Queues of a vhost-user disk, 1 to 64. Default 1."),
    takes(
        "--queue-size",
        "ENTRIES",
        "Most entries of a vhost-user queue, a power of two up to 1024. Default 1024.",
    ),
    takes("--export", "NAME", "Name of the NBD export. Default: any name is served."),
    switch("--read-only", "Refuse writes."),
    takes("--key-file", "PATH", "A file with the key of an encrypted image, 32 or 64 bytes as they are."),
    switch("--page-cache", "Read parent images through the page cache."),
    takes("--poll-max", "MICROSECONDS", "Spin this long for new requests before sleeping. Default 0: never."),
    takes("--poll-idle", "PERCENT", "Spin only while at least this share of the host is idle. Default 50."),
    takes(
        "--no-space",
        "fail|wait",
        "When the storage is full: requests fail, or wait until there is space. Default fail.",
    ),
    takes("--minor", "NUMBER", "Minor number of the disk. Default: the lowest that is free."),
    takes("--socket-path", "PATH", "vhost-user convention: the socket to serve."),
    takes("--fd", "NUMBER", "vhost-user convention: a listening socket to serve."),
    takes("--blk-file", "PATH", "vhost-user convention: the image, raw unless its name ends in .vhd."),
    switch("--print-capabilities", "vhost-user convention: print what the program can do, as JSON, and end."),
    switch("--help", "Print this text. Also -h."),
    switch("--version", "Print the version."),
];

/// Environment variables and what they do.
pub const ENVIRONMENT: &[(&str, &str)] = &[
    ("TAPIO_RUN_DIR", "Directory of control sockets. Default /run/blktap-control."),
    ("TAPIO_SHM_DIR", "Directory of statistics and of intent logs. Default /dev/shm."),
    ("TAPIO_NO_SPACE", "As --no-space, for disks that tap-ctl starts."),
];
