#!/usr/bin/env python3
"""A storage plugin of SMAPIv1 on files, for tests: called by XML-RPC in its argument, it calls the toolstack's API.

It keeps the records of its disks by `VDI.db_introduce` and `VDI.db_forget`, as XenServer's own plugins do.
"""

import http.client
import os
import socket
import sys
import xmlrpc.client

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
from files import Missing, Store  # noqa: E402

NULL = "OpaqueRef:NULL"
EPOCH = xmlrpc.client.DateTime("19700101T00:00:00Z")


class Connection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


class Transport(xmlrpc.client.Transport):
    """The same for XML-RPC."""

    def make_connection(self, host):
        return Connection(os.environ.get("TAPIO_SOCKET", "/var/lib/xcp/xapi"))


class Api:
    """The session that the toolstack gives."""

    def __init__(self, session):
        self.session = session
        self.server = xmlrpc.client.ServerProxy("http://localhost/", transport=Transport())

    def __call__(self, name, *args):
        answer = getattr(self.server, name)(self.session, *args)
        if answer["Status"] != "Success":
            raise xmlrpc.client.Fault(153, f"{name}: {answer['ErrorDescription']}")
        return answer["Value"]


class Plugin:
    """One call."""

    def __init__(self, params):
        self.params = params
        self.args = params["args"]
        self.api = Api(params["session_ref"]) if "session_ref" in params else None

    @property
    def store(self):
        config = self.params["device_config"]
        if "location" not in config:
            print("<?xml version='1.0'?><wanted>location</wanted>", file=sys.stderr)
            raise xmlrpc.client.Fault(90, "The request is missing the location parameter")
        assert config["SRmaster"] == "true", config
        return Store(config["location"])

    def told(self, key, is_a_snapshot=False):
        """Makes the record of a disk, or brings it up to date."""
        notes = self.store.read(key)
        self.api("VDI.db_introduce", key, notes["name"], notes["description"], self.params["sr_ref"], "user",
                 False, notes["read_only"], {}, key, {}, {"vdi_type": "aio"}, True, str(notes["size"]),
                 str(notes["used"]), NULL, is_a_snapshot, EPOCH, NULL)
        return {"location": key, "uuid": key}

    def measured(self):
        total, free = self.store.sizes()
        self.api("SR.set_physical_size", self.params["sr_ref"], str(total))
        self.api("SR.set_physical_utilisation", self.params["sr_ref"], str(total - free))

    def sr_get_driver_info(self):
        return {
            "name": "Programs of the tests",
            "description": "Sparse files, by a program of version 1",
            "vendor": "Tapio's tests",
            "copyright": "none",
            "driver_version": "1.2",
            "required_api_version": "1.0",
            "capabilities": ["SR_PROBE", "SR_UPDATE", "VDI_CREATE", "VDI_DELETE", "VDI_ATTACH", "VDI_DETACH",
                             "VDI_ACTIVATE", "VDI_DEACTIVATE", "VDI_CLONE", "VDI_SNAPSHOT", "VDI_RESIZE",
                             "VDI_UPDATE", "ATOMIC_PAUSE"],
            "configuration": [{"key": "location", "description": "the directory"}],
        }

    def sr_create(self):
        # The records are there before the SR is.
        assert self.api("SR.get_uuid", self.params["sr_ref"]) == self.params["sr_uuid"]
        Store.make(self.store.path, self.params["sr_uuid"], "", "")

    def sr_attach(self):
        self.store.about()

    def sr_detach(self):
        pass

    def sr_delete(self):
        self.store.remove()

    def refusals(self):
        """What the toolstack refuses to whoever has read the session from the command line, and to a plugin."""
        server = xmlrpc.client.ServerProxy(self.params["device_config"]["http"])
        said = [server.VDI.get_all(self.params["session_ref"])["ErrorDescription"][0]]
        for other in self.api("VDI.get_all"):
            try:
                self.api("VDI.db_forget", other)
                said.append("forgotten")
            except xmlrpc.client.Fault as fault:
                said.append(fault.faultString)
        text = " ".join(said).replace("<", "")
        return f"<?xml version='1.0'?><said>{text}</said><session>{self.params['session_ref']}</session>"

    def sr_probe(self):
        if "http" in self.params["device_config"]:
            return self.refusals()
        found = f"<SR><UUID>{self.store.about()['uuid']}</UUID></SR>" if os.path.exists(self.store.path) else ""
        return f"<?xml version='1.0'?><SRlist>{found}</SRlist>"

    def sr_scan(self):
        there = set(self.store.keys())
        for record in self.api("VDI.get_all_records").values():
            if record["SR"] == self.params["sr_ref"] and record["location"] not in there:
                self.api("VDI.db_forget", self.api("VDI.get_by_uuid", record["uuid"]))
        known = {record["location"] for record in self.api("VDI.get_all_records").values()}
        for key in there - known:
            self.told(key)
        self.measured()

    def sr_update(self):
        self.measured()

    def vdi_create(self):
        size, name, description = self.args[:3]
        assert len(self.args) == 8, self.args
        return self.told(self.store.create(name, description, int(size), self.params["vdi_uuid"])["key"])

    def vdi_delete(self):
        self.store.destroy(self.params["vdi_location"])
        self.api("VDI.db_forget", self.params["vdi_ref"])

    def vdi_snapshot(self):
        return self.told(self.store.copy(self.params["vdi_location"], True)["key"], True)

    def vdi_clone(self):
        return self.told(self.store.copy(self.params["vdi_location"], False)["key"])

    def vdi_resize(self):
        self.store.resize(self.params["vdi_location"], int(self.args[0]))
        self.api("VDI.set_virtual_size", self.params["vdi_ref"], self.args[0])
        return {"location": self.params["vdi_location"], "uuid": self.params["vdi_uuid"]}

    def vdi_update(self):
        notes = self.store.read(self.params["vdi_location"])
        notes["name"] = self.api("VDI.get_name_label", self.params["vdi_ref"])
        self.store.write(self.params["vdi_location"], notes)

    def vdi_attach(self):
        assert self.args[0] in ("true", "false"), self.args
        path = self.store.image(self.params["vdi_location"])
        return {"params_nbd": "", "params": path, "o_direct": True, "o_direct_reason": "",
                "xenstore_data": {"storage-type": "test", "vdi-type": "aio"}}

    def vdi_activate(self):
        with open(self.store.image(self.params["vdi_location"]) + ".way", "a") as file:
            file.write("activate\n")

    def vdi_deactivate(self):
        with open(self.store.image(self.params["vdi_location"]) + ".way", "a") as file:
            file.write("deactivate\n")

    def vdi_detach(self):
        pass


def main():
    (params,), command = xmlrpc.client.loads(sys.argv[1])
    assert command == params["command"] and os.environ["ORIGINATOR"] == "SM"
    try:
        answer = getattr(Plugin(params), command)()
        said = xmlrpc.client.dumps((answer,), methodresponse=True, allow_none=True)
    except xmlrpc.client.Fault as fault:
        said = xmlrpc.client.dumps(fault)
    except Missing as missing:
        said = xmlrpc.client.dumps(xmlrpc.client.Fault(144, f"no disk {missing}"))
    print(said)


main()
