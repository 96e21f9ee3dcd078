//! A host that was alone joins a pool.

use std::collections::{BTreeMap, BTreeSet};

use tapio_model::{ApiError, Value};
use tapio_store::Etcd;

use super::version::Version;
use super::{Access, Destination, Pool, Visit};
use crate::args::Args;
use crate::call::Call;
use crate::db::{Object, reference_of};
use crate::plan::steps::step;
use crate::storage;

/// Records of a class at the pool: by reference, each a map of fields.
type Records = BTreeMap<String, Value>;

fn records(visit: &dyn Visit, class: &str) -> Result<Records, ApiError> {
    match visit.call(&format!("{class}.get_all_records"), Vec::new())? {
        Value::Map(records) => Ok(records),
        _ => Err(ApiError::internal(format!("the pool answers no records of {class}"))),
    }
}

fn field<'a>(record: &'a Value, name: &str) -> &'a Value {
    match record {
        Value::Map(fields) => fields.get(name).unwrap_or(&Value::Void),
        _ => &Value::Void,
    }
}

fn text<'a>(record: &'a Value, name: &str) -> &'a str {
    field(record, name).as_str().unwrap_or_default()
}

fn texts(record: &Value, name: &str) -> BTreeMap<String, String> {
    field(record, name).to_string_map()
}

/// `pool.join`, on the host that joins.
pub(super) fn join(call: &Call<Pool>, args: &Args, force: bool) -> Result<Value, ApiError> {
    let pool = &call.part;
    let (address, user, password) = (args.text(0)?, args.text(1)?, args.text(2)?);
    let to = Destination { address: address.to_owned(), certificate: None };
    let visit = pool.link()?.visit(&to, user, password).map_err(|error| {
        tracing::info!(address, %error, "no login at the pool");
        match &*error.code {
            "HOST_IS_SLAVE" => error,
            _ => ApiError::new("JOINING_HOST_SERVICE_FAILED", [error.to_string()]),
        }
    })?;
    let own = check(pool, &*visit, force)?;
    let told = visit.call("pool.get_database_access", Vec::new())?.to_string_map();
    let host = own.uuid()?;
    let access = Access::receive(&pool.state_dir, host, &told).map_err(ApiError::internal)?;
    let failed = |why: String| ApiError::new("JOINING_HOST_SERVICE_FAILED", [why]);
    let etcd = Etcd::open(&access.options).map_err(|error| failed(error.to_string()))?;
    step("pool-join:told");
    // SRs are attached again by the daemon that starts as a member: their PBDs stay wanted.
    let plugged: Vec<String> = pool
        .db
        .find("PBD", "host", &own.reference)
        .iter()
        .filter(|pbd| pbd.bool("currently_attached"))
        .map(|pbd| pbd.reference.clone())
        .collect();
    let again = || plugged.iter().for_each(|pbd| drop(storage::plug_pbd(&pool.storage, pbd)));
    for pbd in &plugged {
        storage::unplug_pbd(&pool.storage, pbd).inspect_err(|_| again())?;
    }
    let brought = pool
        .db
        .change(|change| {
            for pbd in &plugged {
                storage::want_pbd(change, pbd)?;
            }
            change.put_note(super::srs::JOINED, "");
            Ok(())
        })
        .and_then(|()| super::bring(pool.db.store(), &etcd, host).map_err(failed));
    step("pool-join:brought");
    let kept = brought.and_then(|()| access.keep(&pool.state_dir).map_err(ApiError::internal));
    if let Err(error) = kept {
        // The pool may have records of this host; they are written over when it joins after all.
        let forgotten = pool.db.change(|change| {
            change.drop_note(super::srs::JOINED);
            Ok(())
        });
        if let Err(error) =
            forgotten.and_then(|()| Access::forget(&pool.state_dir).map_err(ApiError::internal))
        {
            tracing::warn!(%error, "what the pool told stays");
        }
        again();
        return Err(error);
    }
    step("pool-join:kept");
    tracing::info!(address, "this host belongs to a pool, and starts again as its member");
    pool.link()?.restart();
    Ok(Value::Void)
}

/// The checks in their order; the first that fails is the error. Answers the record of this host.
fn check(pool: &Pool, visit: &dyn Visit, force: bool) -> Result<std::sync::Arc<Object>, ApiError> {
    let db = &pool.db;
    let (pools, hosts) = (records(visit, "pool")?, records(visit, "host")?);
    let theirs = pools.values().next().ok_or_else(|| ApiError::internal("the other host has no pool"))?;
    let is_ha = |pool: &std::sync::Arc<Object>| pool.bool("ha_enabled");
    if db.all("pool").iter().any(is_ha) || field(theirs, "ha_enabled").as_bool() == Some(true) {
        return Err(ApiError::bare("HA_IS_ENABLED"));
    }
    let own_pool = db.all("pool").first().map(|pool| pool.text("uuid").to_owned()).unwrap_or_default();
    let own = db.get("host", &crate::basics::this_host(db))?;
    if own_pool == text(theirs, "uuid") || hosts.contains_key(&own.reference) && pool.is_member() {
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", ["the host belongs to that pool already"]));
    }
    if db.count("host") > 1 {
        return Err(ApiError::bare("JOINING_HOST_CANNOT_BE_MASTER_OF_OTHER_HOSTS"));
    }
    if pool.is_member() {
        let why =
            "the host's own database is on etcd: it is a pool of its own (etcd-endpoints in tapiod.conf)";
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    let guests: Vec<_> = db.all("VM").into_iter().filter(|vm| !vm.bool("is_control_domain")).collect();
    let runs = |vm: &&std::sync::Arc<Object>| matches!(vm.text("power_state"), "Running" | "Paused");
    if guests.iter().any(|vm| runs(&vm)) {
        return Err(ApiError::bare("JOINING_HOST_CANNOT_HAVE_RUNNING_VMS"));
    }
    if guests.iter().any(|vm| !vm.map("current_operations").is_empty()) {
        return Err(ApiError::bare("JOINING_HOST_CANNOT_HAVE_VMS_WITH_CURRENT_OPERATIONS"));
    }
    let master =
        hosts.get(text(theirs, "master")).ok_or_else(|| ApiError::internal("the pool has no coordinator"))?;
    let (our_cpu, their_cpu) = (own.map("cpu_info"), texts(master, "cpu_info"));
    if own.get("capabilities").clone() != *field(master, "capabilities") {
        return Err(ApiError::bare("HOSTS_NOT_COMPATIBLE"));
    }
    let differs = |key: &&&str| our_cpu.get(**key) != their_cpu.get(**key);
    if let Some(key) = ["vendor", "family", "model"].iter().find(differs).filter(|_| !force) {
        let of = |cpu: &BTreeMap<String, String>| cpu.get(*key).cloned().unwrap_or_default();
        let why = format!("the processors' {key} is {} here and {} there", of(&our_cpu), of(&their_cpu));
        return Err(ApiError::new("HOSTS_NOT_HOMOGENEOUS", [why]));
    }
    if db.all("SR").iter().any(|sr| sr.bool("shared")) {
        return Err(ApiError::bare("JOINING_HOST_CANNOT_CONTAIN_SHARED_SRS"));
    }
    let version = texts(master, "software_version").remove("product_version").unwrap_or_default();
    if !version.parse().is_ok_and(|theirs| Version::own().works_with(theirs)) {
        let params = [Version::own().to_string(), version];
        return Err(ApiError::new("POOL_JOINING_HOST_MUST_HAVE_SAME_API_VERSION", params));
    }
    let drivers = records(visit, "SM")?;
    let kinds = |records: &mut dyn Iterator<Item = String>| records.collect::<BTreeSet<String>>();
    let theirs = kinds(&mut drivers.values().map(|driver| text(driver, "type").to_owned()));
    let ours = kinds(&mut db.all("SM").iter().map(|driver| driver.text("type").to_owned()));
    if let Some(missing) = theirs.difference(&ours).next() {
        return Err(ApiError::new("POOL_JOINING_SM_FEATURES_INCOMPATIBLE", [missing.as_str(), ""]));
    }
    debug_assert_eq!(own.reference, reference_of(own.uuid()?));
    Ok(own)
}
