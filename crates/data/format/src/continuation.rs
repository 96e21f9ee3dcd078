//! Notes that say which image a disk went on with.
//!
//! A disk moves to another image while it is used: onto a new leaf by a snapshot, onto the second side of a mirror,
//! down into its parent by a commit. The command that it was started with names the image of before. So a note beside
//! that image says which image continues it, and the command follows it ([`follow`]) or is refused
//! ([`check_writable`]).
//!
//! Why no mark in the image itself: the one that the format has, `hidden`, belongs to the storage manager, whose
//! garbage collector deletes hidden images without children; the originals open hidden images all the same; raw images
//! have no place for one; and a commit would have to take it back, which is one more step that can be half done.
//!
//! ```text
//! change      note, and when                                                killed after that and before the switch
//! snapshot    old -> new leaf          the new leaf is made and durable;    the new leaf is empty: on top of the old
//!                                      before requests are held back        one it reads as the old one alone
//! pivot       near -> far              requests are held back, both sides   both sides read the same
//!             far's own note is gone   are the same and durable
//! commit      parent's note is gone    the leaf is empty, durably; before   the parent has everything, alone and below
//!             leaf -> parent           requests go on                       the empty leaf
//! standby     standby's note is gone   the storage of the leaf is full;     the standby is empty: on top of the leaf
//!             leaf -> standby          before requests go on                it reads as the leaf alone
//! ```
//!
//! A storage that is full has no room for a note. So the one of a standby is made, durably, when the disk is opened
//! with it, under another name, and only gets its own when the standby takes over. A standby that is a child of the
//! leaf is then a leaf like that of a snapshot. One that is not makes no chain that its own header would lead to:
//! the disk is both images together, and only a program that names both opens it; [`Followed::below`] says so.
//!
//! The note of a commit that cannot be written is owed: the disk does not move again before it is there, because until
//! then the empty leaf on its parent is the disk.
//!
//! Each note is made durable under another name and renamed. A snapshot that fails after its note takes the note back
//! before its leaf is removed. A note is not true any more when the image beside it is another than the one that it was
//! written for; then it is not followed.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};
use tapio_types::{Access, ImageKind, LayerSpec};
use uuid::Uuid;

use crate::error::{FormatError, FormatErrorKind, Result, invalid};
use crate::medium::{FileMedium, Medium};
use crate::vhd::offline::{canonical, read_footer};
use crate::vhd::{DiskType, FOOTER_LEN, Footer};

/// The first line of a note.
const TITLE: &str = "tapio continuation 1";
/// The most bytes of a note: two paths, each byte of which may take three.
const NOTE_LEN_MAX: u64 = 32 << 10;
/// The most notes that are followed.
const STEPS_MAX: usize = 64;
/// Where notes of images lie that have no directory of their own that survives a reboot: devices, remote exports.
const ELSEWHERE: &str = "/var/lib/tapio/continued";

/// Which image it is, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A VHD, by its UUID.
    Vhd(Uuid),
    /// A raw file, by its inode and the time at which that was made, in nanoseconds; 0 where it is unknown.
    File { inode: u64, born_ns: u64 },
    /// A raw block device: one cannot be told from another.
    Device,
    /// A remote export: likewise.
    Remote,
}

impl Identity {
    /// Of an image that may be in use.
    ///
    /// # Errors
    /// `Missing`; it cannot be read; a VHD without a footer.
    pub fn of(image: &LayerSpec) -> Result<Self> {
        let failed = |error| FormatError::io("cannot examine the image", error).with_path(&image.path);
        match image.kind {
            ImageKind::Nbd | ImageKind::Rbd => Ok(Self::Remote),
            ImageKind::Raw => {
                let facts = fs::metadata(&image.path).map_err(failed)?;
                if facts.file_type().is_block_device() {
                    return Ok(Self::Device);
                }
                let born = facts.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
                let born_ns = born.map_or(0, |born| u64::try_from(born.as_nanos()).unwrap_or(0));
                Ok(Self::File { inode: facts.ino(), born_ns })
            }
            ImageKind::Vhd => {
                let medium = FileMedium::open(&image.path, Access::ReadOnly)?;
                // The copy at the start stays while the image is open; only a fixed disk has none.
                let mut first = [0; FOOTER_LEN];
                let footer = match medium.read_at(0, &mut first).map(|()| Footer::decode(&first)) {
                    Ok(Ok((footer, _))) if footer.disk_type != DiskType::Fixed => footer,
                    _ => read_footer(&medium, false).map_err(|error| error.with_path(&image.path))?.0,
                };
                Ok(Self::Vhd(footer.uuid))
            }
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let (name, rest) = text.split_once('=').unwrap_or((text, ""));
        match name {
            "uuid" => rest.parse().ok().map(Self::Vhd),
            "inode" => {
                let (inode, born) = rest.split_once(',')?;
                Some(Self::File { inode: inode.parse().ok()?, born_ns: born.parse().ok()? })
            }
            "device" => Some(Self::Device),
            "remote" => Some(Self::Remote),
            _ => None,
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vhd(uuid) => write!(f, "uuid={uuid}"),
            Self::File { inode, born_ns } => write!(f, "inode={inode},{born_ns}"),
            Self::Device => f.write_str("device"),
            Self::Remote => f.write_str("remote"),
        }
    }
}

/// What made a disk go on with another image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The other is a new leaf on top of it.
    Snapshot,
    /// The other was its mirror.
    Mirror,
    /// The other is its parent, into which it was committed.
    Commit,
    /// The other is its child, and took over when its storage was full.
    ChildTookOver,
    /// The other is no child of it, took over when its storage was full, and lies on top of it.
    StandbyTookOver,
}

impl Reason {
    const ALL: [Self; 5] =
        [Self::Snapshot, Self::Mirror, Self::Commit, Self::ChildTookOver, Self::StandbyTookOver];

    const fn of_standby(is_child: bool) -> Self {
        if is_child { Self::ChildTookOver } else { Self::StandbyTookOver }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::Mirror => "mirror",
            Self::Commit => "commit",
            Self::ChildTookOver => "child-standby",
            Self::StandbyTookOver => "standby",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Snapshot => "a snapshot",
            Self::Mirror => "the switch-over of a mirror",
            Self::Commit => "a commit into its parent",
            Self::ChildTookOver | Self::StandbyTookOver => "its storage was full",
        })
    }
}

/// A note: the image `by` continues the one beside which the note lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continuation {
    /// The image for which it was written.
    pub identity: Identity,
    /// The image that continues it.
    pub by: LayerSpec,
    /// Which one that is.
    pub by_identity: Identity,
    /// Why.
    pub reason: Reason,
}

/// A disk moves, or does not after all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Move {
    /// The image `leaf` is about to be put on top of `below`, which is the leaf.
    OnTop {
        /// The leaf of before.
        below: LayerSpec,
        /// The leaf that comes.
        leaf: LayerSpec,
    },
    /// The disk did not leave `image` for `other` after all.
    Stays {
        /// The leaf, as before.
        image: LayerSpec,
        /// The one that was noted.
        other: LayerSpec,
    },
    /// The disk is about to leave the image `near` for `far`, which holds the same.
    Away {
        /// The leaf of the first side.
        near: LayerSpec,
        /// The leaf of the second side.
        far: LayerSpec,
    },
    /// The disk is about to leave `leaf`, which is empty, for its parent.
    Down {
        /// The leaf.
        leaf: LayerSpec,
        /// Its parent.
        parent: LayerSpec,
    },
    /// The disk may have to go on with `standby` on top of `leaf` when there is no room for a note any more.
    MayOverflow(Overflow),
    /// The disk is about to.
    Overflows(Overflow),
    /// It will not.
    NeverOverflows {
        /// The leaf.
        leaf: LayerSpec,
    },
}

/// A standby over the leaf whose storage may become full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overflow {
    /// The leaf.
    pub leaf: LayerSpec,
    /// The image that takes over.
    pub standby: LayerSpec,
    /// Whether the standby was made from the leaf.
    pub is_child: bool,
}

/// Takes note of a move, durably.
///
/// # Errors
/// The notes are as before then, as far as that could be brought about.
pub fn note(change: &Move) -> Result<()> {
    match change {
        Move::OnTop { below, leaf } => write(below, leaf, Reason::Snapshot),
        Move::Stays { image, other } => match read(image)? {
            Some(note) if note.by.path == named(other)? => remove(image),
            _ => Ok(()),
        },
        Move::Away { near, far } => {
            let before = read(far)?;
            remove(far)?;
            write(near, far, Reason::Mirror).inspect_err(|_| {
                if let Some(before) = before {
                    // What fails now is the directory, and the first failure reports it to the caller.
                    let _ = store(far, &before);
                }
            })
        }
        Move::Down { leaf, parent } => {
            remove(parent)?;
            write(leaf, parent, Reason::Commit)
        }
        Move::MayOverflow(overflow) => make_ready(overflow),
        Move::Overflows(overflow) => {
            // It is empty, so wherever its disk went it does not matter any more.
            remove(&overflow.standby)?;
            let Overflow { leaf, standby, is_child } = overflow;
            let place = place(leaf)?;
            let put = fs::rename(ready(&place), &place).and_then(|()| sync(directory_of(&place)));
            if put.is_ok() {
                return Ok(());
            }
            let wanted = of_move(leaf, standby, Reason::of_standby(*is_child))?;
            let is_there = read(leaf).is_ok_and(|there| there.as_ref() == Some(&wanted));
            match is_there && sync(directory_of(&place)).is_ok() {
                true => Ok(()),
                // The prepared note was removed meanwhile: there may be room for another.
                false => store(leaf, &wanted),
            }
        }
        Move::NeverOverflows { leaf } => {
            let place = place(leaf)?;
            unlink(&ready(&place)).map_err(|error| {
                let detail = format!("cannot remove {}", ready(&place).display());
                FormatError::io(detail, error).with_path(&leaf.path)
            })
        }
    }
}

/// The name under which the note of a standby waits.
fn ready(place: &Path) -> PathBuf {
    place.with_extension("continued.ready")
}

fn make_ready(overflow: &Overflow) -> Result<()> {
    let Overflow { leaf, standby, is_child } = overflow;
    let note = of_move(leaf, standby, Reason::of_standby(*is_child))?;
    let place = place(leaf)?;
    let (ready, text) = (ready(&place), note.text(&place));
    // One that a killed process left will do, where there is no room for another any more.
    let there = fs::symlink_metadata(&ready).is_ok_and(|there| there.is_file());
    if there && fs::read(&ready).is_ok_and(|there| there == text.as_bytes()) {
        let synced = fs::File::open(&ready).and_then(|file| file.sync_all());
        if synced.and_then(|()| sync(directory_of(&place))).is_ok() {
            return Ok(());
        }
    }
    let put = unlink(&ready).and_then(|()| put(&ready, &text));
    put.map_err(|error| {
        let detail = format!(
            "cannot make {} ready, without which no standby may take over: what is there now would be lost with the \
             process",
            ready.display()
        );
        FormatError::io(detail, error).with_path(&leaf.path)
    })
}

/// Where the note of an image lies.
///
/// # Errors
/// A path that names no file.
pub fn place(image: &LayerSpec) -> Result<PathBuf> {
    let path = named(image)?;
    let elsewhere = !image.kind.is_local() || path.starts_with("/dev") && !path.starts_with("/dev/shm");
    if elsewhere {
        let bytes = path.as_os_str().as_bytes();
        let mut name = encode(bytes, true);
        if name.len() > 160 {
            name.truncate(120);
            for byte in &Sha256::digest(bytes)[..16] {
                name.push_str(&format!("{byte:02x}"));
            }
        }
        return Ok(elsewhere_dir().join(format!("{name}.continued")));
    }
    let name = path.file_name().ok_or_else(|| invalid("names no file").with_path(&path))?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".continued");
    Ok(path.with_file_name(hidden))
}

/// The directory of the notes of devices and remote exports.
pub fn elsewhere_dir() -> PathBuf {
    std::env::var_os("TAPIO_CONTINUED_DIR").map_or_else(|| ELSEWHERE.into(), PathBuf::from)
}

/// The name that does not depend on links and on where the process is. The image need not be there any more.
fn named(image: &LayerSpec) -> Result<PathBuf> {
    if !image.kind.is_local() {
        return Ok(image.path.clone());
    }
    if let Ok(path) = canonical(&image.path) {
        return Ok(path);
    }
    let (Some(directory), Some(name)) = (image.path.parent(), image.path.file_name()) else {
        return Err(invalid("names no file").with_path(&image.path));
    };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    Ok(canonical(directory).unwrap_or_else(|_| directory.to_path_buf()).join(name))
}

fn write(image: &LayerSpec, by: &LayerSpec, reason: Reason) -> Result<()> {
    store(image, &of_move(image, by, reason)?)
}

fn of_move(image: &LayerSpec, by: &LayerSpec, reason: Reason) -> Result<Continuation> {
    Ok(Continuation {
        identity: Identity::of(image)?,
        by: LayerSpec { kind: by.kind, path: named(by)? },
        by_identity: Identity::of(by)?,
        reason,
    })
}

fn store(image: &LayerSpec, note: &Continuation) -> Result<()> {
    let place = place(image)?;
    let failed = |error| {
        let detail = format!("cannot note in {} which image continues this one", place.display());
        FormatError::io(detail, error).with_path(&image.path)
    };
    put(&place, &note.text(&place)).map_err(failed)
}

/// What is added to the place of a note while it is written.
const UNFINISHED_ENDING: &str = ".new";

/// Whether a file of this name is a note that is being written, or was when its process was killed.
pub(crate) fn is_unfinished(name: &str) -> bool {
    name.strip_prefix('.')
        .and_then(|name| name.strip_suffix(UNFINISHED_ENDING))
        .is_some_and(|place| place.ends_with(".continued") || place.ends_with(".continued.ready"))
}

/// Puts a file into its place, whole and durable.
fn put(place: &Path, text: &str) -> io::Result<()> {
    let directory = directory_of(place);
    if directory == elsewhere_dir() {
        fs::create_dir_all(directory)?;
    }
    let mut partial = place.as_os_str().to_owned();
    partial.push(UNFINISHED_ENDING);
    // One that a killed process left.
    unlink(Path::new(&partial))?;
    let made = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&partial);
    let put = made.and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&partial, place)
    });
    if put.is_err() {
        let _ = fs::remove_file(&partial);
    }
    put.and_then(|()| sync(directory))
}

fn sync(directory: &Path) -> io::Result<()> {
    fs::File::open(directory)?.sync_all()
}

fn directory_of(place: &Path) -> &Path {
    place.parent().unwrap_or(Path::new("/"))
}

/// Removes a file; one that is not there is no failure.
fn unlink(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Takes the note of an image away, durably; one that is not there is no failure.
///
/// # Errors
/// The directory cannot be changed.
pub fn remove(image: &LayerSpec) -> Result<()> {
    let place = place(image)?;
    let removed = match fs::remove_file(&place) {
        Ok(()) => sync(directory_of(&place)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    };
    removed.map_err(|error| {
        FormatError::io(format!("cannot remove {}", place.display()), error).with_path(&image.path)
    })
}

/// The note of an image, if it has one.
///
/// # Errors
/// It cannot be read, or is none that this program has written.
pub fn read(image: &LayerSpec) -> Result<Option<Continuation>> {
    let place = place(image)?;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(&place);
    let failed =
        |error| FormatError::io(format!("cannot read {}", place.display()), error).with_path(&image.path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    file.take(NOTE_LEN_MAX).read_to_end(&mut bytes).map_err(failed)?;
    let note = std::str::from_utf8(&bytes).ok().and_then(|text| Continuation::parse(text, &place));
    note.map(Some).ok_or_else(|| {
        let detail = format!(
            "{} was to say which image continues this one and cannot be understood: see which image is the newest \
             and name that, or remove the note if it is this one",
            place.display()
        );
        FormatError::new(FormatErrorKind::Corrupt, detail).with_path(&image.path)
    })
}

impl Continuation {
    fn text(&self, place: &Path) -> String {
        // Beside the note the name is enough: a directory that is moved takes both along.
        let beside = self.by.kind.is_local() && self.by.path.parent() == place.parent();
        let path =
            if beside { Path::new(self.by.path.file_name().unwrap_or_default()) } else { &self.by.path };
        format!(
            "{TITLE}\nimage {}\nby {} {} {}\nreason {}\n",
            self.identity,
            self.by.kind,
            self.by_identity,
            encode(path.as_os_str().as_bytes(), false),
            self.reason.word()
        )
    }

    fn parse(text: &str, place: &Path) -> Option<Self> {
        let mut lines = text.strip_suffix('\n')?.split('\n');
        if lines.next()? != TITLE {
            return None;
        }
        let identity = Identity::parse(lines.next()?.strip_prefix("image ")?)?;
        let mut by = lines.next()?.strip_prefix("by ")?.splitn(3, ' ');
        let kind: ImageKind = by.next()?.parse().ok()?;
        let by_identity = Identity::parse(by.next()?)?;
        let mut path = decode(by.next()?)?;
        let word = lines.next()?.strip_prefix("reason ")?;
        let reason = Reason::ALL.into_iter().find(|reason| reason.word() == word)?;
        if lines.next().is_some() || path.as_os_str().is_empty() {
            return None;
        }
        if kind.is_local() && path.is_relative() {
            path = place.parent()?.join(path.file_name().filter(|name| Path::new(name) == path)?);
        }
        Some(Self { identity, by: LayerSpec { kind, path }, by_identity, reason })
    }
}

fn encode(bytes: &[u8], slashes: bool) -> String {
    let mut text = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_graphic() && byte != b'%' && !(slashes && byte == b'/') {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02x}"));
        }
    }
    text
}

fn decode(text: &str) -> Option<PathBuf> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut left = text.bytes();
    while let Some(byte) = left.next() {
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let byte = match byte {
            b'%' => (digit(left.next())? * 16 + digit(left.next())?) as u8,
            byte if byte.is_ascii_graphic() => byte,
            _ => return None,
        };
        if byte == 0 {
            return None;
        }
        bytes.push(byte);
    }
    Some(std::ffi::OsString::from_vec(bytes).into())
}

/// Where the notes of an image lead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Followed {
    /// The image that the disk is on now; the one that was asked for if no note says otherwise.
    pub leaf: LayerSpec,
    /// Why it went on with another, the last time.
    pub reason: Option<Reason>,
    /// The image whose note leads there.
    pub from: Option<LayerSpec>,
}

impl Followed {
    /// The image that lies below the leaf although the leaf's header names another: the disk is both together.
    pub fn below(&self) -> Option<&LayerSpec> {
        self.from.as_ref().filter(|_| self.reason == Some(Reason::StandbyTookOver))
    }

    /// Whether the disk is `image` with `standby` on top of it.
    pub fn stands_on(&self, image: &LayerSpec, standby: &LayerSpec) -> bool {
        let took_over = matches!(self.reason, Some(Reason::ChildTookOver | Reason::StandbyTookOver));
        let same = |a: &LayerSpec, b: &LayerSpec| {
            a.kind == b.kind && named(a).is_ok_and(|a| named(b).is_ok_and(|b| a == b))
        };
        took_over && self.from.as_ref().is_some_and(|from| same(from, image)) && same(&self.leaf, standby)
    }
}

/// The image that the disk which was on `image` is on now.
///
/// # Errors
/// A note leads to an image that is not there or is another one; a note or an image cannot be read.
pub fn follow(image: &LayerSpec) -> Result<Followed> {
    let mut seen = vec![image.clone()];
    let (mut reason, mut from) = (None, None);
    let mut current = image.clone();
    let mut wanted = None;
    while let Some(note) = read(&current)? {
        let there = identity(&current)?;
        check(wanted, there, &current, image, true)?;
        match there {
            // It is gone, as after a commit: what its note says is all there is.
            None => {}
            Some(there) if there == note.identity => {}
            Some(Identity::Vhd(_)) if matches!(note.identity, Identity::Vhd(_)) && wanted.is_none() => {
                // Another image has that name now.
                let _ = remove(&current);
                break;
            }
            Some(_) => return Err(refused(image, &current, "that note was written for another image")),
        }
        from = Some(std::mem::replace(&mut current, note.by));
        if seen.contains(&current) || seen.len() > STEPS_MAX {
            return Err(refused(image, &current, "the notes lead back to where they began"));
        }
        seen.push(current.clone());
        (reason, wanted) = (Some(note.reason), Some(note.by_identity));
    }
    if wanted.is_some() {
        check(wanted, identity(&current)?, &current, image, false)?;
    }
    Ok(Followed { leaf: current, reason, from })
}

fn identity(image: &LayerSpec) -> Result<Option<Identity>> {
    match Identity::of(image) {
        Ok(identity) => Ok(Some(identity)),
        Err(error) if error.kind() == FormatErrorKind::Missing => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the image that a note leads to is the right one. One that has a note itself may be gone.
fn check(
    wanted: Option<Identity>,
    there: Option<Identity>,
    at: &LayerSpec,
    image: &LayerSpec,
    may_be_gone: bool,
) -> Result<()> {
    match (wanted, there) {
        (None, _) => Ok(()),
        (Some(wanted), Some(there)) if wanted == there => Ok(()),
        (Some(_), None) if may_be_gone => Ok(()),
        (Some(_), None) => Err(refused(image, at, "that image is not there")),
        (Some(wanted), Some(there)) => {
            Err(refused(image, at, &format!("that image is {there} and was {wanted}")))
        }
    }
}

fn refused(image: &LayerSpec, at: &LayerSpec, why: &str) -> FormatError {
    let note = place(image).unwrap_or_default();
    let detail = format!(
        "its disk went on with {at}, and {why}: bring that image back, or, if this one is what you want as it is, \
         remove {}",
        note.display()
    );
    FormatError::new(FormatErrorKind::Missing, detail).with_path(&image.path)
}

/// Refuses an image that is to be written and whose disk went on with another: `followed` is where [`follow`] led.
///
/// # Errors
/// It did.
pub fn check_writable(image: &LayerSpec, followed: &Followed) -> Result<()> {
    check_single(followed)?;
    let Followed { leaf, reason: Some(reason), .. } = followed else { return Ok(()) };
    let detail = format!(
        "its disk went on with {leaf} after {reason}, and writing here would change what lies below or serve old \
         data: open that one, or remove {} if this one is what you want as it is",
        place(image).unwrap_or_default().display()
    );
    Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(&image.path))
}

/// Refuses a disk that is two images of which no header names the other.
///
/// # Errors
/// It is such a one.
pub fn check_single(followed: &Followed) -> Result<()> {
    let Some(below) = followed.below() else { return Ok(()) };
    let leaf = &followed.leaf;
    // Short: a tapdisk's answer has 255 bytes.
    let detail = format!(
        "was full when its disk went on on top of it: open both ('-2 {leaf} -s'), or remove {} for what it has alone",
        place(below).unwrap_or_default().display()
    );
    Err(FormatError::new(FormatErrorKind::InvalidArgument, detail).with_path(&below.path))
}

/// [`check_single`] for the programs that change a VHD while no process has it open: the leaf below a standby is to be
/// stay as it is, and no image is to be put on top of it.
///
/// # Errors
/// A standby took over from it.
pub(crate) fn check_not_below_standby(path: &Path) -> Result<()> {
    let mut image = LayerSpec { kind: ImageKind::Raw, path: path.to_path_buf() };
    match read(&image)? {
        Some(note) if note.reason == Reason::StandbyTookOver => {
            if matches!(note.identity, Identity::Vhd(_)) {
                image.kind = ImageKind::Vhd;
            }
            if identity(&image)? != Some(note.identity) {
                return Ok(());
            }
            let followed = Followed { leaf: note.by, reason: Some(note.reason), from: Some(image) };
            check_single(&followed)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
