//! The configuration of a domain as xl reads it (xl.cfg(5)): no disks, which are written into xenstore, and nothing
//! that a name or an argument could add to.

use std::path::Path;

use crate::arguments::not_plain;
use crate::traits::VmSpec;

/// Least memory of a guest that can start at all.
const MEMORY_MIN: u64 = 16 << 20;

/// Longest command line of a PV guest, with its end (`MAX_GUEST_CMDLINE` of Xen's public headers).
const CMDLINE_LEN_MAX: usize = 1023;

/// Most processors (`HVM_MAX_VCPUS` is less; Xen says so itself then).
const VCPUS_MAX: u32 = 512;

/// Longest part of a domain's name that comes from the VM's name.
const LABEL_LEN_MAX: usize = 40;

/// Ways to run a guest (`platform:xen-type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GuestType {
    /// Paravirtual, on any processor.
    Pv,
    /// Paravirtual in a container of the processor's.
    Pvh,
}

impl GuestType {
    /// What `VM.platform` says; PV if it has no `xen-type`.
    pub(super) fn of(spec: &VmSpec) -> Result<Self, String> {
        match spec.platform.get("xen-type").map(String::as_str) {
            None | Some("" | "pv") => Ok(Self::Pv),
            Some("pvh") => Ok(Self::Pvh),
            Some(other) => Err(format!("platform:xen-type is {other:?}, not pv or pvh")),
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Pv => "pv",
            Self::Pvh => "pvh",
        }
    }
}

/// The name of a VM's domain: for people, and never another domain's. xl wants names that differ and are no
/// numbers.
pub(super) fn name(spec: &VmSpec) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let label: String = spec.name.chars().map(plain).take(LABEL_LEN_MAX).collect();
    let uuid = spec.uuid.simple().to_string();
    format!("{label}.{}", &uuid[..8])
}

/// A string as xl's parser takes it. Its numeric escapes do not work, so what cannot be written is refused.
fn quoted(what: &str, text: &str) -> Result<String, String> {
    if let Some(bad) = text.chars().find(|c| c.is_control()) {
        return Err(format!("{what} has a control character ({bad:?})"));
    }
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        if matches!(c, '"' | '\\') {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted.push('"');
    Ok(quoted)
}

fn path(what: &str, path: &Path) -> Result<String, String> {
    let text = path.to_str().ok_or_else(|| format!("{what} {} is no text", path.display()))?;
    // Others would be looked for in a directory of Xen's.
    if !path.is_absolute() {
        return Err(format!("{what} {text:?} is no path from the root"));
    }
    quoted(what, text)
}

/// What the kernel is told.
///
/// # Errors
/// A sentence: why the VM's own arguments cannot be used.
pub(super) fn arguments(spec: &VmSpec) -> Result<String, String> {
    if let Some(why) = not_plain(&spec.kernel_args) {
        return Err(why);
    }
    let mut arguments = String::from("console=hvc0");
    if !spec.kernel_args.is_empty() {
        arguments.push(' ');
        arguments.push_str(&spec.kernel_args);
    }
    if arguments.len() > CMDLINE_LEN_MAX {
        let max = CMDLINE_LEN_MAX - "console=hvc0 ".len();
        return Err(format!("PV_args has {} bytes: at most {max} reach a guest", spec.kernel_args.len()));
    }
    Ok(arguments)
}

/// The configuration; `ramdisk` is the VM's, or ours.
///
/// # Errors
/// What of the VM is not possible, as a sentence.
pub(super) fn text(spec: &VmSpec, ramdisk: Option<&Path>) -> Result<String, String> {
    let kind = GuestType::of(spec)?;
    let kernel = spec
        .kernel
        .as_deref()
        .ok_or("it has no kernel: set VM.PV_kernel to one on this host that knows Xen, as /boot/vmlinuz")?;
    if spec.memory < MEMORY_MIN {
        return Err(format!("{} bytes of memory are too few: at least {MEMORY_MIN}", spec.memory));
    }
    if !(1..=VCPUS_MAX).contains(&spec.vcpus) {
        return Err(format!("{} processors are not possible: 1 to {VCPUS_MAX}", spec.vcpus));
    }
    let arguments = arguments(spec)?;
    let mut lines = vec![
        "# Made anew at each start. Disks are not in here: they are written into xenstore.".to_owned(),
        format!("type = \"{}\"", kind.word()),
        format!("name = {}", quoted("its name", &name(spec))?),
        format!("uuid = \"{}\"", spec.uuid),
        format!("memory = {}", spec.memory >> 20),
        format!("maxmem = {}", spec.memory >> 20),
        format!("vcpus = {}", spec.vcpus),
        format!("kernel = {}", path("PV_kernel", kernel)?),
    ];
    if let Some(file) = ramdisk {
        lines.push(format!("ramdisk = {}", path("PV_ramdisk", file)?));
    }
    lines.push(format!("cmdline = {}", quoted("PV_args", &arguments)?));
    // The driver looks why the domain ended, and destroys it.
    for event in ["poweroff", "reboot", "crash", "watchdog", "soft_reset"] {
        lines.push(format!("on_{event} = \"preserve\""));
    }
    Ok(lines.join("\n") + "\n")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use uuid::Uuid;

    use super::*;

    fn spec() -> VmSpec {
        VmSpec {
            uuid: Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef),
            name: "my guest".into(),
            memory: 128 << 20,
            vcpus: 2,
            kernel: Some("/boot/vmlinuz".into()),
            ramdisk: None,
            kernel_args: "root=/dev/xvda quiet".into(),
            platform: BTreeMap::new(),
            drives: Vec::new(),
        }
    }

    fn with(key: &str, value: &str) -> VmSpec {
        VmSpec { platform: BTreeMap::from([(key.to_owned(), value.to_owned())]), ..spec() }
    }

    /// Settings as xl's lexer sees them: a name, `=`, a number or a string in double quotes whose escapes are `\"`
    /// and `\\`, the end of the line; and comments.
    fn read(text: &str) -> Vec<(String, String)> {
        let mut settings = Vec::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.split_once(" = ").expect("a setting");
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
            let Some(rest) = value.strip_prefix('"') else {
                assert!(value.chars().all(|c| c.is_ascii_digit()), "{value}");
                settings.push((name.to_owned(), value.to_owned()));
                continue;
            };
            let (mut plain, mut chars) = (String::new(), rest.chars());
            loop {
                match chars.next().expect("a closing quote") {
                    '"' => break,
                    '\\' => {
                        let escaped = chars.next().expect("something escaped");
                        assert!(matches!(escaped, '"' | '\\'), "{escaped}");
                        plain.push(escaped);
                    }
                    c => plain.push(c),
                }
            }
            assert_eq!(chars.as_str(), "", "nothing follows a string");
            settings.push((name.to_owned(), plain));
        }
        settings
    }

    #[test]
    fn a_vm_becomes_a_configuration() {
        let settings: BTreeMap<_, _> =
            read(&text(&spec(), Some(Path::new("/run/i"))).unwrap()).into_iter().collect();
        let of = |name: &str| settings[name].as_str();
        assert_eq!(of("type"), "pv");
        assert_eq!(of("name"), "my_guest.01234567");
        assert_eq!(of("uuid"), "01234567-89ab-cdef-0123-456789abcdef");
        assert_eq!((of("memory"), of("maxmem"), of("vcpus")), ("128", "128", "2"));
        assert_eq!((of("kernel"), of("ramdisk")), ("/boot/vmlinuz", "/run/i"));
        assert_eq!(of("cmdline"), "console=hvc0 root=/dev/xvda quiet");
        assert_eq!(of("on_crash"), "preserve");
        assert!(!settings.contains_key("disk"));
        assert!(text(&with("xen-type", "pvh"), None).unwrap().contains("type = \"pvh\""));
    }

    #[test]
    fn nothing_adds_to_it() {
        let evil = "x\"\ndisk = [ \"phy:/dev/sda,xvda,w\" ]\n#";
        let mut spec = spec();
        spec.name = evil.into();
        spec.kernel = Some("/boot/a \"b\" \\c".into());
        spec.kernel_args = "a=\"b\" c=\\ d='e' #f".into();
        let settings = read(&text(&spec, None).unwrap());
        let names: Vec<&str> = settings.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.iter().filter(|name| **name == "kernel").count(), 1);
        assert!(!names.contains(&"disk"));
        assert!(settings.contains(&("kernel".into(), "/boot/a \"b\" \\c".into())));
        assert!(settings.contains(&("cmdline".into(), "console=hvc0 a=\"b\" c=\\ d='e' #f".into())));
        spec.kernel_args = "a\nb".into();
        assert!(text(&spec, None).unwrap_err().contains("printable ASCII"));
        spec.kernel_args = String::new();
        spec.kernel = Some("/boot/\u{7}".into());
        assert!(text(&spec, None).unwrap_err().contains("PV_kernel"));
    }

    #[test]
    fn hostile_text_becomes_no_setting() {
        let names = |spec: &VmSpec| -> Option<Vec<String>> {
            let text = text(spec, Some(Path::new("/run/i"))).ok()?;
            Some(read(&text).into_iter().map(|(name, _)| name).collect())
        };
        let good = names(&spec()).expect("a configuration");
        for c in (0..=0x17f_u32).filter_map(char::from_u32) {
            for hostile in
                [format!("a{c}b"), format!("{c}"), format!("a{c}\ndisk = []"), format!("\\{c}\" # {c}")]
            {
                let specs = [
                    VmSpec { name: hostile.clone(), ..spec() },
                    VmSpec { kernel_args: hostile.clone(), ..spec() },
                    VmSpec { kernel: Some(format!("/{hostile}").into()), ..spec() },
                    with("xen-type", &hostile),
                    with("device_model_override", &hostile),
                ];
                for spec in specs {
                    assert!(names(&spec).is_none_or(|names| names == good), "{spec:?}");
                }
            }
        }
    }

    #[test]
    fn names_are_words_that_differ() {
        let mut spec = spec();
        spec.name = "7".into();
        assert_eq!(name(&spec), "7.01234567");
        spec.name = "ä/ö -".repeat(40);
        assert!(name(&spec).len() <= LABEL_LEN_MAX + 9);
        assert!(name(&spec).chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)));
        let mut other = spec.clone();
        other.uuid = Uuid::new_v4();
        assert_ne!(name(&spec), name(&other));
    }

    #[test]
    fn what_cannot_be_is_told() {
        let told = |change: &dyn Fn(&mut VmSpec)| {
            let mut spec = spec();
            change(&mut spec);
            text(&spec, None).unwrap_err()
        };
        assert!(told(&|spec| spec.kernel = None).contains("VM.PV_kernel"));
        assert!(told(&|spec| spec.kernel = Some("vmlinuz".into())).contains("no path from the root"));
        assert!(told(&|spec| spec.memory = 1 << 20).contains("too few"));
        assert!(told(&|spec| spec.vcpus = 0).contains("not possible"));
        assert!(told(&|spec| spec.kernel_args = "x".repeat(1011)).contains("at most 1010"));
        assert!(text(&with("xen-type", "hvm"), None).unwrap_err().contains("not pv or pvh"));
    }
}
