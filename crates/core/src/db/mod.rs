//! The objects, in memory and in the store.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tapio_model::{ApiError, Class, NULL_REF, Source, Value};
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
    /// When it last changed.
    pub modified: Generation,
}

impl Object {
    /// The value of a field that is kept or volatile; [`Value::Void`] for any other name.
    pub fn get(&self, field: &str) -> &Value {
        let at = self.class.fields.iter().position(|known| known.name == field);
        at.and_then(|at| self.values.get(at)).unwrap_or(&Value::Void)
    }

    /// A field as text; empty where it is none.
    pub fn text(&self, field: &str) -> &str {
        self.get(field).as_str().unwrap_or_default()
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

#[derive(Debug, Default)]
struct Objects {
    classes: BTreeMap<&'static str, BTreeMap<String, Arc<Object>>>,
    generation: Generation,
}

/// All objects.
#[derive(Default)]
pub struct Db {
    objects: Mutex<Objects>,
    changed: Condvar,
}

impl fmt::Debug for Db {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Db").finish_non_exhaustive()
    }
}

/// Several changes that happen together or not at all; see [`Db::change`].
#[derive(Debug)]
pub struct Change<'a> {
    objects: MutexGuard<'a, Objects>,
    /// New objects; none for those that go.
    staged: BTreeMap<(&'static str, String), Option<Arc<Object>>>,
}

/// The reference of the object with this UUID.
pub fn reference_of(uuid: Uuid) -> String {
    format!("OpaqueRef:{uuid}")
}

fn class_named(name: &str) -> Result<&'static Class, ApiError> {
    tapio_model::class(name).ok_or_else(|| ApiError::internal(format!("there is no class {name}")))
}

impl Change<'_> {
    /// The object as this change sees it.
    ///
    /// # Errors
    /// `HANDLE_INVALID`.
    pub fn get(&self, class: &str, reference: &str) -> Result<Arc<Object>, ApiError> {
        let class = class_named(class)?;
        let gone = || ApiError::new("HANDLE_INVALID", [class.name, reference]);
        match self.staged.get(&(class.name, reference.to_owned())) {
            Some(staged) => staged.clone().ok_or_else(gone),
            None => self
                .objects
                .classes
                .get(class.name)
                .and_then(|all| all.get(reference))
                .cloned()
                .ok_or_else(gone),
        }
    }

    /// Makes an object: fields that are not named get their first value, a missing `uuid` is drawn. Answers the
    /// reference.
    ///
    /// # Errors
    /// A field is missing or unknown.
    pub fn create(&mut self, class: &str, fields: &[(&str, Value)]) -> Result<String, ApiError> {
        let class = class_named(class)?;
        let given =
            |name: &str| fields.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        let uuid = match given("uuid").as_ref().and_then(Value::as_str) {
            Some(text) => {
                Uuid::parse_str(text).map_err(|_| ApiError::new("UUID_INVALID", [class.name, text]))?
            }
            None => Uuid::new_v4(),
        };
        let mut values = Vec::with_capacity(class.fields.len());
        for field in class.fields {
            let value = match given(field.name) {
                _ if matches!(field.source, Source::Inverse(..)) => Value::Void,
                _ if field.name == "uuid" => Value::string(uuid.to_string()),
                Some(value) => value,
                None => {
                    let missing = || ApiError::new("FIELD_TYPE_ERROR", [field.name]);
                    field.initial.value(field.ty).ok_or_else(missing)?
                }
            };
            values.push(value);
        }
        let reference = reference_of(uuid);
        let generation = self.objects.generation + 1;
        let object =
            Object { class, reference: reference.clone(), values, created: generation, modified: generation };
        self.staged.insert((class.name, reference.clone()), Some(Arc::new(object)));
        Ok(reference)
    }

    /// Sets a field.
    ///
    /// # Errors
    /// `HANDLE_INVALID`, or there is no such field.
    pub fn set(
        &mut self,
        class: &str,
        reference: &str,
        field: &str,
        value: impl Into<Value>,
    ) -> Result<(), ApiError> {
        let mut object = Object::clone(&*self.get(class, reference)?);
        let at = object.class.fields.iter().position(|known| known.name == field);
        let at = at.ok_or_else(|| ApiError::internal(format!("{class} has no field {field}")))?;
        object.values[at] = value.into();
        object.modified = self.objects.generation + 1;
        self.staged.insert((object.class.name, reference.to_owned()), Some(Arc::new(object)));
        Ok(())
    }

    /// Removes an object.
    ///
    /// # Errors
    /// `HANDLE_INVALID`.
    pub fn destroy(&mut self, class: &str, reference: &str) -> Result<(), ApiError> {
        let object = self.get(class, reference)?;
        self.staged.insert((object.class.name, reference.to_owned()), None);
        Ok(())
    }

    /// The objects of a class as this change sees them.
    pub fn all(&self, class: &str) -> Vec<Arc<Object>> {
        let Some(class) = tapio_model::class(class) else { return Vec::new() };
        let mut all = self.objects.classes.get(class.name).cloned().unwrap_or_default();
        for ((of, reference), object) in &self.staged {
            if *of != class.name {
                continue;
            }
            match object {
                Some(object) => all.insert(reference.clone(), Arc::clone(object)),
                None => all.remove(reference),
            };
        }
        all.into_values().collect()
    }
}

impl Db {
    fn lock(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes several changes at once: when `make` answers with success they are all in the store, otherwise nothing
    /// changed. `make` sees its own changes, and nobody else's meanwhile; it must not block.
    ///
    /// # Errors
    /// What `make` answers, or the store's.
    pub fn change<T>(
        &self,
        make: impl FnOnce(&mut Change<'_>) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut change = Change { objects: self.lock(), staged: BTreeMap::new() };
        let answer = make(&mut change)?;
        let Change { mut objects, staged } = change;
        if !staged.is_empty() {
            objects.generation += 1;
        }
        for ((class, reference), object) in staged {
            let all = objects.classes.entry(class).or_default();
            match object {
                Some(object) => all.insert(reference, object),
                None => all.remove(&reference),
            };
        }
        drop(objects);
        self.changed.notify_all();
        Ok(answer)
    }

    /// An object.
    ///
    /// # Errors
    /// `HANDLE_INVALID`.
    pub fn get(&self, class: &str, reference: &str) -> Result<Arc<Object>, ApiError> {
        Change { objects: self.lock(), staged: BTreeMap::new() }.get(class, reference)
    }

    /// The objects of a class.
    pub fn all(&self, class: &str) -> Vec<Arc<Object>> {
        Change { objects: self.lock(), staged: BTreeMap::new() }.all(class)
    }

    /// The objects of a class whose field is this text (a reference, a name).
    pub fn find(&self, class: &str, field: &str, text: &str) -> Vec<Arc<Object>> {
        self.all(class).into_iter().filter(|object| object.text(field) == text).collect()
    }

    /// The object with this UUID.
    ///
    /// # Errors
    /// `UUID_INVALID`.
    pub fn by_uuid(&self, class: &str, uuid: &str) -> Result<Arc<Object>, ApiError> {
        let found = self.find(class, "uuid", uuid).into_iter().next();
        found.ok_or_else(|| ApiError::new("UUID_INVALID", [class, uuid]))
    }

    /// [`Change::create`] alone.
    ///
    /// # Errors
    /// As there.
    pub fn create(&self, class: &str, fields: &[(&str, Value)]) -> Result<String, ApiError> {
        self.change(|change| change.create(class, fields))
    }

    /// [`Change::set`] alone.
    ///
    /// # Errors
    /// As there.
    pub fn set(
        &self,
        class: &str,
        reference: &str,
        field: &str,
        value: impl Into<Value>,
    ) -> Result<(), ApiError> {
        self.change(|change| change.set(class, reference, field, value))
    }

    /// [`Change::destroy`] alone.
    ///
    /// # Errors
    /// As there.
    pub fn destroy(&self, class: &str, reference: &str) -> Result<(), ApiError> {
        self.change(|change| change.destroy(class, reference))
    }

    /// The number of the last change.
    pub fn generation(&self) -> Generation {
        self.lock().generation
    }

    /// Waits until something changes after `after`, or `until`; answers the number of the last change.
    pub fn wait(&self, after: Generation, until: Instant) -> Generation {
        let mut objects = self.lock();
        while objects.generation <= after {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                break;
            };
            objects = self.changed.wait_timeout(objects, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        objects.generation
    }

    /// The record of an object, inverse fields filled in.
    pub fn record(&self, object: &Object) -> Value {
        let mut record = BTreeMap::new();
        for (field, value) in object.class.fields.iter().zip(&object.values) {
            let value = match field.source {
                Source::Inverse(class, by) => Value::strings(
                    self.find(class, by, &object.reference).into_iter().map(|other| other.reference.clone()),
                ),
                Source::Kept | Source::Volatile => value.clone(),
            };
            record.insert(field.name.to_owned(), value);
        }
        Value::Map(record)
    }
}
