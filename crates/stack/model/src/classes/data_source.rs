//! What is measured.

use super::row::*;
use crate::table::{Class, ClassKind, Role};

/// The class `data_source`.
pub static DATA_SOURCE_CLASS: Class = Class {
    name: "data_source",
    doc: "Something that is measured",
    kind: ClassKind::Shape,
    fields: &[
        runtime("name_label", STRING, "Name for people"),
        runtime("name_description", STRING, "What it is, for people"),
        runtime("enabled", BOOL, "Whether it is recorded"),
        runtime("standard", BOOL, "Whether it is recorded by default"),
        runtime("units", STRING, "Its unit"),
        runtime("min", FLOAT, "Least value it can have"),
        runtime("max", FLOAT, "Greatest value it can have"),
        runtime("value", FLOAT, "Its value now"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: false,
};
