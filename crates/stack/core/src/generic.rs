//! Messages that the object table itself answers: records, getters, setters, queries.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, Class, Field, ImpliedKind, Initial, NULL_REF, Type, Value};

use crate::args::Args;
use crate::db::{Change, Db, Object};
use crate::{check, query};

/// Name, type and default of each parameter.
type Params = Vec<(&'static str, Type, Option<Initial>)>;

/// Parameters, result and a sentence for people of such a message.
pub(crate) fn shape(class: &'static Class, kind: ImpliedKind) -> (Params, Type, &'static str) {
    let this = ("self", Type::Ref(class.name), None);
    let value = |ty: Type| ("value", ty, None);
    let key = ("key", Type::String, None);
    match kind {
        ImpliedKind::GetAll => (vec![], Type::Set(&Type::String), "References of all objects"),
        ImpliedKind::GetAllRecords => {
            (vec![], Type::Map(&Type::String, &Type::Any), "Records of all objects")
        }
        ImpliedKind::GetAllWhere => (
            vec![("expr", Type::String, None)],
            Type::Set(&Type::String),
            "References where an expression holds",
        ),
        ImpliedKind::GetAllRecordsWhere => {
            let params = vec![("expr", Type::String, None)];
            (params, Type::Map(&Type::String, &Type::Any), "Records where an expression holds")
        }
        ImpliedKind::GetByUuid => {
            (vec![("uuid", Type::String, None)], Type::Ref(class.name), "The reference of a UUID")
        }
        ImpliedKind::GetByNameLabel => (
            vec![("label", Type::String, None)],
            Type::Set(&Type::String),
            "References of the objects of a name",
        ),
        ImpliedKind::GetRecord => (vec![this], Type::Record(class.name), "All fields of an object"),
        ImpliedKind::Create => {
            (vec![("args", Type::Any, None)], Type::Ref(class.name), "Makes an object from a record")
        }
        ImpliedKind::Destroy => (vec![this], Type::Void, "Removes an object"),
        ImpliedKind::Get(field) => (vec![this], field.ty, field.doc),
        ImpliedKind::Set(field) => (vec![this, value(field.ty)], Type::Void, field.doc),
        ImpliedKind::AddTo(field) => {
            let inner = if let Type::Map(_, inner) = field.ty { *inner } else { Type::String };
            (vec![this, key, value(inner)], Type::Void, field.doc)
        }
        ImpliedKind::RemoveFrom(field) => (vec![this, key], Type::Void, field.doc),
        ImpliedKind::Add(field) | ImpliedKind::Remove(field) => {
            let inner = if let Type::Set(inner) = field.ty { *inner } else { Type::String };
            (vec![this, value(inner)], Type::Void, field.doc)
        }
    }
}

/// Does it. For `create` the record is checked here, also for handlers: see [`prepare_create`].
pub(crate) fn run(db: &Db, class: &'static Class, kind: ImpliedKind, args: &Args) -> Result<Value, ApiError> {
    let set =
        |objects: Vec<Arc<Object>>| Value::strings(objects.iter().map(|object| object.reference.clone()));
    match kind {
        ImpliedKind::GetAll => Ok(set(db.all(class.name))),
        ImpliedKind::GetAllRecords => Ok(records(db, db.all(class.name))),
        ImpliedKind::GetAllWhere => Ok(set(matching(db, class, args.text(0)?)?)),
        ImpliedKind::GetAllRecordsWhere => Ok(records(db, matching(db, class, args.text(0)?)?)),
        ImpliedKind::GetByUuid => Ok(Value::string(&db.by_uuid(class.name, args.text(0)?)?.reference)),
        ImpliedKind::GetByNameLabel => Ok(set(db.find(class.name, "name_label", args.text(0)?))),
        ImpliedKind::GetRecord => Ok(db.record(&*db.get(class.name, args.text(0)?)?)),
        ImpliedKind::Get(field) => {
            let object = db.get(class.name, args.text(0)?)?;
            db.value(&object, field.name)
                .ok_or_else(|| ApiError::internal(format!("no field {}", field.name)))
        }
        ImpliedKind::Create => create(db, class, args.value(0)?),
        ImpliedKind::Destroy => db.destroy(class.name, args.text(0)?).map(|()| Value::Void),
        ImpliedKind::Set(field) => edit(db, class, field, args, |change, _| {
            exists(change, field.ty, args.value(1)?)?;
            Ok(Some(args.value(1)?.clone()))
        }),
        ImpliedKind::AddTo(field) => {
            let (key, value) = (args.text(1)?, args.value(2)?);
            edit(db, class, field, args, |_, now| {
                let mut pairs = now.as_map().cloned().unwrap_or_default();
                if pairs.contains_key(key) {
                    let what = [class.name, field.name, args.text(0)?, key];
                    return Err(ApiError::new("MAP_DUPLICATE_KEY", what));
                }
                pairs.insert(key.to_owned(), value.clone());
                Ok(Some(Value::Map(pairs)))
            })
        }
        ImpliedKind::RemoveFrom(field) => {
            let key = args.text(1)?;
            edit(db, class, field, args, |_, now| {
                let mut pairs = now.as_map().cloned().unwrap_or_default();
                Ok(pairs.remove(key).map(|_| Value::Map(pairs)))
            })
        }
        ImpliedKind::Add(field) => {
            let value = args.value(1)?;
            edit(db, class, field, args, |_, now| {
                let mut members = now.as_set().unwrap_or_default().to_vec();
                let is_new = !members.contains(value);
                members.push(value.clone());
                Ok(is_new.then_some(Value::Set(members)))
            })
        }
        ImpliedKind::Remove(field) => {
            let value = args.value(1)?;
            edit(db, class, field, args, |_, now| {
                let members = now.as_set().unwrap_or_default();
                let left = members.iter().filter(|member| *member != value).cloned();
                Ok(Some(Value::Set(left.collect())))
            })
        }
    }
}

/// Changes one field by what it is now; none leaves it.
fn edit(
    db: &Db,
    class: &'static Class,
    field: &Field,
    args: &Args,
    make: impl FnOnce(&Change<'_>, &Value) -> Result<Option<Value>, ApiError>,
) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    db.change(|change| {
        let object = change.get(class.name, reference)?;
        match make(change, object.get(field.name))? {
            Some(value) => change.set(class.name, reference, field.name, value),
            None => Ok(()),
        }
    })?;
    Ok(Value::Void)
}

/// What a reference names must be there.
fn exists(change: &Change<'_>, ty: Type, value: &Value) -> Result<(), ApiError> {
    match (ty, value.as_str()) {
        (Type::Ref(class), Some(reference))
            if reference != NULL_REF && tapio_model::class(class).is_some() =>
        {
            change.get(class, reference).map(drop)
        }
        _ => Ok(()),
    }
}

/// The checked record of a `create`, for its handler or for [`run`].
///
/// # Errors
/// A field is missing or has another type.
pub(crate) fn prepare_create(class: &'static Class, args: Args) -> Result<Args, ApiError> {
    let record = args.0.into_iter().next().unwrap_or(Value::Void);
    Ok(Args(vec![check::constructor(class, record)?]))
}

fn create(db: &Db, class: &'static Class, record: &Value) -> Result<Value, ApiError> {
    let fields: Vec<(&str, Value)> =
        record.as_map().into_iter().flatten().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let made = db.change(|change| {
        for (name, value) in &fields {
            if let Some(field) = class.field(name) {
                exists(change, field.ty, value)?;
            }
        }
        change.create(class.name, &fields)
    });
    made.map(Value::String)
}

pub(crate) fn records(db: &Db, objects: Vec<Arc<Object>>) -> Value {
    let pairs = objects.iter().map(|object| (object.reference.clone(), db.record(object)));
    Value::Map(pairs.collect::<BTreeMap<_, _>>())
}

/// The objects for which an expression holds.
pub(crate) fn matching(db: &Db, class: &'static Class, expr: &str) -> Result<Vec<Arc<Object>>, ApiError> {
    let expr = query::parse(class, expr)?;
    let mut objects = match expr.needs() {
        Some((field, text)) if is_indexed(class, field) => db.find(class.name, field, text),
        _ => db.all(class.name),
    };
    objects.retain(|object| {
        expr.holds(&|field| match field {
            "_ref" => object.reference.clone(),
            field => db.value(object, field).map(|value| query::text_of(&value)).unwrap_or_default(),
        })
    });
    Ok(objects)
}

fn is_indexed(class: &Class, field: &str) -> bool {
    matches!(field, "uuid" | "name_label")
        || class.field(field).is_some_and(|field| matches!(field.ty, Type::Ref(_)))
}
