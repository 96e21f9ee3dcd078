"""VDIs that are read by NBD: exports.py xml|json DIR PART...

`Remote` works as the npm package @vates/nbd-client: fixed newstyle without NO_ZEROES, STARTTLS where the record has a
certificate, EXPORT_NAME, simple replies, reads alone.
"""

import hashlib
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time

from clients import MIB, NULL, Failure, Json, Plugged, fails, make_vdi, tell, wait

DIR = sys.argv[2]
SIZE = 16 * MIB
IHAVEOPT = 0x49484156454F5054
EXPORT_NAME, LIST, STARTTLS = 1, 3, 5
READ, WRITE, DISC = 0, 1, 2
LIMIT = 60


class Refused(Exception):
    """The server has closed the connection, or answered with an error."""


class Remote:
    """A disk, over one connection."""

    def __init__(self, record, name=None, tls=True):
        self.record, self.tls = record, tls
        self.name = record["exportname"] if name is None else name

    def __enter__(self):
        self.begin()
        self.send_option(EXPORT_NAME, self.name.encode())
        self.size, flags = struct.unpack(">QH", self.receive(10))
        assert flags & 1 and flags & 2, "there are flags, and it is read-only"
        assert self.receive(124) == bytes(124)
        self.cookie = 0
        return self

    def listed(self):
        """What the server tells of its exports."""
        self.begin()
        kinds = []
        kind, data = self.option(LIST)
        while kind != 1:
            kinds.append(data)
            kind, data = struct.unpack(">QIII", self.receive(20))[2], b""
        self.socket.close()
        return kinds

    def begin(self):
        self.socket = socket.create_connection((self.record["address"], int(self.record["port"])), LIMIT)
        magic, option, flags = struct.unpack(">QQH", self.receive(18))
        assert (magic, option, flags & 1) == (0x4E42444D41474943, IHAVEOPT, 1)
        self.socket.sendall(struct.pack(">I", 1))
        if self.record["cert"] and self.tls:
            assert self.option(STARTTLS)[0] == 1, "TLS begins"
            # The record's certificate is what a client trusts, for the record's subject.
            context = ssl.create_default_context(cadata=self.record["cert"])
            self.socket = context.wrap_socket(self.socket, server_hostname=self.record["subject"])

    def __exit__(self, *_):
        try:
            self.request(DISC, 0, 0)
        except OSError:
            pass
        self.socket.close()

    def receive(self, length):
        data = bytearray()
        while len(data) < length:
            piece = self.socket.recv(length - len(data))
            if not piece:
                raise Refused("the connection has ended")
            data += piece
        return bytes(data)

    def send_option(self, option, data=b""):
        self.socket.sendall(struct.pack(">QII", IHAVEOPT, option, len(data)) + data)

    def option(self, option, data=b""):
        """The kind of the answer, and its data."""
        self.send_option(option, data)
        magic, of, kind, length = struct.unpack(">QIII", self.receive(20))
        assert (magic, of) == (0x3E889045565A9, option)
        return kind, self.receive(length)

    def request(self, command, offset, length, data=b""):
        self.cookie += 1
        self.socket.sendall(struct.pack(">IHHQQI", 0x25609513, 0, command, self.cookie, offset, length) + data)

    def reply(self):
        magic, error, cookie = struct.unpack(">IIQ", self.receive(16))
        assert (magic, cookie) == (0x67446698, self.cookie)
        return error

    def read(self, offset, length):
        self.request(READ, offset, length)
        assert self.reply() == 0
        return self.receive(length)


def records(call, vdi):
    return call("VDI.get_nbd_info", vdi)


class Reader:
    """A VDI by NBD, opened as backup products do; a connection that is lost is made again by another record."""

    def __init__(self, call, vdi):
        self.call, self.vdi, self.remote = call, vdi, None

    def __enter__(self):
        self.remote = Remote(records(self.call, self.vdi)[0]).__enter__()
        return self

    def __exit__(self, *_):
        self.remote.__exit__()

    def read(self, offset, length):
        try:
            return self.remote.read(offset, length)
        except (OSError, Refused) as error:
            print("connects again:", error)
        until = time.monotonic() + LIMIT
        while True:
            try:
                self.remote = Remote(self.remote.record).__enter__()
                return self.remote.read(offset, length)
            except (OSError, Refused):
                assert time.monotonic() < until, "it does not come back"
                time.sleep(0.05)


def disk_processes():
    """Processes of disks of the daemon below DIR."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                lines = file.read().split(b"\0")
        except OSError:
            continue
        mark = f"TAPIO_RUN_DIR={DIR}/".encode()
        if any(line.startswith(mark) for line in lines) and any(line.startswith(b"TAPIO_VBD=") for line in lines):
            found.add(int(pid))
    return found


class Killed(Reader):
    """The same; the process that serves it is killed after the first block."""

    def __enter__(self):
        before = disk_processes()
        super().__enter__()
        self.victims = disk_processes() - before
        # None where a process that is there already serves it.
        assert len(self.victims) <= 1, self.victims
        return self

    def read(self, offset, length):
        data = super().read(offset, length)
        while self.victims:
            os.kill(self.victims.pop(), signal.SIGKILL)
        return data


def networks(call):
    """Networks by which this host has an address."""
    pifs = call("PIF.get_all_records").values()
    return [pif["network"] for pif in pifs if pif["IP"]]


def purpose(call):
    """One network is for NBD."""
    found = networks(call)
    if not found:
        print("lacks a network")
        return False
    call("network.add_purpose", found[0], "nbd")
    return True


def made(call, size=SIZE):
    """A disk with contents, and a snapshot of it."""
    sr = call("pool.get_default_SR", call("pool.get_all")[0])
    vdi = make_vdi(call, sr, size)
    data = os.urandom(4 * MIB) + bytes(size - 5 * MIB) + os.urandom(MIB)
    task = call("task.create", "contents", "")
    query = f"vdi={vdi}&session_id={call.reference}&task_id={task}"
    url = os.environ["TAPIO_HTTP"] + "/import_raw_vdi?" + query
    put = ["curl", "-sS", "-f", "-X", "PUT", "--data-binary", "@-", "-H", "Expect:", url]
    subprocess.run(put, input=data, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)
    call("task.destroy", task)
    return vdi, call("VDI.snapshot", vdi, {}), data


def refused(record, name=None, tls=True):
    try:
        with Remote(record, name, tls):
            pass
    except (Refused, OSError, ssl.SSLError):
        return True
    return False


def info(call):
    """The records, and who may use them."""
    vdi, snapshot, data = made(call)
    assert records(call, snapshot) == [], "no network is for NBD"
    assert not [name for name in call("VDI.get_record", snapshot)["sm_config"] if name.startswith("host_")]
    if not purpose(call):
        return
    network = networks(call)[0]
    assert call("network.get_purpose", network) == ["nbd"]
    call("network.add_purpose", network, "nbd")
    assert call("network.get_purpose", network) == ["nbd"], "twice is once"
    assert fails(call, "NETWORK_INCOMPATIBLE_PURPOSES", "network.add_purpose", network, "insecure_nbd") == [
        "insecure_nbd",
        "nbd",
    ]
    found = records(call, snapshot)
    assert found and {tuple(sorted(record)) for record in found} == {
        ("address", "cert", "exportname", "port", "subject")
    }
    uuid = call("VDI.get_uuid", snapshot)
    for record in found:
        assert record["exportname"] == f"/{uuid}?session_id={call.reference}"
        assert record["cert"].startswith("-----BEGIN CERTIFICATE-----") and record["subject"]
        assert "PRIVATE" not in record["cert"]
        with Remote(record) as disk:
            assert disk.size == SIZE
            assert b"".join(disk.read(at, MIB) for at in range(0, SIZE, MIB)) == data
            disk.request(WRITE, 0, 512, bytes(512))
            assert disk.reply() in (1, 30), "writes are refused"
    record = found[0]
    for name in ("", "/", uuid, "/" + uuid, f"/{uuid}?session_id=", f"/{uuid}?session_id={NULL}"):
        assert refused(record, name), name
    assert refused(record, tls=False), "TLS is needed"
    assert Remote(record).listed() == [], "nothing tells the name"
    # A disk that a VM may write cannot be read beside it; one without clients gives way to it.
    with Remote(record) as disk:
        fails(call, "VDI_IN_USE", "VDI.destroy", snapshot)
        assert disk.read(0, MIB) == data[:MIB]
    with Plugged(call, vdi):
        assert fails(call, "VDI_IN_USE", "VDI.get_nbd_info", vdi)[0] == vdi
    assert records(call, vdi)
    with Plugged(call, vdi):
        pass
    call("VDI.destroy", snapshot)
    call("VDI.destroy", vdi)
    call("network.remove_purpose", network, "nbd")
    assert call("network.get_purpose", network) == []


def sessions(call):
    """A name is valid as long as its session; a client stays."""
    vdi, snapshot, data = made(call)
    if not purpose(call):
        return
    other = Json()
    theirs, ours = records(other, snapshot)[0], records(call, snapshot)[0]
    assert theirs["port"] == ours["port"] and theirs["exportname"] != ours["exportname"]
    with Remote(theirs) as disk:
        other.logout()
        wait("the end of the name", lambda: refused(theirs))
        assert disk.read(0, MIB) == data[:MIB], "a client that is connected stays"
        with Remote(ours) as again:
            assert again.read(0, MIB) == data[:MIB]
    # Without a session and without clients the export ends by itself.
    last = Json()
    with Remote(records(last, vdi)[0]) as disk:
        assert disk.read(0, MIB) == data[:MIB]
    last.logout()
    tagged = lambda of: [name for name in call("VDI.get_record", of)["sm_config"] if name.startswith("host_")]
    wait("the end of the export", lambda: not tagged(vdi))
    assert tagged(snapshot), "that of an open session stays"
    for disk in (snapshot, vdi):
        call("VDI.destroy", disk)


def tools(call):
    """Other clients read it over TLS: the record for a test that runs them."""
    vdi, snapshot, data = made(call)
    if not purpose(call):
        return
    record = records(call, snapshot)[0]
    with open(os.path.join(DIR, "ca-cert.pem"), "w", encoding="ascii") as file:
        file.write(record["cert"])
    with open(os.path.join(DIR, "expected"), "wb") as file:
        file.write(data)
    name = record["exportname"].replace("?", "%3F").replace("=", "%3D")
    address = record["address"] if ":" not in record["address"] else f"[{record['address']}]"
    uri = f"nbds://{address}:{record['port']}/{name}?tls-certificates={DIR}"
    for command in (
        ["nbdcopy", "--destination-is-zero", uri, os.path.join(DIR, "nbdcopy.raw")],
        ["nbdinfo", "--size", uri],
    ):
        done = subprocess.run(command, timeout=LIMIT, capture_output=True, text=True)
        assert done.returncode == 0, (command[0], done.stderr)
    qemu = (
        f"driver=nbd,server.type=inet,server.host={record['address']},server.port={record['port']},"
        f"export={record['exportname']},tls-creds=tls"
    )
    secret = f"tls-creds-x509,id=tls,dir={DIR},endpoint=client"
    command = ["qemu-img", "convert", "--object", secret, "--image-opts", qemu, "-O", "raw", os.path.join(DIR, "qemu.raw")]
    done = subprocess.run(command, timeout=LIMIT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for file in ("nbdcopy.raw", "qemu.raw"):
        with open(os.path.join(DIR, file), "rb") as copy:
            assert hashlib.sha256(copy.read()).digest() == hashlib.sha256(data).digest(), file
    for disk in (snapshot, vdi):
        call("VDI.destroy", disk)


def silent(call):
    """A client that reads nothing is disconnected, and another goes on meanwhile."""
    vdi, snapshot, data = made(call, 64 * MIB)
    if not purpose(call):
        return
    record = records(call, snapshot)[0]
    deaf = Remote(record).__enter__()
    for at in range(0, 64 * MIB, 2 * MIB):
        deaf.request(READ, at, 2 * MIB)
    with Remote(record) as disk:
        for at in range(0, 4 * MIB, MIB):
            assert disk.read(at, MIB) == data[at : at + MIB], "another client is served"
        fails(call, "VDI_IN_USE", "VDI.destroy", snapshot)

    def destroyed():
        try:
            call("VDI.destroy", snapshot)
        except Failure as failure:
            assert failure.code == "VDI_IN_USE", failure.details
            return False
        return True

    # It was told nothing, reads nothing, and holds the VDI no more.
    wait("the end of a client that reads nothing", destroyed)
    call("VDI.destroy", vdi)
    deaf.socket.close()


if __name__ == "__main__":
    tell(globals())
