//! Objects as rows of the store: one JSON object of the kept fields under `/class/UUID`.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json};
use tapio_model::{Class, Source, Type, Value};
use tapio_store::Row;

use super::object::{Generation, Object};

/// The member of a row that says when its object was made.
const CREATED: &str = "_created";

/// What stands after `OpaqueRef:` in a reference.
pub(super) fn id_of(reference: &str) -> &str {
    reference.strip_prefix("OpaqueRef:").unwrap_or(reference)
}

/// Prefix of the rows of a class.
pub(super) fn prefix_of(class: &Class) -> String {
    format!("/{}/", class.name.to_ascii_lowercase())
}

/// Key of an object's row.
pub(super) fn key_of(class: &Class, reference: &str) -> String {
    format!("{}{}", prefix_of(class), id_of(reference))
}

/// The row's value; `created` for an object that is new.
pub(super) fn encode(object: &Object, created: Generation) -> String {
    let mut members = members(object);
    members.insert(CREATED.to_owned(), Json::from(created));
    Json::Object(members).to_string()
}

/// When the object of a row was made; none where the row does not say.
pub(super) fn created(row: &Row) -> Option<Generation> {
    let Ok(Json::Object(members)) = serde_json::from_str::<Json>(row.value.as_deref()?) else { return None };
    members.get(CREATED)?.as_u64()
}

/// What is kept of an object, by field.
pub(super) fn members(object: &Object) -> Map<String, Json> {
    let mut members = object.unknown.as_deref().cloned().unwrap_or_default();
    for (field, value) in object.class.fields.iter().zip(&object.values) {
        if matches!(field.source, Source::Kept) {
            members.insert(field.name.to_owned(), to_json(value));
        }
    }
    members
}

/// The object of a row: fields of newer versions are kept aside, missing ones get their first value.
///
/// # Errors
/// The row is no JSON object, has no UUID that fits its key, or a field has a value of another type.
pub(super) fn decode(class: &'static Class, row: &Row) -> Result<Object, String> {
    let told = |why: &str| format!("row {} of the store {why}", row.key);
    let text = row.value.as_deref().ok_or_else(|| told("is empty"))?;
    let Ok(Json::Object(mut members)) = serde_json::from_str::<Json>(text) else {
        return Err(told("is no JSON object"));
    };
    let created = members.remove(CREATED).and_then(|created| created.as_u64()).unwrap_or(1).max(1);
    let mut values = Vec::with_capacity(class.fields.len());
    for field in class.fields {
        values.push(match field.source {
            Source::Kept => match members.remove(field.name) {
                Some(json) => from_json(&json, field.ty)
                    .ok_or_else(|| told(&format!("has another type in its member {}", field.name)))?,
                None => Object::first_value(field),
            },
            Source::Volatile | Source::Inverse(..) => Object::first_value(field),
        });
    }
    // A field of ours that is not kept, left by a version that did: this is no change for clients.
    members.retain(|name, _| class.field(name).is_none());
    let id = row.key.rsplit('/').next().unwrap_or_default();
    let object = Object {
        class,
        reference: format!("OpaqueRef:{id}"),
        values,
        created,
        modified: 0,
        is_stored: true,
        unknown: (!members.is_empty()).then(|| Arc::new(members)),
        revision: row.revision,
    };
    if object.position("uuid").is_some() && object.text("uuid") != id {
        return Err(told(&format!("says that its uuid is '{}'", object.text("uuid"))));
    }
    Ok(object)
}

pub(crate) fn to_json(value: &Value) -> Json {
    match value {
        Value::Void => Json::Null,
        Value::Bool(truth) => Json::Bool(*truth),
        Value::Int(number) | Value::DateTime(number) => Json::from(*number),
        // JSON has no infinity: a text stands for it.
        Value::Float(number) => serde_json::Number::from_f64(*number)
            .map_or_else(|| Json::String(number.to_string()), Json::Number),
        Value::String(text) => Json::String(text.clone()),
        Value::Set(members) => Json::Array(members.iter().map(to_json).collect()),
        Value::Map(pairs) => Json::Object(
            pairs.iter().map(|(key, value)| (key.clone(), to_json(value))).collect::<Map<_, _>>(),
        ),
    }
}

pub(crate) fn from_json(json: &Json, ty: Type) -> Option<Value> {
    Some(match (ty, json) {
        (Type::Void | Type::Option(_), Json::Null) => Value::Void,
        (Type::Option(inner), json) => from_json(json, *inner)?,
        (Type::Bool, Json::Bool(truth)) => Value::Bool(*truth),
        (Type::Int, Json::Number(number)) => Value::Int(number.as_i64()?),
        (Type::DateTime, Json::Number(number)) => Value::DateTime(number.as_i64()?),
        (Type::Float, Json::Number(number)) => Value::Float(number.as_f64()?),
        (Type::Float, Json::String(text)) => Value::Float(text.parse().ok()?),
        (Type::String | Type::Enum(_) | Type::Ref(_), Json::String(text)) => Value::String(text.clone()),
        (Type::Set(inner), Json::Array(members)) => {
            Value::Set(members.iter().map(|member| from_json(member, *inner)).collect::<Option<_>>()?)
        }
        (Type::Map(_, inner), Json::Object(pairs)) => {
            let pairs = pairs.iter().map(|(key, value)| Some((key.clone(), from_json(value, *inner)?)));
            Value::Map(pairs.collect::<Option<BTreeMap<_, _>>>()?)
        }
        (Type::Record(_) | Type::Any, json) => untyped(json),
        _ => return None,
    })
}

fn untyped(json: &Json) -> Value {
    match json {
        Json::Null => Value::Void,
        Json::Bool(truth) => Value::Bool(*truth),
        Json::Number(number) => {
            number.as_i64().map_or_else(|| Value::Float(number.as_f64().unwrap_or_default()), Value::Int)
        }
        Json::String(text) => Value::String(text.clone()),
        Json::Array(members) => Value::Set(members.iter().map(untyped).collect()),
        Json::Object(pairs) => {
            Value::Map(pairs.iter().map(|(key, value)| (key.clone(), untyped(value))).collect())
        }
    }
}
