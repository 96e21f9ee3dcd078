//! Exports of NFS servers.

use std::time::Duration;

use tapio_types::ApiError;

use super::{LIBRARY, Mounting, Numbers, Share, address};
use crate::command;
use crate::dir;
use crate::errors;
use crate::probe::document;
use crate::traits::{Config, DriverInfo, ProbeAnswer};

pub(crate) static INFO: DriverInfo = DriverInfo {
    sr_type: "nfs",
    name: "NFS",
    description: "VDIs as VHD and raw files in a directory of an NFS server",
    capabilities: dir::CAPABILITIES,
    configuration: &[
        ("server", "name or address of the server (required)"),
        ("serverpath", "path of the export (required); without it a probe lists the exports"),
        ("nfsversion", "3 (the default), 4, 4.0, 4.1 or 4.2"),
        ("transport", "tcp (the default), udp or rdma"),
        (
            "options",
            "more mount options, as soft,timeo=100,retrans=12: guests get errors after that time. Without 'soft' they \
             wait until the server is back",
        ),
        ("probeversion", "any value: a probe tells the versions that the server speaks"),
        ("preferred-image-formats", "formats of new VDIs in order of preference: vhd, raw"),
        crate::lease::SILENCE_KEY,
    ],
    is_shareable: true,
};

const NUMBERS: Numbers = Numbers { mount: 73, unmount: 74, attached: 75, create: 88, delete: 76 };
/// Versions that `nfsversion` may name.
const VERSIONS: &[&str] = &["3", "4", "4.0", "4.1", "4.2"];
const TRANSPORTS: &[&str] = &["tcp", "udp", "rdma"];
/// A question that a server answers at once.
const ASKING: Duration = Duration::from_secs(20);
/// Lines of a server's answer that are read.
const EXPORTS_MAX: usize = 4096;

/// An export, or a directory below one.
#[derive(Clone, Debug)]
pub(crate) struct Nfs {
    server: String,
    path: String,
    version: String,
    transport: String,
    options: Vec<String>,
    tells_versions: bool,
    numbers: Numbers,
}

impl Nfs {
    /// The export of a library of ISO images; `location` is `server:/path`.
    ///
    /// # Errors
    /// 225, 72, 228.
    pub(crate) fn library(location: &str, config: &Config) -> Result<Self, ApiError> {
        let text = || errors::fail(225, format_args!("location '{location}' is no 'server:/path'"));
        let at = location.find(":/").ok_or_else(text)?;
        let (server, path) = (&location[..at], &location[at + 1..]);
        Self::new(address::server(server, 225)?, address::path(path, 225)?, LIBRARY, config)
    }

    fn new(server: String, path: String, numbers: Numbers, config: &Config) -> Result<Self, ApiError> {
        let of = |key, default: &str| {
            let value = config.get(key).map(String::as_str).filter(|value| !value.is_empty());
            value.unwrap_or(default).to_owned()
        };
        let (version, transport) = (of("nfsversion", "3"), of("transport", "tcp"));
        if !VERSIONS.contains(&version.as_str()) {
            return Err(errors::fail(
                72,
                format_args!("nfsversion '{version}' is none of {}", VERSIONS.join(", ")),
            ));
        }
        if !TRANSPORTS.contains(&transport.as_str()) {
            let text = format!("transport '{transport}' is none of {}", TRANSPORTS.join(", "));
            return Err(errors::fail(1, text));
        }
        let options = address::options(&of("options", ""))?;
        let tells_versions = config.contains_key("probeversion");
        Ok(Self { server, path, version, transport, options, tells_versions, numbers })
    }

    /// The versions that the server answers to.
    fn versions(&self) -> Vec<&'static str> {
        let bare = self.server.trim_matches(['[', ']']);
        let answers =
            |version| command::run_well("rpcinfo", &["-T", "tcp", bare, "nfs", version], ASKING).is_ok();
        ["3", "4"].into_iter().filter(|version| answers(version)).collect()
    }
}

impl Share for Nfs {
    fn numbers(&self) -> Numbers {
        self.numbers
    }

    /// `hard` unless it is told otherwise: a guest waits while the server is away, and nothing that was acknowledged
    /// is lost. Attributes of directories are not kept, because other hosts change them. No retries: the caller's plan
    /// has its own. No programs and no devices.
    fn mounting(&self, below: Option<&str>) -> Mounting {
        let mut options = vec![format!("vers={},proto={}", self.version, self.transport)];
        if !self.options.iter().any(|option| option == "soft" || option == "softerr") {
            options.push("hard".into());
        }
        options.push("acdirmin=0,acdirmax=0,retry=0".into());
        options.extend(self.options.iter().cloned());
        options.push("noatime,nosuid,nodev,noexec".into());
        Mounting {
            program: "mount.nfs",
            package: "nfs-common",
            source: format!("{}:{}", self.server, address::join(&self.path, below)),
            options: options.join(","),
            secret: None,
        }
    }

    fn also(&self, answer: &mut ProbeAnswer) -> Result<(), ApiError> {
        if !self.tells_versions {
            return Ok(());
        }
        let versions = self.versions();
        let items: Vec<_> =
            versions.iter().map(|version| ("Version", vec![("", (*version).to_owned())])).collect();
        let mut part = document("SupportedVersions", &items);
        part = part.split_once('\n').map_or(part.clone(), |(_, rest)| rest.to_owned());
        let inner: String = part.lines().map(|line| format!("\t{line}\n")).collect();
        answer.xml = answer.xml.replace("</SRlist>\n", &format!("{inner}</SRlist>\n"));
        for result in &mut answer.results {
            result.extra_info.insert("versions".into(), versions.join(","));
        }
        Ok(())
    }
}

/// The export of a `device_config`.
///
/// # Errors
/// 102 without a server; 101 without a path, with the exports of the server as its document; 72, 228.
pub(crate) fn of(config: &Config) -> Result<Box<dyn Share>, ApiError> {
    let text = |key| config.get(key).map(String::as_str).filter(|value| !value.is_empty());
    let Some(server) = text("server") else {
        return Err(errors::fail(102, "device_config:server is the name or address of the NFS server"));
    };
    let server = address::server(server, 102)?;
    let Some(path) = text("serverpath") else {
        let what = "device_config:serverpath is the path of the export; the document lists some";
        return Err(errors::fail_with(101, what, exports(&server)?));
    };
    Ok(Box::new(Nfs::new(server, address::path(path, 103)?, NUMBERS, config)?))
}

/// The document of what a server exports.
fn exports(server: &str) -> Result<String, ApiError> {
    let bare = server.trim_matches(['[', ']']);
    let listed = command::run_well("showmount", &["--no-headers", "-e", bare], ASKING).map_err(|error| {
        let next = if error.is_missing {
            "install nfs-common"
        } else {
            "a server of version 4 alone lists nothing: name the serverpath, '/' is its root"
        };
        errors::fail(108, format_args!("{server}: {error}: {next}"))
    })?;
    Ok(exports_document(bare, &listed))
}

/// What `showmount` lists, a path and the clients that may mount it in each line, as clients parse it.
fn exports_document(server: &str, listed: &str) -> String {
    let items: Vec<_> = listed
        .lines()
        .filter_map(|line| {
            // A path may have blanks, a list of clients has none.
            let (path, access) = line.trim_end().rsplit_once(char::is_whitespace)?;
            let fields = vec![
                ("Target", server.to_owned()),
                ("Path", path.trim_end().to_owned()),
                ("Accesslist", access.to_owned()),
            ];
            path.starts_with('/').then_some(("Export", fields))
        })
        .take(EXPORTS_MAX)
        .collect();
    document("nfs-exports", &items)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Config {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_mount_is_hard_unless_it_is_told_otherwise() {
        let base = [("server", "nas"), ("serverpath", "/srv/")];
        let mounting = of(&config(&base)).unwrap().mounting(Some("x"));
        assert_eq!(mounting.source, "nas:/srv/x");
        assert_eq!(
            mounting.options,
            "vers=3,proto=tcp,hard,acdirmin=0,acdirmax=0,retry=0,noatime,nosuid,nodev,noexec"
        );
        let more = [("nfsversion", "4.1"), ("options", "soft,timeo=50"), ("transport", "tcp")];
        let mounting = of(&config(&[&base[..], &more].concat())).unwrap().mounting(None);
        assert_eq!(mounting.source, "nas:/srv");
        assert!(mounting.options.starts_with("vers=4.1,proto=tcp,acdirmin=0"), "{}", mounting.options);
        assert!(mounting.options.contains(",soft,timeo=50,noatime"), "{}", mounting.options);
    }

    #[test]
    fn what_is_missing_or_wrong_has_its_number() {
        let code = |pairs: &[(&str, &str)]| of(&config(pairs)).err().map(|error| error.code);
        assert_eq!(code(&[]).as_deref(), Some("SR_BACKEND_FAILURE_102"));
        let base = [("server", "nas"), ("serverpath", "/srv")];
        let with = |more: (&'static str, &'static str)| code(&[&base[..], &[more]].concat());
        assert_eq!(with(("nfsversion", "2")).as_deref(), Some("SR_BACKEND_FAILURE_72"));
        assert_eq!(with(("transport", "x")).as_deref(), Some("SR_BACKEND_FAILURE_1"));
        assert_eq!(with(("options", "exec")).as_deref(), Some("SR_BACKEND_FAILURE_228"));
        assert_eq!(
            code(&[("server", "nas"), ("serverpath", "srv")]).as_deref(),
            Some("SR_BACKEND_FAILURE_103")
        );
    }

    #[test]
    fn exports_are_listed_as_clients_parse_them() {
        let xml = exports_document("nas", "/srv/a b   10.0.0.0/8,host\n/x (everyone)\nnonsense\n");
        assert!(
            xml.starts_with("<?xml version=\"1.0\" ?>\n<nfs-exports>\n\t<Export>\n\t\t<Target>"),
            "{xml}"
        );
        assert_eq!(xml.matches("<Export>").count(), 2);
        assert!(xml.contains("/srv/a b\n") && xml.contains("10.0.0.0/8,host\n"), "{xml}");
    }

    #[test]
    fn a_library_is_named_by_one_text() {
        let share = Nfs::library("[fd00::1]:/iso", &Config::new()).unwrap();
        assert_eq!(share.mounting(None).source, "[fd00::1]:/iso");
        assert_eq!(Nfs::library("nas", &Config::new()).expect_err("no path").code, "SR_BACKEND_FAILURE_225");
    }
}
