//! Texts that a guest's firmware shows: tables of SMBIOS (DMTF DSP0134), named as `VM.bios_strings` names them.

/// One of the texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirmwareText {
    /// Its key in `VM.bios_strings` and `host.bios_strings`.
    pub key: &'static str,
    /// The type of the SMBIOS structure that has it.
    pub(crate) structure: u8,
    /// What QEMU calls it there.
    pub(crate) option: &'static str,
    /// The file in `/sys/class/dmi/id` that has the host's own.
    pub file: &'static str,
}

const fn text(key: &'static str, structure: u8, option: &'static str, file: &'static str) -> FirmwareText {
    FirmwareText { key, structure, option, file }
}

/// All of them, those of a structure together.
pub const FIRMWARE_TEXTS: [FirmwareText; 13] = [
    text("bios-vendor", 0, "vendor", "bios_vendor"),
    text("bios-version", 0, "version", "bios_version"),
    text("system-manufacturer", 1, "manufacturer", "sys_vendor"),
    text("system-product-name", 1, "product", "product_name"),
    text("system-version", 1, "version", "product_version"),
    text("system-serial-number", 1, "serial", "product_serial"),
    text("baseboard-manufacturer", 2, "manufacturer", "board_vendor"),
    text("baseboard-product-name", 2, "product", "board_name"),
    text("baseboard-version", 2, "version", "board_version"),
    text("baseboard-serial-number", 2, "serial", "board_serial"),
    text("baseboard-asset-tag", 2, "asset", "board_asset_tag"),
    text("baseboard-location-in-chassis", 2, "location", ""),
    text("enclosure-asset-tag", 3, "asset", "chassis_asset_tag"),
];

/// Longest text, in bytes.
const LEN_MAX: usize = 512;

/// What begins the keys of [`crate::VmSpec::platform`] for these texts; no client can set them there.
pub const FIRMWARE_TEXT: &str = "bios-strings/";

/// Whether a text can be shown: printable ASCII, not longer than 512 bytes.
pub fn firmware_text_is_plain(text: &str) -> bool {
    text.len() <= LEN_MAX && text.bytes().all(|byte| (0x20..0x7f).contains(&byte))
}
