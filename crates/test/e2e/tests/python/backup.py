"""The nights of a backup product that reads changed blocks only: backup.py CLIENT DIR PART...

Each part is a session of its own. What it remembers is in DIR/backup.json, the copy of the disk in DIR/copy. After each
night the copy is compared with the whole snapshot, which a real product would not read.
"""

import base64
import hashlib
import json
import os
import sys

import exports
from clients import MIB, Plugged, fails, make_vdi, tell, wait, work

DIR = sys.argv[2]
SIZE = 128 * MIB
BLOCK = 64 << 10
MEMORY, COPY = os.path.join(DIR, "backup.json"), os.path.join(DIR, "copy")


class Device(Plugged):
    """A snapshot as a read-only block device of the daemon's host."""

    def __init__(self, call, vdi):
        super().__init__(call, vdi, "RO")


# How a snapshot is read: something with `read(offset, length)`, for the time of a `with`. `json+nbd` reads by NBD, and
# `json+nbd+kill` kills the process that serves it after the first block.
BY = sys.argv[1].split("+")[1:]
Reader = exports.Killed if "kill" in BY else exports.Reader if "nbd" in BY else Device
sys.argv[1] = sys.argv[1].split("+")[0]


def memory():
    with open(MEMORY, encoding="utf-8") as file:
        return json.load(file)


def remember(**changes):
    known = memory() if os.path.exists(MEMORY) else {}
    known.update(changes)
    with open(MEMORY, "w", encoding="utf-8") as file:
        json.dump(known, file)


def contents(call, vdi):
    with Reader(call, vdi) as disk:
        return b"".join(disk.read(at, MIB) for at in range(0, SIZE, MIB))


def plug(call, vdi):
    disk = Plugged(call, vdi).__enter__()
    remember(vdi=vdi, vbd=disk.vbd)
    print("/dev/" + disk.device)
    return disk


def prepare(call):
    """A disk in use; tracking begins while it is."""
    sr = call("pool.get_default_SR", call("pool.get_all")[0])
    vdi = make_vdi(call, sr, SIZE)
    plug(call, vdi).write(0, os.urandom(4 * MIB))
    work(call, "VDI.enable_cbt", vdi)
    assert call("VDI.get_cbt_enabled", vdi) is True
    remember(sr=sr)
    if BY and not exports.purpose(call):
        print("lacks a network")


def plug_again(call):
    """The disk process died, and the device with it."""
    known = memory()
    call("VBD.unplug_force", known["vbd"])
    call("VBD.destroy", known["vbd"])
    plug(call, known["vdi"])


def keep(call, snapshot):
    """A night ends: the data of its snapshot go, what is known of changed blocks stays; the one before goes."""
    truth = contents(call, snapshot)
    with open(COPY, "rb") as copy:
        held = copy.read()
    wrong = [at // BLOCK for at in range(0, SIZE, BLOCK) if held[at : at + BLOCK] != truth[at : at + BLOCK]]
    assert not wrong and len(held) == SIZE, f"blocks {wrong[:20]} of {len(wrong)} are not what the disk had"
    work(call, "VDI.data_destroy", snapshot)
    record = call("VDI.get_record", snapshot)
    assert record["type"] == "cbt_metadata" and record["cbt_enabled"] is True, record
    before = memory().get("base")
    if before:
        work(call, "VDI.destroy", before)
    remember(base=snapshot, truth=hashlib.sha256(truth).hexdigest())


def full(call):
    snapshot = work(call, "VDI.snapshot", memory()["vdi"], {})
    with open(COPY, "wb") as copy:
        copy.write(contents(call, snapshot))
    keep(call, snapshot)


def incremental(call):
    known = memory()
    snapshot = work(call, "VDI.snapshot", known["vdi"], {})
    fails(call, "VDI_IN_USE", "VDI.list_changed_blocks", known["base"], known["vdi"])
    bits = base64.b64decode(call("VDI.list_changed_blocks", known["base"], snapshot))
    assert len(bits) == SIZE // BLOCK // 8, len(bits)
    # Block 0 is the highest bit of the first byte.
    blocks = [block for block in range(SIZE // BLOCK) if bits[block // 8] & 0x80 >> block % 8]
    with Reader(call, snapshot) as disk, open(COPY, "r+b") as copy:
        for block in blocks:
            os.pwrite(copy.fileno(), disk.read(block * BLOCK, BLOCK), block * BLOCK)
    keep(call, snapshot)
    last_quarter = [block for block in blocks if block >= SIZE // BLOCK * 3 // 4]
    print("changed", len(blocks), "in the last quarter", len(last_quarter))


def cut(call):
    """A night that is broken off in its snapshot."""
    made = None
    try:
        made = call("VDI.snapshot", memory()["vdi"], {})
    except Exception as error:
        print("cut:", error)
    assert made is None, f"the snapshot {made} was not broken off"
    # The daemon may be gone: nothing is asked of it any more.
    print("done", flush=True)
    os._exit(0)


def settled(call):
    """Nothing is left of what was broken off: no snapshot but the last one remembered."""
    known = memory()
    wait("the end of what was half done", lambda: call("VDI.get_snapshots", known["vdi"]) == [known["base"]])


def restore(call):
    known = memory()
    made = make_vdi(call, known["sr"], SIZE)
    with open(COPY, "rb") as copy, Plugged(call, made) as disk:
        for at in range(0, SIZE, MIB):
            disk.write(at, copy.read(MIB))
    assert hashlib.sha256(contents(call, made)).hexdigest() == known["truth"], "the restored disk differs"
    call("VDI.destroy", made)


def end(call):
    known = memory()
    call("VBD.unplug", known["vbd"])
    call("VBD.destroy", known["vbd"])
    # Of a disk that is not in use the changes since the last night can be listed as well.
    assert base64.b64decode(call("VDI.list_changed_blocks", known["base"], known["vdi"]))
    work(call, "VDI.disable_cbt", known["vdi"])
    assert call("VDI.get_cbt_enabled", known["vdi"]) is False
    for vdi in (known["base"], known["vdi"]):
        call("VDI.destroy", vdi)


tell(globals())
