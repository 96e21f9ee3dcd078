//! Tasks.

use super::row::*;
use crate::Role::{PoolAdmin, ReadOnly};
use crate::table::{Class, ClassKind, Enum, Role, Type};

const STATUS: Type = Type::Enum(&Enum {
    name: "task_status_type",
    words: &["pending", "success", "failure", "cancelling", "cancelled"],
});
const OPERATION: Type = Type::Enum(&Enum { name: "task_allowed_operations", words: &["cancel", "destroy"] });

/// The class `task`.
pub static TASK_CLASS: Class = Class {
    name: "task",
    doc: "Work in progress; it belongs to the account that began it, which may change it whatever its role",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("name_label", STRING, "Name for people"),
        runtime("name_description", STRING, "What it is, for people"),
        allowed_operations(&OPERATION),
        current_operations(&OPERATION),
        runtime("created", DATE_TIME, "When it was made"),
        runtime("finished", DATE_TIME, "When it ended"),
        runtime("status", STATUS, "How it stands"),
        runtime("resident_on", HOST, "The host that works on it"),
        runtime("progress", FLOAT, "How far it is, 0 to 1").volatile(),
        runtime("type", STRING, "Type of its result"),
        runtime("result", STRING, "Its result, as an XML-RPC value; empty for none"),
        runtime("error_info", STRING_SET, "The error it ended with: code and parameters"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        runtime("subtask_of", TASK, "The task it is part of"),
        runtime("subtasks", TASKS, "Its parts").inverse("task", "subtask_of"),
        runtime("backtrace", STRING, "Where the error arose, for its developers").or_text("()"),
    ],
    messages: &[
        msg("create", ReadOnly, "Makes a task that its maker brings forward")
            .takes(&[p("label", STRING), p("description", STRING)])
            .gives(TASK)
            .sync(),
        msg("destroy", ReadOnly, "Forgets a task: one's own, or with pool-operator any")
            .takes(&[p("self", TASK)])
            .fails(&["OPERATION_NOT_ALLOWED"])
            .sync(),
        msg("cancel", ReadOnly, "Asks a task to stop: one's own, or with pool-operator any")
            .takes(&[p("task", TASK)])
            .fails(&["OPERATION_NOT_ALLOWED"]),
        msg(
            "follow",
            PoolAdmin,
            "How far a call is that another host of the pool asks for in a session of its own; cancels it if that is \
             asked for (Tapio's own)",
        )
        .takes(&[p("session", STRING), p("cancel", BOOL)])
        .gives(FLOAT)
        .fails(&["OPERATION_NOT_ALLOWED", "HANDLE_INVALID"])
        .sync(),
        msg("set_status", ReadOnly, "Says how a task stands that was made by task.create")
            .takes(&[p("self", TASK), p("value", STATUS)])
            .sync(),
        msg("set_progress", ReadOnly, "Says how far it is, 0 to 1")
            .takes(&[p("self", TASK), p("value", FLOAT)])
            .sync(),
        msg("set_result", ReadOnly, "Says what it gave").takes(&[p("self", TASK), p("value", STRING)]).sync(),
        msg("set_error_info", ReadOnly, "Says how it failed")
            .takes(&[p("self", TASK), p("value", STRING_SET)])
            .sync(),
        msg("get_timeline", ReadOnly, "What its steps did and when, as JSON; empty when it had none. For no task: of the latest operation")
            .takes(&[p("self", TASK)])
            .gives(STRING)
            .sync(),
    ],
    constructor: None,
    setter_role: Role::ReadOnly,
    reader_role: Role::ReadOnly,
    persistent: true,
};
