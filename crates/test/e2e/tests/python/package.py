"""OVA packages by the libraries of Python.

package.py check PACKAGE DIR MEMORY NAME [SHA1]   unpacks one of ours, checks it, prints its images in the drives' order
package.py pack PACKAGE IMAGE...            makes one of these images, as other products do; missing:IMAGE is left out
"""

import hashlib
import io
import os
import sys
import tarfile
import xml.etree.ElementTree as ET
from xml.sax.saxutils import escape

OVF = "{http://schemas.dmtf.org/ovf/envelope/1}"
RASD = "{http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData}"


def check(package, directory, memory, name, kind="SHA256"):
    with tarfile.open(package) as tar:
        names = tar.getnames()
        tar.extractall(directory, filter="data")
    assert names[0].endswith(".ovf") and names[-1].endswith(".mf"), names

    def read(file):
        with open(os.path.join(directory, file), "rb") as opened:
            return opened.read()

    # Each file but the manifest has its sum there.
    lines = read(names[-1]).decode().splitlines()
    sums = {f"{kind}({file})= {hashlib.new(kind, read(file)).hexdigest()}" for file in names[:-1]}
    assert set(lines) == sums, (lines, sums)

    root = ET.fromstring(read(names[0]))
    assert root.tag == OVF + "Envelope", root.tag
    files = {file.get(OVF + "id"): file for file in root.iter(OVF + "File")}
    assert [file.get(OVF + "href") for file in files.values()] == names[1:-1], "files stand in their order"
    for file in files.values():
        assert int(file.get(OVF + "size")) == len(read(file.get(OVF + "href")))
    disks = {disk.get(OVF + "diskId"): disk for disk in root.iter(OVF + "Disk")}
    (system,) = root.iter(OVF + "VirtualSystem")
    assert system.find(OVF + "Name").text == name
    items = list(system.iter(OVF + "Item"))
    of = lambda item, field: (item.find(RASD + field).text if item.find(RASD + field) is not None else None)
    # The schema of devices has their elements in the order of the alphabet.
    for item in items:
        tags = [child.tag for child in item]
        assert tags == sorted(tags), tags
    amounts = {of(item, "ResourceType"): of(item, "VirtualQuantity") for item in items}
    assert amounts["3"] == "1" and int(amounts["4"]) << 20 == int(memory), amounts
    ids = [of(item, "InstanceID") for item in items]
    assert len(set(ids)) == len(ids), ids
    drives = [item for item in items if of(item, "ResourceType") == "17"]
    drives.sort(key=lambda item: int(of(item, "AddressOnParent")))
    for drive in drives:
        assert of(drive, "Parent") in ids
        disk = disks[of(drive, "HostResource").removeprefix("ovf:/disk/")]
        print(files[disk.get(OVF + "fileRef")].get(OVF + "href"))


def item(kind, **fields):
    fields["ResourceType"] = kind
    return "<Item>" + "".join(f"<rasd:{key}>{value}</rasd:{key}>" for key, value in sorted(fields.items())) + "</Item>"


def compression(name):
    return " ovf:compression='gzip'" if name.endswith(".gz") else ""


def pack(package, *images):
    names = [os.path.basename(image) for image in images]
    files = "".join(f"<File ovf:id='f{at}' ovf:href='{name}'{compression(name)}/>" for at, name in enumerate(names))
    disks = "".join(
        f"<Disk ovf:diskId='vmdisk{at}' ovf:fileRef='f{at}' ovf:capacity='20' "
        f"ovf:capacityAllocationUnits='byte * 2^20' ovf:format='x'/>"
        for at in range(len(names))
    )
    # The drives stand in the wrong order; addresses have the right one.
    drives = [
        item(17, AddressOnParent=at, Parent=3, InstanceID=10 + at, ElementName="d", HostResource=f"ovf:/disk/vmdisk{at}")
        for at in range(len(names))
    ]
    items = [
        item(3, InstanceID=1, ElementName="c", VirtualQuantity=2, AllocationUnits="hertz * 10^6"),
        item(4, InstanceID=2, ElementName="m", VirtualQuantity=256, AllocationUnits="byte * 2^20"),
        item(6, InstanceID=3, ElementName="s", Address=0, ResourceSubType="lsilogic"),
        *reversed(drives),
        item(10, InstanceID=30, ElementName="n", Connection="VM Network", ResourceSubType="VmxNet3"),
        item(20, InstanceID=31, ElementName="sata", Address=0),
        item(24, InstanceID=32, ElementName="video"),
    ]
    text = (
        "<?xml version='1.0' encoding='UTF-8'?>\n<Envelope xmlns='http://schemas.dmtf.org/ovf/envelope/1' "
        "xmlns:ovf='http://schemas.dmtf.org/ovf/envelope/1' xmlns:vmw='http://www.vmware.com/schema/ovf' "
        "xmlns:rasd='http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData'>"
        f"<References>{files}</References><DiskSection><Info/>{disks}</DiskSection>"
        "<NetworkSection><Info/><Network ovf:name='VM Network'/></NetworkSection>"
        f"<VirtualSystem ovf:id='vm'><Info/><Name>{escape('appliance')}</Name>"
        f"<VirtualHardwareSection><Info/>{''.join(items)}"
        "<vmw:Config ovf:required='false' vmw:key='firmware' vmw:value='efi'/>"
        "</VirtualHardwareSection></VirtualSystem></Envelope>"
    ).encode()
    with tarfile.open(package, "w", format=tarfile.USTAR_FORMAT) as tar:

        def add(name, data):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))

        add("appliance.ovf", text)
        manifest = f"SHA1(appliance.ovf)= {hashlib.sha1(text).hexdigest()}\n"
        here = [image for image in images if not image.startswith("missing:")]
        for image in here:
            with open(image, "rb") as file:
                manifest += f"SHA1({os.path.basename(image)})= {hashlib.sha1(file.read()).hexdigest()}\n"
        add("appliance.mf", manifest.encode())
        for image in here:
            tar.add(image, os.path.basename(image))


if __name__ == "__main__":
    {"check": check, "pack": pack}[sys.argv[1]](*sys.argv[2:])
