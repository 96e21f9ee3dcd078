//! Every bound of the server in one place.
//!
//! What a client can make the server hold, in bytes: [`SLOTS`] records, one small input buffer of
//! [`INPUT_LEN_SMALL`], answers to BLOCK_STATUS of at most [`EXTENTS_MAX`] extents a slot, and pool memory up to
//! [`HELD_LEN_MAX`]: about 11 MiB. The pool itself is the bound of all connections together: see `memory.rs`.

use std::time::Duration;

/// Connections in the transmission phase at once, over all exports of a server, and over all servers of a disk.
pub const CONNECTIONS_MAX: usize = 64;
/// Handshakes at once. Others wait in the backlog of their socket.
pub const HANDSHAKES_MAX: usize = 16;
/// How long a handshake may take from the accepted connection to the chosen export.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Threads of handshakes at once, with those that were turned away and wait for a disk that does not answer.
pub const HANDSHAKE_THREADS_MAX: usize = 2 * HANDSHAKES_MAX;
/// When all places are taken, a handshake older than this gives way to a newcomer.
pub const HANDSHAKE_TIME_WHEN_FULL: Duration = Duration::from_secs(1);
/// Options in one handshake.
pub const OPTIONS_MAX: u32 = 128;
/// Bytes of one option. A GO with the longest name and every kind of information takes 4112.
pub const OPTION_LEN_MAX: u32 = 16 << 10;
/// A longer option is read past and refused up to this length; above it the connection is dropped.
pub const OPTION_SKIP_MAX: u32 = 1 << 20;
/// Exports of one server.
pub const EXPORTS_MAX: usize = 256;
/// Sockets one server listens on.
pub const LISTENERS_MAX: usize = 16;

/// Disk requests of one connection at once, those counted whose replies have not left yet.
pub const SLOTS: usize = 128;
/// Pool memory that one connection may hold.
pub const HELD_LEN_MAX: usize = 8 << 20;
/// Pool memory that every connection can count on, whatever the others do (a smaller pool makes it less).
pub const SHARE_LEN: usize = 256 << 10;
/// A read is cut into disk requests and chunks of this size: small enough that the data is still in the cache when
/// it is sent, large enough that a cut costs nothing.
pub const READ_PART_LEN: usize = 256 << 10;
/// A write that is alone on its connection is cut into disk requests of this size: while one part is written the next
/// is received.
pub const WRITE_PART_LEN: usize = 256 << 10;
/// One among others is cut into these: it is received while others are written. The thread waits less often for the
/// rest of a part, and what is written to a file in memory goes to another processor. Beside parts of 256 KiB that made
/// writes of 1 MiB at depth 8 a quarter faster.
pub const WRITE_PART_LEN_AMONG_OTHERS: usize = 1 << 20;
/// The largest disk request that moves data: a read that must not be cut, a write with FUA.
pub const PART_LEN_MAX: usize = 2 << 20;
/// TRIM and WRITE_ZEROES are cut into disk requests of this size, so that none keeps the disk for long.
pub const RANGE_PART_LEN: u64 = 1 << 30;
/// CACHE reads at most this much of its range: it is a hint.
pub const CACHE_LEN_MAX: u64 = 32 << 20;
/// Extents in one answer to BLOCK_STATUS.
pub const EXTENTS_MAX: usize = 1024;
/// BLOCK_STATUS looks at this much of its range at most, so that one request cannot walk a whole disk.
pub const STATUS_LEN_MAX: u64 = 1 << 40;

/// The input buffer of a quiet connection.
pub const INPUT_LEN_SMALL: usize = 8 << 10;
/// The input buffer of a connection whose client sends more at once.
pub const INPUT_LEN_LARGE: usize = 128 << 10;
/// After this many short receptions the small input buffer is enough again.
pub const INPUT_SHORT_MAX: u32 = 16;
/// Replies gathered into one send: this many pieces of memory ...
pub const SEND_PIECES_MAX: usize = 192;
/// ... and about this many bytes.
pub const SEND_LEN_MAX: usize = 1 << 20;

/// How long a client that has said goodbye may take to read what is still for it.
pub const LINGER_TIME: Duration = Duration::from_secs(10);
/// How long the control side waits for the data thread to say or do something small.
pub const DATA_THREAD_TIME: Duration = Duration::from_secs(5);

const _: () = assert!(INPUT_LEN_LARGE < SHARE_LEN && PART_LEN_MAX <= HELD_LEN_MAX);
const _: () = assert!(SEND_PIECES_MAX >= 2 && SEND_PIECES_MAX <= 1024);
