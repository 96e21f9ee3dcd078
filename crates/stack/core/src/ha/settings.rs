//! High availability is switched on and off; VMs say what they want of it.

use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};

use super::{BEST_EFFORT, Ha, RESTART, plan};
use crate::args::Args;
use crate::call::{Call, HandlersOf};

/// The longest time for which restarts may be held back.
const HOLD_MAX: Duration = Duration::from_secs(24 * 3600);

pub(super) fn register(handlers: &mut HandlersOf<'_, Ha>) {
    handlers.on("pool.enable_ha", enable);
    handlers.on("pool.disable_ha", |call, _| {
        let pools = call.part.db.all("pool");
        call.part.db.change(|change| {
            for pool in &pools {
                change.set("pool", &pool.reference, "ha_enabled", false)?;
                change.set("pool", &pool.reference, "ha_plan_exists_for", 0)?;
                change.set("pool", &pool.reference, "ha_overcommitted", false)?;
            }
            for vm in change.all("VM").iter().filter(|vm| vm.text("ha_restart_priority") == BEST_EFFORT) {
                change.set("VM", &vm.reference, "ha_always_run", false)?;
            }
            Ok(())
        })?;
        Ok(Value::Void)
    });
    handlers.on("pool.ha_prevent_restarts_for", |call, args| {
        let wanted = Duration::from_secs(u64::try_from(args.int(0)?).unwrap_or(0)).min(HOLD_MAX);
        *call.part.not_before.lock() = Some(Instant::now() + wanted);
        Ok(Value::Void)
    });
    handlers.on("pool.ha_compute_max_host_failures_to_tolerate", |call, _| Ok(Value::Int(most(&call.part))));
    handlers.on("pool.ha_compute_hypothetical_max_host_failures_to_tolerate", hypothetical);
    handlers
        .on("pool.ha_failover_plan_exists", |call, args| Ok(Value::Bool(args.int(0)? <= most(&call.part))));
    handlers.on("pool.set_ha_host_failures_to_tolerate", |call, args| {
        let (pool, wanted) = (args.text(0)?, args.int(1)?);
        if wanted < 0
            || wanted > most(&call.part) && !call.part.db.get("pool", pool)?.bool("ha_allow_overcommit")
        {
            return Err(ApiError::bare("HA_NO_PLAN"));
        }
        call.part.db.set("pool", pool, "ha_host_failures_to_tolerate", wanted)?;
        Ok(Value::Void)
    });
    handlers.on("VM.assert_agile", |call, args| call.part.assert_agile(args.text(0)?).map(|()| Value::Void));
    handlers.on("VM.set_ha_restart_priority", set_priority);
    handlers.on("VM.set_ha_always_run", |call, args| {
        let (vm, value) = (args.text(0)?, args.bool(1)?);
        if value && call.part.enabled().is_some() {
            call.part.assert_agile(vm)?;
        }
        call.part.db.change(|change| {
            if value {
                change.set("VM", vm, "ha_restart_priority", RESTART)?;
            }
            change.set("VM", vm, "ha_always_run", value)
        })?;
        Ok(Value::Void)
    });
}

/// As many as [`most`] if these VMs had these priorities, and all others none.
fn hypothetical(call: &Call<Ha>, args: &Args) -> Result<Value, ApiError> {
    let mut needed = Vec::new();
    for (vm, priority) in args.map(0)? {
        let record = call.part.db.get("VM", &vm)?;
        match priority.as_str() {
            RESTART => needed.push(record.int("memory_static_max").unsigned_abs()),
            "" | BEST_EFFORT => {}
            other => return Err(ApiError::new("INVALID_VALUE", ["ha_restart_priority", other])),
        }
    }
    let failures = plan::failures(&call.part.memory().0, &needed);
    Ok(Value::Int(i64::try_from(failures).unwrap_or(i64::MAX)))
}

fn most(ha: &Ha) -> i64 {
    let (hosts, vms) = ha.memory();
    i64::try_from(plan::failures(&hosts, &vms)).unwrap_or(0)
}

/// `pool.enable_ha`: the SRs named have to be attached on every host; none need be.
fn enable(call: &Call<Ha>, args: &Args) -> Result<Value, ApiError> {
    let ha = &call.part;
    if !ha.pool.is_member() {
        let why = "this host belongs to no pool on etcd: see etcd-endpoints in tapiod.conf";
        return Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
    }
    if ha.enabled().is_some() {
        return Err(ApiError::bare("HA_IS_ENABLED"));
    }
    let hosts = ha.db.all("host");
    for host in &hosts {
        if !ha.pool.is_live(&host.reference) {
            return Err(ApiError::new("HOST_OFFLINE", [&host.reference]));
        }
    }
    for sr in args.value(0)?.as_set().into_iter().flatten().filter_map(Value::as_str) {
        let record = ha.db.get("SR", sr)?;
        let pbds = ha.db.find("PBD", "SR", sr);
        let is_on =
            |host: &str| pbds.iter().any(|pbd| pbd.text("host") == host && pbd.bool("currently_attached"));
        if !record.bool("shared") {
            return Err(ApiError::new("HA_CONSTRAINT_VIOLATION_SR_NOT_SHARED", [sr]));
        }
        if !hosts.iter().all(|host| is_on(&host.reference)) {
            return Err(ApiError::new("SR_HAS_NO_PBDS", [sr]));
        }
    }
    for vm in ha.db.all("VM").iter().filter(|vm| vm.text("ha_restart_priority") == RESTART) {
        ha.assert_agile(&vm.reference)?;
    }
    let (configuration, failures) = (args.map(1)?, most(ha));
    ha.db.change(|change| {
        for vm in change.all("VM") {
            let is_protected = vm.text("ha_restart_priority") == RESTART;
            let runs = vm.text("power_state") == "Running" && !vm.bool("is_control_domain");
            if is_protected && runs {
                change.set("VM", &vm.reference, "ha_always_run", true)?;
            }
        }
        for pool in change.all("pool") {
            change.set("pool", &pool.reference, "ha_enabled", true)?;
            change.set("pool", &pool.reference, "ha_cluster_stack", "etcd")?;
            change.set(
                "pool",
                &pool.reference,
                "ha_configuration",
                Value::string_map(configuration.clone()),
            )?;
            // What an administrator chose before stays, as far as it can be kept.
            let wanted = match pool.int("ha_host_failures_to_tolerate") {
                0 => failures,
                wanted => wanted.min(failures),
            };
            change.set("pool", &pool.reference, "ha_host_failures_to_tolerate", wanted)?;
            change.set("pool", &pool.reference, "ha_plan_exists_for", wanted)?;
        }
        Ok(())
    })?;
    Ok(Value::Void)
}

fn set_priority(call: &Call<Ha>, args: &Args) -> Result<Value, ApiError> {
    let (vm, priority) = (args.text(0)?, args.text(1)?);
    if !["", BEST_EFFORT, RESTART].contains(&priority) {
        return Err(ApiError::new("INVALID_VALUE", ["ha_restart_priority", priority]));
    }
    if !priority.is_empty() && call.part.enabled().is_some() {
        call.part.assert_agile(vm)?;
    }
    call.part.db.change(|change| {
        let runs = change.get("VM", vm)?.text("power_state") == "Running";
        change.set("VM", vm, "ha_restart_priority", priority)?;
        change.set("VM", vm, "ha_always_run", priority == RESTART && runs)
    })?;
    Ok(Value::Void)
}
