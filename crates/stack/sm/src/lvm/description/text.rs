//! The language of LVM's descriptions: `name = value` and `name { ... }`, `lib/config/config.c` of LVM2.
//!
//! A value is a number, a text between quotation marks, or a list of them between brackets. What follows a `#` is a
//! comment.

use std::collections::BTreeMap;

/// Sections within sections; LVM has four.
const DEPTH_MAX: usize = 8;

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Number(u64),
    Text(String),
    List(Vec<Value>),
}

/// What is between braces, or the whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Section<'a> {
    values: BTreeMap<&'a str, Value>,
    pub(super) sections: Vec<(&'a str, Section<'a>)>,
}

impl<'a> Section<'a> {
    /// The only section of a name.
    ///
    /// # Errors
    /// A sentence: there is none, or more than one.
    pub(super) fn section(&self, name: &str) -> Result<&Section<'a>, String> {
        let mut all = self.sections.iter().filter(|(found, _)| *found == name);
        match (all.next(), all.next()) {
            (Some((_, section)), None) => Ok(section),
            _ => Err(format!("it has not one section '{name}'")),
        }
    }

    /// # Errors
    /// A sentence: there is no such number.
    pub(super) fn number(&self, name: &str) -> Result<u64, String> {
        match self.values.get(name) {
            Some(Value::Number(number)) => Ok(*number),
            _ => Err(format!("it has no number '{name}'")),
        }
    }

    /// # Errors
    /// A sentence: there is no such text.
    pub(super) fn text(&self, name: &str) -> Result<&str, String> {
        match self.values.get(name) {
            Some(Value::Text(text)) => Ok(text),
            _ => Err(format!("it has no text '{name}'")),
        }
    }

    /// # Errors
    /// A sentence: there is no such list.
    pub(super) fn list(&self, name: &str) -> Result<&[Value], String> {
        match self.values.get(name) {
            Some(Value::List(values)) => Ok(values),
            _ => Err(format!("it has no list '{name}'")),
        }
    }

    /// A list of texts; an empty one where there is none of that name.
    ///
    /// # Errors
    /// A sentence: it is something else.
    pub(super) fn texts(&self, name: &str) -> Result<Vec<&str>, String> {
        if !self.values.contains_key(name) {
            return Ok(Vec::new());
        }
        let of = |value: &'_ Value| match value {
            Value::Text(_) => Ok(()),
            _ => Err(format!("'{name}' is no list of texts")),
        };
        let list = self.list(name)?;
        list.iter().try_for_each(of)?;
        Ok(list
            .iter()
            .filter_map(|value| if let Value::Text(text) = value { Some(&**text) } else { None })
            .collect())
    }
}

/// Reads on from where it is.
struct Reader<'a>(&'a str);

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+' | '/')
}

impl<'a> Reader<'a> {
    fn skip(&mut self) {
        loop {
            self.0 = self.0.trim_start_matches(|c: char| c.is_ascii_whitespace() || c == '\0');
            let Some(comment) = self.0.strip_prefix('#') else { return };
            self.0 = comment.find('\n').map_or("", |end| &comment[end..]);
        }
    }

    /// Whether `c` comes next, which is passed then.
    fn takes(&mut self, c: char) -> bool {
        self.skip();
        let rest = self.0.strip_prefix(c);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn needs(&mut self, c: char) -> Result<(), String> {
        if self.takes(c) { Ok(()) } else { Err(format!("'{c}' is missing before '{:.20}'", self.0)) }
    }

    fn name(&mut self) -> Result<&'a str, String> {
        self.skip();
        let end = self.0.find(|c| !is_of_name(c)).unwrap_or(self.0.len());
        let (name, rest) = self.0.split_at(end);
        self.0 = rest;
        if name.is_empty() { Err(format!("no name before '{:.20}'", self.0)) } else { Ok(name) }
    }

    fn single(&mut self) -> Result<Value, String> {
        if !self.takes('"') {
            let digits = self.name()?;
            return digits.parse().map(Value::Number).map_err(|_| format!("'{digits}' is no number"));
        }
        let mut text = String::new();
        let mut chars = self.0.char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.0 = &self.0[at + 1..];
                    return Ok(Value::Text(text));
                }
                '\\' => text.extend(chars.next().map(|(_, c)| c)),
                c => text.push(c),
            }
        }
        Err("a text does not end".into())
    }

    fn value(&mut self) -> Result<Value, String> {
        if !self.takes('[') {
            return self.single();
        }
        let mut all = Vec::new();
        while !self.takes(']') {
            if !all.is_empty() {
                self.needs(',')?;
            }
            all.push(self.single()?);
        }
        Ok(Value::List(all))
    }

    /// Up to the end of the text, or to the brace that ends the section.
    fn section(&mut self, depth: usize) -> Result<Section<'a>, String> {
        if depth > DEPTH_MAX {
            return Err("sections lie too deep in others".into());
        }
        let mut section = Section::default();
        loop {
            self.skip();
            if self.0.is_empty() || self.0.starts_with('}') {
                return Ok(section);
            }
            let name = self.name()?;
            if self.takes('{') {
                let inner = self.section(depth + 1)?;
                self.needs('}')?;
                section.sections.push((name, inner));
            } else {
                self.needs('=')?;
                let value = self.value()?;
                if section.values.insert(name, value).is_some() {
                    return Err(format!("'{name}' is there twice"));
                }
            }
        }
    }
}

/// Reads a description.
///
/// # Errors
/// A sentence: it is none.
pub(super) fn parse(text: &str) -> Result<Section<'_>, String> {
    let mut reader = Reader(text);
    let section = reader.section(0)?;
    if reader.0.is_empty() { Ok(section) } else { Err("a brace ends nothing".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lvm_writes_is_read_and_what_it_does_not_is_refused() {
        let said = "# x {\ncontents = \"a \\\"b\\\" \\\\\"\nvg-1 {\nseqno = 3\t# y\ntags = [\"a\", \"b\"]\nflags = []\n\
                    pv0 {\nstripes = [\n\"pv0\", 7\n]\n}\n}\n\0";
        let root = parse(said).unwrap();
        assert_eq!(root.text("contents").unwrap(), "a \"b\" \\");
        let group = root.section("vg-1").unwrap();
        assert_eq!((group.number("seqno"), group.texts("tags")), (Ok(3), Ok(vec!["a", "b"])));
        assert_eq!((group.texts("flags"), group.texts("none")), (Ok(vec![]), Ok(vec![])));
        let pair = [Value::Text("pv0".into()), Value::Number(7)];
        assert_eq!(group.section("pv0").unwrap().list("stripes").unwrap(), pair);
        assert!(group.number("tags").is_err() && group.text("seqno").is_err() && root.section("x").is_err());
        assert!(group.section("pv0").unwrap().texts("stripes").is_err());
        for bad in [
            "a",
            "a =",
            "a = b",
            "a = -1",
            "a = 99999999999999999999",
            "a = \"x",
            "a = \"x\\",
            "a = [1 2]",
            "a = [1",
            "a {",
            "}",
            "a { } }",
            "= 1",
            "a = 1\na = 2",
            "a = [[1]]",
            "\u{e9} = 1",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse(&"a {".repeat(100_000)).unwrap_err().contains("deep"));
    }
}
