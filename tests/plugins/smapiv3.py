#!/usr/bin/env python3
"""A storage plugin of SMAPIv3 on files, for tests: every method is a link to this program.

`SR.*` and `Volume.*` belong to the volume plugin, `Datapath.*` to the datapath plugins `testfile` (the file itself) and
`testnbd` (an NBD server for it). `device-config:location` is the directory, `device-config:way` is `file` or `nbd`.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
from files import Missing, Store  # noqa: E402


class Failed(Exception):
    """An error in the published shape: a code, then its parameters."""


def volume(store, key):
    try:
        notes = store.read(key)
    except Missing:
        raise Failed("Volume_does_not_exist", key) from None
    way = store.about().get("way", "file")
    return {
        "key": key,
        "uuid": notes["uuid"],
        "name": notes["name"],
        "description": notes["description"],
        "read_write": not notes["read_only"],
        "sharable": False,
        "virtual_size": notes["size"],
        "physical_utilisation": notes["used"],
        "uri": ["nosuchscheme:///x", f"test{way}://" + urllib.parse.quote(store.image(key))],
        "keys": notes["keys"],
        "a_field_of_a_later_version": {"and": ["more"]},
    }


def changed(store, key, change):
    notes = store.read(key)
    change(notes)
    store.write(key, notes)


class Volumes:
    """The volume plugin."""

    def query(self, dbg):
        return {
            "plugin": "testvolumes",
            "name": "Volumes of the tests",
            "description": "Sparse files, by scripts of version 3",
            "vendor": "Tapio's tests",
            "copyright": "none",
            "version": "3.1",
            "required_api_version": "5.0",
            "features": ["VDI_RESIZE_ONLINE", "VDI_DESTROY", "SOMETHING_NEW/7"],
            "configuration": {"location": "the directory", "way": "file or nbd"},
            "required_cluster_stack": [],
        }

    def sr_probe(self, dbg, configuration):
        found = os.path.exists(os.path.join(configuration["location"], "sr.json"))
        sr = None
        if found:
            about = Store(configuration["location"]).about()
            configuration = dict(configuration, sr_uuid=about["uuid"])
            sr = self.sr_stat(dbg, configuration["location"])
        return [{"configuration": configuration, "complete": True, "sr": sr, "extra_info": {}}]

    def sr_create(self, dbg, uuid, configuration, name, description):
        if "location" not in configuration:
            raise Failed("SR_BACKEND_FAILURE_90", "", "the location is missing", "")
        store = Store.make(configuration["location"], uuid, name, description)
        about = dict(store.about(), way=configuration.get("way", "file"))
        with open(os.path.join(store.path, "sr.json"), "w") as file:
            json.dump(about, file)
        return dict(configuration, sr_uuid=uuid, made="by the plugin")

    def sr_attach(self, dbg, configuration):
        if configuration.get("made") != "by the plugin":
            raise Failed("SR_does_not_exist", "not the configuration that SR.create answered")
        return configuration["location"]

    def sr_detach(self, dbg, sr):
        pass

    def sr_destroy(self, dbg, sr):
        Store(sr).remove()

    def sr_stat(self, dbg, sr):
        about = Store(sr).about()
        total, free = Store(sr).sizes()
        return {
            "sr": sr,
            "name": about["name"],
            "uuid": about["uuid"],
            "description": about["description"],
            "free_space": free,
            "total_space": total,
            "datasources": [],
            "clustered": False,
            "health": ["Healthy", ""],
        }

    def sr_ls(self, dbg, sr):
        return [volume(Store(sr), key) for key in Store(sr).keys()]

    def volume_create(self, dbg, sr, name, description, size, sharable):
        return volume(Store(sr), Store(sr).create(name, description, size)["key"])

    def volume_snapshot(self, dbg, sr, key):
        return volume(Store(sr), Store(sr).copy(key, True)["key"])

    def volume_clone(self, dbg, sr, key):
        return volume(Store(sr), Store(sr).copy(key, False)["key"])

    def volume_destroy(self, dbg, sr, key):
        volume(Store(sr), key)
        Store(sr).destroy(key)

    def volume_resize(self, dbg, sr, key, new_size):
        Store(sr).resize(key, new_size)

    def volume_stat(self, dbg, sr, key):
        return volume(Store(sr), key)

    def volume_set(self, dbg, sr, key, k, v):
        changed(Store(sr), key, lambda notes: notes["keys"].update({k: v}))

    def volume_unset(self, dbg, sr, key, k):
        changed(Store(sr), key, lambda notes: notes["keys"].pop(k, None))

    def volume_set_name(self, dbg, sr, key, new_name):
        changed(Store(sr), key, lambda notes: notes.update(name=new_name))

    def volume_set_description(self, dbg, sr, key, new_description):
        changed(Store(sr), key, lambda notes: notes.update(description=new_description))

    def volume_compare(self, dbg, sr, key, key2):
        block, at, ranges = 1 << 16, 0, []
        with open(Store(sr).image(key), "rb") as one, open(Store(sr).image(key2), "rb") as other:
            while True:
                pieces = one.read(block), other.read(block)
                if not any(pieces):
                    return {"blocksize": block, "ranges": ranges}
                if pieces[0] != pieces[1]:
                    ranges.append([at, 1])
                at += 1


def image_of(uri):
    return urllib.parse.unquote(urllib.parse.urlparse(uri).path)


class Datapath:
    """The datapath plugins. What is activated is noted beside the image."""

    def query(self, dbg):
        return {"plugin": "test", "required_api_version": "5.0", "features": []}

    def note(self, uri, word):
        with open(image_of(uri) + ".way", "a") as file:
            file.write(word + "\n")

    def datapath_open(self, dbg, uri, persistent):
        self.note(uri, "open")

    def datapath_attach(self, dbg, uri, domain):
        self.note(uri, "attach")
        image = image_of(uri)
        if uri.startswith("testfile:"):
            return {"implementations": [["XenDisk", {"params": "qcow2:/x", "extra": {}, "backend_type": "qdisk"}],
                                        ["File", {"path": image}]]}
        return {"implementations": [["Nbd", {"uri": f"nbd:unix:{image}.s:exportname=disk"}]]}

    def datapath_activate(self, dbg, uri, domain):
        self.note(uri, "activate")
        image = image_of(uri)
        if uri.startswith("testnbd:") and not os.path.exists(image + ".s"):
            serve = ["qemu-nbd", "--persistent", "--fork", "--format=raw", "--shared=8", "--export-name=disk"]
            subprocess.run(serve + [f"--pid-file={image}.pid", f"--socket={image}.s", image], check=True,
                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def datapath_deactivate(self, dbg, uri, domain):
        self.note(uri, "deactivate")
        image = image_of(uri)
        if os.path.exists(image + ".pid"):
            with open(image + ".pid") as file:
                pid = int(file.read())
            os.kill(pid, signal.SIGTERM)
            while os.path.exists(f"/proc/{pid}/exe"):
                time.sleep(0.01)
            for ending in (".pid", ".s"):
                if os.path.exists(image + ending):
                    os.remove(image + ending)

    def datapath_detach(self, dbg, uri, domain):
        self.note(uri, "detach")

    def datapath_close(self, dbg, uri):
        self.note(uri, "close")


def main():
    method = os.path.basename(sys.argv[0])
    assert sys.argv[1:] == ["--json"], sys.argv
    args = json.load(sys.stdin)
    interface, name = method.split(".")
    in_datapath = os.path.basename(os.path.dirname(os.path.dirname(os.path.abspath(sys.argv[0])))) == "datapath"
    plugin = Datapath() if in_datapath else Volumes()
    do = "query" if interface == "Plugin" else f"{interface}_{name}".lower()
    print(f"{method} is asked", file=sys.stderr)
    try:
        answer = getattr(plugin, do)(**args)
    except Failed as failed:
        code, *params = failed.args
        print(json.dumps({"code": code, "params": params, "backtrace": {"error": "", "files": [], "lines": []}}))
        sys.exit(1)
    print(json.dumps(answer))


main()
