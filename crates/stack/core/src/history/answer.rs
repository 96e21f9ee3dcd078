//! What clients ask for, as text.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_history::updates::{Member, Request, Updates};
use tapio_history::{Consolidation, History, json, xml};
use tapio_model::{ApiError, Value};
use uuid::Uuid;

use super::{Histories, Owner};
use crate::call::{Call, Handlers};

type Options = BTreeMap<String, String>;

fn is_set(options: &Options, name: &str) -> bool {
    options.get(name).is_some_and(|value| value == "true")
}

fn invalid(name: &str, value: &str) -> ApiError {
    ApiError::new("INVALID_VALUE", [name, value])
}

fn number<T: std::str::FromStr>(options: &Options, name: &str, default: T) -> Result<T, ApiError> {
    options.get(name).map_or(Ok(default), |text| text.parse().map_err(|_| invalid(name, text)))
}

fn uuid(class: &str, text: &str) -> Result<Uuid, ApiError> {
    text.parse().map_err(|_| ApiError::new("UUID_INVALID", [class, text]))
}

/// Which rows are wanted.
fn request(options: &Options) -> Result<Request, ApiError> {
    let function = match options.get("cf") {
        None => None,
        Some(text) => {
            let found = Consolidation::ALL.into_iter().find(|function| function.name() == text);
            Some(found.ok_or_else(|| invalid("cf", text))?)
        }
    };
    Ok(Request {
        start_s: number(options, "start", 0)?,
        interval_s: number(options, "interval", 0)?,
        function,
    })
}

/// Whether an object is wanted: `all`, or one UUID.
fn is_wanted(wanted: &Option<&String>, uuid: Uuid) -> bool {
    wanted.is_some_and(|wanted| wanted == "all" || wanted.parse() == Ok(uuid))
}

impl Histories {
    fn host_uuid(&self) -> String {
        self.db.all("host").first().map(|host| host.text("uuid").to_owned()).unwrap_or_default()
    }

    /// Rows of several objects: VMs where none are named, an SR or all, the host.
    fn updates(&self, options: &Options) -> Result<String, ApiError> {
        let request = request(options)?;
        let all = "all".to_owned();
        let srs = options.get("sr_uuid");
        let vms = options.get("vm_uuid").or(if srs.is_none() { Some(&all) } else { None });
        for (class, wanted) in [("VM", vms), ("SR", srs)] {
            if let Some(wanted) = wanted.filter(|wanted| *wanted != "all") {
                self.db.by_uuid(class, &uuid(class, wanted)?.to_string())?;
            }
        }
        let host = self.host_uuid();
        let state = self.state.lock();
        let members = state.histories.iter().filter_map(|(owner, history)| {
            let name = match owner {
                Owner::Host if is_set(options, "host") => format!("host:{host}"),
                Owner::Vm(uuid) if is_wanted(&vms, *uuid) => format!("vm:{uuid}"),
                Owner::Sr(uuid) if is_wanted(&srs, *uuid) => format!("sr:{uuid}"),
                _ => return None,
            };
            Some(Member { name, history })
        });
        let members: Vec<Member<'_>> = members.collect();
        let updates = Updates::of(&members, request);
        Ok(if is_set(options, "json") { updates.json() } else { updates.xml() })
    }

    /// The whole history of one object; one of which nothing was sampled has no sources.
    fn whole(&self, class: &str, options: &Options) -> Result<String, ApiError> {
        let wanted = || {
            let text = options.get("uuid").map_or("", String::as_str);
            let uuid = uuid(class, text)?;
            self.db.by_uuid(class, &uuid.to_string()).map(|_| uuid)
        };
        let owner = match class {
            "host" => Owner::Host,
            "VM" => Owner::Vm(wanted()?),
            "SR" => Owner::Sr(wanted()?),
            _ => return Err(invalid("class", class)),
        };
        let state = self.state.lock();
        let empty = History::new(self.layout.clone(), 0);
        let history = state.histories.get(&owner).unwrap_or(&empty);
        Ok(if is_set(options, "json") { json::dump(history) } else { xml::dump(history) })
    }
}

/// Registers the messages of this part.
pub(crate) fn register(handlers: &mut Handlers, histories: &Arc<Histories>) {
    let export = |call: &Call<Histories>, args: &crate::args::Args| -> Result<Value, ApiError> {
        let options = args.map(1)?;
        let text = match args.text(0)? {
            "updates" => call.part.updates(&options)?,
            class => call.part.whole(class, &options)?,
        };
        Ok(Value::string(text))
    };
    handlers.of(histories).on("host.export_history", export);
}
