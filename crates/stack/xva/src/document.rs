//! `ova.xml`: the records of a VM and of what belongs to it.

use std::collections::{BTreeMap, BTreeSet};

use tapio_model::Value;

use crate::error::{XvaError, shown};
use crate::{EXPORT_VERSION, value};

/// Which toolstack wrote an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Name of its host.
    pub hostname: String,
    /// Day of its build.
    pub date: String,
    /// As `Tapio`.
    pub product_brand: String,
    /// Version of the product.
    pub product_version: String,
    /// Number of the build.
    pub build_number: String,
    /// Version of the objects, the part before the dot.
    pub major: i64,
    /// Version of the objects, the part behind the dot.
    pub minor: i64,
}

/// An object. References in its record are ids of the archive.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// As `VM`.
    pub class: String,
    /// As `Ref:7`.
    pub id: String,
    /// Its fields; numbers and dates are text.
    pub record: BTreeMap<String, Value>,
}

impl Entry {
    /// A field that is text; empty where it is missing.
    pub fn text(&self, field: &str) -> &str {
        self.record.get(field).and_then(Value::as_str).unwrap_or_default()
    }

    /// A field that is a truth, however it is written; false where it is missing.
    pub fn bool(&self, field: &str) -> bool {
        match self.record.get(field) {
            Some(Value::Bool(truth)) => *truth,
            Some(Value::String(text)) => matches!(text.as_str(), "1" | "true"),
            _ => false,
        }
    }

    /// A field that is a number of bytes, or another that is not negative.
    pub fn number(&self, field: &str) -> Option<u64> {
        self.text(field).trim().parse().ok()
    }
}

/// All of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// What wrote it.
    pub version: Version,
    /// The objects, in the order of the archive.
    pub objects: Vec<Entry>,
}

impl Document {
    /// Reads it. Fields and classes that are not known stay in it.
    ///
    /// # Errors
    /// It is no XML-RPC, has no objects or two with one id, or is of another version of the archive.
    pub fn read(bytes: &[u8]) -> Result<Self, XvaError> {
        let wrong = |why: &str| XvaError::Wrong(format!("ova.xml: {why}"));
        let Value::Map(mut members) = value::read(bytes)? else {
            return Err(wrong("a struct of 'version' and 'objects' is expected"));
        };
        let told = members.remove("version").unwrap_or(Value::Void);
        let told = told.as_map().cloned().unwrap_or_default();
        let text = |name: &str| told.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let number = |name: &str| text(name).trim().parse::<i64>().ok();
        if let Some(export) = number("export_vsn").filter(|export| *export != EXPORT_VERSION) {
            let why = format!("archives of version {export} are not read: {EXPORT_VERSION} is");
            return Err(XvaError::Incompatible(why));
        }
        let version = Version {
            hostname: text("hostname"),
            date: text("date"),
            product_brand: text("product_brand"),
            product_version: text("product_version"),
            build_number: text("build_number"),
            major: number("xapi_major").unwrap_or_default(),
            minor: number("xapi_minor").unwrap_or_default(),
        };
        let Some(Value::Set(listed)) = members.remove("objects") else {
            return Err(wrong("there is no list of 'objects'"));
        };
        let (mut ids, mut objects) = (BTreeSet::new(), Vec::with_capacity(listed.len()));
        for object in listed {
            let Value::Map(mut fields) = object else { return Err(wrong("an object is no struct")) };
            let mut text = |name: &str| match fields.remove(name) {
                Some(Value::String(text)) if !text.is_empty() => Ok(text),
                _ => Err(wrong(&format!("an object has no '{name}'"))),
            };
            let (class, id) = (text("class")?, text("id")?);
            let Some(Value::Map(record)) = fields.remove("snapshot") else {
                return Err(wrong(&format!("object '{}' has no 'snapshot'", shown(&id))));
            };
            if !ids.insert(id.clone()) {
                return Err(wrong(&format!("there are two objects '{}'", shown(&id))));
            }
            objects.push(Entry { class, id, record });
        }
        Ok(Self { version, objects })
    }

    /// Writes it.
    pub fn write(&self) -> String {
        let Version { hostname, date, product_brand, product_version, build_number, major, minor } =
            &self.version;
        let version = [
            ("hostname", hostname.clone()),
            ("date", date.clone()),
            ("product_brand", product_brand.clone()),
            ("product_version", product_version.clone()),
            ("build_number", build_number.clone()),
            ("xapi_major", major.to_string()),
            ("xapi_minor", minor.to_string()),
            ("export_vsn", EXPORT_VERSION.to_string()),
        ];
        let objects = self.objects.iter().map(|entry| {
            let fields = [
                ("class", Value::string(&entry.class)),
                ("id", Value::string(&entry.id)),
                ("snapshot", Value::Map(entry.record.clone())),
            ];
            Value::Map(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
        });
        let all = [("version", Value::string_map(version)), ("objects", Value::Set(objects.collect()))];
        let mut out = String::from("<?xml version=\"1.0\"?>\n");
        value::push(
            &mut out,
            &Value::Map(all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
        );
        out
    }

    /// The objects of a class.
    pub fn of_class<'a>(&'a self, class: &'a str) -> impl Iterator<Item = &'a Entry> {
        self.objects.iter().filter(move |entry| entry.class == class)
    }

    /// An object.
    pub fn get(&self, class: &str, id: &str) -> Option<&Entry> {
        self.objects.iter().find(|entry| entry.id == id && entry.class == class)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version() -> Version {
        let text = |text: &str| text.to_owned();
        Version {
            hostname: text("here"),
            date: text("20261125"),
            product_brand: text("Tapio"),
            product_version: text("0.1.0"),
            build_number: text("0"),
            major: 2,
            minor: 21,
        }
    }

    #[test]
    fn a_document_is_read_as_it_was_written() {
        let record = [
            ("name_label", Value::string("a <VM> & \"more\"\n")),
            ("memory", Value::Int(1 << 40)),
            ("is_a_template", Value::Bool(true)),
            ("other_config", Value::string_map([("k", " v ")])),
            ("tags", Value::strings(["x", ""])),
            ("time", Value::DateTime(0)),
        ];
        let record: BTreeMap<_, _> =
            record.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let entry = Entry { class: "VM".to_owned(), id: "Ref:0".to_owned(), record };
        let document = Document { version: version(), objects: vec![entry] };
        let read = Document::read(document.write().as_bytes()).unwrap();
        assert_eq!(read.version, document.version);
        let vm = read.get("VM", "Ref:0").unwrap();
        assert_eq!(vm.text("name_label"), "a <VM> & \"more\"\n");
        assert_eq!((vm.number("memory"), vm.bool("is_a_template")), (Some(1 << 40), true));
        assert_eq!((vm.text("time"), &vm.record["tags"]), ("19700101T00:00:00Z", &Value::strings(["x", ""])));
        assert_eq!(vm.record["other_config"], Value::string_map([("k", " v ")]));
    }

    #[test]
    fn what_others_write_is_read() {
        let text = "<?xml version='1.0' encoding='UTF-8'?>\n<value><struct> <member><name>version</name><value/>\
            </member><member><name>objects</name><value><array><data><value><struct>\
            <member><name>class</name><value>VDI</value></member>\
            <member><name>id</name><value><string>Ref:007</string></value></member>\
            <member><name>snapshot</name><value><struct>\
            <member><name>virtual_size</name><value>1</value></member>\
            <member><name>n</name><value><i8>7</i8></value></member>\
            <member><name>read_only</name><value>1</value></member>\
            <member><name>x</name><value><nil/></value></member>\
            </struct></value></member></struct></value></data></array></value></member></struct></value>";
        let document = Document::read(text.as_bytes()).unwrap();
        let vdi = document.of_class("VDI").next().unwrap();
        assert_eq!(
            (vdi.id.as_str(), vdi.number("virtual_size"), vdi.number("n")),
            ("Ref:007", Some(1), Some(7))
        );
        assert!(vdi.bool("read_only"));
    }

    #[test]
    fn what_is_no_document_is_refused() {
        let object = |id: &str| {
            format!(
                "<value><struct><member><name>class</name><value>VM</value></member><member><name>id</name>\
                 <value>{id}</value></member><member><name>snapshot</name><value><struct/></value></member></struct></value>"
            )
        };
        let of = |objects: &str| {
            format!(
                "<value><struct><member><name>objects</name><value><array><data>{objects}</data></array></value></member></struct></value>"
            )
        };
        assert!(Document::read(of(&object("a")).as_bytes()).is_ok());
        for bad in [
            String::new(),
            "<value>".to_owned(),
            "<value>x</value>".to_owned(),
            "<!DOCTYPE x [<!ENTITY a 'b'>]><value/>".to_owned(),
            of(&(object("a") + &object("a"))),
            of(&object("")),
            "<value><array><data>".repeat(100),
        ] {
            assert!(Document::read(bad.as_bytes()).is_err(), "{bad}");
        }
        let old = "<value><struct><member><name>version</name><value><struct><member><name>export_vsn</name><value>1</value>\
            </member></struct></value></member></struct></value>";
        assert!(matches!(Document::read(old.as_bytes()), Err(XvaError::Incompatible(_))));
    }
}
