use proptest::prelude::*;
use tapio_model::{ApiError, Value};

use super::*;
use crate::testing::values;

fn one(text: &str) -> Result<Call, Invalid> {
    match decode(text.as_bytes(), MessageLimits::default()).expect("JSON") {
        Body::One(call) => call,
        Body::Batch(_) => panic!("a batch"),
    }
}

#[test]
fn both_versions_and_their_answers() {
    let call = one(r#"{"method":"VDI.get_all","params":["OpaqueRef:1"],"id":3}"#).expect("a call");
    assert_eq!(
        (call.method.as_str(), call.version, &call.id),
        ("VDI.get_all", Version::V1, &Some(Value::Int(3)))
    );
    assert_eq!(call.params, [Value::string("OpaqueRef:1")]);
    let error = Err(ApiError::new("HANDLE_INVALID", ["VDI", "x"]));
    assert_eq!(
        encode_answer(Version::V1, &call.id, &Ok(Value::Void)),
        r#"{"result":"","error":null,"id":3}"#
    );
    assert_eq!(
        encode_answer(Version::V1, &call.id, &error),
        r#"{"result":null,"error":["HANDLE_INVALID","VDI","x"],"id":3}"#
    );
    let call = one(r#"{"jsonrpc":"2.0","method":"m","params":[1, 1.5, null, true, {"a":[]}],"id":"x"}"#)
        .expect("a call");
    assert_eq!((call.version, &call.id), (Version::V2, &Some(Value::string("x"))));
    let nested = Value::Map([("a".to_owned(), Value::Set(Vec::new()))].into());
    assert_eq!(call.params, [Value::Int(1), Value::Float(1.5), Value::Void, Value::Bool(true), nested]);
    assert_eq!(
        encode_answer(Version::V2, &call.id, &Ok(Value::Int(1 << 60))),
        r#"{"jsonrpc":"2.0","result":1152921504606846976,"id":"x"}"#
    );
    assert_eq!(
        encode_answer(Version::V2, &call.id, &error),
        r#"{"jsonrpc":"2.0","error":{"code":1,"message":"HANDLE_INVALID","data":["VDI","x"]},"id":"x"}"#
    );
}

#[test]
fn ids_tell_which_calls_want_an_answer() {
    assert_eq!(one(r#"{"jsonrpc":"2.0","method":"m"}"#).expect("a call").id, None);
    assert_eq!(one(r#"{"jsonrpc":"2.0","method":"m","id":null}"#).expect("a call").id, Some(Value::Void));
    assert_eq!(one(r#"{"method":"m"}"#).expect("a call").id, Some(Value::Void));
    let answer = encode_answer(Version::V2, &Some(Value::Void), &Ok(Value::Bool(true)));
    assert_eq!(answer, r#"{"jsonrpc":"2.0","result":true,"id":null}"#);
}

#[test]
fn what_is_no_call_is_invalid_and_what_is_no_json_malformed() {
    for text in [
        "1",
        "{}",
        "[]",
        r#"{"method":1}"#,
        r#"{"method":"m","params":{"a":1}}"#,
        r#"{"method":"m","id":[]}"#,
    ] {
        let invalid = one(text).expect_err(text);
        let told = encode_invalid(&invalid);
        assert!(told.contains("INTERNAL_ERROR") || told.contains("-32600"), "{told}");
    }
    for text in ["", "{", "{}x", "nul", "[1,]", "\"\u{7}\"", "18446744073709551615"] {
        let malformed = decode(text.as_bytes(), MessageLimits::default()).expect_err(text);
        assert!(encode_malformed(&malformed).contains("-32700"), "{malformed}");
    }
}

#[test]
fn batches_are_bounded() {
    let batch = |len: usize| format!("[{}]", vec![r#"{"method":"m"}"#; len].join(","));
    let read = |text: String| decode(text.as_bytes(), MessageLimits::default());
    assert!(matches!(read(batch(BATCH_LEN_MAX)), Ok(Body::Batch(calls)) if calls.len() == BATCH_LEN_MAX));
    assert!(read(batch(BATCH_LEN_MAX + 1)).is_err());
    assert_eq!(encode_batch(&["1".into(), "2".into()]), "[1,2]");
}

#[test]
fn depth_and_number_are_bounded() {
    let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    let read = |text: String| decode_value(text.as_bytes(), MessageLimits::default());
    assert!(read(deep(33)).is_ok());
    assert!(read(deep(34)).expect_err("too deep").0.contains("levels deep"));
    assert!(read(deep(100_000)).is_err());
    assert!(read(format!("[{}0]", "0,".repeat(100_000))).expect_err("too wide").0.contains("values"));
}

#[test]
fn numbers_that_json_has_no_way_to_write_are_texts() {
    assert_eq!(encode_value(&Value::Float(f64::NAN)), "\"NaN\"");
    assert_eq!(encode_value(&Value::Float(f64::NEG_INFINITY)), "\"-inf\"");
    assert_eq!(encode_value(&Value::Float(0.0)), "0.0");
}

/// What a value is after a trip: a time is text, nothing is the empty text.
fn travelled(value: &Value) -> Value {
    match value {
        Value::Void => Value::string(""),
        Value::DateTime(at) => Value::String(tapio_model::datetime::format(*at)),
        Value::Set(members) => Value::Set(members.iter().map(travelled).collect()),
        Value::Map(members) => {
            Value::Map(members.iter().map(|(name, member)| (name.clone(), travelled(member))).collect())
        }
        other => other.clone(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// The parser may be off by the last bit of a number with sixteen digits.
    #[test]
    fn values_come_back(value in values(any::<i32>().prop_map(|eighths| f64::from(eighths) / 8.0))) {
        let text = encode_value(&value);
        prop_assert_eq!(decode_value(text.as_bytes(), MessageLimits::default()), Ok(travelled(&value)));
    }
}
