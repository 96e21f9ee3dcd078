//! The three formats, column by column.

use std::fmt::Write;

use super::sample::{Pool, Row, Sample};

/// How a sample is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Ring slots and requests in flight, grouped by page pool
    #[value(name = "6.1")]
    V61,
    /// Rates and queue lengths
    #[value(name = "6.5")]
    V65,
    /// The same and the low-memory mode
    #[value(name = "2016")]
    V2016,
}

/// A sample as text; nothing when it has no disks.
pub fn text(format: Format, sample: &Sample) -> String {
    if sample.vbds.is_empty() {
        return String::new();
    }
    match format {
        Format::V61 => by_pool(&sample.vbds),
        Format::V65 => rates(&sample.vbds, false),
        Format::V2016 => rates(&sample.vbds, true),
    }
}

fn rates(rows: &[Row], low_memory: bool) -> String {
    let width = if low_memory { 86 } else { 68 };
    let mut out = "-".repeat(width);
    out.push_str("\n  DOM   VBD         r/s        w/s    rMB/s    wMB/s rAvgQs wAvgQs");
    out.push_str(if low_memory { "   Low_Mem_Mode\n" } else { "\n" });
    for row in rows {
        // Writing to a string cannot fail, here and below.
        let _ = write!(
            out,
            "{:5},{:5}: {:10.2} {:10.2} {:8.2} {:8.2} {:6.2} {:6.2}",
            row.domid,
            row.vbdid,
            row.read_per_s,
            row.write_per_s,
            row.read_mb_per_s,
            row.write_mb_per_s,
            row.read_queue,
            row.write_queue,
        );
        if low_memory {
            let _ = write!(out, "{:6}", u8::from(row.low_memory));
        }
        out.push('\n');
    }
    out.push('\n');
    out
}

/// Disks of one page pool stand together; those without one stand under `-`.
fn by_pool(rows: &[Row]) -> String {
    let none = Pool { name: "-".into(), total: 0, used: 0 };
    let pool = |row: &Row| row.pool.clone().unwrap_or_else(|| none.clone());
    let mut pools: Vec<Pool> = Vec::new();
    for row in rows {
        if !pools.iter().any(|known| known.name == pool(row).name) {
            pools.push(pool(row));
        }
    }
    let mut out = String::from("-----\n");
    for Pool { name, total, used } in &pools {
        let _ = writeln!(out, "pool: {name} ({total:4},{used:4})");
        out.push_str("  DOM   VBD   BLKBKRING   INFLIGHT       BLKTAP REQS/s     BLKTAP MB/s\n");
        out.push_str("        TOT USE    RD  WR         RD    WR         RD    WR\n");
        for row in rows.iter().filter(|row| pool(row).name == *name) {
            let _ = writeln!(
                out,
                "vbd: {:3},{:5}: ({:3},{:3}) ({:3},{:3}) ({:6.2},{:6.2}) ({:6.2},{:6.2})",
                row.domid,
                row.vbdid,
                row.ring_total,
                row.ring_used,
                row.read_in_flight,
                row.write_in_flight,
                row.read_done_per_s,
                row.write_done_per_s,
                row.read_mb_per_s,
                row.write_mb_per_s,
            );
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row {
            domid: 1,
            vbdid: 51728,
            read_per_s: 5189.03,
            read_mb_per_s: 21.25,
            read_queue: 0.71,
            ..Row::default()
        }
    }

    #[test]
    fn the_format_of_6_5() {
        let sample = Sample { time_ms: 0, vbds: vec![row()] };
        let expected = "\
--------------------------------------------------------------------
  DOM   VBD         r/s        w/s    rMB/s    wMB/s rAvgQs wAvgQs
    1,51728:    5189.03       0.00    21.25     0.00   0.71   0.00

";
        assert_eq!(text(Format::V65, &sample), expected);
        assert_eq!(text(Format::V65, &Sample::default()), "");
    }

    #[test]
    fn the_format_of_2016_has_one_column_more() {
        let sample = Sample { time_ms: 0, vbds: vec![Row { low_memory: true, ..row() }] };
        let text = text(Format::V2016, &sample);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "-".repeat(86));
        assert!(lines[1].ends_with("wAvgQs   Low_Mem_Mode"));
        assert_eq!(lines[2], "    1,51728:    5189.03       0.00    21.25     0.00   0.71   0.00     1");
    }

    #[test]
    fn the_format_of_6_1_groups_by_pool() {
        let pool = |name: &str, used| Some(Pool { name: name.into(), total: 704, used });
        let first = Row {
            domid: 5,
            ring_total: 32,
            ring_used: 2,
            read_in_flight: 2,
            read_done_per_s: 56.0,
            read_mb_per_s: 2.52,
            pool: pool("164d3080-00a6-2b08-69f7-8c3fc75cba07", 374),
            ..row()
        };
        let second = Row {
            domid: 6,
            ring_total: 32,
            ring_used: 32,
            write_in_flight: 32,
            write_done_per_s: 1736.95,
            write_mb_per_s: 78.26,
            read_done_per_s: 0.0,
            read_mb_per_s: 0.0,
            ..first.clone()
        };
        let other = Row { domid: 6, vbdid: 51712, ..Row::default() };
        let (first, second) = (first, Row { read_in_flight: 0, ..second });
        let expected = "\
-----
pool: 164d3080-00a6-2b08-69f7-8c3fc75cba07 ( 704, 374)
  DOM   VBD   BLKBKRING   INFLIGHT       BLKTAP REQS/s     BLKTAP MB/s
        TOT USE    RD  WR         RD    WR         RD    WR
vbd:   5,51728: ( 32,  2) (  2,  0) ( 56.00,  0.00) (  2.52,  0.00)
vbd:   6,51728: ( 32, 32) (  0, 32) (  0.00,1736.95) (  0.00, 78.26)

pool: - (   0,   0)
  DOM   VBD   BLKBKRING   INFLIGHT       BLKTAP REQS/s     BLKTAP MB/s
        TOT USE    RD  WR         RD    WR         RD    WR
vbd:   6,51712: (  0,  0) (  0,  0) (  0.00,  0.00) (  0.00,  0.00)

";
        assert_eq!(text(Format::V61, &Sample { time_ms: 0, vbds: vec![first, other, second] }), expected);
    }
}
