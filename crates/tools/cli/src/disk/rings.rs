//! The rings of Xen guests, as the disk's process says.

use std::fmt::Write;

use tapio_control::command as ask;
use tapio_control::{BlkifReport, DiskReports, OwnClient, RunDir};
use tapio_stat::Snapshot;

use super::REPLY_TIMEOUT;

/// The devices of Xen guests behind a disk; none where its process does not answer.
pub fn ask(disk: &Snapshot) -> Vec<BlkifReport> {
    if disk.vbds.iter().all(|vbd| vbd.domid == 0) {
        return Vec::new();
    }
    let (Ok(pid), Ok(minor)) = (i32::try_from(disk.pid), u16::try_from(disk.minor)) else {
        return Vec::new();
    };
    let asked = OwnClient::connect(&RunDir::from_env(), pid)
        .and_then(|mut client| client.call(&ask::Stats { minor: Some(minor) }, &[], REPLY_TIMEOUT));
    match asked {
        Ok(DiskReports::One(report)) => report.blkif,
        _ => Vec::new(),
    }
}

fn op(number: u8) -> &'static str {
    match number {
        0 => "read",
        1 => "write",
        2 => "barrier",
        3 => "flush",
        5 => "discard",
        _ => "?",
    }
}

/// A device: what it cost, where its rings stand, which requests are in flight for how long.
pub fn text(device: &BlkifReport) -> String {
    let (mut out, counts) = (String::new(), &device.counts);
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(
        out,
        "xen {}/{}: {} requests, {} answers, {} repeated; {} notifications in, {} out; errors: {} senseless, \
         {} unreachable, {} disk",
        device.domid,
        device.devid,
        counts.requests,
        counts.responses,
        counts.repeated,
        counts.kicks_in,
        counts.kicks_out,
        counts.errors_message,
        counts.errors_map,
        counts.errors_disk,
    );
    let _ = writeln!(
        out,
        "  moved by {}: {} copies of {} pieces, {} bytes; {} maps of {} pages; kept pages: {} hits, {} misses, \
         {} given up",
        device.movement.name(),
        counts.copy_calls,
        counts.copied_segments,
        counts.copied_bytes,
        counts.maps,
        counts.mapped_pages,
        counts.persistent_hits,
        counts.persistent_misses,
        counts.persistent_evictions,
    );
    if let Some(why) = &device.only_copied {
        let _ = writeln!(out, "  pages are not mapped, because data goes over a network: {why}");
    }
    for (index, ring) in device.rings.iter().enumerate() {
        let _ = writeln!(
            out,
            "  ring {index} of {}: requests {} made, {} taken, event {}; answers {} shown, {} written, event {}; {} \
             in flight",
            ring.state.size,
            ring.state.req_prod,
            ring.state.req_cons,
            ring.state.req_event,
            ring.state.rsp_prod,
            ring.state.rsp_pvt,
            ring.state.rsp_event,
            ring.in_flight,
        );
        for request in &ring.oldest {
            let _ = writeln!(
                out,
                "    {} {} sectors at {} for {:.1} ms",
                op(request.op),
                request.sectors,
                request.sector,
                request.age_us as f64 / 1e3
            );
        }
        if let Some(why) = &ring.broken {
            let _ = writeln!(out, "    stands still: {why}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use tapio_control::{BlkifCounts, BlkifRequest, BlkifRing};
    use tapio_types::{Movement, RingState};

    #[test]
    fn a_device_is_shown_with_what_is_under_way() {
        let oldest = vec![BlkifRequest { id: 1, op: 1, sector: 2048, sectors: 8, age_us: 2_500 }];
        let ring = BlkifRing {
            state: RingState { size: 32, req_prod: 9, req_cons: 9, ..RingState::default() },
            in_flight: 1,
            oldest,
            ..BlkifRing::default()
        };
        let device = BlkifReport {
            domid: 3,
            devid: 51712,
            pool: String::new(),
            movement: Movement::Map,
            only_copied: None,
            counts: BlkifCounts { requests: 9, responses: 8, maps: 7, ..BlkifCounts::default() },
            rings: vec![ring, BlkifRing { broken: Some("gone".into()), ..BlkifRing::default() }],
        };
        let text = text(&device);
        assert!(text.starts_with("xen 3/51712: 9 requests, 8 answers"), "{text}");
        assert!(text.contains("moved by map: 0 copies of 0 pieces, 0 bytes; 7 maps"), "{text}");
        assert!(text.contains("    write 8 sectors at 2048 for 2.5 ms\n"), "{text}");
        assert!(text.ends_with("    stands still: gone\n"), "{text}");
    }
}
