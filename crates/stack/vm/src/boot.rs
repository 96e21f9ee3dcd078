//! Kernels and ramdisks that a client names (`VM.PV_kernel`, `VM.PV_ramdisk`).
//!
//! A client of the API writes a path of this host, and a driver running as root reads that file or even executes it.
//! So a path is taken only if all of this holds:
//!
//! 1. it is a plain absolute path: printable ASCII without white space, quotes and commas, so that it is one word in
//!    every command line and configuration it gets into;
//! 2. by its name, and with all links resolved, it lies in a directory that the host's administrator allows
//!    (`kernel-dirs`), or is one of the files named there;
//! 3. the file and all directories above it can be changed by root and the daemon's own user only. What was
//!    looked at is therefore what is used later, and no descriptor has to be handed through two emulators;
//! 4. it is a regular file whose content is what it claims to be.
//!
//! | claim | content |
//! |---|---|
//! | User-mode Linux | an ELF executable of this host's CPU with the section `.uml.setup.init`, the table of User-mode Linux's own options (`arch/um/include/asm/common.lds.S`), which every build has and no other program does |
//! | Linux, for QEMU and Xen | a bzImage (`0xAA55` at 510, `HdrS` at 514), or an ELF executable with a note of Xen (PV and PVH kernels) |
//! | ramdisk | an archive of cpio's new format, or something compressed by gzip, bzip2, xz, lzma, lzo, lz4 or zstd |

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use tapio_types::ApiError;
use uuid::Uuid;

use crate::settings::Settings;
use crate::traits::{BootField, VmSpec};

/// Longest path: with it every command line has room for everything else.
const PATH_LEN_MAX: usize = 512;

/// As much of refused arguments is repeated to the client.
const SHOWN_MAX: usize = 128;

/// Longest table of an ELF file that is looked at.
const TABLE_LEN_MAX: u64 = 1 << 20;

/// The section of User-mode Linux's own options.
const UML_SECTION: &[u8] = b".uml.setup.init";

/// Which kernels a driver starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernels {
    /// Programs of this host: User-mode Linux.
    Uml,
    /// Loaded by an emulator or by Xen.
    Linux,
}

/// What a file must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    Kernel(Kernels),
    Ramdisk,
}

/// Whether a driver would start a VM with this value of a field. `arguments` says why not with its arguments.
///
/// # Errors
/// As [`checked`].
pub(crate) fn check(
    settings: &Settings,
    spec: &VmSpec,
    kernels: Kernels,
    field: BootField,
    arguments: impl FnOnce() -> Option<String>,
) -> Result<(), ApiError> {
    let mut one = spec.clone();
    match field {
        BootField::Kernel => one.ramdisk = None,
        BootField::Ramdisk => one.kernel = None,
        BootField::Arguments => {
            let why = arguments().filter(|_| !spec.kernel_args.is_empty());
            let shown: String = spec.kernel_args.chars().take(SHOWN_MAX).collect();
            return why.map_or(Ok(()), |why| Err(refusal(spec.uuid, "PV_args", Path::new(&shown), &why)));
        }
    }
    checked(settings, &one, kernels).map(drop)
}

/// The VM's specification with the files that its paths lead to, each checked.
///
/// # Errors
/// `INVALID_VALUE` with the field, the path, and why it cannot be used.
pub(crate) fn checked(settings: &Settings, spec: &VmSpec, kernels: Kernels) -> Result<VmSpec, ApiError> {
    let mut spec = spec.clone();
    let files = [
        ("PV_kernel", &mut spec.kernel, Claim::Kernel(kernels)),
        ("PV_ramdisk", &mut spec.ramdisk, Claim::Ramdisk),
    ];
    for (field, file, claim) in files {
        if let Some(named) = file {
            let found = find(settings, named, claim).map_err(|why| refusal(spec.uuid, field, named, &why))?;
            *named = found;
        }
    }
    Ok(spec)
}

fn refusal(vm: Uuid, field: &str, path: &Path, why: &str) -> ApiError {
    let path = path.display().to_string();
    ApiError::new("INVALID_VALUE", [field.to_owned(), path, format!("VM {vm}: {why}")])
}

/// Where a path leads, if the file there may be used.
fn find(settings: &Settings, path: &Path, claim: Claim) -> Result<PathBuf, String> {
    is_plain(path)?;
    // By its name, before anything is looked at: a client learns nothing of other files, and what it names elsewhere
    // may be on a storage that hangs.
    if !is_named_inside(settings, path) {
        return Err(not_allowed(settings, path));
    }
    let found = fs::canonicalize(path).map_err(|error| format!("{}: {error}", path.display()))?;
    // A link may lead to a name that is not plain.
    is_plain(&found)?;
    if !is_allowed(settings, &found) {
        return Err(not_allowed(settings, &found));
    }
    for above in found.ancestors().skip(1) {
        let data = fs::symlink_metadata(above).map_err(|error| format!("{}: {error}", above.display()))?;
        let is_sticky = data.is_dir() && data.mode() & libc::S_ISVTX != 0;
        if !is_ours(&data, is_sticky) {
            return Err(open_to_others(above));
        }
    }
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(&found)
        .map_err(|error| format!("{}: {error}", found.display()))?;
    let data = file.metadata().map_err(|error| format!("{}: {error}", found.display()))?;
    if !data.is_file() {
        return Err(format!("{} is no regular file", found.display()));
    }
    if !is_ours(&data, false) {
        return Err(open_to_others(&found));
    }
    let is_one = is_what_it_claims(&file, data.len(), claim)
        .map_err(|error| format!("{} cannot be read: {error}", found.display()))?;
    if is_one {
        return Ok(found);
    }
    Err(match claim {
        Claim::Kernel(Kernels::Uml) => format!(
            "{} is no kernel of User-mode Linux (an ELF executable with a section .uml.setup.init); name one, as \
             linux.uml of the package user-mode-linux, or clear the field to use that",
            found.display()
        ),
        Claim::Kernel(Kernels::Linux) => format!(
            "{} is no Linux kernel (a bzImage, or an ELF executable with a note of Xen); name one, as /boot/vmlinuz",
            found.display()
        ),
        Claim::Ramdisk => format!(
            "{} is no ramdisk (a cpio archive, or a compressed one); name one, as /boot/initrd.img, or clear the field \
             to boot Tapio's own",
            found.display()
        ),
    })
}

fn not_allowed(settings: &Settings, file: &Path) -> String {
    let dirs: Vec<String> = settings.kernel_dirs.iter().map(|dir| dir.display().to_string()).collect();
    format!(
        "{} is not in a directory for kernels; put it into one of {}, or let the host's administrator add its directory \
         to kernel-dirs of tapiod.conf",
        file.display(),
        dirs.join(", ")
    )
}

fn open_to_others(path: &Path) -> String {
    format!(
        "{} can be changed by others than root; make root its owner and 'chmod go-w' it, or use a file elsewhere",
        path.display()
    )
}

fn is_plain(path: &Path) -> Result<(), String> {
    let bytes = path.as_os_str().as_bytes();
    let is_word = bytes.iter().all(|byte| byte.is_ascii_graphic() && !b"\"'`\\,".contains(byte));
    if !path.is_absolute() {
        return Err("a path from the root is needed".into());
    }
    if !is_word {
        return Err("its path has characters other than printable ASCII, or white space, quotes, commas or \
                    backslashes; give it a plain name"
            .into());
    }
    if bytes.len() > PATH_LEN_MAX {
        return Err(format!("its path has {} bytes; at most {PATH_LEN_MAX} are possible", bytes.len()));
    }
    Ok(())
}

/// Whether a path begins with an allowed one, as it is written or where that leads, and does not go up.
fn is_named_inside(settings: &Settings, path: &Path) -> bool {
    let goes_up = path.components().any(|part| part == std::path::Component::ParentDir);
    let own = std::iter::once(&settings.uml);
    let mut allowed = settings.kernel_dirs.iter().chain(own);
    !goes_up
        && allowed.any(|allowed| {
            path.starts_with(allowed)
                || fs::canonicalize(allowed).is_ok_and(|allowed| path.starts_with(allowed))
        })
}

fn is_allowed(settings: &Settings, file: &Path) -> bool {
    let own = std::iter::once(&settings.uml);
    settings.kernel_dirs.iter().chain(own).any(|allowed| {
        // One that is not there holds nothing.
        fs::canonicalize(allowed).is_ok_and(|allowed| allowed != Path::new("/") && file.starts_with(allowed))
    })
}

/// Whether only root and the daemon's user can change it. In a sticky directory no other user can replace what is
/// ours.
fn is_ours(data: &Metadata, is_sticky: bool) -> bool {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let by_group = data.mode() & 0o020 != 0 && data.gid() != 0 && data.gid() != gid;
    let by_others = data.mode() & 0o002 != 0;
    (data.uid() == 0 || data.uid() == uid) && (is_sticky || !(by_group || by_others))
}

fn is_what_it_claims(file: &File, len: u64, claim: Claim) -> io::Result<bool> {
    match claim {
        Claim::Kernel(Kernels::Uml) => {
            Elf::read(file, len)?.map_or(Ok(false), |elf| elf.has_section(UML_SECTION))
        }
        Claim::Kernel(Kernels::Linux) => {
            if is_bzimage(file)? {
                return Ok(true);
            }
            Elf::read(file, len)?.map_or(Ok(false), |elf| elf.has_xen_note())
        }
        Claim::Ramdisk => is_archive(file),
    }
}

/// As many bytes as there are, up to the buffer's length.
fn read_up_to(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match file.read_at(&mut buffer[read..], at + read as u64) {
            Ok(0) => break,
            Ok(count) => read += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

/// Linux, Documentation/arch/x86/boot.rst: `boot_flag` and `header`.
fn is_bzimage(file: &File) -> io::Result<bool> {
    let mut head = [0; 518];
    Ok(read_up_to(file, &mut head, 0)? == head.len()
        && head[510..512] == [0x55, 0xaa]
        && &head[514..518] == b"HdrS")
}

/// What Linux unpacks as an initramfs (`init/initramfs.c`, `lib/decompress.c`).
fn is_archive(file: &File) -> io::Result<bool> {
    const MAGICS: [&[u8]; 9] = [
        b"070701",
        b"070702",
        &[0x1f, 0x8b],
        b"BZh",
        &[0xfd, b'7', b'z', b'X', b'Z', 0],
        &[0x5d, 0, 0],
        &[0x89, b'L', b'Z', b'O', 0, 0x0d, 0x0a, 0x1a, 0x0a],
        &[0x02, 0x21, 0x4c, 0x18],
        &[0x28, 0xb5, 0x2f, 0xfd],
    ];
    let mut head = [0; 16];
    let read = read_up_to(file, &mut head, 0)?;
    Ok(MAGICS.iter().any(|magic| head[..read].starts_with(magic)))
}

/// An ELF executable of 64 bits for this host's architecture, as far as it is looked at (System V ABI, "Object files").
struct Elf<'a> {
    file: &'a File,
    len: u64,
    head: [u8; 64],
}

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

const PT_NOTE: u64 = 4;

/// A little-endian number of `count` bytes; zero where there are fewer.
fn number(bytes: &[u8], at: u64, count: usize) -> u64 {
    let mut all = [0; 8];
    if let Some(found) = usize::try_from(at).ok().and_then(|at| bytes.get(at..at.checked_add(count)?)) {
        all[..count].copy_from_slice(found);
    }
    u64::from_le_bytes(all)
}

impl<'a> Elf<'a> {
    fn read(file: &'a File, len: u64) -> io::Result<Option<Self>> {
        let mut head = [0; 64];
        let is_whole = read_up_to(file, &mut head, 0)? == head.len();
        // Class 64, little-endian; ET_EXEC or ET_DYN.
        let is_elf = is_whole && head.starts_with(b"\x7fELF\x02\x01");
        let is_executable = matches!(number(&head, 16, 2), 2 | 3);
        let is_native = number(&head, 18, 2) == u64::from(MACHINE);
        Ok((is_elf && is_executable && is_native).then_some(Self { file, len, head }))
    }

    /// A part of the file; nothing where the file does not have it.
    fn part(&self, at: u64, len: u64) -> io::Result<Vec<u8>> {
        let is_inside = at.checked_add(len).is_some_and(|end| end <= self.len);
        if !is_inside || len > TABLE_LEN_MAX {
            return Ok(Vec::new());
        }
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        let read = read_up_to(self.file, &mut bytes, at)?;
        bytes.truncate(read);
        Ok(bytes)
    }

    /// A table of the header: its bytes and the length of an entry.
    fn table(&self, offset_at: u64, entry_len_at: u64, count_at: u64) -> io::Result<(Vec<u8>, u64)> {
        let entry_len = number(&self.head, entry_len_at, 2);
        let len = entry_len * number(&self.head, count_at, 2);
        Ok((self.part(number(&self.head, offset_at, 8), len)?, entry_len.max(1)))
    }

    fn has_section(&self, name: &[u8]) -> io::Result<bool> {
        let (sections, entry_len) = self.table(40, 58, 60)?;
        let names_at = number(&self.head, 62, 2) * entry_len;
        let names = self.part(number(&sections, names_at + 24, 8), number(&sections, names_at + 32, 8))?;
        let count = sections.len() as u64 / entry_len;
        Ok((0..count).any(|index| {
            let at = usize::try_from(number(&sections, index * entry_len, 4)).unwrap_or(usize::MAX);
            let found = names.get(at..).and_then(|rest| rest.split(|byte| *byte == 0).next());
            found == Some(name)
        }))
    }

    /// Xen's public elfnote.h: notes named `Xen`.
    fn has_xen_note(&self) -> io::Result<bool> {
        let (segments, entry_len) = self.table(32, 54, 56)?;
        for index in 0..segments.len() as u64 / entry_len {
            let at = index * entry_len;
            if number(&segments, at, 4) != PT_NOTE {
                continue;
            }
            let notes = self.part(number(&segments, at + 8, 8), number(&segments, at + 32, 8))?;
            let mut at = 0_u64;
            while at + 12 <= notes.len() as u64 {
                let (name_len, desc_len) = (number(&notes, at, 4), number(&notes, at + 4, 4));
                let name_at = usize::try_from(at + 12).unwrap_or(usize::MAX);
                if name_len == 4 && notes.get(name_at..).is_some_and(|rest| rest.starts_with(b"Xen\0")) {
                    return Ok(true);
                }
                at += 12 + name_len.next_multiple_of(4) + desc_len.next_multiple_of(4);
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests;
