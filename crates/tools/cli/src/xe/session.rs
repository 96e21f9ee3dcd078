//! A command that runs: what was typed, and the connection.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::arguments::XeArguments;
use super::client::Client;
use super::error::{Failure, Result};
use super::printer::{self, Cell};
use super::{out, size, task};

/// A command that runs.
#[derive(Debug)]
pub struct Session {
    pub arguments: XeArguments,
    pub client: Client,
}

impl Session {
    /// Calls a message.
    pub fn call(&self, method: &str, params: &[Value]) -> Result<Value> {
        self.client.call(method, params)
    }

    /// Calls a message that may take long, as a task: with a bar on a terminal, cancelled by Ctrl-C. Answers the
    /// result: a reference, or an empty text.
    pub fn long(&self, method: &str, params: &[Value]) -> Result<String> {
        task::run(&self.client, method, params)
    }

    /// Calls a message and answers the text it gives.
    pub fn text(&self, method: &str, params: &[Value]) -> Result<String> {
        match self.call(method, params)? {
            Value::String(text) => Ok(text),
            other => Ok(other.to_string()),
        }
    }

    /// Reference of the object with this UUID.
    pub fn by_uuid(&self, class: &str, uuid: &str) -> Result<String> {
        self.text(&format!("{class}.get_by_uuid"), &[uuid.into()])
    }

    /// Reference of the object that a parameter names by UUID.
    pub fn reference(&self, class: &str, param: &str) -> Result<String> {
        self.by_uuid(class, self.arguments.need(param)?)
    }

    /// As [`Self::reference`]; the null reference when the parameter is not given.
    pub fn optional(&self, class: &str, param: &str) -> Result<String> {
        match self.arguments.get(param) {
            Some(uuid) => self.by_uuid(class, uuid),
            None => Ok(tapio_model::NULL_REF.into()),
        }
    }

    /// A parameter that must be given.
    pub fn need(&self, name: &str) -> Result<&str> {
        self.arguments.need(name)
    }

    /// A parameter, or what it is otherwise.
    pub fn or<'a>(&'a self, name: &str, otherwise: &'a str) -> &'a str {
        self.arguments.get(name).unwrap_or(otherwise)
    }

    /// A truth, or what it is otherwise.
    pub fn truth(&self, name: &str, otherwise: bool) -> Result<bool> {
        self.arguments.truth(name, otherwise)
    }

    /// A number of bytes that must be given.
    pub fn size(&self, name: &str) -> Result<i64> {
        size::bytes(name, self.need(name)?)
    }

    /// Parameters of a map, as JSON.
    pub fn map(&self, name: &str) -> Value {
        object(&self.arguments.map(name))
    }

    /// Prints the UUID of an object.
    pub fn print_uuid(&self, class: &str, reference: &str) -> Result<()> {
        let uuid = self.text(&format!("{class}.get_uuid"), &[reference.into()])?;
        self.print_values(&[&uuid])
    }

    /// Prints values: a line each, or with commas.
    pub fn print_values(&self, values: &[&str]) -> Result<()> {
        if self.arguments.json {
            return print_json(&json!(values));
        }
        if self.arguments.minimal {
            return print(&printer::values_minimal(values));
        }
        print(&values.iter().map(|value| format!("{value}\n")).collect::<String>())
    }

    /// Prints records.
    pub fn print_records(&self, records: &[Vec<Cell>]) -> Result<()> {
        if self.arguments.json {
            return print_json(&printer::json(records));
        }
        print(&if self.arguments.minimal { printer::minimal(records) } else { printer::records(records) })
    }
}

/// A map of texts as JSON.
pub fn object(map: &BTreeMap<String, String>) -> Value {
    Value::Object(map.iter().map(|(key, value)| (key.clone(), value.as_str().into())).collect::<Map<_, _>>())
}

/// Writes to standard output.
pub fn print(text: &str) -> Result<()> {
    out::print(text).map_err(Failure::Other)
}

fn print_json(value: &Value) -> Result<()> {
    if out::is_served() {
        return print(&(serde_json::to_string_pretty(value).unwrap_or_default() + "\n"));
    }
    tapio_report::failure::print_json(value).map_err(|error| Failure::other(error.to_string()))
}
