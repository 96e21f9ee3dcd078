//! Large answers, part by part.
//!
//! Records of ten thousand objects are megabytes as values and as text. They are not made when they are asked for but
//! while their client takes them: until then an answer holds the objects as they were (which all answers share, and
//! which never change), eight bytes each. What inverse fields list is read when a record is made: a record is of one
//! moment, and never older than the answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_model::{Answer, ApiError, Class, Field, ImpliedKind, Large, Part, Shape, Value};

use crate::args::Args;
use crate::db::{Db, Happening, Object, Operation};
use crate::generic;
use crate::sessions::Session;

/// Answers up to so many bytes of text are made at once.
const WHOLE_LEN_MAX: usize = 128 << 10;

/// What an object costs an answer that waits.
const HELD_LEN: usize = size_of::<Arc<Object>>();

/// What an event costs one.
const EVENT_HELD_LEN: usize = size_of::<Event>();

/// Text of an event beside its snapshot.
const EVENT_LEN: usize = 600;

/// The session that an answer is made for, and ends with; and where its parts are read.
#[derive(Clone)]
pub(crate) struct Reader {
    pub(crate) db: Arc<Db>,
    pub(crate) session: Arc<Session>,
}

impl Reader {
    fn check(&self) -> Result<(), ApiError> {
        if self.session.is_over() {
            return Err(ApiError::new("SESSION_INVALID", [self.session.reference.as_str()]));
        }
        Ok(())
    }

    /// An answer whose parts `make` makes of things.
    fn large<T: Send + 'static>(
        self,
        shape: Shape,
        things: Vec<T>,
        (len, part_len): (usize, usize),
        make: impl Fn(&Self, T) -> (String, Value) + Send + 'static,
    ) -> Result<Answer, ApiError> {
        let held_len = things.capacity() * size_of::<T>();
        let parts = things.into_iter().map(move |thing| -> Part {
            self.check()?;
            Ok(make(&self, thing))
        });
        let answer = Answer::Large(Large { shape, parts: Box::new(parts), held_len, part_len, len });
        if len <= WHOLE_LEN_MAX { answer.whole().map(Answer::Whole) } else { Ok(answer) }
    }

    /// Records by reference.
    pub(crate) fn records(self, mut objects: Vec<Arc<Object>>) -> Result<Answer, ApiError> {
        objects.sort_unstable_by(|one, other| one.reference.cmp(&other.reference));
        let len = self.db.text_len(&objects);
        self.large(Shape::Map, objects, len, |reader, object| {
            (object.reference.clone(), reader.db.record(&object))
        })
    }

    fn references(self, objects: Vec<Arc<Object>>) -> Result<Answer, ApiError> {
        let len = (objects.len() * 80, 80);
        self.large(Shape::List, objects, len, |_, object| (String::new(), Value::string(&object.reference)))
    }

    /// A record, field by field: one with maps of megabytes is not made at once either.
    fn record(self, object: &Arc<Object>) -> Result<Answer, ApiError> {
        let mut fields: Vec<&'static Field> = object.class.fields.iter().collect();
        fields.sort_unstable_by_key(|field| field.name);
        let len = self.db.text_len(std::slice::from_ref(object));
        let object = Arc::clone(object);
        self.large(Shape::Map, fields, len, move |reader, field| {
            (field.name.to_owned(), reader.db.value(&object, field.name).unwrap_or(Value::Void))
        })
    }

    /// The field of an object.
    fn field(self, object: Arc<Object>, field: &'static Field) -> Result<Answer, ApiError> {
        let len = self.db.field_len(&object, field.name);
        self.large(Shape::One, vec![object], (len, len), |reader, object| {
            (String::new(), reader.db.value(&object, field.name).unwrap_or(Value::Void))
        })
    }

    /// What a message of the table answers that only reads; none for the others.
    pub(crate) fn read(
        self,
        class: &'static Class,
        kind: ImpliedKind,
        args: &Args,
    ) -> Option<Result<Answer, ApiError>> {
        let db = &self.db;
        let read = || -> Result<Option<Answer>, ApiError> {
            Ok(Some(match kind {
                ImpliedKind::GetAll => self.clone().references(db.all(class.name))?,
                ImpliedKind::GetAllWhere => {
                    self.clone().references(generic::matching(db, class, args.text(0)?)?)?
                }
                ImpliedKind::GetAllRecords => self.clone().records(db.all(class.name))?,
                ImpliedKind::GetAllRecordsWhere => {
                    self.clone().records(generic::matching(db, class, args.text(0)?)?)?
                }
                ImpliedKind::GetRecord => self.clone().record(&db.get(class.name, args.text(0)?)?)?,
                ImpliedKind::Get(field) => self.clone().field(db.get(class.name, args.text(0)?)?, field)?,
                _ => return Ok(None),
            }))
        };
        read().transpose()
    }

    /// Events as the parts of `shape`.
    pub(crate) fn events(self, shape: Shape, happenings: Vec<Happening>) -> Result<Answer, ApiError> {
        let objects: Vec<Arc<Object>> =
            happenings.iter().filter_map(|happening| happening.object.clone()).collect();
        let (len, part_len) = self.db.text_len(&objects);
        drop(objects);
        let events: Vec<Event> = happenings.into_iter().map(Event::from).collect();
        let len = (len + events.len() * EVENT_LEN, part_len + EVENT_LEN);
        self.large(shape, events, len, |reader, event| {
            (String::new(), clients_event(&reader.db, event.into()))
        })
    }
}

/// A happening without what its object says again.
enum Event {
    Is(Operation, Arc<Object>),
    Gone(Box<Happening>),
}

impl From<Happening> for Event {
    fn from(happening: Happening) -> Self {
        match happening.object {
            // An object that changed has the moment of its last change.
            Some(object) if object.modified == happening.at => Self::Is(happening.operation, object),
            _ => Self::Gone(Box::new(happening)),
        }
    }
}

impl From<Event> for Happening {
    fn from(event: Event) -> Self {
        match event {
            Event::Gone(happening) => *happening,
            Event::Is(operation, object) => Self {
                operation,
                class: object.class,
                reference: object.reference.clone(),
                at: object.modified,
                object: Some(object),
            },
        }
    }
}

/// An event as clients see it.
fn clients_event(db: &Db, happening: Happening) -> Value {
    let operation = match happening.operation {
        Operation::Add => "add",
        Operation::Mod => "mod",
        Operation::Del => "del",
    };
    let uuid = happening.reference.strip_prefix("OpaqueRef:").unwrap_or_default();
    let mut pairs = BTreeMap::from([
        ("id".to_owned(), Value::string(happening.at.to_string())),
        ("timestamp".to_owned(), Value::string("0.0")),
        ("class".to_owned(), Value::string(happening.class.name.to_ascii_lowercase())),
        ("operation".to_owned(), Value::string(operation)),
        ("ref".to_owned(), Value::string(&happening.reference)),
        ("obj_uuid".to_owned(), Value::string(uuid)),
    ]);
    if let Some(object) = &happening.object {
        pairs.insert("snapshot".to_owned(), db.record(object));
    }
    Value::Map(pairs)
}

const _: () = assert!(HELD_LEN == 8 && EVENT_HELD_LEN <= 16, "what docs/design/api-limits.md says");
