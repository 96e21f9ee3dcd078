//! One object at one time.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{ApiError, Class, Initial, NULL_REF, Source, Value};
use uuid::Uuid;

/// Number of a change; what events' tokens are made of.
pub type Generation = u64;

/// One object at one time; never changes, a change makes a new one.
#[derive(Clone, Debug)]
pub struct Object {
    /// Its class.
    pub class: &'static Class,
    /// `OpaqueRef:<uuid>`.
    pub reference: String,
    /// Values of the class's fields in their order; of [`Source::Inverse`] fields nothing is held here.
    pub values: Vec<Value>,
    /// When it was made.
    pub created: Generation,
    /// When it, or what its inverse fields list, last changed.
    pub modified: Generation,
    /// Whether it has a row in the store.
    pub(crate) is_stored: bool,
    /// What its row holds that this version does not know, so that a newer one finds it again.
    pub(super) unknown: Option<Arc<serde_json::Map<String, serde_json::Value>>>,
    /// The commit that last wrote its row.
    pub(super) revision: tapio_store::Revision,
}

/// The reference of the object with this UUID.
pub fn reference_of(uuid: Uuid) -> String {
    format!("OpaqueRef:{uuid}")
}

impl Object {
    /// A new object: fields that are not named get their first value, a missing `uuid` is drawn.
    ///
    /// # Errors
    /// A required field is missing, one is unknown, or the UUID is none.
    pub(super) fn new(
        class: &'static Class,
        fields: &[(&str, Value)],
        is_stored: bool,
    ) -> Result<Self, ApiError> {
        if let Some((name, _)) = fields.iter().find(|(name, _)| class.field(name).is_none()) {
            return Err(ApiError::internal(format!("{} has no field {name}", class.name)));
        }
        let given =
            |name: &str| fields.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        let uuid = match given("uuid").as_ref().and_then(Value::as_str).filter(|text| !text.is_empty()) {
            Some(text) => {
                Uuid::parse_str(text).map_err(|_| ApiError::new("UUID_INVALID", [class.name, text]))?
            }
            None => Uuid::new_v4(),
        };
        let mut values = Vec::with_capacity(class.fields.len());
        for field in class.fields {
            values.push(match given(field.name) {
                _ if matches!(field.source, Source::Inverse(..)) => Value::Void,
                _ if field.name == "uuid" => Value::string(uuid.to_string()),
                Some(value) => value,
                None => {
                    let missing = || ApiError::new("FIELD_TYPE_ERROR", [field.name]);
                    field.initial.value(field.ty).ok_or_else(missing)?
                }
            });
        }
        Ok(Self {
            class,
            reference: reference_of(uuid),
            values,
            created: 0,
            modified: 0,
            is_stored,
            unknown: None,
            revision: 0,
        })
    }

    /// What a field holds when nothing is known of it; never fails.
    pub(crate) fn first_value(field: &tapio_model::Field) -> Value {
        if matches!(field.source, Source::Inverse(..)) {
            return Value::Void;
        }
        let first = field.initial.value(field.ty).or_else(|| Initial::Empty.value(field.ty));
        first.unwrap_or(Value::Void)
    }

    /// Where a field stands in `values`.
    pub(super) fn position(&self, field: &str) -> Option<usize> {
        self.class.fields.iter().position(|known| known.name == field)
    }

    /// The value of a field that is kept or volatile; [`Value::Void`] for any other name.
    pub fn get(&self, field: &str) -> &Value {
        self.position(field).and_then(|at| self.values.get(at)).unwrap_or(&Value::Void)
    }

    /// A field as text; empty where it is none.
    pub fn text(&self, field: &str) -> &str {
        self.get(field).as_str().unwrap_or_default()
    }

    /// Whether a field is this text, or a set with it.
    pub fn has_text(&self, field: &str, text: &str) -> bool {
        match self.get(field) {
            Value::Set(members) => members.iter().any(|member| member.as_str() == Some(text)),
            value => value.as_str().unwrap_or_default() == text,
        }
    }

    /// A field as a number; 0 where it is none.
    pub fn int(&self, field: &str) -> i64 {
        self.get(field).as_int().unwrap_or_default()
    }

    /// A field as a truth; false where it is none.
    pub fn bool(&self, field: &str) -> bool {
        self.get(field).as_bool().unwrap_or_default()
    }

    /// A field as a map of texts; empty where it is none.
    pub fn map(&self, field: &str) -> BTreeMap<String, String> {
        self.get(field).to_string_map()
    }

    /// Its UUID.
    ///
    /// # Errors
    /// The field holds something else: a defect of ours, or a damaged store.
    pub fn uuid(&self) -> Result<Uuid, ApiError> {
        let text = self.text("uuid");
        let told =
            |_| ApiError::internal(format!("{} {} has the uuid '{text}'", self.class.name, self.reference));
        Uuid::parse_str(text).map_err(told)
    }

    /// Whether a reference field names nothing.
    pub fn is_null(&self, field: &str) -> bool {
        let text = self.text(field);
        text.is_empty() || text == NULL_REF
    }
}
