//! Values against types: what clients send becomes what handlers expect, or an error that names the parameter.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Class, FieldAccess, Initial, NULL_REF, Source, Type, Value};

use crate::dates;

/// Levels of sets and maps inside each other.
const DEPTH_MAX: usize = 16;

/// The value as its declared type says: XML-RPC brings numbers as texts, JSON brings dates as texts and round floats
/// as numbers. References to nothing and words of enumerations come out in one spelling.
///
/// # Errors
/// `FIELD_TYPE_ERROR` with `name`; `VALUE_NOT_SUPPORTED` for a word that the enumeration does not have.
pub fn coerce(value: Value, ty: Type, name: &str) -> Result<Value, ApiError> {
    coerce_at(value, ty, name, 0)
}

fn coerce_at(value: Value, ty: Type, name: &str, depth: usize) -> Result<Value, ApiError> {
    let wrong = || ApiError::new("FIELD_TYPE_ERROR", [name]);
    if depth > DEPTH_MAX {
        return Err(wrong());
    }
    Ok(match (ty, value) {
        (Type::Any, value) => value,
        (Type::Void, _) | (Type::Option(_), Value::Void) => Value::Void,
        (Type::Option(inner), value) => coerce_at(value, *inner, name, depth + 1)?,
        (Type::Bool, Value::Bool(truth)) => Value::Bool(truth),
        (Type::Int, Value::Int(number)) => Value::Int(number),
        (Type::Int, Value::String(text)) => Value::Int(text.trim().parse().map_err(|_| wrong())?),
        (Type::Int, Value::Float(number)) => Value::Int(whole(number).ok_or_else(wrong)?),
        (Type::Float, Value::Float(number)) if number.is_finite() => Value::Float(number),
        (Type::Float, Value::Int(number)) => Value::Float(number as f64),
        (Type::Float, Value::String(text)) => {
            let number = text.trim().parse().ok().filter(|number: &f64| number.is_finite());
            Value::Float(number.ok_or_else(wrong)?)
        }
        (Type::String, Value::String(text)) => Value::String(text),
        (Type::DateTime, Value::DateTime(seconds)) => Value::DateTime(seconds),
        (Type::DateTime, Value::String(text)) => Value::DateTime(dates::parse(&text).ok_or_else(wrong)?),
        (Type::Enum(words), Value::String(text)) => {
            let exact = words.words.iter().find(|word| **word == text);
            let word = exact.or_else(|| words.words.iter().find(|word| word.eq_ignore_ascii_case(&text)));
            let known = || format!("{} is one of {}", words.name, words.words.join(", "));
            Value::string(*word.ok_or_else(|| ApiError::new("VALUE_NOT_SUPPORTED", [name, &text, &known()]))?)
        }
        (Type::Ref(_), Value::String(text)) if text.is_empty() || text == "Null" => Value::string(NULL_REF),
        (Type::Ref(_), Value::String(text)) => Value::String(text),
        (Type::Ref(_), Value::Void) => Value::string(NULL_REF),
        (Type::Set(inner), Value::Set(members)) => {
            let coerced = members.into_iter().map(|member| coerce_at(member, *inner, name, depth + 1));
            Value::Set(coerced.collect::<Result<_, _>>()?)
        }
        (Type::Map(key_ty, inner), Value::Map(pairs)) => {
            let mut coerced = BTreeMap::new();
            for (key, value) in pairs {
                let key = match coerce_at(Value::String(key), *key_ty, name, depth + 1)? {
                    Value::String(key) => key,
                    Value::Int(number) => number.to_string(),
                    _ => return Err(wrong()),
                };
                coerced.insert(key, coerce_at(value, *inner, name, depth + 1)?);
            }
            Value::Map(coerced)
        }
        (Type::Record(class), Value::Map(pairs)) => {
            let class = tapio_model::class(class).ok_or_else(wrong)?;
            let mut coerced = BTreeMap::new();
            for (key, value) in pairs {
                if let Some(field) = class.field(&key) {
                    coerced.insert(key, coerce_at(value, field.ty, field.name, depth + 1)?);
                }
            }
            Value::Map(coerced)
        }
        _ => return Err(wrong()),
    })
}

/// The number where it has no fraction and fits.
fn whole(number: f64) -> Option<i64> {
    let fits = number.is_finite() && number.fract() == 0.0 && number.abs() < 9.0e18;
    #[allow(clippy::cast_possible_truncation, reason = "checked just above")]
    fits.then_some(number as i64)
}

/// The record of a `create`: fields that a creator may set, checked; what is left away gets its first value. Other
/// members are ignored, as clients send whole records back.
///
/// # Errors
/// As [`coerce`]; `FIELD_TYPE_ERROR` for a required field that is missing.
pub fn constructor(class: &'static Class, record: Value) -> Result<Value, ApiError> {
    let Value::Map(mut given) = record else { return Err(ApiError::new("FIELD_TYPE_ERROR", [class.name])) };
    let mut fields = BTreeMap::new();
    for field in class.fields {
        if field.access == FieldAccess::Runtime || matches!(field.source, Source::Inverse(..)) {
            continue;
        }
        let value = match given.remove(field.name) {
            None | Some(Value::Void) => first_of(field)?,
            Some(value) => coerce(value, field.ty, field.name)?,
        };
        fields.insert(field.name.to_owned(), value);
    }
    Ok(Value::Map(fields))
}

fn first_of(field: &tapio_model::Field) -> Result<Value, ApiError> {
    let first = field.initial.value(field.ty);
    first.ok_or_else(|| ApiError::new("FIELD_TYPE_ERROR", [field.name]))
}

/// The parameters of a message behind the session, checked; those that are left away get their defaults.
///
/// # Errors
/// `MESSAGE_PARAMETER_COUNT_MISMATCH`, and as [`coerce`].
pub fn parameters(
    method: &str,
    declared: &[(&'static str, Type, Option<Initial>)],
    given: Vec<Value>,
    has_session: bool,
) -> Result<Vec<Value>, ApiError> {
    let received = given.len();
    let mismatch = || {
        let counted = |number: usize| (number + usize::from(has_session)).to_string();
        let params = [method.to_owned(), counted(declared.len()), counted(received)];
        ApiError::new("MESSAGE_PARAMETER_COUNT_MISMATCH", params)
    };
    if received > declared.len() {
        return Err(mismatch());
    }
    let mut given = given.into_iter();
    let mut checked = Vec::with_capacity(declared.len());
    for (name, ty, default) in declared {
        checked.push(match given.next() {
            Some(value) => coerce(value, *ty, name)?,
            None => default.and_then(|default| default.value(*ty)).ok_or_else(mismatch)?,
        });
    }
    Ok(checked)
}

#[cfg(test)]
mod tests {
    use tapio_model::{Enum, Initial, Type, Value};

    use super::{coerce, parameters};

    static MODE: Enum = Enum { name: "mode", words: &["RO", "RW"] };

    #[test]
    fn each_way_to_write_a_value_is_read() {
        let same = |value: Value, ty: Type, expected: Value| assert_eq!(coerce(value, ty, "x"), Ok(expected));
        same("12".into(), Type::Int, Value::Int(12));
        same(Value::Int(-3), Type::Int, Value::Int(-3));
        same(Value::Float(8.0), Type::Int, Value::Int(8));
        same(Value::Int(60), Type::Float, Value::Float(60.0));
        same("0.5".into(), Type::Float, Value::Float(0.5));
        same("19700101T00:00:01Z".into(), Type::DateTime, Value::DateTime(1));
        same("ro".into(), Type::Enum(&MODE), "RO".into());
        same("".into(), Type::Ref("VDI"), tapio_model::NULL_REF.into());
        same(Value::Void, Type::Ref("VDI"), tapio_model::NULL_REF.into());
        same(
            Value::strings(["1", "2"]),
            Type::Set(&Type::Int),
            Value::Set(vec![Value::Int(1), Value::Int(2)]),
        );
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let wrong = |value: Value, ty: Type| {
            let error = coerce(value, ty, "size").expect_err("it does not fit");
            assert_eq!(
                (error.code.as_ref(), error.params.as_slice()),
                ("FIELD_TYPE_ERROR", &["size".to_owned()][..])
            );
        };
        wrong("12x".into(), Type::Int);
        wrong("99999999999999999999".into(), Type::Int);
        wrong(Value::Float(0.5), Type::Int);
        wrong(Value::Float(1e300), Type::Int);
        wrong(Value::Float(f64::INFINITY), Type::Float);
        wrong("NaN".into(), Type::Float);
        wrong(Value::Int(1), Type::Bool);
        wrong(Value::Int(1), Type::String);
        wrong("x".into(), Type::Set(&Type::String));
        wrong(Value::strings(["x"]), Type::Map(&Type::String, &Type::String));
        wrong("yesterday".into(), Type::DateTime);
        let error = coerce("RX".into(), Type::Enum(&MODE), "mode").expect_err("no such word");
        assert_eq!(error.code, "VALUE_NOT_SUPPORTED");
        assert_eq!(&error.params[..2], ["mode", "RX"]);
    }

    #[test]
    fn parameters_are_counted_with_the_session() {
        let declared = [("vdi", Type::Ref("VDI"), None), ("how", Type::Int, Some(Initial::Int(7)))];
        assert_eq!(
            parameters("VDI.x", &declared, vec!["r".into()], true),
            Ok(vec!["r".into(), Value::Int(7)])
        );
        for given in [vec![], vec![Value::from("r"); 3]] {
            let received = (given.len() + 1).to_string();
            let error = parameters("VDI.x", &declared, given, true).expect_err("too few or too many");
            assert_eq!(error.code, "MESSAGE_PARAMETER_COUNT_MISMATCH");
            assert_eq!(error.params, ["VDI.x", "3", &received]);
        }
    }
}
