//! The protocol's finer points, by libnbd from Python.

use tapio_e2e::client::{nbdsh, nbdsh_unconnected};
use tapio_e2e::disk::{Disk, DiskOptions, assert_vhd_valid, create_vhd, snapshot_vhd};
use tapio_e2e::needs;
use tapio_e2e::scratch::Scratch;

use super::MIB;

/// A VHD of 32 MiB behind NBD.
fn vhd_disk(scratch: &Scratch) -> Disk {
    DiskOptions::vhd(&create_vhd(scratch.join("a.vhd"), 32)).nbd().start(scratch.path())
}

#[test]
fn structured_reads_cover_what_was_asked_exactly_once() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let disk = vhd_disk(&scratch);
    nbdsh(
        &disk.uri(),
        "
assert h.get_structured_replies_negotiated()
h.pwrite(b'a' * 4096, 1 << 20)
h.pwrite(b'b' * 4096, 5 << 20)
seen = []
def chunk(buf, offset, status, err):
    assert status in (nbd.READ_DATA, nbd.READ_HOLE), status
    seen.append((offset, len(buf)))
start, length = 512 << 10, 6 << 20
buf = h.pread_structured(length, start, chunk)
assert buf[(1 << 20) - start:][:4096] == b'a' * 4096
assert buf[(5 << 20) - start:][:4096] == b'b' * 4096
assert buf.count(b'a') == buf.count(b'b') == 4096 and buf.count(0) == length - 8192
at = start
for offset, size in sorted(seen):
    assert offset == at, seen
    at += size
assert at == start + length, seen
# In one piece, although it begins in a hole and ends in data. Up to 64 KiB a server may not refuse that.
seen.clear()
start = (5 << 20) - (32 << 10)
buf = h.pread_structured(64 << 10, start, chunk, nbd.CMD_FLAG_DF)
assert buf == bytes(32 << 10) + b'b' * 4096 + bytes(28 << 10)
assert seen == [(start, 64 << 10)], seen
",
    );
    disk.stop();
}

#[test]
fn block_status_covers_the_disk_and_obeys_req_one() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let disk = vhd_disk(&scratch);
    nbdsh_unconnected(
        &disk.uri(),
        "
h.add_meta_context('base:allocation')
h.connect_uri(uri)
assert h.can_meta_context('base:allocation')
h.pwrite(b'x' * 65536, 7 << 20)
size = h.get_size()
at, states = 0, []
while at < size:
    got = []
    h.block_status(size - at, at, lambda context, offset, entries, err: got.extend(entries))
    assert got and all(length > 0 for length in got[0::2]), got
    for length, state in zip(got[0::2], got[1::2]):
        states.append((at, length, state))
        at += length
assert any(state == 0 and start <= 7 << 20 < start + length for start, length, state in states), states
one = []
h.block_status(size, 0, lambda context, offset, entries, err: one.extend(entries), nbd.CMD_FLAG_REQ_ONE)
assert len(one) == 2 and 0 < one[0] <= size, one
",
    );
    disk.stop();
}

#[test]
fn an_allocated_sector_of_zeroes_is_not_a_hole_of_a_parent() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let base = create_vhd(scratch.join("base.vhd"), 32);
    let disk = DiskOptions::vhd(&base).nbd().start(scratch.path());
    nbdsh(&disk.uri(), "h.pwrite(b'p' * (4 << 20), 0)\nh.flush()");
    disk.stop();
    let leaf = snapshot_vhd(scratch.join("leaf.vhd"), &base);
    let disk = DiskOptions::vhd(&leaf).nbd().start(scratch.path());
    // Zeroing in the child must hide the parent's data, now and after a restart.
    nbdsh(
        &disk.uri(),
        "
h.zero(1 << 20, 1 << 20)
h.trim(1 << 20, 2 << 20)
h.flush()
assert h.pread(1 << 20, 1 << 20) == bytes(1 << 20)
assert h.pread(1 << 20, 0) == b'p' * (1 << 20)
",
    );
    disk.stop();
    let disk = DiskOptions::vhd(&leaf).nbd().start(scratch.path());
    nbdsh(
        &disk.uri(),
        "
assert h.pread(1 << 20, 1 << 20) == bytes(1 << 20)
assert h.pread(1 << 20, 0) == h.pread(1 << 20, 3 << 20) == b'p' * (1 << 20)
",
    );
    disk.stop();
    assert_vhd_valid(&base);
    assert_vhd_valid(&leaf);
}

#[test]
fn fua_flush_zero_and_trim_do_what_they_say() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    for vhd in [true, false] {
        let disk = if vhd {
            vhd_disk(&scratch)
        } else {
            DiskOptions::raw(&scratch.raw_image("a.raw", 32 * MIB)).nbd().start(scratch.path())
        };
        nbdsh(
            &disk.uri(),
            "
fua = nbd.CMD_FLAG_FUA
h.pwrite(b'w' * (2 << 20), 1 << 20, fua)
h.zero(65536, 1 << 20, fua)
h.zero(65536, (1 << 20) + 65536, fua | nbd.CMD_FLAG_NO_HOLE)
h.trim(65536, (1 << 20) + 131072, fua)
h.flush()
assert h.pread(131072, 1 << 20) == bytes(131072)
assert h.pread(65536, (1 << 20) + 196608) == b'w' * 65536
# Zeroes over nothing, and over half of something.
h.zero(8 << 20, 16 << 20)
h.zero(1024, (2 << 20) + 512)
assert h.pread(2048, 2 << 20) == b'w' * 512 + bytes(1024) + b'w' * 512
assert h.pread(8 << 20, 16 << 20) == bytes(8 << 20)
",
        );
        disk.stop();
    }
    assert_vhd_valid(&scratch.join("a.vhd"));
}

#[test]
fn every_offset_and_length_that_the_constraints_allow_is_served_and_no_other() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    for vhd in [true, false] {
        let disk = if vhd {
            vhd_disk(&scratch)
        } else {
            DiskOptions::raw(&scratch.raw_image("a.raw", 32 * MIB)).nbd().start(scratch.path())
        };
        // Compared with a plain array of bytes.
        nbdsh(
            &disk.uri(),
            "
import errno, random
random.seed(7)
h.set_strict_mode(0)
unit = h.get_block_size(nbd.SIZE_MINIMUM) or 1
assert unit in (1, 512), unit
for at, length in ((1, 512), (0, 511), (513, 1)):
    for attempt in (lambda: h.pread(length, at), lambda: h.pwrite(bytes(length), at), lambda: h.zero(length, at)):
        try:
            attempt()
            assert unit == 1, 'an unaligned request was accepted'
        except nbd.Error as error:
            assert unit != 1 and error.errnum == errno.EINVAL, error
size = 6 << 20
model = bytearray(size)
for step in range(400):
    at = random.randrange(size // unit) * unit
    length = min(random.choice((1, 3, 7, 8, 9, 15, 17, 137)) * unit, size - at)
    if random.random() < 0.5:
        data = random.randbytes(length)
        h.pwrite(data, at)
        model[at:at + length] = data
    else:
        assert h.pread(length, at) == model[at:at + length], (step, at, length)
assert h.pread(size, 0) == model
",
        );
        disk.stop();
    }
    assert_vhd_valid(&scratch.join("a.vhd"));
}

#[test]
fn requests_outside_the_disk_are_refused_and_the_next_one_is_served() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let disk = vhd_disk(&scratch);
    nbdsh(
        &disk.uri(),
        "
import errno
h.set_strict_mode(0)
size = h.get_size()
def refused(numbers, call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        assert error.errnum in numbers, (args[1:], error)
        return
    raise SystemExit('accepted: %r' % (args[1:],))
for at in (size, size - 256, size + 4096, (1 << 63) - 512, (1 << 64) - 512):
    refused((errno.EINVAL,), h.pread, 512, at)
    refused((errno.ENOSPC, errno.EINVAL), h.pwrite, bytes(512), at)
    refused((errno.ENOSPC, errno.EINVAL), h.zero, 512, at)
    refused((errno.EINVAL, errno.ENOSPC), h.trim, 512, at)
h.pwrite(b'z' * 512, size - 512)
assert h.pread(512, size - 512) == b'z' * 512
",
    );
    disk.stop();
}

#[test]
fn a_flush_on_one_connection_covers_the_other() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 32);
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    nbdsh_unconnected(
        &disk.uri(),
        "
first, second = nbd.NBD(), nbd.NBD()
for handle in (first, second):
    handle.connect_uri(uri)
    assert handle.can_multi_conn()
for step in range(64):
    data = bytes([step + 1]) * 65536
    first.pwrite(data, step << 18)
    assert second.pread(65536, step << 18) == data, step
second.flush()
",
    );
    // No orderly end: what the flush covered must be there all the same.
    disk.crash();
    let disk = DiskOptions::vhd(&image).nbd().start(scratch.path());
    nbdsh(
        &disk.uri(),
        "
for step in range(64):
    assert h.pread(65536, step << 18) == bytes([step + 1]) * 65536, step
",
    );
    disk.stop();
    assert_vhd_valid(&image);
}

#[test]
fn many_requests_in_flight_complete_each_once() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let disk = vhd_disk(&scratch);
    nbdsh(
        &disk.uri(),
        "
done = []
buffers = []
def finish(index):
    def callback(error):
        assert error.value == 0, (index, error.value)
        done.append(index)
        return 1
    return callback
for index in range(256):
    buffer = nbd.Buffer.from_bytearray(bytearray([index & 255]) * 65536)
    buffers.append(buffer)
    h.aio_pwrite(buffer, index * 65536, finish(index))
while len(done) < 256:
    h.poll(-1)
assert sorted(done) == list(range(256))
for index in range(256):
    assert h.pread(65536, index * 65536) == bytes([index & 255]) * 65536, index
",
    );
    disk.stop();
    assert_vhd_valid(&scratch.join("a.vhd"));
}

#[test]
fn an_unknown_export_is_refused_by_name_and_the_connection_goes_on() {
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let image = create_vhd(scratch.join("a.vhd"), 32);
    let disk = DiskOptions::vhd(&image).nbd().arg("--export").arg("disk").start(scratch.path());
    nbdsh_unconnected(
        &disk.uri(),
        "
h.set_opt_mode(True)
h.connect_uri(uri)
h.set_export_name('no-such-export')
try:
    h.opt_go()
    raise SystemExit('an unknown export was opened')
except nbd.Error:
    pass
h.set_export_name('disk')
h.opt_go()
assert h.get_size() == 32 << 20
assert h.pread(512, 0) == bytes(512)
",
    );
    disk.stop();
}
