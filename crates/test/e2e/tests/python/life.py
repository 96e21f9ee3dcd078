"""The whole life of a repository, its disks and a VM with them, by one client: life.py xml|json DIR [DEVICE].

DIR is a directory to make a repository in; DEVICE, where the host has loop devices, becomes one of ext4.
"""

import os
import sys

from clients import MIB, NULL, Failure, Picture, client, fails, host_of, make_vbd, make_vdi, wait, work


def connect(call):
    """What `xen-api` does first; the classes it then follows."""
    pools = call("pool.get_all_records")
    assert len(pools) == 1, pools
    pool = list(pools)[0]
    hosts = call("host.get_all_records")
    assert all(host["address"] for host in hosts.values())
    # This one takes no session.
    methods = call.bare("system.listMethods")
    classes = [name.split(".")[0] for name in methods if name.endswith(".get_all_records")]
    assert {"VM", "VDI", "VBD", "SR", "PBD", "task", "message", "pool", "host"} <= set(classes), classes
    token = call("event.inject", "pool", pool)
    assert token and isinstance(token, str)
    for name in classes:
        try:
            records = call(name + ".get_all_records")
        except Failure as failure:
            assert failure.code == "MESSAGE_REMOVED", failure.details
            continue
        assert all(ref.startswith("OpaqueRef:") for ref in records), name
    batch = call("event.from", classes, token, 5.0)
    assert set(batch) == {"token", "events", "valid_ref_counts"}, set(batch)
    tasks = call("task.get_all_records")
    assert isinstance(batch["valid_ref_counts"]["task"], int), batch["valid_ref_counts"]
    assert batch["valid_ref_counts"]["task"] == len(tasks), (batch["valid_ref_counts"], tasks)
    return classes


def settings(call, kind, ref):
    """A map is changed a key at a time, as products do it, and as a whole."""
    call(kind + ".add_to_other_config", ref, "proof:key", "one <&> ü")
    assert call(kind + ".get_other_config", ref)["proof:key"] == "one <&> ü"
    fails(call, "MAP_DUPLICATE_KEY", kind + ".add_to_other_config", ref, "proof:key", "two")
    call(kind + ".remove_from_other_config", ref, "proof:key")
    call(kind + ".remove_from_other_config", ref, "proof:key")
    before = call(kind + ".get_other_config", ref)
    assert "proof:key" not in before
    call(kind + ".set_other_config", ref, {**before, "of": "proof"})
    assert call(kind + ".get_other_config", ref) == {**before, "of": "proof"}


def tasks_of_its_own(call):
    """Products make tasks too, and show their work by them."""
    task = call("task.create", "of a product", "long work")
    assert call("task.get_status", task) == "pending"
    call("task.set_progress", task, 0.25)
    assert abs(call("task.get_progress", task) - 0.25) < 0.01
    call("task.add_to_other_config", task, "applies_to", "something")
    call("task.set_status", task, "cancelled")
    assert call("task.get_status", task) == "cancelled"
    call("task.destroy", task)
    fails(call, "HANDLE_INVALID", "task.get_record", task)


def repository(call, kind, config):
    """An SR, taken off the host and back."""
    host = host_of(call)
    sr = work(call, "SR.create", host, config, call.number(0), "of " + kind, "for the proof", kind, "user", False, {})
    record = call("SR.get_record", sr)
    assert (record["type"], record["name_label"], record["shared"]) == (kind, "of " + kind, False), record
    assert int(record["physical_size"]) > 0 and int(record["virtual_allocation"]) == 0, record
    [pbd] = record["PBDs"]
    pbd_record = call("PBD.get_record", pbd)
    assert pbd_record["currently_attached"] is True and pbd_record["host"] == host, pbd_record
    assert config.items() <= pbd_record["device_config"].items(), pbd_record
    call("PBD.unplug", pbd)
    assert call("PBD.get_currently_attached", pbd) is False
    fails(call, "SR_NOT_ATTACHED", "SR.scan", sr)
    fails(call, "SR_NOT_ATTACHED", "VDI.create", {"SR": sr, "virtual_size": call.number(MIB)})
    call("PBD.plug", pbd)
    settings(call, "SR", sr)
    return sr


def disks(call, sr):
    """Everything that can be done with a disk that is not in use."""
    vdi = work(call, "VDI.create", {"name_label": "data", "SR": sr, "virtual_size": call.number(8 * MIB), "tags": ["a"]})
    settings(call, "VDI", vdi)
    call("VDI.set_name_label", vdi, "renamed")
    snapshot = work(call, "VDI.snapshot", vdi, {})
    clone = work(call, "VDI.clone", vdi, {})
    copy = work(call, "VDI.copy", vdi, sr)
    made = {ref: call("VDI.get_record", ref) for ref in (vdi, snapshot, clone, copy)}
    assert len({record["uuid"] for record in made.values()}) == 4
    assert {int(record["virtual_size"]) for record in made.values()} == {8 * MIB}
    assert made[snapshot]["is_a_snapshot"] and made[snapshot]["snapshot_of"] == vdi
    assert made[vdi]["snapshots"] == [snapshot] and made[snapshot]["name_label"] == "renamed"
    assert not made[clone]["is_a_snapshot"] and made[clone]["snapshot_of"] == NULL
    work(call, "VDI.resize", vdi, call.number(12 * MIB))
    assert int(call("VDI.get_virtual_size", vdi)) == 12 * MIB
    assert int(call("VDI.get_virtual_size", snapshot)) == 8 * MIB
    try:
        work(call, "VDI.resize", vdi, call.number(4 * MIB))
        raise AssertionError("a disk became shorter")
    except Failure as failure:
        assert failure.code.startswith("SR_BACKEND_FAILURE_") or failure.code == "VDI_TOO_SMALL", failure.details
    # Forgotten, its image stays; taken in again under the names that products give.
    old = made[copy]
    work(call, "VDI.forget", copy)
    fails(call, "HANDLE_INVALID", "VDI.get_record", copy)
    introduced = work(
        call, "VDI.introduce", old["uuid"], "back", "again", sr, "user", False, False, {"k": "v"}, old["location"], {},
        old["sm_config"], True, call.number(0), call.number(0), NULL, False, "19700101T00:00:00Z", NULL,
    )
    record = call("VDI.get_record", introduced)
    assert (record["uuid"], record["name_label"], record["location"]) == (old["uuid"], "back", old["location"]), record
    assert int(record["virtual_size"]) == 8 * MIB and record["managed"] is True, record
    call("SR.scan", sr)
    for ref in (introduced, clone, snapshot, vdi):
        work(call, "VDI.destroy", ref)
    left = [ref for ref, record in call("VDI.get_all_records").items() if record["SR"] == sr and record["managed"]]
    assert not left, left


def virtual_machine(call, sr):
    """A VM of a template with real disk processes: its whole life."""
    [template] = call("VM.get_by_name_label", "Simulated guest")
    vm = work(call, "VM.clone", template, "of the proof")
    call("VM.add_to_platform", vm, "sim-front", "vhost-user")
    work(call, "VM.provision", vm)
    assert call("VM.get_is_a_template", vm) is False
    settings(call, "VM", vm)
    places = call("VM.get_allowed_VBD_devices", vm)
    assert places[:3] == ["0", "1", "2"], places
    vdis = [make_vdi(call, sr, 8 * MIB, name_label=f"disk {place}") for place in range(4)]
    vbds = [make_vbd(call, vm, vdi, userdevice=str(place)) for place, vdi in enumerate(vdis)]
    work(call, "VM.start", vm, False, False)
    assert call("VM.get_power_state", vm) == "Running" and call("VM.get_resident_on", vm) == host_of(call)
    assert all(call("VBD.get_currently_attached", vbd) for vbd in vbds)
    fails(call, "VM_BAD_POWER_STATE", "VM.start", vm, False, False)
    fails(call, "VM_BAD_POWER_STATE", "VM.destroy", vm)
    # One comes and goes while it runs.
    hot = make_vdi(call, sr, 4 * MIB, name_label="hot")
    place = call("VM.get_allowed_VBD_devices", vm)[0]
    vbd = make_vbd(call, vm, hot, userdevice=place)
    work(call, "VBD.plug", vbd)
    assert call("VBD.get_currently_attached", vbd) and call("VBD.get_userdevice", vbd) == place
    fails(call, "DEVICE_ALREADY_ATTACHED", "VBD.plug", vbd)
    fails(call, "VDI_IN_USE", "VDI.destroy", hot)
    work(call, "VDI.destroy", work(call, "VDI.snapshot", hot, {}))
    work(call, "VBD.unplug", vbd)
    fails(call, "DEVICE_ALREADY_DETACHED", "VBD.unplug", vbd)
    work(call, "VBD.plug", vbd)
    work(call, "VBD.unplug_force", vbd)
    call("VBD.destroy", vbd)
    # The same place serves another disk.
    work(call, "VDI.destroy", hot)
    work(call, "VM.pause", vm)
    assert call("VM.get_power_state", vm) == "Paused"
    work(call, "VM.unpause", vm)
    # All disks of a running VM are kept, and go.
    kept = work(call, "VM.snapshot", vm, "kept")
    assert call("VM.get_is_a_snapshot", kept) and len(call("VM.get_VBDs", kept)) == len(vbds)
    kept_vdis = [call("VBD.get_VDI", vbd) for vbd in call("VM.get_VBDs", kept)]
    # A VM that runs goes back to it: it is ended, and has other disks.
    work(call, "VM.revert", kept)
    assert call("VM.get_power_state", vm) == "Halted" and call("VM.get_parent", vm) == kept
    vbds = call("VM.get_VBDs", vm)
    assert len(vbds) == len(vdis)
    for vdi in vdis:
        fails(call, "HANDLE_INVALID", "VDI.get_record", vdi)
    vdis = [call("VBD.get_VDI", vbd) for vbd in vbds]
    work(call, "VM.start", vm, False, False)
    work(call, "VM.destroy", kept)
    for vdi in kept_vdis:
        work(call, "VDI.destroy", vdi)
    work(call, "VM.clean_shutdown", vm)
    assert call("VM.get_power_state", vm) == "Halted"
    assert not any(call("VBD.get_currently_attached", vbd) for vbd in vbds)
    work(call, "VM.destroy", vm)
    for vdi in vdis:
        work(call, "VDI.destroy", vdi)


def main():
    call = client()
    classes = connect(call)
    before = {name: set(call(name + ".get_all")) for name in ("SR", "PBD", "VDI", "VBD", "VM", "task")}
    follower = call.another()
    picture = Picture(follower, classes)
    tasks_of_its_own(call)
    kinds = [("file", {"location": os.path.join(sys.argv[2], "repository")})]
    kinds += [("ext", {"device": device}) for device in sys.argv[3:]]
    for kind, config in kinds:
        sr = repository(call, kind, config)
        disks(call, sr)
        virtual_machine(call, sr)
        fails(call, "SR_HAS_PBD", "SR.forget", sr)
        work(call, "SR.destroy", sr)
        fails(call, "HANDLE_INVALID", "SR.get_record", sr)
    wait("an end of all work", lambda: not call("task.get_all"))
    after = {name: set(call(name + ".get_all")) for name in before}
    assert after == before, {name: after[name] ^ before[name] for name in before}
    compared = picture.finish(call)
    assert compared > 10 and picture.batches > 20, (compared, picture.batches)
    follower.logout()
    reference = call.reference
    call.logout()
    other = call.another()
    fails(other.bare, "SESSION_INVALID", "pool.get_all", reference, says=reference)
    other.logout()
    print("done")


main()
