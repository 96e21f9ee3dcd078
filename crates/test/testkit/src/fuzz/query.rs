//! Expressions that clients send to choose objects, and what they send to listen.

use tapio_core::events::{Filter, Token};
use tapio_core::query;
use tapio_model::Value;

/// An expression, a token, a subscription: read or refused with the documented error. What an expression needs for an
/// index is needed.
pub(super) fn query(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Err(error) = Token::parse(&text) {
        assert_eq!(error.code, "EVENT_FROM_TOKEN_PARSE_FAILURE");
    }
    if let Err(error) = Filter::parse(&Value::strings(text.lines())) {
        assert_eq!(error.code, "EVENT_SUBSCRIPTION_PARSE_FAILURE");
    }
    let class = tapio_model::class("VDI").expect("a class of the table");
    let expr = match query::parse(class, &text) {
        Ok(expr) => expr,
        Err(error) => {
            assert_eq!(error.code, "VALUE_NOT_SUPPORTED");
            return;
        }
    };
    // Objects whose fields are all of one text, and one whose fields are what the expression looks for.
    let needed = expr.needs().map(|(field, text)| (field.to_owned(), text.to_owned()));
    for fill in ["", "true", "OpaqueRef:NULL"] {
        let text_of = |_: &str| fill.to_owned();
        let holds = expr.holds(&text_of);
        assert_eq!(holds, expr.holds(&text_of));
        if let Some((_, text)) = &needed {
            assert!(!holds || text == fill, "it holds without what it needs");
        }
    }
    for value in [Value::strings([text.as_ref()]), Value::string_map([(text.as_ref(), text.as_ref())])] {
        let shown = query::text_of(&value);
        assert!(shown.starts_with('(') && shown.ends_with(')') && shown.len() >= text.len());
    }
}
