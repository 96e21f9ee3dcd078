//! What `xe` shows of the objects of a class: the fields of records, in the order and under the names that its users
//! know, with fields of other objects joined in.

mod group;
mod host;
mod machine;
mod none;
mod storage;

use crate::table::{Class, Field, Type};

/// How a value becomes text where its type does not say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// As its type says.
    Plain,
    /// A word in small letters.
    Lower,
    /// A word with a capital letter, spaces for `_`.
    Capital,
    /// A set or a map that its users do not take for one.
    Text,
    /// The values of a map, as a set.
    Values,
    /// The type of a disk, as people write it.
    DiskType,
    /// The only member's name, or `<shared>`.
    OneHost,
    /// `<EMPTY>` where there is nothing.
    Medium,
    /// Members with commas.
    Commas,
    /// What this message answers for the object; in lists `<expensive field>`.
    Asked(&'static str),
}

/// One field as `xe` shows it.
#[derive(Debug)]
pub struct Column {
    /// As `sr-name-label`.
    pub name: &'static str,
    /// Field of the class, or a way through references as `SR/name_label`; empty where it is the name with `_`.
    pub path: &'static str,
    /// Whether `param-set` and its kin change it.
    pub writable: bool,
    /// Whether it is there for older clients alone.
    pub deprecated: bool,
    /// How it becomes text.
    pub show: Show,
}

/// What `xe NAME-list` and `xe NAME-param-...` work on.
#[derive(Debug)]
pub struct Table {
    /// As `sr`.
    pub name: &'static str,
    /// Plural for sentences, as `SRs`.
    pub plural: &'static str,
    /// Class of the objects.
    pub class: &'static str,
    /// Fields of a record, in order.
    pub columns: &'static [Column],
    /// What is listed without `params=`; nothing for everything.
    pub listed: &'static [&'static str],
    /// Fields with values that objects must have to be here.
    pub only: &'static [(&'static str, bool)],
}

/// Every table.
pub static TABLES: &[&Table] = &[
    &storage::SR,
    &storage::VDI,
    &storage::VBD,
    &storage::PBD,
    &storage::SM,
    &host::TASK,
    &host::POOL,
    &host::HOST,
    &host::ROLE,
    &host::MESSAGE,
    &host::SECRET,
    &host::NETWORK,
    &host::PIF,
    &host::VIF,
    &machine::VM,
    &machine::TEMPLATE,
    &machine::SNAPSHOT,
    &machine::CONSOLE,
    &host::HOST_CPU,
    &group::APPLIANCE,
    &host::BLOB,
    &none::BOND,
    &none::CERTIFICATE,
    &none::CLUSTER,
    &none::CLUSTER_HOST,
    &none::DRTASK,
    &none::FEATURE,
    &none::GPU_GROUP,
    &none::HOST_CRASHDUMP,
    &none::HOSTDRIVER,
    &none::HOSTDRIVER_VARIANT,
    &none::NETWORK_SRIOV,
    &none::OBSERVER,
    &none::PATCH,
    &none::PCI,
    &none::PGPU,
    &none::PUSB,
    &none::PVS_CACHE_STORAGE,
    &none::PVS_PROXY,
    &none::PVS_SERVER,
    &none::PVS_SITE,
    &none::REPOSITORY,
    &none::SDN_CONTROLLER,
    &none::SUBJECT,
    &none::TUNNEL,
    &none::UPDATE,
    &none::USB_GROUP,
    &none::VGPU,
    &none::VGPU_TYPE,
    &none::VLAN,
    &group::VM_GROUP,
    &group::VMSS,
    &none::VTPM,
    &none::VUSB,
];

/// The table of this name.
pub fn table(name: &str) -> Option<&'static Table> {
    TABLES.iter().find(|table| table.name == name).copied()
}

impl Table {
    /// A column by name.
    pub fn column(&self, name: &str) -> Option<&'static Column> {
        self.columns.iter().find(|column| column.name == name)
    }
}

impl Column {
    const fn new(name: &'static str) -> Self {
        Self { name, path: "", writable: false, deprecated: false, show: Show::Plain }
    }

    const fn of(self, path: &'static str) -> Self {
        Self { path, ..self }
    }

    const fn deprecated(self) -> Self {
        Self { deprecated: true, ..self }
    }

    const fn shown(self, show: Show) -> Self {
        Self { show, ..self }
    }

    /// The names of fields on the way to the value, the class's own first.
    pub fn steps(&self) -> Vec<String> {
        match self.path {
            "" => vec![self.name.replace('-', "_")],
            path => path.split('/').map(str::to_owned).collect(),
        }
    }

    /// The field of `class` that it begins with and the field that it shows; none for what a message answers.
    pub fn fields(&self, class: &'static Class) -> Option<(&'static Field, &'static Field)> {
        let mut class = class;
        let mut first = None;
        let mut last = None;
        for step in self.steps() {
            let field = class.field(&step)?;
            first = first.or(Some(field));
            last = Some(field);
            if let Some(to) = field.ty.referred() {
                class = crate::class(to).unwrap_or(class);
            }
        }
        first.zip(last)
    }

    /// What stands behind the name in records, as ` (MRW)`.
    pub fn qualifier(&self, class: &'static Class) -> &'static str {
        let own = |(first, last): (&'static Field, &'static Field)| match (first.ty, last.ty) {
            (Type::Set(_), _) | (_, Type::Set(_)) => 'S',
            (_, Type::Map(..)) => 'M',
            _ => ' ',
        };
        let kind = match self.show {
            Show::Asked(_) => self.asked_kind(),
            Show::OneHost | Show::Text => ' ',
            Show::Values => 'S',
            _ => self.fields(class).map_or(' ', own),
        };
        match (kind, self.writable, self.deprecated) {
            ('S', false, false) => " (SRO)",
            ('S', true, false) => " (SRW)",
            ('M', false, false) => " (MRO)",
            ('M', true, false) => " (MRW)",
            (_, false, false) => " ( RO)",
            (_, true, false) => " ( RW)",
            ('S', false, true) => " (SRO) [DEPRECATED]",
            ('S', true, true) => " (SRW) [DEPRECATED]",
            ('M', false, true) => " (MRO) [DEPRECATED]",
            ('M', true, true) => " (MRW) [DEPRECATED]",
            (_, false, true) => " ( RO) [DEPRECATED]",
            (_, true, true) => " ( RW) [DEPRECATED]",
        }
    }

    fn asked_kind(&self) -> char {
        if self.name.starts_with("allowed-") { 'S' } else { ' ' }
    }
}

/// A field that is read.
const fn ro(name: &'static str) -> Column {
    Column::new(name)
}

/// A field that can be set.
const fn rw(name: &'static str) -> Column {
    Column { writable: true, ..Column::new(name) }
}
