//! Counters that other processes publish, and files of samples.

use tapio_cli::foreign::{rates_text, replay_body_text, replay_text};
use tapio_stat::trace::{Clock, Rate, parse_trace, requests};
use tapio_stat::{
    PUBLISHED_LEN, RequestKind, STATISTICS_LEN, Stage, parse_page, parse_published, parse_ring_text,
    parse_statistics, ring_text,
};

/// A file that `xsiostat -o` might have written. What is printed is in proportion to what was read.
pub fn xsiostat_replay(bytes: &[u8]) {
    match replay_text(bytes) {
        // A disk has 18 bytes at least, and a number at most 30 digits; there are four formats, of which the one by
        // pool repeats a header of 200 bytes.
        Ok(text) => assert!(text.len() <= 200 * bytes.len() + 1024, "{} bytes of text", text.len()),
        Err(error) => assert!(!error.is_empty() && error.len() < 4096, "an error of {} bytes", error.len()),
    }
    // Behind the head of the file and of its first sample.
    if let Some(text) = bytes.get(24..).and_then(replay_body_text) {
        assert!(text.len() <= 200 * bytes.len() + 1024, "{} bytes of text", text.len());
    }
}

/// The files below `/dev/shm`: our page, the published layout, the ring's text.
pub fn stat_pages(bytes: &[u8]) {
    match parse_page(bytes) {
        Ok(snapshot) => {
            let _ = (snapshot.in_flight(), snapshot.errors());
            for kind in RequestKind::ALL {
                let _ = snapshot.kind(kind);
                for stage in Stage::ALL {
                    let Some(histogram) = snapshot.histogram(kind, stage) else { continue };
                    let (half, most) = (histogram.quantile_ns(0.5), histogram.quantile_ns(0.999));
                    assert!(half <= most, "half of all take {half} ns and almost all {most} ns");
                    let _ = (histogram.count(), histogram.mean_ns());
                    assert_eq!(histogram.since(histogram).count(), 0);
                }
            }
            serde_json::to_string(&snapshot).expect("a snapshot can be written");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    if let Some(pool) = tapio_stat::pool::parse_pool("pool", bytes) {
        assert!(pool.used <= pool.pages && pool.disks.len() <= tapio_stat::pool::POOL_DISKS_MAX);
    }
    let rate = |_: Clock, _: (u64, u64)| Rate { ns_per_tick: 0.25 };
    match parse_trace(bytes, bytes.len() as u64, &rate) {
        Ok(trace) => {
            assert!(trace.events.len() * 16 <= bytes.len());
            // A front end's own events may be any: here those of the disk itself.
            for request in requests(&trace, Some(&trace)) {
                let sum: u64 = request.steps_ns.iter().fold(0, |sum, step| sum.saturating_add(*step));
                assert!(sum <= request.total_ns.saturating_add(1 << 16), "{request:?}");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    assert_eq!(parse_statistics(bytes).is_some(), bytes.len() >= STATISTICS_LEN);
    assert_eq!(parse_published(bytes).is_some(), bytes.len() >= PUBLISHED_LEN);
    if let (Some(then), Some(now)) = (parse_published(bytes), parse_published(&bytes[bytes.len().min(8)..])) {
        for seconds in [1.0, 0.0, 1e-9] {
            assert!(!rates_text(&then, &now, seconds).is_empty());
        }
    }
    if let Some(ring) = parse_ring_text(bytes) {
        let (text, len) = ring_text(&ring);
        assert_eq!(parse_ring_text(&text[..len]), Some(ring));
        let _ = ring.used();
    }
}
