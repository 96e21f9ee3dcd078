//! All objects as one text, to be kept outside of the store.
//!
//! A line is a JSON object. The first says what this is; each of the others is one object of a class; the last counts
//! them and has the SHA-256 of all bytes before it, so that a text that was cut off or changed is known as such.
//!
//! ```text
//!   {"tapio_database":1,"version":"0.1.0","date":"20260101T12:00:00Z","pool":UUID,"hosts":[UUID, ...]}
//!   {"class":"VM","uuid":UUID,"fields":{"name_label":"a", ...}}
//!   {"end":true,"objects":1,"sha256":"..."}
//! ```
//!
//! Fields are those that the store keeps, with the values of its rows. Tasks, sessions and journals are of a run of the
//! daemon, and are not in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use sha2::{Digest, Sha256};
use tapio_model::{Class, NULL_REF, Source, Type, Value};
use tapio_store::{Row, Store};
use uuid::Uuid;

use super::{Db, Object, rows};
use crate::dates;
use crate::pool::version::Version;

/// Longest text that is read, in bytes.
pub const DUMP_LEN_MAX: usize = 256 << 20;

/// The version of the text.
const FORMAT: u64 = 1;

/// Oddities that are named; more are counted.
const ODD_MAX: usize = 100;

/// Classes whose objects belong to a run of the daemon.
const OF_RUNS: [&str; 2] = ["task", "session"];

/// All objects at one time.
#[derive(Clone, Debug)]
pub struct Dump {
    /// The version of Tapio that wrote it.
    pub version: String,
    /// When, as XenAPI writes it.
    pub date: String,
    /// In order of class and reference.
    pub objects: Vec<Arc<Object>>,
    /// What an undamaged database should not have: references to nothing, words that are none, fields of newer
    /// versions. A sentence each.
    pub odd: Vec<String>,
}

/// Fields of what is measured.
const MEASURED: [&str; 4] =
    ["physical_utilisation", "physical_size", "virtual_allocation", "metadata_latest"];

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    tapio_database: u64,
    version: String,
    date: String,
    pool: String,
    hosts: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    class: String,
    uuid: String,
    fields: Map<String, Json>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct End {
    end: bool,
    objects: usize,
    sha256: String,
}

/// Classes of a dump.
pub(super) fn classes() -> impl Iterator<Item = &'static Class> {
    let of_dump = |class: &&&'static Class| class.persistent && !OF_RUNS.contains(&class.name);
    tapio_model::CLASSES.iter().filter(of_dump).copied()
}

/// The SHA-256 of bytes, in hexadecimal.
pub(crate) fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn json(value: &impl Serialize) -> String {
    // Plain structures with text for keys: there is nothing that could fail.
    serde_json::to_string(value).unwrap_or_default()
}

fn end(body: &[u8], objects: usize) -> String {
    json(&End { end: true, objects, sha256: sum(body) }) + "\n"
}

/// Lines with the last line that makes them whole, for tests.
#[doc(hidden)]
pub fn sealed(body: &[u8]) -> Vec<u8> {
    let lines = body.split_inclusive(|byte| *byte == b'\n').count();
    [body, end(body, lines.saturating_sub(1)).as_bytes()].concat()
}

impl Db {
    /// All objects that are kept, as they are at one moment.
    pub fn dump(&self) -> Dump {
        let tables = self.read();
        let kept = |class: &'static Class| tables.all(class.name).filter(|object| object.is_stored).cloned();
        Dump::new(classes().flat_map(kept).collect())
    }
}

impl Dump {
    fn new(objects: Vec<Arc<Object>>) -> Self {
        let date = dates::format(dates::now());
        Self { version: Version::own().to_string(), date, objects, odd: Vec::new() }
    }

    /// All objects of a store that no daemon has open.
    ///
    /// # Errors
    /// The store's; a row that is not ours: a sentence.
    pub fn of_store(store: &dyn Store) -> Result<Self, String> {
        let mut objects = Vec::new();
        for class in classes() {
            for row in store.list(&rows::prefix_of(class)).map_err(|error| error.to_string())? {
                objects.push(Arc::new(rows::decode(class, &row)?));
            }
        }
        Ok(Self::new(objects))
    }

    /// Another one where other objects, or other fields of theirs, are kept; what is measured does not count.
    pub(crate) fn print(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for object in self.objects.iter().filter(|object| !object.class.name.ends_with("_metrics")) {
            let mut fields = rows::members(object);
            fields.retain(|field, _| !MEASURED.contains(&field.as_str()));
            let class = object.class.name.to_owned();
            let uuid = rows::id_of(&object.reference).to_owned();
            hash.update(json(&Line { class, uuid, fields }));
        }
        hash.finalize().into()
    }

    /// The objects of a class.
    pub fn of<'a>(&'a self, class: &'a str) -> impl Iterator<Item = &'a Arc<Object>> {
        self.objects.iter().filter(move |object| object.class.name == class)
    }

    /// The UUID of the pool; empty where there is none.
    pub fn pool(&self) -> &str {
        self.of("pool").next().map_or("", |pool| pool.text("uuid"))
    }

    /// The UUIDs of the hosts.
    pub fn hosts(&self) -> BTreeSet<&str> {
        self.of("host").map(|host| host.text("uuid")).collect()
    }

    /// Whether a newer version wrote it.
    pub fn is_newer(&self) -> bool {
        self.version.parse::<Version>().is_ok_and(|version| version > Version::own())
    }

    /// The text; see the module.
    pub fn text(&self) -> String {
        let hosts = self.hosts().into_iter().map(str::to_owned).collect();
        let (version, date) = (self.version.clone(), self.date.clone());
        let head = Head { tapio_database: FORMAT, version, date, pool: self.pool().to_owned(), hosts };
        let mut text = json(&head);
        text.push('\n');
        for object in &self.objects {
            let class = object.class.name.to_owned();
            let uuid = rows::id_of(&object.reference).to_owned();
            text.push_str(&json(&Line { class, uuid, fields: rows::members(object) }));
            text.push('\n');
        }
        let last = end(text.as_bytes(), self.objects.len());
        text + &last
    }

    /// Reads a text, all of it.
    ///
    /// # Errors
    /// A sentence with the line: it is no dump, is cut off or damaged, of another version of the text, or has what the
    /// object table does not.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > DUMP_LEN_MAX {
            return Err(format!("it is longer than {DUMP_LEN_MAX} bytes"));
        }
        let body = bytes.strip_suffix(b"\n").ok_or("it is cut off: its last line has no end")?;
        let cut = "it is cut off: there is no line that ends it";
        let before = body.iter().rposition(|byte| *byte == b'\n').ok_or(cut)? + 1;
        let (body, last) = body.split_at(before);
        let end: End = serde_json::from_slice(last).map_err(|_| cut)?;
        if !end.end || end.sha256 != sum(body) {
            return Err("it is damaged: its sum is another than its last line says".to_owned());
        }
        let text = std::str::from_utf8(body).map_err(|_| "it is damaged: it is no text")?;
        let mut lines = text.lines().zip(1_usize..);
        let (first, _) = lines.next().ok_or(cut)?;
        let head = read_head(first)?;
        let mut dump = Self { version: head.version, date: head.date, objects: Vec::new(), odd: Vec::new() };
        let mut known = BTreeSet::new();
        let mut odd = Oddities::default();
        for (line, number) in lines {
            let object = read_object(line, &mut odd).map_err(|why| format!("line {number}: {why}"))?;
            if !known.insert((object.class.name, object.reference.clone())) {
                return Err(format!(
                    "line {number}: the {} {} is there twice",
                    object.class.name, object.reference
                ));
            }
            dump.objects.push(Arc::new(object));
        }
        if dump.objects.len() != end.objects {
            let (there, said) = (dump.objects.len(), end.objects);
            return Err(format!("it is damaged: it has {there} objects, and its last line says {said}"));
        }
        if dump.of("pool").count() != 1 || head.pool != dump.pool() {
            return Err(format!("it does not have the pool {} of its first line, and that alone", head.pool));
        }
        if head.hosts.is_empty()
            || head.hosts.iter().map(String::as_str).collect::<BTreeSet<_>>() != dump.hosts()
        {
            return Err("it does not have the hosts of its first line, and those alone".to_owned());
        }
        for object in &dump.objects {
            look_at_references(object, &known, &mut odd);
        }
        dump.objects.sort_by_cached_key(|object| (position(object.class), object.reference.clone()));
        dump.odd = odd.told();
        Ok(dump)
    }
}

fn position(class: &Class) -> usize {
    tapio_model::CLASSES.iter().position(|known| known.name == class.name).unwrap_or(usize::MAX)
}

fn read_head(line: &str) -> Result<Head, String> {
    let known: BTreeMap<String, Json> =
        serde_json::from_str(line).map_err(|_| "line 1: it is no dump of a database of Tapio")?;
    match known.get("tapio_database").and_then(Json::as_u64) {
        Some(FORMAT) => {}
        Some(other) => {
            return Err(format!(
                "line 1: the text is of version {other}, and this Tapio reads {FORMAT} alone"
            ));
        }
        None => return Err("line 1: it is no dump of a database of Tapio".to_owned()),
    }
    let head: Head = serde_json::from_str(line).map_err(|error| format!("line 1: {error}"))?;
    head.version.parse::<Version>().map_err(|why| format!("line 1: {why}"))?;
    dates::parse(&head.date).ok_or_else(|| format!("line 1: '{}' is no date", head.date))?;
    Ok(head)
}

/// What an object should not have.
#[derive(Default)]
struct Oddities {
    named: Vec<String>,
    more: usize,
}

impl Oddities {
    fn note(&mut self, what: impl FnOnce() -> String) {
        if self.named.len() < ODD_MAX { self.named.push(what()) } else { self.more += 1 }
    }

    fn told(mut self) -> Vec<String> {
        if self.more > 0 {
            self.named.push(format!("{} more of this kind", self.more));
        }
        self.named
    }
}

fn read_object(line: &str, odd: &mut Oddities) -> Result<Object, String> {
    let Line { class: name, uuid, fields } = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let class = classes().find(|class| class.name == name);
    let class = class.ok_or_else(|| format!("no objects of the class '{name}' are kept here"))?;
    if Uuid::parse_str(&uuid).map(|uuid| uuid.to_string()).as_deref() != Ok(uuid.as_str()) {
        return Err(format!("'{uuid}' is no UUID of a {name}"));
    }
    for field in fields.keys() {
        match class.field(field) {
            Some(field) if !matches!(field.source, Source::Kept) => {
                return Err(format!("the field {name}.{} is not kept", field.name));
            }
            Some(_) => {}
            None if field.starts_with('_') => return Err(format!("there is no field {name}.{field}")),
            None => odd.note(|| format!("{name} {uuid}: this version knows no field {field}")),
        }
    }
    let missing = class.fields.iter().find(|field| {
        matches!(field.source, Source::Kept)
            && field.initial.value(field.ty).is_none()
            && !fields.contains_key(field.name)
    });
    if let Some(missing) = missing {
        return Err(format!("the {name} {uuid} has no {}", missing.name));
    }
    let key = format!("{}{uuid}", rows::prefix_of(class));
    let row = Row { key, value: Some(Json::Object(fields).to_string()), revision: 0 };
    let object = rows::decode(class, &row)?;
    for (field, value) in class.fields.iter().zip(&object.values) {
        let is_kept = matches!(field.source, Source::Kept);
        if let (true, Type::Enum(known), Some(word)) = (is_kept, field.ty, value.as_str())
            && !known.words.contains(&word)
        {
            odd.note(|| format!("{name} {uuid}: {} is '{word}', which is no {}", field.name, known.name));
        }
    }
    Ok(object)
}

/// Calls `found` with the class and the text of each reference in a value.
fn references(value: &Value, ty: Type, found: &mut dyn FnMut(&'static str, &str)) {
    match (value, ty) {
        (Value::String(text), Type::Ref(class)) if !text.is_empty() && text != NULL_REF => found(class, text),
        (Value::Set(members), Type::Set(inner)) => {
            members.iter().for_each(|member| references(member, *inner, found));
        }
        (Value::Map(pairs), Type::Map(key_ty, inner)) => {
            for (key, value) in pairs {
                references(&Value::String(key.clone()), *key_ty, found);
                references(value, *inner, found);
            }
        }
        (value, Type::Option(inner)) => references(value, *inner, found),
        _ => {}
    }
}

fn look_at_references(object: &Object, known: &BTreeSet<(&'static str, String)>, odd: &mut Oddities) {
    let of = object.class;
    for (field, value) in of.fields.iter().zip(&object.values) {
        if !matches!(field.source, Source::Kept) {
            continue;
        }
        references(value, field.ty, &mut |class, text| {
            let is_of_run = OF_RUNS.contains(&class);
            if !is_of_run && !known.contains(&(class, text.to_owned())) {
                let id = rows::id_of(&object.reference);
                odd.note(|| {
                    format!("{} {id}: {} names a {class} that is not there: {text}", of.name, field.name)
                });
            }
        });
    }
}
