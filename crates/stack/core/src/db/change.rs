//! Several changes that happen together or not at all.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tapio_model::{ApiError, Class, Source, Value};

use super::object::Object;
use super::tables::Tables;

/// Class and reference.
pub(super) type Key = (&'static str, String);

/// What a change does to one object.
#[derive(Clone, Debug)]
pub(super) struct Staged {
    pub(super) class: &'static Class,
    /// What the change was made on.
    pub(super) base: Option<Arc<Object>>,
    /// None: it goes.
    pub(super) object: Option<Arc<Object>>,
    /// Whether the store must hear of it.
    pub(super) is_for_store: bool,
}

/// A change's view of what others began before it and is not durable yet.
pub(super) type Overlay = HashMap<Key, (u64, Option<Arc<Object>>)>;

/// Several changes that happen together or not at all; see [`super::Db::change`].
#[derive(Debug)]
pub struct Change<'a> {
    pub(super) tables: &'a Tables,
    pub(super) overlay: &'a Overlay,
    /// In order of keys, so that what happens together always happens in one order.
    pub(super) staged: BTreeMap<Key, Staged>,
    pub(super) notes: BTreeMap<String, Option<String>>,
    pub(super) touched: Vec<Key>,
    /// Whether it saw something that is not durable: then its own answer must wait for that.
    pub(super) saw_pending: Cell<bool>,
}

/// The class of this name.
///
/// # Errors
/// There is none: a defect of ours.
pub(super) fn class_named(name: &str) -> Result<&'static Class, ApiError> {
    tapio_model::class(name).ok_or_else(|| ApiError::internal(format!("there is no class {name}")))
}

pub(super) fn gone(class: &Class, reference: &str) -> ApiError {
    ApiError::new("HANDLE_INVALID", [class.name, reference])
}

impl<'a> Change<'a> {
    pub(super) fn new(tables: &'a Tables, overlay: &'a Overlay) -> Self {
        Self {
            tables,
            overlay,
            staged: BTreeMap::new(),
            notes: BTreeMap::new(),
            touched: Vec::new(),
            saw_pending: Cell::new(false),
        }
    }

    fn look(&self, class: &'static Class, reference: &str) -> Option<Arc<Object>> {
        let key = (class.name, reference.to_owned());
        if let Some(staged) = self.staged.get(&key) {
            return staged.object.clone();
        }
        if let Some((_, pending)) = self.overlay.get(&key) {
            self.saw_pending.set(true);
            return pending.clone();
        }
        self.tables.get(class.name, reference).cloned()
    }

    /// The object as this change sees it.
    ///
    /// # Errors
    /// `HANDLE_INVALID`.
    pub fn get(&self, class: &str, reference: &str) -> Result<Arc<Object>, ApiError> {
        let class = class_named(class)?;
        self.look(class, reference).ok_or_else(|| gone(class, reference))
    }

    /// The object with this UUID as this change sees it.
    ///
    /// # Errors
    /// `UUID_INVALID`.
    pub fn by_uuid(&self, class: &str, uuid: &str) -> Result<Arc<Object>, ApiError> {
        let class = class_named(class)?;
        let found = self.look(class, &format!("OpaqueRef:{}", uuid.to_ascii_lowercase()));
        found.ok_or_else(|| ApiError::new("UUID_INVALID", [class.name, uuid]))
    }

    /// Makes an object: fields that are not named get their first value, a missing `uuid` is drawn. Answers the
    /// reference. It has a row in the store when its class is persistent.
    ///
    /// # Errors
    /// A field is missing or unknown, `UUID_INVALID`; an object with this UUID is there already.
    pub fn create(&mut self, class: &str, fields: &[(&str, Value)]) -> Result<String, ApiError> {
        let class = class_named(class)?;
        self.make(class, fields, class.persistent)
    }

    /// [`Self::create`] of an object that goes with the daemon: the store never hears of it.
    ///
    /// # Errors
    /// As there.
    pub fn create_volatile(&mut self, class: &str, fields: &[(&str, Value)]) -> Result<String, ApiError> {
        self.make(class_named(class)?, fields, false)
    }

    fn make(
        &mut self,
        class: &'static Class,
        fields: &[(&str, Value)],
        is_stored: bool,
    ) -> Result<String, ApiError> {
        let object = Object::new(class, fields, is_stored)?;
        let reference = object.reference.clone();
        if self.look(class, &reference).is_some() {
            let what = format!("there is a {} with the uuid {} already", class.name, object.text("uuid"));
            return Err(ApiError::internal(what));
        }
        self.stage(class, &reference, Some(Arc::new(object)), is_stored);
        Ok(reference)
    }

    fn stage(
        &mut self,
        class: &'static Class,
        reference: &str,
        object: Option<Arc<Object>>,
        is_for_store: bool,
    ) {
        let key = (class.name, reference.to_owned());
        let base = || match self.overlay.get(&key) {
            Some((_, pending)) => pending.clone(),
            None => self.tables.get(class.name, reference).cloned(),
        };
        let staged = self.staged.entry(key.clone()).or_insert_with(|| Staged {
            class,
            base: base(),
            object: None,
            is_for_store: false,
        });
        staged.object = object;
        staged.is_for_store |= is_for_store;
    }

    /// Sets a field. The same value again is no change.
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
        let class = class_named(class)?;
        let mut object = self.look(class, reference).ok_or_else(|| gone(class, reference))?;
        let known = object.position(field).map(|at| (at, class.fields[at].source));
        let (at, source) =
            known.ok_or_else(|| ApiError::internal(format!("{} has no field {field}", class.name)))?;
        if matches!(source, Source::Inverse(..)) {
            let what = format!("{}.{field} follows from other objects and cannot be set", class.name);
            return Err(ApiError::internal(what));
        }
        let value = value.into();
        if object.values[at] == value {
            return Ok(());
        }
        Arc::make_mut(&mut object).values[at] = value;
        let is_for_store = object.is_stored && matches!(source, Source::Kept);
        self.stage(class, reference, Some(object), is_for_store);
        Ok(())
    }

    /// Removes an object.
    ///
    /// # Errors
    /// `HANDLE_INVALID`.
    pub fn destroy(&mut self, class: &str, reference: &str) -> Result<(), ApiError> {
        let object = self.get(class, reference)?;
        self.stage(object.class, reference, None, object.is_stored);
        Ok(())
    }

    /// Marks an object as changed although no field of it did, so that listeners hear of it.
    ///
    /// # Errors
    /// `HANDLE_INVALID`.
    pub fn touch(&mut self, class: &str, reference: &str) -> Result<(), ApiError> {
        let object = self.get(class, reference)?;
        self.touched.push((object.class.name, reference.to_owned()));
        Ok(())
    }

    /// The objects of a class as this change sees them.
    pub fn all(&self, class: &str) -> Vec<Arc<Object>> {
        let Some(class) = tapio_model::class(class) else { return Vec::new() };
        let durable =
            self.tables.all(class.name).map(|object| (object.reference.clone(), Arc::clone(object)));
        self.overlaid(class, durable.collect(), |_| true)
    }

    /// The objects of a class whose field is this text (a reference, a name), as this change sees them.
    pub fn find(&self, class: &str, field: &str, text: &str) -> Vec<Arc<Object>> {
        let Some(class) = tapio_model::class(class) else { return Vec::new() };
        let durable = self.tables.find(class, field, text);
        let durable = durable.into_iter().map(|object| (object.reference.clone(), object)).collect();
        self.overlaid(class, durable, |object| object.has_text(field, text))
    }

    fn overlaid(
        &self,
        class: &Class,
        mut found: BTreeMap<String, Arc<Object>>,
        fits: impl Fn(&Object) -> bool,
    ) -> Vec<Arc<Object>> {
        let mut lay = |reference: &String, object: &Option<Arc<Object>>| match object {
            Some(object) if fits(object) => {
                found.insert(reference.clone(), Arc::clone(object));
            }
            _ => {
                found.remove(reference);
            }
        };
        for ((of, reference), (_, object)) in self.overlay {
            if *of == class.name {
                self.saw_pending.set(true);
                lay(reference, object);
            }
        }
        for ((of, reference), staged) in &self.staged {
            if *of == class.name {
                lay(reference, &staged.object);
            }
        }
        found.into_values().collect()
    }

    /// Writes a row that belongs to no object, a journal's: `key` as `vdi-create/UUID`. It is in the store together
    /// with the rest of this change.
    pub fn put_note(&mut self, key: impl Into<String>, text: impl Into<String>) {
        self.notes.insert(key.into(), Some(text.into()));
    }

    /// Removes such a row; one that is not there is no error.
    pub fn drop_note(&mut self, key: impl Into<String>) {
        self.notes.insert(key.into(), None);
    }
}
