//! `key`: the fingerprint of the key that an encrypted image needs.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use tapio_format::vhd::KeyHash;
use tapio_format::vhd::offline::{self, Image, OpenOptions};

use super::fill::key_in;
use super::output::{Failure, hex};

/// Set, check or print the fingerprint of an image's key
///
/// A key for the image NAME.vhd is in a file called NAME,aes-xts-plain,512.key (64 bytes) or
/// NAME,aes-xts-plain,256.key (32 bytes).
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("action").required(true).args(["calculate", "set", "check", "print"]))]
pub(super) struct Key {
    /// Print the hash of a key
    #[arg(short = 'C', requires = "key_file")]
    calculate: bool,
    /// Set the fingerprint of an image that holds no data yet
    #[arg(short = 's', requires = "name")]
    set: bool,
    /// Check that a key is the image's
    #[arg(short = 'c', requires_all = ["name", "key_file"], conflicts_with_all = ["nonce", "hash"])]
    check: bool,
    /// Print nonce and hash, or 'none'
    #[arg(short = 'p', requires = "name")]
    print: bool,
    /// The image
    #[arg(short = 'n', value_name = "NAME")]
    name: Option<PathBuf>,
    /// The file with the key
    #[arg(short = 'k', value_name = "KEYPATH", conflicts_with = "hash")]
    key_file: Option<PathBuf>,
    /// The hash of the key, 64 hexadecimal digits
    #[arg(short = 'H', value_name = "HASH")]
    hash: Option<String>,
    /// Bytes hashed before the key, 64 hexadecimal digits; zeros if not given
    #[arg(short = 'N', value_name = "NONCE")]
    nonce: Option<String>,
}

impl Key {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let nonce = self.nonce.as_deref().map_or(Ok([0; 32]), unhex)?;
        match (&self.name, &self.key_file) {
            (None, Some(path)) => {
                writeln!(out, "{}", hex(&KeyHash::of(nonce, &key_in(path)?).hash))?;
                Ok(())
            }
            (Some(name), key_file) => self.on_image(name, key_file.as_deref(), nonce, out),
            (None, None) => Err(Failure::invalid("give an image with -n, or a key with -k")),
        }
    }

    fn on_image(
        &self,
        name: &Path,
        key_file: Option<&Path>,
        nonce: [u8; 32],
        out: &mut dyn Write,
    ) -> Result<(), Failure> {
        if self.set {
            let mut image = Image::open(name, OpenOptions::WRITE)?;
            let key_hash = match (key_file, &self.hash) {
                (Some(path), None) => KeyHash::of(nonce, &key_for(name, path)?),
                (None, Some(hash)) => KeyHash { cookie: 1, nonce, hash: unhex(hash)? },
                _ => return Err(Failure::invalid("-s needs either -k or -H")),
            };
            if image.allocated_blocks() > 0 {
                let said = format!("{}: holds data already, which no key has encrypted", name.display());
                return Err(Failure::invalid(said));
            }
            offline::set_key_hash(&mut image, key_hash)?;
        }
        let image = Image::open(name, OpenOptions::READ)?;
        let key_hash = image.batmap().map_or_else(KeyHash::default, |batmap| batmap.header.key_hash);
        if let (true, Some(path)) = (self.check, key_file) {
            if !key_hash.is_set() {
                return Err(Failure::invalid(format!("{}: needs no key", name.display())));
            }
            if !key_hash.is_of(&key_for(name, path)?) {
                let said = format!("{}: is not the key of {}", path.display(), name.display());
                return Err(Failure::new(libc::ENOKEY, said));
            }
        }
        if self.print && key_hash.is_set() {
            writeln!(out, "{} {}", hex(&key_hash.nonce), hex(&key_hash.hash))?;
        } else if self.print {
            writeln!(out, "none")?;
        }
        Ok(())
    }
}

/// The key in a file whose name says that it is for this image, and how long it is.
fn key_for(image: &Path, path: &Path) -> Result<Vec<u8>, Failure> {
    let text =
        |path: &Path| path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let image = text(image);
    let stem = image.split(".vhd").next().unwrap_or_default();
    let name = text(path);
    let bits =
        [512, 256].into_iter().find(|bits| name.starts_with(&format!("{stem},aes-xts-plain,{bits}.key")));
    let Some(bits) = bits else {
        let said = format!("{}: must be called {stem},aes-xts-plain,512.key or ...,256.key", path.display());
        return Err(Failure::new(libc::EPERM, said));
    };
    let key = key_in(path)?;
    if key.len() * 8 != bits {
        return Err(Failure::invalid(format!(
            "{}: holds {} bits and not {bits}",
            path.display(),
            key.len() * 8
        )));
    }
    Ok(key)
}

/// 32 bytes from 64 hexadecimal digits.
fn unhex(text: &str) -> Result<[u8; 32], Failure> {
    let wrong = || Failure::invalid(format!("'{text}' is not 64 hexadecimal digits"));
    let digits: Vec<u32> =
        text.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>().ok_or_else(wrong)?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect();
    if digits.len() == 64 { bytes.try_into().map_err(|_| wrong()) } else { Err(wrong()) }
}
