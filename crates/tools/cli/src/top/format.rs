//! A sample as lines, and their order.

use std::cmp::Ordering;

use clap::ValueEnum;

use super::sample::{Row, Sample};
use crate::disk::time;

/// What the lines are sorted by: the largest first, names in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SortKey {
    /// Reads a second
    Read,
    /// Writes a second
    Write,
    /// Bytes a second, both ways
    Throughput,
    /// Mean latency
    Latency,
    /// Requests in flight
    Queue,
    /// Device, then image
    Name,
}

impl SortKey {
    /// The key of the keyboard.
    pub fn of_key(key: u8) -> Option<Self> {
        Some(match key {
            b'r' => Self::Read,
            b'w' => Self::Write,
            b't' => Self::Throughput,
            b'l' => Self::Latency,
            b'n' => Self::Name,
            // 'q' quits.
            b'i' => Self::Queue,
            _ => return None,
        })
    }

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Sorts the disks.
pub fn sort(rows: &mut [Row], key: SortKey) {
    let throughput = |row: &Row| row.read_bytes_per_s + row.write_bytes_per_s;
    rows.sort_by(|a, b| {
        let order = match key {
            SortKey::Read => b.read_per_s.total_cmp(&a.read_per_s),
            SortKey::Write => b.write_per_s.total_cmp(&a.write_per_s),
            SortKey::Throughput => throughput(b).total_cmp(&throughput(a)),
            SortKey::Latency => b.latency_mean_ns.cmp(&a.latency_mean_ns),
            SortKey::Queue => b.in_flight_requests.cmp(&a.in_flight_requests),
            SortKey::Name => Ordering::Equal,
        };
        order.then_with(|| (name(a), a.pid, a.minor).cmp(&(name(b), b.pid, b.minor)))
    });
}

/// Devices and image. A path may hold what a terminal would obey.
fn name(row: &Row) -> String {
    let vbds = row.vbds.iter().map(|vbd| format!("{vbd} ")).collect::<String>();
    (vbds + &row.image).chars().map(|one| if one.is_control() { '?' } else { one }).collect()
}

fn line(row: &Row, id: &str, name: &str) -> String {
    let mib = |bytes: f64| format!("{:.1}", bytes / f64::from(1 << 20));
    let queues = &row.queues;
    format!(
        "{id:>10} {:>8.0} {:>8.0} {:>8} {:>8} {:>9} {:>9} {:>5} {:>5} {:>6.1} {:>6.1} {:>6.1} {:>6.1}  {name}",
        row.read_per_s,
        row.write_per_s,
        mib(row.read_bytes_per_s),
        mib(row.write_bytes_per_s),
        time(row.latency_mean_ns),
        time(row.latency_p99_ns),
        row.in_flight_requests,
        row.waiting_requests,
        queues.queued_requests,
        queues.image_requests,
        queues.kernel_requests,
        queues.completing_requests,
    )
}

/// The lines of a sorted sample: what it is, the heads of columns, the total, and the disks.
pub fn lines(sample: &Sample, key: SortKey, paused: bool) -> Vec<String> {
    let mut lines = vec![
        format!(
            "tapio top: {} disks, {:.1} s, by {}{}",
            sample.disks.len(),
            sample.interval_s,
            key.name(),
            if paused { ", paused" } else { "" }
        ),
        format!(
            "{:>10} {:>8} {:>8} {:>8} {:>8} {:>9} {:>9} {:>5} {:>5} {:>6} {:>6} {:>6} {:>6}  NAME",
            "PID/MINOR",
            "READ/s",
            "WRITE/s",
            "RD MiB/s",
            "WR MiB/s",
            "MEAN",
            "P99",
            "FLY",
            "WAIT",
            "QUEUED",
            "IMAGE",
            "KERNEL",
            "COMPL"
        ),
        line(&sample.total, "total", ""),
    ];
    let disk = |row: &Row| line(row, &format!("{}/{}", row.pid, row.minor), &name(row));
    lines.extend(sample.disks.iter().map(disk));
    lines.iter_mut().for_each(|line| line.truncate(line.trim_end().len()));
    lines
}

/// What fits a terminal: the last line says how much does not.
pub fn fit(mut lines: Vec<String>, columns: usize, rows: usize) -> Vec<String> {
    if lines.len() > rows && rows > 0 {
        let hidden = lines.len() - (rows - 1);
        lines.truncate(rows - 1);
        lines.push(format!("{hidden} more"));
    }
    lines.into_iter().map(|line| line.chars().take(columns).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(minor: u32, read_per_s: f64, image: &str) -> Row {
        Row { pid: 7, minor, read_per_s, image: image.into(), ..Row::default() }
    }

    #[test]
    fn the_busiest_come_first_and_equals_by_name() {
        let mut rows = [row(1, 5.0, "b"), row(2, 9.0, "c"), row(3, 5.0, "a")];
        let minors = |rows: &[Row]| rows.iter().map(|row| row.minor).collect::<Vec<_>>();
        sort(&mut rows, SortKey::Read);
        assert_eq!(minors(&rows), [2, 3, 1]);
        sort(&mut rows, SortKey::Name);
        assert_eq!(minors(&rows), [3, 1, 2]);
        rows[1].latency_mean_ns = 1;
        sort(&mut rows, SortKey::Latency);
        assert_eq!(minors(&rows), [1, 3, 2]);
    }

    #[test]
    fn lines_have_units_and_obey_no_path() {
        let mut disk = row(1, 1234.0, "raw:/a\x1b[2J");
        (disk.read_bytes_per_s, disk.latency_mean_ns) = (3.0 * 1048576.0, 1500);
        let sample = Sample { interval_s: 1.0, total: disk.clone(), disks: vec![disk] };
        let lines = lines(&sample, SortKey::Read, true);
        assert_eq!(lines[0], "tapio top: 1 disks, 1.0 s, by read, paused");
        assert!(lines[1].contains("RD MiB/s"));
        assert!(lines[3].contains(" 1234 ") && lines[3].contains(" 3.0 ") && lines[3].contains("1.5 us"));
        assert!(lines[3].ends_with("raw:/a?[2J"), "{}", lines[3]);
    }

    #[test]
    fn what_does_not_fit_is_counted() {
        let lines = ["one", "two", "three"].map(String::from).to_vec();
        assert_eq!(fit(lines.clone(), 2, 2), ["on", "2 "]);
        assert_eq!(fit(lines, 80, 3).len(), 3);
    }
}
