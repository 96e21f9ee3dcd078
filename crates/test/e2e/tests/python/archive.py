"""VMs as XVA archives over HTTP: archive.py xml|json DIR PART...

Archives are written by `tarfile` here and read by it, and zstd by its own program: nothing of the toolstack is used.
"""

import functools
import gzip
import hashlib
import http.client
import io
import os
import random
import ssl
import subprocess
import sys
import tarfile
import urllib.parse
import xmlrpc.client

from clients import MIB, NULL, PASSWORD, USER, fails, make_vbd, make_vdi, tell, wait

PIB = 1 << 50


def request(call, method, path, body=None, headers={}, **query):
    """A request: status, headers, body. The connection is cut where a transfer fails in its middle."""
    parts = urllib.parse.urlsplit(os.environ["TAPIO_HTTPS"])
    context = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection(parts.hostname, parts.port, context=context, timeout=60)
    query = urllib.parse.urlencode({"session_id": call.reference, **query})
    try:
        connection.request(method, f"/{path}?{query}", body=body, headers=headers)
    except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
        # It was answered before all was sent.
        pass
    reply = connection.getresponse()
    try:
        return reply.status, reply.headers, reply.read()
    except http.client.IncompleteRead as cut:
        return reply.status, reply.headers, cut.partial


def outcome(call, task):
    """How a task ended."""
    wait("the end of a task", lambda: call("task.get_status", task) not in ("pending", "cancelling"))
    return call("task.get_status", task)


def contents(size, *data):
    disk = bytearray(size)
    for start, length in data:
        disk[start : start + length] = random.Random(start).randbytes(length)
    return bytes(disk)


def default_sr(call):
    return call("pool.get_default_SR", call("pool.get_all")[0])


def filled(call, disk, **changes):
    vdi = make_vdi(call, default_sr(call), len(disk), **changes)
    status, _, body = request(call, "PUT", "import_raw_vdi", disk, vdi=vdi, format="raw")
    assert status == 200, body
    return vdi


def contents_of(call, vdi):
    status, _, body = request(call, "GET", "export_raw_vdi", vdi=vdi)
    assert status == 200, body
    return body


def make_vm(call, name, disks):
    map_of = {"a": "b & <c>", "mac_seed": "5b12bd4a-6f3a-4a6f-9a5a-2d6e3b5f0c11"}
    vm = call(
        "VM.create",
        {
            "name_label": name,
            "name_description": "what it is: \u00e4 \u2713",
            "user_version": call.number(7),
            "is_a_template": False,
            "affinity": NULL,
            "memory_static_max": call.number(512 * MIB),
            "memory_dynamic_max": call.number(256 * MIB),
            "memory_dynamic_min": call.number(256 * MIB),
            "memory_static_min": call.number(64 * MIB),
            "VCPUs_params": {"weight": "512"},
            "VCPUs_max": call.number(4),
            "VCPUs_at_startup": call.number(2),
            "actions_after_shutdown": "destroy",
            "actions_after_reboot": "restart",
            "actions_after_crash": "preserve",
            "PV_bootloader": "pygrub",
            "PV_kernel": "",
            "PV_ramdisk": "",
            "PV_args": "console=hvc0",
            "PV_bootloader_args": "",
            "PV_legacy_args": "",
            "HVM_boot_policy": "BIOS order",
            "HVM_boot_params": {"order": "dc"},
            "HVM_shadow_multiplier": 1.5,
            "platform": {"acpi": "1", "driver": "sim"},
            "PCI_bus": "",
            "other_config": map_of,
            "recommendations": "<restrictions/>",
            "xenstore_data": {"vm-data/k": "v"},
            "tags": ["one", "two"],
            "start_delay": call.number(3),
            "order": call.number(5),
        },
    )
    call("VM.set_blocked_operations", vm, {"destroy": "VM_IS_PROTECTED"})
    for place, disk in enumerate(disks):
        vdi = filled(call, disk, name_label=f"disk {place}", other_config={"k": str(place)}, xenstore_data={"x": "y"})
        make_vbd(call, vm, vdi, userdevice=str(place), bootable=place == 0, other_config={"owner": ""})
    make_vbd(call, vm, NULL, userdevice="9", type="CD", mode="RO", empty=True)
    return vm


def vbds_of(call, vm):
    records = {vbd: call("VBD.get_record", vbd) for vbd in call("VM.get_VBDs", vm)}
    return {record["userdevice"]: record for record in records.values()}


# Fields that a VM made from an archive does not have of the VM in it.
OWN = {
    "VM": {"uuid", "VBDs", "VIFs", "metrics", "guest_metrics", "consoles", "other_config", "generation_id", "version",
           "parent", "snapshots", "children", "allowed_operations", "current_operations"},
    "VBD": {"uuid", "VM", "VDI", "metrics", "allowed_operations", "current_operations"},
    "VDI": {"uuid", "SR", "VBDs", "location", "sm_config", "physical_utilisation", "parent", "snapshot_of", "snapshots",
            "allowed_operations", "current_operations"},
    "VIF": {"uuid", "VM", "metrics", "MAC", "MAC_autogenerated", "allowed_operations", "current_operations"},
}


def same(name, ours, theirs, own=()):
    assert set(ours) == set(theirs)
    different = {key for key in ours if ours[key] != theirs[key]} - OWN[name] - set(own)
    assert not different, (name, {key: (ours[key], theirs[key]) for key in different})


def compare(call, old, new, disks, restore=False):
    """Field by field, byte by byte."""
    one, other = call("VM.get_record", old) if isinstance(old, str) else old, call("VM.get_record", new)
    same("VM", one, other)
    config = dict(other["other_config"])
    assert (config.pop("mac_seed") == one["other_config"]["mac_seed"]) == restore
    assert config == {key: value for key, value in one["other_config"].items() if key != "mac_seed"}
    assert (one["uuid"] == other["uuid"]) == restore
    ours, theirs = vbds_of(call, old) if isinstance(old, str) else None, vbds_of(call, new)
    for place, record in theirs.items():
        if ours:
            same("VBD", ours[place], record)
        if record["type"] == "CD":
            assert (record["VDI"], record["empty"]) == (NULL, True)
            continue
        vdi = call("VDI.get_record", record["VDI"])
        if ours:
            same("VDI", call("VDI.get_record", ours[place]["VDI"]), vdi)
        got = contents_of(call, record["VDI"])
        wanted = disks[int(place)]
        assert got[: len(wanted)] == wanted and not any(got[len(wanted) :]), place
    if ours:
        assert set(ours) == set(theirs)


def exported(call, vm, **query):
    task = call("task.create", "of a product", "")
    status, headers, body = request(call, "GET", "export/", ref=vm, task_id=task, **query)
    assert (status, headers["task-id"]) == (200, task), (status, body)
    assert (headers["content-type"], headers["content-disposition"]) == (
        "application/octet-stream",
        'attachment; filename="export.xva"',
    )
    # With the end of the answer the task has ended and nothing is held.
    assert (call("task.get_status", task), call("VM.get_current_operations", vm)) == ("success", {})
    return body


def imported(call, archive, **query):
    task = call("task.create", "of a product", "")
    before = set(call("VM.get_all"))
    status, headers, body = request(call, "PUT", "import/", archive, task_id=task, **query)
    assert (status, headers["task-id"]) == (200, task), (status, body)
    ended = outcome(call, task)
    assert (ended, body) == ("success", b""), call("task.get_error_info", task)
    result = call("task.get_result", task)
    made = [part.split("<")[0] for part in result.split("<value>")[2:]]
    assert result == "<value><array><data>" + "".join(f"<value>{vm}</value>" for vm in made) + "</data></array></value>", result
    if not query.get("restore"):
        assert set(call("VM.get_all")) - before == set(made)
    assert all(call("VM.get_current_operations", vm) == {} for vm in made)
    return made


def refused(call, archive, code, status=200, says="", **query):
    """An import that fails: nothing is left of it."""
    there = [set(call(name + ".get_all")) for name in ("VM", "VDI", "VBD", "VIF", "network")]
    task = call("task.create", "of a product", "")
    got, _, body = request(call, "PUT", "import/", archive, task_id=task, **query)
    assert outcome(call, task) == "failure", code
    error = call("task.get_error_info", task)
    assert (error[0], got) == (code, status), (error, got, body)
    assert code.encode() in body and says in " ".join(error), (body, error)
    assert there == [set(call(name + ".get_all")) for name in ("VM", "VDI", "VBD", "VIF", "network")], code


P1, P2, P3, P4, P5 = (
    11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261,
)  # fmt: skip
MASK = (1 << 64) - 1


@functools.lru_cache(maxsize=256)
def xxh64(data):
    """XXH64 with seed 0, as its specification has it."""

    def rotated(value, bits):
        return ((value << bits) | (value >> (64 - bits))) & MASK

    def lane(acc, value):
        return rotated((acc + value * P2) & MASK, 31) * P1 & MASK

    at, length = 0, len(data)
    if length >= 32:
        lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        words = memoryview(data[: length // 32 * 32]).cast("Q")
        for stripe in range(0, len(words), 4):
            lanes = [lane(acc, words[stripe + number]) for number, acc in enumerate(lanes)]
        at = length // 32 * 32
        acc = sum(rotated(value, bits) for value, bits in zip(lanes, (1, 7, 12, 18))) & MASK
        for value in lanes:
            acc = ((acc ^ lane(0, value)) * P1 + P4) & MASK
    else:
        acc = P5
    acc = (acc + length) & MASK
    while at + 8 <= length:
        acc = (rotated(acc ^ lane(0, int.from_bytes(data[at : at + 8], "little")), 27) * P1 + P4) & MASK
        at += 8
    if at + 4 <= length:
        acc = (rotated(acc ^ (int.from_bytes(data[at : at + 4], "little") * P1 & MASK), 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        acc = rotated(acc ^ (byte * P5 & MASK), 11) * P1 & MASK
    acc = (acc ^ (acc >> 33)) * P2 & MASK
    acc = (acc ^ (acc >> 29)) * P3 & MASK
    return acc ^ (acc >> 32)


def read_archive(archive):
    """What an independent reader finds: the document, and the disks by their names."""
    assert len(archive) % 512 == 0 and not any(archive[-1024:])
    members = list(tarfile.open(fileobj=io.BytesIO(archive), mode="r:"))
    reader = tarfile.open(fileobj=io.BytesIO(archive), mode="r:")
    assert members[0].name == "ova.xml"
    assert all((m.mode, m.uid, m.gid, m.mtime) == (0, 0, 0, 0) for m in members)
    text = reader.extractfile(members[0]).read()
    # It is one value, as a reply of XML-RPC has them.
    text = text.split(b"?>", 1)[1]
    wrapped = b"<methodResponse><params><param>" + text + b"</param></params></methodResponse>"
    (document,), _ = xmlrpc.client.loads(wrapped)
    disks, names = {}, []
    for chunk, sum_of in zip(members[1::2], members[2::2]):
        assert sum_of.name == chunk.name + ".xxhash", (chunk.name, sum_of.name)
        data = reader.extractfile(chunk).read()
        theirs = reader.extractfile(sum_of).read()
        if len(data) < 4096 or chunk.name.endswith("00000000"):
            # All would take long in this language.
            assert theirs == b"%016X" % xxh64(data), chunk.name
        name, number = chunk.name.split("/")
        if name not in disks:
            names.append(name)
        disks.setdefault(name, {})[int(number)] = data
    assert names == sorted(names)
    return document, disks


def round_trip(call):
    assert (b"%016X" % xxh64(b""), b"%016X" % xxh64(b"abc")) == (b"EF46DB3751D8E999", b"44BC2CF5AD770999")
    disks = [contents(9 * MIB, (0, 700), (5 * MIB + 512, MIB)), contents(6 * MIB, (3 * MIB, 512)), bytes(4 * MIB)]
    vm = make_vm(call, "of an archive", disks)
    uuid = call("VM.get_uuid", vm)
    plain = exported(call, vm)
    document, chunks = read_archive(plain)
    assert document["version"]["export_vsn"] in ("2", 2), document["version"]
    objects = {entry["id"]: entry for entry in document["objects"]}
    assert list(objects) == [f"Ref:{number}" for number in range(len(objects))]
    record = next(entry["snapshot"] for entry in objects.values() if entry["class"] == "VM")
    assert (record["uuid"], record["power_state"], record["affinity"]) == (uuid, "Halted", NULL)
    assert record["memory_static_max"] == str(512 * MIB) and record["current_operations"] == {}
    by_place = {
        entry["snapshot"]["userdevice"]: entry["snapshot"]["VDI"]
        for entry in objects.values()
        if entry["class"] == "VBD" and entry["snapshot"]["type"] == "Disk"
    }
    for place, disk in enumerate(disks):
        found = chunks[by_place[str(place)]]
        size = int(objects[by_place[str(place)]]["snapshot"]["virtual_size"])
        last = (size - 1) // MIB
        wanted = {n for n in range(last + 1) if any(disk[n * MIB : (n + 1) * MIB])} | {0, last}
        assert set(found) == wanted, (place, set(found))
        for number, data in found.items():
            expected = disk[number * MIB : (number + 1) * MIB]
            assert data[: len(expected)] == expected and not any(data[len(expected) :])

    packed = exported(call, vm, use_compression="true")
    assert gzip.decompress(packed)[: 512 * 3] == plain[: 512 * 3] or len(gzip.decompress(packed)) == len(plain)
    assert read_archive(gzip.decompress(packed))[1] == chunks
    by_zstd = exported(call, vm, use_compression="zstd")
    unpacked = subprocess.run(["zstd", "-d", "-c"], input=by_zstd, capture_output=True, check=True).stdout
    assert read_archive(unpacked)[1] == chunks
    theirs = subprocess.run(["zstd", "-q", "-c", "-19", "--long=23"], input=plain, capture_output=True, check=True).stdout
    for name, archive in [("plain", plain), ("gzip", packed), ("zstd", by_zstd), ("zstd -19", theirs)]:
        (made,) = imported(call, archive, sr_id=default_sr(call))
        compare(call, vm, made, disks)
        print("imported", name)
    # By its UUID, and with a length without meaning; the pool's default SR.
    status, _, again = request(call, "GET", "export", uuid=uuid)
    assert status == 200 and len(again) == len(plain)
    imported(call, again)


def value_of(value):
    """As Xen Orchestra writes values: without a type, with few fields."""
    if isinstance(value, dict):
        members = "".join(f"<member><name>{name}</name>{value_of(inner)}</member>" for name, inner in value.items())
        return f"<value><struct>{members}</struct></value>"
    if isinstance(value, list):
        return "<value><array><data>" + "".join(map(value_of, value)) + "</data></array></value>"
    return f"<value>{value}</value>"


def foreign(objects, disks, sums="xxhash", mutate=lambda members: members, **form):
    """An archive of another writer; disks are lists of (number, data)."""
    listed = [{"class": kind, "id": name, "snapshot": record} for name, (kind, record) in objects.items()]
    version = {"hostname": "xo", "date": "2026-01-01", "product_version": "8.3", "product_brand": "XCP-ng",
               "build_number": "x", "xapi_major": 1, "xapi_minor": 20, "export_vsn": 2}  # fmt: skip
    members = [("ova.xml", ('<?xml version="1.0"?>' + value_of({"version": version, "objects": listed})).encode())]
    for name, chunks in disks.items():
        for number, data in chunks:
            members.append((f"{name}/{number:08}", data))
            if sums == "xxhash":
                members.append((f"{name}/{number:08}.xxhash", b"%016X" % xxh64(data)))
            else:
                members.append((f"{name}/{number:08}.checksum", hashlib.sha1(data).hexdigest().encode()))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **(form or {"format": tarfile.USTAR_FORMAT})) as archive:
        for name, data in mutate(members):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def objects_of(size=2 * MIB + 700, **changes):
    vm = {"name_label": "foreign", "power_state": "halted", "is_a_template": 0, "memory_static_max": 64 * MIB,
          "memory_dynamic_max": 64 * MIB, "memory_dynamic_min": 64 * MIB, "memory_static_min": 0, "VCPUs_max": 2,
          "VCPUs_at_startup": 1, "affinity": "Ref:53", "resident_on": "Ref:53", "VBDs": ["Ref:002"], "VIFs": ["Ref:003"],
          "other_config": {"k": "v"}, "a field of tomorrow": "x", "uuid": "5b12bd4a-6f3a-4a6f-9a5a-2d6e3b5f0c77",
          "actions_after_shutdown": "a word of tomorrow", "blocked_operations": {}, **changes}  # fmt: skip
    return {
        "Ref:001": ("VM", vm),
        "Ref:002": ("VBD", {"VM": "Ref:001", "VDI": "Ref:007", "userdevice": 0, "bootable": 1, "mode": "RW", "type": "Disk",
                            "empty": 0, "currently_attached": 0}),
        "Ref:003": ("VIF", {"VM": "Ref:001", "network": "Ref:004", "device": 0, "MAC": "00:16:3e:00:00:77", "MTU": 1500}),
        "Ref:004": ("network", {"name_label": "a network of theirs", "bridge": "xenbr77"}),
        "Ref:007": ("VDI", {"virtual_size": size, "vbds": ["Ref:002"], "name_label": "theirs", "type": "user"}),
    }  # fmt: skip


def foreign_archives(call):
    # Signs of life shift the numbers; the last piece is short.
    disk = contents(8 * MIB + 700, (0, MIB), (4 * MIB, MIB), (8 * MIB, 700))
    chunks = [(0, disk[:MIB]), (1, b""), (5, disk[4 * MIB : 5 * MIB]), (6, b""), (10, disk[8 * MIB :])]
    objects = objects_of(len(disk))
    (made,) = imported(call, foreign(objects, {"Ref:007": chunks}, sums="checksum"))
    record = call("VM.get_record", made)
    assert (record["name_label"], record["power_state"], record["affinity"]) == ("foreign", "Halted", NULL)
    assert (record["uuid"] != objects["Ref:001"][1]["uuid"], record["is_a_template"]) == (True, False)
    assert int(record["VCPUs_max"]) == 2 and record["other_config"] == {"k": "v"}
    (vbd,) = record["VBDs"]
    got = contents_of(call, call("VBD.get_VDI", vbd))
    assert got[: len(disk)] == disk and not any(got[len(disk) :])
    assert call("VBD.get_bootable", vbd)
    (vif,) = map(lambda vif: call("VIF.get_record", vif), record["VIFs"])
    assert vif["MAC"] != "00:16:3e:00:00:77" and vif["MAC_autogenerated"]
    assert call("network.get_name_label", vif["network"]) == "a network of theirs"
    # Other forms of tar; the network is there now; the UUID and the address are kept, and the VM is replaced.
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        archive = foreign(objects, {"Ref:007": chunks}, format=form)
        (made,) = imported(call, archive, restore="true", force="true")
        assert call("VM.get_uuid", made) == objects["Ref:001"][1]["uuid"]
        (again,) = map(lambda vif: call("VIF.get_record", vif), call("VM.get_VIFs", made))
        assert (again["MAC"], again["network"]) == ("00:16:3e:00:00:77", vif["network"])
        assert contents_of(call, call("VBD.get_VDI", call("VM.get_VBDs", made)[0]))[: len(disk)] == disk
    refused(call, archive, "VM_TO_IMPORT_IS_NOT_NEWER_VERSION", restore="true")
    # A snapshot of memory is passed over.
    objects = objects_of(len(disk), power_state="Suspended", suspend_VDI="Ref:008")
    objects["Ref:008"] = ("VDI", {"virtual_size": MIB})
    (made,) = imported(call, foreign(objects, {"Ref:007": chunks, "Ref:008": [(0, bytes(MIB))]}))
    assert call("VM.get_power_state", made) == "Halted" and len(call("VM.get_VBDs", made)) == 1
    # Clients that do not know the length send a number without meaning, and close.
    task = call("task.create", "of a product", "")
    parts = urllib.parse.urlsplit(os.environ["TAPIO_HTTPS"])
    connection = http.client.HTTPSConnection(
        parts.hostname, parts.port, context=ssl._create_unverified_context(), timeout=60
    )
    query = urllib.parse.urlencode({"session_id": call.reference, "task_id": task})
    connection.putrequest("PUT", f"/import/?{query}")
    connection.putheader("Content-Length", str(PIB))
    connection.endheaders()
    # The answer comes before the body.
    reply = connection.response_class(connection.sock, method="PUT")
    reply.begin()
    assert (reply.status, reply.headers["task-id"]) == (200, task)
    connection.sock.sendall(archive)
    assert outcome(call, task) == "success"
    connection.close()
    # Clients look for a redirection with nothing.
    assert request(call, "PUT", "import/", b"")[0] == 200


def damaged(call):
    disk = contents(3 * MIB, (0, 3 * MIB))
    chunks = [(0, disk[:MIB]), (1, disk[MIB : 2 * MIB]), (2, disk[2 * MIB :])]
    objects = objects_of(3 * MIB)
    good = foreign(objects, {"Ref:007": chunks})
    at = good.index(disk[MIB : MIB + 64])
    changed = good[:at] + b"x" + good[at + 1 :]
    refused(call, changed, "IMPORT_ERROR_SOME_CHECKSUMS_FAILED")
    imported(call, changed, force="true")
    for end in (100, 5000, at + 100, good.index(disk[2 * MIB : 2 * MIB + 64]) - 600):
        refused(call, good[:end], "IMPORT_ERROR_PREMATURE_EOF")
    packed = gzip.compress(good, 1)
    refused(call, packed[: len(packed) // 2], "IMPORT_ERROR_PREMATURE_EOF")
    squeezed = subprocess.run(["zstd", "-q", "-c"], input=good, capture_output=True, check=True).stdout
    refused(call, squeezed[: len(squeezed) // 2], "IMPORT_ERROR_PREMATURE_EOF")
    refused(call, squeezed[:4] + b"\xff" * 4096, "IMPORT_ERROR", says="zstd")
    refused(call, packed[:2] + b"\xff" * 4096, "IMPORT_ERROR")
    refused(call, b"<html>" * 1000, "IMPORT_ERROR", says="no XVA archive")

    def named(change):
        return lambda members: [(change(name), data) for name, data in members]

    def with_chunks(chunks, **changes):
        return foreign(objects_of(**{"size": 3 * MIB, **changes}), {"Ref:007": chunks})

    for name in ("../../../etc/passwd", "/etc/passwd", "Ref:007/1", "Ref:009/00000000"):
        mutated = foreign(objects, {"Ref:007": chunks}, mutate=named(lambda old: old if old == "ova.xml" else name))
        refused(call, mutated, "IMPORT_ERROR_UNEXPECTED_FILE")
    refused(call, foreign(objects, {}, mutate=named(lambda _: "x.xml")), "IMPORT_ERROR_UNEXPECTED_FILE")
    refused(call, with_chunks(chunks[:2]), "IMPORT_ERROR_PREMATURE_EOF")
    refused(call, with_chunks([]), "IMPORT_ERROR_PREMATURE_EOF")
    refused(call, with_chunks([*chunks, (3, disk[:512])]), "IMPORT_ERROR", says="has 3145728 bytes")
    refused(call, with_chunks([chunks[0], chunks[2], chunks[1]]), "IMPORT_ERROR", says="comes behind")
    refused(call, with_chunks(chunks[1:]), "IMPORT_ERROR", says="first piece")
    refused(call, with_chunks([(0, bytes(5 * MIB))], size=8 * MIB), "IMPORT_ERROR", says="are read")
    for size in ("-1", "0", "many", 1 << 63, 1 << 70):
        refused(call, with_chunks(chunks, size=size), "IMPORT_ERROR", says="no number of bytes")
    refused(call, with_chunks(chunks, VCPUs_at_startup=9), "VALUE_NOT_SUPPORTED")
    refused(call, with_chunks(chunks, memory_static_min=1 << 50), "MEMORY_CONSTRAINT_VIOLATION")
    refused(call, with_chunks(chunks, is_control_domain=1), "IMPORT_ERROR", says="no VM")
    there = objects_of(3 * MIB)
    del there["Ref:007"]
    refused(call, foreign(there, {}), "IMPORT_ERROR_FAILED_TO_FIND_OBJECT")
    # Much that is little when it is packed.
    bomb = foreign(objects, {}, mutate=lambda _: [("ova.xml", b" " * (9 * MIB))])
    refused(call, gzip.compress(bomb, 1), "IMPORT_ERROR", says="8388608 are read")
    bomb = subprocess.run(["zstd", "-q", "-c"], input=bomb, capture_output=True, check=True).stdout
    refused(call, bomb, "IMPORT_ERROR", says="8388608 are read")
    entity = lambda m: [("ova.xml", b'<!DOCTYPE x [<!ENTITY a "aaaa">]><value>&a;</value>')]
    refused(call, foreign(objects, {}, mutate=entity), "IMPORT_ERROR", says="document type")
    deep = lambda m: [("ova.xml", b"<value><array><data>" * 100000)]
    refused(call, foreign(objects, {}, mutate=deep), "IMPORT_ERROR", says="inside each other")


def errors(call):
    """What is found before the answer has a status that says so; the task fails in every case."""
    archive = foreign(objects_of(MIB), {"Ref:007": [(0, bytes(MIB))]})
    refused(call, archive, "HANDLE_INVALID", 400, sr_id="OpaqueRef:none")
    refused(call, archive, "UUID_INVALID", 400, sr_uuid="8f7b1c7e-0000-4000-8000-000000000000")
    refused(call, iter([archive]), "IMPORT_ERROR_CANNOT_HANDLE_CHUNKED", 403)
    vm = make_vm(call, "refused", [bytes(MIB)])
    disk = next(record["VDI"] for record in vbds_of(call, vm).values() if record["type"] == "Disk")

    def no_export(code, status, **query):
        task = call("task.create", "of a product", "")
        got, _, body = request(call, "GET", "export", task_id=task, **query)
        assert (got, outcome(call, task)) == (status, "failure"), (got, body)
        assert call("task.get_error_info", task)[0] == code and code.encode() in body, (body, code)

    no_export("INTERNAL_ERROR", 400)
    no_export("HANDLE_INVALID", 400, ref="OpaqueRef:none")
    no_export("UUID_INVALID", 400, uuid="8f7b1c7e-0000-4000-8000-000000000000")
    call("VM.set_blocked_operations", vm, {"export": "no"})
    no_export("OPERATION_BLOCKED", 409, ref=vm)
    call("VM.set_blocked_operations", vm, {})
    # A disk that another VM writes to; then nothing is held.
    other = call("VM.get_all")
    host = next(ref for ref in other if call("VM.get_is_control_domain", ref))
    no_export("OPERATION_NOT_ALLOWED", 409, ref=host)
    vbd = make_vbd(call, host, disk, userdevice="autodetect")
    call("VBD.plug", vbd)
    no_export("VDI_IN_USE", 409, ref=vm)
    call("VBD.unplug", vbd)
    call("VBD.destroy", vbd)
    assert len(exported(call, vm)) > MIB
    reader = type(call)(user="reader")
    task = reader("task.create", "of a reader", "")
    assert request(reader, "GET", "export", ref=vm, task_id=task)[0] == 403
    assert outcome(reader, task) == "failure"
    reader.logout()
    # A client that goes away: the task fails, the VM is let go.
    task = call("task.create", "of a product", "")
    parts = urllib.parse.urlsplit(os.environ["TAPIO_HTTPS"])
    disks = [contents(40 * MIB, (0, 40 * MIB))]
    large = make_vm(call, "large", disks)
    connection = http.client.HTTPSConnection(
        parts.hostname, parts.port, context=ssl._create_unverified_context(), timeout=60
    )
    query = urllib.parse.urlencode({"session_id": call.reference, "ref": large, "task_id": task})
    connection.request("GET", f"/export?{query}")
    reply = connection.getresponse()
    reply.read(MIB)
    assert list(call("VM.get_current_operations", large).values()) == ["export"]
    fails(call, "OTHER_OPERATION_IN_PROGRESS", "VM.start", large, False, False)
    reply.close()
    connection.close()
    assert outcome(call, task) == "failure"
    wait("the VM", lambda: call("VM.get_current_operations", large) == {})


def templates(call):
    disks = [contents(2 * MIB, (0, MIB))]
    vm = make_vm(call, "for templates", disks)
    snapshot = call("VM.snapshot", vm, "kept")
    # What is written later is not in it.
    vdi = next(record["VDI"] for record in vbds_of(call, vm).values() if record["type"] == "Disk")
    assert request(call, "PUT", "import_raw_vdi", bytes(2 * MIB), vdi=vdi, format="raw")[0] == 200
    archive = exported(call, snapshot)
    (made,) = imported(call, archive)
    record = call("VM.get_record", made)
    assert (record["is_a_template"], record["is_a_snapshot"], record["snapshot_of"]) == (True, False, NULL)
    disk = next(found["VDI"] for found in vbds_of(call, made).values() if found["type"] == "Disk")
    assert contents_of(call, disk)[: 2 * MIB] == disks[0]
    assert call("VDI.get_is_a_snapshot", disk) is False
    default = next(
        ref for ref, record in call("VM.get_all_records").items() if record["is_default_template"]
    )
    (made,) = imported(call, exported(call, default))
    assert call("VM.get_is_a_template", made) and not call("VM.get_is_default_template", made)
    call("VM.destroy", made)


def cleared(part):
    """A part that clears its tasks away."""

    def run(call):
        part(call)
        for task in call("task.get_all"):
            outcome(call, task)
            call("task.destroy", task)

    return run


tell({name: cleared(part) for name, part in globals().copy().items() if callable(part)})
