//! The reference of classes, fields and messages, as Markdown.

use std::fmt::Write;

use crate::implied::{Implied, ImpliedKind, implied};
use crate::table::{Class, ClassKind, Field, FieldAccess, Message, Source, Type};

/// What stands before the classes.
const INTRODUCTION: &str = "\
# XenAPI

Made from the object table by `tapio reference`; a test compares.

A call names a message and its parameters: `VDI.snapshot(session, vdi)`. The first parameter of every message is
the session, which `session.login_with_password` gives, unless *no session* is said; it is not listed.
Parameters in brackets may be left away, with all that follow. XML-RPC is spoken at `/` (or any other path),
JSON-RPC 1.0 and 2.0 at `/jsonrpc`, over HTTPS, plain HTTP on loopback, and the UNIX socket.

- A message with *Async* also exists as `Async.CLASS.MESSAGE`, which answers a task at once.
- A reference is a text, `OpaqueRef:UUID`; the null reference is `OpaqueRef:NULL`. Those to a class that is not
  here are always null.
- Every class of objects has `get_all`, `get_all_records`, `get_all_where(expression)`,
  `get_all_records_where(expression)`, `get_by_uuid`, `get_by_name_label` where there is such a field,
  `get_record`, and `get_FIELD` for each field. Those of which there are no objects here answer with nothing.
- A field that is *set* has `set_FIELD`; a map also `add_to_FIELD(key, value)` and `remove_from_FIELD(key)`, a
  set `add_FIELD(value)` and `remove_FIELD(value)`. One that is *created* is given in the record of `create`
  alone.
- A role may do what those before it may: read-only, vm-operator, vm-admin, vm-power-admin, pool-operator,
  pool-admin. A field that is *set by* a role needs that one instead of the one of its class.
";

/// The reference.
pub fn reference() -> String {
    let mut text = String::from(INTRODUCTION);
    for class in crate::CLASSES {
        describe(&mut text, class);
    }
    errors(&mut text);
    text
}

/// A type in words.
pub fn type_name(ty: Type) -> String {
    match ty {
        Type::Void => "nothing".into(),
        Type::Bool => "bool".into(),
        Type::Int => "int".into(),
        Type::Float => "float".into(),
        Type::String => "string".into(),
        Type::DateTime => "datetime".into(),
        Type::Enum(words) => words.name.into(),
        Type::Ref(class) => format!("{class} ref"),
        Type::Set(of) => format!("set of {}", type_name(*of)),
        Type::Map(key, value) => format!("map {} to {}", type_name(*key), type_name(*value)),
        Type::Record(class) => format!("{class} record"),
        Type::Option(of) => format!("{} or nothing", type_name(*of)),
        Type::Any => "any".into(),
    }
}

fn enums(class: &Class) -> Vec<(&'static str, &'static [&'static str])> {
    fn collect(ty: Type, found: &mut Vec<(&'static str, &'static [&'static str])>) {
        match ty {
            Type::Enum(words) if !found.iter().any(|(name, _)| *name == words.name) => {
                found.push((words.name, words.words));
            }
            Type::Set(of) | Type::Option(of) => collect(*of, found),
            Type::Map(key, value) => {
                collect(*key, found);
                collect(*value, found);
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    for field in class.fields {
        collect(field.ty, &mut found);
    }
    found
}

fn describe(text: &mut String, class: &'static Class) {
    // Writing to a text cannot fail.
    let _ = writeln!(text, "\n## {}\n\n{}.", class.name, class.doc);
    match class.kind {
        ClassKind::Objects => {
            let create = class.constructor.map_or_else(
                || "It has no `create(record)`".to_owned(),
                |least| format!("`create(record)` and `destroy` need the role {}", least.name()),
            );
            let (get, set) = (class.reader_role.name(), class.setter_role.name());
            let _ = writeln!(text, "{create}; fields are read by {get} and set by {set}.");
        }
        ClassKind::Unlisted => {
            _ = writeln!(text, "A client reaches an object only by its reference: there is no `get_all`.");
        }
        ClassKind::Shape => {
            _ = writeln!(text, "A shape of results alone: no message is made from its fields.");
        }
    }
    let _ = writeln!(text, "\n| field | type | | what it is |\n|---|---|---|---|");
    for field in class.fields {
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} |",
            field.name,
            type_name(field.ty),
            access(class, field),
            field.doc
        );
    }
    for (name, words) in enums(class) {
        let _ = writeln!(text, "\n`{name}`: {}.", words.join(", "));
    }
    let own: Vec<&Message> = class.messages.iter().collect();
    if !own.is_empty() {
        let _ = writeln!(text, "\n| message | gives | role | what it does |\n|---|---|---|---|");
        for message in own {
            let _ = writeln!(text, "{}", row(message));
        }
    }
}

fn access(class: &'static Class, field: &Field) -> String {
    let how = how_set(class, field);
    match field.setter {
        Some(least) if !how.is_empty() => format!("{how} by {}", least.name()),
        _ => how.to_owned(),
    }
}

fn how_set(class: &'static Class, field: &Field) -> &'static str {
    let is_set = |implied: Implied| matches!(implied.kind, ImpliedKind::Set(of) if of.name == field.name);
    let has_message = class.message(&format!("set_{}", field.name)).is_some();
    match (field.access, field.source) {
        (_, Source::Inverse(..)) => "",
        (FieldAccess::ReadWrite, _) if has_message || implied(class).into_iter().any(is_set) => "set",
        (FieldAccess::Constructor, _) if has_message => "created, set",
        (FieldAccess::Constructor, _) if class.constructor.is_some() => "created",
        _ if has_message => "set",
        _ => "",
    }
}

fn row(message: &Message) -> String {
    let mut params = Vec::new();
    for param in message.params {
        let name = format!("{} {}", type_name(param.ty), param.name);
        params.push(if param.default.is_some() { format!("[{name}]") } else { name });
    }
    let mut what = format!("{}.", message.doc);
    if message.is_async {
        what.push_str(" *Async*.");
    }
    if !message.needs_session {
        what.push_str(" *No session*.");
    }
    if !message.errors.is_empty() {
        let errors: Vec<String> = message.errors.iter().map(|code| format!("`{code}`")).collect();
        what.push_str(&format!(" Errors: {}.", errors.join(", ")));
    }
    let (result, least) = (type_name(message.result), message.role.name());
    format!("| `{}({})` | {result} | {least} | {what} |", message.name, params.join(", "))
}

fn errors(text: &mut String) {
    let _ = writeln!(
        text,
        "\n## Errors\n\nAny message may also answer the errors of its parameters, of the session and of the storage driver \
         (`SR_BACKEND_FAILURE_n` with the text as its second parameter).\n\n| code | parameters | what it means |\n|---|---|---|"
    );
    for error in crate::errors::ERRORS {
        let _ = writeln!(text, "| `{}` | {} | {} |", error.code, error.params.join(", "), error.text);
    }
}
