//! Writing calls and answers.

use tapio_model::xml::{push_member, push_text, push_value};
use tapio_model::{ApiError, Value};

const HEAD: &str = "<?xml version=\"1.0\"?>";

const ANSWER_START: &str = "<methodResponse><params><param><value><struct><member><name>Status</name><value>";
const ANSWER_END: &str = "</struct></value></param></params></methodResponse>";

fn answer(status: &str, name: &str, value: &Value) -> String {
    let mut out = String::with_capacity(256);
    out.push_str(HEAD);
    out.push_str(ANSWER_START);
    out.push_str(status);
    out.push_str("</value></member>");
    push_member(&mut out, name, value);
    out.push_str(ANSWER_END);
    out
}

/// What comes before the value of an answer of success.
pub(crate) fn push_success_start(out: &mut String) {
    out.push_str(HEAD);
    out.push_str(ANSWER_START);
    out.push_str("Success</value></member><member><name>Value</name>");
}

/// What comes behind it.
pub(crate) fn push_success_end(out: &mut String) {
    out.push_str("</member>");
    out.push_str(ANSWER_END);
}

/// The answer of a call that worked.
pub fn encode_success(value: &Value) -> String {
    answer("Success", "Value", value)
}

/// The answer of a call that did not.
pub fn encode_failure(error: &ApiError) -> String {
    let words = std::iter::once(&*error.code).chain(error.params.iter().map(String::as_str));
    answer("Failure", "ErrorDescription", &Value::strings(words))
}

/// The answer to what is no call: a fault of XML-RPC, by the number that its servers agreed on for that.
pub fn encode_fault(why: &str) -> String {
    let mut out = String::from(HEAD);
    out.push_str("<methodResponse><fault><value><struct><member><name>faultCode</name><value><int>-32700</int></value>");
    out.push_str("</member><member><name>faultString</name>");
    push_value(&mut out, &Value::string(why));
    out.push_str("</member></struct></value></fault></methodResponse>");
    out
}

/// A request, as a client sends it.
pub fn encode_call(method: &str, params: &[Value]) -> String {
    let mut out = String::from(HEAD);
    out.push_str("<methodCall><methodName>");
    push_text(&mut out, method);
    out.push_str("</methodName><params>");
    for param in params {
        out.push_str("<param>");
        push_value(&mut out, param);
        out.push_str("</param>");
    }
    out.push_str("</params></methodCall>");
    out
}
