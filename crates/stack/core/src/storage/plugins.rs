//! `host.call_plugin`: what products ask XenServer's plugins for.
//!
//! Plugins are scripts there. Here the ones that products call about storage are functions, with the names, arguments
//! and answers of the originals (interfaces of `trim` and `coalesce-leaf` of XenServer's storage manager).

use std::collections::BTreeMap;

use tapio_model::{ApiError, Value};

use super::collect::merge_disks_of;
use super::{Call, Handlers};
use crate::args::Args;

type Arguments = BTreeMap<String, String>;
type Function = fn(&Call, &Arguments) -> Result<String, ApiError>;

/// Plugin, function, what does it.
const FUNCTIONS: [(&str, &str, Function); 2] =
    [("trim", "do_trim", trim), ("coalesce-leaf", "leaf-coalesce", coalesce_leaf)];

pub(super) fn register(handlers: &mut Handlers<'_>) {
    handlers.on("host.call_plugin", call_plugin);
}

fn call_plugin(call: &Call, args: &Args) -> Result<Value, ApiError> {
    call.part.db.get("host", args.text(0)?)?;
    let (plugin, name, arguments) = (args.text(1)?, args.text(2)?, args.map(3)?);
    let mut of_plugin = FUNCTIONS.iter().filter(|(known, ..)| *known == plugin).peekable();
    if of_plugin.peek().is_none() {
        return Err(ApiError::new("XENAPI_MISSING_PLUGIN", [plugin]));
    }
    let Some((.., function)) = of_plugin.find(|(_, known, _)| *known == name) else {
        return Err(failure("UNKNOWN_XENAPI_PLUGIN_FUNCTION", name));
    };
    function(call, &arguments).map(Value::string)
}

/// A plugin that failed: the kind of failure, and what it said.
fn failure(status: &str, said: impl Into<String>) -> ApiError {
    ApiError::new("XENAPI_PLUGIN_FAILURE", [status.to_owned(), String::new(), said.into()])
}

fn argument<'a>(arguments: &'a Arguments, name: &str) -> Result<&'a str, ApiError> {
    let found = arguments.get(name).map(String::as_str).filter(|value| !value.is_empty());
    found.ok_or_else(|| failure("non-zero exit", format!("the argument '{name}' is missing")))
}

/// Gives what is free in an SR back to its storage. SRs of files have nothing to give: what is free belongs to the file
/// system. An answer with an error is a success of the call, as products expect it.
fn trim(call: &Call, arguments: &Arguments) -> Result<String, ApiError> {
    let uuid = argument(arguments, "sr_uuid")?;
    let sr = call.part.db.by_uuid("SR", uuid)?;
    let pairs = [
        ("errcode", "UnsupportedSRForTrim".to_owned()),
        ("errmsg", format!("Trim on [{}] not supported", sr.text("uuid"))),
    ];
    let pair =
        |(key, value)| format!("<key_value_pair><key>{key}</key><value>{value}</value></key_value_pair>");
    let pairs: String = pairs.into_iter().map(pair).collect();
    Ok(format!("<?xml version=\"1.0\" ?><trim_response>{pairs}</trim_response>"))
}

/// Merges the disks of a VM into their base copies, and waits for that. The VM runs on meanwhile.
fn coalesce_leaf(call: &Call, arguments: &Arguments) -> Result<String, ApiError> {
    let vm = call.part.db.by_uuid("VM", argument(arguments, "vm_uuid")?)?;
    let left = merge_disks_of(call, &vm.reference)?;
    if left.is_empty() { Ok("Success".to_owned()) } else { Err(failure("non-zero exit", left.join("; "))) }
}
