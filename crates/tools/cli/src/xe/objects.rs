//! Objects as records of `xe`: fields of others joined in, values as text.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde_json::{Map, Value};
use tapio_model::columns::{Column, Show, Table};
use tapio_model::{Class, NULL_REF, Type};

use super::client::Client;
use super::error::{Failure, Result};
use super::printer::Cell;

const ABSENT: &str = "<not in database>";

/// Whether all objects of a class are fetched when one is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// One call for each object: for commands about one.
    Single,
    /// One call for the class: for lists. What takes a call for each object is not asked.
    List,
}

type Records = BTreeMap<String, Value>;

/// Records that were fetched.
#[derive(Debug)]
pub struct View<'a> {
    client: &'a Client,
    reach: Reach,
    all: RefCell<BTreeMap<String, Records>>,
    single: RefCell<BTreeMap<String, Option<Value>>>,
}

/// The class of a table.
pub fn class_of(table: &Table) -> Result<&'static Class> {
    tapio_model::class(table.class)
        .ok_or_else(|| Failure::other(format!("there is no class {}", table.class)))
}

impl<'a> View<'a> {
    pub fn new(client: &'a Client, reach: Reach) -> Self {
        Self { client, reach, all: RefCell::default(), single: RefCell::default() }
    }

    /// All records of a class by reference.
    pub fn records(&self, class: &str) -> Result<Records> {
        if let Some(known) = self.all.borrow().get(class) {
            return Ok(known.clone());
        }
        let answer = self.client.call(&format!("{class}.get_all_records"), &[])?;
        let Value::Object(pairs) = answer else {
            return Err(Failure::other(format!("{class}.get_all_records answered no records")));
        };
        let records: Records = pairs.into_iter().collect();
        self.all.borrow_mut().insert(class.to_owned(), records.clone());
        Ok(records)
    }

    /// A record; none where the object is not there (any more).
    pub fn record(&self, class: &str, reference: &str) -> Result<Option<Value>> {
        if reference == NULL_REF || reference.is_empty() || tapio_model::class(class).is_none() {
            return Ok(None);
        }
        if let Some(known) = self.all.borrow().get(class) {
            return Ok(known.get(reference).cloned());
        }
        if self.reach == Reach::List {
            return Ok(self.records(class)?.get(reference).cloned());
        }
        if let Some(known) = self.single.borrow().get(reference) {
            return Ok(known.clone());
        }
        let record = match self.client.call(&format!("{class}.get_record"), &[reference.into()]) {
            Ok(record) => Some(record),
            Err(Failure::Api(code, _)) if code == "HANDLE_INVALID" => None,
            Err(error) => return Err(error),
        };
        self.single.borrow_mut().insert(reference.to_owned(), record.clone());
        Ok(record)
    }

    /// Fields of an object, those alone that `wanted` chooses.
    pub fn cells(
        &self,
        table: &Table,
        reference: &str,
        record: &Value,
        wanted: &dyn Fn(&Column) -> bool,
    ) -> Result<Vec<Cell>> {
        let columns = table.columns.iter().filter(|column| wanted(column));
        columns.map(|column| self.cell(table, column, reference, record)).collect()
    }

    /// One field of an object.
    pub fn cell(&self, table: &Table, column: &Column, reference: &str, record: &Value) -> Result<Cell> {
        let class = class_of(table)?;
        let (text, value) = match column.show {
            Show::Asked(message) => self.asked(table, message, reference)?,
            _ => self.joined(class, column, record)?,
        };
        Ok(Cell { name: column.name.to_owned(), qualifier: column.qualifier(class), text, value })
    }

    /// What a message answers for the object.
    fn asked(&self, table: &Table, message: &str, reference: &str) -> Result<(String, Value)> {
        if self.reach == Reach::List {
            return Ok(("<expensive field>".into(), Value::Null));
        }
        let answer = match message.split_once('.') {
            Some(_) => self.client.call(message, &[]),
            None => self.client.call(&format!("{}.{message}", table.class), &[reference.into()]),
        };
        let value = match answer {
            // An assertion says yes by failing not.
            Ok(_) if message.starts_with("assert_") => Value::Bool(true),
            Ok(value) => value,
            Err(Failure::Api(..)) if message.starts_with("assert_") => Value::Bool(false),
            Err(Failure::Api(code, _)) => return Ok((format!("<{code}>"), Value::Null)),
            Err(error) => return Err(error),
        };
        let ty = if value.is_array() { Type::Set(&Type::String) } else { Type::String };
        Ok((text(&self.named(&value)?, ty, column_separator(Show::Plain)), value))
    }

    /// References to hosts as their UUIDs.
    fn named(&self, value: &Value) -> Result<Value> {
        let Some(members) = value.as_array() else { return Ok(value.clone()) };
        let mut named = Vec::new();
        for member in members {
            let record = match member.as_str().filter(|text| text.starts_with("OpaqueRef:")) {
                Some(reference) => self.record("host", reference)?,
                None => None,
            };
            named.push(
                record.and_then(|record| record.get("uuid").cloned()).unwrap_or_else(|| member.clone()),
            );
        }
        Ok(Value::Array(named))
    }

    fn joined(&self, class: &'static Class, column: &Column, record: &Value) -> Result<(String, Value)> {
        let steps = column.steps();
        let unknown = || Failure::other(format!("{} has no field for {}", class.name, column.name));
        let (last, way) = steps.split_last().ok_or_else(unknown)?;
        let (mut class, mut here, mut many) = (class, vec![Some(record.clone())], false);
        for step in way {
            let field = class.field(step).ok_or_else(unknown)?;
            let to = field.ty.referred().ok_or_else(unknown)?;
            let mut next = Vec::new();
            for record in here.into_iter().flatten() {
                match record.get(step) {
                    Some(Value::Array(references)) => {
                        many = true;
                        for reference in references {
                            next.push(self.record(to, reference.as_str().unwrap_or_default())?);
                        }
                    }
                    Some(Value::String(reference)) => next.push(self.record(to, reference)?),
                    _ => next.push(None),
                }
            }
            here = next;
            class = tapio_model::class(to).unwrap_or(class);
        }
        let ty = class.field(last).map_or(Type::Any, |field| field.ty);
        let separator = column_separator(column.show);
        let absent = if column.show == Show::Medium { "<EMPTY>" } else { ABSENT };
        let field = |record: Option<Value>| record?.get(last.as_str()).cloned();
        let values: Vec<Option<Value>> =
            here.into_iter().map(|record| field(record).map(|value| membered(value, column.show))).collect();
        let shown = |value: &Option<Value>| match value {
            None => absent.to_owned(),
            Some(value) => dressed(text(value, ty, separator), column.show),
        };
        if column.show == Show::OneHost {
            return Ok(match values.as_slice() {
                [only] => (shown(only), only.clone().unwrap_or(Value::Null)),
                [] => (ABSENT.into(), Value::Null),
                _ => ("<shared>".into(), Value::Null),
            });
        }
        if many {
            let texts: Vec<String> = values.iter().map(shown).collect();
            return Ok((texts.join(separator), Value::Array(values.into_iter().flatten().collect())));
        }
        let value = values.into_iter().next().flatten();
        Ok((shown(&value), value.unwrap_or(Value::Null)))
    }
}

const fn column_separator(show: Show) -> &'static str {
    if matches!(show, Show::Commas) { ", " } else { "; " }
}

/// The values of a map where they alone are shown.
fn membered(value: Value, show: Show) -> Value {
    match (value, show) {
        (Value::Object(pairs), Show::Values) => {
            Value::Array(pairs.into_iter().map(|(_, value)| value).collect())
        }
        (value, _) => value,
    }
}

fn dressed(text: String, show: Show) -> String {
    match show {
        Show::Lower => text.to_lowercase(),
        Show::Capital => {
            let mut letters = text.replace('_', " ");
            if let Some(first) = letters.get_mut(..1) {
                first.make_ascii_uppercase();
            }
            letters
        }
        Show::DiskType => match text.as_str() {
            "user" => "User".into(),
            "system" => "System".into(),
            "ephemeral" => "Ephemeral".into(),
            "suspend" => "Suspend".into(),
            "crashdump" => "Crashdump".into(),
            "ha_statefile" => "HA statefile".into(),
            "metadata" => "Metadata".into(),
            "redo_log" => "Redo log".into(),
            "pvs_cache" => "PVS cache".into(),
            "cbt_metadata" => "CBT metadata".into(),
            _ => text,
        },
        _ => text,
    }
}

/// A value as text.
pub fn text(value: &Value, ty: Type, separator: &str) -> String {
    match (value, ty) {
        (Value::String(text), Type::Ref(_)) if text == NULL_REF => ABSENT.into(),
        (Value::String(text), _) => text.clone(),
        (Value::Bool(truth), _) => truth.to_string(),
        (Value::Number(number), Type::Float) => format!("{:.3}", number.as_f64().unwrap_or_default()),
        (Value::Number(number), _) => number.to_string(),
        (Value::Array(members), _) => {
            let of = if let Type::Set(of) = ty { *of } else { Type::Any };
            members.iter().map(|member| text(member, of, separator)).collect::<Vec<_>>().join(separator)
        }
        (Value::Object(pairs), _) => {
            let of = if let Type::Map(_, of) = ty { *of } else { Type::Any };
            map_text(pairs, of, separator)
        }
        (Value::Null, _) => String::new(),
    }
}

fn map_text(pairs: &Map<String, Value>, of: Type, separator: &str) -> String {
    let pair = |(key, value): (&String, &Value)| format!("{key}: {}", text(value, of, separator));
    pairs.iter().map(pair).collect::<Vec<_>>().join("; ")
}

/// The reference of an object by UUID, reference or name.
///
/// # Errors
/// There is none, or there are several of that name.
pub fn find(client: &Client, class: &str, what: &str) -> Result<String> {
    if what.starts_with("OpaqueRef:") {
        return Ok(what.to_owned());
    }
    match client.call(&format!("{class}.get_by_uuid"), &[what.into()]) {
        Ok(reference) => return Ok(reference.as_str().unwrap_or_default().to_owned()),
        Err(Failure::Api(code, _)) if code == "UUID_INVALID" || code == "HANDLE_INVALID" => {}
        Err(error) => return Err(error),
    }
    let found = client.call(&format!("{class}.get_by_name_label"), &[what.into()])?;
    match found.as_array().map(Vec::as_slice) {
        Some([only]) => Ok(only.as_str().unwrap_or_default().to_owned()),
        None | Some([]) => Err(Failure::other(format!("no {class} has the UUID or the name '{what}'"))),
        Some(several) => Err(Failure::other(format!(
            "{} objects of class {class} are named '{what}'; give the UUID",
            several.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_become_text_by_their_type() {
        let map = Type::Map(&Type::String, &Type::String);
        assert_eq!(text(&json!({"b": "2", "a": "1"}), map, "; "), "a: 1; b: 2");
        assert_eq!(text(&json!(["x", "y"]), Type::Set(&Type::String), "; "), "x; y");
        assert_eq!(text(&json!(["x", "y"]), Type::Set(&Type::String), ", "), "x, y");
        assert_eq!(text(&json!(0.5), Type::Float, "; "), "0.500");
        assert_eq!(text(&json!(1), Type::Float, "; "), "1.000");
        assert_eq!(text(&json!(1_099_511_627_776_i64), Type::Int, "; "), "1099511627776");
        assert_eq!(text(&json!(true), Type::Bool, "; "), "true");
        assert_eq!(text(&json!(NULL_REF), Type::Ref("VDI"), "; "), ABSENT);
        assert_eq!(text(&json!("20240131T12:34:56Z"), Type::DateTime, "; "), "20240131T12:34:56Z");
    }

    #[test]
    fn words_are_dressed_as_users_know_them() {
        assert_eq!(dressed("Running".into(), Show::Lower), "running");
        assert_eq!(dressed("coredump_and_restart".into(), Show::Capital), "Coredump and restart");
        assert_eq!(dressed(String::new(), Show::Capital), "");
        assert_eq!(membered(json!({"t1": "scan", "t2": "update"}), Show::Values), json!(["scan", "update"]));
        assert_eq!(dressed("ha_statefile".into(), Show::DiskType), "HA statefile");
        assert_eq!(dressed("rrd".into(), Show::DiskType), "rrd");
    }
}
