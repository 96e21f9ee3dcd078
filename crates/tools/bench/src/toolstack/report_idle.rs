//! The tables of what does nothing.

use std::fmt::Write;

use super::density::{GUESTS, Table};
use super::idle::Idle;
use super::plug_memory::PlugMemory;

/// Writing to a string cannot fail, here and below.
pub fn idle(out: &mut String, idle: &Idle) {
    let _ = writeln!(
        out,
        "\n{} idle disks in as many idle VMs, looked at for {:.0} s ({} processes)\n  up in {:.0} ms, down in {:.0} ms\n  \
         a disk: PSS {:.0} KiB, {:.3} wake-ups/s of its own and {:.2} of the kernel's for its rings, {:.1} us of a \
         processor a second; all of them: {:.0} MiB\n  \
         load average {:.2}",
        idle.disks,
        idle.seconds,
        idle.processes,
        idle.up_ms,
        idle.down_ms,
        idle.disk_pss_kib,
        idle.disk_wakeups_per_second,
        idle.disk_ring_wakeups_per_second,
        idle.disk_cpu_us_per_second,
        idle.disks_pss_kib as f64 / 1024.0,
        idle.load_average
    );
    for (what, quiet) in [("without them", &idle.daemon_before), ("with them", &idle.daemon)] {
        let _ = writeln!(
            out,
            "  tapiod {what}: PSS {} KiB, {} threads, {:.1} wake-ups/s, {:.0} us of a processor a second",
            quiet.pss_kib, quiet.threads, quiet.wakeups_per_second, quiet.cpu_us_per_second
        );
    }
}

pub fn plug_memory(out: &mut String, found: &PlugMemory) {
    let _ = writeln!(
        out,
        "\nmemory of tapiod and its storage workers during plugs\n  {:>16}{:>12}",
        "AT A TIME", "PSS KiB"
    );
    for row in &found.rows {
        let _ = writeln!(out, "  {:>16}{:>12}", row.plugs, row.pss_kib);
    }
    let _ = writeln!(out, "  one more plug at a time: {:.0} KiB", found.plug_kib);
}

pub fn density(out: &mut String, tables: &[Table]) {
    for table in tables {
        let _ = writeln!(
            out,
            "\n{}, {}\n  {:>10}{:>10}{:>10}{:>10}{:>14}",
            table.guest,
            table.what,
            format!("{:.0} s", table.seconds),
            "timers",
            "reads",
            "writes",
            "processors"
        );
        for (number, row) in table.intervals.iter().enumerate() {
            let _ = writeln!(
                out,
                "  {number:>10}{:>10}{:>10}{:>10}{:>14}",
                row.timers, row.reads, row.writes, row.processors
            );
        }
        let row = &table.stopped;
        let _ = writeln!(
            out,
            "  {:>10}{:>10}{:>10}{:>10}{:>14}",
            "stopped", row.timers, row.reads, row.writes, row.processors
        );
        let cpu = table.cpu_us_per_second;
        let _ = writeln!(
            out,
            "  memory {:.0} MiB, {cpu:.0} us of a processor a second; {GUESTS:.0} such guests: {:.1} GiB, {:.2} processors",
            table.pss_kib as f64 / 1024.0,
            table.pss_kib as f64 * GUESTS / f64::from(1 << 20),
            cpu * GUESTS / 1e6
        );
    }
}
