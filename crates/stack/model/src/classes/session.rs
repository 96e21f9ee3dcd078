//! Sessions and roles.

use super::row::*;
use crate::Role::{PoolAdmin, PoolOperator, ReadOnly};
use crate::table::{Class, ClassKind, Role};

/// The class `session`.
pub static SESSION_CLASS: Class = Class {
    name: "session",
    doc: "A login",
    kind: ClassKind::Unlisted,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("this_host", HOST, "The host it was opened on"),
        runtime("this_user", USER, "No user; kept for older clients"),
        runtime("last_active", DATE_TIME, "When it was last used"),
        runtime("pool", BOOL, "Whether a host of the pool opened it"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        runtime("is_local_superuser", BOOL, "Whether it may do everything on this host"),
        runtime("subject", SUBJECT, "The subject that opened it, if a directory knows it"),
        runtime("validation_time", DATE_TIME, "When that was last checked"),
        runtime("auth_user_sid", STRING, "Name of the user in the directory"),
        runtime("auth_user_name", STRING, "Account"),
        creator("rbac_permissions", STRING_SET, "Roles of the user"),
        runtime("tasks", TASKS, "Tasks that were started in it"),
        creator("parent", SESSION, "The session that made it"),
        runtime("originator", STRING, "What the client called itself"),
        runtime("client_certificate", BOOL, "Whether a certificate opened it"),
    ],
    messages: &[
        msg("login_with_password", ReadOnly, "Opens a session")
            .takes(&[
                p("uname", STRING),
                p("pwd", STRING),
                opt_text("version", "1.0"),
                opt("originator", STRING),
            ])
            .gives(SESSION)
            .fails(&["SESSION_AUTHENTICATION_FAILED", "SESSION_AUTHORIZATION_FAILED", "HOST_IS_SLAVE"])
            .sync()
            .open(),
        msg("slave_local_login_with_password", ReadOnly, "Opens a session with a host that does not decide")
            .takes(&[p("uname", STRING), p("pwd", STRING)])
            .gives(SESSION)
            .fails(&["SESSION_AUTHENTICATION_FAILED", "SESSION_AUTHORIZATION_FAILED"])
            .sync()
            .open(),
        msg("logout", ReadOnly, "Ends the session").sync(),
        msg("local_logout", ReadOnly, "Ends a session that was opened by slave_local_login_with_password")
            .sync(),
        msg("change_password", ReadOnly, "Changes the password of the account of the session")
            .takes(&[p("old_pwd", STRING), p("new_pwd", STRING)])
            .fails(&["SESSION_AUTHENTICATION_FAILED"])
            .sync(),
        msg("get_all_subject_identifiers", ReadOnly, "Accounts that are logged in").gives(STRING_SET).sync(),
        msg("logout_subject_identifier", PoolOperator, "Ends all sessions of an account")
            .takes(&[p("subject_identifier", STRING)])
            .sync(),
        msg(
            "lend",
            PoolAdmin,
            "Gives another host of the pool a name, good for a minute and one transfer here, for a client of its own \
             that it sends here (Tapio's own)",
        )
        .takes(&[p("user", STRING), p("role", STRING), p("task", STRING)])
        .gives(STRING)
        .fails(&["OPERATION_NOT_ALLOWED", "INVALID_VALUE"])
        .sync(),
    ],
    constructor: None,
    setter_role: Role::ReadOnly,
    reader_role: Role::ReadOnly,
    persistent: false,
};

/// The class `role`.
pub static ROLE_CLASS: Class = Class {
    name: "role",
    doc: "A set of permissions that a user can have",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        runtime("name_label", STRING, "Name for people"),
        runtime("name_description", STRING, "What it is, for people"),
        runtime("subroles", ROLES, "Roles it includes"),
        runtime("is_internal", BOOL, "Whether it is for the toolstack alone"),
    ],
    messages: &[],
    constructor: None,
    setter_role: Role::PoolAdmin,
    reader_role: Role::ReadOnly,
    persistent: true,
};
