"""Clients of the toolstack as products use them, and what the stories share.

The doors come by the environment: TAPIO_HTTP, TAPIO_HTTPS, TAPIO_SOCKET; XENAPI_WHEEL is Python's own `XenAPI`.
A client is called with the name of a message and its parameters, without the session.
"""

import http.client
import json
import os
import ssl
import sys
import threading
import time
import urllib.parse

if "XENAPI_WHEEL" in os.environ:
    sys.path.insert(0, os.environ["XENAPI_WHEEL"])
    import XenAPI

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NULL = "OpaqueRef:NULL"
USER, PASSWORD = "alice", "correct horse"
LIMIT = 60.0


class Failure(Exception):
    """What the toolstack answers instead of a value: the code, then its parameters."""

    def __init__(self, details):
        super().__init__(details)
        self.details = details
        self.code = details[0]


class Xml:
    """Python's `XenAPI`, as scripts, Ansible and XenServer's own storage manager use it."""

    def __init__(self, url=None, user=USER, password=PASSWORD):
        self.session = XenAPI.Session(url or os.environ["TAPIO_HTTPS"], ignore_ssl=True)
        self.session.login_with_password(user, password, "1.0", "proof")

    def __call__(self, name, *args):
        target = self.session.xenapi
        for part in name.split("."):
            target = getattr(target, part)
        try:
            return target(*args)
        except XenAPI.Failure as failure:
            raise Failure(failure.details) from None

    def another(self):
        """A session of its own: a connection of this library serves one call at a time."""
        return Xml()

    def same(self):
        """Another connection of the same session."""
        twin = object.__new__(Xml)
        twin.session = XenAPI.Session(os.environ["TAPIO_HTTPS"], ignore_ssl=True)
        twin.session._session = self.reference
        return twin

    @property
    def reference(self):
        return self.session._session

    def bare(self, name, *args):
        """A call with exactly these parameters: without a session, or with another one's. Nothing is repeated."""
        target = self.session
        for part in name.split("."):
            target = getattr(target, part)
        answer = target(*args)
        if answer["Status"] == "Failure":
            raise Failure(answer["ErrorDescription"])
        return answer["Value"]

    @staticmethod
    def number(value):
        """64-bit numbers are text in XML-RPC."""
        return str(value)

    def logout(self):
        self.session.xenapi.session.logout()


class Json:
    """JSON-RPC 2.0 as the npm package `xen-api` speaks it."""

    def __init__(self, url=None, user=USER, password=PASSWORD):
        self.url = urllib.parse.urlparse(url or os.environ["TAPIO_HTTPS"])
        self.connection = None
        self.reference = self.bare("session.login_with_password", user, password)

    def another(self):
        return Json()

    def same(self):
        twin = object.__new__(Json)
        twin.url, twin.connection, twin.reference = self.url, None, self.reference
        return twin

    def bare(self, name, *args):
        if self.connection is None:
            if self.url.scheme == "https":
                context = ssl._create_unverified_context()
                self.connection = http.client.HTTPSConnection(self.url.netloc, timeout=LIMIT, context=context)
            else:
                self.connection = http.client.HTTPConnection(self.url.netloc, timeout=LIMIT)
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": name, "params": args})
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        self.connection.request("POST", "/jsonrpc", body, headers)
        answer = self.connection.getresponse()
        text = answer.read()
        # Anything else makes this client fall back to XML-RPC.
        assert answer.headers["Content-Type"] == "application/json", answer.headers["Content-Type"]
        assert 200 <= answer.status < 300, (answer.status, text)
        read = json.loads(text)
        assert read["id"] == 1 and ("error" in read) != ("result" in read), read
        if "error" in read:
            raise Failure([read["error"]["message"], *read["error"]["data"]])
        return read["result"]

    def __call__(self, name, *args):
        return self.bare(name, self.reference, *args)

    @staticmethod
    def number(value):
        return value

    def logout(self):
        self("session.logout")


def fails(call, code, name, *args, says=""):
    """A call that must fail with this code; its parameters."""
    try:
        value = call(name, *args)
    except Failure as failure:
        assert failure.code == code, (name, args, failure.details)
        assert says in " ".join(failure.details), (name, args, failure.details)
        return failure.details[1:]
    raise AssertionError(f"{name}{args} must fail with {code}, and answers {value}")


def wait(what, look, limit=LIMIT):
    """Waits until `look` answers something true."""
    until = time.monotonic() + limit
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < until, f"{what} does not come"
        time.sleep(0.02)


def work(call, name, *args):
    """`Async.NAME`: the task is followed by events until it ends, and is cleared away; what it answers."""
    task = call("Async." + name, *args)
    token = ""
    record = call("task.get_record", task)
    until = time.monotonic() + LIMIT
    while record["status"] in ("pending", "cancelling"):
        assert time.monotonic() < until, record
        batch = call("event.from", ["task/" + task], token, 10.0)
        token = batch["token"]
        for event in batch["events"]:
            assert (event["class"], event["ref"]) == ("task", task), event
            assert event["operation"] != "del", "it is not destroyed"
            record = event["snapshot"]
    call("task.destroy", task)
    if record["status"] != "success":
        assert record["status"] in ("failure", "cancelled") and record["error_info"], record
        raise Failure(record["error_info"])
    assert float(record["progress"]) == 1.0 and record["error_info"] == [], record
    result = record["result"]
    if result:
        assert result.startswith("<value>") and result.endswith("</value>"), result
        result = result[len("<value>") : -len("</value>")]
    return result


class Picture:
    """What a client knows that only follows events: after the first batch no record is ever asked for."""

    def __init__(self, call, classes):
        self.call, self.classes = call, classes
        self.objects, self.token, self.wrong, self.batches = {}, "", [], 0
        self.ended = threading.Event()
        self.take(self.call("event.from", self.classes, "", 10.0), first=True)
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.thread.start()

    def take(self, batch, first=False):
        self.batches += 1
        seen = set()
        for event in batch["events"]:
            of = self.objects.setdefault(event["class"], {})
            ref, operation = event["ref"], event["operation"]
            if event["class"] != event["class"].lower():
                self.wrong.append(("class in capitals", event))
            if ref in seen:
                self.wrong.append(("twice in one answer", event))
            seen.add(ref)
            if first and operation != "add":
                self.wrong.append(("a first answer adds", event))
            if operation == "del":
                if of.pop(ref, None) is None:
                    self.wrong.append(("gone without having been there", event))
                if event.get("snapshot"):
                    self.wrong.append(("a record of what is gone", event))
            else:
                if (operation == "mod") != (ref in of):
                    self.wrong.append((operation, event))
                of[ref] = event["snapshot"]
        for name, count in batch["valid_ref_counts"].items():
            if name in self.objects and len(self.objects[name]) != count:
                self.wrong.append((name, len(self.objects[name]), count))
        self.token = batch["token"]

    def follow(self):
        try:
            while not self.ended.is_set():
                self.take(self.call("event.from", self.classes, self.token, 1.0))
        except Exception as error:
            self.wrong.append(error)

    def finish(self, call):
        """Ends it; the picture must be what the database says."""
        self.ended.set()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()
        self.take(self.call("event.from", self.classes, self.token, 0.1))
        assert not self.wrong, self.wrong[:3]
        compared = 0
        for name in ("pool", "host", "SM", "SR", "PBD", "VDI", "VBD", "VM", "console", "message", "task"):
            there = call(name + ".get_all_records")
            known = self.objects.get(name.lower(), {})
            assert set(there) == set(known), (name, set(there) ^ set(known))
            for ref, record in there.items():
                different = {key for key in record if record[key] != known[ref].get(key)}
                assert not different, (name, ref, [(key, record[key], known[ref].get(key)) for key in different])
                compared += 1
        return compared


def host_of(call):
    return list(call("host.get_all_records"))[0]


def dom0(call):
    return call("host.get_control_domain", host_of(call))


def disk_record(sr, size, **changes):
    record = {
        "name_label": "disk",
        "name_description": "",
        "SR": sr,
        "virtual_size": size,
        "type": "user",
        "sharable": False,
        "read_only": False,
        "other_config": {},
        "sm_config": {},
        "tags": [],
    }
    record.update(changes)
    return record


def make_vdi(call, sr, size, **changes):
    return call("VDI.create", disk_record(sr, call.number(size), **changes))


def make_vbd(call, vm, vdi, **changes):
    record = {
        "VM": vm,
        "VDI": vdi,
        "userdevice": "autodetect",
        "bootable": False,
        "mode": "RW",
        "type": "Disk",
        "unpluggable": True,
        "empty": False,
        "other_config": {},
        "qos_algorithm_type": "",
        "qos_algorithm_params": {},
    }
    record.update(changes)
    return call("VBD.create", record)


class Plugged:
    """A VDI as a block device of this host, as long as the block runs."""

    def __init__(self, call, vdi, mode="RW"):
        self.call, self.vdi, self.mode = call, vdi, mode

    def __enter__(self):
        self.vbd = make_vbd(self.call, dom0(self.call), self.vdi, mode=self.mode)
        self.call("VBD.plug", self.vbd)
        self.device = self.call("VBD.get_device", self.vbd)
        assert self.device and self.call("VBD.get_currently_attached", self.vbd) is True
        return self

    def __exit__(self, *_):
        self.call("VBD.unplug", self.vbd)
        assert self.call("VBD.get_currently_attached", self.vbd) is False
        self.call("VBD.destroy", self.vbd)

    def size(self):
        with open(f"/sys/block/{self.device}/size", encoding="ascii") as text:
            return int(text.read()) * 512

    def write(self, offset, data):
        with open("/dev/" + self.device, "r+b", buffering=0) as device:
            assert os.pwrite(device.fileno(), data, offset) == len(data)
            os.fsync(device.fileno())

    def read(self, offset, length):
        with open("/dev/" + self.device, "rb", buffering=0) as device:
            return os.pread(device.fileno(), length, offset)


def client():
    """The client that the story was started with."""
    return {"xml": Xml, "json": Json}[sys.argv[1]]()


def processes(word, below):
    """Processes of the daemon whose files are below a directory that were started with this word."""

    def words_of(pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return file.read().split(b"\0")
        except OSError:
            return []

    def parent_of(pid):
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[1]
        except OSError:
            return "0"

    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        words = words_of(pid)
        if word.encode() in words and any(below.encode() in part for part in words + words_of(parent_of(pid))):
            found.append(int(pid))
    return found


def outcome(call, task):
    """How a task ended."""
    wait("the end of a task", lambda: call("task.get_status", task) not in ("pending", "cancelling"))
    return call("task.get_status", task)


def cleared(parts):
    """A story's functions; each clears its tasks away."""

    def clearing(part):
        def run(call):
            part(call)
            for task in call("task.get_all"):
                outcome(call, task)
                call("task.destroy", task)

        return run

    return {name: clearing(part) for name, part in parts.items() if callable(part)}


def tell(parts):
    """Runs those of a story's functions that the command line names, each as a client of its own."""
    for part in sys.argv[3:]:
        began = time.monotonic()
        call = client()
        parts[part](call)
        wait("an end of all work", lambda: not call("task.get_all"))
        call.logout()
        print(f"{part}: {time.monotonic() - began:.1f} s")
    print("done")
