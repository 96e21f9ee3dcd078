//! A descriptor that is read.

use std::collections::BTreeMap;

use super::units::amount;
use super::{Descriptor, Drive, FileRef, Firmware, Nic, System, VirtualDisk};
use crate::FILES_MAX;
use crate::error::{OvaError, shown};
use crate::xml::{self, Node};

/// VMs of a package, at most.
const SYSTEMS_MAX: usize = 64;
/// Drives of a VM, at most.
const DRIVES_MAX: usize = 255;
/// Bytes of a name, at most.
const NAME_LEN_MAX: usize = 1024;
/// Memory of a VM that says none.
const MEMORY: u64 = 512 << 20;

/// Kinds of devices (CIM_ResourceAllocationSettingData.ResourceType).
mod kind {
    pub(super) const PROCESSOR: u32 = 3;
    pub(super) const MEMORY: u32 = 4;
    pub(super) const ETHERNET: u32 = 10;
    pub(super) const CD: u32 = 15;
    pub(super) const DVD: u32 = 16;
    pub(super) const DISK: u32 = 17;
}

fn wrong(why: impl std::fmt::Display) -> OvaError {
    OvaError::Wrong(format!("the descriptor: {why}"))
}

fn bounded(text: &str, what: &str) -> Result<String, OvaError> {
    match text.len() <= NAME_LEN_MAX {
        true => Ok(text.to_owned()),
        false => Err(wrong(format_args!("{what} has more than {NAME_LEN_MAX} bytes"))),
    }
}

fn needed(node: &Node, attribute: &str) -> Result<String, OvaError> {
    let missing = || wrong(format_args!("an element {} has no {attribute}", shown(&node.name)));
    bounded(node.attribute(attribute).ok_or_else(missing)?, attribute)
}

impl Descriptor {
    /// Reads it.
    ///
    /// # Errors
    /// It is no descriptor, names a disk that it does not have, or has more of something than is read.
    pub fn read(bytes: &[u8]) -> Result<Self, OvaError> {
        let envelope = xml::read(bytes)?;
        if envelope.name != "Envelope" {
            return Err(wrong(format_args!("it is an '{}' and no Envelope of OVF", shown(&envelope.name))));
        }
        let mut read = Self::default();
        for file in envelope.children("References").flat_map(|references| references.children("File")) {
            let of = |name: &str| file.attribute(name).filter(|value| !value.is_empty());
            let unread = match (of("compression"), of("chunkSize")) {
                (Some(how), _) if how != "identity" && !how.eq_ignore_ascii_case("gzip") => {
                    Some(format!("it is compressed by {}: unpack it and write the package anew", shown(how)))
                }
                (_, Some(_)) => Some("it is cut in chunks: join them and write the package anew".to_owned()),
                _ => None,
            };
            let size = file.attribute("size").and_then(|size| size.trim().parse().ok());
            let is_packed = of("compression").is_some_and(|how| how.eq_ignore_ascii_case("gzip"));
            let (id, href) = (needed(file, "id")?, needed(file, "href")?);
            read.files.push(FileRef { id, href, size, is_packed, unread });
        }
        let disks = envelope.all().iter().filter(|section| section.name == "DiskSection");
        for disk in disks.flat_map(|section| section.children("Disk")) {
            let unit = disk.attribute("capacityAllocationUnits").unwrap_or_default();
            let capacity = disk.attribute("capacity").map(|number| {
                amount(number, unit).ok_or_else(|| {
                    wrong(format_args!("the capacity '{}' of a disk, in '{}'", shown(number), shown(unit)))
                })
            });
            read.disks.push(VirtualDisk {
                id: needed(disk, "diskId")?,
                file: disk.attribute("fileRef").filter(|file| !file.is_empty()).map(str::to_owned),
                capacity: capacity.transpose()?,
                has_parent: disk.attribute("parentRef").is_some_and(|parent| !parent.is_empty()),
            });
        }
        if read.files.len() > FILES_MAX || read.disks.len() > FILES_MAX {
            return Err(wrong(format_args!("it has more than {FILES_MAX} files or disks")));
        }
        read.collect(&envelope, configuration(&envelope))?;
        match read.systems.is_empty() {
            true => Err(wrong("it has no VirtualSystem")),
            false => Ok(read),
        }
    }

    /// VMs, also those of collections.
    fn collect(&mut self, node: &Node, chosen: &str) -> Result<(), OvaError> {
        for child in node.all() {
            match child.name.as_str() {
                "VirtualSystem" if self.systems.len() == SYSTEMS_MAX => {
                    return Err(wrong(format_args!("it has more than {SYSTEMS_MAX} VMs")));
                }
                "VirtualSystem" => {
                    let system = self.system(child, chosen)?;
                    self.systems.push(system);
                }
                "VirtualSystemCollection" => self.collect(child, chosen)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn system(&mut self, node: &Node, chosen: &str) -> Result<System, OvaError> {
        let id = node.attribute("id").unwrap_or_default();
        let name = [node.text_of("Name"), id, "imported"].into_iter().find(|name| !name.is_empty());
        let about = node.child("AnnotationSection").map_or("", |section| section.text_of("Annotation"));
        let mut system = System {
            name: bounded(name.unwrap_or_default(), "the name of a VM")?,
            description: bounded(about, "the annotation of a VM").unwrap_or_default(),
            cpus: 1,
            memory: MEMORY,
            ..System::default()
        };
        let Some(hardware) = node.child("VirtualHardwareSection") else {
            return Err(wrong(format_args!("VM '{}' has no VirtualHardwareSection", shown(&system.name))));
        };
        let firmware = hardware.children("Config").find(|entry| entry.attribute("key") == Some("firmware"));
        if firmware.is_some_and(|entry| entry.attribute("value") == Some("efi")) {
            system.firmware = Firmware::Uefi;
        }
        let items: Vec<Item<'_>> = hardware.all().iter().filter_map(|node| Item::of(node, chosen)).collect();
        // The order in which controllers stand decides which disk is the first.
        let controllers: BTreeMap<&str, u64> =
            items.iter().zip(0..).map(|(item, at)| (item.text("InstanceID"), at)).collect();
        for item in &items {
            self.device(&mut system, item, &controllers)?;
        }
        system.drives.sort_by_key(|drive| drive.place);
        Ok(system)
    }

    fn device(
        &mut self,
        system: &mut System,
        item: &Item<'_>,
        controllers: &BTreeMap<&str, u64>,
    ) -> Result<(), OvaError> {
        let quantity = item.text("VirtualQuantity");
        let place = || {
            let controller = controllers.get(item.text("Parent")).copied().unwrap_or(u64::MAX);
            (controller, item.text("AddressOnParent").parse().unwrap_or(u64::MAX))
        };
        let is_full = system.drives.len() == DRIVES_MAX || system.nics.len() == DRIVES_MAX;
        match item.kind {
            kind::PROCESSOR => {
                let cpus = quantity.parse().ok().filter(|cpus| (1..=1024).contains(cpus));
                system.cpus = cpus.ok_or_else(|| wrong(format_args!("'{}' processors", shown(quantity))))?;
            }
            kind::MEMORY => {
                let unit = match item.text("AllocationUnits") {
                    "" => "MegaBytes",
                    unit => unit,
                };
                let memory = amount(quantity, unit).filter(|memory| (1..1 << 50).contains(memory));
                let why = || wrong(format_args!("'{}' of memory in '{}'", shown(quantity), shown(unit)));
                system.memory = memory.ok_or_else(why)?;
            }
            _ if is_full => return Err(wrong(format_args!("a VM has more than {DRIVES_MAX} devices"))),
            kind::DISK => {
                let disk = self.disk(item.text("HostResource"))?;
                system.drives.push(Drive { disk: Some(disk), place: place() });
            }
            kind::CD | kind::DVD => system.drives.push(Drive { disk: None, place: place() }),
            kind::ETHERNET => system.nics.push(Nic {
                network: bounded(item.text("Connection"), "the name of a network")?,
                mac: bounded(item.text("Address"), "an address")?,
            }),
            _ => {}
        }
        Ok(())
    }

    /// The disk that a drive names: `ovf:/disk/ID`, or `ovf:/file/ID` of a file that is no disk of the list.
    fn disk(&mut self, resource: &str) -> Result<usize, OvaError> {
        let unknown = || wrong(format_args!("a drive names '{}', which is no disk here", shown(resource)));
        let path = resource.strip_prefix("ovf:").unwrap_or(resource);
        if let Some(id) = path.strip_prefix("/disk/") {
            return self.disks.iter().position(|disk| disk.id == id).ok_or_else(unknown);
        }
        let id = path.strip_prefix("/file/").ok_or_else(unknown)?;
        if !self.files.iter().any(|file| file.id == id) || self.disks.len() == FILES_MAX {
            return Err(unknown());
        }
        let own = VirtualDisk {
            id: format!("file {id}"),
            file: Some(id.to_owned()),
            capacity: None,
            has_parent: false,
        };
        let known = self.disks.iter().position(|disk| *disk == own);
        Ok(known.unwrap_or_else(|| {
            self.disks.push(own);
            self.disks.len() - 1
        }))
    }

    /// The file of a disk.
    ///
    /// # Errors
    /// There is none of this id.
    pub(crate) fn file_of(&self, disk: &VirtualDisk) -> Result<Option<&FileRef>, OvaError> {
        let Some(id) = &disk.file else { return Ok(None) };
        let found = self.files.iter().find(|file| file.id == *id);
        found
            .map(Some)
            .ok_or_else(|| wrong(format_args!("disk '{}' has no file '{}'", shown(&disk.id), shown(id))))
    }
}

/// A device of a VM.
struct Item<'a> {
    kind: u32,
    node: &'a Node,
}

/// The way of deployment that is meant where none is chosen: the one marked so, or the first. Empty without any.
fn configuration(envelope: &Node) -> &str {
    let section = envelope.child("DeploymentOptionSection");
    let all: Vec<&Node> = section.into_iter().flat_map(|section| section.children("Configuration")).collect();
    let marked = all.iter().find(|one| one.attribute("default") == Some("true"));
    marked.or(all.first()).and_then(|one| one.attribute("id")).unwrap_or_default()
}

impl<'a> Item<'a> {
    /// OVF 2 has elements of their own for disks and interfaces. What is of another way of deployment than the chosen
    /// one, or bounds an amount, is no device.
    fn of(node: &'a Node, chosen: &str) -> Option<Self> {
        let is_item = matches!(node.name.as_str(), "Item" | "StorageItem" | "EthernetPortItem");
        let of_others = node
            .attribute("configuration")
            .is_some_and(|names| !names.split_whitespace().any(|name| name == chosen));
        let kind = node.text_of("ResourceType").parse().ok()?;
        (is_item && !of_others && node.attribute("bound").is_none()).then_some(Self { kind, node })
    }

    fn text(&self, name: &str) -> &'a str {
        self.node.child(name).map_or("", Node::text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hardware(items: &str) -> String {
        format!(
            "<Envelope xmlns:ovf='o' xmlns:rasd='r'><References><File ovf:id='f' ovf:href='a.vmdk' ovf:size='7'/>\
             </References><DiskSection><Disk ovf:diskId='d' ovf:fileRef='f' ovf:capacity='2' \
             ovf:capacityAllocationUnits='byte * 2^20'/></DiskSection><VirtualSystemCollection><VirtualSystem \
             ovf:id='vm'><Name>n</Name><VirtualHardwareSection>{items}</VirtualHardwareSection></VirtualSystem>\
             </VirtualSystemCollection></Envelope>"
        )
    }

    fn item(kind: u32, more: &str) -> String {
        format!("<Item><rasd:ResourceType>{kind}</rasd:ResourceType>{more}</Item>")
    }

    #[test]
    fn a_vm_of_a_collection_is_read() {
        let items = [
            item(3, "<rasd:VirtualQuantity>2</rasd:VirtualQuantity>"),
            item(
                4,
                "<rasd:AllocationUnits>byte * 2^20</rasd:AllocationUnits><rasd:VirtualQuantity>64</rasd:VirtualQuantity>",
            ),
            item(6, "<rasd:InstanceID>5</rasd:InstanceID>"),
            item(15, "<rasd:Parent>5</rasd:Parent><rasd:AddressOnParent>1</rasd:AddressOnParent>"),
            item(
                17,
                "<rasd:Parent>5</rasd:Parent><rasd:AddressOnParent>0</rasd:AddressOnParent><rasd:HostResource>ovf:/disk/d</rasd:HostResource>",
            ),
            item(10, "<rasd:Connection>net</rasd:Connection>"),
            "<ovf:Config ovf:key='firmware' ovf:value='efi'/>".to_owned(),
        ];
        let read = Descriptor::read(hardware(&items.concat()).as_bytes()).unwrap();
        let system = &read.systems[0];
        assert_eq!((system.name.as_str(), system.cpus, system.memory), ("n", 2, 64 << 20));
        assert_eq!(system.firmware, Firmware::Uefi);
        assert_eq!(system.drives.iter().map(|drive| drive.disk).collect::<Vec<_>>(), [Some(0), None]);
        assert_eq!(system.nics, [Nic { network: "net".into(), mac: String::new() }]);
        assert_eq!(read.disks[0].capacity, Some(2 << 20));
        assert_eq!(read.file_of(&read.disks[0]).unwrap().unwrap().href, "a.vmdk");
    }

    #[test]
    fn devices_are_those_of_the_way_of_deployment_that_is_meant() {
        let cpus = |number: u32, attributes: &str| {
            let quantity = format!("<rasd:VirtualQuantity>{number}</rasd:VirtualQuantity>");
            item(3, &quantity).replacen("<Item>", &format!("<Item {attributes}>"), 1)
        };
        let items = [
            cpus(1, ""),
            cpus(4, "ovf:configuration='large huge'"),
            cpus(2, "ovf:configuration='small'"),
            cpus(8, "ovf:bound='max'"),
        ];
        let options = "<DeploymentOptionSection><Configuration ovf:id='large'/><Configuration ovf:id='small' \
                       ovf:default='true'/></DeploymentOptionSection><References>";
        let text = hardware(&items.concat());
        let read = |text: &str| Descriptor::read(text.as_bytes()).unwrap().systems[0].cpus;
        assert_eq!(read(&text), 1);
        let text = text.replacen("<References>", options, 1);
        assert_eq!(read(&text), 2);
        assert_eq!(read(&text.replace("ovf:default='true'", "")), 4, "the first one");
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let bad = |items: &str| Descriptor::read(hardware(items).as_bytes()).is_err();
        assert!(!bad(""));
        assert!(bad(&item(17, "<rasd:HostResource>ovf:/disk/x</rasd:HostResource>")));
        assert!(bad(&item(17, "<rasd:HostResource>/etc/passwd</rasd:HostResource>")));
        assert!(bad(&item(3, "<rasd:VirtualQuantity>0</rasd:VirtualQuantity>")));
        assert!(bad(&item(4, "<rasd:VirtualQuantity>99999999999</rasd:VirtualQuantity>")));
        assert!(bad(&item(15, "").repeat(DRIVES_MAX + 1)));
        assert!(Descriptor::read(b"<Envelope/>").is_err());
        assert!(Descriptor::read(b"<html/>").is_err());
    }
}
