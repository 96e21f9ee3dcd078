//! Other people's clients, where they are installed.

use std::ffi::OsString;
use std::fs;
use std::process::{Command, Stdio};

use super::{Rig, pattern, wait_until};

/// The system's own programs first: nbdsh needs the Python that its module was built for.
fn search_path() -> OsString {
    let mut path = OsString::from("/usr/bin:/bin:/usr/sbin:/sbin:");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    path
}

pub fn installed(name: &str) -> bool {
    let found = std::env::split_paths(&search_path()).any(|dir| dir.join(name).is_file());
    if !found {
        println!("skipped: needs {name}");
    }
    found
}

/// Runs a tool with a time limit; `None`, with a note, when it is not installed.
pub fn tool(name: &str, args: &[&str]) -> Option<(bool, String)> {
    if !installed(name) {
        return None;
    }
    let output = Command::new("timeout")
        .args(["60", name])
        .args(args)
        .env("PATH", search_path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    Some((output.status.success(), text.into_owned()))
}

pub fn good(name: &str, args: &[&str]) -> Option<String> {
    let (ok, text) = tool(name, args)?;
    assert!(ok, "{name} {args:?} failed: {text}");
    Some(text)
}

#[test]
fn nbdinfo_reads_the_export_and_its_map() {
    let rig = Rig::new(64 << 20);
    rig.client().write(1 << 20, &pattern(1, 1 << 20), false).unwrap();
    let Some(text) = good("nbdinfo", &[&rig.uri()]) else { return };
    for line in [
        "protocol: newstyle-fixed without TLS, using structured packets",
        "export-size: 67108864 (64M)",
        "base:allocation",
        "is_read_only: false",
        "can_cache: true",
        "can_df: true",
        "can_fast_zero: true",
        "can_flush: true",
        "can_fua: true",
        "can_multi_conn: true",
        "can_trim: true",
        "can_zero: true",
        "block_size_minimum: 512",
        "block_size_preferred: 4096",
        "block_size_maximum: 33554432",
    ] {
        assert!(text.contains(line), "no '{line}' in: {text}");
    }
    let map = good("nbdinfo", &["--map", &rig.uri()]).unwrap();
    let lines: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    assert_eq!(lines, [["0", "1048576", "3"], ["1048576", "1048576", "0"], ["2097152", "65011712", "3"]]);
    let list = good("nbdinfo", &["--list", &rig.uri().replace("/disk?", "/?")]).unwrap();
    assert!(list.contains("export=\"disk\""), "{list}");
}

#[test]
fn nbdcopy_brings_data_in_and_out_unchanged() {
    let rig = Rig::new(64 << 20);
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("source"), dir.path().join("target"));
    let mut bytes = pattern(7, 64 << 20);
    bytes[10 << 20..20 << 20].fill(0);
    fs::write(&source, &bytes).unwrap();
    let uri = rig.uri();
    let copies = [(source.to_str().unwrap(), &uri[..]), (&uri[..], target.to_str().unwrap())];
    for (from, to) in copies {
        if good("nbdcopy", &["--connections=4", "--requests=64", "--flush", from, to]).is_none() {
            return;
        }
    }
    assert!(rig.image(0, 64 << 20) == bytes, "the image differs from the source");
    assert!(fs::read(&target).unwrap() == bytes, "the copy differs from the source");
    // Synchronous and in odd sizes.
    good("nbdcopy", &["--synchronous", "--request-size=2097152", &uri, target.to_str().unwrap()]).unwrap();
    assert!(fs::read(&target).unwrap() == bytes, "the synchronous copy differs");
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
}

#[test]
fn qemu_io_writes_reads_zeroes_and_trims() {
    let rig = Rig::new(64 << 20);
    let commands = [
        "write -P 0xab 1M 3M",
        "read -P 0xab 1M 3M",
        "write -f -P 0xcd 512 512",
        "read -P 0xcd 512 512",
        "write -z 2M 1M",
        "write -z -u 3M 512k",
        "read -P 0 2M 1536k",
        "discard 8M 8M",
        "flush",
        "aio_write -P 0x11 20M 16M",
        "aio_read -P 0x11 20M 16M",
        "aio_flush",
        "map",
    ];
    let uri = rig.uri();
    let mut args = vec!["-f", "raw", "-t", "none"];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(&uri);
    let Some(text) = good("qemu-io", &args) else { return };
    assert!(!text.contains("failed") && !text.contains("verification"), "{text}");
    assert!(rig.image(512, 512).iter().all(|byte| *byte == 0xcd));
    assert!(rig.image(20 << 20, 16 << 20).iter().all(|byte| *byte == 0x11));
    assert!(rig.image(2 << 20, 1536 << 10).iter().all(|byte| *byte == 0));
    // Byte-granular access is read-modify-write in QEMU, which keeps to the minimum block size.
    let text =
        good("qemu-io", &["-f", "raw", "-c", "write -P 0x77 1000 7", "-c", "read -P 0x77 1000 7", &uri]);
    assert!(!text.unwrap().contains("failed"));
    assert_eq!(rig.image(999, 9), [0xcd, 0x77, 0x77, 0x77, 0x77, 0x77, 0x77, 0x77, 0xcd]);
}

#[test]
fn qemu_img_compares_and_measures_nothing_different() {
    let rig = Rig::new(16 << 20);
    rig.client().write(1 << 20, &pattern(3, 2 << 20), false).unwrap();
    let Some(text) =
        good("qemu-img", &["compare", "-f", "raw", "-F", "raw", rig.path.to_str().unwrap(), &rig.uri()])
    else {
        return;
    };
    assert!(text.contains("Images are identical"), "{text}");
    let map = good("qemu-img", &["map", "--output=json", "-f", "raw", &rig.uri()]).unwrap();
    assert!(
        map.contains("\"start\": 1048576, \"length\": 2097152") && map.contains("\"zero\": true"),
        "{map}"
    );
}

#[test]
fn nbdsh_drives_every_call() {
    let rig = Rig::new(16 << 20);
    let script = r#"
h.set_strict_mode(0)
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.connect_uri(URI)
assert h.get_size() == 16 << 20 and h.get_structured_replies_negotiated()
assert h.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.pwrite(b"x" * 65536, 65536, nbd.CMD_FLAG_FUA)
assert h.pread(65536, 65536) == b"x" * 65536
chunks = []
def chunk(buf, offset, status, err): chunks.append((offset, len(buf), status))
h.pread_structured(4 << 20, 0, chunk)
assert sum(c[1] for c in chunks) == 4 << 20 and len(chunks) > 1, chunks
h.pread_structured(1 << 20, 0, lambda b, o, s, e: None, nbd.CMD_FLAG_DF)
h.trim(65536, 0); h.cache(65536, 0); h.flush()
h.zero(65536, 65536, nbd.CMD_FLAG_NO_HOLE)
assert h.pread(65536, 65536) == bytes(65536)
extents = []
h.block_status(16 << 20, 0, lambda ctx, off, e, err: extents.extend(e))
assert sum(extents[::2]) == 16 << 20, extents
for call in (lambda: h.pread(512, 16 << 20), lambda: h.pread(512, 1), lambda: h.pwrite(b"y" * 512, (16 << 20) - 256)):
    try: call(); raise SystemExit("not refused")
    except nbd.Error as error: assert error.errno in ("EINVAL", "ENOSPC"), error
for _ in range(1000): h.aio_pread(nbd.Buffer(4096), 0)
while h.aio_in_flight() > 0: h.poll(-1)
h.shutdown()
print("all is well")
"#
    .replace("URI", &format!("'{}'", rig.uri()));
    let Some((ok, text)) = tool("nbdsh", &["-c", &script]) else { return };
    assert!(ok && text.contains("all is well"), "{text}");
    rig.wait_connections(0);
}

#[test]
fn fio_verifies_what_it_wrote() {
    let rig = Rig::new(64 << 20);
    let dir = tempfile::tempdir().unwrap();
    let uri = format!("--uri=nbd+unix:///disk?socket={}", rig.socket.display());
    let Some(engines) = good("fio", &["--enghelp"]) else { return };
    if !engines.lines().any(|line| line.trim() == "nbd") {
        println!("skipped: needs fio with the nbd engine");
        return;
    }
    let state = format!("--aux-path={}", dir.path().display());
    let args = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        &state,
        "--rw=randwrite",
        "--bsrange=512-256k",
        "--bs_unaligned=0",
        "--blockalign=512",
        "--size=64m",
        "--iodepth=32",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--fsync=64",
        "--verify_state_save=0",
    ];
    let text = good("fio", &args).unwrap();
    assert!(text.contains("err= 0"), "{text}");
}

#[test]
fn a_killed_client_is_forgotten() {
    let rig = Rig::new(64 << 20);
    let script = format!("h.connect_uri('{}')\nwhile True: h.pread(1 << 20, 0)", rig.uri());
    if !installed("nbdsh") {
        return;
    }
    let mut child = Command::new("nbdsh")
        .args(["-c", &script])
        .env("PATH", search_path())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    wait_until(|| rig.server.connections().iter().any(|info| info.requests > 10), "the client to read");
    child.kill().unwrap();
    child.wait().unwrap();
    rig.wait_connections(0);
    assert_eq!(rig.pool_used(), 0);
}
