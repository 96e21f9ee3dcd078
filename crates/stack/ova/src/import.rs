//! The VMs of a package as an XVA archive, which the toolstack makes whole or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek, Write};

use tapio_model::{NULL_REF, Value};
use tapio_xva::{CHUNK_LEN, Document, Entry, Version, Writer};

use crate::descriptor::{Descriptor, Firmware, System, VirtualDisk};
use crate::error::{OvaError, shown};
use crate::image::Image;
use crate::package::Package;
use crate::span::Span;
use crate::{DISK_LEN_MAX, FILES_MAX};

/// Bytes that a member of a tar archive takes besides its own.
const BLOCK: u64 = 512;
/// Bytes of a piece's sum.
const SUM_LEN: u64 = 16;
const SECTOR: u64 = 512;

/// An import of all VMs of a package.
#[derive(Debug)]
pub struct Import {
    document: Document,
    disks: Vec<Disk>,
    len: u64,
}

/// A disk, and where it is read.
#[derive(Debug)]
struct Disk {
    /// Its id in the archive.
    id: String,
    image: Image,
    is_unpacked: bool,
}

/// Bytes of a member with these.
const fn member(len: u64) -> u64 {
    BLOCK + len.next_multiple_of(BLOCK)
}

fn chunks(len: u64) -> u64 {
    len.div_ceil(CHUNK_LEN as u64)
}

fn chunk_len(number: u64, len: u64) -> u64 {
    (len - number * CHUNK_LEN as u64).min(CHUNK_LEN as u64)
}

impl Import {
    /// Looks at the disks of a package, and at what they hold.
    ///
    /// # Errors
    /// A disk is missing, cannot be read, is used twice, or contradicts itself.
    pub fn plan<R: Read + Seek>(package: &mut Package<R>) -> Result<Self, OvaError> {
        let used = used(package.descriptor())?;
        let mut disks = Vec::new();
        let mut lens = BTreeMap::new();
        for at in used {
            let (image, is_unpacked) = open(package, at)?;
            lens.insert(at, image.len());
            disks.push(Disk { id: format!("Ref:{at}"), image, is_unpacked });
        }
        let document = document(package.descriptor(), &lens);
        let mut len = member(document.write().len() as u64) + 2 * BLOCK;
        for disk in &mut disks {
            len += archived(&mut package.input(disk.is_unpacked), &mut disk.image)?;
        }
        Ok(Self { document, disks, len })
    }

    /// Bytes of the archive.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the archive has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes the archive.
    ///
    /// # Errors
    /// A disk contradicts itself; the input's, the output's.
    pub fn send<R: Read + Seek>(
        mut self,
        package: &mut Package<R>,
        output: impl Write,
    ) -> Result<(), OvaError> {
        let mut writer = Writer::new(output, &self.document)?;
        let mut data = vec![0; CHUNK_LEN];
        for Disk { id, image, is_unpacked } in &mut self.disks {
            let (len, mut next) = (image.len(), 0);
            let mut input = package.input(*is_unpacked);
            while let Some(number) = sent(&mut input, image, next)? {
                let data = &mut data[..chunk_len(number, len) as usize];
                image.read(&mut input, number * CHUNK_LEN as u64, data)?;
                writer.chunk(id, number, data)?;
                next = number + 1;
            }
        }
        writer.finish()?.flush()?;
        Ok(())
    }
}

/// The next piece of a disk that is in the archive, from this one on: the first, the last, and all that the image holds
/// anything of.
fn sent(input: &mut (impl Read + Seek), image: &mut Image, from: u64) -> Result<Option<u64>, OvaError> {
    let last = chunks(image.len()) - 1;
    if from == 0 || from >= last {
        return Ok(Some(from).filter(|from| *from <= last));
    }
    let held = image.next_held(input, from * CHUNK_LEN as u64)?;
    Ok(Some(held.map_or(last, |at| (at / CHUNK_LEN as u64).min(last))))
}

/// Bytes of a disk in the archive.
fn archived(input: &mut (impl Read + Seek), image: &mut Image) -> Result<u64, OvaError> {
    let (mut len, mut next, mut count) = (0, 0, 0);
    while let Some(number) = sent(input, image, next)? {
        len += member(chunk_len(number, image.len())) + member(SUM_LEN);
        next = number + 1;
        count += 1;
        if count > 2 && !image.has_room_for(count - 2) {
            return Err(OvaError::wrong("a disk has more data than its file can hold"));
        }
    }
    Ok(len)
}

/// The disks that drives have, each once.
fn used(descriptor: &Descriptor) -> Result<BTreeSet<usize>, OvaError> {
    let mut used = BTreeSet::new();
    for disk in descriptor.systems.iter().flat_map(|system| &system.drives).filter_map(|drive| drive.disk) {
        if !used.insert(disk) {
            let id = descriptor.disks.get(disk).map_or("", |disk| &disk.id);
            let why = format!("disk '{}' is that of two drives: it would be two disks here", shown(id));
            return Err(OvaError::Unsupported(why));
        }
    }
    Ok(used)
}

/// Whether a file without a mark of its own is a raw disk: by its name, or because it is as long as its disk.
fn may_be_raw(name: &str, disk: &VirtualDisk, span: Span) -> bool {
    let name = name.to_ascii_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    [".img", ".raw"].iter().any(|end| name.ends_with(end)) || disk.capacity == Some(span.len)
}

/// The most that a disk of this size can have as a file: an image of it, with its tables.
fn unpacked_max(disk: &VirtualDisk) -> u64 {
    let capacity = disk.capacity.unwrap_or(DISK_LEN_MAX).min(DISK_LEN_MAX);
    capacity + capacity / 16 + (16 << 20)
}

/// Opens a disk, and tells whether it was unpacked.
fn open<R: Read + Seek>(package: &mut Package<R>, at: usize) -> Result<(Image, bool), OvaError> {
    let disk = package.descriptor().disks.get(at).cloned();
    let disk = disk.ok_or_else(|| OvaError::wrong("a drive names a disk that is not there"))?;
    let about = |error: OvaError| match error {
        OvaError::Wrong(why) => OvaError::Wrong(format!("disk '{}': {why}", shown(&disk.id))),
        OvaError::Unsupported(why) => OvaError::Unsupported(format!("disk '{}': {why}", shown(&disk.id))),
        other => other,
    };
    if disk.has_parent {
        return Err(about(OvaError::Unsupported(
            "it is a difference to another disk: export it whole".to_owned(),
        )));
    }
    let Some(file) = package.descriptor().file_of(&disk)?.cloned() else {
        let len = disk.capacity.filter(|len| (1..=DISK_LEN_MAX).contains(len));
        let len =
            len.ok_or_else(|| about(OvaError::wrong("an empty disk without a size, or with too much")))?;
        return Ok((Image::empty(len.next_multiple_of(SECTOR)), false));
    };
    if let Some(why) = file.unread {
        return Err(about(OvaError::Unsupported(format!("file '{}': {why}", shown(&file.href)))));
    }
    let packed = package.file(&file.href)?;
    let unpacked = package.unpack(packed, !file.is_packed, unpacked_max(&disk)).map_err(about)?;
    let span = unpacked.unwrap_or(packed);
    let may_be_raw = may_be_raw(&file.href, &disk, span);
    let mut input = package.input(unpacked.is_some());
    let mut image = Image::open_as(&mut input, span, may_be_raw).map_err(about)?;
    // The descriptor may round up, or make it longer.
    if let Some(capacity) = disk.capacity.filter(|capacity| *capacity <= DISK_LEN_MAX) {
        image.grow(capacity.next_multiple_of(SECTOR));
    }
    Ok((image, unpacked.is_some()))
}

/// Objects of the archive, with ids of their own.
#[derive(Default)]
struct Objects(Vec<Entry>);

impl Objects {
    fn add(&mut self, class: &str, id: String, fields: Vec<(&str, Value)>) {
        let record = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        self.0.push(Entry { class: class.to_owned(), id, record });
    }

    fn next(&self) -> String {
        format!("Ref:{}", 2 * FILES_MAX + self.0.len())
    }
}

fn text(text: &str) -> Value {
    Value::string(text)
}

fn document(descriptor: &Descriptor, lens: &BTreeMap<usize, u64>) -> Document {
    let mut objects = Objects::default();
    let mut networks: BTreeMap<&str, String> = BTreeMap::new();
    for system in &descriptor.systems {
        let vm = objects.next();
        objects.add("VM", vm.clone(), vm_fields(system));
        for (place, drive) in system.drives.iter().enumerate() {
            let id = objects.next();
            let mut fields = vec![
                ("VM", text(&vm)),
                ("userdevice", text(&place.to_string())),
                ("empty", Value::Bool(drive.disk.is_none())),
                ("other_config", Value::Map(BTreeMap::new())),
            ];
            let is_first = system.drives.iter().position(|drive| drive.disk.is_some()) == Some(place);
            match drive.disk {
                Some(disk) => fields.extend([
                    ("VDI", text(&format!("Ref:{disk}"))),
                    ("type", text("Disk")),
                    ("mode", text("RW")),
                    ("bootable", Value::Bool(is_first)),
                ]),
                None => fields.extend([
                    ("VDI", text(NULL_REF)),
                    ("type", text("CD")),
                    ("mode", text("RO")),
                    ("bootable", Value::Bool(false)),
                ]),
            }
            objects.add("VBD", id, fields);
            if let Some((disk, len)) = drive.disk.and_then(|disk| Some((disk, lens.get(&disk)?))) {
                let name = format!("{} {place}", system.name);
                let fields = vec![
                    ("name_label", text(&name)),
                    ("virtual_size", text(&len.to_string())),
                    ("type", text("user")),
                ];
                objects.add("VDI", format!("Ref:{disk}"), fields);
            }
        }
        for (device, nic) in system.nics.iter().enumerate() {
            let network = match networks.get(nic.network.as_str()) {
                Some(known) => known.clone(),
                None => {
                    let id = objects.next();
                    objects.add(
                        "network",
                        id.clone(),
                        vec![("name_label", text(&nic.network)), ("bridge", text(""))],
                    );
                    networks.insert(&nic.network, id.clone());
                    id
                }
            };
            let fields = vec![
                ("VM", text(&vm)),
                ("network", text(&network)),
                ("device", text(&device.to_string())),
                ("MAC", text(&nic.mac)),
                ("MTU", text("1500")),
            ];
            let id = objects.next();
            objects.add("VIF", id, fields);
        }
    }
    let version = Version {
        hostname: String::new(),
        date: String::new(),
        product_brand: "OVF".to_owned(),
        product_version: String::new(),
        build_number: String::new(),
        major: 2,
        minor: 0,
    };
    Document { version, objects: objects.0 }
}

/// The record of a VM. Packages are of VMs with a firmware, so the guest is QEMU's unless it is set otherwise later.
fn vm_fields(system: &System) -> Vec<(&'static str, Value)> {
    let mut boot = vec![("order", "cdn")];
    boot.extend((system.firmware == Firmware::Uefi).then_some(("firmware", "uefi")));
    let memory = text(&system.memory.to_string());
    vec![
        ("name_label", text(&system.name)),
        ("name_description", text(&system.description)),
        ("is_a_template", Value::Bool(false)),
        ("power_state", text("Halted")),
        ("memory_static_min", text(&system.memory.min(64 << 20).to_string())),
        ("memory_dynamic_min", memory.clone()),
        ("memory_dynamic_max", memory.clone()),
        ("memory_static_max", memory),
        ("VCPUs_max", text(&system.cpus.to_string())),
        ("VCPUs_at_startup", text(&system.cpus.to_string())),
        ("actions_after_shutdown", text("destroy")),
        ("actions_after_reboot", text("restart")),
        ("actions_after_crash", text("restart")),
        ("HVM_boot_policy", text("BIOS order")),
        ("HVM_boot_params", Value::string_map(boot)),
        ("platform", Value::Map(BTreeMap::new())),
        ("other_config", Value::string_map([("driver", "qemu")])),
    ]
}
