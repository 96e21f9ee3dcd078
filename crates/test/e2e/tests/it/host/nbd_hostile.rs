//! Clients that lie, stall and vanish, by hand-made bytes. Another client must not notice.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tapio_e2e::client::nbdsh;
use tapio_e2e::disk::{Disk, DiskOptions, assert_vhd_valid, create_vhd};
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;

const IHAVEOPT: &[u8; 8] = b"IHAVEOPT";
const OPT_GO: u32 = 7;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
const EINVAL: u32 = 22;

fn vhd_disk(scratch: &Scratch) -> Disk {
    DiskOptions::vhd(&create_vhd(scratch.join("a.vhd"), 32)).nbd().start(scratch.path())
}

/// A connection after the greeting and the client's flags.
fn greet(disk: &Disk) -> UnixStream {
    let mut stream = UnixStream::connect(&disk.nbd).expect("the socket answers");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout can be set");
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).expect("the greeting");
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    assert_eq!(&greeting[8..16], IHAVEOPT);
    assert_eq!(greeting[17] & 0b11, 0b11, "fixed newstyle and no-zeroes are offered");
    stream.write_all(&3_u32.to_be_bytes()).expect("flags");
    stream
}

fn option(stream: &mut UnixStream, number: u32, length: u32, data: &[u8]) {
    let mut bytes = IHAVEOPT.to_vec();
    bytes.extend_from_slice(&number.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(data);
    stream.write_all(&bytes).expect("an option");
}

/// The type of the next option reply.
fn option_reply(stream: &mut UnixStream) -> u32 {
    let mut header = [0; 20];
    stream.read_exact(&mut header).expect("an option reply");
    let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().expect("four bytes"));
    let mut data = vec![0; word(16) as usize];
    stream.read_exact(&mut data).expect("the reply's data");
    word(12)
}

/// A connection in the transmission phase with simple replies.
fn connect(disk: &Disk) -> UnixStream {
    let mut stream = greet(disk);
    // The default export, no particular information wanted.
    option(&mut stream, OPT_GO, 6, &[0; 6]);
    while option_reply(&mut stream) != 1 {}
    stream
}

fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&0_u16.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes
}

/// The error number of the next simple reply, whose cookie must be this one.
fn reply(stream: &mut UnixStream, cookie: u64) -> u32 {
    let mut header = [0; 16];
    stream.read_exact(&mut header).expect("a reply");
    assert_eq!(header[..4], SIMPLE_REPLY_MAGIC.to_be_bytes());
    assert_eq!(header[8..], cookie.to_be_bytes());
    u32::from_be_bytes(header[4..8].try_into().expect("four bytes"))
}

/// The server must hang up, whatever it says before.
fn assert_hung_up(stream: &mut UnixStream) {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the server did not hang up: {error}"),
    }
}

fn assert_still_serves(disk: &mut Disk) {
    assert!(disk.process.is_running(), "the process died:\n{}", disk.process.log());
    nbdsh(&disk.uri(), "h.pwrite(b'k' * 4096, 8 << 20)\nassert h.pread(4096, 8 << 20) == b'k' * 4096");
}

#[test]
fn an_unknown_command_is_an_error_and_no_more() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let mut disk = vhd_disk(&scratch);
    let mut stream = connect(&disk);
    stream.write_all(&request(77, 1, 0, 512)).expect("a request");
    assert_eq!(reply(&mut stream, 1), EINVAL);
    stream.write_all(&request(CMD_READ, 2, 0, 512)).expect("a request");
    assert_eq!(reply(&mut stream, 2), 0);
    assert_still_serves(&mut disk);
    disk.stop();
}

#[test]
fn a_read_of_four_gibibytes_is_refused_without_the_memory_for_it() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let mut disk = vhd_disk(&scratch);
    let mut stream = connect(&disk);
    stream.write_all(&request(CMD_READ, 9, 0, u32::MAX)).expect("a request");
    assert_ne!(reply(&mut stream, 9), 0);
    assert_still_serves(&mut disk);
    let status = std::fs::read_to_string(format!("/proc/{}/status", disk.process.pid())).expect("status");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().expect("a number");
    assert!(peak < 256 << 10, "the process grew to {peak} KiB");
    disk.stop();
}

#[test]
fn a_client_that_vanishes_in_the_middle_of_a_write_leaves_no_trace() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let mut disk = vhd_disk(&scratch);
    nbdsh(&disk.uri(), "h.pwrite(b'o' * 65536, 0)\nh.flush()");
    for sent in [0, 1, 511, 40_000, 65_535] {
        let mut stream = connect(&disk);
        stream.write_all(&request(CMD_WRITE, 3, 0, 65_536)).expect("a request");
        stream.write_all(&vec![b'n'; sent]).expect("some data");
        drop(stream);
    }
    assert_still_serves(&mut disk);
    // The request never arrived whole, so it was never made.
    nbdsh(&disk.uri(), "assert h.pread(65536, 0) == b'o' * 65536");
    disk.stop();
    assert_vhd_valid(&scratch.join("a.vhd"));
}

#[test]
fn a_client_that_never_reads_its_replies_stops_only_itself() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let mut disk = vhd_disk(&scratch);
    let mut stream = connect(&disk);
    stream.set_write_timeout(Some(Duration::from_secs(2))).expect("a timeout can be set");
    // 4096 reads of 1 MiB: 4 GiB of replies that the client never reads. At some point the server stops listening.
    for cookie in 0..4096 {
        if stream.write_all(&request(CMD_READ, cookie, 0, 1 << 20)).is_err() {
            break;
        }
    }
    assert_still_serves(&mut disk);
    drop(stream);
    assert_still_serves(&mut disk);
    disk.stop();
}

#[test]
fn garbage_at_any_stage_ends_that_connection() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let mut disk = vhd_disk(&scratch);
    let mut stream = greet(&disk);
    stream.write_all(&[0xa5; 64]).expect("garbage for an option");
    assert_hung_up(&mut stream);
    let mut stream = connect(&disk);
    stream.write_all(&[0xa5; 28]).expect("garbage for a request");
    assert_hung_up(&mut stream);
    assert_still_serves(&mut disk);
    disk.stop();
}

#[test]
fn an_option_of_absurd_length_is_not_waited_for() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let mut disk = vhd_disk(&scratch);
    let mut stream = greet(&disk);
    option(&mut stream, OPT_GO, u32::MAX, &[]);
    // Either an error reply or the end of the connection; both are an answer.
    let mut answer = [0; 4];
    let result = stream.read(&mut answer);
    assert!(result.is_ok(), "no answer: {result:?}");
    assert_still_serves(&mut disk);
    disk.stop();
}

#[test]
fn silent_connections_do_not_keep_others_out() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let mut disk = vhd_disk(&scratch);
    let silent: Vec<UnixStream> = (0..8).map(|_| UnixStream::connect(&disk.nbd).expect("connects")).collect();
    let halfway: Vec<UnixStream> = (0..4).map(|_| greet(&disk)).collect();
    assert_still_serves(&mut disk);
    drop((silent, halfway));
    assert_still_serves(&mut disk);
    disk.stop();
}
