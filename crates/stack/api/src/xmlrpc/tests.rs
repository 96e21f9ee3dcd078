use std::collections::BTreeMap;

use proptest::prelude::*;
use tapio_model::xml::value_text;
use tapio_model::{ApiError, Value};

use super::*;
use crate::limits::MessageLimits;
use crate::testing::values;

fn call(text: &str) -> Call {
    decode_call(text.as_bytes(), MessageLimits::default()).expect("a call")
}

fn refused(text: &str) -> String {
    decode_call(text.as_bytes(), MessageLimits::default()).expect_err("no call").0
}

fn value(text: &str) -> Value {
    let text =
        format!("<methodCall><methodName>m</methodName><params><param>{text}</param></params></methodCall>");
    call(&text).params.remove(0)
}

#[test]
fn a_call_as_python_writes_it() {
    let text = "<?xml version='1.0'?>\n<methodCall>\n<methodName>session.login_with_password</methodName>\n\
                <params>\n<param>\n<value><string>root</string></value>\n</param>\n<param>\n\
                <value><string>a&lt;b&#13;&amp;</string></value>\n</param>\n</params>\n</methodCall>\n";
    let read = call(text);
    assert_eq!(read.method, "session.login_with_password");
    assert_eq!(read.params, [Value::string("root"), Value::string("a<b\r&")]);
    assert_eq!(call("<methodCall><methodName>system.listMethods</methodName></methodCall>").params, []);
    assert_eq!(call("<methodCall><methodName>m</methodName><params/></methodCall>").params, []);
}

#[test]
fn every_type() {
    let known = [
        ("<value> as it is </value>", Value::string(" as it is ")),
        ("<value/>", Value::string("")),
        ("<value><string></string></value>", Value::string("")),
        ("<value><string/></value>", Value::string("")),
        ("<value><string><![CDATA[<&>]]></string></value>", Value::string("<&>")),
        ("<value> <i4>-7</i4> </value>", Value::Int(-7)),
        ("<value><int>+7</int></value>", Value::Int(7)),
        ("<value><i8>9223372036854775807</i8></value>", Value::Int(i64::MAX)),
        ("<value><boolean>1</boolean></value>", Value::Bool(true)),
        ("<value><boolean>false</boolean></value>", Value::Bool(false)),
        ("<value><double>-0.5</double></value>", Value::Float(-0.5)),
        (
            "<value><dateTime.iso8601>20240131T12:34:56Z</dateTime.iso8601></value>",
            Value::DateTime(1_706_704_496),
        ),
        ("<value><base64>Zm9v\nYmFy</base64></value>", Value::string("foobar")),
        ("<value><base64> Zm8= </base64></value>", Value::string("fo")),
        ("<value><base64>Zh==</base64></value>", Value::string("f")),
        ("<value><base64></base64></value>", Value::string("")),
        ("<value><nil/></value>", Value::Void),
        ("<value xmlns:ex='x'><ex:nil/></value>", Value::Void),
        ("<value><array><data/></array></value>", Value::Set(Vec::new())),
        (
            "<value><array><data> <value>a</value>\n<value><int>1</int></value></data></array></value>",
            Value::Set(vec![Value::string("a"), Value::Int(1)]),
        ),
        (
            "<value><struct><member><name> k</name><value>v</value></member></struct></value>",
            Value::string_map([(" k", "v")]),
        ),
    ];
    for (text, expected) in known {
        assert_eq!(value(text), expected, "{text}");
    }
}

#[test]
fn what_is_no_call_is_refused_with_a_place() {
    let wrong = [
        "",
        "GET / HTTP/1.0",
        "<methodCall>",
        "<methodCall></methodCall>",
        "<methodCall><methodName>m</methodName><params><param><value>a<int>1</int></value></param></params></methodCall>",
        "<methodCall><methodName>m</methodName><params><param><value><base64>/w==</base64></value></param></params></methodCall>",
        "<methodCall><methodName>m</methodName><params><param><value><base64>Zm9v=</base64></value></param></params></methodCall>",
        "<methodCall><methodName>m</methodName><params><param><value><base64>Zm9-</base64></value></param></params></methodCall>",
        "<methodCall><methodName>m</methodName></methodCall><x/>",
        "<methodCall><methodName>m</methodName><params></methodCall>",
        "<!DOCTYPE a [<!ENTITY b 'c'>]><methodCall><methodName>&b;</methodName></methodCall>",
        "<methodCall><methodName>&b;</methodName></methodCall>",
        "<?xml version='1.0' encoding='UTF-16'?><methodCall><methodName>m</methodName></methodCall>",
        "<html><body/></html>",
    ];
    for text in wrong {
        let said = refused(text);
        assert!(said.starts_with("byte "), "{text}: {said}");
    }
    assert!(decode_call(b"\xff", MessageLimits::default()).is_err());
}

#[test]
fn depth_and_number_are_bounded() {
    let deep = |levels: usize| {
        let text = format!(
            "<value>{}{}</value>",
            "<array><data><value>".repeat(levels),
            "</value></data></array>".repeat(levels)
        );
        format!("<methodCall><methodName>m</methodName><params><param>{text}</param></params></methodCall>")
    };
    assert_eq!(call(&deep(32)).params.len(), 1);
    assert!(refused(&deep(33)).contains("levels deep"));
    assert!(refused(&deep(50_000)).contains("levels deep"));
    let wide = format!(
        "<methodCall><methodName>m</methodName><params>{}</params></methodCall>",
        "<param><value/></param>".repeat(100_001)
    );
    assert!(refused(&wide).contains("more than 100000 values"));
}

#[test]
fn answers_have_xenapis_envelope() {
    let text = encode_success(&Value::Int(42));
    assert!(text.contains("<name>Status</name><value>Success</value>"), "{text}");
    assert!(text.contains("<name>Value</name><value>42</value>"), "{text}");
    let read = |text: &str| decode_response(text.as_bytes(), MessageLimits::default()).expect("an answer");
    assert_eq!(read(&text), Ok(Value::string("42")));
    assert_eq!(read(&encode_success(&Value::Void)), Ok(Value::string("")));
    let error = ApiError::new("HANDLE_INVALID", ["VDI", "<&>"]);
    assert_eq!(read(&encode_failure(&error)), Err(error));
    let fault = "<methodResponse><fault><value><struct><member><name>faultCode</name><value><int>4</int></value>\
                 </member><member><name>faultString</name><value>no</value></member></struct></value></fault>\
                 </methodResponse>";
    assert_eq!(read(fault), Err(ApiError::new("FAULT", ["4", "no"])));
    assert_eq!(read(&encode_fault("<no>")), Err(ApiError::new("FAULT", ["-32700", "<no>"])));
}

#[test]
fn text_has_a_type_only_where_white_space_needs_it() {
    for (text, written) in [
        ("", "<value></value>"),
        ("a b", "<value>a b</value>"),
        (" a", "<value><string> a</string></value>"),
        ("a\n", "<value><string>a\n</string></value>"),
        (" ", "<value><string> </string></value>"),
    ] {
        assert_eq!(value_text(&Value::string(text)), written);
        assert_eq!(value(written), Value::string(text));
    }
    let record = Value::string_map([("result", "")]);
    assert_eq!(
        value_text(&record),
        "<value><struct><member><name>result</name><value></value></member></struct></value>"
    );
}

#[test]
fn a_scalar_that_is_not_what_it_says_is_text_for_its_reader() {
    for (written, read) in [
        ("<value><dateTime.iso8601>111T0:0:0</dateTime.iso8601></value>", "111T0:0:0"),
        ("<value><dateTime.iso8601></dateTime.iso8601></value>", ""),
        ("<value><i4>x</i4></value>", "x"),
        ("<value><int>9223372036854775808</int></value>", "9223372036854775808"),
        ("<value><boolean>maybe</boolean></value>", "maybe"),
        ("<value><double>1,5</double></value>", "1,5"),
    ] {
        assert_eq!(value(written), Value::string(read), "{written}");
    }
}

#[test]
fn event_counts_are_numbers() {
    let counts = Value::Map(BTreeMap::from([("task".to_owned(), Value::Int(3))]));
    let batch = Value::Map(BTreeMap::from([("valid_ref_counts".to_owned(), counts)]));
    let text = value_text(&batch);
    assert!(text.contains("<name>task</name><value><i4>3</i4></value>"), "{text}");
}

#[test]
fn what_xml_cannot_hold_is_replaced() {
    let text = value_text(&Value::string("a\u{0}b\u{1b}\r\n\t\u{ffff}é"));
    assert_eq!(text, "<value>a\u{fffd}b\u{fffd}&#13;\n\t\u{fffd}é</value>");
}

/// What a value is after a trip: numbers are texts, nothing is the empty text.
fn travelled(value: &Value) -> Value {
    match value {
        Value::Void => Value::string(""),
        Value::Int(number) => Value::string(number.to_string()),
        Value::Set(members) => Value::Set(members.iter().map(travelled).collect()),
        Value::Map(members) => {
            Value::Map(members.iter().map(|(name, member)| (name.clone(), travelled(member))).collect())
        }
        other => other.clone(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn values_come_back(params in prop::collection::vec(values(prop::num::f64::NORMAL), 0..4), method in "[a-zA-Z_.]{1,20}") {
        let text = encode_call(&method, &params);
        let read = decode_call(text.as_bytes(), MessageLimits::default()).expect("our own call");
        prop_assert_eq!(&read.method, &method);
        prop_assert_eq!(read.params, params.iter().map(travelled).collect::<Vec<_>>());
        for value in &params {
            let answer = decode_response(encode_success(value).as_bytes(), MessageLimits::default());
            prop_assert_eq!(answer.expect("our own answer"), Ok(travelled(value)));
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in "(<|>|&|;|value|/|int|struct|member|name|methodCall|params|param| |[a-z0-9#]){0,60}") {
        let _ = decode_call(text.as_bytes(), MessageLimits::default());
        let _ = decode_response(text.as_bytes(), MessageLimits::default());
    }
}
