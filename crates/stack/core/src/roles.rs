//! What a role may do.

use tapio_model::{ApiError, Role, Value};

use crate::caller::Caller;
use crate::db::Db;

/// The name of a role on the wire.
pub const fn name(role: Role) -> &'static str {
    match role {
        Role::ReadOnly => "read-only",
        Role::VmAdmin => "vm-admin",
        Role::PoolOperator => "pool-operator",
        Role::PoolAdmin => "pool-admin",
    }
}

/// A role as a number, for an atomic.
pub(crate) const fn rank(role: Role) -> u8 {
    match role {
        Role::ReadOnly => 0,
        Role::VmAdmin => 1,
        Role::PoolOperator => 2,
        Role::PoolAdmin => 3,
    }
}

/// The role of a number; that of one which is none is the least.
pub(crate) const fn from_rank(rank: u8) -> Role {
    match rank {
        3 => Role::PoolAdmin,
        2 => Role::PoolOperator,
        1 => Role::VmAdmin,
        _ => Role::ReadOnly,
    }
}

/// Checks that the caller may send a message.
///
/// # Errors
/// `RBAC_PERMISSION_DENIED`.
pub fn check(caller: &Caller, least: Role, method: &str) -> Result<(), ApiError> {
    if caller.role >= least {
        return Ok(());
    }
    let what =
        format!("the account {} has the role {}, {} is needed", caller.user, name(caller.role), name(least));
    Err(ApiError::new("RBAC_PERMISSION_DENIED", [method.to_ascii_lowercase(), what]))
}

/// A refusal that has nothing to do with one message.
pub fn denied(method: &str) -> ApiError {
    let what = "the role of this session does not include it".to_owned();
    ApiError::new("RBAC_PERMISSION_DENIED", [method.to_ascii_lowercase(), what])
}

/// The role records, always with the same UUIDs.
///
/// # Errors
/// The store's.
pub(crate) fn make_records(db: &Db) -> Result<(), ApiError> {
    const ROLES: [(&str, &str, &str); 4] = [
        ("0165f154-ba3e-034e-6b27-5d271af109ba", "pool-admin", "Everything, accounts included"),
        ("b9ce9791-0604-50cd-0649-09b3284c7dfd", "pool-operator", "Hosts, storage and VMs"),
        ("aaa00ab5-7340-bfbc-0d1b-7cf342639a6e", "vm-admin", "VMs and their disks"),
        ("0233f154-ba3e-034e-6b27-5d271af109ba", "read-only", "Looks at everything that is no secret"),
    ];
    let Some(class) = tapio_model::class("role") else { return Ok(()) };
    db.change(|change| {
        for (uuid, name, description) in ROLES {
            if change.by_uuid("role", uuid).is_ok() {
                continue;
            }
            let fields = [
                ("uuid", Value::from(uuid)),
                ("name_label", name.into()),
                ("name_description", description.into()),
            ];
            let known: Vec<(&str, Value)> =
                fields.into_iter().filter(|(field, _)| class.field(field).is_some()).collect();
            change.create("role", &known)?;
        }
        Ok(())
    })
}
