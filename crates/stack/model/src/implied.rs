//! Messages that every class has because of its fields.

use crate::table::{Class, ClassKind, Field, FieldAccess, Role, Type};

/// What a message that is made from the table does.
#[derive(Clone, Copy, Debug)]
pub enum ImpliedKind {
    /// `get_all`.
    GetAll,
    /// `get_all_records`.
    GetAllRecords,
    /// `get_all_where(expression)`.
    GetAllWhere,
    /// `get_all_records_where(expression)`.
    GetAllRecordsWhere,
    /// `get_by_uuid`.
    GetByUuid,
    /// `get_by_name_label`.
    GetByNameLabel,
    /// `get_record`.
    GetRecord,
    /// `create(record)`.
    Create,
    /// `destroy`.
    Destroy,
    /// `get_<field>`.
    Get(&'static Field),
    /// `set_<field>`.
    Set(&'static Field),
    /// `add_to_<field>(key, value)` of a map.
    AddTo(&'static Field),
    /// `remove_from_<field>(key)` of a map.
    RemoveFrom(&'static Field),
    /// `add_<field>(value)` of a set.
    Add(&'static Field),
    /// `remove_<field>(value)` of a set.
    Remove(&'static Field),
}

/// A message that is made from the table.
#[derive(Clone, Debug)]
pub struct Implied {
    /// Without the class, as `get_uuid`.
    pub name: String,
    /// What it does.
    pub kind: ImpliedKind,
    /// Least role that may send it.
    pub role: Role,
}

/// The messages that are made from the fields of a class, without those the class has a row of its own for.
pub fn implied(class: &'static Class) -> Vec<Implied> {
    let mut all = Vec::new();
    let mut add = |name: String, kind: ImpliedKind, role: Role| {
        if class.message(&name).is_none() {
            all.push(Implied { name, kind, role });
        }
    };
    if class.kind == ClassKind::Shape {
        return all;
    }
    let reader = class.reader_role;
    if class.kind == ClassKind::Objects {
        add("get_all".into(), ImpliedKind::GetAll, reader);
        add("get_all_records".into(), ImpliedKind::GetAllRecords, reader);
        add("get_all_where".into(), ImpliedKind::GetAllWhere, reader);
        add("get_all_records_where".into(), ImpliedKind::GetAllRecordsWhere, reader);
        if class.field("uuid").is_some() {
            add("get_by_uuid".into(), ImpliedKind::GetByUuid, reader);
        }
        if class.field("name_label").is_some() {
            add("get_by_name_label".into(), ImpliedKind::GetByNameLabel, reader);
        }
    }
    add("get_record".into(), ImpliedKind::GetRecord, reader);
    if let Some(role) = class.constructor {
        add("create".into(), ImpliedKind::Create, role);
        add("destroy".into(), ImpliedKind::Destroy, role);
    }
    for field in class.fields {
        add(format!("get_{}", field.name), ImpliedKind::Get(field), reader);
        if field.access != FieldAccess::ReadWrite {
            continue;
        }
        let setter = field.setter.unwrap_or(class.setter_role);
        add(format!("set_{}", field.name), ImpliedKind::Set(field), setter);
        match field.ty {
            Type::Map(..) => {
                add(format!("add_to_{}", field.name), ImpliedKind::AddTo(field), setter);
                add(format!("remove_from_{}", field.name), ImpliedKind::RemoveFrom(field), setter);
            }
            Type::Set(_) => {
                add(format!("add_{}", field.name), ImpliedKind::Add(field), setter);
                add(format!("remove_{}", field.name), ImpliedKind::Remove(field), setter);
            }
            _ => {}
        }
    }
    all
}

/// Full names of all messages, as `VDI.snapshot`, with the `Async.` forms, in order.
pub fn methods() -> Vec<String> {
    let mut names = Vec::new();
    for class in crate::CLASSES {
        for message in class.messages {
            names.push(format!("{}.{}", class.name, message.name));
            if message.is_async {
                names.push(format!("Async.{}.{}", class.name, message.name));
            }
        }
        for message in implied(class) {
            names.push(format!("{}.{}", class.name, message.name));
            if matches!(message.kind, ImpliedKind::Create | ImpliedKind::Destroy) {
                names.push(format!("Async.{}.{}", class.name, message.name));
            }
        }
    }
    names.push("system.listMethods".into());
    names.sort();
    names
}
