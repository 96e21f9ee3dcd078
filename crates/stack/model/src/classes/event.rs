//! Events.

use super::row::*;
use crate::Role::ReadOnly;
use crate::table::{Class, ClassKind, Enum, Role, Type};

const OPERATION: Type = Type::Enum(&Enum { name: "event_operation", words: &["add", "del", "mod"] });

/// The class `event`.
pub static EVENT_CLASS: Class = Class {
    name: "event",
    doc: "A change of an object",
    kind: ClassKind::Shape,
    fields: &[
        runtime("snapshot", Type::Any, "The record as it was then"),
        creator("id", INT, "Number of the event"),
        creator("timestamp", DATE_TIME, "When it happened"),
        creator("class", STRING, "Class of the object"),
        creator("operation", OPERATION, "What happened to the object"),
        creator("ref", STRING, "Reference of the object"),
        creator("obj_uuid", STRING, "UUID of the object"),
    ],
    messages: &[
        msg("register", ReadOnly, "Asks for events of these classes by event.next")
            .takes(&[p("classes", STRING_SET)])
            .fails(&["EVENT_SUBSCRIPTION_PARSE_FAILURE"])
            .sync(),
        msg("unregister", ReadOnly, "Asks for them no more")
            .takes(&[p("classes", STRING_SET)])
            .fails(&["EVENT_SUBSCRIPTION_PARSE_FAILURE"])
            .sync(),
        msg("next", ReadOnly, "Waits for events that were asked for by event.register")
            .gives(Type::Set(&Type::Record("event")))
            .fails(&["SESSION_NOT_REGISTERED", "EVENTS_LOST"])
            .sync(),
        msg("from", ReadOnly, "Waits for events after a token; the empty token gives everything there is")
            .takes(&[p("classes", STRING_SET), p("token", STRING), p("timeout", FLOAT)])
            .gives(Type::Any)
            .fails(&["EVENTS_LOST", "EVENT_FROM_TOKEN_PARSE_FAILURE", "EVENT_SUBSCRIPTION_PARSE_FAILURE"])
            .sync(),
        msg("get_current_id", ReadOnly, "The number of the last event").gives(INT).sync(),
        msg(
            "inject",
            ReadOnly,
            "Makes an event of an object that did not change, and answers a token from before it",
        )
        .takes(&[p("class", STRING), p("ref", STRING)])
        .gives(STRING)
        .fails(&["HANDLE_INVALID"])
        .sync(),
    ],
    constructor: None,
    setter_role: Role::VmAdmin,
    reader_role: Role::ReadOnly,
    persistent: false,
};
