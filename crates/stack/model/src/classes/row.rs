//! Short words for the rows of the table.

use crate::table::{Enum, Field, FieldAccess, Initial, Message, Param, Role, Source, Type};

pub const BOOL: Type = Type::Bool;
pub const INT: Type = Type::Int;
pub const FLOAT: Type = Type::Float;
pub const STRING: Type = Type::String;
pub const DATE_TIME: Type = Type::DateTime;
pub const STRING_SET: Type = Type::Set(&STRING);
pub const STRING_MAP: Type = Type::Map(&STRING, &STRING);

pub const BLOB: Type = Type::Ref("blob");
pub const BOND: Type = Type::Ref("Bond");
pub const CERTIFICATE: Type = Type::Ref("Certificate");
pub const CONSOLE: Type = Type::Ref("console");
pub const CRASHDUMP: Type = Type::Ref("crashdump");
pub const DR_TASK: Type = Type::Ref("DR_task");
pub const FEATURE: Type = Type::Ref("Feature");
pub const HOST: Type = Type::Ref("host");
pub const HOST_CPU: Type = Type::Ref("host_cpu");
pub const HOST_CRASHDUMP: Type = Type::Ref("host_crashdump");
pub const HOST_METRICS: Type = Type::Ref("host_metrics");
pub const HOST_PATCH: Type = Type::Ref("host_patch");
pub const MESSAGE: Type = Type::Ref("message");
pub const NETWORK: Type = Type::Ref("network");
pub const NETWORK_SRIOV: Type = Type::Ref("network_sriov");
pub const PBD: Type = Type::Ref("PBD");
pub const PCI: Type = Type::Ref("PCI");
pub const PGPU: Type = Type::Ref("PGPU");
pub const PIF: Type = Type::Ref("PIF");
pub const PIF_METRICS: Type = Type::Ref("PIF_metrics");
pub const POOL: Type = Type::Ref("pool");
pub const POOL_UPDATE: Type = Type::Ref("pool_update");
pub const PUSB: Type = Type::Ref("PUSB");
pub const REPOSITORY: Type = Type::Ref("Repository");
pub const ROLE: Type = Type::Ref("role");
pub const SECRET: Type = Type::Ref("secret");
pub const SESSION: Type = Type::Ref("session");
pub const SR: Type = Type::Ref("SR");
pub const SUBJECT: Type = Type::Ref("subject");
pub const TASK: Type = Type::Ref("task");
pub const TUNNEL: Type = Type::Ref("tunnel");
pub const USER: Type = Type::Ref("user");
pub const VBD: Type = Type::Ref("VBD");
pub const VBD_METRICS: Type = Type::Ref("VBD_metrics");
pub const VDI: Type = Type::Ref("VDI");
pub const VGPU: Type = Type::Ref("VGPU");
pub const VIF: Type = Type::Ref("VIF");
pub const VIF_METRICS: Type = Type::Ref("VIF_metrics");
pub const VLAN: Type = Type::Ref("VLAN");
pub const VM: Type = Type::Ref("VM");
pub const VM_APPLIANCE: Type = Type::Ref("VM_appliance");
pub const VM_GROUP: Type = Type::Ref("VM_group");
pub const VM_GUEST_METRICS: Type = Type::Ref("VM_guest_metrics");
pub const VM_METRICS: Type = Type::Ref("VM_metrics");
pub const VMPP: Type = Type::Ref("VMPP");
pub const VMSS: Type = Type::Ref("VMSS");
pub const VTPM: Type = Type::Ref("VTPM");
pub const VUSB: Type = Type::Ref("VUSB");

pub const BONDS: Type = Type::Set(&BOND);
pub const CERTIFICATES: Type = Type::Set(&CERTIFICATE);
pub const CONSOLES: Type = Type::Set(&CONSOLE);
pub const CRASHDUMPS: Type = Type::Set(&CRASHDUMP);
pub const FEATURES: Type = Type::Set(&FEATURE);
pub const HOSTS: Type = Type::Set(&HOST);
pub const HOST_CPUS: Type = Type::Set(&HOST_CPU);
pub const HOST_CRASHDUMPS: Type = Type::Set(&HOST_CRASHDUMP);
pub const HOST_PATCHS: Type = Type::Set(&HOST_PATCH);
pub const NETWORK_SRIOVS: Type = Type::Set(&NETWORK_SRIOV);
pub const PBDS: Type = Type::Set(&PBD);
pub const PCIS: Type = Type::Set(&PCI);
pub const PGPUS: Type = Type::Set(&PGPU);
pub const PIFS: Type = Type::Set(&PIF);
pub const POOL_UPDATES: Type = Type::Set(&POOL_UPDATE);
pub const PUSBS: Type = Type::Set(&PUSB);
pub const REPOSITORIES: Type = Type::Set(&REPOSITORY);
pub const ROLES: Type = Type::Set(&ROLE);
pub const TASKS: Type = Type::Set(&TASK);
pub const TUNNELS: Type = Type::Set(&TUNNEL);
pub const VBDS: Type = Type::Set(&VBD);
pub const VDIS: Type = Type::Set(&VDI);
pub const VGPUS: Type = Type::Set(&VGPU);
pub const VIFS: Type = Type::Set(&VIF);
pub const VLANS: Type = Type::Set(&VLAN);
pub const VMS: Type = Type::Set(&VM);
pub const VM_GROUPS: Type = Type::Set(&VM_GROUP);
pub const VTPMS: Type = Type::Set(&VTPM);
pub const VUSBS: Type = Type::Set(&VUSB);

pub const GUIDANCE: Type = Type::Enum(&Enum {
    name: "update_guidances",
    words: &[
        "reboot_host",
        "reboot_host_on_livepatch_failure",
        "reboot_host_on_kernel_livepatch_failure",
        "reboot_host_on_xen_livepatch_failure",
        "restart_toolstack",
        "restart_device_model",
        "restart_vm",
    ],
});

pub const DOMAIN_TYPE: Type =
    Type::Enum(&Enum { name: "domain_type", words: &["hvm", "pv", "pv_in_pvh", "pvh", "unspecified"] });

const fn field(name: &'static str, ty: Type, access: FieldAccess, doc: &'static str) -> Field {
    Field { name, ty, access, initial: Initial::Empty, source: Source::Kept, setter: None, doc }
}

/// A field that the toolstack alone sets.
pub const fn runtime(name: &'static str, ty: Type, doc: &'static str) -> Field {
    field(name, ty, FieldAccess::Runtime, doc)
}

/// A field that the creator sets.
pub const fn creator(name: &'static str, ty: Type, doc: &'static str) -> Field {
    field(name, ty, FieldAccess::Constructor, doc)
}

/// A field that a caller may set if its role allows it.
pub const fn writable(name: &'static str, ty: Type, doc: &'static str) -> Field {
    field(name, ty, FieldAccess::ReadWrite, doc)
}

/// What may be done with an object now; `operation` is the class's enumeration.
pub const fn allowed_operations(operation: &'static Type) -> Field {
    runtime("allowed_operations", Type::Set(operation), "What can be done with it now").volatile()
}

/// What is being done with it.
pub const fn current_operations(operation: &'static Type) -> Field {
    let doc = "What is being done with it: task to operation";
    runtime("current_operations", Type::Map(&STRING, operation), doc).volatile()
}

impl Field {
    pub const fn or_bool(self, truth: bool) -> Self {
        Self { initial: Initial::Bool(truth), ..self }
    }

    pub const fn or_int(self, number: i64) -> Self {
        Self { initial: Initial::Int(number), ..self }
    }

    pub const fn or_float(self, number: f64) -> Self {
        Self { initial: Initial::Float(number), ..self }
    }

    pub const fn or_text(self, text: &'static str) -> Self {
        Self { initial: Initial::Text(text), ..self }
    }

    /// The creator must say.
    pub const fn required(self) -> Self {
        Self { initial: Initial::Required, ..self }
    }

    /// Set by callers of this role on, whatever the class says.
    pub const fn set_by(self, least: Role) -> Self {
        Self { setter: Some(least), ..self }
    }

    /// Kept in memory alone.
    pub const fn volatile(self) -> Self {
        Self { source: Source::Volatile, ..self }
    }

    /// The objects of that class whose field names this object.
    pub const fn inverse(self, class: &'static str, field: &'static str) -> Self {
        Self { source: Source::Inverse(class, field), ..self }
    }
}

/// A message with a session, that gives nothing, and may be called by `Async.`.
pub const fn msg(name: &'static str, role: Role, doc: &'static str) -> Message {
    let result = Type::Void;
    Message { name, params: &[], result, role, is_async: true, needs_session: true, errors: &[], doc }
}

impl Message {
    pub const fn takes(self, params: &'static [Param]) -> Self {
        Self { params, ..self }
    }

    pub const fn gives(self, result: Type) -> Self {
        Self { result, ..self }
    }

    pub const fn fails(self, errors: &'static [&'static str]) -> Self {
        Self { errors, ..self }
    }

    /// There is no `Async.` form.
    pub const fn sync(self) -> Self {
        Self { is_async: false, ..self }
    }

    /// It needs no session.
    pub const fn open(self) -> Self {
        Self { needs_session: false, ..self }
    }
}

/// A parameter that must be given.
pub const fn p(name: &'static str, ty: Type) -> Param {
    Param { name, ty, default: None }
}

/// A parameter that is the empty value of its type when it is left away.
pub const fn opt(name: &'static str, ty: Type) -> Param {
    Param { name, ty, default: Some(Initial::Empty) }
}

pub const fn opt_text(name: &'static str, text: &'static str) -> Param {
    Param { name, ty: STRING, default: Some(Initial::Text(text)) }
}

pub const fn opt_bool(name: &'static str, truth: bool) -> Param {
    Param { name, ty: BOOL, default: Some(Initial::Bool(truth)) }
}
