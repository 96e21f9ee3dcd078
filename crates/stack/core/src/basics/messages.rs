//! Messages to the administrator.

use std::sync::Arc;

use tapio_model::{ApiError, Value};

use crate::args::Args;
use crate::call::HandlersOf;
use crate::dates;
use crate::db::{Db, Object};

/// The oldest beyond so many are forgotten.
const MESSAGES_MAX: usize = 10_000;

/// Longest name and body, in bytes.
const NAME_MAX: usize = 256;
const BODY_MAX: usize = 64 << 10;

/// Sends the administrator a message about an object: `cls` as `VDI`, `Host`; `priority` 1 (most urgent) to 5. Answers
/// the message's reference.
///
/// # Errors
/// `UUID_INVALID`, `INVALID_VALUE`, the store's.
pub fn tell(
    db: &Db,
    name: &str,
    priority: i64,
    cls: &str,
    uuid: &str,
    body: &str,
) -> Result<String, ApiError> {
    if !(0..=5).contains(&priority) {
        return Err(ApiError::new("INVALID_VALUE", ["priority".to_owned(), priority.to_string()]));
    }
    if name.len() > NAME_MAX {
        return Err(ApiError::new("INVALID_VALUE", ["name", "it is too long"]));
    }
    if body.len() > BODY_MAX {
        return Err(ApiError::new("INVALID_VALUE", ["body", "it is too long"]));
    }
    let class = tapio_model::class(cls);
    db.change(|change| {
        if let Some(class) = class {
            change.by_uuid(class.name, uuid)?;
        }
        let fields = [
            ("name", name.into()),
            ("priority", Value::Int(priority)),
            ("cls", cls.into()),
            ("obj_uuid", uuid.into()),
            ("timestamp", Value::DateTime(dates::now())),
            ("body", body.into()),
        ];
        change.create("message", &fields)
    })
}

/// Forgets the oldest messages where there are too many.
pub(crate) fn sweep(db: &Db) -> Result<(), ApiError> {
    if db.count("message") <= MESSAGES_MAX {
        return Ok(());
    }
    let mut all = db.all("message");
    all.sort_by_key(|message| message.created);
    let too_many = all.len().saturating_sub(MESSAGES_MAX);
    db.change(|change| {
        for message in &all[..too_many] {
            if change.get("message", &message.reference).is_ok() {
                change.destroy("message", &message.reference)?;
            }
        }
        Ok(())
    })
}

/// The messages that `message.get` (of a class and an object) and `message.get_since` answer the records of.
pub(crate) fn found(db: &Db, args: &Args) -> Result<Vec<Arc<Object>>, ApiError> {
    if args.0.len() == 1 {
        return Ok(since(db, args.value(0)?, |_| true));
    }
    let (cls, uuid) = (args.text(0)?, args.text(1)?);
    Ok(since(db, args.value(2)?, |message| message.text("cls") == cls && message.text("obj_uuid") == uuid))
}

fn since(db: &Db, since: &Value, fits: impl Fn(&Object) -> bool) -> Vec<Arc<Object>> {
    let Value::DateTime(since) = since else { return Vec::new() };
    let is_since = |message: &Arc<Object>| {
        matches!(message.get("timestamp"), Value::DateTime(at) if at >= since) && fits(message)
    };
    db.all("message").into_iter().filter(is_since).collect()
}

/// Registers the messages of messages.
pub(crate) fn register(handlers: &mut HandlersOf<'_, Db>) {
    handlers.on("message.create", |call, args| {
        let (name, priority, cls) = (args.text(0)?, args.int(1)?, args.text(2)?);
        tell(&call.part, name, priority, cls, args.text(3)?, args.text(4)?).map(Value::String)
    });
    handlers.on("message.destroy", |call, args| {
        call.part.destroy("message", args.text(0)?)?;
        Ok(Value::Void)
    });
    handlers.on("message.destroy_many", |call, args| {
        let messages = args.value(0)?.as_set().unwrap_or_default();
        call.part.change(|change| {
            for message in messages.iter().filter_map(Value::as_str) {
                change.destroy("message", message)?;
            }
            Ok(Value::Void)
        })
    });
}
