"""Disks that come and go over HTTP: images.py xml|json DIR PART... Files that the caller looks at are left in DIR."""

import base64
import http.client
import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import urllib.parse

from clients import MIB, PASSWORD, USER, cleared, fails, make_vbd, make_vdi, outcome, tell, wait

SECTOR, BLOCK = 512, 2 * MIB
# What clients announce that do not know how much they will send.
PIB = 1 << 50


def url():
    return urllib.parse.urlsplit(os.environ["TAPIO_HTTPS"])


def connect():
    context = ssl._create_unverified_context()
    return http.client.HTTPSConnection(url().hostname, url().port, context=context, timeout=60)


def path_of(name, query):
    # Xen Orchestra writes the slash.
    return f"/{name}/?" + urllib.parse.urlencode(query)


def get(call, headers={}, **query):
    """An export: status, headers, body."""
    connection = connect()
    connection.request("GET", path_of("export_raw_vdi", {"session_id": call.reference, **query}), headers=headers)
    reply = connection.getresponse()
    return reply.status, reply.headers, reply.read()


def put(call, body, headers={}, **query):
    """An import: status, headers, body."""
    connection = connect()
    query = {"session_id": call.reference, **query}
    connection.request("PUT", path_of("import_raw_vdi", query), body=body, headers=headers)
    reply = connection.getresponse()
    return reply.status, reply.headers, reply.read()


def exported(call, vdi, **query):
    status, headers, body = get(call, vdi=vdi, **query)
    assert status == 200, (status, body)
    assert int(headers["content-length"]) == len(body)
    return body


def contents(size, *data):
    """A disk of zeros with random bytes at some places."""
    disk = bytearray(size)
    for start, length in data:
        disk[start : start + length] = random.Random(start).randbytes(length)
    return bytes(disk)


def new(call, size, disk=None, **changes):
    vdi = make_vdi(call, default_sr(call), size, **changes)
    if disk is not None:
        status, _, body = put(call, disk, vdi=vdi, format="raw")
        assert status == 200, body
    return vdi


def default_sr(call):
    return call("pool.get_default_SR", call("pool.get_all")[0])


def keep(name, body):
    with open(os.path.join(sys.argv[2], name), "wb") as file:
        file.write(body)


def raw(call):
    disk = contents(9 * MIB, (0, MIB), (5 * MIB + SECTOR, MIB), (9 * MIB - SECTOR, SECTOR))
    vdi = make_vdi(call, default_sr(call), len(disk))
    size = int(call("VDI.get_virtual_size", vdi))
    disk += bytes(size - len(disk))
    task = call("task.create", "of a product", "")
    status, headers, body = put(call, disk, vdi=call("VDI.get_uuid", vdi), task_id=task, format="raw")
    assert (status, headers["task-id"]) == (200, task), (status, body)
    assert outcome(call, task) == "success"
    assert call("task.get_result", task) == f"<value>{vdi}</value>", call("task.get_result", task)
    assert 0 < int(call("VDI.get_physical_utilisation", vdi)) < 8 * MIB, "zeros take no room"

    task = call("task.create", "of a product", "")
    status, headers, body = get(call, vdi=vdi, task_id=task)
    assert (status, body == disk, int(headers["content-length"])) == (200, True, size), status
    # With the last byte the task has ended, and nothing holds the VDI.
    assert (call("task.get_status", task), call("VDI.get_current_operations", vdi)) == ("success", {})
    uuid = call("VDI.get_uuid", vdi)
    assert headers["content-disposition"] == f'attachment; filename="{uuid}.raw"', headers
    assert (headers["content-type"], headers["task-id"]) == ("application/octet-stream", task)
    assert outcome(call, task) == "success"

    # The rest of a download, as long as the disk is the same.
    part = {"Range": "bytes=5000000-", "If-Match": headers["etag"]}
    status, again, body = get(call, part, vdi=vdi)
    assert (status, body == disk[5000000:]) == (206, True), status
    assert again["content-range"] == f"bytes 5000000-{size - 1}/{size}"
    for start in (size, size + 1):
        assert get(call, {"Range": f"bytes={start}-"}, vdi=vdi)[0] == 416
    # The rest of an upload.
    rest = contents(size, (4 * MIB, MIB))[4 * MIB :]
    headers = {"Content-Range": f"bytes {4 * MIB}-{size - 1}/{size}"}
    assert put(call, rest, headers, vdi=vdi)[0] == 200
    disk = disk[: 4 * MIB] + rest
    assert exported(call, vdi) == disk
    assert get(call, part, vdi=vdi)[0] == 412

    # A length that ends within a sector: what lies behind stays.
    assert put(call, b"x" * 700, vdi=vdi)[0] == 200
    disk = b"x" * 700 + disk[700:]
    assert exported(call, vdi) == disk
    # Into a new VDI.
    status, headers, body = put(call, disk[: 3 * MIB + 7], sr_id=default_sr(call), format="raw")
    assert status == 200, body
    made = call("task.get_result", headers["task-id"])[len("<value>") : -len("</value>")]
    assert call("VDI.get_name_label", made) == "Imported VDI"
    got = exported(call, made)
    assert got[: 3 * MIB + 7] == disk[: 3 * MIB + 7] and not any(got[3 * MIB + 7 :])


def by_curl(call):
    """A client with an account instead of a session, over TLS and without; and the socket of this host."""
    disk = contents(4 * MIB, (MIB, MIB))
    vdi = new(call, len(disk))
    source = os.path.join(sys.argv[2], "curl.raw")
    keep("curl.raw", disk)
    target = os.path.join(sys.argv[2], "curl.out")
    account = ["-u", f"{USER}:{PASSWORD}"]
    ways = [
        ([*account, "-k"], os.environ["TAPIO_HTTPS"]),
        (account, os.environ["TAPIO_HTTP"]),
        (["--unix-socket", os.environ["TAPIO_SOCKET"]], "http://localhost"),
    ]
    for options, base in ways:
        curl = ["curl", "-sS", "--fail", *options]
        base = base.rstrip("/")
        subprocess.run([*curl, "-T", source, f"{base}/import_raw_vdi?vdi={vdi}&format=raw"], check=True)
        subprocess.run([*curl, "-o", target, f"{base}/export_raw_vdi?vdi={vdi}"], check=True)
        with open(target, "rb") as file:
            assert file.read() == disk
        with open(target, "r+b") as file:
            file.truncate(1234567)
        subprocess.run([*curl, "-C", "-", "-o", target, f"{base}/export_raw_vdi?vdi={vdi}"], check=True)
        with open(target, "rb") as file:
            assert file.read() == disk
    wrong = ["curl", "-sS", "-k", "-u", f"{USER}:wrong", "-o", "/dev/null", "-w", "%{http_code}"]
    said = subprocess.run([*wrong, f"{ways[0][1]}/export_raw_vdi?vdi={vdi}"], check=True, capture_output=True)
    assert said.stdout == b"401", said


def table_of(image):
    """Blocks of a VHD and their places."""
    assert image[:8] == image[-512:-504] == b"conectix" and image[512:520] == b"cxsparse"
    at, count = struct.unpack(">Q", image[528:536])[0], struct.unpack(">I", image[540:544])[0]
    entries = struct.unpack(f">{count}I", image[at : at + 4 * count])
    return {block: entry * SECTOR for block, entry in enumerate(entries) if entry != 0xFFFFFFFF}


def vhd(call):
    # One block is written in part, one not at all.
    disk = contents(11 * MIB, (0, 3 * MIB), (6 * MIB + SECTOR, 5 * SECTOR), (10 * MIB, MIB))
    vdi = new(call, len(disk), disk)
    size = int(call("VDI.get_virtual_size", vdi))
    disk += bytes(size - len(disk))
    status, headers, image = get(call, vdi=vdi, format="vhd")
    assert (status, headers["content-type"]) == (200, "application/vhd"), status
    assert headers["content-disposition"].endswith('.vhd"'), headers
    table = table_of(image)
    assert set(table) == {0, 1, 3, 5}, table
    for block, at in table.items():
        assert image[at : at + SECTOR] == b"\xff" * SECTOR, "every bit is set"
        data = image[at + SECTOR : at + SECTOR + BLOCK]
        assert data[: size - block * BLOCK] == disk[block * BLOCK : (block + 1) * BLOCK]
    keep("whole.vhd", image)
    keep("whole.raw", disk)
    for start in (100, len(image) - 300, table[1] + 100, table[1] + SECTOR + 7):
        assert get(call, {"Range": f"bytes={start}-"}, vdi=vdi, format="vhd")[2] == image[start:], start

    # Over other data: what the image does not hold is cleared.
    other = new(call, size, contents(size, (MIB, 8 * MIB)))
    assert put(call, image, vdi=other, format="vhd")[0] == 200
    assert exported(call, other) == disk
    # Images of others, with bitmaps that say something.
    subprocess.run(
        ["qemu-img", "convert", "-f", "raw", "-O", "vpc", "-o", "subformat=dynamic,force_size=on"]
        + [os.path.join(sys.argv[2], name) for name in ("whole.raw", "qemu.vhd")],
        check=True,
    )
    with open(os.path.join(sys.argv[2], "qemu.vhd"), "rb") as file:
        foreign = file.read()
    third = new(call, size)
    status, _, body = put(call, foreign, vdi=third, format="vhd")
    assert status == 200, body
    assert exported(call, third) == disk


def chunks(*pieces):
    parts = [struct.pack("<QI", at, len(data)) + data for at, data in pieces]
    return b"".join(parts) + struct.pack("<QI", 0, 0)


def delta(call):
    """A backup: whole, then the difference of two snapshots; both restored."""
    disk = contents(8 * MIB, (0, MIB), (5 * MIB, MIB))
    vdi = new(call, len(disk), disk)
    first = call("VDI.snapshot", vdi, {})
    # As other toolstacks write: pieces with their places.
    pieces = [(512, b"b" * 512), (4 * MIB, bytes(MIB)), (6 * MIB, b"c" * 1024), (6 * MIB, bytes(512))]
    status, _, body = put(call, chunks(*pieces), vdi=vdi, chunked="true")
    assert status == 200, body
    changed = bytearray(disk)
    for at, data in pieces:
        changed[at : at + len(data)] = data
    second = call("VDI.snapshot", vdi, {})
    assert exported(call, second) == changed and exported(call, first) == disk
    whole = exported(call, first, format="vhd")
    difference = exported(call, second, format="vhd", base=first)
    assert struct.unpack(">I", difference[60:64])[0] == 4, "a differencing disk"
    assert set(table_of(difference)) <= {0, 2, 3} and {0, 3} <= set(table_of(difference)), table_of(difference)
    names = [call("VDI.get_uuid", snapshot) + ".vhd" for snapshot in (first, second)]
    keep(names[0], whole)
    keep(names[1], difference)
    keep("chain", "\n".join(names).encode())
    keep("changed.raw", bytes(changed))
    restored = new(call, len(disk))
    assert put(call, whole, vdi=restored, format="vhd")[0] == 200
    assert put(call, difference, vdi=restored, format="vhd")[0] == 200
    assert exported(call, restored) == changed
    # Two disks that have no image in common: their contents are compared.
    stranger = new(call, len(disk), disk)
    compared = exported(call, second, format="vhd", base=stranger)
    assert set(table_of(compared)) == {0, 3}, table_of(compared)


def begin(call, length, **query):
    """A request with this length whose body is still to be sent."""
    plain = socket.create_connection((url().hostname, url().port), timeout=60)
    secure = ssl._create_unverified_context().wrap_socket(plain)
    path = path_of("import_raw_vdi", {"session_id": call.reference, **query})
    head = f"PUT {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
    secure.sendall(head.encode())
    return secure


def answer_of(stream):
    reply = http.client.HTTPResponse(stream, method="PUT")
    reply.begin()
    return reply.status, reply.read()


def head_of(stream):
    """The status of an answer whose body is not read."""
    said = b""
    while not said.endswith(b"\r\n\r\n"):
        said += stream.recv(1)
    return int(said.split()[1])


def unknown_length(call):
    disk = contents(5 * MIB, (MIB, MIB))
    vdi = new(call, len(disk))
    disk += bytes(int(call("VDI.get_virtual_size", vdi)) - len(disk))
    # First it is looked for a redirection.
    before = len(call("task.get_all"))
    assert put(call, b"", vdi=vdi, format="raw")[0] == 200
    assert len(call("task.get_all")) == before and not any(exported(call, vdi))
    for form, image in (("raw", disk), ("vhd", None)):
        image = image or exported(call, vdi, format="vhd")
        task = call("task.create", "of a product", "")
        stream = begin(call, PIB, vdi=vdi, format=form, task_id=task)
        stream.sendall(image)
        status, body = answer_of(stream)
        assert status == 200, body
        assert outcome(call, task) == "success"
        assert exported(call, vdi) == disk

    # A product that looks for a redirection before its stream: no body comes. It is answered, and nothing is left.
    before = set(call("task.get_all"))
    stream = begin(call, PIB, vdi=vdi, format="raw")
    assert head_of(stream) == 200
    stream.close()
    assert set(call("task.get_all")) == before and call("VDI.get_current_operations", vdi) == {}
    stream = begin(call, PIB, vdi="OpaqueRef:none", format="raw")
    assert answer_of(stream)[0] == 400
    # A stream that begins later than its answer arrives, whole; and the connection is cut where it does not.
    for sent, is_whole in ((b"l" * len(disk), True), (b"s" * MIB, False)):
        stream = begin(call, PIB, vdi=vdi, format="raw")
        assert head_of(stream) == 200
        stream.sendall(sent)
        if not is_whole:
            stream.close()
            wait("the end of the import", lambda: get(call, vdi=vdi)[0] == 200)
            continue
        assert stream.recv(4096) in (b"0\r\n\r\n", b""), "the end of an answer"
        assert exported(call, vdi) == sent
    assert put(call, disk, vdi=vdi, format="raw")[0] == 200

    # The connection is cut: the task failed, and says where to go on.
    task = call("task.create", "of a product", "")
    stream = begin(call, len(disk), vdi=vdi, format="raw", task_id=task)
    stream.sendall(b"y" * (3 * MIB + 700))
    stream.close()
    assert outcome(call, task) == "failure"
    assert call("task.get_error_info", task)[0] == "IMPORT_ERROR_PREMATURE_EOF", call("task.get_record", task)
    received = int(call("task.get_other_config", task)["received"])
    assert received % SECTOR == 0 and received <= 3 * MIB + 700, received
    assert exported(call, vdi) == b"y" * received + disk[received:]


def errors(call):
    """Every way in which a transfer fails: the status, the error of the task, and that the task failed."""
    sr, size = default_sr(call), 4 * MIB
    vdi, second = new(call, size), new(call, size)
    image = exported(call, vdi, format="vhd")
    damaged = image[:600] + b"\xff" + image[601:]
    frozen = new(call, size, read_only=True)
    uuid = "8f7b1c7e-0000-4000-8000-000000000000"
    cases = [
        ("GET", {"vdi": "OpaqueRef:none"}, b"", {}, 400, "HANDLE_INVALID"),
        ("GET", {"vdi": uuid}, b"", {}, 400, "UUID_INVALID"),
        ("GET", {}, b"", {}, 400, "VDI_MISSING"),
        ("GET", {"vdi": vdi, "format": "qcow3"}, b"", {}, 404, "INTERNAL_ERROR"),
        ("GET", {"vdi": vdi, "format": "vhd", "base": uuid}, b"", {}, 400, "UUID_INVALID"),
        ("GET", {"vdi": vdi, "base": second}, b"", {}, 400, "INTERNAL_ERROR"),
        ("GET", {"vdi": vdi}, b"", {"Range": f"bytes={size + 1}-"}, 416, "SR_BACKEND_FAILURE_79"),
        ("GET", {"vdi": vdi}, b"", {"If-Match": '"another"'}, 412, "INTERNAL_ERROR"),
        ("PUT", {"sr_id": "OpaqueRef:fake_sr"}, b"x" * 512, {}, 400, "HANDLE_INVALID"),
        ("PUT", {"sr_uuid": uuid}, b"x" * 512, {}, 400, "UUID_INVALID"),
        ("PUT", {"vdi": "OpaqueRef:none"}, b"x" * 512, {}, 400, "HANDLE_INVALID"),
        ("PUT", {}, b"x", {}, 400, "VDI_MISSING"),
        ("PUT", {"vdi": vdi, "format": "qcow3"}, b"x", {}, 404, "INTERNAL_ERROR"),
        ("PUT", {"vdi": vdi, "format": "vhd", "chunked": "true"}, b"x", {}, 404, "INTERNAL_ERROR"),
        ("PUT", {"sr_id": sr, "format": "vhd"}, image, {}, 400, "INTERNAL_ERROR"),
        ("PUT", {"vdi": vdi}, iter([b"x" * 512]), {}, 403, "IMPORT_ERROR_CANNOT_HANDLE_CHUNKED"),
        ("PUT", {"vdi": frozen}, b"x" * 512, {}, 400, "VDI_READONLY"),
        ("PUT", {"vdi": vdi}, bytes(size + 1), {}, 400, "VDI_TOO_SMALL"),
        ("PUT", {"vdi": vdi, "format": "vhd"}, b"x" * 4096, {}, 400, "IMPORT_ERROR"),
        ("PUT", {"vdi": vdi, "format": "vhd"}, damaged, {}, 400, "IMPORT_ERROR"),
        ("PUT", {"vdi": vdi, "format": "vhd"}, image[:-3000], {}, 400, "IMPORT_ERROR_PREMATURE_EOF"),
        ("PUT", {"vdi": vdi, "chunked": "1"}, chunks((0, b"xyz")), {}, 400, "IMPORT_ERROR"),
        ("PUT", {"vdi": vdi, "chunked": "1"}, chunks((size, b"x" * 512)), {}, 400, "SR_BACKEND_FAILURE_79"),
        ("PUT", {"vdi": vdi, "chunked": "1"}, chunks((0, b"x" * 512))[:-1], {}, 400, "IMPORT_ERROR_PREMATURE_EOF"),
        ("PUT", {"vdi": vdi}, b"", {}, 400, "IMPORT_ERROR_PREMATURE_EOF"),
    ]
    for method, query, body, headers, status, code in cases:
        what = (method, query, status, code)
        task = call("task.create", "of a product", "")
        if method == "GET":
            got, _, text = get(call, headers, task_id=task, **query)
        else:
            got, _, text = put(call, body, headers, task_id=task, **query)
        assert got == status, (what, got, text)
        assert outcome(call, task) == "failure", (what, call("task.get_record", task))
        assert call("task.get_error_info", task)[0] == code, (what, call("task.get_error_info", task))
    # A session that is none, and a task that is none.
    connection = connect()
    connection.request("GET", path_of("export_raw_vdi", {"session_id": "OpaqueRef:none", "vdi": vdi}))
    reply = connection.getresponse()
    assert reply.status == 401 and reply.headers["www-authenticate"].startswith("Basic"), reply.status
    assert get(call, vdi=vdi, task_id="OpaqueRef:none")[0] == 400
    # A task that is over begins nothing.
    assert get(call, vdi=vdi, task_id=task)[0] == 409
    # Nothing of it holds the disks.
    for one in (vdi, second):
        call("VDI.destroy", one)


def early(call):
    """An error is told to a client that still sends."""
    vdi = new(call, 64 * MIB)
    task = call("task.create", "of a product", "")
    stream = begin(call, 64 * MIB, vdi=vdi, format="vhd", task_id=task)
    try:
        for _ in range(64):
            stream.sendall(b"no image" * (MIB // 8))
    except OSError:
        pass
    status, body = answer_of(stream)
    assert status == 400 and b"IMPORT_ERROR" in body, (status, body)
    assert outcome(call, task) == "failure"
    call("VDI.destroy", vdi)


def in_use(call):
    """What an export and an import hold, and what holds them."""
    vdi = new(call, 256 * MIB)
    connection = connect()
    task = call("task.create", "of a product", "")
    query = {"session_id": call.reference, "vdi": vdi, "task_id": task}
    connection.request("GET", path_of("export_raw_vdi", query))
    reply = connection.getresponse()
    reply.read(1000)
    assert call("VDI.get_current_operations", vdi) == {task: "copy"}
    fails(call, "OTHER_OPERATION_IN_PROGRESS", "VDI.destroy", vdi)
    fails(call, "OTHER_OPERATION_IN_PROGRESS", "VDI.snapshot", vdi, {})
    assert put(call, b"x" * 512, vdi=vdi)[0] == 409
    small = exported(call, vdi, format="vhd")
    assert len(small) < MIB, "a second reader is served, and an empty disk is small"
    [template] = call("VM.get_by_name_label", "Simulated guest")
    vm = call("VM.clone", template, "of a product")
    call("VM.provision", vm)
    call("VM.start", vm, False, False)
    vbd = make_vbd(call, vm, vdi, userdevice="1")
    fails(call, "VDI_IN_USE", "VBD.plug", vbd)
    call("task.cancel", task)
    assert outcome(call, task) == "cancelled"
    try:
        reply.read()
        raise AssertionError("a part is taken for the whole")
    except http.client.IncompleteRead:
        pass
    wait("the end of an export", lambda: call("VDI.get_current_operations", vdi) == {})
    call("VBD.plug", vbd)
    task = call("task.create", "of a product", "")
    status, _, body = get(call, vdi=vdi, task_id=task)
    assert status == 409 and b"VDI_IN_USE" in body, (status, body)
    assert outcome(call, task) == "failure"
    assert put(call, b"x" * 512, vdi=vdi)[0] == 409
    snapshot = call("VDI.snapshot", vdi, {})
    assert not any(exported(call, snapshot)[:MIB]), "a snapshot of a plugged disk is served"
    call("VBD.unplug", vbd)
    call("VM.hard_shutdown", vm)

    # A client that goes away in the middle.
    task = call("task.create", "of a product", "")
    connection = connect()
    connection.request("GET", path_of("export_raw_vdi", {**query, "task_id": task}))
    reply = connection.getresponse()
    reply.read(1000)
    reply.close()
    connection.close()
    assert outcome(call, task) == "failure"
    # An import holds its VDI alone.
    stream = begin(call, PIB, vdi=vdi)
    stream.sendall(b"x" * MIB)
    wait("the import", lambda: get(call, vdi=vdi)[0] == 409)
    fails(call, "VDI_IN_USE", "VDI.destroy", vdi)
    stream.close()
    wait("the end of the import", lambda: get(call, {"Range": f"bytes={255 * MIB}-"}, vdi=vdi)[0] == 206)
    # The last byte of an export comes when the VDI was let go.
    call("VDI.destroy", vdi)


class Slow:
    """An export whose client reads its first bytes, and the rest when it is told to."""

    def __init__(self, call, vdi, **query):
        self.call, self.vdi = call, vdi
        self.task = call("task.create", "of a slow product", "")
        self.connection = connect()
        query = {"session_id": call.reference, "vdi": vdi, "task_id": self.task, **query}
        self.connection.request("GET", path_of("export_raw_vdi", query))
        self.reply = self.connection.getresponse()
        assert self.reply.status == 200, self.reply.status
        self.begin = self.reply.read(1000)

    def is_in_the_middle(self):
        return self.call("VDI.get_current_operations", self.vdi) == {self.task: "copy"}

    def rest(self):
        body = self.begin + self.reply.read()
        assert outcome(self.call, self.task) == "success"
        return body


def collected(call):
    """Snapshots go and chains are merged while clients are in the middle of exports: each gets what its VDI held when
    the export began, and so does a client that begins when all is merged."""
    sr, size, piece = default_sr(call), 28 * MIB, 4 * MIB
    call("SR.add_to_other_config", sr, "gc-quiet", "100000")
    disk = bytearray(random.Random(9).randbytes(size))
    vdi = new(call, size, bytes(disk))
    snapshots, held = [], []
    for number in range(5):
        snapshots.append(call("VDI.snapshot", vdi, {}))
        held.append(bytes(disk))
        start = number * 5 * MIB
        disk[start : start + piece] = random.Random(number).randbytes(piece)
        headers = {"Content-Range": f"bytes {start}-{start + piece - 1}/{size}"}
        assert put(call, disk[start : start + piece], headers, vdi=vdi)[0] == 200
    held, kept = held[2], snapshots.pop(2)

    def bases():
        """Base copies that a snapshot or the disk is based on."""
        return [ref for ref, vdi in call("VDI.get_all_records").items() if vdi["SR"] == sr and not vdi["managed"]]

    def collect():
        """What is to be done; it is done when this returns."""
        said = call("SR.collect_garbage", sr, False)
        tasks = lambda: call("task.get_all_records").values()
        states = lambda: {task["status"] for task in tasks() if task["name_label"] == "Garbage Collection"}
        wait("the end of a collection", lambda: not states() & {"pending", "cancelling"})
        return said

    before = len(bases())
    exports = [Slow(call, kept), Slow(call, kept, format="vhd"), Slow(call, vdi)]
    for snapshot in snapshots:
        call("VDI.destroy", snapshot)
    said = collect()
    assert any("a copy, an export or an import" in line for line in said), said
    # The exports were in the middle all the while.
    assert all(export.is_in_the_middle() for export in exports[2:])
    assert set(call("VDI.get_current_operations", kept)) == {export.task for export in exports[:2]}
    assert len(bases()) >= min(before, 3), "what is exported is not merged"
    assert exports[0].rest() == held, "the raw export of a snapshot"
    keep("collected.vhd", exports[1].rest())
    keep("collected.raw", held)
    assert exports[2].rest() == bytes(disk), "the raw export of a disk"
    # Now the chain becomes short: one base copy for the snapshot and the disk.
    wait("a short chain", lambda: not collect() and len(bases()) == 1)
    assert exported(call, kept) == held and exported(call, vdi) == bytes(disk)


def roles(call):
    """What an account may do."""
    vdi = new(call, 4 * MIB)
    basic = base64.b64encode(b"reader:correct horse").decode()
    for method, name in (("GET", "export_raw_vdi"), ("PUT", "import_raw_vdi")):
        connection = connect()
        body = b"x" * 512 if method == "PUT" else None
        path = path_of(name, {"vdi": vdi})
        connection.request(method, path, body=body, headers={"Authorization": f"Basic {basic}"})
        reply = connection.getresponse()
        assert reply.status == 403 and b"RBAC_PERMISSION_DENIED" in reply.read(), reply.status
    assert not any(exported(call, vdi))


if __name__ == "__main__":
    tell(cleared(globals().copy()))
