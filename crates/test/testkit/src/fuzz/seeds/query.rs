//! Expressions, tokens and subscriptions.

use super::Shelf;

pub(super) fn put_into(shelf: &mut Shelf) {
    let all = r#"field "SR" = "OpaqueRef:1" and (not ("false" = field 'managed') or field "name__label" = "a\"b") or true"#;
    shelf.put("query", "all", all);
    shelf.put("query", "set", r#"field "tags" = "('a' 'b')""#);
    shelf.put("query", "nothing", "");
    shelf.put("query", "deep", "(".repeat(100) + "true" + &")".repeat(100));
    shelf.put("query", "negated", "not ".repeat(80) + "true");
    shelf.put("query", "open", r#"field "uuid" = "x\"#);
    shelf.put("query", "token", "1099511627776,3");
    shelf.put("query", "classes", "vm\nVBD/OpaqueRef:1\n*\n/\n");
}
