//! Histories of what is measured: read over HTTP while a disk is under load, by `rrdtool`, by `xe`, and after kills.

use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};
use tapio_e2e::disk::text;
use tapio_e2e::left_behind::left_behind;
use tapio_e2e::needs;
use tapio_e2e::process::{poll_until, run, signal};
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::skip;
use tapio_e2e::toolstack::{DaemonOptions, Session};
use tapio_e2e::world::World;

/// What is waited for may take as long on a busy host.
const LIMIT: Duration = Duration::from_secs(60);

/// Status and body of a GET over the UNIX socket, as root.
fn get(world: &World, path: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(&world.daemon().socket).expect("it serves");
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").expect("sent");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("an answer");
    let answer = String::from_utf8(bytes).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("head and body");
    (head.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a status"), body.to_owned())
}

fn parsed(world: &World, path: &str) -> Value {
    let (status, body) = get(world, path);
    assert_eq!(status, 200, "{path}: {body}");
    serde_json::from_str(&body).unwrap_or_else(|error| panic!("{path}: {error}: {body}"))
}

/// Figures of a column, those that are known, the newest first, with the ends of their rows.
fn column(updates: &Value, name: &str) -> Vec<(u64, f64)> {
    let legend = updates["meta"]["legend"].as_array().expect("a legend");
    let Some(at) = legend.iter().position(|entry| entry == name) else { return Vec::new() };
    let rows = updates["data"].as_array().expect("rows").iter();
    rows.filter_map(|row| Some((row["t"].as_u64()?, row["values"][at].as_f64()?))).collect()
}

/// A disk of the host's own VM, and a thread that writes to it.
struct Loaded {
    vbd: String,
    vm: String,
    device: String,
    is_over: Arc<AtomicBool>,
    writer: JoinHandle<()>,
}

impl Loaded {
    /// None: this host has no local devices.
    fn start(session: &Session) -> Option<Self> {
        let vms = session.call("VM.get_all_records", &[]);
        let is_host = |record: &Value| record["is_control_domain"] == true;
        let (vm, record) = vms
            .as_object()
            .expect("records")
            .iter()
            .find(|(_, record)| is_host(record))
            .expect("the host's VM");
        let srs = session.call("SR.get_all", &[]);
        let srs = srs.as_array().expect("SRs").iter().filter_map(Value::as_str);
        let mut files = srs.filter(|sr| session.text("SR.get_type", &[json!(sr)]) == "file");
        let vdi = json!({
            "name_label": "loaded", "name_description": "", "SR": files.next().expect("an SR"), "virtual_size": 8 << 20,
            "type": "user", "sharable": false, "read_only": false, "other_config": {},
        });
        let vdi = session.text("VDI.create", &[vdi]);
        let vbd = json!({"VM": vm, "VDI": vdi, "userdevice": "autodetect", "mode": "RW", "type": "Disk"});
        let vbd = session.text("VBD.create", &[vbd]);
        if let Err(error) = session.try_call("VBD.plug", &[json!(vbd)]) {
            skip(&format!("needs a local device by FUSE: {error:?}"));
            return None;
        }
        let device = session.text("VBD.get_device", &[json!(vbd)]);
        let path = PathBuf::from("/dev").join(&device);
        let is_over = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&is_over);
        let writer = std::thread::spawn(move || {
            let mut file = std::fs::File::options().write(true).open(path).expect("the device");
            for byte in 0..=u8::MAX {
                if flag.load(Ordering::Relaxed) {
                    break;
                }
                file.seek(SeekFrom::Start(0))
                    .and_then(|_| file.write_all(&[byte; 1 << 20]))
                    .expect("written");
                file.sync_all().expect("durable");
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let vm = record["uuid"].as_str().expect("a UUID").to_owned();
        Some(Self { vbd, vm, device, is_over, writer })
    }

    fn end(self, session: &Session) {
        self.is_over.store(true, Ordering::Relaxed);
        self.writer.join().expect("every write worked");
        session.call("VBD.unplug", &[json!(self.vbd)]);
    }
}

fn world() -> World {
    World::with(|options| options.env("TAPIO_SAMPLE_S", "1").env("TAPIO_HISTORY_SAVE_S", "1"))
}

/// The document with names that are short enough for `rrdtool` (19 characters), which XenServer's are not either, and
/// the short name of one source.
fn shortened(xml: &str, source: &str) -> (String, String) {
    let (mut short, mut found) = (String::new(), String::new());
    for (number, part) in xml.split("<name>").enumerate() {
        let Some((name, rest)) = part.split_once("</name>").filter(|_| number > 0) else {
            short.push_str(part);
            continue;
        };
        short.push_str(&format!("<name>source{number}</name>{rest}"));
        if name == source {
            found = format!("source{number}");
        }
    }
    (short, found)
}

/// `rrdtool` reads the document and has the same rows.
fn restored(world: &World, xml: &str, source: &str, rows: &[(u64, f64)]) {
    let (dump, rrd) = (world.scratch.join("dump.xml"), world.scratch.join("dump.rrd"));
    let (xml, short) = shortened(xml, source);
    std::fs::write(&dump, xml).expect("room");
    run(Command::new("rrdtool").args(["restore", "-f", text(&dump), text(&rrd)])).ok();
    let (newest, oldest) = (rows.first().expect("rows").0, rows.last().expect("rows").0);
    let fetched = run(Command::new("rrdtool").args([
        "fetch",
        text(&rrd),
        "AVERAGE",
        "-s",
        &(oldest - 1).to_string(),
        "-e",
        &newest.to_string(),
    ]))
    .ok();
    let mut lines = fetched.lines();
    let names: Vec<&str> = lines.next().expect("names").split_whitespace().collect();
    let at = names.iter().position(|name| *name == short).unwrap_or_else(|| panic!("{source}: {names:?}"));
    let found: Vec<(u64, f64)> = lines
        .filter_map(|line| {
            let (time, values) = line.split_once(": ")?;
            Some((time.parse().ok()?, values.split_whitespace().nth(at)?.parse().ok()?))
        })
        .collect();
    for (time, value) in rows {
        let same = |(at, found): &(u64, f64)| at == time && (found - value).abs() <= value.abs() * 1e-6;
        assert!(found.iter().any(same), "{source} at {time} is {value}, not in {found:?}");
    }
}

/// The options of the requests, and what is refused.
fn options(world: &World, loaded: &Loaded) {
    let latest = |more: &str| parsed(world, &format!("/rrd_updates?json=true&start=-5{more}"));
    let all = latest("&host=true&sr_uuid=all&vm_uuid=all");
    let legend = all["meta"]["legend"].to_string();
    for part in
        ["\"AVERAGE:host:", "\"AVERAGE:sr:", &format!("\"AVERAGE:vm:{}:", loaded.vm), ":pool_task_count\""]
    {
        assert!(legend.contains(part), "{part}: {legend}");
    }
    let none = latest("&vm_uuid=none");
    assert_eq!(none["meta"]["columns"], 0, "{none}");
    let name = |function: &str| format!("{function}:vm:{}:vbd_{}_inflight", loaded.vm, loaded.device);
    for function in ["MIN", "MAX", "LAST"] {
        let one = latest(&format!("&cf={function}&vm_uuid={}", loaded.vm));
        assert!(!column(&one, &name(function)).is_empty(), "rows of one step are all functions: {one}");
    }
    let (status, minutes) = get(world, &format!("/rrd_updates?start=0&interval=60&vm_uuid={}", loaded.vm));
    assert!(status == 200 && minutes.starts_with("<xport><meta><start>"), "{minutes}");
    for (path, code) in [
        ("/rrd_updates?cf=MEAN", "INVALID_VALUE"),
        ("/rrd_updates?start=yesterday", "INVALID_VALUE"),
        ("/rrd_updates?vm_uuid=x", "UUID_INVALID"),
        ("/vm_rrd?uuid=00000000-0000-0000-0000-000000000001", "UUID_INVALID"),
        ("/sr_rrd", "UUID_INVALID"),
        ("/host_rrd?session_id=OpaqueRef:none", "SESSION_INVALID"),
    ] {
        let (status, body) = get(world, path);
        assert!(status >= 400 && body.contains(code), "{path}: {status} {body}");
    }
}

/// `xe` and the messages behind it.
fn data_sources(world: &World, loaded: &Loaded) {
    let xe = |args: &[&str]| run(world.xe().args(args));
    let vm = format!("uuid={}", loaded.vm);
    let listed = xe(&["vm-data-source-list", &vm]).ok();
    let name = format!("vbd_{}_write", loaded.device);
    assert!(listed.contains(&format!(": {name}\n")) && listed.contains("units: B/s\n"), "{listed}");
    let source = format!("data-source={name}");
    let query = || xe(&["vm-data-source-query", &vm, &source]);
    let rate: f64 = query().ok().trim().parse().expect("a number");
    assert!(rate >= 0.0 || rate.is_nan(), "{rate}");
    xe(&["vm-data-source-forget", &vm, &source]).ok();
    let gone = query().fails();
    assert!(gone.contains(&name), "{gone}");
    let listed = xe(&["vm-data-source-list", &vm]).ok();
    let own = listed.split("\n\n").find(|record| record.contains(&format!(": {name}\n")));
    assert!(own.is_some_and(|own| own.contains("enabled: false\n")), "{listed}");
    xe(&["vm-data-source-record", &vm, &source]).ok();
    assert!(poll_until(LIMIT, || query().status.success().then_some(())).is_some(), "it is recorded again");
    let sr = xe(&["sr-list", "type=file", "--minimal"]).ok();
    let sr = format!("uuid={}", sr.trim());
    let size: f64 =
        xe(&["sr-data-source-query", &sr, "data-source=size"]).ok().trim().parse().expect("a number");
    assert!(size > 0.0);
    assert!(xe(&["sr-data-source-list", &sr]).ok().contains("physical_utilisation"));
    assert!(xe(&["host-data-source-list"]).ok().contains("memory_free_kib"));
    let unknown = xe(&["host-data-source-query", "data-source=nothing"]).fails();
    assert!(unknown.contains("nothing"), "{unknown}");
}

/// What rows add up to is what the disk counted.
fn amounts(world: &World, loaded: &Loaded) {
    let path = format!("/rrd_updates?json=true&start=-110&vm_uuid={}", loaded.vm);
    let name = |key: &str| format!("AVERAGE:vm:{}:vbd_{}_{key}", loaded.vm, loaded.device);
    let updates = parsed(world, &path);
    let sum = |key: &str| column(&updates, &name(key)).iter().map(|(_, rate)| rate).sum::<f64>();
    let metrics = get(world, "/metrics").1;
    let counted = |family: &str| -> f64 {
        let is_it = |line: &&str| line.starts_with(family) && line.contains("kind=\"write\"");
        let line = metrics.lines().find(is_it).unwrap_or_else(|| panic!("{family}: {metrics}"));
        line.rsplit(' ').next().and_then(|number| number.parse().ok()).expect("a number")
    };
    let (bytes, requests) = (sum("write"), sum("iops_write"));
    assert!(bytes >= 2e6 && bytes <= counted("tapio_vbd_bytes_total{"), "{bytes} {metrics}");
    assert!(requests >= 2.0 && requests <= counted("tapio_vbd_requests_total{"), "{requests} {metrics}");
    let mib = sum("io_throughput_write") * f64::from(1 << 20);
    assert!((mib - bytes).abs() <= bytes / 2.0, "{mib} {bytes}");
    assert!(sum("write_latency") > 0.0);
}

/// Samples are taken while no disk process runs.
fn goes_on_beside_a_disk_that_hangs(world: &World) {
    let newest = || {
        let updates = parsed(world, "/rrd_updates?json=true&start=-30&host=true&vm_uuid=none");
        let legend = updates["meta"]["legend"].as_array().expect("a legend");
        let load = legend.iter().filter_map(Value::as_str).find(|name| name.ends_with(":loadavg"));
        load.and_then(|name| column(&updates, name).first().map(|(time, _)| *time))
    };
    let disks = left_behind(world.scratch.path(), world.daemon().process.pid());
    assert!(!disks.is_empty());
    let all = |kind| disks.iter().for_each(|pid| signal(*pid, kind).expect("it is there"));
    all(libc::SIGSTOP);
    let begin = newest().expect("rows");
    let went_on = poll_until(LIMIT, || newest().filter(|time| *time >= begin + 2));
    all(libc::SIGCONT);
    assert!(went_on.is_some(), "no sample while a disk hangs");
}

/// Messages of thresholds: of an SR, of a disk by the pool's settings.
fn alarms(session: &Session) {
    let messages = |class: &str| -> Vec<String> {
        let all = session.call("message.get_all_records", &[]);
        let all = all.as_object().expect("records").values();
        let is_one = |record: &&Value| record["name"] == "ALARM" && record["cls"] == class;
        all.filter(is_one).map(|record| record["body"].as_str().expect("a body").to_owned()).collect()
    };
    let found = poll_until(LIMIT, || {
        let (srs, vms) = (messages("SR"), messages("VM"));
        (!srs.is_empty() && !vms.is_empty()).then_some((srs, vms))
    });
    let (srs, vms) = found.expect("messages");
    assert!(
        srs[0].starts_with("value: ") && srs[0].contains("<name value=\"physical_utilisation\"/>"),
        "{srs:?}"
    );
    assert!(
        vms[0].contains("_latency\"/>") && vms[0].contains("<alarm_trigger_level value=\"0\"/>"),
        "{vms:?}"
    );
}

fn thresholds(session: &Session) {
    let document = |name: &str| {
        format!(
            "<config><variable><name value=\"{name}\"/><alarm_trigger_level value=\"0\"/></variable></config>"
        )
    };
    let pool = session.call("pool.get_all", &[])[0].clone();
    session.call("pool.add_to_other_config", &[pool, json!("perfmon"), json!(document("latency"))]);
    for sr in session.call("SR.get_all", &[]).as_array().expect("SRs") {
        session.call(
            "SR.add_to_other_config",
            &[sr.clone(), json!("perfmon"), json!(document("physical_utilisation"))],
        );
    }
}

#[test]
fn what_a_disk_does_is_recorded_and_outlives_the_daemon() {
    needs!("rrdtool");
    let mut world = world();
    world.daemon().add_user("carol", "read-only", "correct horse");
    let session = world.daemon().login();
    thresholds(&session);
    let Some(loaded) = Loaded::start(&session) else { return };
    let written = format!("AVERAGE:vm:{}:vbd_{}_write", loaded.vm, loaded.device);
    let path = format!("/rrd_updates?json=true&start=-110&vm_uuid={}", loaded.vm);
    let busy = || {
        let rows = column(&parsed(&world, &path), &written);
        (rows.iter().filter(|(_, rate)| *rate > 0.0).count() >= 3).then_some(rows)
    };
    let rows = poll_until(LIMIT, busy).expect("three seconds of writes");
    assert!(rows.iter().all(|(_, rate)| *rate < 1e12), "{rows:?}");
    let (status, xml) = get(&world, &format!("/vm_rrd?uuid={}", loaded.vm));
    assert_eq!(status, 200, "{xml}");
    restored(&world, &xml, &format!("vbd_{}_write", loaded.device), &rows);
    let whole = parsed(&world, &format!("/vm_rrd?json=true&uuid={}", loaded.vm));
    assert_eq!((&whole["step"], &whole["version"]), (&json!(1), &json!("0003")));
    for path in ["/host_rrd".to_owned(), format!("/sr_rrd?uuid={}", sr_uuid(&session))] {
        let (status, xml) = get(&world, &path);
        assert!(status == 200 && xml.contains("<lastupdate>"), "{path}: {xml}");
    }
    options(&world, &loaded);
    amounts(&world, &loaded);
    goes_on_beside_a_disk_that_hangs(&world);
    // A reader may look, and change nothing.
    let reader = world.daemon().login_as("carol", "correct horse");
    let (_, updates) = get(&world, &format!("/rrd_updates?start=-5&session_id={}", reader.reference));
    assert!(updates.starts_with("<xport>"), "{updates}");
    let vm = json!(session.text("VM.get_by_uuid", &[json!(loaded.vm)]));
    let source = json!(format!("vbd_{}_read", loaded.device));
    let refused = reader.fails("VM.forget_data_source_archives", &[vm.clone(), source.clone()]);
    assert_eq!(refused[0], "RBAC_PERMISSION_DENIED");
    reader.call("VM.query_data_source", &[vm, source]);
    alarms(&session);
    let metrics = get(&world, "/metrics").1;
    for name in ["tapio_vbd_mirror_broken{", "tapio_host_memory_free_bytes ", "tapio_history_sources "] {
        assert!(metrics.contains(&format!("\n{name}")), "{name}: {metrics}");
    }

    // The disk goes on while the daemon is killed; its rows before are there again, and those after have no leap.
    let file = world.scratch.join(&format!("state/history/vm-{}.rrd", loaded.vm));
    let (newest, _) = rows[0];
    poll_until(LIMIT, || {
        let age = file.metadata().and_then(|meta| meta.modified()).ok()?;
        let since = age.duration_since(std::time::UNIX_EPOCH).ok()?;
        (since.as_secs() > newest + 1).then_some(())
    })
    .expect("it is written");
    world.kill_and_restart();
    let again = poll_until(LIMIT, || {
        let again = column(&parsed(&world, &path), &written);
        again.first().is_some_and(|(time, _)| *time > newest + 3).then_some(again)
    });
    let again = again.expect("it goes on");
    assert!(rows.iter().any(|row| again.contains(row)), "{rows:?} {again:?}");
    assert!(again.iter().all(|(_, rate)| *rate < 1e9), "{again:?}");
    let session = world.daemon().login();
    data_sources(&world, &loaded);
    loaded.end(&session);
    world.finish();
}

fn sr_uuid(session: &Session) -> String {
    let sr = session.call("SR.get_all", &[])[0].clone();
    session.text("SR.get_uuid", &[sr])
}

#[test]
fn a_damaged_file_is_put_aside_with_one_line_and_the_history_begins_anew() {
    let mut world = world();
    let file = world.scratch.join("state/history/host.rrd");
    let size = || file.metadata().map(|meta| meta.len()).ok().filter(|len| *len > 0);
    poll_until(LIMIT, size).expect("it is written");
    let pid = i32::try_from(world.daemon().process.pid()).expect("a pid");
    signal(pid, libc::SIGSTOP).expect("it stops, and writes no more");
    let mut bytes = std::fs::read(&file).expect("the file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, &bytes).expect("room");
    world.kill_and_restart();
    poll_until(LIMIT, || {
        let whole = parsed(&world, "/host_rrd?json=true");
        whole["ds"].as_array().is_some_and(|sources| !sources.is_empty()).then_some(())
    })
    .expect("it begins anew");
    let log = world.daemon().process.log();
    let told = log.lines().filter(|line| line.contains("host.rrd")).collect::<Vec<_>>();
    assert!(told.len() == 1 && told[0].contains("its checksum is wrong"), "{told:?}");
    assert_eq!(std::fs::read(file.with_extension("damaged")).expect("it is kept"), bytes);
    world.finish();
}

#[test]
fn what_was_measured_last_is_written_when_the_daemon_ends() {
    let scratch = Scratch::on_disk();
    // The next interval is minutes away.
    let options = DaemonOptions::new(&scratch).env("TAPIO_SAMPLE_S", "1");
    let daemon = options.start();
    let session = daemon.login();
    let host = session.call("host.get_all", &[])[0].clone();
    let value = |session: &Session| {
        session.try_call("host.query_data_source", &[host.clone(), json!("memory_total_kib")]).ok()?.as_f64()
    };
    let before = poll_until(LIMIT, || value(&session)).expect("a figure");
    daemon.stop();
    let file = scratch.join("state/history/host.rrd");
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&file.metadata().expect("it is written").permissions());
    assert_eq!(mode & 0o077, 0, "others cannot read it");
    let daemon = options.start();
    let session = daemon.login();
    assert_eq!(poll_until(LIMIT, || value(&session)), Some(before));
    daemon.stop();
}
