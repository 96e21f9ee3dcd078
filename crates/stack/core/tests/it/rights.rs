//! Every message in a session of every role: refused for its role exactly where the object table says so.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_core::{Peer, Toolstack};
use tapio_model::{CLASSES, ImpliedKind, NULL_REF, Role, Type, Value, implied};

use crate::world::{Client, stack};

/// A message, and what the table says of it.
struct Row {
    name: String,
    least: Role,
    /// The types of its parameters; none for those that are made from a field or a class.
    params: Option<Vec<Type>>,
    is_async: bool,
}

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for class in CLASSES {
        for message in class.messages.iter().filter(|message| message.needs_session) {
            rows.push(Row {
                name: format!("{}.{}", class.name, message.name),
                least: message.role,
                params: Some(message.params.iter().map(|param| param.ty).collect()),
                is_async: message.is_async,
            });
        }
        for message in implied(class) {
            rows.push(Row {
                name: format!("{}.{}", class.name, message.name),
                least: message.role,
                params: None,
                is_async: matches!(message.kind, ImpliedKind::Create | ImpliedKind::Destroy),
            });
        }
    }
    rows
}

/// A value of a type that names no object and asks for no time.
fn empty(ty: Type, own_session: &str) -> Value {
    match ty {
        Type::Ref("session") => own_session.into(),
        Type::Ref(_) => NULL_REF.into(),
        _ => tapio_model::Initial::Empty.value(ty).expect("each type has an empty value"),
    }
}

/// What it is called with: values of the right types where those are known, so that its own checks are reached.
fn params(row: &Row, session: &str) -> Vec<Value> {
    let of_session = row.name.starts_with("session.");
    let reference = || if of_session { session.into() } else { Value::from(NULL_REF) };
    let Some(types) = &row.params else {
        let (_, word) = row.name.split_once('.').expect("a class and a message");
        return match word {
            "get_all" | "get_all_records" => vec![],
            "get_all_where" | "get_all_records_where" => vec!["false".into()],
            "create" => vec![Value::Map(BTreeMap::new())],
            word if word.starts_with("add_to_") => vec![reference(), "k".into(), "v".into()],
            word if ["set_", "add_", "remove_"].iter().any(|prefix| word.starts_with(prefix)) => {
                vec![reference(), "x".into()]
            }
            _ => vec![reference()],
        };
    };
    types.iter().map(|ty| empty(*ty, session)).collect()
}

/// The code of the error of a call; empty where there is none.
fn code(stack: &Arc<Toolstack>, session: &str, name: &str, params: Vec<Value>) -> (String, String) {
    let params = std::iter::once(Value::from(session)).chain(params).collect();
    match stack.call(&Peer::default(), name, params) {
        Ok(_) => (String::new(), String::new()),
        Err(error) => (error.code.to_string(), error.params.first().cloned().unwrap_or_default()),
    }
}

#[test]
fn every_message_is_allowed_or_refused_as_the_table_says() {
    let (_dir, stack) = stack();
    let mut counts = BTreeMap::new();
    for role in Role::ALL {
        let mut client = Client::login(&stack, role.name());
        for row in rows() {
            let forms = if row.is_async { vec!["", "Async."] } else { vec![""] };
            for form in forms {
                let name = format!("{form}{}", row.name);
                let (code, what) = code(&stack, &client.session, &name, params(&row, &client.session));
                let is_refused = code == "RBAC_PERMISSION_DENIED";
                assert_eq!(
                    is_refused,
                    role < row.least,
                    "{name} as {}: {code} {what}, least role {}",
                    role.name(),
                    row.least.name()
                );
                if is_refused {
                    assert_eq!(what, row.name.to_ascii_lowercase(), "the refusal names the message");
                }
                assert_ne!(code, "MESSAGE_METHOD_UNKNOWN", "{name}");
                *counts.entry((role, is_refused)).or_insert(0) += 1;
                // Some end the session that they are called in.
                if stack.sessions.enter(&client.session).is_err() {
                    client = Client::login(&stack, role.name());
                }
            }
        }
    }
    // Each role is refused less than the one before it, and the greatest nothing.
    let refused: Vec<i32> =
        Role::ALL.iter().map(|role| counts.get(&(*role, true)).copied().unwrap_or(0)).collect();
    assert!(refused.windows(2).all(|two| two[0] > two[1]) && refused[5] == 0, "{refused:?}");
    assert!(counts[&(Role::ReadOnly, false)] > 500, "{counts:?}");
}

#[test]
fn without_a_session_nothing_is_answered() {
    let (_dir, stack) = stack();
    let client = Client::login(&stack, "pool-admin");
    client.call("session.logout", vec![]);
    for row in rows() {
        for session in [client.session.as_str(), NULL_REF, "", "OpaqueRef:' or 1=1 --"] {
            let (code, _) = code(&stack, session, &row.name, params(&row, session));
            assert_eq!(code, "SESSION_INVALID", "{} in the session {session:?}", row.name);
        }
    }
}
