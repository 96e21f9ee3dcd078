//! The way to the data of a volume: the datapath plugin of its URI's scheme, or none where it needs none.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tapio_types::{Access, ApiError};

use super::scripts::{Nothing, Scripts};
use super::wire::{Backend, Volume};
use crate::errors;
use crate::external::source::Source;
use crate::traits::{Ctx, OpenSpec};

/// This host as plugins know it: no domain of a guest opens the data, disk processes here do.
const DOMAIN: &str = "0";
/// URIs of a volume that are looked at.
const URIS_MAX: usize = 64;

/// How one volume is reached.
#[derive(Clone, Debug)]
pub(super) struct Way {
    pub(super) uri: String,
    /// None: Tapio opens it by itself.
    plugin: Option<Scripts>,
}

impl Way {
    /// The first of a volume's URIs that something here knows.
    ///
    /// # Errors
    /// 46: there is none, with the schemes that are missing.
    pub(super) fn of(volume: &Volume, datapaths: &Path, limit: Duration) -> Result<Self, ApiError> {
        let mut schemes = Vec::new();
        for uri in volume.uri.iter().take(URIS_MAX) {
            let Some(scheme) = scheme(uri) else { continue };
            let dir = datapaths.join(scheme);
            if dir.is_dir() {
                return Ok(Self { uri: uri.clone(), plugin: Some(Scripts::new(dir, limit)) });
            }
            if Source::of_uri(uri).is_some() {
                return Ok(Self { uri: uri.clone(), plugin: None });
            }
            schemes.push(scheme);
        }
        let what = if schemes.is_empty() { "it has no URI".to_owned() } else { schemes.join(", ") };
        let text = format!(
            "volume '{}': no datapath plugin in {} for its data ({what}): install the one that belongs to it",
            super::wire::bounded(&volume.key),
            datapaths.display()
        );
        Err(errors::fail(46, text))
    }

    fn tell(&self, ctx: &dyn Ctx, method: &str, more: &[(&str, Value)]) -> Result<(), ApiError> {
        let Some(plugin) = &self.plugin else { return Ok(()) };
        let uri = ("uri", Value::from(self.uri.as_str()));
        let args: Vec<_> = std::iter::once(uri).chain(more.iter().cloned()).collect();
        match plugin.call::<Nothing>(ctx, method, &args) {
            Err(error) if error.code == "SR_BACKEND_FAILURE_38" && is_optional(method) => Ok(()),
            told => told.map(drop),
        }
    }

    /// Makes it ready: `open`, `attach`, `activate`; repeating it is fine. Where one fails [`Self::close`] undoes the
    /// others.
    ///
    /// # Errors
    /// The plugin's; 46: it offers nothing that can be opened here.
    pub(super) fn open(&self, ctx: &dyn Ctx, access: Access) -> Result<OpenSpec, ApiError> {
        let unusable = |why: String| errors::fail(46, format_args!("data of '{}': {why}", self.uri));
        let Some(plugin) = &self.plugin else {
            let source =
                Source::of_uri(&self.uri).unwrap_or_else(|| Err("its scheme is not known".to_owned()));
            return source.map_err(unusable)?.open(access);
        };
        let domain = ("domain", Value::from(DOMAIN));
        self.tell(ctx, "Datapath.open", &[("persistent", Value::Bool(true))])?;
        let attach = [("uri", Value::from(self.uri.as_str())), domain.clone()];
        let backend: Backend = plugin.call(ctx, "Datapath.attach", &attach)?;
        let source = Source::best(&backend.implementations).map_err(unusable)?;
        let is_read_only = access == Access::ReadOnly && plugin.has("Datapath.activate_readonly");
        let activate = if is_read_only { "Datapath.activate_readonly" } else { "Datapath.activate" };
        self.tell(ctx, activate, std::slice::from_ref(&domain))?;
        source.open(access)
    }

    /// Undoes [`Self::open`]: `deactivate`, `detach`, `close`; all are asked whatever one says.
    ///
    /// # Errors
    /// The first of the plugin's.
    pub(super) fn close(&self, ctx: &dyn Ctx) -> Result<(), ApiError> {
        let domain = [("domain", Value::from(DOMAIN))];
        let told = [
            self.tell(ctx, "Datapath.deactivate", &domain),
            self.tell(ctx, "Datapath.detach", &domain),
            self.tell(ctx, "Datapath.close", &[]),
        ];
        told.into_iter().collect()
    }
}

/// Methods that a plugin without such a moment leaves out.
fn is_optional(method: &str) -> bool {
    matches!(
        method,
        "Datapath.open" | "Datapath.close" | "Datapath.activate" | "Datapath.deactivate" | "Datapath.detach"
    )
}

/// The scheme of a URI, which is the name of a directory.
pub(super) fn scheme(uri: &str) -> Option<&str> {
    let (scheme, _) = uri.split_once(':')?;
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'+' | b'-' | b'.');
    let is_scheme = scheme.bytes().next().is_some_and(|c| c.is_ascii_alphabetic()) && scheme.len() <= 64;
    (is_scheme && scheme.bytes().all(is_plain)).then_some(scheme)
}

#[cfg(test)]
mod tests {
    use super::scheme;

    #[test]
    fn a_scheme_is_no_path() {
        assert_eq!(scheme("vhd+file:///a"), Some("vhd+file"));
        for odd in ["../x:a", "a/b:c", "", ":x", "1x:y", "x", "a b:c"] {
            assert_eq!(scheme(odd), None, "{odd}");
        }
    }
}
