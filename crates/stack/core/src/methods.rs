//! The messages of the object table, each with what does its work.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{Class, ImpliedKind, Initial, Role, Type};

use crate::call::{Handler, Handlers};
use crate::generic;

/// What does the work of a message.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    /// A handler.
    Handler(Handler),
    /// The table itself.
    Generic(ImpliedKind),
    /// The dispatcher: logins.
    Login,
    /// The dispatcher: waits for events.
    Wait,
    /// The dispatcher: records of messages.
    Messages,
    /// The dispatcher: the names of messages.
    Names,
    /// Nothing yet.
    Missing,
}

/// One message.
#[derive(Debug)]
pub(crate) struct Method {
    /// As `VDI.snapshot`.
    pub(crate) name: String,
    pub(crate) class: &'static Class,
    pub(crate) work: Work,
    pub(crate) role: Role,
    pub(crate) is_async: bool,
    /// Whether its one parameter is the record of a new object.
    pub(crate) is_create: bool,
    pub(crate) needs_session: bool,
    pub(crate) params: Vec<(&'static str, Type, Option<Initial>)>,
    pub(crate) result: Type,
    pub(crate) doc: &'static str,
}

impl Method {
    /// Whether it does anything to what a start puts in order. What only looks, and sessions, tasks and events, do not.
    pub(crate) fn changes(&self) -> bool {
        let looks = |word: &str| word.starts_with("get_") || word.starts_with("assert_");
        match self.work {
            Work::Login | Work::Wait | Work::Messages | Work::Missing => false,
            Work::Generic(_) | Work::Handler(_) | Work::Names => {
                let word = self.name.split_once('.').map_or("", |(_, word)| word);
                !looks(word) && !matches!(self.class.name, "session" | "task" | "event")
            }
        }
    }
}

/// All messages by name.
#[derive(Debug)]
pub struct Methods(BTreeMap<String, Arc<Method>>);

impl Methods {
    /// The messages of the object table, done by these handlers where they are registered.
    pub fn new(handlers: &Handlers) -> Self {
        let mut methods = BTreeMap::new();
        for class in tapio_model::CLASSES {
            for message in class.messages {
                let name = format!("{}.{}", class.name, message.name);
                let method = Method {
                    work: work_of(handlers, &name, || setter_of(class, message.name)),
                    class,
                    role: message.role,
                    is_async: message.is_async,
                    is_create: false,
                    needs_session: message.needs_session,
                    params: message
                        .params
                        .iter()
                        .map(|param| (param.name, param.ty, param.default))
                        .collect(),
                    result: message.result,
                    doc: message.doc,
                    name: name.clone(),
                };
                methods.insert(name, Arc::new(method));
            }
            for message in tapio_model::implied(class) {
                let name = format!("{}.{}", class.name, message.name);
                let (params, result, doc) = generic::shape(class, message.kind);
                let method = Method {
                    work: work_of(handlers, &name, || Some(message.kind)),
                    class,
                    role: message.role,
                    is_async: matches!(message.kind, ImpliedKind::Create | ImpliedKind::Destroy),
                    is_create: matches!(message.kind, ImpliedKind::Create),
                    needs_session: true,
                    params,
                    result,
                    doc,
                    name: name.clone(),
                };
                methods.insert(name, Arc::new(method));
            }
        }
        Self(methods)
    }

    /// Names of handlers that no message of the table has: no client could ever call them.
    pub fn unreachable(&self, handlers: &Handlers) -> Vec<&'static str> {
        handlers.names().filter(|name| !self.0.contains_key(*name)).collect()
    }

    /// Names of messages whose work nothing does.
    pub fn undone(&self) -> Vec<&str> {
        let undone = self.0.values().filter(|method| matches!(method.work, Work::Missing));
        undone.map(|method| method.name.as_str()).collect()
    }

    /// Names of all messages, with `Async.` and `system.`, in order. Those whose work nothing does are not among them.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = ["system.listMethods", "system.methodHelp"].map(str::to_owned).to_vec();
        for method in self.0.values().filter(|method| !matches!(method.work, Work::Missing)) {
            names.push(method.name.clone());
            if method.is_async {
                names.push(format!("Async.{}", method.name));
            }
        }
        names.sort();
        names
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Arc<Method>> {
        self.0.get(name)
    }
}

fn work_of(handlers: &Handlers, name: &str, generic: impl Fn() -> Option<ImpliedKind>) -> Work {
    match name {
        "session.login_with_password" | "session.slave_local_login_with_password" => Work::Login,
        "event.from" | "event.next" => Work::Wait,
        "message.get" | "message.get_since" => Work::Messages,
        "host.list_methods" => Work::Names,
        _ => match handlers.get(name) {
            Some(handler) => Work::Handler(handler.clone()),
            None => generic().map_or(Work::Missing, Work::Generic),
        },
    }
}

/// What a message without a handler does where its name is that of a getter or setter of a field that has none of
/// its own.
fn setter_of(class: &'static Class, message: &str) -> Option<ImpliedKind> {
    type Make = fn(&'static tapio_model::Field) -> ImpliedKind;
    let kinds: [(&str, Make); 6] = [
        ("add_to_", ImpliedKind::AddTo),
        ("remove_from_", ImpliedKind::RemoveFrom),
        ("set_", ImpliedKind::Set),
        ("add_", ImpliedKind::Add),
        ("remove_", ImpliedKind::Remove),
        ("get_", ImpliedKind::Get),
    ];
    let found = kinds.iter().find_map(|(prefix, make)| {
        let field = class.field(message.strip_prefix(prefix)?)?;
        Some(make(field))
    })?;
    let declared = class.message(message)?.params.len();
    (declared == generic::shape(class, found).0.len()).then_some(found)
}
