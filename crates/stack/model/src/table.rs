//! The shape of the object table: what a class, a field and a message are.

use crate::Value;

/// Type of a field, a parameter or a result.
#[derive(Clone, Copy, Debug)]
pub enum Type {
    /// Nothing.
    Void,
    /// [`Value::Bool`].
    Bool,
    /// [`Value::Int`].
    Int,
    /// [`Value::Float`].
    Float,
    /// [`Value::String`].
    String,
    /// [`Value::DateTime`].
    DateTime,
    /// One of some words.
    Enum(&'static Enum),
    /// A reference to an object of a class, or `OpaqueRef:NULL`.
    Ref(&'static str),
    /// Members of one type.
    Set(&'static Type),
    /// Keys and values.
    Map(&'static Type, &'static Type),
    /// The record of a class.
    Record(&'static str),
    /// A value that may be missing (fields of `probe_result`).
    Option(&'static Type),
    /// Anything: the snapshot of an event.
    Any,
}

impl Type {
    /// The class that it refers to: as a reference, or as a set of them.
    pub const fn referred(self) -> Option<&'static str> {
        match self {
            Self::Ref(to) => Some(to),
            Self::Set(Self::Ref(to)) => Some(*to),
            _ => None,
        }
    }
}

/// An enumeration.
#[derive(Debug)]
pub struct Enum {
    /// As `vdi_type`.
    pub name: &'static str,
    /// As on the wire.
    pub words: &'static [&'static str],
}

/// The access that callers have to a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldAccess {
    /// The toolstack alone.
    Runtime,
    /// The creator, once; some have a message to change them (`VDI.set_name_label`).
    Constructor,
    /// A caller whose role allows it, by `set_`, `add_to_`, `remove_from_`, `add_`, `remove_`.
    ReadWrite,
}

/// What a field holds if its creator does not set it.
#[derive(Clone, Copy, Debug)]
pub enum Initial {
    /// The empty value of the type: false, 0, "", the null reference, an empty set or map, 1970, the first word.
    Empty,
    /// A truth.
    Bool(bool),
    /// A number.
    Int(i64),
    /// A number with a fraction.
    Float(f64),
    /// A text, or a word of an enumeration.
    Text(&'static str),
    /// The creator must say.
    Required,
}

/// Where the value of a field comes from.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// It is kept, and written to the store.
    Kept,
    /// It is kept in memory and starts anew with the daemon (`current_operations`, `progress`).
    Volatile,
    /// The objects of class `.0` whose reference field `.1` names this object (`SR.VDIs` is `("VDI", "SR")`).
    Inverse(&'static str, &'static str),
}

/// One field of a class.
#[derive(Debug)]
pub struct Field {
    /// As in records: `name_label`.
    pub name: &'static str,
    /// Its type.
    pub ty: Type,
    /// Its access.
    pub access: FieldAccess,
    /// Its first value.
    pub initial: Initial,
    /// Where it comes from.
    pub source: Source,
    /// Least role that may set it, where it is another one than that of the class.
    pub setter: Option<Role>,
    /// One sentence for people.
    pub doc: &'static str,
}

/// A role of a user. Each role has the permissions of the roles before it, and more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Reads objects.
    ReadOnly,
    /// Uses VMs: starts and ends them, uses their consoles, changes media.
    VmOperator,
    /// Manages VMs and their disks.
    VmAdmin,
    /// Also snapshots VMs, and chooses their host and their memory.
    VmPowerAdmin,
    /// Manages hosts and storage.
    PoolOperator,
    /// Everything.
    PoolAdmin,
}

/// A parameter of a message; the session comes before the first and is not listed.
#[derive(Debug)]
pub struct Param {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub ty: Type,
    /// What it is when the caller leaves it, and all after it, away.
    pub default: Option<Initial>,
}

/// A message of a class that is not made from its fields.
#[derive(Debug)]
pub struct Message {
    /// As `snapshot`.
    pub name: &'static str,
    /// What it takes.
    pub params: &'static [Param],
    /// What it gives.
    pub result: Type,
    /// Least role that may send it.
    pub role: Role,
    /// Whether `Async.` may stand before it.
    pub is_async: bool,
    /// Whether a session must be given.
    pub needs_session: bool,
    /// Documented errors.
    pub errors: &'static [&'static str],
    /// One sentence for people.
    pub doc: &'static str,
}

/// What there is of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassKind {
    /// Objects, each with a reference.
    Objects,
    /// Objects that only a caller with their reference can reach: no `get_all...`, no `get_by_...` (`session`).
    Unlisted,
    /// A shape of results alone; no message is made from its fields (`probe_result`, `event`).
    Shape,
}

/// A class of objects.
#[derive(Debug)]
pub struct Class {
    /// As in messages: `VDI`, `task`.
    pub name: &'static str,
    /// One sentence for people.
    pub doc: &'static str,
    /// What there is of it.
    pub kind: ClassKind,
    /// Fields in the order of records.
    pub fields: &'static [Field],
    /// Messages that are not made from the fields.
    pub messages: &'static [Message],
    /// Whether clients make objects by `create(record)`, and least role for it and for `destroy`.
    pub constructor: Option<Role>,
    /// Least role that may set fields.
    pub setter_role: Role,
    /// Least role that may get records and fields.
    pub reader_role: Role,
    /// Whether objects are kept in the store (not `session`, not a record class like `probe_result`).
    pub persistent: bool,
}

impl Role {
    /// All, the least first.
    pub const ALL: [Self; 6] = [
        Self::ReadOnly,
        Self::VmOperator,
        Self::VmAdmin,
        Self::VmPowerAdmin,
        Self::PoolOperator,
        Self::PoolAdmin,
    ];

    /// Its name on the wire, and in the file of accounts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReadOnly => "read-only",
            Self::VmOperator => "vm-operator",
            Self::VmAdmin => "vm-admin",
            Self::VmPowerAdmin => "vm-power-admin",
            Self::PoolOperator => "pool-operator",
            Self::PoolAdmin => "pool-admin",
        }
    }

    /// The role of a name; none for a name that is no role's.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

impl Class {
    /// A field by name.
    pub fn field(&self, name: &str) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.name == name)
    }

    /// A message by name.
    pub fn message(&self, name: &str) -> Option<&'static Message> {
        self.messages.iter().find(|message| message.name == name)
    }
}

impl Initial {
    /// The value for a field of type `ty`; none where the creator must say.
    pub fn value(self, ty: Type) -> Option<Value> {
        Some(match self {
            Self::Required => return None,
            Self::Bool(truth) => Value::Bool(truth),
            Self::Int(number) => Value::Int(number),
            Self::Float(number) => Value::Float(number),
            Self::Text(text) => Value::string(text),
            Self::Empty => match ty {
                Type::Void | Type::Any | Type::Option(_) => Value::Void,
                Type::Bool => Value::Bool(false),
                Type::Int => Value::Int(0),
                Type::Float => Value::Float(0.0),
                Type::String => Value::string(""),
                Type::DateTime => Value::DateTime(0),
                Type::Enum(words) => Value::string(words.words.first().copied().unwrap_or_default()),
                Type::Ref(_) => Value::string(crate::NULL_REF),
                Type::Set(_) => Value::Set(Vec::new()),
                Type::Map(..) | Type::Record(_) => Value::Map(std::collections::BTreeMap::new()),
            },
        })
    }
}
