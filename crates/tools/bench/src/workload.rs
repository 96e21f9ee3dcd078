//! What is asked of every server.

use tapio_load::Mix;

/// One kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// As `--only` and the JSON name it.
    pub name: &'static str,
    /// As the table names it.
    pub title: &'static str,
    pub mix: Mix,
    /// Bytes of a request.
    pub block_len: u32,
    /// Requests in flight on each connection or queue.
    pub depth: u32,
    /// Connections of NBD clients, or queues of one vhost-user front end; each is driven by a thread of its own.
    pub lanes: u16,
    /// NBD clients send each request by a call of its own, as libnbd and the kernel's client do.
    pub singly: bool,
    /// Into a fresh image without any data, for a number of requests rather than a time.
    pub fresh: bool,
}

const READ: Workload = Workload {
    name: "",
    title: "",
    mix: Mix::RandomRead,
    block_len: 4096,
    depth: 32,
    lanes: 1,
    singly: false,
    fresh: false,
};

const WRITE: Workload = Workload { mix: Mix::RandomWrite, ..READ };

const LARGE: Workload = Workload { block_len: 1 << 20, depth: 8, mix: Mix::SequentialRead, ..READ };

/// All of them, in the order in which they run.
pub const WORKLOADS: [Workload; 14] = [
    Workload { name: "read-4k-q1", title: "4k random read, depth 1", depth: 1, ..READ },
    Workload { name: "read-4k-q32", title: "4k random read, depth 32", ..READ },
    Workload { name: "write-4k-q32", title: "4k random write, depth 32", ..WRITE },
    Workload { name: "read-1m-q8", title: "1M sequential read, depth 8", ..LARGE },
    Workload {
        name: "write-1m-q8",
        title: "1M sequential write, depth 8",
        mix: Mix::SequentialWrite,
        ..LARGE
    },
    Workload {
        name: "read-4k-q8x4",
        title: "4k random read, 4 connections or queues of depth 8",
        depth: 8,
        lanes: 4,
        ..READ
    },
    Workload {
        name: "write-4k-q8x4",
        title: "4k random write, 4 connections or queues of depth 8",
        depth: 8,
        lanes: 4,
        ..WRITE
    },
    Workload {
        name: "read-4k-q8x4-single",
        title: "4k random read, 4 connections of depth 8, each request sent alone",
        depth: 8,
        lanes: 4,
        singly: true,
        ..READ
    },
    Workload {
        name: "write-4k-q8x4-single",
        title: "4k random write, 4 connections of depth 8, each request sent alone",
        depth: 8,
        lanes: 4,
        singly: true,
        ..WRITE
    },
    Workload {
        name: "read-4k-q32x2",
        title: "4k random read, 2 connections or queues of depth 32",
        lanes: 2,
        ..READ
    },
    Workload {
        name: "read-4k-q32x4",
        title: "4k random read, 4 connections or queues of depth 32",
        lanes: 4,
        ..READ
    },
    Workload {
        name: "allocate-4k-q1",
        title: "4k random write into an empty image, depth 1",
        depth: 1,
        fresh: true,
        ..WRITE
    },
    Workload {
        name: "allocate-4k-q32",
        title: "4k random write into an empty image, depth 32",
        fresh: true,
        ..WRITE
    },
    Workload {
        name: "allocate-1m-q8",
        title: "1M sequential write into an empty image, depth 8",
        mix: Mix::SequentialWrite,
        fresh: true,
        ..LARGE
    },
];
