//! Secrets.

use super::row::*;
use crate::table::{Class, ClassKind, Role};

/// The class `secret`.
pub static SECRET_CLASS: Class = Class {
    name: "secret",
    doc: "A password or key that others name by reference",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        writable("value", STRING, "What is secret").required(),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
    ],
    messages: &[],
    constructor: Some(Role::PoolOperator),
    setter_role: Role::PoolOperator,
    reader_role: Role::PoolOperator,
    persistent: true,
};
