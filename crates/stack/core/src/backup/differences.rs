//! What a dump would change.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use tapio_model::Source;

use crate::db::{Dump, Object};

/// An object, as people know it.
#[derive(Debug, Serialize)]
pub(super) struct Named {
    class: &'static str,
    uuid: String,
    /// Empty where its class has no names.
    name: String,
    /// The fields that change.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    fields: Vec<&'static str>,
}

/// What becomes other.
#[derive(Debug, Default, Serialize)]
pub(super) struct Differences {
    /// Objects that the dump has alone.
    pub(super) comes: Vec<Named>,
    /// Objects that the dump does not have.
    pub(super) goes: Vec<Named>,
    /// Objects of both.
    pub(super) changes: Vec<Named>,
    /// How many of both are equal.
    pub(super) same: usize,
}

fn named(object: &Object, fields: Vec<&'static str>) -> Named {
    Named {
        class: object.class.name,
        uuid: object.text("uuid").to_owned(),
        name: object.text("name_label").to_owned(),
        fields,
    }
}

/// Kept fields that differ.
fn fields(now: &Object, then: &Object) -> Vec<&'static str> {
    let pairs = now.class.fields.iter().zip(now.values.iter().zip(&then.values));
    let differs = pairs.filter(|(field, (now, then))| matches!(field.source, Source::Kept) && now != then);
    differs.map(|(field, _)| field.name).collect()
}

/// What a database that is `now` becomes by the dump `then`.
pub(super) fn between(now: &Dump, then: &Dump) -> Differences {
    let key = |object: &Arc<Object>| (object.class.name, object.reference.clone());
    let mut known: BTreeMap<_, _> = now.objects.iter().map(|object| (key(object), object)).collect();
    let mut found = Differences::default();
    for object in &then.objects {
        match known.remove(&key(object)) {
            None => found.comes.push(named(object, Vec::new())),
            Some(before) => match fields(before, object) {
                fields if fields.is_empty() => found.same += 1,
                fields => found.changes.push(named(before, fields)),
            },
        }
    }
    found.goes = known.values().map(|object| named(object, Vec::new())).collect();
    found
}
