//! Places of disks in a VM: numbers, and the names that guests have for them.

use std::collections::BTreeSet;
use std::sync::Arc;

use tapio_model::ApiError;

use crate::db::{Change, Object};

/// Places of a VM: 0 to 254.
pub const PLACES: u16 = 255;
/// The place that drives have by old habit; disks are put elsewhere as long as there is room.
const DRIVE: u8 = 3;

/// Reads a place as clients write it: `7`, or a name as `xvdh`, `sdh`, `hdh`.
///
/// # Errors
/// `INVALID_DEVICE`.
pub fn place(text: &str) -> Result<u8, ApiError> {
    let invalid = || ApiError::new("INVALID_DEVICE", [text]);
    let number = match text.parse::<u16>() {
        Ok(number) if text.bytes().all(|byte| byte.is_ascii_digit()) => Some(number),
        _ => ["xvd", "sd", "hd"].iter().find_map(|prefix| letters(text.strip_prefix(prefix)?)),
    };
    let number = number.filter(|number| *number < PLACES).ok_or_else(invalid)?;
    u8::try_from(number).map_err(|_| invalid())
}

/// `a` is 0, `z` 25, `aa` 26.
fn letters(text: &str) -> Option<u16> {
    if text.is_empty() || text.len() > 3 || !text.bytes().all(|byte| byte.is_ascii_lowercase()) {
        return None;
    }
    let count = text.bytes().fold(0_u16, |sum, letter| sum * 26 + u16::from(letter - b'a') + 1);
    count.checked_sub(1)
}

/// The name that a guest has for a place: `xvda`, `xvdaa`.
pub fn name(place: u8) -> String {
    let mut rest = u16::from(place) + 1;
    let mut letters = Vec::new();
    while rest > 0 {
        rest -= 1;
        letters.push(char::from(b'a' + (rest % 26) as u8));
        rest /= 26;
    }
    let letters: String = letters.iter().rev().collect();
    format!("xvd{letters}")
}

/// The number under which the device publishes its statistics, as xenbus counts.
pub fn number(place: u8) -> u32 {
    let place = u32::from(place);
    if place < 16 { (202 << 8) | (place << 4) } else { (1 << 28) | (place << 8) }
}

/// The places that none of these VBDs has.
pub fn free(vbds: &[Arc<Object>]) -> Vec<u8> {
    let taken: BTreeSet<u8> = vbds.iter().filter_map(|vbd| place(vbd.text("userdevice")).ok()).collect();
    (0..PLACES as u8).filter(|place| !taken.contains(place)).collect()
}

/// The place for a new VBD where none is given.
///
/// # Errors
/// The VM is full.
pub fn choose(vbds: &[Arc<Object>], is_drive: bool) -> Result<u8, ApiError> {
    let free = free(vbds);
    let wanted = if is_drive {
        free.iter().find(|place| **place == DRIVE)
    } else {
        free.iter().find(|place| **place != DRIVE)
    };
    wanted.or(free.first()).copied().ok_or_else(|| {
        ApiError::new("OPERATION_NOT_ALLOWED", [format!("the VM has disks in all {PLACES} positions")])
    })
}

/// The VBDs of a VM.
pub fn of_vm(change: &Change<'_>, vm: &str) -> Vec<Arc<Object>> {
    change.find("VBD", "VM", vm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_have_numbers_and_names() {
        for number in 0..=254_u8 {
            assert_eq!(place(&number.to_string()), Ok(number));
            assert_eq!(place(&name(number)), Ok(number), "{}", name(number));
        }
        assert_eq!(
            (name(0), name(25), name(26), name(254)),
            ("xvda".into(), "xvdz".into(), "xvdaa".into(), "xvdiu".into())
        );
        assert_eq!((place("sdb"), place("hda")), (Ok(1), Ok(0)));
        for bad in ["", "255", "-1", "+1", "xvd", "xvd1", "xvdiv", "autodetect", "1 ", "99999999999"] {
            assert_eq!(place(bad).expect_err(bad).code, "INVALID_DEVICE");
        }
    }

    #[test]
    fn numbers_are_those_of_xenbus() {
        assert_eq!(
            (number(0), number(1), number(15), number(16)),
            (51712, 51728, 51952, (1 << 28) | (16 << 8))
        );
    }
}
