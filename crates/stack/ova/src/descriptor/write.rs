//! A descriptor that is written: OVF 1.1, with the devices that its readers know.

use std::fmt::Write as _;

use super::{Firmware, System};
use crate::disk_format::DiskFormat;
use crate::xml::escaped;

/// A disk in the package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    /// The name of the member.
    pub(crate) href: String,
    /// Bytes of the member.
    pub(crate) size: u64,
    /// Bytes of the disk.
    pub(crate) capacity: u64,
}

/// Controllers hold so many disks; the place 7 is the controller's own.
const PER_CONTROLLER: usize = 15;

/// The name of a format in descriptors.
const fn uri(format: DiskFormat) -> &'static str {
    match format {
        DiskFormat::Vmdk => "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized",
        DiskFormat::Vhd => "http://go.microsoft.com/fwlink/?LinkId=137171",
    }
}

/// The address of a disk at its controller.
fn address(at: usize) -> usize {
    let at = at % PER_CONTROLLER;
    if at < 7 { at } else { at + 1 }
}

struct Items {
    text: String,
    next: u32,
}

impl Items {
    /// One device; its elements come in the order of their names.
    fn put(&mut self, kind: u32, name: &str, fields: &[(&str, String)]) -> u32 {
        let id = self.next;
        self.next += 1;
        let mut all: Vec<(&str, String)> = fields.to_vec();
        all.extend([
            ("ElementName", name.to_owned()),
            ("InstanceID", id.to_string()),
            ("ResourceType", kind.to_string()),
        ]);
        all.sort();
        self.text.push_str("      <Item>\n");
        for (field, value) in all {
            let _ = writeln!(self.text, "        <rasd:{field}>{}</rasd:{field}>", escaped(&value));
        }
        self.text.push_str("      </Item>\n");
        id
    }
}

fn devices(system: &System) -> String {
    let mut items = Items { text: String::new(), next: 1 };
    let text = str::to_owned;
    let cpus = [("AllocationUnits", text("hertz * 10^6")), ("VirtualQuantity", system.cpus.to_string())];
    items.put(3, &format!("{} virtual CPUs", system.cpus), &cpus);
    let mib = system.memory.div_ceil(1 << 20);
    let memory = [("AllocationUnits", text("byte * 2^20")), ("VirtualQuantity", mib.to_string())];
    items.put(4, &format!("{mib} MiB of memory"), &memory);
    let disks: Vec<usize> = system.drives.iter().filter_map(|drive| drive.disk).collect();
    let mut controller = 0;
    for (at, disk) in disks.iter().enumerate() {
        if at % PER_CONTROLLER == 0 {
            let number = at / PER_CONTROLLER;
            let of = [("Address", number.to_string()), ("ResourceSubType", text("lsilogic"))];
            controller = items.put(6, &format!("SCSI controller {number}"), &of);
        }
        let fields = [
            ("AddressOnParent", address(at).to_string()),
            ("HostResource", format!("ovf:/disk/disk{}", disk + 1)),
            ("Parent", controller.to_string()),
        ];
        items.put(17, &format!("Disk {at}"), &fields);
    }
    let drives = system.drives.iter().filter(|drive| drive.disk.is_none());
    for (at, _) in drives.take(2).enumerate() {
        if at == 0 {
            controller = items.put(5, "IDE controller 0", &[("Address", text("0"))]);
        }
        let fields = [
            ("AddressOnParent", at.to_string()),
            ("AutomaticAllocation", text("false")),
            ("Parent", controller.to_string()),
        ];
        items.put(15, &format!("CD drive {at}"), &fields);
    }
    for (at, nic) in system.nics.iter().enumerate() {
        let mut fields = vec![
            ("AddressOnParent", (at + 7).to_string()),
            ("AutomaticAllocation", text("true")),
            ("Connection", nic.network.clone()),
            ("ResourceSubType", text("E1000")),
        ];
        fields.extend((!nic.mac.is_empty()).then(|| ("Address", nic.mac.clone())));
        items.put(10, &format!("Network adapter {at}"), &fields);
    }
    items.text
}

/// Writes the descriptor of a VM whose drives name disks by their index.
pub(crate) fn write(system: &System, disks: &[Written], format: DiskFormat) -> String {
    let mut out = String::from(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <Envelope xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" \
         xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\" \
         xmlns:rasd=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData\" \
         xmlns:vssd=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData\" \
         xmlns:vmw=\"http://www.vmware.com/schema/ovf\">\n  <References>\n",
    );
    // Writing to a String cannot fail.
    for (at, disk) in disks.iter().enumerate() {
        let href = escaped(&disk.href);
        let _ = writeln!(
            out,
            "    <File ovf:href=\"{href}\" ovf:id=\"file{0}\" ovf:size=\"{1}\"/>",
            at + 1,
            disk.size
        );
    }
    out.push_str("  </References>\n  <DiskSection>\n    <Info>The disks</Info>\n");
    for (at, disk) in disks.iter().enumerate() {
        let _ = writeln!(
            out,
            "    <Disk ovf:capacity=\"{1}\" ovf:capacityAllocationUnits=\"byte\" ovf:diskId=\"disk{0}\" \
             ovf:fileRef=\"file{0}\" ovf:format=\"{2}\"/>",
            at + 1,
            disk.capacity,
            uri(format)
        );
    }
    out.push_str("  </DiskSection>\n  <NetworkSection>\n    <Info>The networks</Info>\n");
    let mut networks: Vec<&str> = system.nics.iter().map(|nic| nic.network.as_str()).collect();
    networks.sort_unstable();
    networks.dedup();
    for network in networks {
        let name = escaped(network);
        let _ = writeln!(
            out,
            "    <Network ovf:name=\"{name}\">\n      <Description>{name}</Description>\n    </Network>"
        );
    }
    let name = escaped(&system.name);
    let _ = write!(
        out,
        "  </NetworkSection>\n  <VirtualSystem ovf:id=\"{name}\">\n    <Info>A VM</Info>\n    <Name>{name}</Name>\n"
    );
    if !system.description.is_empty() {
        let about = escaped(&system.description);
        let _ = write!(
            out,
            "    <AnnotationSection>\n      <Info>What it is for</Info>\n      <Annotation>{about}</Annotation>\n    \
             </AnnotationSection>\n"
        );
    }
    let _ = write!(
        out,
        "    <OperatingSystemSection ovf:id=\"1\">\n      <Info>The guest</Info>\n    </OperatingSystemSection>\n    \
         <VirtualHardwareSection>\n      <Info>The devices</Info>\n      <System>\n        \
         <vssd:ElementName>Virtual hardware</vssd:ElementName>\n        <vssd:InstanceID>0</vssd:InstanceID>\n        \
         <vssd:VirtualSystemIdentifier>{name}</vssd:VirtualSystemIdentifier>\n        \
         <vssd:VirtualSystemType>vmx-07</vssd:VirtualSystemType>\n      </System>\n"
    );
    out.push_str(&devices(system));
    if system.firmware == Firmware::Uefi {
        out.push_str("      <vmw:Config ovf:required=\"false\" vmw:key=\"firmware\" vmw:value=\"efi\"/>\n");
    }
    out.push_str("    </VirtualHardwareSection>\n  </VirtualSystem>\n</Envelope>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::super::{Descriptor, Drive, Nic};
    use super::*;

    #[test]
    fn a_descriptor_is_read_as_it_was_written() {
        let drive = |disk| Drive { disk, place: (0, 0) };
        let mut drives: Vec<Drive> = (0..17).map(|disk| drive(Some(disk))).collect();
        drives.push(drive(None));
        let system = System {
            name: "a <VM> & \"more\"".into(),
            description: "two\nlines".into(),
            cpus: 3,
            memory: 768 << 20,
            firmware: Firmware::Uefi,
            drives,
            nics: vec![Nic { network: "net & work".into(), mac: "02:00:00:00:00:01".into() }],
        };
        let disks: Vec<Written> = (1..=17)
            .map(|at| Written { href: format!("d{at}.vmdk"), size: at, capacity: at * 512 })
            .collect();
        let read = Descriptor::read(write(&system, &disks, DiskFormat::Vmdk).as_bytes()).unwrap();
        let mut found = read.systems[0].clone();
        assert_eq!(found.drives.iter().map(|drive| drive.disk).collect::<Vec<_>>(), {
            let of: Vec<_> = system.drives.iter().map(|drive| drive.disk).collect();
            of
        });
        found.drives.clone_from(&system.drives);
        assert_eq!(found, system);
        for (at, disk) in disks.iter().enumerate() {
            let file = read.file_of(&read.disks[at]).unwrap().unwrap();
            assert_eq!((&file.href, file.size), (&disk.href, Some(disk.size)));
            assert_eq!(read.disks[at].capacity, Some(disk.capacity));
        }
    }

    #[test]
    fn addresses_leave_out_the_controllers_own() {
        let found: Vec<usize> = (0..16).map(address).collect();
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 0]);
    }
}
