"""The nights of a backup product that reads no NBD and no list of changed blocks: streams.py CLIENT DIR PART...

Each night is one VHD: `/export_raw_vdi?format=vhd`, and from the second on `&base=` the snapshot of the night before,
which stays until the next is there. The VHDs are kept in DIR and applied to the copy by the code below, which is no part
of the toolstack.
"""

import http.client
import os
import signal
import struct
import sys
import time
import urllib.parse

import backup
from backup import COPY, DIR, SIZE, contents, memory, remember
from clients import LIMIT, MIB, fails, make_vdi, outcome, processes, tell, wait, work

SECTOR, BLOCK = 512, 2 * MIB
NO_BLOCK = 0xFFFFFFFF


class Cut(Exception):
    """The answer has ended in its middle."""


def connect():
    url = urllib.parse.urlsplit(os.environ["TAPIO_HTTP"])
    return http.client.HTTPConnection(url.hostname, url.port, timeout=LIMIT)


def begin(call, **query):
    """An export, from its status on."""
    connection = connect()
    query = urllib.parse.urlencode({"session_id": call.reference, "format": "vhd", **query})
    connection.request("GET", f"/export_raw_vdi/?{query}")
    return connection.getresponse()


def download(call, task, path, during=None, **query):
    """A VHD in a file; `during` is done once, when a MiB of it has come."""
    try:
        reply = begin(call, task_id=task, **query)
        if reply.status != 200:
            raise Cut(f"{reply.status} {reply.read()}")
        length = int(reply.headers["content-length"])
        with open(path, "wb") as file:
            file.write(reply.read(min(MIB, length // 2)))
            if during:
                during()
            file.write(reply.read())
            if file.tell() != length:
                raise Cut(f"{file.tell()} of {length} bytes")
    except (OSError, http.client.HTTPException) as error:
        raise Cut(repr(error)) from error


def fetched(call, path, during=None, **query):
    """The same, again until it is whole, as products do: each attempt is a task of its own."""
    until = time.monotonic() + LIMIT
    attempts = 0
    while True:
        attempts += 1
        task = call("task.create", "of a product", "")
        try:
            download(call, task, path, during if attempts == 1 else None, **query)
            assert outcome(call, task) == "success"
            return attempts
        except Cut as cut:
            print("again:", cut)
            assert time.monotonic() < until, cut
            assert outcome(call, task) == "failure", "a task whose stream was cut has failed"
            time.sleep(0.05)
        finally:
            outcome(call, task)
            call("task.destroy", task)


def apply(path, to):
    """Writes what a VHD holds over a copy; how many of its blocks."""
    with open(path, "rb") as file:
        image = file.read()
    assert image[:8] == image[-512:-504] == b"conectix" and image[512:520] == b"cxsparse"
    at, count = struct.unpack(">Q", image[528:536])[0], struct.unpack(">I", image[540:544])[0]
    entries = struct.unpack(f">{count}I", image[at : at + 4 * count])
    held = [(block, entry * SECTOR) for block, entry in enumerate(entries) if entry != NO_BLOCK]
    with open(to, "r+b") as copy:
        for block, place in held:
            bits, data = image[place : place + SECTOR], image[place + SECTOR : place + SECTOR + BLOCK]
            assert len(data) == BLOCK
            if bits == b"\xff" * SECTOR:
                os.pwrite(copy.fileno(), data, block * BLOCK)
                continue
            for sector in range(BLOCK // SECTOR):
                if bits[sector // 8] & 0x80 >> sector % 8:
                    part = data[sector * SECTOR : (sector + 1) * SECTOR]
                    os.pwrite(copy.fileno(), part, block * BLOCK + sector * SECTOR)
    return held


def name_of(night):
    return os.path.join(DIR, f"night-{night}.vhd")


def prepare(call):
    """A disk in use, whose changed blocks are not tracked."""
    sr = call("pool.get_default_SR", call("pool.get_all")[0])
    vdi = make_vdi(call, sr, SIZE)
    backup.plug(call, vdi).write(0, os.urandom(4 * MIB))
    remember(sr=sr, nights=0, base=None)


def night(call, during=None):
    known = memory()
    number, base = known["nights"], known["base"]
    snapshot = work(call, "VDI.snapshot", known["vdi"], {})
    query = {"base": base} if base else {}
    attempts = fetched(call, name_of(number), during, vdi=snapshot, **query)
    if not base:
        with open(COPY, "wb") as copy:
            copy.truncate(SIZE)
    held = apply(name_of(number), COPY)
    truth = contents(call, snapshot)
    with open(COPY, "rb") as copy:
        assert copy.read() == truth, f"the copy of night {number} is not what the disk had"
    if base:
        call("VDI.destroy", base)
    remember(nights=number + 1, base=snapshot)
    last_quarter = [block for block, _ in held if block >= SIZE // BLOCK * 3 // 4]
    print("changed", len(held), "in the last quarter", len(last_quarter))
    return attempts


def full(call):
    assert night(call) == 1


def incremental(call):
    assert night(call) == 1


def incremental_killed(call):
    """The process that reads the images is killed in the middle of the stream."""
    workers = processes("storage-worker", DIR)
    assert workers

    def kill():
        for pid in workers:
            os.kill(pid, signal.SIGKILL)

    attempts = night(call, kill)
    print("attempts", attempts)


def cut(call):
    """A night whose stream is not read to its end, until the daemon is killed: it leaves a snapshot."""
    known = memory()
    snapshot = work(call, "VDI.snapshot", known["vdi"], {})
    remember(left=snapshot)
    reply = begin(call, vdi=snapshot, base=known["base"])
    assert reply.status == 200 and reply.read(1000)
    fails(call, "OTHER_OPERATION_IN_PROGRESS", "VDI.destroy", snapshot)
    print("done", flush=True)
    os._exit(0)


def settled(call):
    """After the restart nothing holds the snapshot of the night that was cut."""
    left = memory()["left"]
    wait("an end of what was cut", lambda: call("VDI.get_current_operations", left) == {})
    for task in call("task.get_all"):
        outcome(call, task)
        call("task.destroy", task)
    call("VDI.destroy", left)


def restore(call):
    """All nights, one after the other, into a new disk."""
    known = memory()
    made = make_vdi(call, known["sr"], SIZE)
    for number in range(known["nights"]):
        with open(name_of(number), "rb") as image:
            connection = connect()
            task = call("task.create", "of a product", "")
            query = {"session_id": call.reference, "vdi": made, "format": "vhd", "task_id": task}
            connection.request("PUT", "/import_raw_vdi/?" + urllib.parse.urlencode(query), body=image.read())
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            assert outcome(call, task) == "success"
            call("task.destroy", task)
    with open(COPY, "rb") as copy:
        assert contents(call, made) == copy.read(), "the restored disk differs"
    call("VDI.destroy", made)


def end(call):
    known = memory()
    call("VBD.unplug", known["vbd"])
    call("VBD.destroy", known["vbd"])
    for vdi in (known["base"], known["vdi"]):
        call("VDI.destroy", vdi)


if __name__ == "__main__":
    tell(globals())
