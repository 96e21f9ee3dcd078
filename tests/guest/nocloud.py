"""What cloud-init (Debian's package, on PYTHONPATH) makes of the settings that a guest is given on a medium.

Prints lines `key=value` for the guest's report.
"""

import logging
import sys

from cloudinit import distros, helpers
from cloudinit.net import network_state
from cloudinit.sources import DataSourceNoCloud

logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
paths = helpers.Paths({"cloud_dir": "/mnt/cloud", "run_dir": "/run/cloud-init"})
distro = distros.fetch("debian")("debian", {}, paths)
source = DataSourceNoCloud.DataSourceNoCloud({}, distro, paths)
if not source.get_data():
    sys.exit("cloud-init finds no settings")
print(f"subplatform={source.subplatform}")
print(f"instance={source.get_instance_id()}")
name = source.get_hostname()
print(f"hostname={getattr(name, 'hostname', name)}")
text = source.get_userdata_raw()
text = text if isinstance(text, str) else text.decode()
print(f"lines={len(text.splitlines())}")
print(f"last={text.splitlines()[-1]}")
print("parts=" + " ".join(part.get_content_type() for part in source.get_userdata().walk()))
state = network_state.parse_net_config_data(source.network_config)
for one in state.iter_interfaces():
    subnet = one["subnets"][0]
    print(f"{one['name']}={subnet['address']}/{subnet['prefix']} by {subnet['gateway']}")
