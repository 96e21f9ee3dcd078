//! A toolstack for one test, and a client of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_core::config::Config;
use tapio_core::db::Db;
use tapio_core::{Accounts, Credential, Login, Peer, Toolstack};
use tapio_model::{ApiError, Role, Value};

/// Accounts whose names are those of their roles; the password of each is `secret`.
pub struct Six;

impl Accounts for Six {
    fn authenticate(&self, user: &str, password: &str, _: &Peer) -> Result<Login, ApiError> {
        let unknown = || ApiError::new("SESSION_AUTHENTICATION_FAILED", [user, "no such account"]);
        let role = Role::named(user).ok_or_else(unknown)?;
        if password == "secret" {
            return Ok(Login { role, credential: Credential(0) });
        }
        Err(ApiError::new("SESSION_AUTHENTICATION_FAILED", [user, "wrong password"]))
    }

    fn change_password(&self, user: &str, old: &str, _: &str) -> Result<Credential, ApiError> {
        if old == "secret" {
            return Ok(Credential(0));
        }
        Err(ApiError::new("SESSION_AUTHENTICATION_FAILED", [user, "wrong password"]))
    }

    fn generation(&self) -> u64 {
        0
    }

    fn standings(&self, asked: &[(&str, Credential)]) -> Result<Vec<Option<Role>>, ApiError> {
        panic!("nothing changed, but {asked:?} are looked at")
    }
}

/// Settings below a directory of the test's own.
pub fn config(dir: &std::path::Path) -> Config {
    Config {
        run_dir: dir.join("run"),
        state_dir: dir.join("state"),
        mount_dir: dir.join("mount"),
        host_power: None,
        worker_pool_size: 4,
        per_vm_parallel: 4,
        polling: (8_000, 50),
        log_socket: None,
    }
}

/// A toolstack with a database, and the directory it works in.
pub fn stack_on(db: Db) -> (tempfile::TempDir, Arc<Toolstack>) {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let stack = Toolstack::with_accounts(config(dir.path()), db, Box::new(Six));
    stack.start().expect("a toolstack starts");
    (dir, stack)
}

/// A toolstack with an empty database in memory.
pub fn stack() -> (tempfile::TempDir, Arc<Toolstack>) {
    stack_on(Db::default())
}

/// A session of an account.
#[derive(Clone)]
pub struct Client {
    pub stack: Arc<Toolstack>,
    pub session: String,
}

impl Client {
    pub fn login(stack: &Arc<Toolstack>, user: &str) -> Self {
        let session = stack
            .call(&Peer::default(), "session.login_with_password", vec![user.into(), "secret".into()])
            .expect("the account exists");
        Self { stack: Arc::clone(stack), session: text(&session) }
    }

    /// A call with this session before its parameters.
    pub fn try_call(&self, method: &str, params: Vec<Value>) -> Result<Value, ApiError> {
        let params = std::iter::once(Value::from(self.session.as_str())).chain(params).collect();
        self.stack.call(&Peer::default(), method, params)
    }

    pub fn call(&self, method: &str, params: Vec<Value>) -> Value {
        self.try_call(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// The code of the error that a call must end with.
    pub fn code(&self, method: &str, params: Vec<Value>) -> String {
        let error = self.try_call(method, params).expect_err(method);
        error.code.into_owned()
    }

    /// A blob with a name: an object that only the test makes.
    pub fn blob(&self, name: &str) -> String {
        self.stack.db.create("blob", &[("name_label", name.into())]).expect("a blob")
    }

    /// A VM made directly in the database: its own messages are another part's matter.
    pub fn vm(&self, name: &str) -> String {
        self.stack.db.create("VM", &needed("VM", &[("name_label", name.into())])).expect("a VM")
    }
}

/// Fields for an object of a class, with the empty value in each that must be given.
pub fn needed(class: &str, given: &[(&'static str, Value)]) -> Vec<(&'static str, Value)> {
    let class = tapio_model::class(class).expect("a class of the table");
    let mut fields = given.to_vec();
    for field in class.fields {
        if field.initial.value(field.ty).is_none() && !given.iter().any(|(name, _)| *name == field.name) {
            let empty = tapio_model::Initial::Empty.value(field.ty).expect("each type has an empty value");
            fields.push((field.name, empty));
        }
    }
    fields
}

pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value:?} is a text")).to_owned()
}

pub fn map(value: &Value) -> &BTreeMap<String, Value> {
    value.as_map().unwrap_or_else(|| panic!("{value:?} is a map"))
}

pub fn texts(value: &Value) -> Vec<String> {
    value.as_set().unwrap_or_else(|| panic!("{value:?} is a set")).iter().map(text).collect()
}
