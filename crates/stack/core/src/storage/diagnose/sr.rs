//! Records and images of an attached SR.

use std::collections::BTreeMap;

use tapio_model::{ApiError, NULL_REF};
use tapio_sm::collect::{Why, plan};
use tapio_sm::{Oddity, OddityKind, VdiInfo};
use uuid::Uuid;

use super::super::Call;
use super::super::attached::Attached;
use super::super::collect::{Memory, view};
use super::super::queues;
use super::super::tracking;
use super::super::work::{Names, Work};
use super::{Finding, held};
use crate::db::{Object, reference_of};

/// Looks at an SR; progress is this part of the whole.
///
/// # Errors
/// The driver's.
pub(super) fn find(
    call: &Call,
    attached: &Attached,
    (from, to): (f64, f64),
) -> Result<Vec<Finding>, ApiError> {
    let names = Names { sr: &attached.reference, vdi: "", op: "diagnose" };
    let told = |error| names.translate(call, error);
    let mut found = Vec::new();
    let work = Work::part(call, from, to);
    let oddities = attached.with(|sr| sr.inspect(&work)).map_err(told)?;
    if oddities.iter().any(|odd| odd.kind == OddityKind::LockKept) {
        // Whatever else looks at the SR would wait for the lock.
        found.extend(oddities.iter().map(of_oddity));
        found.extend(held::find(call, &attached.reference));
        return Ok(found.into_iter().map(|finding| finding.of_sr(attached.uuid)).collect());
    }
    let is_collecting = call.part.is_collecting(&attached.reference);
    found.extend(oddities.iter().filter(|odd| !(is_collecting && is_of_collection(odd))).map(of_oddity));
    // What else there is shows when what these say has been put in order.
    if !found.iter().any(|finding| matches!(finding.kind, "journal-left" | "file-unfinished" | "host-silent"))
    {
        found.extend(compare(call, attached).map_err(told)?);
        found.extend(chains(call, attached).map_err(told)?);
    }
    found.extend(held::find(call, &attached.reference));
    // Devices that guests have whole are full from the beginning.
    if attached.can("VDI_CREATE") {
        found.extend(space(call, attached)?);
    }
    let changed = queues::differing(call, attached).into_iter();
    found.extend(changed.map(|(device, what)| Finding::new("queue-changed", device, what)));
    Ok(found.into_iter().map(|finding| finding.of_sr(attached.uuid)).collect())
}

/// Whether a collection that runs may be the cause: it is in order when that ends.
fn is_of_collection(oddity: &Oddity) -> bool {
    matches!(oddity.kind, OddityKind::ImageDamaged | OddityKind::BaseUnused)
}

fn of_oddity(oddity: &Oddity) -> Finding {
    let kind = match oddity.kind {
        OddityKind::ImageDamaged => "image-damaged",
        OddityKind::ParentMissing => "parent-missing",
        OddityKind::ParentReplaced => "parent-replaced",
        OddityKind::ParentLoop => "parent-loop",
        OddityKind::JournalLeft => "journal-left",
        OddityKind::JournalForeign => "journal-foreign",
        OddityKind::FileUnfinished => "file-unfinished",
        OddityKind::BaseUnused => "base-unused",
        OddityKind::LockKept => "lock-kept",
        OddityKind::HeldByDead => "host-silent",
    };
    // A host has several VDIs.
    if let (OddityKind::HeldByDead, Some(vdi)) = (oddity.kind, oddity.image) {
        return Finding::new(kind, vdi, oddity.detail.clone());
    }
    Finding::new(kind, &oddity.file, oddity.detail.clone())
}

/// Records and images that do not agree. No operation of this daemon changes both meanwhile.
fn compare(call: &Call, attached: &Attached) -> Result<Vec<Finding>, ApiError> {
    let _comparing = attached.comparing();
    let images = attached.with(|sr| sr.look(&Work::part(call, 0.0, 0.0)))?;
    let records = call.part.db.find("VDI", "SR", &attached.reference);
    let mut known: BTreeMap<&str, &Object> =
        records.iter().map(|vdi| (vdi.reference.as_str(), &**vdi)).collect();
    let mut found = Vec::new();
    for image in images.iter().filter(|image| !attached.is_building(image.uuid)) {
        match known.remove(reference_of(image.uuid).as_str()) {
            Some(vdi) if image.is_metadata && vdi.text("type") != tracking::METADATA => {
                found.push(without_image(vdi));
            }
            Some(vdi) => found.extend(differs(vdi, image)),
            None => {
                let detail = format!("an image of {} bytes on the storage", image.physical_utilisation);
                found.push(Finding::new("image-without-vdi", image.uuid, detail));
            }
        }
    }
    found.extend(known.into_values().map(without_image));
    Ok(found)
}

fn without_image(vdi: &Object) -> Finding {
    let detail = format!("VDI '{}', {} bytes", vdi.text("name_label"), vdi.int("virtual_size"));
    Finding::new("vdi-without-image", vdi.text("uuid"), detail)
}

fn differs(vdi: &Object, image: &VdiInfo) -> Option<Finding> {
    let size = i64::try_from(image.virtual_size).unwrap_or(i64::MAX);
    let parent = image.parent.map_or_else(|| NULL_REF.to_owned(), reference_of);
    let is_damaged = image.sm_config.contains_key("damaged");
    let detail = match () {
        // Another finding says what is wrong with it.
        () if is_damaged => return None,
        () if vdi.bool("missing") => "the record says that it is missing, and it is there".to_owned(),
        () if vdi.int("virtual_size") != size => {
            format!("the record says {} bytes, the image {size}", vdi.int("virtual_size"))
        }
        () if vdi.text("parent") != parent => {
            format!("the record says that its parent is {}, the image {parent}", vdi.text("parent"))
        }
        () if vdi.bool("managed") != image.managed && !image.is_lun() => {
            "record and image do not agree whether it is a base copy".to_owned()
        }
        () => return None,
    };
    Some(Finding::new("vdi-differs", vdi.text("uuid"), detail))
}

fn chains(call: &Call, attached: &Attached) -> Result<Vec<Finding>, ApiError> {
    if !attached.can("VDI_SNAPSHOT") {
        return Ok(Vec::new());
    }
    let images = attached.with(|sr| sr.look(&Work::part(call, 0.0, 0.0)))?;
    let view = view(call, attached, &Memory::default(), &images)?;
    // A copy ends by itself.
    let skipped = plan(&view).skipped.into_iter().filter(|left| !matches!(left.why, Why::Held { .. }));
    Ok(skipped.map(|left| Finding::new("chain-stuck", left.image, left.why.to_string())).collect())
}

fn space(call: &Call, attached: &Attached) -> Result<Option<Finding>, ApiError> {
    let stat = attached.with(|sr| sr.stat(&Work::part(call, 0.0, 0.0)))?;
    Ok(nearly_full(attached.uuid, stat.physical_size, stat.physical_utilisation))
}

/// Less than a tenth is free.
pub fn nearly_full(sr: Uuid, size: u64, used: u64) -> Option<Finding> {
    let free = size.saturating_sub(used);
    (size > 0 && free < size / 10)
        .then(|| Finding::new("sr-nearly-full", sr, format!("{free} of {size} bytes are free")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_sr_is_nearly_full_when_less_than_a_tenth_is_free() {
        assert_eq!(nearly_full(Uuid::nil(), 100, 90), None);
        assert_eq!(nearly_full(Uuid::nil(), 0, 0), None);
        let found = nearly_full(Uuid::nil(), 1000, 950).expect("it is");
        assert_eq!((found.kind, found.detail.as_str()), ("sr-nearly-full", "50 of 1000 bytes are free"));
    }
}
