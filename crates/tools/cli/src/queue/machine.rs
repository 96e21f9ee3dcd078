//! A VM of the toolstack: its disks, and what its guest has counted of them.

use std::time::Instant;

use serde::Deserialize;
use serde_json::{Value, json};
use tapio_report::queue::BlockCounters;
use tapio_stat::VbdId;

use super::layers::{OfGuest, Which};
use crate::xe::{Client, Failure, XeArguments, find};

/// A VM.
#[derive(Debug)]
pub struct Machine {
    client: Client,
    reference: String,
    uuid: String,
}

/// What the guest has counted, or why that is not known.
#[derive(Debug)]
pub struct GuestDisks {
    disks: Result<Vec<GuestDisk>, String>,
    /// When that was asked.
    pub at: Instant,
}

/// A disk as the daemon's `disk-stats` has it.
#[derive(Debug, Deserialize)]
struct GuestDisk {
    name: String,
    #[serde(flatten)]
    counters: BlockCounters,
}

impl GuestDisks {
    /// Of the disk with this name. Records call disks as Xen's guests do (`xvdb`), whatever drives them; a guest that
    /// has them by virtio knows the same one as `vdb`.
    pub fn of(&self, name: &str) -> OfGuest {
        let disks = self.disks.as_ref().map_err(Clone::clone)?;
        let by = |name: &str| disks.iter().find(|disk| disk.name == name).map(|disk| disk.counters);
        let virtio = name.strip_prefix('x').filter(|name| name.starts_with("vd"));
        by(name).or_else(|| virtio.and_then(by)).ok_or_else(|| format!("the guest has no disk {name}"))
    }
}

/// The device under which a disk in this place is published, as xenbus counts.
fn device(place: u32) -> Option<u32> {
    match place {
        0..16 => Some((202 << 8) | (place << 4)),
        16..1024 => Some((1 << 28) | (place << 8)),
        _ => None,
    }
}

impl Machine {
    /// By UUID or name.
    pub fn find(name: &str, xe: &[String]) -> Result<Self, Failure> {
        let xe = XeArguments::read(xe)?;
        let client = Client::connect(&xe.connection)?;
        let reference = find(&client, "VM", name)?;
        let uuid = client.call("VM.get_uuid", &[reference.as_str().into()])?;
        let uuid = uuid.as_str().unwrap_or_default().to_owned();
        Ok(Self { client, reference, uuid })
    }

    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Ends the session.
    pub fn end(&self) {
        self.client.end();
    }

    /// The disks that are plugged, by the names that the guest has for them.
    pub fn disks(&mut self) -> Result<Vec<(String, Which)>, Failure> {
        let domid = self.client.call("VM.get_domid", &[self.reference.as_str().into()])?;
        let domid = number(&domid).and_then(|domid| u32::try_from(domid).ok());
        let vbds = self.client.call("VM.get_VBDs", &[self.reference.as_str().into()])?;
        let mut disks = Vec::new();
        for vbd in vbds.as_array().into_iter().flatten() {
            let record = match self.client.call("VBD.get_record", std::slice::from_ref(vbd)) {
                Ok(record) => record,
                // It was destroyed meanwhile.
                Err(Failure::Api(code, _)) if code == "HANDLE_INVALID" => continue,
                Err(error) => return Err(error),
            };
            disks.extend(domid.and_then(|domid| disk(domid, &record)));
        }
        disks.sort_by_key(|(_, id)| *id);
        Ok(disks.into_iter().map(|(name, id)| (name, Which::Vbd(id))).collect())
    }

    /// What the guest has counted of its disks.
    pub fn guest_disks(&self) -> GuestDisks {
        let asked = self.client.call(
            "VM.call_plugin",
            &[self.reference.as_str().into(), "guest-agent-operation".into(), "disk-stats".into(), json!({})],
        );
        let disks = match asked {
            Ok(answer) => serde_json::from_str(answer.as_str().unwrap_or_default())
                .map_err(|error| format!("the daemon's answer is not understood: {error}")),
            Err(Failure::Api(code, params)) if code == "VM_LACKS_FEATURE" => {
                Err(params.last().cloned().unwrap_or_else(|| "no agent answers in the guest".to_owned()))
            }
            Err(error) => Err(error.text(&|_| None).replace('\n', " ").trim_end().to_owned()),
        };
        GuestDisks { disks, at: Instant::now() }
    }
}

/// XenAPI has integers as text.
fn number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

/// The name and the numbers of a VBD that is plugged.
fn disk(domid: u32, record: &Value) -> Option<(String, VbdId)> {
    if record.get("currently_attached")?.as_bool() != Some(true) {
        return None;
    }
    let place = record.get("userdevice")?.as_str()?;
    let devid = device(place.parse().ok()?)?;
    let name = record.get("device").and_then(Value::as_str).filter(|name| !name.is_empty()).unwrap_or(place);
    Some((name.to_owned(), VbdId { domid, devid }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugged_disks_have_the_numbers_of_xenbus() {
        let vbd = |attached: bool, place: &str, device: &str| json!({"currently_attached": attached, "userdevice": place, "device": device});
        assert_eq!(disk(5, &vbd(true, "1", "xvdb")), Some(("xvdb".into(), VbdId { domid: 5, devid: 51728 })));
        assert_eq!(
            disk(5, &vbd(true, "16", "")).map(|(name, id)| (name, id.devid)),
            Some(("16".into(), (1 << 28) | 4096))
        );
        assert_eq!(disk(5, &vbd(false, "1", "xvdb")), None);
        assert_eq!(disk(5, &vbd(true, "autodetect", "xvdb")), None);
    }

    #[test]
    fn what_the_guest_counted_is_found_by_name() {
        let text =
            r#"[{"name":"vda","reads":5,"reads_merged":1,"read_sectors":40,"weighted_ms":13,"flushes":2}]"#;
        let disks = serde_json::from_str::<Vec<GuestDisk>>(text).expect("JSON");
        let guests = GuestDisks { disks: Ok(disks), at: Instant::now() };
        let found = guests.of("vda").expect("it is there");
        assert_eq!((found.reads, found.read_sectors, found.weighted_ms, found.writes), (5, 40, 13, 0));
        assert_eq!(guests.of("xvda"), guests.of("vda"), "by virtio");
        assert_eq!(guests.of("vdb"), Err("the guest has no disk vdb".into()));
        let none = GuestDisks { disks: Err("silent".into()), at: Instant::now() };
        assert_eq!(none.of("vda"), Err("silent".into()));
    }
}
