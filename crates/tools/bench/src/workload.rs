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
    /// Requests in flight on each connection.
    pub depth: u32,
    pub connections: usize,
    /// Into a fresh image without any data, for a number of requests rather than a time.
    pub fresh: bool,
}

const READ: Workload = Workload {
    name: "",
    title: "",
    mix: Mix::RandomRead,
    block_len: 4096,
    depth: 32,
    connections: 1,
    fresh: false,
};

/// All of them, in the order in which they run.
pub const WORKLOADS: [Workload; 6] = [
    Workload { name: "read-4k-q1", title: "4k random read, depth 1", depth: 1, ..READ },
    Workload { name: "read-4k-q32", title: "4k random read, depth 32", ..READ },
    Workload { name: "write-4k-q32", title: "4k random write, depth 32", mix: Mix::RandomWrite, ..READ },
    Workload {
        name: "read-1m-q8",
        title: "1M sequential read, depth 8",
        block_len: 1 << 20,
        depth: 8,
        mix: Mix::SequentialRead,
        ..READ
    },
    Workload {
        name: "read-4k-q32x4",
        title: "4k random read, 4 connections of depth 32",
        connections: 4,
        ..READ
    },
    Workload {
        name: "allocate-4k-q32",
        title: "4k random write into an empty image, depth 32",
        mix: Mix::RandomWrite,
        fresh: true,
        ..READ
    },
];
