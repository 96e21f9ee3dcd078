//! What can be found on a host, and what an SR can do.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};
use tapio_sm::{ProbeAnswer, ProbeResult, SrStat};

use super::attached::{has_capability, int};
use super::work::{Names, Work};
use super::{Call, Handlers, drivers, sr};
use crate::args::Args;

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("SR.probe", |call, args| probe(call, args).map(|answer| Value::String(answer.xml)));
    handlers.on("SR.probe_ext", |call, args| {
        Ok(Value::Set(probe(call, args)?.results.into_iter().map(result).collect()))
    });
    handlers.on("SR.get_supported_types", |call, _| Ok(Value::strings(call.part.types())));
    handlers.on("SR.assert_can_host_ha_statefile", unsupported);
}

fn probe(call: &Call, args: &Args) -> Result<ProbeAnswer, ApiError> {
    sr::check_host(call, args.text(0)?)?;
    let driver = call.part.driver(args.text(2)?)?;
    if !has_capability(driver.info(), "SR_PROBE") {
        let what = format!("SRs of type {} cannot be looked for: name yours in full", driver.info().sr_type);
        return Err(ApiError::new("UNIMPLEMENTED_IN_SM_BACKEND", [what]));
    }
    let config = drivers::given(&call.part.db, &*driver, &args.map(1)?)?;
    let names = Names { sr: "", vdi: "", op: "probe" };
    driver.probe(&Work::new(call), &config).map_err(|error| names.translate(call, error))
}

/// A record of class `probe_result`.
fn result(found: ProbeResult) -> Value {
    let record = [
        ("configuration", Value::string_map(found.configuration)),
        ("complete", Value::Bool(found.complete)),
        ("sr", found.sr.map_or(Value::Void, |(uuid, stat)| there(&uuid.to_string(), stat))),
        ("extra_info", Value::string_map(found.extra_info)),
    ];
    map(record)
}

/// A record of class `sr_stat`.
fn there(uuid: &str, stat: SrStat) -> Value {
    let free = stat.physical_size.saturating_sub(stat.physical_utilisation);
    map([
        ("uuid", Value::string(uuid)),
        ("name_label", Value::string("")),
        ("name_description", Value::string("")),
        ("free_space", int(free)),
        ("total_space", int(stat.physical_size)),
        ("clustered", Value::Bool(false)),
        ("health", Value::string("healthy")),
    ])
}

fn map<const N: usize>(pairs: [(&str, Value); N]) -> Value {
    Value::Map(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<BTreeMap<_, _>>())
}

/// Neither a state file of high availability nor a replica of the database can lie on any SR here.
fn unsupported(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let sr = args.text(0)?;
    call.part.attached(sr)?;
    Err(ApiError::new("SR_OPERATION_NOT_SUPPORTED", [sr]))
}
