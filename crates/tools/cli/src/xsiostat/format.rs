//! The formats, column by column.

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
    /// All columns, separated by commas
    #[value(name = "csv")]
    Csv,
}

/// The columns of [`Format::Csv`].
pub const CSV_HEAD: &str = "time_ms,domid,vbdid,pid,elapsed_ms,read_per_s,write_per_s,read_done_per_s,write_done_per_s,\
                            read_mb_per_s,write_mb_per_s,read_queue,write_queue,read_in_flight,write_in_flight,\
                            ring_total,ring_used,low_memory,pool,pool_pages,pool_used\n";

/// A sample as text; nothing when it has no disks.
pub fn text(format: Format, sample: &Sample) -> String {
    if sample.vbds.is_empty() {
        return String::new();
    }
    let rows = sample.rates().vbds;
    match format {
        Format::V61 => by_pool(&rows),
        Format::V65 => rates(&rows, false),
        Format::V2016 => rates(&rows, true),
        Format::Csv => rows.iter().map(|row| csv(sample.time_ms, row)).collect(),
    }
}

/// Names of pools have no commas or quotes; one in a file of others that has is left out.
fn csv(time_ms: u64, row: &Row) -> String {
    let rates = [
        row.elapsed_ms,
        row.read_per_s,
        row.write_per_s,
        row.read_done_per_s,
        row.write_done_per_s,
        row.read_mb_per_s,
        row.write_mb_per_s,
        row.read_queue,
        row.write_queue,
    ];
    let mut out = format!("{time_ms},{},{},{}", row.domid, row.vbdid, row.pid);
    for rate in rates {
        // Writing to a string cannot fail.
        let _ = write!(out, ",{rate:.3}");
    }
    let none = Pool::default();
    let pool = row.pool.as_ref().filter(|pool| !pool.name.contains([',', '"'])).unwrap_or(&none);
    let _ = writeln!(
        out,
        ",{},{},{},{},{},{},{},{}",
        row.read_in_flight,
        row.write_in_flight,
        row.ring_total,
        row.ring_used,
        u8::from(row.low_memory),
        pool.name,
        pool.total,
        pool.used
    );
    out
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
    use super::super::sample::Counted;
    use super::*;

    /// A disk over ten seconds.
    fn disk() -> Counted {
        Counted {
            domid: 1,
            vbdid: 51728,
            elapsed_ns: 10_000_000_000,
            read_submitted: 51_890,
            read_sectors: 415_039,
            read_ticks_us: 7_100_000,
            ..Counted::default()
        }
    }

    #[test]
    fn the_format_of_6_5() {
        let sample = Sample { time_ms: 0, vbds: vec![disk()] };
        let expected = "\
--------------------------------------------------------------------
  DOM   VBD         r/s        w/s    rMB/s    wMB/s rAvgQs wAvgQs
    1,51728:    5189.00       0.00    21.25     0.00   0.71   0.00

";
        assert_eq!(text(Format::V65, &sample), expected);
        assert_eq!(text(Format::V65, &Sample::default()), "");
    }

    #[test]
    fn the_format_of_2016_has_one_column_more() {
        let sample = Sample { time_ms: 0, vbds: vec![Counted { low_memory: true, ..disk() }] };
        let text = text(Format::V2016, &sample);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "-".repeat(86));
        assert!(lines[1].ends_with("wAvgQs   Low_Mem_Mode"));
        assert_eq!(lines[2], "    1,51728:    5189.00       0.00    21.25     0.00   0.71   0.00     1");
    }

    #[test]
    fn the_format_of_6_1_groups_by_pool() {
        let pool = |name: &str, used| Some(Pool { name: name.into(), total: 704, used });
        let first = Counted {
            domid: 5,
            ring_total: 32,
            ring_used: 2,
            read_in_flight: 2,
            read_completed: 560,
            read_sectors: 49_219,
            pool: pool("164d3080-00a6-2b08-69f7-8c3fc75cba07", 374),
            ..disk()
        };
        let second = Counted {
            domid: 6,
            ring_used: 32,
            write_in_flight: 32,
            write_completed: 17_369,
            write_sectors: 1_528_516,
            read_completed: 0,
            read_sectors: 0,
            read_in_flight: 0,
            ..first.clone()
        };
        let other = Counted { domid: 6, vbdid: 51712, ..Counted::default() };
        let expected = "\
-----
pool: 164d3080-00a6-2b08-69f7-8c3fc75cba07 ( 704, 374)
  DOM   VBD   BLKBKRING   INFLIGHT       BLKTAP REQS/s     BLKTAP MB/s
        TOT USE    RD  WR         RD    WR         RD    WR
vbd:   5,51728: ( 32,  2) (  2,  0) ( 56.00,  0.00) (  2.52,  0.00)
vbd:   6,51728: ( 32, 32) (  0, 32) (  0.00,1736.90) (  0.00, 78.26)

pool: - (   0,   0)
  DOM   VBD   BLKBKRING   INFLIGHT       BLKTAP REQS/s     BLKTAP MB/s
        TOT USE    RD  WR         RD    WR         RD    WR
vbd:   6,51712: (  0,  0) (  0,  0) (  0.00,  0.00) (  0.00,  0.00)

";
        assert_eq!(text(Format::V61, &Sample { time_ms: 0, vbds: vec![first, other, second] }), expected);
    }

    #[test]
    fn commas_separate_as_many_values_as_there_are_columns() {
        let pool = Some(Pool { name: "sr".into(), total: 704, used: 4 });
        let sample = Sample { time_ms: 7, vbds: vec![Counted { pool, ..disk() }, disk()] };
        let text = text(Format::Csv, &sample);
        let columns = CSV_HEAD.split(',').count();
        assert!(text.lines().all(|line| line.split(',').count() == columns), "{text}");
        assert!(text.starts_with("7,1,51728,0,10000.000,5189.000,0.000,"), "{text}");
        assert!(text.contains(",0,sr,704,4\n") && text.ends_with(",0,,0,0\n"), "{text}");
    }
}
