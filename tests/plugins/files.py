"""What both plugins of the tests keep: an SR is a directory, a disk a sparse file with its notes beside it.

A disk's name can ask for a defect: a plugin that makes a disk of that name hangs, crashes, prints garbage or floods.
"""

import json
import os
import shutil
import signal
import sys
import time
import uuid

FLOOD = b"x" * (1 << 20)


def misbehave(name):
    """Does what the name of a disk asks for."""
    if name == "hang":
        print("waiting for an array that does not answer", file=sys.stderr, flush=True)
        time.sleep(3600)
    if name == "crash":
        print("about to crash\x1b[31m", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "garbage":
        print("<<< this is no answer >>>")
        sys.exit(0)
    if name == "flood":
        while True:
            sys.stdout.buffer.write(FLOOD)
    if name == "quiet":
        sys.exit(3)


class Missing(Exception):
    """There is no such disk."""


class Store:
    """A directory."""

    def __init__(self, path):
        self.path = path

    @classmethod
    def make(cls, path, sr, name, description):
        os.makedirs(path, mode=0o700, exist_ok=True)
        with open(os.path.join(path, "sr.json"), "w") as file:
            json.dump({"uuid": sr, "name": name, "description": description}, file)
        return cls(path)

    def about(self):
        with open(os.path.join(self.path, "sr.json")) as file:
            return json.load(file)

    def remove(self):
        if self.keys():
            raise RuntimeError("there are disks in it")
        os.remove(os.path.join(self.path, "sr.json"))

    def image(self, key):
        return os.path.join(self.path, key + ".img")

    def sizes(self):
        found = os.statvfs(self.path)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def keys(self):
        names = sorted(os.listdir(self.path))
        return [name[:-4] for name in names if name.endswith(".img")]

    def read(self, key):
        try:
            with open(os.path.join(self.path, key + ".json")) as file:
                notes = json.load(file)
            data = os.stat(self.image(key))
        except FileNotFoundError:
            raise Missing(key) from None
        notes.update(key=key, size=data.st_size, used=data.st_blocks * 512)
        return notes

    def write(self, key, notes):
        kept = {name: notes[name] for name in ("uuid", "name", "description", "keys", "read_only")}
        path = os.path.join(self.path, key + ".json")
        with open(path + ".new", "w") as file:
            json.dump(kept, file)
        os.rename(path + ".new", path)

    def create(self, name, description, size, key=None):
        misbehave(name)
        key = key or str(uuid.uuid4())
        self.write(key, {"uuid": key, "name": name, "description": description, "keys": {}, "read_only": False})
        with open(self.image(key), "wb") as file:
            file.truncate(size)
        return self.read(key)

    def copy(self, key, read_only, new=None):
        notes, new = self.read(key), new or str(uuid.uuid4())
        notes.update(uuid=new, read_only=read_only, keys=dict(notes["keys"]))
        self.write(new, notes)
        # Holes stay holes.
        os.system(f"cp --sparse=always --reflink=auto '{self.image(key)}' '{self.image(new)}'")
        return self.read(new)

    def resize(self, key, size):
        os.truncate(self.image(key), size)

    def destroy(self, key):
        self.read(key)
        os.remove(self.image(key))
        os.remove(os.path.join(self.path, key + ".json"))

    def clear(self):
        shutil.rmtree(self.path)
