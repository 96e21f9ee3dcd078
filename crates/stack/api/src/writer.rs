//! Large answers as text, piece by piece; the same text as if they were made at once.

use tapio_model::xml::{push_member, push_value};
use tapio_model::{ApiError, Large, Shape, Value};

use crate::jsonrpc;
use crate::xmlrpc::encode as xml;

/// The words of an answer.
#[derive(Debug)]
pub enum Language {
    /// XML-RPC.
    Xml,
    /// JSON-RPC.
    Json(jsonrpc::Version, jsonrpc::Id),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Start,
    First,
    Next,
    End,
}

/// Writes a large answer.
#[derive(Debug)]
pub struct Writer {
    large: Large,
    language: Language,
    at: At,
}

impl Writer {
    /// Nothing is written yet.
    pub const fn new(large: Large, language: Language) -> Self {
        Self { large, language, at: At::Start }
    }

    /// The next piece: of `len` bytes, or a little more so that it ends with a part. None at the end.
    ///
    /// # Errors
    /// A part cannot be made any more: the answer ends in its middle.
    pub fn piece(&mut self, len: usize) -> Result<Option<String>, ApiError> {
        if self.at == At::End {
            return Ok(None);
        }
        let mut out = String::with_capacity(len + len / 4);
        if self.at == At::Start {
            self.begin(&mut out);
            self.at = At::First;
        }
        while out.len() < len {
            let Some(part) = self.large.parts.next() else {
                self.end(&mut out);
                self.at = At::End;
                break;
            };
            let (key, value) = part?;
            self.part(&mut out, &key, &value);
            self.at = At::Next;
        }
        Ok(Some(out))
    }

    /// All that is left, at once.
    ///
    /// # Errors
    /// As [`Self::piece`].
    pub fn rest(mut self) -> Result<String, ApiError> {
        let mut out = String::new();
        while let Some(piece) = self.piece(64 << 10)? {
            out.push_str(&piece);
        }
        Ok(out)
    }

    fn begin(&self, out: &mut String) {
        match &self.language {
            Language::Xml => {
                xml::push_success_start(out);
                out.push_str(match self.large.shape {
                    Shape::One => "",
                    Shape::List => "<value><array><data>",
                    Shape::Map => "<value><struct>",
                    Shape::Batch(_) => "<value><struct><member><name>events</name><value><array><data>",
                });
            }
            Language::Json(version, _) => {
                out.push_str(jsonrpc::success_start(*version));
                out.push_str(match self.large.shape {
                    Shape::One => "",
                    Shape::List => "[",
                    Shape::Map => "{",
                    Shape::Batch(_) => "{\"events\":[",
                });
            }
        }
    }

    fn part(&self, out: &mut String, key: &str, value: &Value) {
        let is_map = self.large.shape == Shape::Map;
        match &self.language {
            Language::Xml if is_map => push_member(out, key, value),
            Language::Xml => push_value(out, value),
            Language::Json(..) => {
                if self.at == At::Next {
                    out.push(',');
                }
                if is_map {
                    out.push_str(&jsonrpc::encode_text(key));
                    out.push(':');
                }
                out.push_str(&jsonrpc::encode_value(value));
            }
        }
    }

    fn end(&self, out: &mut String) {
        match &self.language {
            Language::Xml => {
                out.push_str(match self.large.shape {
                    Shape::One => "",
                    Shape::List | Shape::Batch(_) => "</data></array></value>",
                    Shape::Map => "</struct></value>",
                });
                if let Shape::Batch(rest) = &self.large.shape {
                    out.push_str("</member>");
                    rest.iter().for_each(|(name, value)| push_member(out, name, value));
                    out.push_str("</struct></value>");
                }
                xml::push_success_end(out);
            }
            Language::Json(version, id) => {
                out.push_str(match self.large.shape {
                    Shape::One => "",
                    Shape::List | Shape::Batch(_) => "]",
                    Shape::Map => "}",
                });
                if let Shape::Batch(rest) = &self.large.shape {
                    for (name, value) in rest {
                        out.push(',');
                        out.push_str(&jsonrpc::encode_text(name));
                        out.push(':');
                        out.push_str(&jsonrpc::encode_value(value));
                    }
                    out.push('}');
                }
                out.push_str(&jsonrpc::success_end(*version, id));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use tapio_model::Answer;

    use super::*;
    use crate::jsonrpc::Version;
    use crate::testing::values;
    use crate::xmlrpc;

    fn large(shape: Shape, parts: &[(String, Value)]) -> Large {
        let parts = parts.to_vec();
        let parts = parts.into_iter().map(Ok);
        Large { shape, parts: Box::new(parts), held_len: 0, part_len: 0, len: 0 }
    }

    fn written(large: Large, language: Language, len: usize) -> String {
        let mut writer = Writer::new(large, language);
        let mut out = String::new();
        while let Some(piece) = writer.piece(len).expect("its parts are there") {
            out.push_str(&piece);
        }
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn pieces_are_the_text_of_the_whole(
            parts in prop::collection::btree_map("[a-z&\"]{0,5}", values(prop::num::f64::NORMAL), 0..6),
            len in 1_usize..200,
        ) {
            let parts: Vec<(String, Value)> = parts.into_iter().collect();
            let counts = Value::Map(BTreeMap::from([("vm".to_owned(), Value::Int(2))]));
            let rest = [("token".to_owned(), Value::string("1,0")), ("valid_ref_counts".to_owned(), counts)];
            for shape in [Shape::List, Shape::Map, Shape::Batch(rest.into()), Shape::One] {
                let parts = if shape == Shape::One { &parts[..parts.len().min(1)] } else { &parts[..] };
                if shape == Shape::One && parts.is_empty() {
                    continue;
                }
                let whole = Answer::Large(large(shape.clone(), parts)).whole().expect("its parts are there");
                prop_assert_eq!(
                    written(large(shape.clone(), parts), Language::Xml, len),
                    xmlrpc::encode_success(&whole)
                );
                for (version, id) in [(Version::V1, Some(Value::Int(3))), (Version::V2, Some(Value::string("\"")))] {
                    let answer = Ok(whole.clone());
                    prop_assert_eq!(
                        written(large(shape.clone(), parts), Language::Json(version, id.clone()), len),
                        jsonrpc::encode_answer(version, &id, &answer)
                    );
                }
            }
        }
    }
}
