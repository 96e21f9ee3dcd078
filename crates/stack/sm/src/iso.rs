//! `iso`: a directory of ISO images, of this host or of an NFS or SMB server, each a VDI that is read only.
//!
//! Nothing is written there. A VDI's UUID is made of the SR's and the file's name, so that it is the same after every
//! scan and on every host.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tapio_types::{Access, ApiError, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

use crate::Places;
use crate::errors;
use crate::links;
use crate::mount;
use crate::network::nfs::Nfs;
use crate::network::smb::Smb;
use crate::network::{self, Numbers, Share, Visit};
use crate::probe::sr_list;
use crate::traits::{
    Config, Ctx, DriverInfo, Fork, ForkKind, NewVdi, OpenSpec, ProbeAnswer, ProbeResult, Sr, SrDriver,
    SrStat, VdiInfo,
};
use crate::transfer::Import;

static INFO: DriverInfo = DriverInfo {
    sr_type: "iso",
    name: "ISO library",
    description: "CD images (.iso, .img) in a directory of this host or of an NFS or SMB server, read only",
    capabilities: &[
        "SR_ATTACH",
        "SR_DETACH",
        "SR_PROBE",
        "SR_SCAN",
        "VDI_ATTACH",
        "VDI_DETACH",
        "VDI_ACTIVATE",
        "VDI_DEACTIVATE",
    ],
    configuration: &[
        (
            "location",
            "server:/path for NFS, //server/share for SMB, or an absolute path of this host (required)",
        ),
        ("type", "nfs_iso or cifs; without it the location tells"),
        ("nfsversion", "of NFS: 3 (the default), 4, 4.0, 4.1 or 4.2"),
        ("vers", "of SMB: 3.1.1, 3.0.2, 3.0, 3 (the default), 2.1"),
        ("username", "of SMB: account, with its domain as DOMAIN\\name; a guest without it"),
        ("cifspassword", "of SMB: its password, which is kept as a secret"),
        ("cifspassword_secret", "of SMB: UUID of the secret that has its password"),
        ("options", "more mount options of NFS or SMB"),
        ("legacy_mode", "true: the location is a directory of this host (required for one)"),
    ],
    is_shareable: true,
};

/// The driver. It keeps nothing on the host.
#[derive(Debug)]
pub(crate) struct IsoDriver {
    places: Places,
}

/// Where the images are.
enum Location {
    /// A directory of this host.
    Here(PathBuf),
    /// A directory of a server.
    Share(Box<dyn Share>),
}

fn location(config: &Config) -> Result<Location, ApiError> {
    let text = config.get("location").map_or("", String::as_str);
    if text.is_empty() {
        return Err(errors::fail(220, "device_config:location is the directory of the images"));
    }
    let is_smb = text.starts_with("//") || text.starts_with(r"\\");
    let kind = match config.get("type").map(String::as_str) {
        Some("") | None if is_smb => "cifs",
        Some("") | None if text.contains(":/") => "nfs_iso",
        Some("") | None => "",
        Some(kind) => kind,
    };
    match kind {
        "" => local(text, config).map(Location::Here),
        "nfs_iso" => Ok(Location::Share(Box::new(Nfs::library(text, config)?))),
        "cifs" => Ok(Location::Share(Box::new(Smb::library(text, config)?))),
        kind => Err(errors::fail(1, format_args!("type '{kind}' is neither nfs_iso nor cifs"))),
    }
}

fn local(text: &str, config: &Config) -> Result<PathBuf, ApiError> {
    if !Path::new(text).is_absolute() || text.contains('\0') {
        return Err(errors::fail(225, format_args!("location '{text}' is no absolute path")));
    }
    if config.get("legacy_mode").map(String::as_str) != Some("true") {
        return Err(errors::fail(226, "a directory of this host needs device_config:legacy_mode=true"));
    }
    match fs::metadata(text) {
        Ok(data) if data.is_dir() => Ok(PathBuf::from(text)),
        Ok(_) => Err(errors::fail(226, format_args!("{text} is no directory"))),
        Err(error) => Err(errors::io(226, "cannot find", Path::new(text), &error)),
    }
}

impl IsoDriver {
    pub(crate) fn new(places: Places) -> Self {
        Self { places }
    }
}

impl SrDriver for IsoDriver {
    fn info(&self) -> &'static DriverInfo {
        &INFO
    }

    fn probe(&self, _: &dyn Ctx, config: &Config) -> Result<ProbeAnswer, ApiError> {
        let count = match location(config)? {
            Location::Here(directory) => names(&directory)?.len(),
            Location::Share(share) => {
                let visit = Visit::begin(&self.places, &*share)?;
                let count = names(visit.point())?.len();
                visit.end()?;
                count
            }
        };
        let extra_info = BTreeMap::from([("images".to_string(), count.to_string())]);
        let result = ProbeResult { configuration: config.clone(), complete: true, sr: None, extra_info };
        // A library does not know which SR it is.
        Ok(ProbeAnswer { xml: sr_list(&[]), results: vec![result] })
    }

    fn create(&self, _: &dyn Ctx, _: Uuid, config: &Config, _: u64) -> Result<(), ApiError> {
        match location(config)? {
            Location::Here(_) => Ok(()),
            Location::Share(share) => Visit::begin(&self.places, &*share)?.end(),
        }
    }

    fn attach(&self, _: &dyn Ctx, sr: Uuid, config: &Config) -> Result<Box<dyn Sr>, ApiError> {
        let share = match location(config)? {
            Location::Here(directory) => {
                names(&directory)?;
                return Ok(Box::new(Library { sr, directory, mounted: None }));
            }
            Location::Share(share) => share,
        };
        let numbers = share.numbers();
        let directory = self.places.mount_dir.join(sr.to_string());
        share.mounting(None).mount_once(numbers, &directory)?;
        names(&directory).inspect_err(|_| {
            let _ = network::unmount(&directory);
        })?;
        Ok(Box::new(Library { sr, directory, mounted: Some(numbers) }))
    }
}

/// Names of the images.
fn names(directory: &Path) -> Result<Vec<String>, ApiError> {
    let fail = |error: io::Error| errors::io(47, "cannot read the ISO library", directory, &error);
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if is_image(&name) && links::inside(directory, &name).is_ok() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

fn is_image(name: &str) -> bool {
    let extension =
        name.rsplit_once('.').filter(|(stem, _)| !stem.is_empty()).map(|(_, extension)| extension);
    extension.is_some_and(|extension| {
        extension.eq_ignore_ascii_case("iso") || extension.eq_ignore_ascii_case("img")
    })
}

/// The UUID of an image.
pub(crate) fn uuid_of(sr: Uuid, name: &str) -> Uuid {
    let hash = Sha256::new().chain_update(sr.as_bytes()).chain_update(name.as_bytes()).finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    // Version 8, made by a rule of one's own.
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Uuid::from_bytes(bytes)
}

/// An attached library.
#[derive(Debug)]
struct Library {
    sr: Uuid,
    directory: PathBuf,
    /// It is a server's, and mounted there.
    mounted: Option<Numbers>,
}

impl Library {
    fn info(&self, name: &str) -> io::Result<VdiInfo> {
        let data = fs::symlink_metadata(links::inside(&self.directory, name)?)?;
        Ok(VdiInfo {
            uuid: uuid_of(self.sr, name),
            location: name.to_string(),
            virtual_size: data.len().next_multiple_of(512),
            physical_utilisation: data.blocks().saturating_mul(512),
            managed: true,
            read_only: true,
            parent: None,
            name_label: Some(name.to_string()),
            sm_config: BTreeMap::from([("vdi_type".to_string(), "aio".to_string())]),
            cbt_enabled: false,
            is_metadata: false,
            told: None,
        })
    }

    fn find(&self, vdi: Uuid) -> Result<String, ApiError> {
        let mut names = names(&self.directory)?.into_iter();
        names.find(|name| uuid_of(self.sr, name) == vdi).ok_or_else(|| errors::vdi_missing(self.sr, vdi))
    }

    fn end(self: Box<Self>) -> Result<(), (Box<dyn Sr>, ApiError)> {
        let Some(numbers) = self.mounted else { return Ok(()) };
        network::unmount(&self.directory).map_err(|error| {
            let error = errors::io(numbers.unmount, "cannot unmount", &self.directory, &error);
            (self as Box<dyn Sr>, error)
        })
    }

    fn read_only<T>(&self, what: &str) -> Result<T, ApiError> {
        let text =
            format!("{what}: an ISO library is read only: put files into {}", self.directory.display());
        Err(errors::fail(38, text))
    }
}

impl Sr for Library {
    fn stat(&self, ctx: &dyn Ctx) -> Result<SrStat, ApiError> {
        let (physical_size, physical_utilisation) = mount::sizes(&self.directory)
            .map_err(|error| errors::io(47, "cannot ask for the size of", &self.directory, &error))?;
        let virtual_allocation = self.scan(ctx)?.iter().map(|vdi| vdi.virtual_size).sum();
        Ok(SrStat { physical_size, physical_utilisation, virtual_allocation })
    }

    fn scan(&self, _: &dyn Ctx) -> Result<Vec<VdiInfo>, ApiError> {
        // One that goes meanwhile is not there.
        Ok(names(&self.directory)?.iter().filter_map(|name| self.info(name).ok()).collect())
    }

    fn vdi(&self, _: &dyn Ctx, vdi: Uuid) -> Result<VdiInfo, ApiError> {
        let name = self.find(vdi)?;
        self.info(&name).map_err(|error| errors::io(46, "cannot read", &self.directory.join(&name), &error))
    }

    fn create(&self, _: &dyn Ctx, _: &NewVdi) -> Result<VdiInfo, ApiError> {
        self.read_only("create")
    }

    fn introduce(&self, _: &dyn Ctx, vdi: Uuid, location: &str) -> Result<VdiInfo, ApiError> {
        if !is_image(location) {
            return Err(errors::fail(221, format_args!("'{location}'")));
        }
        if location.contains('/') || uuid_of(self.sr, location) != vdi {
            let text =
                format!("'{location}' has its own UUID here, {}: scan the SR", uuid_of(self.sr, location));
            return Err(errors::fail(46, text));
        }
        self.info(location)
            .map_err(|error| errors::io(46, "cannot read", &self.directory.join(location), &error))
    }

    fn destroy(&self, _: &dyn Ctx, _: Uuid) -> Result<(), ApiError> {
        self.read_only("destroy")
    }

    fn resize(&self, _: &dyn Ctx, _: Uuid, _: u64) -> Result<VdiInfo, ApiError> {
        self.read_only("resize")
    }

    fn fork(&self, _: &dyn Ctx, _: Uuid, _: Uuid, _: ForkKind) -> Result<Fork, ApiError> {
        self.read_only("snapshot")
    }

    fn fill(&self, _: &dyn Ctx, _: Uuid, _: &ChainSpec, _: Option<&ChainSpec>) -> Result<(), ApiError> {
        self.read_only("copy")
    }

    fn import(&self, _: &dyn Ctx, _: &Import, _: OwnedFd) -> Result<(), ApiError> {
        self.read_only("import")
    }

    fn activate(&self, _: &dyn Ctx, vdi: Uuid, access: Access) -> Result<OpenSpec, ApiError> {
        if access == Access::ReadWrite {
            return Err(ApiError::new("VDI_READONLY", [vdi.to_string()]));
        }
        let name = self.find(vdi)?;
        // Where it leads now, without a link that may lead elsewhere later.
        let path = links::inside(&self.directory, &name)
            .map_err(|error| errors::io(46, "cannot use", &self.directory.join(&name), &error))?;
        let chain = ChainSpec { layers: vec![LayerSpec { kind: ImageKind::Raw, path }], access };
        Ok(OpenSpec { chain, log: None })
    }

    fn deactivate(&self, _: &dyn Ctx, _: Uuid) -> Result<(), ApiError> {
        Ok(())
    }

    fn detach(self: Box<Self>, _: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        self.end()
    }

    /// The files are not the SR's: they stay.
    fn erase(self: Box<Self>, _: &dyn Ctx) -> Result<(), (Box<dyn Sr>, ApiError)> {
        self.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_the_same_every_time_and_of_its_own_kind() {
        let sr = Uuid::from_u128(1);
        let uuid = uuid_of(sr, "debian.iso");
        assert_eq!(uuid, uuid_of(sr, "debian.iso"));
        assert_ne!(uuid, uuid_of(sr, "debian2.iso"));
        assert_ne!(uuid, uuid_of(Uuid::from_u128(2), "debian.iso"));
        assert_eq!(uuid.get_version_num(), 8);
        assert!(is_image("a.ISO") && is_image("b.img") && !is_image(".iso") && !is_image("a.iso.part"));
    }
}
