//! Calls of both languages.

use tapio_api::xmlrpc::{encode_call, encode_failure, encode_success};
use tapio_model::{ApiError, Value};

use super::Shelf;

fn everything() -> Value {
    let set = Value::Set(vec![
        Value::Bool(true),
        Value::Int(-7),
        Value::Float(0.5),
        Value::DateTime(1_706_704_496),
    ]);
    Value::Map([("a".to_owned(), set), ("<&>".to_owned(), Value::string("\r\n ä"))].into())
}

pub(super) fn put_into(shelf: &mut Shelf) {
    let types = "<?xml version='1.0'?><!-- c --><methodCall><methodName> m </methodName><params>\
                 <param><value>plain</value></param><param><value><i4>1</i4></value></param>\
                 <param><value><i8>9223372036854775807</i8></value></param><param><value><nil/></value></param>\
                 <param><value><double>1e308</double></value></param><param><value><boolean>0</boolean></value></param>\
                 <param><value><base64>Zm9v</base64></value></param>\
                 <param><value><dateTime.iso8601>2024-01-31T12:34:56+01:00</dateTime.iso8601></value></param>\
                 <param><value><string><![CDATA[<&>]]>&#65;&quot;</string></value></param>\
                 <param><value><array><data><value/></data></array></value></param></params></methodCall>";
    shelf.put("xmlrpc", "types", types);
    shelf.put(
        "xmlrpc",
        "entity",
        "<!DOCTYPE a [<!ENTITY b 'c'>]><methodCall><methodName>&b;</methodName></methodCall>",
    );
    shelf.put(
        "xmlrpc",
        "deep",
        format!("<methodCall><methodName>m</methodName><params><param>{}", "<value><array><data>".repeat(40)),
    );
    shelf.put(
        "xmlrpc",
        "call",
        encode_call("VDI.get_all_records", &[Value::string("OpaqueRef:1"), everything()]),
    );
    shelf.put("xmlrpc", "success", encode_success(&everything()));
    shelf.put("xmlrpc", "failure", encode_failure(&ApiError::new("HANDLE_INVALID", ["VDI", "x"])));
    let fault = "<methodResponse><fault><value><struct><member><name>faultCode</name><value><int>4</int></value></member>\
                 </struct></value></fault></methodResponse>";
    shelf.put("xmlrpc", "fault", fault);
    shelf.put("jsonrpc", "first", r#"{"method":"VDI.get_all","params":["OpaqueRef:1"],"id":3}"#);
    let second =
        r#"{"jsonrpc":"2.0","method":"m","params":[1,-0.5,1e308,null,true,"\u00e4\n",{"a":[{}]}],"id":"x"}"#;
    shelf.put("jsonrpc", "second", second);
    let batch = r#"[{"jsonrpc":"2.0","method":"a","id":1},{"jsonrpc":"2.0","method":"b"},{"method":"c"},7,{"id":[]}]"#;
    shelf.put("jsonrpc", "batch", batch);
    shelf.put("jsonrpc", "deep", "[".repeat(40));
    shelf.put(
        "jsonrpc",
        "large",
        r#"{"method":"m","params":[18446744073709551615,9223372036854775807],"id":null}"#,
    );
}
