//! What readers see: the objects whose changes are durable, their indexes, and what happened to them when.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, LazyLock};

use tapio_model::{Class, Field, NULL_REF, Source, Type, Value};
use tapio_store::Revision;

use super::object::{Generation, Object};

/// Deleted objects that are remembered for listeners; an older token has lost events.
pub(super) const GONE_MAX: usize = 20_000;

/// Classes whose inverse fields list objects of class `.0` by field `.1`.
static LISTED_BY: LazyLock<HashMap<(&str, &str), Vec<&str>>> = LazyLock::new(|| {
    let mut listed: HashMap<(&str, &str), Vec<&str>> = HashMap::new();
    for class in tapio_model::CLASSES {
        for field in class.fields {
            if let Source::Inverse(of, by) = field.source {
                listed.entry((of, by)).or_default().push(class.name);
            }
        }
    }
    listed
});

/// An object that is no more.
#[derive(Clone, Debug)]
pub(super) struct Gone {
    pub(super) class: &'static Class,
    pub(super) reference: String,
    pub(super) created: Generation,
    pub(super) deleted: Generation,
    /// Whether it had a row in the store, and its end has one.
    pub(super) is_stored: bool,
}

/// A map from the text of a field to the references of the objects that hold it. References to nothing are not in it.
type Index = HashMap<String, BTreeSet<String>>;

#[derive(Debug)]
pub(super) struct Table {
    objects: BTreeMap<String, Arc<Object>>,
    /// By position of the field.
    indexes: Vec<(usize, Index)>,
    /// Objects that have no row in the store.
    volatile: usize,
}

impl Table {
    fn new(class: &'static Class) -> Self {
        let is_indexed = |field: &Field| refers(class.name, field) || field.name == "name_label";
        let indexes = class.fields.iter().enumerate().filter(|(_, field)| is_indexed(field));
        Self {
            objects: BTreeMap::new(),
            indexes: indexes.map(|(at, _)| (at, Index::new())).collect(),
            volatile: 0,
        }
    }
}

/// A row that belongs to no object: a journal's.
#[derive(Clone, Debug)]
pub(super) struct Note {
    pub(super) text: String,
    pub(super) revision: Revision,
}

#[derive(Debug, Default)]
pub(super) struct Tables {
    classes: HashMap<&'static str, Table>,
    /// When each object was last modified.
    by_time: BTreeSet<(Generation, &'static str, String)>,
    gone: BTreeMap<(Generation, &'static str, String), Gone>,
    /// Deletions up to here are forgotten.
    forgotten: Generation,
    /// The last change.
    pub(super) generation: Generation,
    /// The first change of this run of the daemon is later than this.
    pub(super) started: Generation,
    pub(super) notes: BTreeMap<String, Note>,
    /// Rows of deletions that were forgotten since the last commit.
    pub(super) forgotten_rows: Vec<String>,
}

/// Whether a field names objects, one or (if inverse fields list its class by it) several.
fn refers(class: &'static str, field: &Field) -> bool {
    match field.ty {
        Type::Ref(_) => true,
        Type::Set(Type::Ref(_)) => {
            matches!(field.source, Source::Kept) && LISTED_BY.contains_key(&(class, field.name))
        }
        _ => false,
    }
}

/// The texts of a field, or of its members; references to nothing are left out.
fn texts_at(object: &Object, at: usize) -> impl Iterator<Item = &str> {
    let values = match object.values.get(at) {
        Some(Value::Set(members)) => members,
        Some(value) => std::slice::from_ref(value),
        None => &[],
    };
    values.iter().filter_map(Value::as_str).filter(|text| !text.is_empty() && *text != NULL_REF)
}

/// The texts of a field that `object` has and `other` has not.
fn new_texts<'a>(object: &'a Object, other: Option<&'a Object>, at: usize) -> impl Iterator<Item = &'a str> {
    let is_known =
        move |text: &str| other.is_some_and(|other| texts_at(other, at).any(|known| known == text));
    texts_at(object, at).filter(move |text| !is_known(text))
}

/// Key of the row that remembers the end of an object.
pub(super) fn gone_key(gone: &Gone) -> String {
    format!("/gone/{:020}/{}/{}", gone.deleted, gone.class.name, super::rows::id_of(&gone.reference))
}

impl Tables {
    pub(super) fn get(&self, class: &str, reference: &str) -> Option<&Arc<Object>> {
        self.classes.get(class)?.objects.get(reference)
    }

    pub(super) fn all(&self, class: &str) -> impl Iterator<Item = &Arc<Object>> {
        self.classes.get(class).into_iter().flat_map(|table| table.objects.values())
    }

    pub(super) fn count(&self, class: &str) -> usize {
        self.classes.get(class).map_or(0, |table| table.objects.len())
    }

    pub(super) fn count_volatile(&self, class: &str) -> usize {
        self.classes.get(class).map_or(0, |table| table.volatile)
    }

    /// References by the text of an indexed field, in order; none where the field has no index, or the text is that
    /// of nothing.
    pub(super) fn indexed(&self, class: &'static Class, field: &str, text: &str) -> Option<Vec<String>> {
        let at = class.fields.iter().position(|known| known.name == field)?;
        if text.is_empty() || text == NULL_REF {
            return None;
        }
        let Some(table) = self.classes.get(class.name) else { return Some(Vec::new()) };
        let (_, index) = table.indexes.iter().find(|(of, _)| *of == at)?;
        Some(index.get(text).into_iter().flatten().cloned().collect())
    }

    /// The objects whose field is this text.
    pub(super) fn find(&self, class: &'static Class, field: &str, text: &str) -> Vec<Arc<Object>> {
        if field == "uuid" {
            let by_reference = self.get(class.name, &format!("OpaqueRef:{}", text.to_ascii_lowercase()));
            return by_reference.cloned().into_iter().collect();
        }
        match self.indexed(class, field, text) {
            Some(references) => {
                references.iter().filter_map(|of| self.get(class.name, of).cloned()).collect()
            }
            None => self.all(class.name).filter(|object| object.has_text(field, text)).cloned().collect(),
        }
    }

    /// Puts an object in, at this generation, and marks those that list it. `is_written` says that its row was
    /// written just now, and `object` knows by which commit.
    pub(super) fn put(&mut self, mut object: Arc<Object>, generation: Generation, is_written: bool) {
        let class = object.class;
        let before = self.get(class.name, &object.reference).cloned();
        {
            let object = Arc::make_mut(&mut object);
            object.modified = generation;
            object.created = before.as_ref().map_or(generation, |before| before.created);
            if let (false, Some(before)) = (is_written, &before) {
                object.revision = before.revision;
            }
        }
        self.insert(Arc::clone(&object), before.as_deref());
        for (at, field) in class.fields.iter().enumerate().filter(|(_, field)| refers(class.name, field)) {
            let was = before.iter().flat_map(|before| new_texts(before, Some(&object), at));
            for target in was.chain(new_texts(&object, before.as_deref(), at)) {
                self.touch_listing(class.name, field.name, target, generation);
            }
        }
    }

    /// Puts an object in as it is: at start.
    pub(super) fn insert(&mut self, object: Arc<Object>, before: Option<&Object>) {
        let class = object.class;
        let reference = &object.reference;
        if let Some(before) = before {
            self.by_time.remove(&(before.modified, class.name, reference.clone()));
        }
        self.by_time.insert((object.modified, class.name, reference.clone()));
        let table = self.classes.entry(class.name).or_insert_with(|| Table::new(class));
        for (at, index) in &mut table.indexes {
            for was in before.iter().flat_map(|before| new_texts(before, Some(&object), *at)) {
                remove_from(index, was, reference);
            }
            for is in new_texts(&object, before, *at) {
                index.entry(is.to_owned()).or_default().insert(reference.clone());
            }
        }
        if before.is_none() && !object.is_stored {
            table.volatile += 1;
        }
        table.objects.insert(reference.clone(), object);
    }

    /// Takes an object out.
    pub(super) fn remove(&mut self, class: &'static Class, reference: &str, generation: Generation) {
        let Some(table) = self.classes.get_mut(class.name) else { return };
        let Some(object) = table.objects.remove(reference) else { return };
        for (at, index) in &mut table.indexes {
            for was in texts_at(&object, *at) {
                remove_from(index, was, reference);
            }
        }
        if !object.is_stored {
            table.volatile = table.volatile.saturating_sub(1);
        }
        self.by_time.remove(&(object.modified, class.name, reference.to_owned()));
        self.note_gone(Gone {
            class,
            reference: reference.to_owned(),
            created: object.created,
            deleted: generation,
            is_stored: object.is_stored,
        });
        for (at, field) in class.fields.iter().enumerate().filter(|(_, field)| refers(class.name, field)) {
            for target in texts_at(&object, at) {
                self.touch_listing(class.name, field.name, target, generation);
            }
        }
    }

    /// Remembers an end, and forgets the oldest beyond [`GONE_MAX`].
    pub(super) fn note_gone(&mut self, gone: Gone) {
        self.gone.insert((gone.deleted, gone.class.name, gone.reference.clone()), gone);
        while self.gone.len() > GONE_MAX {
            let Some((_, oldest)) = self.gone.pop_first() else { break };
            self.forgotten = self.forgotten.max(oldest.deleted);
            if oldest.is_stored {
                self.forgotten_rows.push(gone_key(&oldest));
            }
        }
    }

    pub(super) fn forget_before(&mut self, generation: Generation) {
        self.forgotten = self.forgotten.max(generation);
    }

    pub(super) const fn forgotten(&self) -> Generation {
        self.forgotten
    }

    fn touch_listing(
        &mut self,
        class: &'static str,
        field: &'static str,
        target: &str,
        generation: Generation,
    ) {
        let Some(listing) = LISTED_BY.get(&(class, field)) else { return };
        for listing in listing {
            self.touch(listing, target, generation);
        }
    }

    /// Marks an object as changed although no value of it did.
    pub(super) fn touch(&mut self, class: &str, reference: &str, generation: Generation) -> bool {
        let Some(table) = self.classes.get_mut(class) else { return false };
        let Some(object) = table.objects.get_mut(reference) else { return false };
        if object.modified == generation {
            return true;
        }
        let class = object.class.name;
        self.by_time.remove(&(object.modified, class, reference.to_owned()));
        Arc::make_mut(object).modified = generation;
        self.by_time.insert((generation, class, reference.to_owned()));
        true
    }

    /// Objects modified after `after`, in order of time.
    pub(super) fn modified_after(&self, after: Generation) -> impl Iterator<Item = &Arc<Object>> {
        let from = (after.saturating_add(1), "", String::new());
        self.by_time.range(from..).filter_map(|(_, class, reference)| self.get(class, reference))
    }

    /// Objects deleted after `after`, in order of time.
    pub(super) fn gone_after(&self, after: Generation) -> impl Iterator<Item = &Gone> {
        self.gone.range((after.saturating_add(1), "", String::new())..).map(|(_, gone)| gone)
    }

    /// The record of an object, inverse fields filled in.
    pub(super) fn record(&self, object: &Object) -> Value {
        let pairs = object.class.fields.iter().zip(&object.values);
        Value::Map(
            pairs.map(|(field, value)| (field.name.to_owned(), self.value(object, field, value))).collect(),
        )
    }

    /// About as many bytes a record has as text.
    pub(super) fn record_len(&self, object: &Object) -> usize {
        /// Tags around a field, and its name.
        const AROUND: usize = 64;
        let fields = object.class.fields.iter().zip(&object.values);
        fields.map(|(field, value)| AROUND + self.field_len(object, field, value)).sum()
    }

    /// About as many bytes a field has as text.
    pub(super) fn field_len(&self, object: &Object, field: &Field, held: &Value) -> usize {
        /// A reference with its tags.
        const REFERENCE: usize = 80;
        let Source::Inverse(class, by) = field.source else { return text_len(held) };
        let table = self.classes.get(class);
        let indexes = table.into_iter().flat_map(|table| &table.indexes);
        let at = tapio_model::class(class)
            .and_then(|class| class.fields.iter().position(|known| known.name == by));
        let found =
            indexes.filter(|(of, _)| Some(*of) == at).filter_map(|(_, index)| index.get(&object.reference));
        found.map(|found| found.len()).sum::<usize>() * REFERENCE
    }

    /// The value of one field as records show it.
    pub(super) fn value(&self, object: &Object, field: &Field, held: &Value) -> Value {
        let Source::Inverse(class, by) = field.source else { return held.clone() };
        let Some(class) = tapio_model::class(class) else { return Value::Set(Vec::new()) };
        let found = self.indexed(class, by, &object.reference);
        Value::strings(found.unwrap_or_default())
    }
}

/// About as many bytes a value has as text.
fn text_len(value: &Value) -> usize {
    /// Tags around a value.
    const AROUND: usize = 34;
    AROUND
        + match value {
            Value::Void | Value::Bool(_) => 0,
            Value::Int(_) | Value::Float(_) | Value::DateTime(_) => 24,
            Value::String(text) => text.len(),
            Value::Set(members) => members.iter().map(text_len).sum(),
            Value::Map(pairs) => pairs.iter().map(|(key, value)| key.len() + AROUND + text_len(value)).sum(),
        }
}

fn remove_from(index: &mut Index, text: &str, reference: &str) {
    if let Some(references) = index.get_mut(text) {
        references.remove(reference);
        if references.is_empty() {
            index.remove(text);
        }
    }
}
