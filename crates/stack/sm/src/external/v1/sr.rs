//! An SR whose VDIs are a plugin's.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_types::{Access, ApiError, ChainSpec};
use uuid::Uuid;

use super::calls::{About, NULL_REF, Program, reference};
use super::xml::Value;
use crate::errors;
use crate::external::paused::Paused;
use crate::external::source::Source;
use crate::external::turn;
use crate::external::{LONG, Plugin};
use crate::fill;
use crate::traits::{Config, Ctx, Fork, ForkKind, NewVdi, OpenSpec, Sr, SrStat, VdiInfo};
use crate::transfer::{self, Import};

/// How old the sizes in the SR's record may be before the plugin is asked for new ones.
const SIZES_AGE: Duration = Duration::from_secs(30);

/// An attached SR.
pub(super) struct PluginSr {
    plugin: Arc<Plugin>,
    program: Program,
    sr: Uuid,
    config: Config,
    /// How often each VDI was made ready.
    open: Mutex<HashMap<Uuid, usize>>,
    /// One for each VDI, held while it is made ready or closed.
    ways: Mutex<HashMap<Uuid, Arc<Mutex<()>>>>,
    changing: Mutex<()>,
    measured: Mutex<Option<Instant>>,
    paused: Paused,
}

impl PluginSr {
    pub(super) fn new(plugin: Arc<Plugin>, program: Program, sr: Uuid, config: Config) -> Self {
        let paused = Paused::new(&plugin.run_dir, sr);
        Self {
            plugin,
            program,
            sr,
            config,
            open: Mutex::default(),
            ways: Mutex::default(),
            changing: Mutex::new(()),
            measured: Mutex::default(),
            paused,
        }
    }

    /// What comes right after the attaching: what a killed worker left goes on.
    pub(super) fn begin(&self, ctx: &dyn Ctx) {
        self.paused.recover(ctx, &|vdi, access| self.reopen(ctx, vdi, access));
    }

    fn can(&self, capability: &str) -> bool {
        let capabilities = &self.plugin.about.capabilities;
        capabilities.iter().any(|known| known.split('/').next() == Some(capability))
    }

    fn about(&self) -> About<'_> {
        About { config: Some(&self.config), sr: Some(self.sr), ..About::default() }
    }

    fn of_sr(&self, ctx: &dyn Ctx, command: &str) -> Result<Value, ApiError> {
        self.program.call_within(ctx, command, &self.about(), self.program.limit * LONG)
    }

    /// A command about one VDI.
    fn of(
        &self,
        ctx: &dyn Ctx,
        command: &str,
        vdi: &VdiInfo,
        args: &[&str],
        more: Vec<(&'static str, Value)>,
    ) -> Result<Value, ApiError> {
        let about = About {
            vdi: Some((vdi.uuid, vdi.location.clone())),
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            more,
            ..self.about()
        };
        self.program.call(ctx, command, &about)
    }

    /// The VDI as its record says.
    fn record(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        let found = ctx.records(self.sr, Some(vdi))?.into_iter().next();
        found.ok_or_else(|| errors::vdi_missing(self.sr, vdi))
    }

    /// What a plugin answers that has made a VDI: its record, which the plugin has made too, or what can be known.
    fn made(&self, ctx: &dyn Ctx, command: &str, answer: &Value, size: u64) -> Result<VdiInfo, ApiError> {
        let wrong = || {
            let text =
                format!("{command} of SR {}: the answer has no UUID and location: ask its vendor", self.sr);
            errors::fail_with(47, text, crate::worker::UNFINISHED)
        };
        let uuid = answer.text_of("uuid").and_then(|uuid| Uuid::parse_str(uuid).ok()).ok_or_else(wrong)?;
        let location = answer.text_of("location").filter(|text| text.len() <= 4096).ok_or_else(wrong)?;
        if let Ok(record) = self.record(ctx, uuid) {
            return Ok(record);
        }
        Ok(VdiInfo {
            uuid,
            location: location.to_owned(),
            virtual_size: size,
            physical_utilisation: 0,
            managed: true,
            read_only: false,
            parent: None,
            name_label: None,
            sm_config: Config::from([("vdi_type".to_owned(), "aio".to_owned())]),
            cbt_enabled: false,
            is_metadata: false,
            told: None,
        })
    }

    /// What a disk that waits opens now.
    fn reopen(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        let lock = self.of_way(vdi);
        let _held = turn::wait(&lock, ctx)?;
        let with = self.make_ready(ctx, vdi, access)?;
        self.open.lock().entry(vdi).or_insert(1);
        Ok(with)
    }

    fn of_way(&self, vdi: Uuid) -> Arc<Mutex<()>> {
        Arc::clone(self.ways.lock().entry(vdi).or_default())
    }

    fn make_ready(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        let record = self.record(ctx, vdi)?;
        let writable = [if access == Access::ReadWrite { "true" } else { "false" }];
        let answer = self.of(ctx, "vdi_attach", &record, &writable, Vec::new())?;
        if self.can("VDI_ACTIVATE") {
            self.of(ctx, "vdi_activate", &record, &writable, Vec::new())?;
        }
        let source = source(&answer);
        let source = source.map_err(|why| errors::fail(46, format_args!("vdi_attach of {vdi}: {why}")))?;
        source.open(access)
    }

    fn close(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let record = match self.record(ctx, vdi) {
            Err(error) if error.code == "VDI_MISSING" => return Ok(()),
            record => record?,
        };
        let deactivated = match self.can("VDI_DEACTIVATE") || self.can("VDI_ACTIVATE") {
            true => self.of(ctx, "vdi_deactivate", &record, &[], Vec::new()).map(drop),
            false => Ok(()),
        };
        let detached = self.of(ctx, "vdi_detach", &record, &[], Vec::new()).map(drop);
        deactivated.and(detached)
    }

    fn is_used(&self, ctx: &dyn Ctx, vdi: Uuid) -> bool {
        ctx.holders(vdi) > 1 || ctx.live(vdi).is_some()
    }

    fn write_to(
        &self,
        ctx: &dyn Ctx,
        vdi: Uuid,
        work: impl FnOnce(&ChainSpec) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let with = self.activate(ctx, vdi, Access::ReadWrite)?;
        let done = work(&with.chain);
        let closed = self.deactivate(ctx, vdi);
        done.and(closed)
    }
}

/// What `vdi_attach` says where the data are: by NBD if it says so, at a path otherwise.
fn source(answer: &Value) -> Result<Source, String> {
    let text = |name: &str| answer.text_of(name).filter(|text| !text.is_empty());
    let kind = answer.get("xenstore_data").and_then(|data| data.text_of("vdi-type"));
    match (text("params_nbd").or_else(|| text("nbd")), text("params"), answer.as_text()) {
        (Some(nbd), _, _) => Source::of_params(nbd),
        // A file that is a VHD is told from the bytes of a disk by this word alone.
        (None, Some(path), _) if path.starts_with('/') && kind == Some("vhd") && is_file(path) => {
            Source::of_params(&format!("vhd:{path}"))
        }
        (None, Some(params), _) => Source::of_params(params),
        // As plugins of old answered.
        (None, None, Some(path)) if !path.is_empty() => Source::of_params(path),
        _ => {
            Err("the answer has neither 'params_nbd' nor 'params': the plugin serves its data by itself only"
                .into())
        }
    }
}

fn is_file(path: &str) -> bool {
    std::fs::metadata(path).is_ok_and(|data| data.is_file())
}

impl Sr for PluginSr {
    fn stat(&self, ctx: &dyn Ctx) -> Result<SrStat, ApiError> {
        // A disk that waits for a change that goes on is none that was left.
        if let Some(_changing) = self.changing.try_lock() {
            self.begin(ctx);
        }
        let is_old = self.measured.lock().is_none_or(|at| at.elapsed() >= SIZES_AGE);
        if is_old && self.can("SR_UPDATE") {
            self.of_sr(ctx, "sr_update")?;
        }
        *self.measured.lock() = Some(Instant::now());
        ctx.sizes(self.sr)
    }

    fn scan(&self, ctx: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        self.of_sr(ctx, "sr_scan")?;
        ctx.records(self.sr, None)
    }

    fn vdi(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        self.record(ctx, vdi)
    }

    fn create(&self, ctx: &dyn Ctx, new: &NewVdi) -> Result<VdiInfo, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let size = new.virtual_size.to_string();
        let args = [
            &size,
            &new.name_label,
            &new.name_description,
            NULL_REF,
            "false",
            "19700101T00:00:00Z",
            NULL_REF,
            "false",
        ];
        let about = About {
            args: args.map(str::to_owned).into(),
            more: vec![
                ("vdi_uuid", Value::text(new.uuid.to_string())),
                ("vdi_sm_config", Value::texts(new.sm_config.clone())),
                ("vdi_type", Value::text("user")),
            ],
            ..self.about()
        };
        let answer = self.program.call(ctx, "vdi_create", &about)?;
        ctx.step("external:made");
        self.made(ctx, "vdi_create", &answer, new.virtual_size)
    }

    fn introduce(&self, ctx: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let about = About {
            more: vec![
                ("new_uuid", Value::text(vdi.to_string())),
                ("vdi_location", Value::text(location)),
                ("vdi_sm_config", Value::texts::<String, String>([])),
            ],
            ..self.about()
        };
        let answer = self.program.call(ctx, "vdi_introduce", &about)?;
        self.made(ctx, "vdi_introduce", &answer, 0)
    }

    fn destroy(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let record = self.record(ctx, vdi)?;
        if self.open.lock().contains_key(&vdi) || self.is_used(ctx, vdi) {
            return Err(errors::vdi_in_use(vdi, "destroy"));
        }
        self.of(ctx, "vdi_delete", &record, &[], Vec::new()).map(drop)
    }

    fn resize(&self, ctx: &dyn Ctx, vdi: Uuid, bytes: u64) -> Result<VdiInfo, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let record = self.record(ctx, vdi)?;
        if bytes < record.virtual_size {
            let has = record.virtual_size;
            let text = format!("{bytes} bytes are fewer than the {has} it has: a VDI is not made smaller");
            return Err(errors::fail(79, text));
        }
        self.of(ctx, "vdi_resize", &record, &[&bytes.to_string()], Vec::new())?;
        let mut now = self.record(ctx, vdi)?;
        // It ended well, whether or not it changed the record too.
        now.virtual_size = now.virtual_size.max(bytes);
        if let Some(disk) = ctx.live(vdi) {
            disk.grow(now.virtual_size)?;
        }
        Ok(now)
    }

    fn fork(&self, ctx: &dyn Ctx, vdi: Uuid, _: Uuid, kind: ForkKind) -> Result<Fork, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let command = match kind {
            ForkKind::Snapshot => "vdi_snapshot",
            ForkKind::Clone => "vdi_clone",
            ForkKind::Single => return Err(errors::fail(38, "a plugin makes no base copies by themselves")),
        };
        let record = self.record(ctx, vdi)?;
        let made =
            self.paused.while_paused(ctx, vdi, &|vdi, access| self.reopen(ctx, vdi, access), || {
                let params = vec![("driver_params", Value::texts::<String, String>([]))];
                let answer = self.of(ctx, command, &record, &[], params)?;
                ctx.step("external:made");
                let made = self.made(ctx, command, &answer, record.virtual_size)?;
                if made.uuid == vdi {
                    let text = format!("{command} answered the VDI itself: ask the plugin's vendor");
                    return Err(errors::fail(82, text));
                }
                Ok(made)
            })?;
        let origin = self.record(ctx, vdi)?;
        Ok(Fork { made, origin, base: None })
    }

    /// The plugin reads the names in the record.
    fn rename(&self, ctx: &dyn Ctx, vdi: Uuid, _: &str, _: &str) -> Result<(), ApiError> {
        if !self.can("VDI_UPDATE") {
            return Ok(());
        }
        let record = self.record(ctx, vdi)?;
        self.of(ctx, "vdi_update", &record, &[], Vec::new()).map(drop)
    }

    fn fill(
        &self,
        ctx: &dyn Ctx,
        into: Uuid,
        from: &ChainSpec,
        base: Option<&ChainSpec>,
    ) -> Result<(), ApiError> {
        self.write_to(ctx, into, |chain| fill::fill(ctx, chain, from, base))
    }

    fn import(&self, ctx: &dyn Ctx, what: &Import, from: OwnedFd) -> Result<(), ApiError> {
        self.write_to(ctx, what.into, |chain| transfer::import(ctx, chain, what, from))
    }

    fn activate(&self, ctx: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        let lock = self.of_way(vdi);
        let _held = turn::wait(&lock, ctx)?;
        let is_open = self.open.lock().contains_key(&vdi) || self.is_used(ctx, vdi);
        let with = self.make_ready(ctx, vdi, access).inspect_err(|_| {
            if !is_open {
                self.close(ctx, vdi)
                    .unwrap_or_else(|error| tracing::warn!(%vdi, %error, "it stays attached"));
            }
        })?;
        *self.open.lock().entry(vdi).or_insert(0) += 1;
        Ok(with)
    }

    fn deactivate(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<(), ApiError> {
        let lock = self.of_way(vdi);
        let _held = turn::wait(&lock, ctx)?;
        if let Some(count) = self.open.lock().get_mut(&vdi).filter(|count| **count > 1) {
            *count -= 1;
            return Ok(());
        }
        self.open.lock().remove(&vdi);
        if self.is_used(ctx, vdi) {
            return Ok(());
        }
        self.close(ctx, vdi)
    }

    fn track_changes(&self, ctx: &dyn Ctx, vdi: Uuid, wanted: bool) -> Result<VdiInfo, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let mut record = self.record(ctx, vdi)?;
        let command = if wanted { "vdi_enable_cbt" } else { "vdi_disable_cbt" };
        self.of(ctx, command, &record, &[], Vec::new())?;
        record.cbt_enabled = wanted;
        Ok(record)
    }

    fn destroy_data(&self, ctx: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        let _changing = turn::wait(&self.changing, ctx)?;
        let record = self.record(ctx, vdi)?;
        self.of(ctx, "vdi_data_destroy", &record, &[], Vec::new())?;
        let mut now = self.record(ctx, vdi)?;
        now.is_metadata = true;
        Ok(now)
    }

    fn changed_blocks(&self, ctx: &dyn Ctx, from: Uuid, to: Uuid) -> Result<String, ApiError> {
        let record = self.record(ctx, from)?;
        let answer = self.of(ctx, "vdi_list_changed_blocks", &record, &[&reference(to)], Vec::new())?;
        let is_base64 =
            |text: &&str| text.bytes().all(|c| c.is_ascii_alphanumeric() || b"+/=\n".contains(&c));
        let text = answer.as_text().filter(is_base64);
        text.map(str::to_owned).ok_or_else(|| errors::fail(460, "the plugin answered no base64"))
    }

    fn detach(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        match self.of_sr(ctx, "sr_detach") {
            Ok(_) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    fn erase(self: Box<Self>, ctx: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        match self.of_sr(ctx, "sr_delete") {
            Ok(_) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attached_disk_is_where_the_plugin_says() {
        let of = |pairs: &[(&str, &str)]| source(&Value::texts(pairs.iter().copied()));
        let nbd = of(&[("params_nbd", "nbd:unix:/run/n:exportname=x"), ("params", "/dev/x")]);
        assert_eq!(nbd, Ok(Source::Nbd("unix:/run/n:exportname=x".into())));
        assert_eq!(of(&[("params_nbd", ""), ("params", "/dev/x")]), Ok(Source::Raw("/dev/x".into())));
        assert_eq!(source(&Value::text("/dev/x")), Ok(Source::Raw("/dev/x".into())));
        assert!(of(&[("params_nbd", "")]).is_err() && source(&Value::Nil).is_err());
    }
}
