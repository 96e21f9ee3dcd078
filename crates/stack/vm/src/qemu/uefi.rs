//! Firmware: SeaBIOS, or OVMF for UEFI.

use std::path::{Path, PathBuf};

use crate::traits::{FIRMWARE, VmSpec};

/// Where distributions have OVMF, as code and as an empty store of variables; the larger ones are those that Debian
/// keeps.
const OVMF: [(&str, &str); 4] = [
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    ("/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"),
    ("/usr/share/edk2/ovmf/OVMF_CODE.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"),
    ("/usr/share/edk2/x64/OVMF_CODE.4m.fd", "/usr/share/edk2/x64/OVMF_VARS.4m.fd"),
];

/// OVMF on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Uefi {
    /// The program.
    pub code: PathBuf,
    /// Its variables before the first start.
    pub empty: PathBuf,
}

/// Whether a VM wants it, installed or not.
pub(super) fn is_wanted(spec: &VmSpec) -> bool {
    spec.platform.get(FIRMWARE).is_some_and(|firmware| firmware == "uefi")
}

/// The firmware that a VM wants; none is the BIOS.
///
/// # Errors
/// A sentence: it is not known, or not installed.
pub(super) fn of(spec: &VmSpec) -> Result<Option<Uefi>, String> {
    match spec.platform.get(FIRMWARE).map(String::as_str) {
        None | Some("" | "bios") => Ok(None),
        Some("uefi") => {
            let found = OVMF.iter().find(|(code, vars)| Path::new(code).exists() && Path::new(vars).exists());
            let (code, empty) = found.ok_or(
                "HVM-boot-params:firmware is uefi, and this host has no OVMF: install the package ovmf \
                 (edk2-ovmf elsewhere)",
            )?;
            Ok(Some(Uefi { code: code.into(), empty: empty.into() }))
        }
        Some(other) => Err(format!("HVM-boot-params:firmware is {other:?}: bios and uefi are possible")),
    }
}

/// What the emulator is told: flash with the program, and flash with the variables.
pub(super) fn arguments(uefi: &Uefi) -> [String; 4] {
    let code = format!("if=pflash,format=raw,unit=0,readonly=on,file={}", uefi.code.display());
    let vars = format!("if=pflash,format=raw,unit=1,file={}", crate::nvram::NAME);
    ["-drive".into(), code, "-drive".into(), vars]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn firmware_is_known_or_refused() {
        let spec = |word: &str| VmSpec {
            uuid: uuid::Uuid::new_v4(),
            name: String::new(),
            memory: 1 << 30,
            vcpus: 1,
            kernel: None,
            ramdisk: None,
            kernel_args: String::new(),
            platform: BTreeMap::from([(FIRMWARE.to_owned(), word.to_owned())]),
            drives: Vec::new(),
        };
        assert_eq!((of(&spec("")), of(&spec("bios"))), (Ok(None), Ok(None)));
        assert!(of(&spec("coreboot")).unwrap_err().contains("bios and uefi"));
        match of(&spec("uefi")) {
            Ok(found) => assert!(found.is_some_and(|found| found.code.exists() && found.empty.exists())),
            Err(why) => assert!(why.contains("package ovmf"), "{why}"),
        }
    }
}
