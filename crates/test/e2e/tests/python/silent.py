"""Clients that stop in the middle of a transfer: silent.py json DIR PART...

The daemon has small limits: `upload-time`, `write-time`, `head-time` and `body-time` are one second. Each client stays
connected and does nothing more.
"""

import http.client
import os
import socket
import sys
import urllib.parse

import archive
import images
from clients import LIMIT, MIB, cleared, outcome, processes, tell, wait

SIZE = 12 * MIB
PIB = 1 << 50


class Client:
    """A connection that begins a transfer, and its task."""

    def __init__(self, call, method, path, body=b"", **query):
        self.task = call("task.create", f"{method} {path} {query}", "")
        url = urllib.parse.urlsplit(os.environ["TAPIO_HTTP"])
        # A small buffer, so that what is sent to a client that reads nothing is not all with the kernel.
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        self.socket.settimeout(LIMIT)
        self.socket.connect((url.hostname, url.port))
        query = urllib.parse.urlencode({"session_id": call.reference, "task_id": self.task, **query})
        length = PIB if method == "PUT" else 0
        self.socket.sendall(f"{method} {path}?{query} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode())
        if body:
            self.socket.sendall(body)

    def rest(self):
        """What the server sent until it closed the connection."""
        data = bytearray()
        try:
            while piece := self.socket.recv(1 << 20):
                data += piece
        except ConnectionResetError:
            pass
        self.socket.close()
        return bytes(data)


def every_kind(call):
    """Each kind of transfer stops in its middle: its task fails, nothing is held, and other clients are served."""
    disk = images.contents(SIZE, (0, SIZE))
    raw, vhd, whole, part = [images.new(call, SIZE, disk) for _ in range(4)]
    image = images.exported(call, raw, format="vhd")
    vm, other = [archive.make_vm(call, name, [disk]) for name in ("silent", "packed")]
    packed = {kind: archive.exported(call, vm, use_compression=kind) for kind in ("false", "gzip", "zstd")}
    call("VM.get_all")
    before = [set(call(name + ".get_all")) for name in ("VM", "VDI", "VBD")]
    exports = [
        Client(call, "GET", "/export_raw_vdi", vdi=raw),
        Client(call, "GET", "/export_raw_vdi", vdi=vhd, format="vhd"),
        Client(call, "GET", "/export", ref=vm),
        Client(call, "GET", "/export", ref=other, use_compression="gzip"),
    ]
    imports = [
        Client(call, "PUT", "/import_raw_vdi", disk[: MIB + 100], vdi=whole),
        Client(call, "PUT", "/import_raw_vdi", image[: 5 * MIB], vdi=part, format="vhd"),
        Client(call, "PUT", "/import_raw_vdi", images.chunks((0, disk[:MIB]))[:-12], vdi=images.new(call, SIZE), chunked="true"),
        *(Client(call, "PUT", "/import", data[: len(data) // 2]) for data in packed.values()),
        # The head of an archive that does not come whole.
        Client(call, "PUT", "/import", packed["zstd"][:3]),
    ]
    # Others are answered as ever.
    for _ in range(20):
        assert call("VDI.get_uuid", raw)
    for one in exports:
        assert outcome(call, one.task) == "failure", call("task.get_record", one.task)
        error = call("task.get_error_info", one.task)
        assert error[0] == "INTERNAL_ERROR" and "took nothing for too long" in error[1], error
    for one in imports:
        assert outcome(call, one.task) == "failure", call("task.get_record", one.task)
        error = call("task.get_error_info", one.task)
        assert error[0] == "IMPORT_ERROR_PREMATURE_EOF", (call("task.get_name_label", one.task), error)
        text = one.rest()
        assert b"IMPORT_ERROR_PREMATURE_EOF" in text, text[-300:]
    for one in exports:
        assert len(one.rest()) < SIZE, "the rest never comes"
    # Nothing is held, and nothing is left.
    for name, found in zip(("VM", "VBD"), (before[0], before[2])):
        assert set(call(name + ".get_all")) == found, name
    assert before[1] <= set(call("VDI.get_all"))
    for one in (vm, other):
        wait("the VM", lambda: call("VM.get_current_operations", one) == {})
    wait("an end of decompressing", lambda: not processes("archive-decoder", sys.argv[2]))
    assert images.exported(call, raw)[:SIZE] == disk
    for vdi in (raw, vhd, whole, part):
        call("VDI.destroy", vdi)
    assert archive.exported(call, vm, use_compression="false")
    call("VM.set_blocked_operations", vm, {})
    call("VM.destroy", vm)


def heads(call):
    """Requests whose head does not come, or comes bit by bit, are cut off; others are answered meanwhile."""
    url = urllib.parse.urlsplit(os.environ["TAPIO_HTTP"])
    begun = b"GET /export_raw_vdi?vdi=x HTTP/1.1\r\nhost: x\r\nx-slow: "
    slow = []
    for number in range(60):
        one = socket.create_connection((url.hostname, url.port), LIMIT)
        one.sendall(begun[: 1 + number % len(begun)])
        slow.append(one)
    for _ in range(20):
        assert call("pool.get_all")
    status = images.get(call, vdi=images.new(call, MIB))[0]
    assert status == 200
    # One goes on, byte by byte: that does not give it more time.
    trickling = slow.pop()
    trickling.settimeout(0.05)
    sent = 0

    def is_cut():
        nonlocal sent
        try:
            trickling.sendall(b"a")
            sent += 1
            return trickling.recv(1) in (b"", b"H")
        except TimeoutError:
            return False
        except OSError:
            return True

    wait("the end of a slow head", is_cut)
    for one in slow:
        answer = one.recv(1 << 16)
        assert answer == b"" or b" 408 " in answer or b" 400 " in answer, answer
        one.close()
    # And a body of a call.
    one = http.client.HTTPConnection(url.hostname, url.port, timeout=LIMIT)
    one.putrequest("POST", "/jsonrpc")
    one.putheader("Content-Length", "1000")
    one.endheaders()
    one.sock.sendall(b"{")
    assert one.getresponse().status == 408


if __name__ == "__main__":
    tell(cleared(globals().copy()))
