//! `tapio bench device` in a guest, which has device-mapper and LVM. The story is in `tests/guest/uml-bench.sh`.

use std::time::Duration;

use tapio_e2e::disk::DiskOptions;
use tapio_e2e::guest::Uml;
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;

const LIMIT: Duration = Duration::from_secs(1200);

fn setting(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.to_owned())
}

/// `TAPIO_BENCH_MIB`, `_DD` (MiB), `_SECONDS`, `_ROUNDS` are those of the benchmark; the picture goes to
/// `TAPIO_BENCH_SVG`.
#[test]
#[ignore = "minutes, and figures that a busy host changes: for docs/performance.md"]
fn a_benchmark_of_the_ways_to_a_device_runs_in_a_guest() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1], Uml::TOOLS[2], "lvm", "mkfs.ext4");
    let mib = setting("TAPIO_BENCH_MIB", "256");
    let device_mib = mib.parse::<u64>().expect("a number of MiB") * 5 / 4 + 64;
    let scratch = Scratch::on_disk();
    let sizes = [("a.raw", device_mib << 20), ("b.raw", 8 << 20)];
    let [disk, second] = sizes.map(|(name, len)| {
        DiskOptions::raw(&scratch.raw_image(name, len)).vhost_user().start(scratch.path())
    });
    let programs = our("tapiod").parent().expect("a program lies in a directory").display().to_string();
    let guest =
        Uml::new("device_bench", &disk.vhost).disk(&second.vhost).with("bin", &programs).with("mib", &mib);
    let guest = guest
        .with("dd", &setting("TAPIO_BENCH_DD", "512"))
        .with("seconds", &setting("TAPIO_BENCH_SECONDS", "2"))
        .with("rounds", &setting("TAPIO_BENCH_ROUNDS", "3"));
    let report = guest.within(LIMIT).run(&scratch);
    disk.stop();
    second.stop();
    let lines: Vec<&str> =
        (1..=report.number("lines")).map(|line| report.text(&format!("line{line}"))).collect();
    println!("{}", lines.join("\n"));
    if let Some(path) = std::env::var_os("TAPIO_BENCH_SVG") {
        std::fs::write(path, report.text("svg")).expect("the picture is written");
    }
    let ways: Vec<&str> = lines
        .iter()
        .filter(|line| line.starts_with("dd, "))
        .filter_map(|line| line.split_whitespace().nth(5))
        .collect();
    assert_eq!(ways, ["bare", "raw", "vhd", "lvm", "ext"], "{lines:?}");
}
