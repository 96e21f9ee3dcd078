"""What storage and events must do whatever driver is below, seen as a client: acceptance.py xml|json DIR PART...

PART is one of the functions below; those that need block devices of this host are named `device_...`.
"""

import os
import threading
import time

from clients import (
    GIB, KIB, LIMIT, MIB, NULL, Failure, Plugged, dom0, fails, host_of, make_vbd, make_vdi, tell, work,
)

LARGEST = 2040 * GIB


def default_sr(call):
    return call("pool.get_default_SR", call("pool.get_all")[0])


def same(call, one, other, fields):
    first, second = call("VDI.get_record", one), call("VDI.get_record", other)
    for field in fields:
        assert first[field] == second[field], (field, first[field], second[field])
    assert first["location"] != second["location"] and first["uuid"] != second["uuid"]


# --- repositories ---


def sr(call):
    ref, host = default_sr(call), host_of(call)
    call("SR.scan", ref)
    call("SR.update", ref)
    call("SR.set_name_label", ref, "other name")
    call("SR.set_name_description", ref, "other words")
    for step in ("SR.update", "SR.scan"):
        assert call("SR.get_name_label", ref) == "other name"
        assert call("SR.get_name_description", ref) == "other words"
        call(step, ref)
    # What its PBD says is enough to find it again.
    [pbd] = call("SR.get_PBDs", ref)
    config, kind = call("PBD.get_device_config", pbd), call("SR.get_type", ref)
    call("PBD.unplug", pbd)
    xml = call("SR.probe", host, config, kind, {})
    assert "<SRlist>" in xml and f"<UUID>{call('SR.get_uuid', ref)}</UUID>" in "".join(xml.split()), xml
    call("PBD.plug", pbd)
    call("SR.scan", ref)
    # Taken off and introduced again, as after a new installation: its disks come back.
    vdi = make_vdi(call, ref, 4 * MIB, name_label="stays")
    uuid, sr_uuid = call("VDI.get_uuid", vdi), call("SR.get_uuid", ref)
    call("PBD.unplug", pbd)
    call("SR.forget", ref)
    fails(call, "UUID_INVALID", "VDI.get_by_uuid", uuid)
    back = call("SR.introduce", sr_uuid, "back", "", kind, "user", False, {})
    pbd = call("PBD.create", {"host": host, "SR": back, "device_config": config, "other_config": {}})
    fails(call, "PBD_EXISTS", "PBD.create", {"host": host, "SR": back, "device_config": config, "other_config": {}})
    call("PBD.plug", pbd)
    call("SR.scan", back)
    found = call("VDI.get_record", call("VDI.get_by_uuid", uuid))
    assert int(found["virtual_size"]) == 4 * MIB and found["SR"] == back and found["managed"], found
    fails(call, "SR_UUID_EXISTS", "SR.introduce", sr_uuid, "twice", "", kind, "user", False, {})
    fails(call, "SR_NOT_EMPTY", "SR.destroy", back)
    call("VDI.destroy", call("VDI.get_by_uuid", uuid))
    call("pool.set_default_SR", call("pool.get_all")[0], back)
    # What cannot be made is not there afterwards.
    before = set(call("SR.get_all"))
    missing = {"device": "/dev/no-such-device"}
    arguments = (host, missing, call.number(0), "x", "", "ext", "user", False, {})
    try:
        call("SR.create", *arguments)
        raise AssertionError("an SR on a device that is not there")
    except Failure as failure:
        assert failure.code.startswith("SR_BACKEND_FAILURE_"), failure.details
        assert "/dev/no-such-device" in " ".join(failure.details), failure.details
    fails(call, "SR_UNKNOWN_DRIVER", "SR.create", host, {}, call.number(0), "x", "", "nothing", "user", False, {})
    assert set(call("SR.get_all")) == before


# --- disks ---


def vdi(call):
    ref = default_sr(call)
    # Sizes that no format has as such are made larger, never smaller.
    for size in (4 * MIB + 1, 5 * MIB + 1, 8 * MIB + 1, 4 * MIB):
        made = make_vdi(call, ref, size)
        assert int(call("VDI.get_virtual_size", made)) >= size
        call("VDI.destroy", made)
        call("SR.scan", ref)
        assert made not in call("VDI.get_all_records")
    made = make_vdi(call, ref, 4 * MIB, tags=["one", "two"], other_config={"k": "v"})
    before = call("VDI.get_record", made)
    call("VDI.update", made)
    assert call("VDI.get_record", made) == before
    # A record that only the storage's view may make or remove.
    fails(call, "PERMISSION_DENIED", "VDI.db_forget", made)
    assert call("VDI.get_uuid", made) == before["uuid"]
    call("VDI.resize", made, call.number(5 * MIB))
    call("VDI.update", made)
    assert int(call("VDI.get_virtual_size", made)) >= 5 * MIB
    # What there is already cannot be introduced again, by either of its names.
    def introduce(uuid, location):
        return (uuid, "n", "", ref, "user", False, False, {}, location, {}, {})
    fails(call, "UUID_INVALID", "VDI.introduce", *introduce(before["uuid"], "elsewhere"))
    location = fails(call, "LOCATION_NOT_UNIQUE", "VDI.introduce", *introduce("", before["location"]))
    assert location == [ref, before["location"]], location
    # A snapshot and a clone.
    began = time.strftime("%Y%m%dT%H:%M:%SZ", time.gmtime())
    snapshot = call("VDI.snapshot", made, {})
    ended = time.strftime("%Y%m%dT%H:%M:%SZ", time.gmtime())
    taken = str(call("VDI.get_snapshot_time", snapshot))
    assert began <= taken <= ended, (began, taken, ended)
    assert call("VDI.get_is_a_snapshot", snapshot) is True and call("VDI.get_snapshot_of", snapshot) == made
    same(call, made, snapshot, ("virtual_size", "tags", "name_label", "type", "SR"))
    clone = call("VDI.clone", made, {})
    same(call, made, clone, ("virtual_size", "tags", "name_label", "type", "SR"))
    assert call("VDI.get_is_a_snapshot", clone) is False
    call("VDI.update", made)
    # A copy while a block of a halted VM names it.
    [template] = call("VM.get_by_name_label", "Simulated guest")
    vm = call("VM.clone", template, "off")
    call("VM.provision", vm)
    vbd = make_vbd(call, vm, made)
    copied = work(call, "VDI.copy", made, ref)
    assert int(call("VDI.get_virtual_size", copied)) == int(call("VDI.get_virtual_size", made))
    call("VBD.destroy", vbd)
    call("VM.destroy", vm)
    for one in (copied, clone, snapshot, made):
        call("VDI.destroy", one)
    # As large as a VHD can be, and one byte more.
    large = make_vdi(call, ref, LARGEST)
    assert int(call("VDI.get_virtual_size", large)) == LARGEST
    assert int(call("VDI.get_physical_utilisation", large)) < 16 * MIB
    call("VDI.destroy", large)
    count = len(call("VDI.get_all"))
    for size in (LARGEST + 1, 1 << 62):
        try:
            make_vdi(call, ref, size)
            raise AssertionError("larger than a VHD can be")
        except Failure as failure:
            assert failure.code == "SR_BACKEND_FAILURE_79", failure.details
            assert "VDI Invalid size" in failure.details[2], failure.details
    fails(call, "INVALID_VALUE", "VDI.create", {"SR": ref, "virtual_size": call.number(-1)})
    assert len(call("VDI.get_all")) == count


def device_sizes(call):
    """A PBD that was away, then disks of this host: the kernel sees each as long as its record says."""
    ref = default_sr(call)
    [pbd] = call("SR.get_PBDs", ref)
    call("PBD.unplug", pbd)
    call("PBD.plug", pbd)
    for size, kind in ((4 * MIB, {}), (1 * GIB, {}), (4 * MIB, {"type": "raw"})):
        made = make_vdi(call, ref, size, sm_config=kind)
        with Plugged(call, made) as disk:
            assert disk.size() == int(call("VDI.get_virtual_size", made)) == size, disk.size()
            disk.write(size - 4 * KIB, b"e" * (4 * KIB))
            # Kept while it is used, and longer while it is used.
            snapshot = call("VDI.snapshot", made, {})
            disk.write(size - 4 * KIB, b"f" * (4 * KIB))
            fails(call, "VDI_IN_USE", "VDI.destroy", made)
        with Plugged(call, snapshot, "RO") as disk:
            assert disk.read(size - 4 * KIB, 4 * KIB) == b"e" * (4 * KIB)
            assert disk.size() == size
        with Plugged(call, made) as disk:
            assert disk.read(size - 4 * KIB, 4 * KIB) == b"f" * (4 * KIB)
        call("VDI.destroy", snapshot)
        call("VDI.destroy", made)
    # An SR with a disk in use stays where it is.
    made = make_vdi(call, ref, 4 * MIB)
    with Plugged(call, made):
        try:
            call("PBD.unplug", pbd)
            raise AssertionError("an SR went away below a disk")
        except Failure as failure:
            assert failure.code in ("VDI_IN_USE", "SR_DEVICE_IN_USE"), failure.details
    call("VDI.destroy", made)


def device_readers(call):
    """Many readers of one disk, and none beside a writer."""
    ref, vm = default_sr(call), dom0(call)
    made = make_vdi(call, ref, 4 * MIB)
    with Plugged(call, made) as disk:
        disk.write(0, b"r" * 512)
        second = make_vbd(call, vm, made, mode="RO")
        fails(call, "VDI_IN_USE", "VBD.plug", second)
        call("VBD.destroy", second)
    vbds = [make_vbd(call, vm, made, mode="RO") for _ in range(20)]
    for vbd in vbds:
        call("VBD.plug", vbd)
    devices = {call("VBD.get_device", vbd) for vbd in vbds}
    assert len(devices) == 20, devices
    for device in devices:
        with open("/dev/" + device, "rb", buffering=0) as opened:
            assert os.pread(opened.fileno(), 512, 0) == b"r" * 512
        # A kernel may let it be opened; nothing gets through.
        try:
            with open("/dev/" + device, "r+b", buffering=0) as opened:
                os.pwrite(opened.fileno(), b"w" * 512, 0)
                os.fsync(opened.fileno())
            raise AssertionError(f"{device} can be written to")
        except OSError:
            pass
    writer = make_vbd(call, vm, made)
    fails(call, "VDI_IN_USE", "VBD.plug", writer)
    call("VBD.destroy", writer)
    for vbd in vbds:
        call("VBD.unplug", vbd)
        call("VBD.destroy", vbd)
    call("VDI.destroy", made)


def device_end_of_the_largest(call):
    """The last KiB of a disk that is as long as a VHD can be, and a copy of it that is as small."""
    ref = default_sr(call)
    made = make_vdi(call, ref, LARGEST)
    mark = bytes(range(256)) * 4
    with Plugged(call, made) as disk:
        assert disk.size() == LARGEST, disk.size()
        disk.write(LARGEST - KIB, mark)
    copied = work(call, "VDI.copy", made, ref)
    assert int(call("VDI.get_virtual_size", copied)) == LARGEST
    assert int(call("VDI.get_physical_utilisation", copied)) < 32 * MIB, call("VDI.get_physical_utilisation", copied)
    with Plugged(call, copied, "RO") as disk:
        assert disk.read(LARGEST - KIB, KIB) == mark
        assert disk.read(0, KIB) == disk.read(LARGEST - 3 * MIB, KIB) == bytes(KIB)
    call("VDI.destroy", copied)
    call("VDI.destroy", made)


def device_deltas(call):
    """A copy of what changed since a snapshot, put onto a full copy of that snapshot, is the disk."""
    ref = default_sr(call)
    for kind in ({}, {"type": "raw"}):
        original = make_vdi(call, ref, 4 * MIB, sm_config=kind)
        with Plugged(call, original) as disk:
            disk.write(0, b"a" * MIB)
        snapshot = call("VDI.snapshot", original, {})
        with Plugged(call, original) as disk:
            disk.write(0, b"b" * 512)
        full = work(call, "VDI.copy", snapshot, ref)
        delta = work(call, "VDI.copy", original, ref, snapshot, NULL)
        into = work(call, "VDI.copy", delta, NULL, NULL, full)
        assert into == full, (into, full)
        with Plugged(call, full, "RO") as disk:
            assert disk.read(0, 512) == b"b" * 512
            assert disk.read(512, MIB - 512) == b"a" * (MIB - 512)
            assert disk.read(MIB, MIB) == bytes(MIB)
        for one in (full, delta, snapshot, original):
            call("VDI.destroy", one)


# --- events ---


def events(call):
    pool = call("pool.get_all")[0]
    [template] = call("VM.get_by_name_label", "Simulated guest")
    [other] = call("VM.get_by_name_label", "Tapio UML guest")

    # A session that waits is let go when it ends.
    waiting = call.another()
    closer = waiting.same()
    waiting("event.register", ["pool"])
    said = []

    def listen():
        try:
            while True:
                waiting("event.next")
        except Exception as error:
            said.append(error)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    time.sleep(0.2)
    began = time.monotonic()
    closer.bare("session.logout", closer.reference)
    # Python's client logs in once more by itself, and then has registered nothing.
    thread.join(LIMIT)
    assert said and time.monotonic() - began < 10, said
    assert getattr(said[0], "code", "") in ("SESSION_INVALID", "SESSION_NOT_REGISTERED", ""), said

    # Both ways of listening beside each other, on one session.
    listener = call.another()
    beside = listener.same()
    listener("event.register", ["pool"])
    token = beside("event.from", ["pool"], "", 1.0)["token"]
    changer = call.another()
    threading.Timer(0.3, lambda: changer("pool.add_to_other_config", pool, "proof", "1")).start()
    answers = []
    asked = lambda: answers.append(beside("event.from", ["pool"], token, LIMIT))
    thread = threading.Thread(target=asked, daemon=True)
    thread.start()
    heard = listener("event.next")
    assert [event["snapshot"]["other_config"].get("proof") for event in heard] == ["1"], heard
    assert all(set(event) >= {"id", "timestamp", "class", "operation", "ref"} for event in heard), heard
    thread.join(LIMIT)
    [event] = answers[0]["events"]
    assert (event["class"], event["operation"], event["ref"]) == ("pool", "mod", pool), event
    assert event["snapshot"]["other_config"]["proof"] == "1"
    listener("event.unregister", ["pool"])
    listener.logout()

    # A loop with new tokens sees each change; nothing is in one answer twice.
    token = ""
    for number in range(5):
        call("pool.remove_from_other_config", pool, "proof")
        call("pool.add_to_other_config", pool, "proof", str(number))
        batch = call("event.from", ["pool"], token, 10.0)
        assert [event["ref"] for event in batch["events"]] == [pool], batch["events"]
        assert batch["events"][0]["snapshot"]["other_config"]["proof"] == str(number)
        assert batch["token"] != token
        token = batch["token"]
    call("pool.remove_from_other_config", pool, "proof")

    # One object alone, however its class is written.
    for words in (f"vm/{template}", f"VM/{template}"):
        batch = call("event.from", [words], "", 5.0)
        assert [event["ref"] for event in batch["events"]] == [template], batch["events"]
        token = batch["token"]
    call("VM.add_to_other_config", other, "proof", "x")
    batch = call("event.from", [f"vm/{template}"], token, 0.3)
    assert batch["events"] == [], batch["events"]
    call("VM.remove_from_other_config", other, "proof")
    call("VM.add_to_other_config", template, "proof", "x")
    batch = call("event.from", [f"vm/{template}"], token, 10.0)
    assert [event["ref"] for event in batch["events"]] == [template], batch["events"]
    call("VM.remove_from_other_config", template, "proof")

    # Messages come and go as objects do.
    token = call("event.from", ["message"], "", 1.0)["token"]
    uuid = call("pool.get_uuid", pool)
    message = call("message.create", "PROOF", call.number(3), "Pool", uuid, "words")
    batch = call("event.from", ["message"], token, 10.0)
    assert [(event["operation"], event["ref"]) for event in batch["events"]] == [("add", message)], batch["events"]
    assert batch["events"][0]["snapshot"]["name"] == "PROOF" and batch["events"][0]["snapshot"]["body"] == "words"
    call("message.destroy", message)
    batch = call("event.from", ["message"], batch["token"], 10.0)
    assert [(event["operation"], event["ref"]) for event in batch["events"]] == [("del", message)], batch["events"]

    # What is injected is there at once for those whose token is older.
    before = call("event.from", ["vm"], "", 1.0)["token"]
    injected = call("event.inject", "VM", template)
    assert isinstance(injected, str) and injected
    began = time.monotonic()
    batch = call("event.from", ["vm"], before, LIMIT)
    assert time.monotonic() - began < 5
    assert [event["ref"] for event in batch["events"]] == [template], batch["events"]
    # A token of nothing new waits its time, and answers one to go on with.
    began = time.monotonic()
    batch = call("event.from", ["vm"], batch["token"], 0.5)
    assert batch["events"] == [] and time.monotonic() - began >= 0.4 and batch["token"], batch
    fails(call, "EVENT_FROM_TOKEN_PARSE_FAILURE", "event.from", ["vm"], "nonsense", 1.0)
    fails(call, "SESSION_NOT_REGISTERED", "event.next")


tell(globals())
