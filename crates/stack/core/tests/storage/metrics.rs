//! Figures of disks and SRs as programs read them.

use std::collections::BTreeMap;
use std::path::Path;

use super::live::{plug, unplug, write};
use super::rig::{MIB, Rig};

/// Figures by their name with labels; every line that is no comment is one, and no name comes twice.
fn figures(rig: &Rig) -> BTreeMap<String, f64> {
    let text = rig.text("host.export_metrics", Vec::new()).expect("the figures");
    assert!(text.ends_with('\n'));
    let mut figures = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with("# HELP ") && !line.starts_with("# TYPE ")) {
        let (name, value) = line.rsplit_once(' ').expect(line);
        let value = value.parse().unwrap_or_else(|_| panic!("{line}"));
        assert!(figures.insert(name.to_owned(), value).is_none(), "{name} twice");
    }
    figures
}

#[test]
fn figures_of_srs_are_those_of_their_records() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    rig.make_vdi(&sr, 4 * MIB);
    rig.call("SR.set_name_label", vec![sr.as_str().into(), "a \"quoted\" \\ name".into()]).expect("a name");
    let figures = figures(&rig);
    let record = rig.get("SR", &sr);
    let of = |name: &str| figures[&format!("{name}{{sr=\"{}\"}}", record.text("uuid"))];
    for (name, field) in [
        ("tapio_sr_size_bytes", "physical_size"),
        ("tapio_sr_used_bytes", "physical_utilisation"),
        ("tapio_sr_virtual_bytes", "virtual_allocation"),
    ] {
        assert_eq!(of(name), record.int(field) as f64, "{name}");
    }
    assert_eq!((of("tapio_sr_virtual_bytes"), of("tapio_sr_vdis")), ((4 * MIB) as f64, 1.0));
    let info = r#",name="a \"quoted\" \\ name",type="file"}"#;
    assert!(
        figures.keys().any(|name| name.starts_with("tapio_sr_info{") && name.ends_with(info)),
        "{figures:?}"
    );
    assert_eq!(figures[r#"tapio_tasks{status="pending"}"#], 0.0);
}

#[test]
fn sizes_of_an_sr_are_measured_without_a_call() {
    let rig = Rig::new();
    let sr = rig.make_sr("sr");
    let size = rig.get("SR", &sr).int("physical_size");
    rig.stack.db.set("SR", &sr, "physical_size", tapio_model::Value::Int(1)).expect("set");
    rig.stack.storage.measure_sizes();
    super::faulty::until("the size is that of the storage", || {
        rig.get("SR", &sr).int("physical_size") == size
    });
}

#[test]
fn figures_of_a_disk_are_what_it_did() {
    let rig = Rig::live();
    let sr = rig.make_sr("sr");
    let vdi = rig.make_vdi(&sr, 4 * MIB);
    let (vbd, device) = match plug(&rig, &vdi, "RW") {
        Ok(plugged) => plugged,
        Err(error) if !Path::new("/dev/fuse").exists() || !Path::new("/dev/loop-control").exists() => {
            println!("skipped: needs a local device by FUSE: {error} [storage::metrics]");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    write(&device, 0, b'a');
    let now = figures(&rig);
    let uuid = rig.get("VBD", &vbd).text("uuid").to_owned();
    let of = |name: &str, labels: &str| now[&format!("{name}{{vbd=\"{uuid}\"{labels}}}")];
    assert_eq!((of("tapio_vbd_up", ""), of("tapio_vbd_chain_images", "")), (1.0, 1.0));
    let info = |name: &&String| name.starts_with(&format!("tapio_vbd_info{{vbd=\"{uuid}\",vm=\""));
    let info = now.keys().find(info).expect("what it is");
    let device = device.file_name().expect("a name").to_string_lossy().into_owned();
    for (name, value) in [("device", device.as_str()), ("vdi", rig.vdi(&vdi).text("uuid"))] {
        assert!(info.contains(&format!(",{name}=\"{value}\"")), "{info}");
    }
    assert!(of("tapio_vbd_bytes_total", ",kind=\"write\"") >= MIB as f64);
    assert!(of("tapio_vbd_requests_total", ",kind=\"flush\"") >= 1.0, "it was synced");
    for kind in ["read", "write", "flush"] {
        let count = of("tapio_vbd_latency_seconds_count", &format!(",kind=\"{kind}\""));
        let buckets: Vec<f64> = ["0.000016384", "0.016777216", "17.179869184", "+Inf"]
            .map(|le| of("tapio_vbd_latency_seconds_bucket", &format!(",kind=\"{kind}\",le=\"{le}\"")))
            .into();
        assert!(buckets.is_sorted() && buckets.last() == Some(&count), "{kind}: {buckets:?} of {count}");
        assert_eq!(of("tapio_vbd_errors_total", &format!(",kind=\"{kind}\"")), 0.0);
        let sum = of("tapio_vbd_latency_seconds_sum", &format!(",kind=\"{kind}\""));
        assert_eq!(sum > 0.0, count > 0.0, "{kind}");
    }
    unplug(&rig, &vbd);
    let after = figures(&rig);
    assert!(!after.keys().any(|name| name.contains(&uuid)), "it is no disk any more: {after:?}");
}
