//! `get_data_sources`, `query_data_source`, `record_data_source` and `forget_data_source_archives` of VMs, SRs and
//! hosts.

use std::sync::Arc;

use tapio_history::{History, Source};
use tapio_model::{ApiError, Value};

use super::{Histories, Owner};
use crate::args::Args;
use crate::call::{Call, Handlers};

/// A record of class `data_source`.
fn record(source: &Source, is_enabled: bool, value: f64) -> Value {
    let fields = [
        ("name_label", Value::string(source.name.as_ref())),
        ("name_description", Value::string(source.doc.as_ref())),
        ("enabled", Value::Bool(is_enabled)),
        ("standard", Value::Bool(true)),
        ("units", Value::string(source.units.as_ref())),
        ("min", Value::Float(source.min)),
        ("max", Value::Float(source.max)),
        ("value", Value::Float(value)),
    ];
    Value::Map(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

fn records(history: &History) -> Value {
    let recorded = history.sources().map(|source| {
        let value = history.current(&source.name).unwrap_or(f64::NAN);
        record(source, true, value)
    });
    let forgotten = history.forgotten().map(|source| record(source, false, f64::NAN));
    Value::Set(recorded.chain(forgotten).collect())
}

fn unknown(name: &str) -> ApiError {
    ApiError::new("INVALID_VALUE", ["data_source", name])
}

impl Histories {
    /// The owner that the first parameter of a message of this class names.
    fn owner(&self, class: &str, args: &Args) -> Result<Owner, ApiError> {
        let object = self.db.get(class, args.text(0)?)?;
        let elsewhere = || ApiError::new("HOST_OFFLINE", [object.reference.as_str()]);
        Owner::of(&self.db, class, &object).ok_or_else(elsewhere)
    }

    fn query(&self, owner: Owner, name: &str) -> Result<Value, ApiError> {
        let current = self.of(owner).and_then(|history| history.lock().current(name));
        current.map(Value::Float).ok_or_else(|| unknown(name))
    }

    /// Records a source again that was forgotten; one that is recorded stays so.
    fn record_source(&self, owner: Owner, name: &str) -> Result<Value, ApiError> {
        let done = self.of(owner).map(|history| {
            let mut history = history.lock();
            history.has(name) || history.record(name)
        });
        done.filter(|done| *done).map(|_| Value::Void).ok_or_else(|| unknown(name))
    }

    /// Drops what was recorded of a source, and records it no more.
    fn forget_source(&self, owner: Owner, name: &str) -> Result<Value, ApiError> {
        let done = self.of(owner).map(|history| history.lock().forget(name));
        done.filter(|done| *done).map(|_| Value::Void).ok_or_else(|| unknown(name))
    }
}

/// Handlers of one class; a handler is a plain function.
macro_rules! of_class {
    ($handlers:ident, $class:literal) => {
        $handlers.on(concat!($class, ".get_data_sources"), |call: &Call<Histories>, args| {
            call.part.owner($class, args).map(|owner| records(&call.part.copy(owner)))
        });
        $handlers.on(concat!($class, ".query_data_source"), |call: &Call<Histories>, args| {
            call.part.query(call.part.owner($class, args)?, args.text(1)?)
        });
        $handlers.on(concat!($class, ".record_data_source"), |call: &Call<Histories>, args| {
            call.part.record_source(call.part.owner($class, args)?, args.text(1)?)
        });
        $handlers.on(concat!($class, ".forget_data_source_archives"), |call: &Call<Histories>, args| {
            call.part.forget_source(call.part.owner($class, args)?, args.text(1)?)
        });
    };
}

/// Registers the messages of this part.
pub(super) fn register(handlers: &mut Handlers, histories: &Arc<Histories>) {
    let mut handlers = handlers.of(histories);
    of_class!(handlers, "VM");
    of_class!(handlers, "SR");
    of_class!(handlers, "host");
}
