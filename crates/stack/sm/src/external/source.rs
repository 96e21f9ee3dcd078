//! What a plugin says a disk is, as what a disk process opens.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use tapio_format::vhd::offline;
use tapio_types::{Access, ApiError, ChainSpec, ImageKind, LayerSpec};

use crate::errors;
use crate::traits::OpenSpec;

/// Bytes of a path, a URI or a name that a plugin gives.
const TEXT_MAX: usize = 4096;

/// A way to reach the data of a disk, as a datapath plugin or a plugin of version 1 names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The bytes of a block device or a file.
    Raw(PathBuf),
    /// A VHD, with its parents.
    Vhd(PathBuf),
    /// An export of an NBD server.
    Nbd(String),
}

/// What the protocol knows and Tapio does not.
fn unknown(what: &str) -> String {
    format!(
        "it offers {what}, which no disk process here can open; block devices, files, VHDs and NBD can be opened"
    )
}

fn path(text: &str) -> Result<PathBuf, String> {
    let is_plain = text.starts_with('/') && text.len() <= TEXT_MAX && !text.contains('\0');
    let is_plain = is_plain && !text.split('/').any(|part| part == "..");
    if is_plain {
        Ok(PathBuf::from(text))
    } else {
        Err(format!("'{}' is no path from the root", shown(text)))
    }
}

fn shown(text: &str) -> String {
    text.chars().take(200).map(|c| if c.is_control() { '?' } else { c }).collect()
}

impl Source {
    /// Of a text in the manner of tapdisk (`vhd:/path`, `aio:/path`, `nbd:...`), or of a path.
    ///
    /// # Errors
    /// A sentence.
    pub fn of_params(text: &str) -> Result<Self, String> {
        if text.len() > TEXT_MAX || text.contains('\0') {
            return Err("the name of its data is too long, or no text".to_owned());
        }
        match text.split_once(':') {
            _ if text.starts_with('/') => path(text).map(Self::Raw),
            Some(("aio" | "raw" | "phy" | "file", rest)) => path(rest).map(Self::Raw),
            Some(("vhd", rest)) => path(rest).map(Self::Vhd),
            // As QEMU names it: nbd:unix:/socket:exportname=name, nbd:host:port:exportname=name.
            Some(("nbd", rest)) if !rest.starts_with("//") => Ok(Self::Nbd(rest.to_owned())),
            Some(("nbd" | "nbds" | "nbd+unix" | "nbds+unix", _)) => Ok(Self::Nbd(text.to_owned())),
            _ => Err(unknown(&format!("'{}'", shown(text)))),
        }
    }

    /// Of a volume's URI whose scheme has no datapath plugin and needs none.
    pub fn of_uri(uri: &str) -> Option<Result<Self, String>> {
        let (scheme, rest) = uri.split_once(':')?;
        let local = || decoded(rest.strip_prefix("//").unwrap_or(rest)).and_then(|text| path(&text));
        match scheme {
            "raw+file" | "raw+block" | "raw+device" | "file" | "aio" => Some(local().map(Self::Raw)),
            "vhd+file" | "vhd+block" | "vhd" => Some(local().map(Self::Vhd)),
            "nbd" | "nbds" | "nbd+unix" | "nbds+unix" => Some(Self::of_params(uri)),
            _ => None,
        }
    }

    /// Of one of the implementations that `Datapath.attach` answers.
    ///
    /// # Errors
    /// A sentence.
    pub fn of_implementation(value: &Value) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Fields {
            #[serde(default)]
            path: String,
            #[serde(default)]
            uri: String,
            #[serde(default)]
            params: String,
            #[serde(default)]
            backend_type: String,
            #[serde(default)]
            extra: BTreeMap<String, Value>,
        }
        let pair = value.as_array().map(Vec::as_slice);
        let Some([Value::String(kind), fields]) = pair else {
            return Err("an implementation is no pair of a name and its fields".to_owned());
        };
        let fields = Fields::deserialize(fields).map_err(|error| format!("{}: {error}", shown(kind)))?;
        match kind.as_str() {
            "BlockDevice" | "Blockdevice" | "File" => path(&fields.path).map(Self::Raw),
            "Nbd" => Self::of_params(&fields.uri),
            "XenDisk" => Self::of_params(&fields.params).map_err(|why| {
                // The back end of a QEMU or of another tapdisk may be reached by NBD as well, and says so there.
                let more = if fields.extra.is_empty() { "" } else { " (with more fields)" };
                format!("back end '{}'{more}: {why}", shown(&fields.backend_type))
            }),
            other => Err(unknown(&shown(other))),
        }
    }

    /// The first of these that can be opened here, a block device or a file before NBD.
    ///
    /// # Errors
    /// A sentence for each.
    pub fn best(implementations: &[Value]) -> Result<Self, String> {
        let found: Vec<_> = implementations.iter().take(64).map(Self::of_implementation).collect();
        let rank = |source: &&Self| u8::from(matches!(source, Self::Nbd(_)));
        if let Some(source) = found.iter().flatten().min_by_key(rank) {
            return Ok(source.clone());
        }
        let why: Vec<String> = found.into_iter().filter_map(Result::err).collect();
        Err(if why.is_empty() { "it offers no way to its data".to_owned() } else { why.join("; ") })
    }

    /// What a disk process opens.
    ///
    /// # Errors
    /// A sentence: it is not there, or is something else.
    pub(super) fn open(&self, access: Access) -> Result<OpenSpec, ApiError> {
        let layers = match self {
            Self::Raw(path) => {
                let data = fs::metadata(path).map_err(|error| errors::io(46, "cannot find", path, &error))?;
                if !data.is_file() && !data.file_type().is_block_device() {
                    let text = format!("{} is neither a file nor a block device", path.display());
                    return Err(errors::fail(46, text));
                }
                vec![LayerSpec { kind: ImageKind::Raw, path: path.clone() }]
            }
            Self::Vhd(path) => vhd(path)?,
            Self::Nbd(name) => {
                vec![LayerSpec { kind: ImageKind::Nbd, path: PathBuf::from(name) }]
            }
        };
        Ok(OpenSpec { chain: ChainSpec { layers, access }, log: None })
    }
}

fn vhd(path: &Path) -> Result<Vec<LayerSpec>, ApiError> {
    let chain = offline::resolve_chain(path, Access::ReadOnly).map_err(|error| errors::image(65, &error))?;
    Ok(chain.layers)
}

/// A text with `%2f` and the like read.
fn decoded(text: &str) -> Result<String, String> {
    let wrong = || format!("'{}' has a '%' that is no character", shown(text));
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        if *first == b'%' {
            let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
            let byte = digits.filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
            bytes.push(byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()).ok_or_else(wrong)?);
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    String::from_utf8(bytes).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn raw(path: &str) -> Source {
        Source::Raw(path.into())
    }

    #[test]
    fn every_published_implementation_is_known_or_refused_by_name() {
        let of = |value: &Value| Source::of_implementation(value);
        assert_eq!(of(&json!(["BlockDevice", {"path": "/dev/sdx", "later": 1}])), Ok(raw("/dev/sdx")));
        assert_eq!(of(&json!(["File", {"path": "/d/a b.img"}])), Ok(raw("/d/a b.img")));
        let nbd = json!(["Nbd", {"uri": "nbd:unix:/run/s:exportname=d"}]);
        assert_eq!(of(&nbd), Ok(Source::Nbd("unix:/run/s:exportname=d".into())));
        let xen =
            |params: &str| of(&json!(["XenDisk", {"params": params, "extra": {}, "backend_type": "vbd3"}]));
        assert_eq!(xen("vhd:/d/a.vhd"), Ok(Source::Vhd("/d/a.vhd".into())));
        assert_eq!(xen("/dev/dm-3"), Ok(raw("/dev/dm-3")));
        for params in ["qcow2:/d/a", "", "relative", "aio:../x", "/a/../b"] {
            assert!(xen(params).is_err(), "{params}");
        }
        for odd in [json!(1), json!(["BlockDevice"]), json!(["Rbd", {}]), json!(["BlockDevice", {"path": 1}])]
        {
            assert!(of(&odd).is_err(), "{odd}");
        }
        let all = [nbd, json!(["Other", {}]), json!(["BlockDevice", {"path": "/dev/sdx"}])];
        assert_eq!(Source::best(&all), Ok(raw("/dev/sdx")), "the shortest way");
        assert!(Source::best(&[]).is_err());
    }

    #[test]
    fn uris_that_need_no_plugin_are_read() {
        let of = |uri: &str| Source::of_uri(uri).map(|found| found.ok());
        assert_eq!(of("raw+file:///d/a%20b"), Some(Some(raw("/d/a b"))));
        assert_eq!(of("vhd+file:///d/a.vhd"), Some(Some(Source::Vhd("/d/a.vhd".into()))));
        assert_eq!(of("nbd://host/x"), Some(Some(Source::Nbd("nbd://host/x".into()))));
        assert_eq!(of("raw+file:///d/%zz"), Some(None));
        assert_eq!(of("raw+file:///d/%"), Some(None));
        assert_eq!(of("raw+file:///d/%2e%2e/x"), Some(None));
        assert_eq!((of("gfs2:///d/x"), of("nothing")), (None, None));
    }
}
