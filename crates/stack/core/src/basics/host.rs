//! This host: what the kernel tells of it.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};
use tapio_vm::{FIRMWARE_TEXTS, firmware_text_is_plain};

use crate::call::HandlersOf;
use crate::dates;
use crate::db::Db;
use crate::pool::version::Version;

/// Version of the interface that clients ask for.
const API_VERSION: (i64, i64) = (2, 21);

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn hostname() -> String {
    let name = read("/proc/sys/kernel/hostname");
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

/// Bytes of a line of `/proc/meminfo`.
fn memory(name: &str) -> i64 {
    let text = read("/proc/meminfo");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib: Option<i64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.unwrap_or_default().saturating_mul(1024)
}

/// The memory of this host, in bytes.
pub fn total_memory() -> u64 {
    u64::try_from(memory("MemTotal")).unwrap_or(0)
}

/// The memory of this host that is free or could be, in bytes.
pub fn available_memory() -> u64 {
    u64::try_from(memory("MemAvailable")).unwrap_or(0)
}

/// Blocks of `/proc/cpuinfo`, one a processor.
fn processors() -> Vec<BTreeMap<String, String>> {
    let text = read("/proc/cpuinfo");
    let block = |block: &str| {
        let pairs = block.lines().filter_map(|line| line.split_once(':'));
        pairs.map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned())).collect::<BTreeMap<_, _>>()
    };
    text.split("\n\n").map(block).filter(|pairs| pairs.contains_key("processor")).collect()
}

fn cpu_info(processors: &[BTreeMap<String, String>]) -> Value {
    let first = processors.first().cloned().unwrap_or_default();
    let of = |key: &str| first.get(key).cloned().unwrap_or_default();
    let sockets = processors.iter().filter_map(|pairs| pairs.get("physical id"));
    let sockets = sockets.collect::<std::collections::BTreeSet<_>>().len().max(1);
    Value::string_map([
        ("cpu_count", processors.len().to_string()),
        ("socket_count", sockets.to_string()),
        ("vendor", of("vendor_id")),
        ("speed", of("cpu MHz")),
        ("modelname", of("model name")),
        ("family", of("cpu family")),
        ("model", of("model")),
        ("stepping", of("stepping")),
        ("flags", of("flags")),
        ("features", String::new()),
    ])
}

/// What this host's firmware says of it, as far as this process may read it.
fn firmware_texts() -> Value {
    let of = |file: &str| read(&format!("/sys/class/dmi/id/{file}")).trim().to_owned();
    let all = FIRMWARE_TEXTS.iter().filter(|known| !known.file.is_empty());
    let all = all.map(|known| (known.key, of(known.file)));
    Value::string_map(all.filter(|(_, text)| !text.is_empty() && firmware_text_is_plain(text)))
}

fn software() -> Value {
    let kernel = read("/proc/sys/kernel/osrelease").trim().to_owned();
    Value::string_map([
        ("product_brand", "Tapio".to_owned()),
        ("product_name", "tapio".to_owned()),
        ("product_version", Version::own().to_string()),
        ("product_version_text", Version::own().to_string()),
        ("platform_name", "Linux".to_owned()),
        ("platform_version", kernel.clone()),
        ("linux", kernel),
        ("xapi", format!("{}.{}", API_VERSION.0, API_VERSION.1)),
    ])
}

/// Makes the record of this host, or brings it up to date. Answers its reference.
pub(crate) fn make_record(db: &Db) -> Result<String, ApiError> {
    let processors = processors();
    let known = match db.own_host() {
        Some(own) => db.get("host", own).into_iter().collect(),
        None => db.all("host"),
    };
    let uuid = db.own_host().and_then(|own| own.strip_prefix("OpaqueRef:")).unwrap_or_default();
    let address = super::network::address().unwrap_or_else(|| "127.0.0.1".to_owned());
    let number = |pairs: &BTreeMap<String, String>, key: &str| {
        Value::Int(pairs.get(key).and_then(|text| text.split('.').next()?.parse().ok()).unwrap_or_default())
    };
    db.change(|change| {
        let host = match known.first() {
            Some(host) => host.reference.clone(),
            None => {
                let name = hostname();
                let fields =
                    [("uuid", uuid.into()), ("name_label", name.as_str().into()), ("hostname", name.into())];
                change.create("host", &fields)?
            }
        };
        let metrics = match change.get("host", &host)?.text("metrics") {
            known if change.get("host_metrics", known).is_ok() => known.to_owned(),
            _ => change.create("host_metrics", &[])?,
        };
        let mut set = |field: &str, value: Value| change.set("host", &host, field, value);
        set("API_version_major", Value::Int(API_VERSION.0))?;
        set("API_version_minor", Value::Int(API_VERSION.1))?;
        set("API_version_vendor", "Tapio".into())?;
        set("software_version", software())?;
        set("cpu_info", cpu_info(&processors))?;
        set("bios_strings", firmware_texts())?;
        set("capabilities", Value::strings([format!("linux-{}", std::env::consts::ARCH)]))?;
        set("address", address.into())?;
        set("metrics", metrics.as_str().into())?;
        set("edition", "free".into())?;
        set(
            "allowed_operations",
            Value::strings(["provision", "vm_start", "evacuate", "shutdown", "reboot"]),
        )?;
        enable_after_boot(change, &host)?;
        note_times(change, &host)?;
        measure(change, &metrics)?;
        make_processors(change, &host, &processors, number)?;
        Ok(host)
    })
}

/// When this host booted, in seconds since 1970.
fn boot_time() -> Option<i64> {
    read("/proc/stat").lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
}

/// A host that was disabled to be shut down or rebooted lets VMs start when it is back.
fn enable_after_boot(change: &mut crate::db::Change<'_>, host: &str) -> Result<(), ApiError> {
    /// The kernel computes the time of its boot from the clock, which may be set.
    const JITTER: u64 = 60;
    let config = change.get("host", host)?.map("other_config");
    let before = config.get("boot_time").and_then(|text| text.trim_end_matches('.').parse::<i64>().ok());
    match (before, boot_time()) {
        (Some(before), Some(now)) if now.abs_diff(before) > JITTER => {
            change.set("host", host, "enabled", true)
        }
        _ => Ok(()),
    }
}

/// Notes in `other_config` since when the host and its toolstack run, as XenServer does: products show it.
fn note_times(change: &mut crate::db::Change<'_>, host: &str) -> Result<(), ApiError> {
    let mut config = change.get("host", host)?.map("other_config");
    let times = [("agent_start_time", Some(dates::now())), ("boot_time", boot_time())];
    for (key, seconds) in times {
        if let Some(seconds) = seconds {
            // A number with a fraction, which is none: `1700000000.`.
            config.insert(key.to_owned(), format!("{seconds}."));
        }
    }
    change.set("host", host, "other_config", Value::string_map(config))
}

fn measure(change: &mut crate::db::Change<'_>, metrics: &str) -> Result<(), ApiError> {
    for (field, value) in [
        ("memory_total", Value::Int(memory("MemTotal"))),
        ("memory_free", Value::Int(memory("MemAvailable"))),
        ("live", true.into()),
        ("last_updated", Value::DateTime(dates::now())),
    ] {
        change.set("host_metrics", metrics, field, value)?;
    }
    Ok(())
}

/// One record a processor; their references last as long as their number does.
fn make_processors(
    change: &mut crate::db::Change<'_>,
    host: &str,
    processors: &[BTreeMap<String, String>],
    number: impl Fn(&BTreeMap<String, String>, &str) -> Value,
) -> Result<(), ApiError> {
    let mut known: BTreeMap<i64, String> = change
        .find("host_cpu", "host", host)
        .iter()
        .map(|cpu| (cpu.int("number"), cpu.reference.clone()))
        .collect();
    for pairs in processors {
        let Value::Int(at) = number(pairs, "processor") else { continue };
        let cpu = match known.remove(&at) {
            Some(cpu) => cpu,
            None => change.create("host_cpu", &[("host", host.into()), ("number", Value::Int(at))])?,
        };
        let text = |key: &str| Value::string(pairs.get(key).cloned().unwrap_or_default());
        for (field, value) in [
            ("vendor", text("vendor_id")),
            ("speed", number(pairs, "cpu MHz")),
            ("modelname", text("model name")),
            ("family", number(pairs, "cpu family")),
            ("model", number(pairs, "model")),
            ("stepping", text("stepping")),
            ("flags", text("flags")),
        ] {
            change.set("host_cpu", &cpu, field, value)?;
        }
    }
    for gone in known.values() {
        change.destroy("host_cpu", gone)?;
    }
    Ok(())
}

/// Seconds east of Greenwich now.
fn offset() -> i64 {
    let now: libc::time_t = dates::now();
    // SAFETY: an all-zero `tm` is a valid value of that plain structure.
    let mut local: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live values of the right types; `localtime_r` keeps neither.
    let filled = unsafe { libc::localtime_r(&raw const now, &raw mut local) };
    if filled.is_null() { 0 } else { local.tm_gmtoff }
}

/// Registers the messages of hosts.
pub(crate) fn register(handlers: &mut HandlersOf<'_, Db>) {
    handlers.on("host.get_servertime", |call, args| {
        call.part.get("host", args.text(0)?)?;
        Ok(Value::DateTime(dates::now()))
    });
    handlers.on("host.get_server_localtime", |call, args| {
        call.part.get("host", args.text(0)?)?;
        Ok(Value::DateTime(dates::now().saturating_add(offset())))
    });
    handlers.on("host.compute_free_memory", |call, args| {
        let metrics = call.part.get("host", args.text(0)?)?.text("metrics").to_owned();
        call.part.change(|change| measure(change, &metrics))?;
        Ok(Value::Int(memory("MemAvailable")))
    });
    handlers.on("host.compute_memory_overhead", |call, args| {
        Ok(Value::Int(call.part.get("host", args.text(0)?)?.int("memory_overhead")))
    });
    handlers.on("host.is_in_emergency_mode", |_, _| Ok(false.into()));
    // A change is in the store before its call returns.
    handlers.on("pool.sync_database", |_, _| Ok(Value::Void));
    handlers.on("host.enable", |call, args| {
        call.part.set("host", args.text(0)?, "enabled", true)?;
        Ok(Value::Void)
    });
    handlers.on("host.disable", |call, args| {
        call.part.set("host", args.text(0)?, "enabled", false)?;
        Ok(Value::Void)
    });
}
