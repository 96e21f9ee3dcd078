//! SRs that become thin: what is made there from now on takes space as it is written.

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};

use super::sr::check_host;
use super::transaction::Transaction;
use super::work::{Names, Work};
use super::{Call, Handlers};
use crate::args::Args;
use crate::operations::on_sr;

/// The key of `device_config` and `sm_config` that says how an SR gives space.
const ALLOCATION: &str = "allocation";

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("LVHD.enable_thin_provisioning", enable);
}

/// The storage comes first: what it says counts wherever the SR is attached without a word about it. The records follow
/// with the sizes. Where a kill comes between, the client calls again.
fn enable(call: &Call, args: &Args) -> Result<Value, ApiError> {
    let (host, reference) = (args.text(0)?, args.text(1)?);
    check_host(call, host)?;
    let sr = call.part.db.get("SR", reference)?;
    let info = call.part.driver(sr.text("type"))?.info();
    if !info.configuration.iter().any(|(key, _)| *key == ALLOCATION) {
        let why = format!(
            "disks of an SR of type {} have no allocation to choose; SRs of types lvm, lvmoiscsi and lvmohba have",
            info.sr_type
        );
        return Err(ApiError::new("SR_OPERATION_NOT_SUPPORTED", [reference, &why]));
    }
    let mut config = BTreeMap::from([(ALLOCATION.to_owned(), "thin".to_owned())]);
    for (at, key) in [(2, "initial-allocation"), (3, "allocation-quantum")] {
        match args.int(at)? {
            // The driver's own.
            0 => {}
            bytes if bytes < 0 => {
                return Err(ApiError::new("INVALID_VALUE", [key.to_owned(), bytes.to_string()]));
            }
            bytes => drop(config.insert(key.to_owned(), bytes.to_string())),
        }
    }
    let attached = call.part.attached(reference)?;
    let operation = Transaction::enter(call, &[on_sr(reference, "pbd_create")], |_| Ok(()))?;
    let names = Names { sr: reference, vdi: "", op: "enable_thin_provisioning" };
    attached
        .with(|sr| sr.make_thin(&Work::new(call), &config))
        .map_err(|error| names.translate(call, error))?;
    operation.commit(None, |change| {
        let put = |map: BTreeMap<String, String>| Value::string_map(map.into_iter().chain(config.clone()));
        let sm_config = put(change.get("SR", reference)?.map("sm_config"));
        change.set("SR", reference, "sm_config", sm_config)?;
        for pbd in change.find("PBD", "SR", reference) {
            change.set("PBD", &pbd.reference, "device_config", put(pbd.map("device_config")))?;
        }
        Ok(())
    })?;
    Ok(Value::string(""))
}
