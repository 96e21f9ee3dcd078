//! `scan`: many images, a line each.

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use tapio_format::vhd::KeyHash;
use tapio_format::vhd::offline::{ScanEntry, ScanFailure, canonical, scan_image, scan_volume};
use tapio_format::{FileMedium, FormatError};
use tapio_types::Access;

use super::glob;
use super::output::{Failure, hex};
use super::volumes::{self, Volume};

/// List images, a line each
#[derive(Debug, Args)]
pub(super) struct Scan {
    /// List the files (with -l the volumes) that match a pattern, as '/disks/*.vhd'
    #[arg(short = 'm', value_name = "PATTERN")]
    filter: Option<String>,
    /// Print parents as they are recorded, without looking for them
    #[arg(short = 'f')]
    fast: bool,
    /// Go on after an image that cannot be read, and exit with 0
    #[arg(short = 'c')]
    keep_going: bool,
    /// List logical volumes of this volume group instead of files; they need not be active
    #[arg(short = 'l', value_name = "VG")]
    volume_group: Option<String>,
    /// Print trees: children below their parents, three spaces deeper
    #[arg(short = 'p')]
    pretty: bool,
    /// List the parents of what is listed too
    #[arg(short = 'a')]
    parents: bool,
    /// Print whole paths
    #[arg(short = 'v')]
    verbose: bool,
    /// Print marker and hash of the key
    #[arg(short = 'M')]
    markers: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    /// Images; with -l patterns of volumes
    #[arg(value_name = "FILES", required_unless_present = "filter")]
    files: Vec<String>,
}

/// The step of a scan that finds out whether there is something of that name.
const NOT_THERE: &str = "failure scanning target";

/// One thing to list.
#[derive(Clone, Debug)]
enum Target {
    /// A file or device with a VHD.
    File(PathBuf),
    /// A raw parent.
    RawFile(PathBuf),
    Volume(Volume),
}

/// One thing listed.
struct Image {
    name: String,
    facts: Result<ScanEntry, ScanFailure>,
}

impl Scan {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let volumes = match &self.volume_group {
            Some(group) => volumes::list(group)?,
            None => Vec::new(),
        };
        let mut failed = None;
        let mut images = Vec::new();
        let mut targets = self.targets(&volumes, &mut images, out)?;
        let mut at = 0;
        while at < targets.len() {
            let image = self.look(&targets[at])?;
            if self.parents
                && let Some(parent) =
                    image.facts.as_ref().ok().and_then(|facts| self.parent_target(facts, &volumes))
                && !targets.iter().any(|target| target.file_name() == parent.file_name())
            {
                targets.push(parent);
            }
            let ok = image.facts.is_ok();
            let errno = image.facts.as_ref().map_or_else(|failure| failure.error.errno(), |_| 0);
            if self.pretty && ok || self.json {
                images.push(image);
            } else {
                self.print(&image, 0, true, out)?;
            }
            if !ok {
                failed = Some(errno);
                if !self.keep_going {
                    break;
                }
            }
            at += 1;
        }
        if self.json {
            self.print_json(&images, out)?;
        } else {
            self.print_trees(&mut images, out)?;
        }
        match failed.filter(|_| !self.keep_going) {
            Some(errno) => Err(Failure::silent(errno)),
            None => Ok(()),
        }
    }

    /// What is to be listed. What is named and is not there is reported first, and ends the scan unless it goes on.
    fn targets(
        &self,
        volumes: &[Volume],
        images: &mut Vec<Image>,
        out: &mut dyn Write,
    ) -> Result<Vec<Target>, Failure> {
        if self.volume_group.is_some() {
            let patterns: Vec<&String> = self.filter.iter().chain(&self.files).collect();
            let wanted =
                |volume: &&Volume| patterns.iter().any(|pattern| glob::matches(pattern, &volume.name));
            return Ok(volumes.iter().filter(wanted).cloned().map(Target::Volume).collect());
        }
        let mut paths = Vec::new();
        if let Some(filter) = &self.filter {
            paths = glob::files(filter, !self.fast || self.pretty)?;
            if paths.is_empty() && !filter.is_empty() && !glob::has_wildcards(filter) {
                let missing = missing(filter, &std::io::Error::from_raw_os_error(libc::ENOENT));
                self.print(&missing, 0, true, out)?;
                return Err(Failure::silent(libc::ENOENT));
            }
        }
        paths.extend(self.files.iter().map(PathBuf::from));
        let mut targets = Vec::new();
        for path in paths {
            let Err(error) = std::fs::metadata(&path) else {
                targets.push(Target::File(path));
                continue;
            };
            let missing = missing(&path.display().to_string(), &error);
            if self.json {
                images.push(missing);
            } else {
                self.print(&missing, 0, true, out)?;
            }
            if !self.keep_going {
                if self.json {
                    self.print_json(images, out)?;
                }
                return Err(Failure::silent(error.raw_os_error().unwrap_or(libc::EIO)));
            }
        }
        Ok(targets)
    }

    fn print_json(&self, images: &[Image], out: &mut dyn Write) -> Result<(), Failure> {
        let list: Vec<_> = images.iter().map(as_json).collect();
        writeln!(out, "{:#}", serde_json::Value::from(list))?;
        Ok(())
    }

    fn look(&self, target: &Target) -> Result<Image, Failure> {
        let (path, raw) = match target {
            Target::Volume(volume) => {
                return Ok(Image { name: volume.name.clone(), facts: look_at_volume(volume) });
            }
            Target::File(path) => (path, false),
            Target::RawFile(path) => (path, true),
        };
        if let Err(error) = std::fs::metadata(path) {
            return Ok(missing(&path.display().to_string(), &error));
        }
        // In a tree, images are told apart by where they are.
        let found = if self.pretty { canonical(path).unwrap_or_else(|_| path.clone()) } else { path.clone() };
        let facts = if raw { look_at_raw(&found) } else { scan_image(&found, self.fast && !self.pretty) };
        Ok(Image { name: found.display().to_string(), facts })
    }

    fn parent_target(&self, facts: &ScanEntry, volumes: &[Volume]) -> Option<Target> {
        let parent = facts.parent.clone()?;
        if self.volume_group.is_some() {
            let name = parent.display().to_string();
            return volumes.iter().find(|volume| volume.name == name).cloned().map(Target::Volume);
        }
        Some(if facts.raw_parent { Target::RawFile(parent) } else { Target::File(parent) })
    }

    /// Roots by name, hidden ones first; below each its children, shown ones first.
    fn print_trees(&self, images: &mut [Image], out: &mut dyn Write) -> Result<(), Failure> {
        images.sort_by(|a, b| a.name.cmp(&b.name));
        let index: BTreeMap<&str, usize> =
            images.iter().enumerate().map(|(i, image)| (&*image.name, i)).collect();
        let parent_of = |image: &Image| {
            let parent = image.facts.as_ref().ok()?.parent.as_ref()?;
            index.get(&*parent.display().to_string()).copied()
        };
        let parents: Vec<Option<usize>> = images.iter().map(parent_of).collect();
        let mut children = vec![Vec::new(); images.len()];
        for (image, parent) in parents.iter().enumerate() {
            if let Some(parent) = *parent {
                children[parent].push(image);
            }
        }
        let hidden = |image: usize| images[image].facts.as_ref().is_ok_and(|facts| facts.hidden != 0);
        let mut roots: Vec<usize> = (0..images.len()).filter(|&image| parents[image].is_none()).collect();
        roots.sort_by_key(|&image| !hidden(image));
        // What is left after all roots is in a loop: each is printed once.
        roots.extend(0..images.len());
        let mut printed = HashSet::new();
        for root in roots {
            let mut stack = vec![(root, 0)];
            while let Some((image, depth)) = stack.pop() {
                if !printed.insert(image) {
                    continue;
                }
                self.print(&images[image], depth * 3, parents[image].is_some(), out)?;
                let mut below = children[image].clone();
                below.sort_by_key(|&child| hidden(child));
                stack.extend(below.into_iter().rev().map(|child| (child, depth + 1)));
            }
        }
        Ok(())
    }

    fn print(
        &self,
        image: &Image,
        indent: usize,
        parent_is_listed: bool,
        out: &mut dyn Write,
    ) -> Result<(), Failure> {
        let pad = " ".repeat(indent);
        let facts = match &image.facts {
            Ok(facts) => facts,
            Err(ScanFailure { step, error }) => {
                writeln!(
                    out,
                    "{pad}vhd={} scan-error={} error-message='{step}'",
                    image.name,
                    -error.errno()
                )?;
                eprintln!("vhd-util: {error}");
                return Ok(());
            }
        };
        let shorten = |path: &Path| match path.file_name().filter(|_| !self.verbose) {
            Some(name) => name.display().to_string(),
            None => path.display().to_string(),
        };
        let parent = facts.parent.as_deref().map_or_else(|| "none".to_string(), shorten);
        let lost = if self.pretty && facts.parent.is_some() && !parent_is_listed {
            " (not found in scan)"
        } else {
            ""
        };
        write!(
            out,
            "{pad}vhd={} capacity={} size={} hidden={}",
            shorten(Path::new(&image.name)),
            facts.capacity,
            facts.size,
            facts.hidden
        )?;
        if self.markers {
            write!(out, " marker={} keyhash={}", facts.marker, key_hash(&facts.key_hash))?;
        }
        writeln!(out, " parent={parent}{lost}")?;
        Ok(())
    }
}

impl Target {
    /// Files are taken for the same by their names, as everything in one storage repository has its own.
    fn file_name(&self) -> Option<std::ffi::OsString> {
        match self {
            Self::File(path) | Self::RawFile(path) => path.file_name().map(Into::into),
            Self::Volume(volume) => Some((&volume.name).into()),
        }
    }
}

/// Something that was named and is not there.
fn missing(name: &str, error: &std::io::Error) -> Image {
    let error = std::io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO));
    let error = FormatError::io("cannot find", error).with_path(Path::new(name));
    Image { name: name.to_string(), facts: Err(ScanFailure { step: NOT_THERE, error }) }
}

fn look_at_raw(path: &Path) -> Result<ScanEntry, ScanFailure> {
    let failed = |error| ScanFailure { step: "opening file", error };
    let medium = FileMedium::open(path, Access::ReadOnly).map_err(failed)?;
    let len = tapio_format::Medium::len(&medium)
        .map_err(|error| failed(FormatError::io("cannot find the length", error).with_path(path)))?;
    Ok(raw_entry(len))
}

fn look_at_volume(volume: &Volume) -> Result<ScanEntry, ScanFailure> {
    if !volume.is_vhd() {
        return Ok(raw_entry(volume.len));
    }
    let failed = |error: FormatError| ScanFailure { step: "opening device", error };
    let medium = FileMedium::open(&volume.device, Access::ReadOnly).map_err(failed)?;
    scan_volume(&medium, volume.start, volume.segment_len, volume.len)
}

/// A raw image in a list is always a hidden node.
fn raw_entry(len: u64) -> ScanEntry {
    ScanEntry {
        capacity: len,
        size: len,
        hidden: 1,
        marker: 0,
        key_hash: KeyHash::default(),
        parent: None,
        raw_parent: false,
    }
}

fn key_hash(key_hash: &KeyHash) -> String {
    if key_hash.is_set() { hex(&key_hash.hash) } else { String::new() }
}

fn as_json(image: &Image) -> serde_json::Value {
    match &image.facts {
        Ok(facts) => json!({
            "name": image.name,
            "capacity": facts.capacity,
            "size": facts.size,
            "hidden": facts.hidden,
            "marker": facts.marker,
            "key_hash": key_hash(&facts.key_hash),
            "parent": facts.parent,
            "raw_parent": facts.raw_parent,
        }),
        Err(failure) => json!({
            "name": image.name,
            "error": failure.error.to_string(),
            "errno": failure.error.errno(),
            "step": failure.step,
        }),
    }
}
