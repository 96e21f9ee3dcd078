//! What a role may do.

use tapio_model::{ApiError, Role, Value};

use crate::caller::Caller;
use crate::db::Db;

/// A role as a number, for an atomic.
pub(crate) const fn rank(role: Role) -> u8 {
    role as u8
}

/// The role of a number; that of one which is none is the least.
pub(crate) fn from_rank(rank: u8) -> Role {
    Role::ALL.get(usize::from(rank)).copied().unwrap_or(Role::ReadOnly)
}

/// Checks that the caller may send a message.
///
/// # Errors
/// `RBAC_PERMISSION_DENIED`.
pub fn check(caller: &Caller, least: Role, method: &str) -> Result<(), ApiError> {
    if caller.role >= least {
        return Ok(());
    }
    let what = format!(
        "the account {} has the role {}, {} is needed",
        caller.user,
        caller.role.name(),
        least.name()
    );
    Err(ApiError::new("RBAC_PERMISSION_DENIED", [method.to_ascii_lowercase(), what]))
}

/// A refusal that has nothing to do with one message.
pub fn denied(method: &str) -> ApiError {
    let what = "the role of this session does not include it".to_owned();
    ApiError::new("RBAC_PERMISSION_DENIED", [method.to_ascii_lowercase(), what])
}

/// What each role is for, with the UUID that XenServer gives its record (the MD5 of the name).
const RECORDS: [(Role, &str, &str); 6] = [
    (Role::PoolAdmin, "0165f154-ba3e-034e-6b27-5d271af109ba", "Everything, accounts included"),
    (Role::PoolOperator, "b9ce9791-0604-50cd-0649-09b3284c7dfd", "Hosts, storage and VMs"),
    (Role::VmPowerAdmin, "7955168d-7bec-10ed-105f-c6a7e6e63249", "VMs with their snapshots, memory and host"),
    (Role::VmAdmin, "aaa00ab5-7340-bfbc-0d1b-7cf342639a6e", "VMs and their disks"),
    (Role::VmOperator, "fb8d4ff9-310c-a959-0613-54101535d3d5", "Starts and ends VMs, uses their consoles"),
    (Role::ReadOnly, "7233b8e3-eacb-d7da-2c95-f2e581cdbf4e", "Looks at everything that is no secret"),
];

/// Makes the role records, always with the same UUIDs. Records of other UUIDs, of an earlier version, go.
///
/// # Errors
/// The store's.
pub(crate) fn make_records(db: &Db) -> Result<(), ApiError> {
    let Some(class) = tapio_model::class("role") else { return Ok(()) };
    db.change(|change| {
        let is_known = |uuid: &str| RECORDS.iter().any(|(_, known, _)| *known == uuid);
        let others: Vec<String> = change
            .all("role")
            .iter()
            .filter(|role| !is_known(role.text("uuid")))
            .map(|role| role.reference.clone())
            .collect();
        for reference in others {
            change.destroy("role", &reference)?;
        }
        for (role, uuid, description) in RECORDS {
            if change.by_uuid("role", uuid).is_ok() {
                continue;
            }
            let fields = [
                ("uuid", Value::from(uuid)),
                ("name_label", role.name().into()),
                ("name_description", description.into()),
            ];
            let known: Vec<(&str, Value)> =
                fields.into_iter().filter(|(field, _)| class.field(field).is_some()).collect();
            change.create("role", &known)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_has_a_number_and_a_record() {
        for role in Role::ALL {
            assert_eq!(from_rank(rank(role)), role);
            assert!(RECORDS.iter().any(|(of, ..)| *of == role), "{}", role.name());
        }
        assert_eq!(from_rank(200), Role::ReadOnly);
    }
}
