//! Messages for the administrator.

use super::row::*;
use crate::Role::{PoolOperator, ReadOnly};
use crate::table::{Class, ClassKind, Enum, Role, Type};

const CLS: Type = Type::Enum(&Enum {
    name: "cls",
    words: &["VM", "Host", "SR", "Pool", "VMPP", "VMSS", "PVS_proxy", "VDI", "Certificate"],
});

/// The class `message`.
pub static MESSAGE_CLASS: Class = Class {
    name: "message",
    doc: "Something the administrator should know",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("name", STRING, "Its kind, as VM_STARTED"),
        runtime("priority", INT, "1 to 5, 1 is most urgent"),
        runtime("cls", CLS, "Class of the object it is about"),
        runtime("obj_uuid", STRING, "UUID of the object it is about"),
        runtime("timestamp", DATE_TIME, "When it was made"),
        runtime("body", STRING, "Its text"),
    ],
    messages: &[
        msg("create", PoolOperator, "Tells the administrator something")
            .takes(&[
                p("name", STRING),
                p("priority", INT),
                p("cls", CLS),
                p("obj_uuid", STRING),
                p("body", STRING),
            ])
            .gives(MESSAGE)
            .fails(&["UUID_INVALID", "INVALID_VALUE"])
            .sync(),
        msg("destroy", PoolOperator, "Forgets a message").takes(&[p("self", MESSAGE)]).sync(),
        msg("destroy_many", PoolOperator, "Forgets messages").takes(&[p("messages", Type::Set(&MESSAGE))]),
        msg("get", ReadOnly, "Messages about one object since a time")
            .takes(&[p("cls", CLS), p("obj_uuid", STRING), p("since", DATE_TIME)])
            .gives(Type::Map(&MESSAGE, &Type::Record("message")))
            .sync(),
        msg("get_since", ReadOnly, "Messages since a time")
            .takes(&[p("since", DATE_TIME)])
            .gives(Type::Map(&MESSAGE, &Type::Record("message")))
            .sync(),
    ],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};
