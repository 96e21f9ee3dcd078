//! `event-wait`: until an object of a class is as it should be.

use serde_json::{Value, json};
use tapio_model::columns::{Table, table};

use super::error::{Failure, Result};
use super::generic::Filter;
use super::objects::{Reach, View};
use super::session::Session;

/// How long one question for events waits, in seconds.
const WAIT_S: f64 = 30.0;

/// Waits until an object of the class fits all of `field=value` and none of `field=/=value`.
pub fn run(session: &Session) -> Result<()> {
    let name = session.need("class")?;
    let table = table(name).ok_or_else(|| Failure::other(format!("class: '{name}' is no class of xe")))?;
    let conditions: Vec<(Filter<'_>, bool)> = session
        .arguments
        .filters()
        .filter(|(name, _)| *name != "class")
        .map(|(name, value)| match (name.strip_suffix('/'), value.strip_prefix("/=")) {
            (Some(name), _) => Ok((Filter::new(table, name, value)?, false)),
            (None, Some(value)) => Ok((Filter::new(table, name, value)?, false)),
            (None, None) => Ok((Filter::new(table, name, value)?, true)),
        })
        .collect::<Result<_>>()?;
    // First the token, then the look: what happens between them is seen by the next question.
    let mut token = String::new();
    loop {
        let classes = json!([table.class]);
        let limit = if token.is_empty() { 0.0 } else { WAIT_S };
        let answer = match session.call("event.from", &[classes, json!(token), json!(limit)]) {
            Err(Failure::Api(code, _)) if code == "EVENTS_LOST" => {
                token.clear();
                continue;
            }
            answer => answer?,
        };
        token = answer.get("token").and_then(Value::as_str).unwrap_or_default().to_owned();
        if is_there(session, table, &conditions)? {
            return Ok(());
        }
    }
}

fn is_there(session: &Session, table: &'static Table, conditions: &[(Filter<'_>, bool)]) -> Result<bool> {
    let view = View::new(&session.client, Reach::List);
    'objects: for (reference, record) in view.records(table.class)? {
        for (filter, wanted) in conditions {
            let cell = view.cell(table, filter.column(), &reference, &record)?;
            if filter.fits(&cell) != *wanted {
                continue 'objects;
            }
        }
        return Ok(true);
    }
    Ok(false)
}
