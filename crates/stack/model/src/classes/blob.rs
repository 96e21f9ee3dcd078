//! Binary blobs.

use super::row::*;
use crate::Role::PoolOperator;
use crate::table::{Class, ClassKind, Role};

/// The class `blob`.
pub static BLOB_CLASS: Class = Class {
    name: "blob",
    doc: "Binary data",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        writable("name_label", STRING, "Name for people"),
        writable("name_description", STRING, "What it is, for people"),
        runtime("size", INT, "Bytes"),
        writable("public", BOOL, "Whether it may be read without a login"),
        creator("last_updated", DATE_TIME, "When it was last written"),
        creator("mime_type", STRING, "MIME type of the contents"),
    ],
    messages: &[
        msg("create", PoolOperator, "Makes an empty blob")
            .takes(&[p("mime_type", STRING), opt("public", BOOL)])
            .gives(BLOB)
            .sync(),
        msg("destroy", PoolOperator, "Removes a blob").takes(&[p("self", BLOB)]).sync(),
    ],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};
