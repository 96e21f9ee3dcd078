//! What plugins of version 1 do with the toolstack's API: sessions of their own, and the records of their VDIs.
//!
//! Such a plugin is given a session on its command line, as the protocol has it, where every user of this host can read
//! it. So the session is good for root at a UNIX socket alone, ends with the call, and changes the records of VDIs in
//! the SR that the call is about, and in no other.

use std::sync::Arc;

use tapio_model::{ApiError, Value};
use tapio_sm::{ApiSession, SrStat, Told, VdiInfo};
use uuid::Uuid;

use super::{Call, Handlers, Storage, allowed, records, this_host};
use crate::args::Args;
use crate::db::{Object, reference_of};

/// Opens a session for a plugin, and ends one.
pub(crate) struct Sessions {
    pub(crate) open: Box<dyn Fn() -> Result<String, ApiError> + Send + Sync>,
    pub(crate) end: Box<dyn Fn(&str) + Send + Sync>,
}

/// Setters that are for plugins: class, message, field.
const SETTERS: [(&str, &str, &str); 11] = [
    ("VDI", "VDI.set_managed", "managed"),
    ("VDI", "VDI.set_missing", "missing"),
    ("VDI", "VDI.set_virtual_size", "virtual_size"),
    ("VDI", "VDI.set_physical_utilisation", "physical_utilisation"),
    ("VDI", "VDI.set_is_a_snapshot", "is_a_snapshot"),
    ("VDI", "VDI.set_snapshot_of", "snapshot_of"),
    ("VDI", "VDI.set_snapshot_time", "snapshot_time"),
    ("VDI", "VDI.set_cbt_enabled", "cbt_enabled"),
    ("VDI", "VDI.set_metadata_of_pool", "metadata_of_pool"),
    ("SR", "SR.set_virtual_allocation", "virtual_allocation"),
    ("SR", "SR.set_physical_utilisation", "physical_utilisation"),
];

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("VDI.db_introduce", db_introduce);
    handlers.on("VDI.db_forget", db_forget);
    handlers.on("VDI.set_managed", |call, args| set(call, args, "VDI.set_managed"));
    handlers.on("VDI.set_missing", |call, args| set(call, args, "VDI.set_missing"));
    handlers.on("VDI.set_virtual_size", |call, args| set(call, args, "VDI.set_virtual_size"));
    handlers.on("VDI.set_physical_utilisation", |call, args| set(call, args, "VDI.set_physical_utilisation"));
    handlers.on("VDI.set_is_a_snapshot", |call, args| set(call, args, "VDI.set_is_a_snapshot"));
    handlers.on("VDI.set_snapshot_of", |call, args| set(call, args, "VDI.set_snapshot_of"));
    handlers.on("VDI.set_snapshot_time", |call, args| set(call, args, "VDI.set_snapshot_time"));
    handlers.on("VDI.set_cbt_enabled", |call, args| set(call, args, "VDI.set_cbt_enabled"));
    handlers.on("VDI.set_metadata_of_pool", |call, args| set(call, args, "VDI.set_metadata_of_pool"));
    handlers.on("SR.set_virtual_allocation", |call, args| set(call, args, "SR.set_virtual_allocation"));
    handlers.on("SR.set_physical_utilisation", |call, args| set(call, args, "SR.set_physical_utilisation"));
}

/// The SR of the plugin that calls, which must be this one.
fn check_plugin(call: &Call, sr: &str) -> Result<(), ApiError> {
    let sessions = call.part.plugin_sessions.lock();
    match sessions.get(&call.caller.session) {
        Some(of) if of.as_deref() == Some(sr) => Ok(()),
        Some(_) => {
            let what =
                format!("this plugin works on another SR than {sr}: it changes the records of its own alone");
            Err(ApiError::new("PERMISSION_DENIED", [what]))
        }
        None => {
            let what =
                "only storage plugins change the records of VDIs: use VDI.introduce, VDI.forget or SR.scan";
            Err(ApiError::new("PERMISSION_DENIED", [what]))
        }
    }
}

/// Positions of the parameters of `VDI.db_introduce` that are fields of the same name.
const FIELDS: [(usize, &str); 16] = [
    (1, "name_label"),
    (2, "name_description"),
    (3, "SR"),
    (4, "type"),
    (5, "sharable"),
    (6, "read_only"),
    (7, "other_config"),
    (8, "location"),
    (9, "xenstore_data"),
    (10, "sm_config"),
    (11, "managed"),
    (12, "virtual_size"),
    (13, "physical_utilisation"),
    (15, "is_a_snapshot"),
    (16, "snapshot_time"),
    (17, "snapshot_of"),
];

fn db_introduce(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (text, sr) = (args.text(0)?, args.text(3)?);
    check_plugin(call, sr)?;
    let uuid = Uuid::parse_str(text).map_err(|_| ApiError::new("UUID_INVALID", ["VDI", text]))?;
    let reference = reference_of(uuid);
    for (at, field) in [(12, "virtual_size"), (13, "physical_utilisation")] {
        let size = args.value(at)?.as_int().unwrap_or_default();
        if size < 0 {
            return Err(ApiError::new("INVALID_VALUE", [field.to_owned(), size.to_string()]));
        }
    }
    call.part.db.change(|change| {
        let mut fields = Vec::new();
        for (at, field) in FIELDS {
            fields.push((field, args.value(at)?.clone()));
        }
        match change.get("VDI", &reference) {
            Ok(known) if known.text("SR") != sr => {
                return Err(ApiError::new("UUID_INVALID", ["VDI".to_owned(), uuid.to_string()]));
            }
            Ok(_) => records::set_fields(change, &reference, fields)?,
            Err(_) => {
                fields.push(("uuid", Value::string(uuid.to_string())));
                change.create("VDI", &fields)?;
            }
        }
        allowed::refresh(&call.part, change, "VDI", &reference)
    })?;
    Ok(Value::String(reference))
}

fn db_forget(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let reference = args.text(0)?;
    let vdi = call.part.db.get("VDI", reference)?;
    check_plugin(call, vdi.text("SR"))?;
    if call.part.state().use_of(reference).is_some() {
        return Err(ApiError::new("VDI_IN_USE", [reference, "forget"]));
    }
    call.part.db.change(|change| records::remove(change, reference))?;
    Ok(Value::Void)
}

fn set(call: &Call, args: &Args, message: &str) -> Result<Value, ApiError> {
    let found = SETTERS.iter().find(|(_, known, _)| *known == message);
    let (class, _, field) = found.ok_or_else(|| ApiError::internal(format!("{message} sets no field")))?;
    let (reference, value) = (args.text(0)?, args.value(1)?.clone());
    let object = call.part.db.get(class, reference)?;
    let sr = if *class == "SR" { reference } else { object.text("SR") };
    check_plugin(call, sr)?;
    if value.as_int().is_some_and(|number| number < 0) {
        return Err(ApiError::new(
            "INVALID_VALUE",
            [(*field).to_owned(), value.as_int().unwrap_or(0).to_string()],
        ));
    }
    call.part.db.set(class, reference, field, value)?;
    Ok(Value::Void)
}

/// A session of a plugin; it ends with this.
struct Opened {
    storage: Arc<Storage>,
    session: String,
    host: String,
}

impl ApiSession for Opened {
    fn session(&self) -> &str {
        &self.session
    }

    fn host(&self) -> &str {
        &self.host
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.storage.plugin_sessions.lock().remove(&self.session);
        if let Some(sessions) = self.storage.sessions.get() {
            (sessions.end)(&self.session);
        }
    }
}

/// Opens a session for a plugin that works on this SR.
///
/// # Errors
/// The store's.
pub(super) fn open(storage: &Arc<Storage>, sr: Option<Uuid>) -> Result<Box<dyn ApiSession>, ApiError> {
    let sessions = storage.sessions.get();
    let sessions =
        sessions.ok_or_else(|| ApiError::internal("plugins have no sessions in this toolstack"))?;
    let session = (sessions.open)()?;
    storage.plugin_sessions.lock().insert(session.clone(), sr.map(reference_of));
    let host = this_host(&storage.db);
    Ok(Box::new(Opened { storage: Arc::clone(storage), session, host }))
}

/// VDIs of an SR as their records say.
pub(super) fn known(storage: &Storage, sr: Uuid, vdi: Option<Uuid>) -> Vec<VdiInfo> {
    let sr = reference_of(sr);
    let of_sr = |vdi: &Arc<Object>| vdi.text("SR") == sr;
    match vdi {
        Some(vdi) => {
            let found = storage.db.get("VDI", &reference_of(vdi)).ok().filter(of_sr);
            found.and_then(|vdi| info(&vdi)).into_iter().collect()
        }
        None => storage.db.find("VDI", "SR", &sr).iter().filter_map(|vdi| info(vdi)).collect(),
    }
}

fn bytes(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn info(vdi: &Object) -> Option<VdiInfo> {
    let mut sm_config = vdi.map("sm_config");
    sm_config.retain(|key, _| records::is_storage_key(key));
    Some(VdiInfo {
        uuid: vdi.uuid().ok()?,
        location: vdi.text("location").to_owned(),
        virtual_size: bytes(vdi.int("virtual_size")),
        physical_utilisation: bytes(vdi.int("physical_utilisation")),
        managed: vdi.bool("managed"),
        read_only: vdi.bool("read_only"),
        parent: vdi.text("parent").strip_prefix("OpaqueRef:").and_then(|uuid| Uuid::parse_str(uuid).ok()),
        name_label: Some(vdi.text("name_label").to_owned()),
        sm_config,
        cbt_enabled: vdi.bool("cbt_enabled"),
        is_metadata: vdi.text("type") == super::tracking::METADATA,
        told: Some(Box::new(Told {
            name_description: vdi.text("name_description").to_owned(),
            ..Told::default()
        })),
    })
}

/// The sizes in an SR's record.
///
/// # Errors
/// It has none.
pub(super) fn sizes(storage: &Storage, sr: Uuid) -> Result<SrStat, ApiError> {
    let sr = storage.db.get("SR", &reference_of(sr))?;
    Ok(SrStat {
        physical_size: bytes(sr.int("physical_size")),
        physical_utilisation: bytes(sr.int("physical_utilisation")),
        virtual_allocation: bytes(sr.int("virtual_allocation")),
    })
}
