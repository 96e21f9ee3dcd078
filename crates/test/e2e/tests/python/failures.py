"""What goes wrong below the toolstack, or in what it is asked: failures.py xml|json DIR PART..."""

import os
import sys
import threading

from clients import LIMIT, MIB, NULL, Failure, fails, host_of, make_vbd, make_vdi, tell, wait

DIR = sys.argv[2]


def repository(call, path):
    location = {"location": path}
    return call("SR.create", host_of(call), location, call.number(0), "r", "", "file", "user", False, {})


def backend(call, says, name, *args):
    """A call that fails on the storage's side; its words hold `says`."""
    try:
        value = call(name, *args)
    except Failure as failure:
        assert failure.code.startswith("SR_BACKEND_FAILURE_"), failure.details
        words = " ".join(failure.details)
        assert says in words, failure.details
        return failure.details
    raise AssertionError(f"{name}{args} answers {value}")


def asked_wrongly(call):
    """Parameters that do not exist, are too many, or of another type: each by its own error, and nothing is done."""
    sr = call("pool.get_default_SR", call("pool.get_all")[0])
    before = {name: set(call(name + ".get_all")) for name in ("VDI", "VBD", "VM", "SR", "task")}
    record = {"SR": sr, "virtual_size": call.number(MIB)}
    fails(call, "MESSAGE_METHOD_UNKNOWN", "VDI.frobnicate", sr, says="VDI.frobnicate")
    fails(call, "MESSAGE_METHOD_UNKNOWN", "Async.VDI.frobnicate", sr)
    fails(call, "MESSAGE_PARAMETER_COUNT_MISMATCH", "VDI.destroy")
    fails(call, "MESSAGE_PARAMETER_COUNT_MISMATCH", "VDI.destroy", NULL, NULL)
    fails(call, "FIELD_TYPE_ERROR", "VDI.create", {**record, "virtual_size": "many"}, says="virtual_size")
    fails(call, "FIELD_TYPE_ERROR", "VDI.create", {**record, "tags": "no list"}, says="tags")
    fails(call, "FIELD_TYPE_ERROR", "VDI.create", {**record, "other_config": ["no", "map"]}, says="other_config")
    fails(call, "FIELD_TYPE_ERROR", "VDI.create", {**record, "sharable": "perhaps"}, says="sharable")
    fails(call, "FIELD_TYPE_ERROR", "VDI.create", "no record")
    fails(call, "HANDLE_INVALID", "VDI.create", {**record, "SR": "OpaqueRef:nothing"}, says="OpaqueRef:nothing")
    fails(call, "HANDLE_INVALID", "VDI.create", {**record, "SR": list(before["VM"])[0]})
    fails(call, "UUID_INVALID", "VDI.get_by_uuid", "no uuid")
    for missing in ("SR", "virtual_size"):
        short = {key: value for key, value in record.items() if key != missing}
        try:
            call("VDI.create", short)
            raise AssertionError(f"a VDI without {missing}")
        except Failure as failure:
            assert missing in " ".join(failure.details), failure.details
    for words in ({"type": "nonsense"}, {"sm_config": {"image-format": "nonsense"}}):
        try:
            call("VDI.create", {**record, **words})
            raise AssertionError(f"{words} is taken")
        except Failure as failure:
            assert failure.code != "INTERNAL_ERROR" and "nonsense" in " ".join(failure.details), failure.details
    wait("an end of all work", lambda: not call("task.get_all"))
    assert {name: set(call(name + ".get_all")) for name in before} == before


def full(call):
    """DIR/small has a few MiB: what does not fit is refused with a reason, and what was half made is gone."""
    path = os.path.join(DIR, "small")
    sr = repository(call, os.path.join(path, "sr"))
    thin = make_vdi(call, sr, 64 * MIB)
    rest = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
    with open(os.path.join(path, "filler"), "wb") as filler:
        filler.write(bytes(rest - 64 * 1024))
    before = sorted(os.listdir(os.path.join(path, "sr")))
    records = set(call("VDI.get_all"))
    for _ in range(3):
        try:
            made = make_vdi(call, sr, 2040 << 30)
            raise AssertionError(f"{made} fits")
        except Failure as failure:
            assert failure.code == "SR_FULL" or failure.code.startswith("SR_BACKEND_FAILURE_"), failure.details
            assert "No space left" in " ".join(failure.details) or "space" in " ".join(failure.details), failure.details
    assert sorted(os.listdir(os.path.join(path, "sr"))) == before
    call("SR.scan", sr)
    assert set(call("VDI.get_all")) == records
    os.remove(os.path.join(path, "filler"))
    made = make_vdi(call, sr, 2040 << 30)
    for vdi in (made, thin):
        call("VDI.destroy", vdi)
    call("SR.destroy", sr)


def vanished(call):
    """The directory of an SR goes: nothing is taken for empty, and it is back when the directory is."""
    path = os.path.join(DIR, "vanishing")
    sr = repository(call, path)
    vdi = make_vdi(call, sr, 4 * MIB, name_label="kept")
    os.rename(path, path + ".away")
    backend(call, "", "SR.scan", sr)
    backend(call, "", "VDI.create", {"SR": sr, "virtual_size": call.number(MIB)})
    assert call("VDI.get_missing", vdi) is False or call("VDI.get_name_label", vdi) == "kept"
    [pbd] = call("SR.get_PBDs", sr)
    call("PBD.unplug", pbd)
    backend(call, "", "PBD.plug", pbd)
    assert call("PBD.get_currently_attached", pbd) is False
    os.rename(path + ".away", path)
    call("PBD.plug", pbd)
    call("SR.scan", sr)
    assert call("VDI.get_name_label", vdi) == "kept" and call("VDI.get_missing", vdi) is False
    # One image goes: its record says so and keeps its names until it is back.
    image = os.path.join(path, call("VDI.get_uuid", vdi) + ".vhd")
    os.rename(image, image + ".away")
    call("SR.scan", sr)
    assert call("VDI.get_missing", vdi) is True and call("VDI.get_name_label", vdi) == "kept"
    fails(call, "VDI_MISSING", "VDI.snapshot", vdi, {})
    os.rename(image + ".away", image)
    call("SR.scan", sr)
    assert call("VDI.get_missing", vdi) is False
    call("VDI.destroy", vdi)
    call("SR.destroy", sr)


def damaged(call):
    """An image that is none any more: it is named, what needs it fails, the others go on."""
    path = os.path.join(DIR, "damaged")
    sr = repository(call, path)
    good, bad = (make_vdi(call, sr, 4 * MIB, name_label=name) for name in ("good", "bad"))
    uuid = call("VDI.get_uuid", bad)
    image = os.path.join(path, uuid + ".vhd")
    with open(image, "r+b") as opened:
        length = opened.seek(0, 2)
        for at in (0, max(length - 512, 0)):
            opened.seek(at)
            opened.write(b"\x07" * 512)
    [template] = call("VM.get_by_name_label", "Simulated guest")
    vm = call("VM.clone", template, "with a damaged disk")
    call("VM.add_to_platform", vm, "sim-front", "vhost-user")
    call("VM.provision", vm)
    first, second = make_vbd(call, vm, good, userdevice="0"), make_vbd(call, vm, bad, userdevice="1")
    words = backend(call, ".vhd", "VM.start", vm, False, False)
    assert uuid in " ".join(words), words
    assert call("VM.get_power_state", vm) == "Halted"
    assert not call("VBD.get_currently_attached", first) and not call("VBD.get_currently_attached", second)
    call("SR.scan", sr)
    assert call("VDI.get_name_label", bad) == "bad", "its record stays"
    try:
        call("VDI.copy", bad, sr)
        raise AssertionError("a copy of nothing")
    except Failure as failure:
        assert failure.code != "INTERNAL_ERROR", failure.details
    call("VBD.destroy", second)
    call("VM.start", vm, False, False)
    assert call("VBD.get_currently_attached", first)
    call("VM.clean_shutdown", vm)
    call("VM.destroy", vm)
    call("VDI.destroy", good)
    os.remove(image)
    call("SR.scan", sr)
    if bad in call("VDI.get_all"):
        call("VDI.forget", bad)
    call("SR.destroy", sr)


def session_ends_during_a_call(call):
    """The session of a call that is in progress ends: the work that was asked for is done, nothing more can be."""
    [template] = call("VM.get_by_name_label", "Simulated guest")
    vm = call("VM.clone", template, "slow")
    call("VM.add_to_platform", vm, "sim-boot-ms", "1500")
    call("VM.provision", vm)
    other = call.another()
    reference = other.reference
    said = []

    def start():
        try:
            said.append(other("VM.start", vm, False, False))
        except Exception as error:
            said.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    wait("the start", lambda: call("VM.get_current_operations", vm))
    call.bare("session.logout", reference)
    thread.join(LIMIT)
    # Either answer is one that a client can go by: done, or ended with its session.
    assert said and (said[0] == "" or said[0].code == "SESSION_INVALID"), said
    fails(call.bare, "SESSION_INVALID", "VM.get_all", reference, says=reference)
    wait("an end of the start", lambda: not call("VM.get_current_operations", vm))
    assert call("VM.get_power_state", vm) == "Running"
    # A task of a session that ends goes on, and others can see how it ends.
    other = call.another()
    task = other("Async.VM.hard_reboot", vm)
    call.bare("session.logout", other.reference)
    wait("the end of the task", lambda: call("task.get_status", task) != "pending")
    assert call("task.get_status", task) == "success", call("task.get_record", task)
    call("task.destroy", task)
    call("VM.hard_shutdown", vm)
    call("VM.destroy", vm)


tell(globals())
