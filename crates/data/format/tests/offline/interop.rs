//! Our images in the hands of others, and theirs in ours.

use std::path::Path;
use std::process::{Command, Output};

use tapio_format::vhd::offline::{
    Chain, CheckOptions, Finding, Image, OpenOptions, Severity, Shape, SnapshotOptions, check_path, create,
    snapshot,
};
use tapio_format::vhd::{DiskType, SECTOR_LEN};

use crate::build::{Model, Random, contents, scribble};

const MIB: u64 = 1 << 20;

/// What a tool said; `None` where it is not there.
fn run(name: &str, arguments: &[&str]) -> Option<Output> {
    // `timeout` answers 127 for a command that is not there.
    let output = Command::new("timeout").arg("60").arg(name).args(arguments).output().ok()?;
    (output.status.code() != Some(127)).then_some(output)
}

/// As [`run`], and a line that says that it is not there.
fn tool(name: &str, arguments: &[&str]) -> Option<Output> {
    let output = run(name, arguments);
    if output.is_none() {
        println!("skipped: needs {name}");
    }
    output
}

#[must_use]
fn succeeds(name: &str, arguments: &[&str]) -> bool {
    let Some(output) = tool(name, arguments) else { return false };
    assert!(
        output.status.success(),
        "{name} {arguments:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    true
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn write_some(path: &Path, model: &mut Model, seed: u64) {
    let mut image = Image::open(path, OpenOptions::WRITE).unwrap();
    scribble(&mut image, model, &mut Random(seed), 12);
}

/// Random runs of eight sectors, each a whole byte of a bitmap: what libvhdi reads rightly in a chain
/// (`docs/original-tools.md`).
fn write_eights(path: &Path, model: &mut Model, seed: u64) {
    const EIGHT: u64 = 8 * SECTOR_LEN;
    let mut image = Image::open(path, OpenOptions::WRITE).unwrap();
    let (mut random, pieces) = (Random(seed), image.virtual_len() / EIGHT);
    for _ in 0..12 {
        let first = random.below(pieces);
        let data =
            vec![random.next() as u8 | 1; ((1 + random.below(5.min(pieces - first))) * EIGHT) as usize];
        image.write_at(first * EIGHT, &data).unwrap();
        model.write(first * EIGHT, &data);
    }
    image.commit().unwrap();
}

/// Valid, but for the largest geometry, by which QEMU says that the size alone counts: XenServer's check refuses that,
/// and so ours, and both serve such an image.
fn assert_valid(path: &Path) {
    let options = CheckOptions { parents: true, bitmaps: true, ..Default::default() };
    for report in check_path(path, &options).unwrap() {
        let tolerated = |finding: &Finding| {
            finding.severity == Severity::Warning
                || finding
                    .sentence
                    .contains("footer invalid: geometry too large: it counts 136899993600 bytes")
        };
        assert!(report.findings.iter().all(tolerated), "{report:?}");
    }
}

#[test]
fn qemu_reads_what_we_write() {
    let dir = tempfile::tempdir().unwrap();
    for (name, shape) in [("fixed", Shape::Fixed), ("dynamic", Shape::Dynamic)] {
        let path = dir.path().join(name);
        create(&path, &shape, 16 * MIB, if name == "dynamic" { 1 << 40 } else { 0 }).unwrap();
        let mut model = Model::new(16 * MIB);
        write_some(&path, &mut model, 7);
        let raw = dir.path().join("raw");
        std::fs::write(&raw, &model.bytes).unwrap();
        if !succeeds("qemu-img", &["compare", "-f", "vpc", "-F", "raw", text(&path), text(&raw)]) {
            return;
        }
        let output = tool("qemu-img", &["info", "--output=json", "-f", "vpc", text(&path)]).unwrap();
        let info = String::from_utf8_lossy(&output.stdout).replace(' ', "");
        assert!(info.contains("\"virtual-size\":16777216"), "{info}");
    }
}

#[test]
fn we_read_and_write_what_qemu_makes() {
    let dir = tempfile::tempdir().unwrap();
    for options in ["force_size=on", "force_size=off", "subformat=fixed,force_size=on"] {
        let path = dir.path().join("q.vhd");
        let _ = std::fs::remove_file(&path);
        if !succeeds("qemu-img", &["create", "-q", "-f", "vpc", "-o", options, text(&path), "16M"]) {
            return;
        }
        if !succeeds(
            "qemu-io",
            &[
                "-f",
                "vpc",
                "-c",
                "write -P 17 3M 70k",
                "-c",
                "write -P 33 15M 1k",
                "-c",
                "write -P 9 512 512",
                text(&path),
            ],
        ) {
            return;
        }
        assert_valid(&path);
        let chain = Chain::open(&path).unwrap();
        let mut model = Model::new(chain.virtual_len());
        model.write(3 * MIB, &[17; 70 << 10]);
        model.write(15 * MIB, &[33; 1024]);
        model.write(512, &[9; 512]);
        assert!(contents(&chain) == model.bytes, "{options}");
        write_some(&path, &mut model, 11);
        assert_valid(&path);
        let raw = dir.path().join("raw");
        std::fs::write(&raw, &model.bytes).unwrap();
        // QEMU counts a disk by its geometry where its own creator did not force the size.
        assert!(succeeds("qemu-img", &["compare", "-f", "vpc", "-F", "raw", text(&path), text(&raw)]));
    }
}

#[test]
fn a_snapshot_of_what_qemu_made_reads_through_it() {
    let dir = tempfile::tempdir().unwrap();
    let [base, leaf] = ["q.vhd", "leaf.vhd"].map(|name| dir.path().join(name));
    if !succeeds("qemu-img", &["create", "-q", "-f", "vpc", "-o", "force_size=on", text(&base), "8M"])
        || !succeeds("qemu-io", &["-f", "vpc", "-c", "write -P 5 1M 1M", text(&base)])
    {
        return;
    }
    snapshot(&leaf, &base, &SnapshotOptions::default()).unwrap();
    let mut model = Model::new(8 * MIB);
    model.write(MIB, &[5; 1 << 20]);
    write_some(&leaf, &mut model, 1);
    assert_valid(&leaf);
    assert!(contents(&Chain::open(&leaf).unwrap()) == model.bytes);
}

#[test]
fn libvhdi_reads_our_chains() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a.vhd", "b.vhd", "c.vhd"].map(|name| dir.path().join(name));
    let mut model = Model::new(8 * MIB);
    create(&paths[0], &Shape::Dynamic, 8 * MIB, 0).unwrap();
    write_eights(&paths[0], &mut model, 1);
    for index in 1..3 {
        snapshot(&paths[index], &paths[index - 1], &SnapshotOptions::default()).unwrap();
        write_eights(&paths[index], &mut model, index as u64 + 1);
    }
    let raw = dir.path().join("raw");
    std::fs::write(&raw, &model.bytes).unwrap();
    let script = "\
import sys
try:
    import pyvhdi
except ImportError:
    sys.exit(127)
raw, names = sys.argv[1], sys.argv[2:]
files = []
for name in names:
    file = pyvhdi.file()
    file.open(name)
    if files:
        assert file.parent_identifier == files[-1].identifier, (file.parent_identifier, files[-1].identifier)
        file.set_parent(files[-1])
    files.append(file)
leaf, data = files[-1], open(raw, 'rb').read()
assert leaf.get_media_size() == len(data), leaf.get_media_size()
step = 1 << 20
for at in range(0, len(data), step):
    leaf.seek_offset(at, 0)
    assert leaf.read_buffer(step) == data[at:at + step], at
print('read', len(data))
";
    let mut arguments = vec!["-c", script, text(&raw)];
    arguments.extend(paths.iter().map(|path| text(path)));
    let Some(output) = run("/usr/bin/python3", &arguments) else {
        println!("skipped: needs Python's pyvhdi");
        return;
    };
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("read 8388608"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn vhdiinfo_sees_the_parent() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a.vhd", "b.vhd"].map(|name| dir.path().join(name));
    create(&a, &Shape::Dynamic, 8 * MIB, 0).unwrap();
    snapshot(&b, &a, &SnapshotOptions { keep_empty: true, ..Default::default() }).unwrap();
    let Some(output) = tool("vhdiinfo", &[text(&b)]) else { return };
    let said = String::from_utf8_lossy(&output.stdout);
    let parent = Image::open(&a, OpenOptions::READ).unwrap();
    assert_eq!(parent.footer().disk_type, DiskType::Dynamic);
    for wanted in ["Differential", "8.0 MiB", "a.vhd", &parent.footer().uuid.to_string()] {
        assert!(said.contains(wanted), "no '{wanted}' in {said}");
    }
}
