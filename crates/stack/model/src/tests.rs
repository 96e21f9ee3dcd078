use std::collections::{BTreeMap, BTreeSet};

use super::*;

fn types(ty: &Type, found: &mut Vec<Type>) {
    found.push(*ty);
    match ty {
        Type::Set(of) | Type::Option(of) => types(of, found),
        Type::Map(key, value) => {
            types(key, found);
            types(value, found);
        }
        _ => {}
    }
}

/// Every type in the table, with where it stands.
fn all_types() -> Vec<(String, Type)> {
    let mut all = Vec::new();
    for class in CLASSES {
        let fields = class.fields.iter().map(|field| (field.name, field.ty));
        let params = class.messages.iter().flat_map(|message| {
            let params = message.params.iter().map(|param| param.ty);
            params.chain([message.result]).map(|ty| (message.name, ty))
        });
        for (name, ty) in fields.chain(params) {
            let mut found = Vec::new();
            types(&ty, &mut found);
            all.extend(found.into_iter().map(|ty| (format!("{}.{name}", class.name), ty)));
        }
    }
    all
}

fn assert_unique<'a>(what: &str, names: impl IntoIterator<Item = &'a str>) {
    let mut seen = BTreeSet::new();
    for name in names {
        assert!(seen.insert(name), "{what}: {name} is there twice");
    }
}

#[test]
fn names_are_unique() {
    assert!(CLASSES.len() > 25, "{}", CLASSES.len());
    let lower: Vec<String> = CLASSES.iter().map(|class| class.name.to_lowercase()).collect();
    assert_unique("classes", lower.iter().map(String::as_str));
    assert_unique("errors", errors::ERRORS.iter().map(|error| error.code));
    for class in CLASSES {
        assert_unique(class.name, class.fields.iter().map(|field| field.name));
        assert_unique(class.name, class.messages.iter().map(|message| message.name));
        for message in class.messages {
            assert_unique(message.name, message.params.iter().map(|param| param.name));
            let first_optional = message.params.iter().position(|param| param.default.is_some());
            let after = &message.params[first_optional.unwrap_or(message.params.len())..];
            assert!(
                after.iter().all(|param| param.default.is_some()),
                "{}.{}: a parameter that must be given follows one that may be left away",
                class.name,
                message.name
            );
        }
    }
    let methods = methods();
    assert_unique("methods", methods.iter().map(String::as_str));
    for name in
        ["VDI.get_all_records", "VDI.create", "Async.VDI.snapshot", "VM.add_to_platform", "SR.add_tags"]
    {
        assert!(methods.iter().any(|known| known == name), "{name}");
    }
    for name in ["session.get_all", "probe_result.get_uuid", "VDI.set_SR", "Async.VDI.get_uuid"] {
        assert!(!methods.iter().any(|known| known == name), "{name}");
    }
}

#[test]
fn references_name_classes() {
    for (place, ty) in all_types() {
        match ty {
            Type::Ref(name) => {
                assert!(
                    FOREIGN.contains(&name) || CLASSES.iter().any(|class| class.name == name),
                    "{place}: {name}"
                );
            }
            Type::Record(name) => assert!(CLASSES.iter().any(|class| class.name == name), "{place}: {name}"),
            Type::Enum(words) => {
                assert!(!words.words.is_empty(), "{place}: {}", words.name);
                assert_unique(words.name, words.words.iter().copied());
            }
            _ => {}
        }
    }
    for name in FOREIGN {
        assert!(class(name).is_none(), "{name} has a class");
        let is_named = all_types().iter().any(|(_, ty)| matches!(ty, Type::Ref(of) if of == name));
        assert!(is_named, "nothing refers to {name}");
    }
}

#[test]
fn inverse_fields_have_a_counterpart() {
    let mut inverses = 0;
    for here in CLASSES {
        for field in here.fields {
            let Source::Inverse(there, by) = field.source else { continue };
            inverses += 1;
            let place = format!("{}.{}", here.name, field.name);
            let Type::Set(Type::Ref(member)) = field.ty else { panic!("{place} is no set of references") };
            assert_eq!(*member, there, "{place}");
            let counterpart = class(there).and_then(|class| class.field(by)).expect(&place);
            let is_here = |ty: Type| matches!(ty, Type::Ref(to) if to == here.name);
            let refers = is_here(counterpart.ty) || matches!(counterpart.ty, Type::Set(of) if is_here(*of));
            assert!(refers, "{place}");
            assert!(matches!(counterpart.source, Source::Kept), "{place}");
        }
    }
    assert!(inverses > 15, "{inverses}");
}

/// Whether a value may stand where the type is asked for.
fn fits(value: &Value, ty: Type) -> bool {
    match (value, ty) {
        (Value::String(word), Type::Enum(words)) => words.words.contains(&word.as_str()),
        (Value::String(_), Type::String | Type::Ref(_))
        | (Value::Bool(_), Type::Bool)
        | (Value::Int(_), Type::Int)
        | (Value::Float(_), Type::Float)
        | (Value::DateTime(_), Type::DateTime)
        | (Value::Set(_), Type::Set(_))
        | (Value::Map(_), Type::Map(..) | Type::Record(_))
        | (Value::Void, Type::Any | Type::Option(_)) => true,
        _ => false,
    }
}

#[test]
fn records_can_be_made_of_first_values() {
    for class in CLASSES {
        for field in class.fields {
            let place = format!("{}.{}", class.name, field.name);
            match field.initial.value(field.ty) {
                Some(value) => assert!(fits(&value, field.ty), "{place}: {value:?}"),
                None => {
                    assert_ne!(
                        field.access,
                        FieldAccess::Runtime,
                        "{place}: no client can set it, and it has no first value"
                    );
                }
            }
        }
        for message in class.messages {
            for param in message.params {
                let Some(default) = param.default else { continue };
                let value = default.value(param.ty).expect("a parameter that may be left away has a value");
                assert!(fits(&value, param.ty), "{}.{} {}: {value:?}", class.name, message.name, param.name);
            }
        }
    }
    // A creator must be able to leave out every field but these.
    let vdi = class("VDI").expect("there");
    let required: Vec<_> =
        vdi.fields.iter().filter(|f| f.initial.value(f.ty).is_none()).map(|f| f.name).collect();
    assert_eq!(required, ["SR", "virtual_size"]);
}

#[test]
fn documented_errors_have_texts() {
    for class in CLASSES {
        for message in class.messages {
            for code in message.errors {
                assert!(errors::error(code).is_some(), "{}.{}: {code}", class.name, message.name);
            }
        }
    }
    for error in errors::ERRORS {
        assert!(error.text.ends_with('.') && error.text.len() > 10, "{}", error.code);
    }
}

#[test]
fn everything_is_explained() {
    for class in CLASSES {
        assert!(!class.doc.is_empty() && !class.doc.ends_with('.'), "{}", class.name);
        for (name, doc) in class
            .fields
            .iter()
            .map(|field| (field.name, field.doc))
            .chain(class.messages.iter().map(|message| (message.name, message.doc)))
        {
            assert!(doc.len() > 3 && !doc.ends_with('.'), "{}.{name}: {doc:?}", class.name);
        }
    }
}

/// Messages whose least role is not the one that XenServer publishes, and why.
const OTHER_ROLES: &[(&str, &str)] = &[
    ("secret.get_other_config", "nothing of a secret is shown to roles that may not read it"),
    ("session.add_to_other_config", "a client reaches its own session alone"),
    ("session.local_logout", "who logged in may log out"),
    ("session.remove_from_other_config", "a client reaches its own session alone"),
    ("session.set_other_config", "a client reaches its own session alone"),
    (
        "task.add_to_other_config",
        "a client reaches the tasks of its account; the npm client notes what a task is for",
    ),
    ("task.remove_from_other_config", "a client reaches the tasks of its account"),
    ("task.set_other_config", "a client reaches the tasks of its account"),
];

/// The least roles that XenServer publishes.
fn published() -> BTreeMap<&'static str, Role> {
    let mut roles = BTreeMap::new();
    let mut role = None;
    let text = include_str!("../../../../tests/roles.published");
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        match line.strip_suffix(':') {
            Some(name) => role = Some(Role::named(name).expect("a role")),
            None => {
                roles.extend(line.split_whitespace().map(|name| (name, role.expect("its role comes first"))));
            }
        }
    }
    roles
}

#[test]
fn roles_are_those_that_xenserver_publishes() {
    let published = published();
    let mut ours = BTreeMap::new();
    for class in CLASSES {
        for message in class.messages.iter().filter(|message| message.needs_session) {
            ours.insert(format!("{}.{}", class.name, message.name), message.role);
        }
        for message in implied(class) {
            ours.insert(format!("{}.{}", class.name, message.name), message.role);
        }
    }
    let absent: Vec<_> = published.keys().copied().filter(|name| !ours.contains_key(*name)).collect();
    assert_eq!(absent, ["session.slave_local_login_with_password"], "it needs no session here");
    let different: Vec<_> =
        published.iter().filter(|(name, role)| ours.get(**name).is_some_and(|own| own != *role)).collect();
    for (name, role) in &different {
        assert!(OTHER_ROLES.iter().any(|(known, _)| known == *name), "{name}: XenServer has {}", role.name());
    }
    for (name, _) in OTHER_ROLES {
        let listed = published.get(name).copied().unwrap_or(Role::ReadOnly);
        assert!(ours.get(*name).is_some_and(|own| *own != listed), "{name} is no exception any more");
    }
}

#[test]
fn roles_protect_what_they_should() {
    let role = |name: &str, message: &str| {
        class(name).and_then(|class| class.message(message)).map(|message| message.role)
    };
    assert_eq!(role("SR", "destroy"), Some(Role::PoolOperator));
    assert_eq!(role("VBD", "plug"), Some(Role::VmAdmin));
    assert_eq!(class("secret").map(|class| class.reader_role), Some(Role::PoolOperator));
    let changing = implied(class("VM").expect("there"))
        .into_iter()
        .filter(|message| message.role == Role::ReadOnly && !message.name.starts_with("get_"))
        .map(|message| message.name);
    assert_eq!(changing.collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn columns_show_fields_that_are_there() {
    let mut names = BTreeSet::new();
    for table in columns::TABLES {
        assert!(names.insert(table.name), "{} is there twice", table.name);
        let of = class(table.class).expect(table.name);
        assert_unique(table.name, table.columns.iter().map(|column| column.name));
        assert_eq!(table.columns[0].name, "uuid", "{}", table.name);
        for name in table.listed {
            assert!(table.column(name).is_some(), "{}: {name}", table.name);
        }
        for (field, _) in table.only {
            assert!(of.field(field).is_some(), "{}: {field}", table.name);
        }
        for column in table.columns {
            let place = format!("{} {}", table.name, column.name);
            if let columns::Show::Asked(message) = column.show {
                let message = message.rsplit('.').next().unwrap_or(message);
                assert!(CLASSES.iter().any(|class| class.message(message).is_some()), "{place}");
                assert!(!column.writable, "{place}");
                continue;
            }
            let (first, _) = column.fields(of).expect(&place);
            // What can be set has a message for it.
            let setter = format!("set_{}", first.name);
            let can = first.access == FieldAccess::ReadWrite || of.message(&setter).is_some();
            assert!(!column.writable || can, "{place}");
        }
    }
    let qualifier = |table: &str, name: &str| {
        let table = columns::table(table).expect("there");
        table.column(name).expect("there").qualifier(class(table.class).expect("there"))
    };
    assert_eq!(qualifier("sr", "name-label"), " ( RW)");
    assert_eq!(qualifier("sr", "host"), " ( RO)");
    assert_eq!(qualifier("sr", "VDIs"), " (SRO)");
    assert_eq!(qualifier("sr", "tags"), " (SRW)");
    assert_eq!(qualifier("vdi", "xenstore-data"), " (MRO)");
    assert_eq!(qualifier("vdi", "parent"), " ( RO) [DEPRECATED]");
    assert_eq!(qualifier("pbd", "other-config"), " (MRW)");
    assert_eq!(qualifier("vdi", "current-operations"), " (SRO)");
    assert_eq!(qualifier("vdi", "snapshots"), " ( RO)");
}

#[test]
fn the_reference_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/api.md");
    let there = std::fs::read_to_string(path).unwrap_or_default();
    let differs = there.lines().zip(reference().lines()).position(|(old, new)| old != new);
    assert!(
        there == reference(),
        "docs/api.md differs from the table, first in line {differs:?}: tapio reference > docs/api.md"
    );
    for class in CLASSES {
        assert!(there.contains(&format!("\n## {}\n", class.name)), "{}", class.name);
    }
}
