use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

struct Host {
    dir: tempfile::TempDir,
    settings: Settings,
}

impl Host {
    /// A host whose kernels lie in `kernels`.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = Settings::new(&dir.path().join("run"));
        settings.kernel_dirs = vec![dir.path().join("kernels"), dir.path().join("one")];
        for name in ["kernels", "kernels-of-others", "elsewhere"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Self { dir, settings }
    }

    fn put(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        path
    }

    fn ramdisk(&self, path: &Path) -> Result<PathBuf, String> {
        find(&self.settings, path, Claim::Ramdisk)
    }

    fn kernel(&self, path: &Path, kernels: Kernels) -> Result<PathBuf, String> {
        find(&self.settings, path, Claim::Kernel(kernels))
    }
}

const CPIO: &[u8] = b"070701 and so on";

/// An ELF file with one section of this name, and one note.
fn elf(section: &str, note: &[u8; 4]) -> Vec<u8> {
    let names = format!("\0.shstrtab\0{section}\0");
    let mut file = vec![0_u8; 64];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    let put = |file: &mut Vec<u8>, at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(&mut file, 16, &2_u16.to_le_bytes());
    put(&mut file, 18, &MACHINE.to_le_bytes());
    let note_at = file.len() as u64;
    file.extend([4_u32, 1, 5].iter().flat_map(|number| number.to_le_bytes()));
    file.extend(note);
    file.extend([0; 4]);
    let note_len = file.len() as u64 - note_at;
    let names_at = file.len() as u64;
    file.extend(names.as_bytes());
    let segments_at = file.len() as u64;
    let mut segment = vec![0; 56];
    put(&mut segment, 0, &4_u32.to_le_bytes());
    put(&mut segment, 8, &note_at.to_le_bytes());
    put(&mut segment, 32, &note_len.to_le_bytes());
    file.extend(&segment);
    let sections_at = file.len() as u64;
    for (name_at, at, len) in [(0_u32, 0, 0), (1, names_at, names.len() as u64), (11, 0, 0)] {
        let mut section = vec![0; 64];
        put(&mut section, 0, &name_at.to_le_bytes());
        put(&mut section, 24, &at.to_le_bytes());
        put(&mut section, 32, &len.to_le_bytes());
        file.extend(&section);
    }
    put(&mut file, 32, &segments_at.to_le_bytes());
    put(&mut file, 40, &sections_at.to_le_bytes());
    for (at, number) in [(54, 56_u16), (56, 1), (58, 64), (60, 3), (62, 1)] {
        put(&mut file, at, &number.to_le_bytes());
    }
    file
}

fn bzimage() -> Vec<u8> {
    let mut kernel = vec![0; 4096];
    kernel[510..518].copy_from_slice(b"\x55\xaa\0\0HdrS");
    kernel
}

#[test]
fn only_the_administrators_directories_are_looked_into() {
    let host = Host::new();
    let good = host.put("kernels/r", CPIO);
    assert_eq!(host.ramdisk(&good), Ok(fs::canonicalize(&good).unwrap()));
    assert!(host.ramdisk(&host.put("one", CPIO)).is_ok(), "a single file is a setting, too");
    let outside = host.put("elsewhere/r", CPIO);
    let beside = host.put("kernels-of-others/r", CPIO);
    for path in [&outside, &beside, &host.dir.path().join("kernels/../elsewhere/r")] {
        let why = host.ramdisk(path).unwrap_err();
        assert!(why.contains("kernel-dirs") && why.contains("/kernels"), "{why}");
    }
    // A link counts as what it leads to, wherever on the way it is.
    let link = host.dir.path().join("kernels/link");
    symlink(&outside, &link).unwrap();
    assert!(host.ramdisk(&link).is_err());
    symlink(host.dir.path().join("elsewhere"), host.dir.path().join("kernels/dir")).unwrap();
    assert!(host.ramdisk(&host.dir.path().join("kernels/dir/r")).is_err());
    let inwards = host.dir.path().join("elsewhere/inwards");
    symlink(&good, &inwards).unwrap();
    assert!(host.ramdisk(&inwards).is_err(), "nothing elsewhere is looked at");
    let near = host.dir.path().join("kernels/near");
    symlink(&good, &near).unwrap();
    assert_eq!(host.ramdisk(&near), Ok(fs::canonicalize(&good).unwrap()));
    for path in
        ["/etc/shadow", "/etc/passwd", "/proc/self/mem", "/dev/zero", "/no/such/file", "kernels/r", ""]
    {
        assert!(host.ramdisk(Path::new(path)).is_err(), "{path}");
    }
    let mut open = host.settings.clone();
    open.kernel_dirs = vec!["/".into()];
    assert!(find(&open, Path::new("/etc/passwd"), Claim::Ramdisk).is_err(), "everything is no directory");
}

#[test]
fn what_others_can_change_is_refused() {
    let host = Host::new();
    let file = host.put("kernels/r", CPIO);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(host.ramdisk(&file).unwrap_err().contains("chmod go-w"));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let dir = host.dir.path().join("kernels");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(host.ramdisk(&file).unwrap_err().contains("can be changed by others"));
    // Others may put files there, and none of them replaces ours.
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
    assert!(host.ramdisk(&file).is_ok());
    if tapio_sys::process::is_root() {
        std::os::unix::fs::chown(&file, Some(4711), Some(0)).unwrap();
        assert!(host.ramdisk(&file).unwrap_err().contains("make root its owner"));
    }
}

#[test]
fn names_that_are_more_than_one_word_somewhere_are_refused() {
    let host = Host::new();
    for byte in 0..=0xff_u8 {
        let mut name = b"/boot/a".to_vec();
        name.push(byte);
        name.push(b'b');
        let path = PathBuf::from(OsString::from_vec(name));
        let is_word = byte.is_ascii_graphic() && !b"\"'`\\,".contains(&byte);
        assert_eq!(is_plain(&path).is_ok(), is_word, "{byte:#x}");
    }
    assert!(is_plain(Path::new(&format!("/{}", "x".repeat(PATH_LEN_MAX)))).is_err());
    // What a plain name leads to must be plain, too.
    let hidden = host.put("kernels/a con0=fd:1", CPIO);
    let link = host.dir.path().join("kernels/plain");
    symlink(&hidden, &link).unwrap();
    assert!(host.ramdisk(&link).unwrap_err().contains("white space"));
}

#[test]
fn kernels_are_told_from_other_programs() {
    let host = Host::new();
    let uml = host.put("kernels/uml", &elf(".uml.setup.init", b"GNU\0"));
    let xen = host.put("kernels/xen", &elf(".text", b"Xen\0"));
    let plain = host.put("kernels/find", &elf(".text", b"GNU\0"));
    let near = host.put("kernels/near", &elf(".uml.setup.init.x", b"Xem\0"));
    let bz = host.put("kernels/vmlinuz", &bzimage());
    let script = host.put("kernels/script", b"#!/bin/sh\n# .uml.setup.init HdrS\n");
    let empty = host.put("kernels/empty", b"");
    let is = |path: &Path| [Kernels::Uml, Kernels::Linux].map(|kernels| host.kernel(path, kernels).is_ok());
    assert_eq!(is(&uml), [true, false]);
    assert_eq!(is(&xen), [false, true]);
    assert_eq!(is(&bz), [false, true]);
    for path in [&plain, &near, &script, &empty] {
        assert_eq!(is(path), [false, false], "{}", path.display());
    }
    assert!(host.kernel(&plain, Kernels::Uml).unwrap_err().contains("no kernel of User-mode Linux"));
    assert!(host.kernel(&plain, Kernels::Linux).unwrap_err().contains("no Linux kernel"));
    assert!(host.ramdisk(&plain).unwrap_err().contains("no ramdisk"));
    assert!(host.kernel(&host.dir.path().join("kernels"), Kernels::Uml).is_err(), "a directory");
    // The programs of this host, where they are allowed by mistake.
    let mut wide = host.settings.clone();
    wide.kernel_dirs = vec!["/usr/bin".into()];
    for program in ["/usr/bin/find", "/usr/bin/install", "/usr/bin/env"] {
        let why = find(&wide, Path::new(program), Claim::Kernel(Kernels::Uml)).unwrap_err();
        assert!(why.contains("no kernel of User-mode Linux"), "{why}");
    }
    if wide.uml.exists() {
        let found = find(&host.settings, &wide.uml, Claim::Kernel(Kernels::Uml));
        assert!(found.is_ok(), "the installed kernel is always allowed: {found:?}");
    }
}

#[test]
fn damaged_kernels_are_none_and_do_no_harm() {
    let host = Host::new();
    let whole = elf(".uml.setup.init", b"Xen\0");
    for len in 0..whole.len() {
        let path = host.put("kernels/cut", &whole[..len]);
        let _ = host.kernel(&path, Kernels::Uml);
        let _ = host.kernel(&path, Kernels::Linux);
    }
    for at in 0..whole.len() {
        for value in [0, 1, 0x7f, 0xff] {
            let mut damaged = whole.clone();
            damaged[at] = value;
            let path = host.put("kernels/damaged", &damaged);
            let _ = host.kernel(&path, Kernels::Uml);
            let _ = host.kernel(&path, Kernels::Linux);
        }
    }
}

#[test]
fn ramdisks_are_archives() {
    let host = Host::new();
    for magic in
        [&b"070701"[..], b"\x1f\x8b\x08", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x02\x21\x4c\x18", b"BZh9"]
    {
        assert!(host.ramdisk(&host.put("kernels/r", magic)).is_ok(), "{magic:?}");
    }
    for other in [&b""[..], b"root:*:19000:0:99999:7:::\n", b"07070", b"\x7fELF", b"conectix"] {
        assert!(host.ramdisk(&host.put("kernels/r", other)).is_err(), "{other:?}");
    }
}

#[test]
fn an_error_names_field_path_and_next_step() {
    let host = Host::new();
    let spec = VmSpec {
        uuid: Uuid::from_u128(7),
        name: String::new(),
        memory: 0,
        vcpus: 1,
        kernel: Some("/usr/bin/find".into()),
        ramdisk: None,
        kernel_args: String::new(),
        platform: BTreeMap::new(),
        drives: Vec::new(),
    };
    let error = checked(&host.settings, &spec, Kernels::Uml).unwrap_err();
    assert_eq!(error.code, "INVALID_VALUE");
    assert_eq!(error.params[..2], ["PV_kernel", "/usr/bin/find"]);
    assert!(error.params[2].contains("VM 00000000-0000-0000-0000-000000000007"), "{error}");
    let spec = VmSpec { kernel: None, ramdisk: Some("/etc/shadow".into()), ..spec };
    let error = checked(&host.settings, &spec, Kernels::Linux).unwrap_err();
    assert_eq!(error.params[..2], ["PV_ramdisk", "/etc/shadow"]);
    let good = host.put("kernels/r", CPIO);
    let spec = VmSpec { ramdisk: Some(good.clone()), ..spec };
    let found = checked(&host.settings, &spec, Kernels::Linux).unwrap().ramdisk;
    assert_eq!(found, Some(fs::canonicalize(good).unwrap()));
}
