"""Whether the bytes of a disk come back by every way that they can go: integrity.py xml|json DIR PART...

Ways are a copy, an export and import as a raw image and as a VHD, and the difference of two snapshots. No part needs a
block device: disks are written by chunks with their places, and read by a range.
"""

import random

from clients import GIB, KIB, MIB, NULL, cleared, make_vdi, tell, work
from images import SECTOR, chunks, default_sr, exported, get, put

LARGEST = 2040 * GIB


def write(call, vdi, *pieces):
    status, _, body = put(call, chunks(*pieces), vdi=vdi, chunked="true")
    assert status == 200, body


def end_of(call, vdi, start):
    """The bytes of a disk from `start` on."""
    status, headers, body = get(call, {"Range": f"bytes={start}-"}, vdi=vdi)
    assert status == 206, (status, body)
    return body


def cbt(call):
    """Which disks are tracked, and what is left when the data of a snapshot go."""
    sr = default_sr(call)
    tracked = lambda vdi: call("VDI.get_cbt_enabled", vdi)
    disk = make_vdi(call, sr, 4 * MIB)
    assert tracked(disk) is False
    call("VDI.enable_cbt", disk)
    assert tracked(disk) is True
    call("VDI.enable_cbt", disk)
    first = call("VDI.snapshot", disk, {})
    assert tracked(first) is True
    clone, copied = call("VDI.clone", disk, {}), work(call, "VDI.copy", disk, sr)
    assert (tracked(clone), tracked(copied)) == (False, False)
    into = make_vdi(call, sr, 4 * MIB)
    assert work(call, "VDI.copy", disk, NULL, first, into) == into
    assert (tracked(into), tracked(disk)) == (False, True)
    call("VDI.data_destroy", first)
    record = call("VDI.get_record", first)
    assert (record["type"], record["cbt_enabled"]) == ("cbt_metadata", True), record
    assert record["other_config"]["content_id"] == "/No content: this is a cbt_metadata VDI/", record
    second = call("VDI.snapshot", disk, {})
    assert isinstance(call("VDI.list_changed_blocks", first, second), str)
    call("VDI.disable_cbt", disk)
    assert tracked(disk) is False
    third = call("VDI.snapshot", disk, {})
    assert tracked(third) is False
    for vdi in (third, second, first, into, copied, clone, disk):
        call("VDI.destroy", vdi)


def deltas(call):
    """A megabyte, a snapshot, one sector; the difference put onto a full copy of the snapshot is the disk."""
    sr = default_sr(call)
    original = make_vdi(call, sr, 4 * MIB)
    write(call, original, (0, b"a" * MIB))
    snapshot = call("VDI.snapshot", original, {})
    write(call, original, (0, b"b" * SECTOR))
    full = work(call, "VDI.copy", snapshot, sr)
    delta = work(call, "VDI.copy", original, sr, snapshot, NULL)
    assert int(call("VDI.get_physical_utilisation", delta)) <= int(call("VDI.get_physical_utilisation", full))
    assert work(call, "VDI.copy", delta, NULL, NULL, full) == full
    assert exported(call, full) == b"b" * SECTOR + b"a" * (MIB - SECTOR) + bytes(3 * MIB)
    for vdi in (full, delta, snapshot, original):
        call("VDI.destroy", vdi)


def round_trips(call, vdi, expected, sm_config):
    """All ways from one disk to others."""
    sr, size = default_sr(call), int(call("VDI.get_virtual_size", vdi))
    made = [work(call, "VDI.copy", vdi, sr)]
    for form in ("raw", "vhd"):
        other = make_vdi(call, sr, size, sm_config=sm_config)
        # What lies there before must not show through.
        write(call, other, (size - SECTOR, b"z" * SECTOR))
        status, _, body = put(call, exported(call, vdi, format=form), vdi=other, format=form)
        assert status == 200, body
        made.append(other)
    for other in made:
        assert exported(call, other) == expected
        call("VDI.destroy", other)


def contents(call):
    """Disks of both kinds: empty, written at a hundred places of any length, and full."""
    sr, size = default_sr(call), 4 * MIB
    for sm_config in ({"image-format": "vhd"}, {"type": "raw"}):
        vdi = make_vdi(call, sr, size, sm_config=sm_config)
        round_trips(call, vdi, bytes(size), sm_config)
        draw, disk = random.Random(7), bytearray(size)
        pieces = []
        for _ in range(100):
            length = draw.randrange(1, 4) * SECTOR
            at = draw.randrange(0, (size - length) // SECTOR) * SECTOR
            pieces.append((at, draw.randbytes(length)))
            disk[at : at + length] = pieces[-1][1]
        write(call, vdi, *pieces)
        round_trips(call, vdi, bytes(disk), sm_config)
        full = draw.randbytes(size)
        assert put(call, full, vdi=vdi, format="raw")[0] == 200
        round_trips(call, vdi, full, sm_config)
        call("VDI.destroy", vdi)


def around_two_gib(call):
    """Disks a block shorter and longer than 2^31 bytes, with something on both sides of it and at their ends."""
    sr, edge = default_sr(call), 1 << 31
    for size in (edge - 2 * MIB, edge + 2 * MIB):
        vdi = make_vdi(call, sr, size)
        places = [at for at in (0, edge - 4 * KIB, edge, size - 4 * KIB) if at + 4 * KIB <= size]
        write(call, vdi, *((at, bytes([1 + number]) * (4 * KIB)) for number, at in enumerate(places)))
        base = call("VDI.snapshot", vdi, {})
        write(call, vdi, (size - 4 * KIB, b"e" * (4 * KIB)))
        image = exported(call, vdi, format="vhd")
        assert len(image) < 16 * MIB, "the image has what was written, and no more"
        whole, copied = make_vdi(call, sr, size), work(call, "VDI.copy", vdi, sr)
        assert put(call, image, vdi=whole, format="vhd")[0] == 200
        chained = make_vdi(call, sr, size)
        for part in (exported(call, base, format="vhd"), exported(call, vdi, format="vhd", base=base)):
            assert put(call, part, vdi=chained, format="vhd")[0] == 200
        start = edge - 4 * MIB
        expected = end_of(call, vdi, start)
        assert expected.endswith(b"e" * (4 * KIB)) and len(expected) == size - start
        for other in (whole, copied, chained):
            assert end_of(call, other, start) == expected, size
        for one in (chained, copied, whole, base, vdi):
            call("VDI.destroy", one)


def largest(call):
    """A kibibyte at the end of the largest disk that a VHD has: an image of it stays small, and so does what it makes."""
    sr, mark = default_sr(call), bytes(range(256)) * 4
    vdi = make_vdi(call, sr, LARGEST)
    write(call, vdi, (LARGEST - KIB, mark))
    image = exported(call, vdi, format="vhd")
    assert len(image) < 16 * MIB, len(image)
    back = make_vdi(call, sr, LARGEST)
    assert put(call, image, vdi=back, format="vhd")[0] == 200
    for one in (vdi, back):
        assert end_of(call, one, LARGEST - 2 * KIB) == bytes(KIB) + mark
        assert int(call("VDI.get_physical_utilisation", one)) < 32 * MIB
        call("VDI.destroy", one)


tell(cleared(globals().copy()))
