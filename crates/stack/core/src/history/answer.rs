//! What clients ask for, as text.

use std::collections::BTreeMap;
use std::sync::Arc;

use tapio_history::updates::{FIGURES_MAX, Frame, Request, Updates};
use tapio_history::{Consolidation, json, xml};
use tapio_model::{ApiError, Value};
use uuid::Uuid;

use super::{Histories, Owner, Shared};
use crate::call::{Call, Handlers};
use crate::db::Db;

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

/// Objects of a class that are wanted.
enum Wanted {
    None,
    All,
    One(Uuid),
}

impl Wanted {
    /// What an option says: `all`, `none`, or one UUID.
    fn of(db: &Db, class: &str, option: Option<&String>, default: Self) -> Result<Self, ApiError> {
        match option.map(String::as_str) {
            None => Ok(default),
            Some("all") => Ok(Self::All),
            Some("none") => Ok(Self::None),
            Some(text) => {
                let uuid = uuid(class, text)?;
                db.by_uuid(class, &uuid.to_string())?;
                Ok(Self::One(uuid))
            }
        }
    }

    fn has(&self, uuid: Uuid) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::One(one) => *one == uuid,
        }
    }
}

/// Most figures of a whole history in one answer, some 20 MB of text.
const WHOLE_MAX: usize = 2_000_000;

impl Histories {
    fn host_uuid(&self) -> String {
        Owner::Host.object(&self.db).map(|host| host.text("uuid").to_owned()).unwrap_or_default()
    }

    /// Rows of several objects: VMs where none are named, an SR or all, the host.
    fn updates(&self, options: &Options) -> Result<String, ApiError> {
        let request = request(options)?;
        let srs = Wanted::of(&self.db, "SR", options.get("sr_uuid"), Wanted::None)?;
        let unnamed = if matches!(srs, Wanted::None) { Wanted::All } else { Wanted::None };
        let vms = Wanted::of(&self.db, "VM", options.get("vm_uuid"), unnamed)?;
        let host = is_set(options, "host").then(|| self.host_uuid());
        let name = |owner| match owner {
            Owner::Host => host.as_ref().map(|uuid| format!("host:{uuid}")),
            Owner::Vm(uuid) => vms.has(uuid).then(|| format!("vm:{uuid}")),
            Owner::Sr(uuid) => srs.has(uuid).then(|| format!("sr:{uuid}")),
        };
        let members: Vec<(String, Shared)> =
            self.list().into_iter().filter_map(|(owner, history)| Some((name(owner)?, history))).collect();
        let _turn = self.turn.lock();
        let (mut updated_ms, mut columns) = (0, 0);
        for (_, history) in &members {
            let history = history.lock();
            updated_ms = updated_ms.max(history.updated_ms());
            columns += history.count() * history.layout().functions().len();
        }
        if columns > FIGURES_MAX {
            return Err(too_many("vm_uuid", "all", columns, FIGURES_MAX));
        }
        let mut updates = Updates::new(Frame::of(request, &self.layout, updated_ms, columns));
        for (name, history) in &members {
            updates.add(name, &history.lock());
        }
        Ok(if is_set(options, "json") { updates.json() } else { updates.xml() })
    }

    /// The whole history of one object; one of which nothing was sampled has no sources.
    fn whole(&self, class: &str, options: &Options) -> Result<String, ApiError> {
        let text = options.get("uuid").map_or("", String::as_str);
        let wanted = || {
            let uuid = uuid(class, text)?;
            self.db.by_uuid(class, &uuid.to_string()).map(|_| uuid)
        };
        let owner = match class {
            "host" => Owner::Host,
            "VM" => Owner::Vm(wanted()?),
            "SR" => Owner::Sr(wanted()?),
            _ => return Err(invalid("class", class)),
        };
        let _turn = self.turn.lock();
        let history = self.copy(owner);
        if history.figures() > WHOLE_MAX {
            return Err(too_many("uuid", text, history.figures(), WHOLE_MAX));
        }
        Ok(if is_set(options, "json") { json::dump(&history) } else { xml::dump(&history) })
    }
}

fn too_many(option: &str, value: &str, count: usize, max: usize) -> ApiError {
    let why =
        format!("{count} figures are more than the {max} of an answer: ask /rrd_updates for fewer objects");
    ApiError::new("VALUE_NOT_SUPPORTED", [option, value, &why])
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
