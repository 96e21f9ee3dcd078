//! What an image says about itself, read with two small reads: a scan of ten thousand must not open block tables.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use tapio_format::vhd::{DiskType, FOOTER_LEN, Footer, HEADER_LEN, Header, SECTOR_LEN};
use uuid::Uuid;

/// How often a file that becomes longer is looked at again.
const TRIES_MAX: usize = 8;

/// The file in an SR's directory that names the SR.
pub(crate) const MARKER: &str = ".sr-uuid";

/// Kinds of images that an SR of files holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum FileKind {
    /// `<uuid>.vhd`
    Vhd,
    /// `<uuid>.raw`
    Raw,
}

impl FileKind {
    pub(crate) const ALL: [Self; 2] = [Self::Vhd, Self::Raw];

    /// Behind the dot of its files.
    pub(crate) const fn extension(self) -> &'static str {
        match self {
            Self::Vhd => "vhd",
            Self::Raw => "raw",
        }
    }

    /// The file's name.
    pub(crate) fn file_name(self, vdi: Uuid) -> String {
        format!("{vdi}.{}", self.extension())
    }

    /// The image that a file of this name holds, if it is named as images are.
    pub(crate) fn of_file(name: &str) -> Option<(Uuid, Self)> {
        let (stem, extension) = name.split_once('.')?;
        let kind = Self::ALL.into_iter().find(|kind| kind.extension() == extension)?;
        Some((plain_uuid(stem)?, kind))
    }
}

/// A UUID in the one way in which files are named: other spellings are other names.
pub(crate) fn plain_uuid(text: &str) -> Option<Uuid> {
    let uuid = Uuid::try_parse(text).ok()?;
    (uuid.to_string() == text).then_some(uuid)
}

/// The parent as the image records it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ParentName {
    /// File name.
    pub(crate) name: String,
    /// Its footer's UUID; nil for a raw one.
    pub(crate) uuid: Uuid,
}

/// One image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) kind: FileKind,
    /// Bytes the guest sees; 0 where that cannot be said.
    pub(crate) virtual_size: u64,
    /// Bytes it takes.
    pub(crate) physical: u64,
    /// The footer's flag; a raw image has none.
    pub(crate) hidden: bool,
    /// The footer's UUID; nil in a raw image.
    pub(crate) footer_uuid: Uuid,
    pub(crate) parent: Option<ParentName>,
    /// Why it cannot be used.
    pub(crate) damage: Option<String>,
    /// A resize was interrupted; the next process that opens the image undoes it.
    pub(crate) disabled: bool,
}

/// Bytes that are read at an offset: a file, or a volume through the devices that it lies on.
pub(crate) trait ReadAt {
    /// Reads `into.len()` bytes from `at`.
    ///
    /// # Errors
    /// The system's; the end was before that.
    fn read_at_once(&self, into: &mut [u8], at: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn read_at_once(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, into, at)
    }
}

impl Facts {
    /// Nothing is known yet but the kind, and the bytes that it takes.
    pub(crate) const fn unread(kind: FileKind, physical: u64) -> Self {
        Self {
            kind,
            virtual_size: 0,
            physical,
            hidden: false,
            footer_uuid: Uuid::nil(),
            parent: None,
            damage: None,
            disabled: false,
        }
    }

    /// Looks at the file.
    ///
    /// # Errors
    /// It cannot be opened or read; what is wrong inside is `damage`.
    pub(crate) fn read(path: &Path, kind: FileKind) -> io::Result<Self> {
        // Not waited for: a pipe of this name would hang a scan. Not followed: a link may lead out of the SR.
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOATIME | libc::O_NOFOLLOW;
        let open = |flags| std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
        // Only the owner may say that the time of access is of no interest.
        let file = open(flags).or_else(|error| match error.raw_os_error() {
            Some(libc::EPERM) => open(flags & !libc::O_NOATIME),
            Some(libc::ELOOP) => {
                let why = "it is a symbolic link, and those are not followed in an SR";
                Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
            }
            _ => Err(error),
        })?;
        // A merge may make the image longer meanwhile: what is at its end is a footer only if that is the end still.
        for _ in 0..TRIES_MAX {
            let data = file.metadata()?;
            let facts = Self::of(&file, &data, kind);
            if file.metadata()?.len() == data.len() {
                return Ok(facts);
            }
        }
        let data = file.metadata()?;
        Ok(Self::of(&file, &data, kind))
    }

    fn of(file: &File, data: &Metadata, kind: FileKind) -> Self {
        let mut facts = Self::unread(kind, data.blocks().saturating_mul(512));
        if !data.is_file() {
            facts.damage = Some("is no regular file".into());
        } else if kind == FileKind::Raw {
            facts.virtual_size = data.len().next_multiple_of(SECTOR_LEN);
        } else if let Err(damage) = facts.read_vhd(file, data.len()) {
            facts.damage = Some(damage);
        }
        facts
    }

    /// What a VHD of `len` bytes says, or what is wrong with it.
    pub(crate) fn read_vhd(&mut self, file: &impl ReadAt, len: u64) -> Result<(), String> {
        const HEAD_LEN: usize = FOOTER_LEN + HEADER_LEN;
        if len < FOOTER_LEN as u64 - 1 {
            return Err(format!("{len} bytes are too few for a VHD"));
        }
        let unreadable = |error: io::Error| format!("cannot be read: {error}");
        let mut head = [0; HEAD_LEN];
        let there = usize::try_from(len).map_or(HEAD_LEN, |len| len.min(HEAD_LEN));
        file.read_at_once(&mut head[..there], 0).map_err(unreadable)?;
        let (copy, rest) = head.split_at(FOOTER_LEN);
        let copy: &[u8; FOOTER_LEN] = copy.try_into().map_err(|_| "has no head".to_string())?;
        let footer = match tail_footer(file, len).map_err(unreadable)? {
            Ok(footer) => footer,
            // The copy at the start counts for a disk with a header only: in a fixed one the guest's data are there.
            Err(why) => match Footer::decode(copy) {
                Ok((footer, _)) if footer.disk_type.is_dynamic() => footer,
                _ => return Err(why),
            },
        };
        self.virtual_size = footer.current_len;
        self.hidden = footer.hidden != 0;
        self.footer_uuid = footer.uuid;
        self.disabled = footer.is_disabled();
        if !footer.disk_type.is_dynamic() {
            let fits = footer.current_len <= len.saturating_sub(FOOTER_LEN as u64 - 1);
            return if fits { Ok(()) } else { Err("a fixed disk that was cut off".into()) };
        }
        let mut header = [0; HEADER_LEN];
        if footer.data_offset == FOOTER_LEN as u64 && there == HEAD_LEN {
            header.copy_from_slice(rest);
        } else {
            let end = footer.data_offset.checked_add(HEADER_LEN as u64);
            if end.is_none_or(|end| end > len) {
                return Err(format!("its header cannot be at byte {} of {len}", footer.data_offset));
            }
            file.read_at_once(&mut header, footer.data_offset).map_err(unreadable)?;
        }
        let header = Header::decode(&header).map_err(|error| error.to_string())?;
        header.entries_for(footer.current_len).map_err(|error| error.to_string())?;
        if footer.disk_type == DiskType::Differencing {
            let name = header.parent_name().filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| "its parent's name cannot be read".to_string())?;
            self.parent = Some(ParentName { name, uuid: header.parent_uuid });
        }
        Ok(())
    }
}

/// A footer that lacks its last byte.
const SHORT_LEN: usize = FOOTER_LEN - 1;

/// The footer at the end, 512 or 511 bytes long.
fn tail_footer(file: &impl ReadAt, len: u64) -> io::Result<Result<Footer, String>> {
    if len % SECTOR_LEN == SECTOR_LEN - 1 {
        let mut bytes = [0; SHORT_LEN];
        file.read_at_once(&mut bytes, len - SHORT_LEN as u64)?;
        return Ok(Footer::decode_short(&bytes).map(|(footer, _)| footer).map_err(|error| error.to_string()));
    }
    if len < FOOTER_LEN as u64 {
        return Ok(Err("has no footer".into()));
    }
    let mut bytes = [0; FOOTER_LEN];
    file.read_at_once(&mut bytes, len - FOOTER_LEN as u64)?;
    Ok(Footer::decode(&bytes).map(|(footer, _)| footer).map_err(|error| error.to_string()))
}

#[cfg(test)]
mod tests {
    use tapio_format::vhd::offline::{Shape, SnapshotOptions, create, snapshot};

    use super::*;

    #[test]
    fn names_are_images_only_in_one_spelling() {
        let uuid = Uuid::from_u128(0xabc);
        assert_eq!(FileKind::of_file(&format!("{uuid}.vhd")), Some((uuid, FileKind::Vhd)));
        assert_eq!(FileKind::of_file(&format!("{uuid}.raw")), Some((uuid, FileKind::Raw)));
        let odd = [
            format!("{}.vhd", uuid.to_string().to_uppercase()),
            format!("{}.vhd", uuid.simple()),
            format!("{uuid}.vhd.new"),
            format!("{uuid}.qcow2"),
            format!("OLD_{uuid}.vhd"),
            "a.vhd".into(),
            uuid.to_string(),
        ];
        for name in odd {
            assert_eq!(FileKind::of_file(&name), None, "{name}");
        }
    }

    #[test]
    fn an_image_tells_its_sizes_and_its_parent() {
        let dir = tempfile::tempdir().unwrap();
        let (parent, child) = (dir.path().join("p.vhd"), dir.path().join("c.vhd"));
        create(&parent, &Shape::Dynamic, 64 << 20, 0).unwrap();
        let options = SnapshotOptions { keep_empty: true, ..SnapshotOptions::default() };
        snapshot(&child, &parent, &options).unwrap();
        let (above, below) =
            (Facts::read(&child, FileKind::Vhd).unwrap(), Facts::read(&parent, FileKind::Vhd).unwrap());
        assert_eq!((above.virtual_size, above.hidden, &above.damage), (64 << 20, false, &None));
        assert_eq!(above.parent.unwrap(), ParentName { name: "p.vhd".into(), uuid: below.footer_uuid });
        assert_eq!(below.parent, None);
    }

    #[test]
    fn damage_is_said_and_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.vhd");
        create(&path, &Shape::Dynamic, 64 << 20, 0).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for (what, bytes) in [
            ("empty", vec![]),
            ("short", whole[..100].to_vec()),
            ("zeros", vec![0; whole.len()]),
            ("header", [&whole[..512], &vec![9; 1024], &whole[1536..]].concat()),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let facts = Facts::read(&path, FileKind::Vhd).unwrap();
            assert!(facts.damage.is_some(), "{what}");
        }
        // One of the two footers is enough.
        std::fs::write(&path, &whole[..whole.len() - 512]).unwrap();
        assert_eq!(Facts::read(&path, FileKind::Vhd).unwrap().damage, None);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(Facts::read(&path, FileKind::Vhd).unwrap().damage.unwrap(), "is no regular file");
    }
}
