//! Calls of a plugin of version 1: XML-RPC in its only argument, the answer on standard output.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use tapio_types::ApiError;
use uuid::Uuid;

use super::xml::{self, Response, Value};
use crate::errors;
use crate::external::script::{self, Script, printable};
use crate::traits::{Config, Ctx};
use crate::worker::UNFINISHED;

/// Bytes of the argument; the kernel takes 128 KiB of one.
const CALL_MAX: usize = 120 << 10;
/// Bytes of a bad answer that an error shows.
const SHOWN: usize = 200;

/// The program.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) path: PathBuf,
    pub(super) limit: Duration,
    /// Where the toolstack's API is served; none: the plugin looks where XenServer has it.
    pub(super) socket: Option<PathBuf>,
}

/// What a call is about.
#[derive(Clone, Debug, Default)]
pub(super) struct About<'a> {
    pub(super) config: Option<&'a Config>,
    pub(super) sr: Option<Uuid>,
    pub(super) vdi: Option<(Uuid, String)>,
    pub(super) args: Vec<String>,
    pub(super) more: Vec<(&'static str, Value)>,
}

/// The reference of an object with this UUID.
pub(super) fn reference(uuid: Uuid) -> String {
    format!("OpaqueRef:{uuid}")
}

/// The reference of no object.
pub(super) const NULL_REF: &str = "OpaqueRef:NULL";

impl Program {
    /// Calls a command.
    ///
    /// # Errors
    /// `SR_BACKEND_FAILURE_<n>` of the plugin; one that says what it printed instead of an answer; see [`script::run`].
    pub(super) fn call(&self, ctx: &dyn Ctx, command: &str, about: &About<'_>) -> Result<Value, ApiError> {
        self.call_within(ctx, command, about, self.limit)
    }

    /// [`Self::call`] with another deadline.
    ///
    /// # Errors
    /// As there.
    pub(super) fn call_within(
        &self,
        ctx: &dyn Ctx,
        command: &str,
        about: &About<'_>,
        limit: Duration,
    ) -> Result<Value, ApiError> {
        // A plugin that is asked what it is needs no session.
        let session = match about.config {
            Some(_) => Some(ctx.api(about.sr)?),
            None => None,
        };
        let access = session.as_ref().map(|session| (session.session(), session.host()));
        let text = xml::call(command, &structure(command, about, access));
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let doing = format!("{command} of {name}");
        if text.len() > CALL_MAX {
            return Err(errors::fail(1, format_args!("{doing}: the call has more than {CALL_MAX} bytes")));
        }
        let socket = self.socket.as_ref().map(|path| path.display().to_string());
        let mut environment = vec![("ORIGINATOR", "SM")];
        environment.extend(socket.as_deref().map(|socket| ("TAPIO_SOCKET", socket)));
        let script = Script {
            program: &self.path,
            doing: &doing,
            arguments: &[&text],
            environment: &environment,
            input: &[],
            limit,
        };
        let said = script::run(ctx, &script)?;
        drop(session);
        let path = self.path.display();
        if !said.status.success() {
            let text = format!("{doing}: {path} {} without an answer: {}", said.end(), said.last_words());
            return Err(errors::fail_with(47, text, UNFINISHED));
        }
        match xml::response(&said.stdout) {
            Ok(Response::Value(value)) => Ok(value),
            Ok(Response::Fault(number, what)) => Err(fault(&doing, number, &what, said.stderr)),
            Err(why) => {
                let shown = printable(&said.stdout, SHOWN);
                let text = format!("{doing}: {path} answered no XML-RPC ({why}): '{shown}'; ask its vendor");
                Err(errors::fail_with(47, text, UNFINISHED))
            }
        }
    }
}

/// What a plugin printed on standard error is the document of a probe that lacks something.
fn fault(doing: &str, number: i64, what: &str, stderr: String) -> ApiError {
    let document = if stderr == UNFINISHED { String::new() } else { stderr };
    let what = printable(what.as_bytes(), 4096);
    match u16::try_from(number) {
        Ok(number) if number > 0 => ApiError::backend(number, what, document),
        _ => errors::fail_with(1200, format_args!("{doing}: fault {number}: {what}"), document),
    }
}

fn structure(command: &str, about: &About<'_>, access: Option<(&str, &str)>) -> Value {
    let mut members = BTreeMap::new();
    let mut put = |name: &str, value: Value| drop(members.insert(name.to_owned(), value));
    put("command", Value::text(command));
    put("args", Value::Array(about.args.iter().map(Value::text).collect()));
    put("host_ref", Value::text(access.map_or(NULL_REF, |(_, host)| host)));
    if let Some((session, _)) = access {
        put("session_ref", Value::text(session));
    }
    let mut config = about.config.cloned().unwrap_or_default();
    config.insert("SRmaster".to_owned(), "true".to_owned());
    put("device_config", Value::texts(config));
    if let Some(sr) = about.sr {
        put("sr_ref", Value::text(reference(sr)));
        put("sr_uuid", Value::text(sr.to_string()));
    }
    if let Some((vdi, location)) = &about.vdi {
        put("vdi_ref", Value::text(reference(*vdi)));
        put("vdi_uuid", Value::text(vdi.to_string()));
        put("vdi_location", Value::text(location));
        put("vdi_on_boot", Value::text("persist"));
        put("vdi_allow_caching", Value::text("false"));
    }
    for (name, value) in &about.more {
        put(name, value.clone());
    }
    Value::Struct(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_has_the_published_members() {
        let (sr, vdi) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let config = Config::from([("location".to_owned(), "/x".to_owned())]);
        let about = About {
            config: Some(&config),
            sr: Some(sr),
            vdi: Some((vdi, "place".into())),
            args: vec!["true".into()],
            ..About::default()
        };
        let value = structure("vdi_attach", &about, Some(("session", "host")));
        assert_eq!(value.text_of("vdi_ref"), Some(reference(vdi).as_str()));
        let found =
            ["command", "host_ref", "session_ref", "sr_uuid", "vdi_location"].map(|name| value.text_of(name));
        let uuid = sr.to_string();
        let wanted = ["vdi_attach", "host", "session", uuid.as_str(), "place"].map(Some);
        assert_eq!(found, wanted);
        let config = value.get("device_config").expect("always");
        assert_eq!((config.text_of("SRmaster"), config.text_of("location")), (Some("true"), Some("/x")));
        assert_eq!(value.get("args"), Some(&Value::Array(vec![Value::text("true")])));
    }

    #[test]
    fn faults_have_their_numbers() {
        assert_eq!(fault("x", 90, "missing", "<doc/>".into()).params, ["", "missing", "<doc/>"]);
        assert_eq!(fault("x", 24, "busy", String::new()).code, "SR_BACKEND_FAILURE_24");
        let odd = fault("x", -1, "what", UNFINISHED.into());
        assert_eq!(odd.code, "SR_BACKEND_FAILURE_1200");
        assert!(!crate::worker::is_unfinished(&odd));
    }
}
