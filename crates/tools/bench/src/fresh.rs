//! Images without any data, for workloads whose every write takes new space.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use tapio_format::vhd::KeyHash;
use tapio_format::vhd::offline::{self, Image, OpenOptions, Shape, SnapshotOptions};
use tapio_load::Random;

use super::server::Backing;

/// Every file that is made here.
const NAMES: [&str; 5] = ["fresh.raw", "fresh.vhd", "fresh-parent.vhd", "fresh.qcow2", "fresh.key"];
/// AES-XTS with 256 bits.
const KEY_LEN: usize = 64;

/// Makes an image of `len` bytes of disk in `dir`, and the key's file of an encrypted one.
pub fn image(dir: &Path, backing: Backing, len: u64) -> Result<(PathBuf, Option<PathBuf>), String> {
    remove(dir)?;
    let (vhd, said) = (dir.join("fresh.vhd"), |error: tapio_format::FormatError| error.to_string());
    match backing {
        Backing::Raw => {
            let path = dir.join("fresh.raw");
            let made = File::create(&path).and_then(|file| file.set_len(len));
            made.map_err(|error| cannot_make(&path, &error))?;
            Ok((path, None))
        }
        Backing::Vhd | Backing::Nothing => {
            offline::create(&vhd, &Shape::Dynamic, len, 0).map_err(said)?;
            Ok((vhd, None))
        }
        Backing::Differencing => {
            let parent = dir.join("fresh-parent.vhd");
            offline::create(&parent, &Shape::Dynamic, len, 0).map_err(said)?;
            offline::snapshot(&vhd, &parent, &SnapshotOptions::default()).map_err(said)?;
            Ok((vhd, None))
        }
        Backing::Encrypted => {
            offline::create(&vhd, &Shape::Dynamic, len, 0).map_err(said)?;
            let mut key = [0; KEY_LEN];
            Random::new(len).fill(&mut key);
            let mut image = Image::open(&vhd, OpenOptions::WRITE).map_err(said)?;
            offline::set_key_hash(&mut image, KeyHash::of([1; 32], &key)).map_err(said)?;
            let path = dir.join("fresh.key");
            fs::write(&path, key).map_err(|error| cannot_make(&path, &error))?;
            Ok((vhd, Some(path)))
        }
        Backing::Qcow2 => {
            let path = dir.join("fresh.qcow2");
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", "qcow2"]).arg(&path).arg(len.to_string());
            let output = command.output().map_err(|error| format!("needs qemu-img: {error}"))?;
            if !output.status.success() {
                return Err(format!("qemu-img: {}", String::from_utf8_lossy(&output.stderr).trim()));
            }
            Ok((path, None))
        }
    }
}

/// Removes what was made, if anything was.
pub fn remove(dir: &Path) -> Result<(), String> {
    for name in NAMES {
        let path = dir.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(format!("cannot remove {}: {error}", path.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// What is said of a file that cannot be made.
pub fn cannot_make(path: &Path, error: &io::Error) -> String {
    format!("cannot make {}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_made_empty_and_leaves_nothing_behind() {
        let dir = tempfile::tempdir().expect("temporary directory");
        for backing in [Backing::Raw, Backing::Vhd, Backing::Differencing, Backing::Encrypted] {
            let (path, key) = image(dir.path(), backing, 1 << 30).expect("made");
            assert_eq!(key.is_some(), backing == Backing::Encrypted);
            if backing == Backing::Raw {
                assert_eq!(fs::metadata(&path).expect("there").len(), 1 << 30);
            } else {
                let made = Image::open(&path, OpenOptions::READ).expect("a VHD");
                assert_eq!((made.footer().current_len, made.allocated_blocks()), (1 << 30, 0));
                let set = made.batmap().is_some_and(|batmap| batmap.header.key_hash.is_set());
                assert_eq!(set, backing == Backing::Encrypted);
            }
        }
        remove(dir.path()).expect("removed");
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 0);
    }
}
