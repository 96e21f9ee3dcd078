//! The pool.

use super::row::*;
use crate::Role::{PoolAdmin, PoolOperator, VmOperator};
use crate::table::{Class, ClassKind, Enum, Role, Type};

const SYNC_FREQUENCY: Type = Type::Enum(&Enum { name: "update_sync_frequency", words: &["daily", "weekly"] });
const TELEMETRY: Type =
    Type::Enum(&Enum { name: "telemetry_frequency", words: &["daily", "weekly", "monthly"] });
const OPERATION: Type = Type::Enum(&Enum {
    name: "pool_allowed_operations",
    words: &[
        "ha_enable",
        "ha_disable",
        "cluster_create",
        "designate_new_master",
        "configure_repositories",
        "sync_updates",
        "get_updates",
        "apply_updates",
        "tls_verification_enable",
        "cert_refresh",
        "exchange_certificates_on_join",
        "exchange_ca_certificates_on_join",
        "copy_primary_host_certs",
        "eject",
    ],
});

const JOIN_ERRORS: [&str; 13] = [
    "JOINING_HOST_SERVICE_FAILED",
    "HOST_IS_SLAVE",
    "HA_IS_ENABLED",
    "OPERATION_NOT_ALLOWED",
    "JOINING_HOST_CANNOT_BE_MASTER_OF_OTHER_HOSTS",
    "JOINING_HOST_CANNOT_HAVE_RUNNING_VMS",
    "JOINING_HOST_CANNOT_HAVE_VMS_WITH_CURRENT_OPERATIONS",
    "HOSTS_NOT_COMPATIBLE",
    "HOSTS_NOT_HOMOGENEOUS",
    "JOINING_HOST_CANNOT_CONTAIN_SHARED_SRS",
    "POOL_JOINING_HOST_MUST_HAVE_SAME_API_VERSION",
    "POOL_JOINING_SM_FEATURES_INCOMPATIBLE",
    "VDI_IN_USE",
];

/// The class `pool`.
pub static POOL_CLASS: Class = Class {
    name: "pool",
    doc: "All hosts that work together",
    kind: ClassKind::Objects,
    fields: &[
        runtime("uuid", STRING, "Unique and lasting name"),
        writable("name_label", STRING, "Name for people"),
        writable("name_description", STRING, "What it is, for people"),
        runtime("master", HOST, "The host that decides"),
        writable("default_SR", SR, "The SR of new disks if the caller names none"),
        writable("suspend_image_SR", SR, "Where memory goes when VMs are suspended"),
        writable("crash_dump_SR", SR, "Where crash dumps go"),
        writable("other_config", STRING_MAP, "Anything its users want to note"),
        runtime("ha_enabled", BOOL, "Whether VMs of failed hosts are restarted"),
        runtime("ha_configuration", STRING_MAP, "How that is set up"),
        runtime("ha_statefiles", STRING_SET, "Disks that high availability keeps its state in"),
        runtime("ha_host_failures_to_tolerate", INT, "Hosts that may fail at a time"),
        runtime("ha_plan_exists_for", INT, "Failures there is a plan for"),
        writable("ha_allow_overcommit", BOOL, "Whether more may run than failures allow"),
        runtime("ha_overcommitted", BOOL, "Whether more runs than failures allow"),
        runtime("blobs", Type::Map(&STRING, &BLOB), "Binary blobs that belong to it"),
        writable("tags", STRING_SET, "Words its users gave it").set_by(VmOperator),
        writable("gui_config", STRING_MAP, "What user interfaces note").set_by(VmOperator),
        writable("health_check_config", STRING_MAP, "How health is reported"),
        runtime("wlb_url", STRING, "Service that balances load"),
        runtime("wlb_username", STRING, "Account there"),
        writable("wlb_enabled", BOOL, "Whether load is balanced"),
        writable("wlb_verify_cert", BOOL, "Whether its certificate is checked"),
        runtime("redo_log_enabled", BOOL, "Whether changes of the database are logged to a disk"),
        runtime("redo_log_vdi", VDI, "That disk"),
        runtime("vswitch_controller", STRING, "Kept for older clients"),
        runtime("restrictions", STRING_MAP, "What is not available"),
        runtime("metadata_VDIs", VDIS, "Disks that hold metadata of this pool")
            .inverse("VDI", "metadata_of_pool"),
        runtime("ha_cluster_stack", STRING, "What high availability is built on"),
        allowed_operations(&OPERATION),
        current_operations(&OPERATION),
        runtime("guest_agent_config", STRING_MAP, "How guests' agents are set up"),
        runtime("cpu_info", STRING_MAP, "What its processors are"),
        writable("policy_no_vendor_device", BOOL, "Whether new VMs show no device for driver updates"),
        writable("live_patching_disabled", BOOL, "Whether patches wait for a restart"),
        runtime("igmp_snooping_enabled", BOOL, "Whether networks filter multicast"),
        creator("uefi_certificates", STRING, "Certificates for secure boot"),
        creator("custom_uefi_certificates", STRING, "Certificates for secure boot that were added"),
        writable("is_psr_pending", BOOL, "Whether the pool's secret is being changed"),
        runtime("tls_verification_enabled", BOOL, "Whether it checks certificates of other hosts"),
        runtime("repositories", REPOSITORIES, "Where updates come from"),
        runtime("client_certificate_auth_enabled", BOOL, "Whether clients may log in by certificate"),
        runtime("client_certificate_auth_name", STRING, "Name such a certificate must have"),
        runtime("repository_proxy_url", STRING, "Proxy to the updates"),
        runtime("repository_proxy_username", STRING, "Account there"),
        runtime("repository_proxy_password", SECRET, "Password there"),
        writable("migration_compression", BOOL, "Whether memory is compressed on the way"),
        writable("coordinator_bias", BOOL, "Whether VMs avoid the host that decides").or_bool(true),
        creator("local_auth_max_threads", INT, "Logins by the host's accounts at a time").or_int(8),
        creator("ext_auth_max_threads", INT, "Logins by a directory at a time").or_int(1),
        runtime("telemetry_uuid", SECRET, "Name in telemetry"),
        runtime("telemetry_frequency", TELEMETRY, "How often telemetry is collected").or_text("weekly"),
        runtime("telemetry_next_collection", DATE_TIME, "When it is collected next"),
        runtime("last_update_sync", DATE_TIME, "When updates were last looked for"),
        runtime("update_sync_frequency", SYNC_FREQUENCY, "How often updates are looked for")
            .or_text("weekly"),
        runtime("update_sync_day", INT, "Day of the week for that"),
        runtime("update_sync_enabled", BOOL, "Whether updates are looked for"),
    ],
    messages: &[
        msg(
            "sync_database",
            PoolOperator,
            "Returns when every change made before is durable, which each is when its own call returns",
        ),
        msg("join", PoolAdmin, "Lets this host, which is alone, join the pool of another")
            .takes(&[p("master_address", STRING), p("master_username", STRING), p("master_password", STRING)])
            .fails(&JOIN_ERRORS),
        msg("join_force", PoolAdmin, "The same, although the processors differ")
            .takes(&[p("master_address", STRING), p("master_username", STRING), p("master_password", STRING)])
            .fails(&JOIN_ERRORS),
        msg(
            "get_database_access",
            PoolAdmin,
            "Where the pool's database is, and how to log in there, for a host that joins (Tapio's own)",
        )
        .gives(STRING_MAP)
        .fails(&["OPERATION_NOT_ALLOWED"])
        .sync(),
        msg("eject", PoolOperator, "Lets a host leave the pool: it starts again alone, with a new database")
            .takes(&[p("host", HOST)])
            .fails(&["HA_IS_ENABLED", "OPERATION_NOT_ALLOWED", "CANNOT_CONTACT_HOST", "VDI_IN_USE"]),
        msg("designate_new_master", PoolOperator, "Lets another host decide for the pool")
            .takes(&[p("host", HOST)])
            .fails(&["HOST_OFFLINE", "OPERATION_NOT_ALLOWED", "CANNOT_CONTACT_HOST"]),
        msg(
            "emergency_transition_to_master",
            PoolOperator,
            "Lets this host decide for the pool if no other host does",
        )
        .fails(&["OPERATION_NOT_ALLOWED"]),
        msg(
            "recover_slaves",
            PoolOperator,
            "The other hosts that follow this one, which they do by themselves",
        )
        .gives(Type::Set(&HOST))
        .fails(&["OPERATION_NOT_ALLOWED"]),
        msg("enable_ha", PoolOperator, "VMs of hosts that die are started on others from now on")
            .takes(&[p("heartbeat_srs", Type::Set(&SR)), p("configuration", STRING_MAP)])
            .fails(&[
                "HA_IS_ENABLED",
                "OPERATION_NOT_ALLOWED",
                "HOST_OFFLINE",
                "SR_HAS_NO_PBDS",
                "HA_CONSTRAINT_VIOLATION_SR_NOT_SHARED",
            ]),
        msg("disable_ha", PoolOperator, "VMs of hosts that die are not started on others any more"),
        msg("ha_prevent_restarts_for", PoolOperator, "Nothing is started for so many seconds")
            .takes(&[p("seconds", INT)]),
        msg("ha_failover_plan_exists", PoolOperator, "Whether VMs have room when so many hosts fail")
            .takes(&[p("n", INT)])
            .gives(BOOL),
        msg(
            "ha_compute_max_host_failures_to_tolerate",
            PoolOperator,
            "How many hosts may fail so that VMs still have room",
        )
        .gives(INT),
        msg(
            "ha_compute_hypothetical_max_host_failures_to_tolerate",
            Role::ReadOnly,
            "How many hosts may fail so that these VMs still have room, if they had these values of ha_restart_priority and \
             all others none",
        )
        .takes(&[p("configuration", Type::Map(&VM, &STRING))])
        .gives(INT)
        .fails(&["INVALID_VALUE"]),
        msg("set_ha_host_failures_to_tolerate", PoolOperator, "How many hosts shall be allowed to fail")
            .takes(&[p("self", POOL), p("value", INT)])
            .fails(&["HA_NO_PLAN"]),
    ],
    constructor: None,
    setter_role: Role::PoolOperator,
    reader_role: Role::ReadOnly,
    persistent: true,
};
