//! What every kind of object has: lists, and getting and setting its fields.

use serde_json::{Map, Value, json};
use tapio_model::columns::{Column, Show, Table};
use tapio_model::{Class, Field, Type};

use super::arguments::boolean;
use super::client::Client;
use super::error::{Failure, Result};
use super::objects::{Reach, View, class_of, find, text as text_of};
use super::printer::Cell;
use super::session::Session;
use super::size;

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    List,
    ParamList,
    ParamGet,
    ParamSet,
    ParamAdd,
    ParamRemove,
    ParamClear,
}

/// A command that every table has.
#[derive(Debug)]
pub struct Made {
    /// What stands behind the name of the table.
    pub ending: &'static str,
    /// What it does.
    pub verb: Verb,
    /// Parameters that must be given.
    pub required: &'static [&'static str],
    /// Parameters that may be given.
    pub optional: &'static [&'static str],
    /// One sentence for people.
    pub about: &'static str,
}

const fn made(
    ending: &'static str,
    verb: Verb,
    required: &'static [&'static str],
    optional: &'static [&'static str],
    about: &'static str,
) -> Made {
    Made { ending, verb, required, optional, about }
}

/// The commands that every table has.
pub static VERBS: &[Made] = &[
    made(
        "-list",
        Verb::List,
        &[],
        &["params", "FIELD", "MAP:KEY", "SET:contains", "database:"],
        "Lists them",
    ),
    made("-param-list", Verb::ParamList, &["uuid"], &[], "Shows all fields of one"),
    made(
        "-param-get",
        Verb::ParamGet,
        &["uuid", "param-name"],
        &["param-key"],
        "Prints a field, or one key of a map",
    ),
    made("-param-set", Verb::ParamSet, &["uuid"], &["FIELD", "MAP:KEY"], "Sets fields"),
    made(
        "-param-add",
        Verb::ParamAdd,
        &["uuid", "param-name"],
        &["param-key", "KEY"],
        "Adds to a set or a map",
    ),
    made(
        "-param-remove",
        Verb::ParamRemove,
        &["uuid", "param-name", "param-key"],
        &[],
        "Removes from a set or a map",
    ),
    made("-param-clear", Verb::ParamClear, &["uuid", "param-name"], &[], "Empties a field"),
];

/// Table and verb of a command's name.
pub fn parse(name: &str) -> Option<(&'static Table, Verb)> {
    // Longer endings first: `-param-list` ends in `-list`, too.
    VERBS.iter().rev().find_map(|made| {
        let table = tapio_model::columns::table(name.strip_suffix(made.ending)?)?;
        Some((table, made.verb))
    })
}

/// The parameter that names the VDI of a database to be opened.
pub const DATABASE: &str = "database:vdi-uuid";

/// Does something in the session of a database on an SR.
pub fn in_database<T>(session: &Session, vdi: &str, work: impl FnOnce(&Client) -> Result<T>) -> Result<T> {
    let vdi = session.by_uuid("VDI", vdi)?;
    let client = session.client.in_session(session.text("VDI.open_database", &[vdi.into()])?)?;
    let done = work(&client);
    // One that stays ends by itself some day.
    let _ = client.call("session.logout", &[]);
    done
}

/// Does it.
pub fn run(session: &Session, table: &'static Table, verb: Verb) -> Result<()> {
    if verb == Verb::List {
        return list(session, table);
    }
    let reference = session.reference(table.class, "uuid")?;
    match verb {
        Verb::List => list(session, table),
        Verb::ParamList => {
            let view = View::new(&session.client, Reach::Single);
            let record = record(&view, table, &reference)?;
            session.print_records(&[view.cells(table, &reference, &record, &|_| true)?])
        }
        Verb::ParamGet => param_get(session, table, &reference),
        Verb::ParamSet => param_set(session, table, &reference),
        Verb::ParamAdd => param_add(session, table, &reference),
        Verb::ParamRemove => param_remove(session, table, &reference),
        Verb::ParamClear => param_clear(session, table, &reference),
    }
}

fn record(view: &View<'_>, table: &Table, reference: &str) -> Result<Value> {
    view.record(table.class, reference)?.ok_or_else(|| {
        Failure::Api("HANDLE_INVALID".into(), vec![table.class.to_owned(), reference.to_owned()])
    })
}

/// Objects of a table that fit all filters, by reference, in the order of their UUIDs.
pub fn matching<'a>(
    view: &View<'_>,
    table: &'static Table,
    filters: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Vec<(String, Value)>> {
    let filters: Vec<Filter<'_>> =
        filters.into_iter().map(|(name, value)| Filter::new(table, name, value)).collect::<Result<_>>()?;
    let mut found = Vec::new();
    'objects: for (reference, record) in view.records(table.class)? {
        let belongs =
            |(field, wanted): &(&str, bool)| record.get(field).and_then(Value::as_bool) == Some(*wanted);
        if !table.only.iter().all(belongs) {
            continue;
        }
        for filter in &filters {
            if !filter.fits(&view.cell(table, filter.column, &reference, &record)?) {
                continue 'objects;
            }
        }
        found.push((reference, record));
    }
    let uuid = |record: &Value| record.get("uuid").and_then(Value::as_str).map(str::to_owned);
    found.sort_by_cached_key(|(_, record)| uuid(record));
    Ok(found)
}

/// One condition of a list.
#[derive(Debug)]
pub struct Filter<'a> {
    column: &'static Column,
    key: Option<&'a str>,
    wanted: &'a str,
}

impl<'a> Filter<'a> {
    /// `field=value`, `map:key=value` or `set:contains=value`.
    pub fn new(table: &'static Table, name: &'a str, wanted: &'a str) -> Result<Self> {
        let (field, key) = name.split_once(':').map_or((name, None), |(field, key)| (field, Some(key)));
        let column = table.column(field).ok_or_else(|| unknown_field(table, field))?;
        if matches!(column.show, Show::Asked(_)) {
            return Err(Failure::other(format!(
                "{field} takes a question for each object; lists do not filter by it"
            )));
        }
        let shown = class_of(table).ok().and_then(|class| column.fields(class));
        let (is_set, is_map) = shown.map_or((true, true), |(first, last)| {
            let is_set = |ty: Type| matches!(ty, Type::Set(_));
            (is_set(first.ty) || is_set(last.ty), matches!(last.ty, Type::Map(..)))
        });
        match key {
            None => {}
            Some("contains") if is_set => {}
            Some(_) if is_map => {}
            Some(_) if is_set => {
                return Err(Failure::other(format!("{field} is a set: give {field}:contains=VALUE")));
            }
            Some(_) => {
                let what = format!("{field} is no map: give {field}=VALUE instead of {name}=VALUE");
                return Err(Failure::other(what));
            }
        }
        Ok(Self { column, key, wanted })
    }

    /// The field that it looks at.
    pub const fn column(&self) -> &'static Column {
        self.column
    }

    /// Whether the field is as it should be.
    pub fn fits(&self, cell: &Cell) -> bool {
        match (self.key, &cell.value) {
            (None, _) => cell.text == self.wanted,
            (Some("contains"), Value::Array(members)) => {
                members.iter().any(|member| member.as_str() == Some(self.wanted))
            }
            (Some(key), Value::Object(pairs)) => {
                pairs.get(key).is_some_and(|value| text_of(value, Type::Any, "; ") == self.wanted)
            }
            _ => false,
        }
    }
}

fn unknown_field(table: &Table, field: &str) -> Failure {
    Failure::other(format!(
        "Unknown field '{field}'; '{} params=all' shows the fields there are",
        format_args!("{}-list", table.name)
    ))
}

/// The columns that `params=` chooses, or those that are listed otherwise.
pub fn chosen(table: &'static Table, params: Option<&str>) -> Result<Vec<&'static str>> {
    let all = || table.columns.iter().map(|column| column.name).collect();
    match params {
        Some("all") => Ok(all()),
        Some(params) => params
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(|name| {
                table.column(name).map(|column| column.name).ok_or_else(|| unknown_field(table, name))
            })
            .collect(),
        None if table.listed.is_empty() => Ok(all()),
        None => Ok(table.listed.to_vec()),
    }
}

fn list(session: &Session, table: &'static Table) -> Result<()> {
    match session.arguments.get(DATABASE) {
        Some(vdi) => in_database(session, vdi, |client| list_of(session, client, table)),
        None => list_of(session, &session.client, table),
    }
}

fn list_of(session: &Session, client: &Client, table: &'static Table) -> Result<()> {
    let chosen = chosen(table, session.arguments.get("params"))?;
    let view = View::new(client, Reach::List);
    let found = matching(&view, table, session.arguments.filters())?;
    let wanted = |column: &Column| chosen.contains(&column.name);
    let records: Result<Vec<Vec<Cell>>> =
        found.iter().map(|(reference, record)| view.cells(table, reference, record, &wanted)).collect();
    session.print_records(&records?)
}

fn named_column(session: &Session, table: &'static Table) -> Result<&'static Column> {
    let name = session.need("param-name")?;
    table.column(name).ok_or_else(|| unknown_field(table, name))
}

fn param_get(session: &Session, table: &'static Table, reference: &str) -> Result<()> {
    let column = named_column(session, table)?;
    let view = View::new(&session.client, Reach::Single);
    let record = record(&view, table, reference)?;
    let cell = view.cell(table, column, reference, &record)?;
    let Some(key) = session.arguments.get("param-key") else {
        return session.print_values(&[&cell.text]);
    };
    let Value::Object(pairs) = &cell.value else {
        return Err(Failure::other(format!("{} is no map; leave param-key away", column.name)));
    };
    match pairs.get(key) {
        Some(Value::String(text)) => session.print_values(&[text]),
        Some(other) => session.print_values(&[&other.to_string()]),
        None => Err(Failure::other(format!("Key {key} not found in map {}", column.name))),
    }
}

/// The field behind a column that can be set.
fn settable(table: &'static Table, column: &Column) -> Result<(&'static Class, &'static Field)> {
    let class = class_of(table)?;
    match column.fields(class) {
        Some((first, _)) if column.writable => Ok((class, first)),
        _ => Err(Failure::other(format!("{} cannot be changed", column.name))),
    }
}

/// A value of a field from text.
fn value_of(session: &Session, name: &str, text: &str, ty: Type) -> Result<Value> {
    Ok(match ty {
        Type::Bool => boolean(name, text)?.into(),
        Type::Int => match text.parse::<i64>() {
            Ok(number) => number.into(),
            Err(_) => size::bytes(name, text)?.into(),
        },
        Type::Float => {
            let number: f64 =
                text.parse().map_err(|_| Failure::other(format!("{name}: '{text}' is no number")))?;
            json!(number)
        }
        Type::Ref(_) if text.is_empty() => tapio_model::NULL_REF.into(),
        Type::Ref(class) => find(&session.client, class, text)?.into(),
        Type::Enum(words) => {
            // They are printed with spaces.
            let typed = text.replace([' ', '-'], "_");
            let word = words.words.iter().find(|word| word.eq_ignore_ascii_case(&typed));
            let word = word.ok_or_else(|| {
                Failure::other(format!("{name}: '{text}' is none of {}", words.words.join(", ")))
            })?;
            (*word).into()
        }
        Type::Set(of) => {
            let members = text.split(',').map(str::trim).filter(|member| !member.is_empty());
            let members = members.map(|member| match of {
                Type::Ref(class) => Ok(find(&session.client, class, member)?.into()),
                _ => Ok(member.into()),
            });
            Value::Array(members.collect::<Result<_>>()?)
        }
        _ => text.into(),
    })
}

fn param_set(session: &Session, table: &'static Table, reference: &str) -> Result<()> {
    // Everything is looked at before anything is changed.
    let mut calls: Vec<(String, Vec<Value>)> = Vec::new();
    for (name, text) in session.arguments.filters().filter(|(name, _)| *name != "uuid") {
        let (field_name, key) = name.split_once(':').map_or((name, None), |(field, key)| (field, Some(key)));
        let column = table.column(field_name).ok_or_else(|| unknown_field(table, field_name))?;
        let (class, field) = settable(table, column)?;
        let call = |verb: &str| format!("{}.{verb}_{}", class.name, field.name);
        match (key, field.ty) {
            (Some(key), Type::Map(..)) => {
                calls.push((call("remove_from"), vec![reference.into(), key.into()]));
                calls.push((call("add_to"), vec![reference.into(), key.into(), text.into()]));
            }
            (Some(_), _) => return Err(Failure::other(format!("{field_name} is no map"))),
            (None, Type::Map(..)) => {
                return Err(Failure::other(format!("{field_name} is a map: give {field_name}:KEY=VALUE")));
            }
            (None, ty) => {
                let value = value_of(session, field_name, text, ty)?;
                calls.push((call("set"), vec![reference.into(), value]));
            }
        }
    }
    if calls.is_empty() {
        return Err(Failure::Missing("a field to set, as name-label=...".into()));
    }
    for (method, params) in calls {
        session.call(&method, &params)?;
    }
    Ok(())
}

fn param_add(session: &Session, table: &'static Table, reference: &str) -> Result<()> {
    let column = named_column(session, table)?;
    let (class, field) = settable(table, column)?;
    match field.ty {
        Type::Set(_) => {
            let member = session.need("param-key")?;
            session
                .call(&format!("{}.add_{}", class.name, field.name), &[reference.into(), member.into()])?;
        }
        Type::Map(..) => {
            let own = ["uuid", "param-name", "param-key"];
            let pairs: Vec<_> = session.arguments.filters().filter(|(name, _)| !own.contains(name)).collect();
            if pairs.is_empty() {
                return Err(Failure::Missing("a pair to add, as key=value".into()));
            }
            for (key, value) in pairs {
                let params = [reference.into(), key.into(), value.into()];
                session.call(&format!("{}.add_to_{}", class.name, field.name), &params)?;
            }
        }
        _ => {
            return Err(Failure::other(format!("{} is neither a set nor a map; use param-set", column.name)));
        }
    }
    Ok(())
}

fn param_remove(session: &Session, table: &'static Table, reference: &str) -> Result<()> {
    let column = named_column(session, table)?;
    let (class, field) = settable(table, column)?;
    let key = session.need("param-key")?;
    let verb = match field.ty {
        Type::Set(_) => "remove",
        Type::Map(..) => {
            let now = session.call(&format!("{}.get_{}", class.name, field.name), &[reference.into()])?;
            if now.get(key).is_none() {
                return Err(Failure::other(format!("Key {key} not found in map {}", column.name)));
            }
            "remove_from"
        }
        _ => {
            return Err(Failure::other(format!(
                "{} is neither a set nor a map; use param-clear",
                column.name
            )));
        }
    };
    session.call(&format!("{}.{verb}_{}", class.name, field.name), &[reference.into(), key.into()])?;
    Ok(())
}

fn param_clear(session: &Session, table: &'static Table, reference: &str) -> Result<()> {
    let column = named_column(session, table)?;
    let (class, field) = settable(table, column)?;
    let empty = match field.ty {
        Type::Set(_) => Value::Array(Vec::new()),
        Type::Map(..) => Value::Object(Map::new()),
        Type::String => "".into(),
        Type::Ref(_) => tapio_model::NULL_REF.into(),
        _ => return Err(Failure::other(format!("{} has no empty value; use param-set", column.name))),
    };
    session.call(&format!("{}.set_{}", class.name, field.name), &[reference.into(), empty])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_made_from_tables() {
        let parsed = |name: &str| parse(name).map(|(table, verb)| (table.name, verb));
        assert_eq!(parsed("sr-list"), Some(("sr", Verb::List)));
        assert_eq!(parsed("vdi-param-list"), Some(("vdi", Verb::ParamList)));
        assert_eq!(parsed("template-param-get"), Some(("template", Verb::ParamGet)));
        assert_eq!(parsed("sr-frob"), None);
        assert_eq!(parsed("nothing-list"), None);
        assert_eq!(parsed("-list"), None);
    }

    #[test]
    fn filters_match_fields_keys_and_members() {
        let table = tapio_model::columns::table("sr").expect("there");
        let fits = |name: &str, wanted: &str, text: &str, value: Value| {
            let cell = Cell { name: name.into(), qualifier: "", text: text.into(), value };
            Filter::new(table, name, wanted).expect("known").fits(&cell)
        };
        assert!(fits("type", "ext", "ext", json!("ext")) && !fits("type", "ext", "iso", json!("iso")));
        assert!(fits("other-config:a", "1", "a: 1", json!({"a": "1"})));
        assert!(!fits("other-config:b", "1", "a: 1", json!({"a": "1"})));
        assert!(fits("tags:contains", "x", "w, x", json!(["w", "x"])));
        assert!(!fits("tags:contains", "y", "w, x", json!(["w", "x"])));
        for (name, said) in
            [("tags:red", "tags is a set"), ("type:x", "type is no map"), ("uuid:contains", "no map")]
        {
            let refused = Filter::new(table, name, "true").expect_err(name);
            assert!(matches!(&refused, Failure::Other(text) if text.contains(said)), "{refused:?}");
        }
        let unknown = Filter::new(table, "colour", "red").expect_err("unknown");
        assert!(matches!(unknown, Failure::Other(text) if text.contains("Unknown field 'colour'")));
    }

    #[test]
    fn params_choose_columns() {
        let table = tapio_model::columns::table("sr").expect("there");
        assert_eq!(chosen(table, Some("uuid, type")).expect("good"), ["uuid", "type"]);
        assert_eq!(chosen(table, None).expect("good"), table.listed);
        assert_eq!(chosen(table, Some("all")).expect("good").len(), table.columns.len());
        assert!(chosen(table, Some("uuid,colour")).is_err());
    }
}
