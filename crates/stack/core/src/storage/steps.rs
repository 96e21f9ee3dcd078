//! Named places in changes of several steps of this part; see [`crate::plan::steps`].

use crate::plan::steps::Step;

const fn at(name: &'static str, half_done: &'static str) -> Step {
    Step { name, half_done }
}

/// Every place of storage operations. Drivers have their own below them.
pub const STEPS: &[Step] = &[
    at("sr-create:noted", "a note of the SR to come; nothing is made. The note is removed"),
    at("sr-create:made", "the storage is made, without a record. It gets its records, and is plugged"),
    at("sr-create:attached", "the storage is mounted, without a record. It gets its records, and is plugged"),
    at("sr-destroy:noted", "a note that the SR goes; all is there. It goes"),
    at("sr-destroy:erased", "the storage is erased, its records are there. They are removed"),
    at("pbd-plug:noted", "a note that the SR is mounted; it is not. It is plugged"),
    at("pbd-plug:attached", "the SR is mounted and the record does not say so. It is plugged"),
    at("pbd-unplug:noted", "a note that the SR goes; it is mounted. It is unmounted"),
    at("pbd-unplug:detached", "the SR is unmounted and the record says that it is there. It no longer does"),
    at("sr-scan:seen", "what the storage has is known and no record says so. The records are made to agree"),
    at("vdi-create:noted", "a note of the image to come; nothing is made. The note is removed"),
    at("vdi-create:image-made", "an image without a record. It is removed"),
    at("vdi-destroy:noted", "a note that the image goes; it is there. It goes, the record too"),
    at("vdi-destroy:image-gone", "a record without an image. It is removed"),
    at("vdi-track:switched", "a log that the record does not say. The record is corrected"),
    at("vdi-data-destroy:noted", "a note that the data go; they are there. They go"),
    at("vdi-data-destroy:image-gone", "a record of a disk whose log alone is left. It says so"),
    at("vdi-resize:grown", "the image is longer than the record says. The record is corrected"),
    at("vdi-fork:noted", "a note of the image to come; nothing is made. The note is removed"),
    at(
        "vdi-fork:image-made",
        "an image without a record, with its base copy. It is removed, the base copy stays",
    ),
    at("vdi-single:image-made", "a base copy without a record. It gets one"),
    at("vdi-copy:noted", "a note of the image to come; nothing is made. The note is removed"),
    at("vdi-copy:image-made", "an empty image without a record. It is removed"),
    at("vdi-copy:filled", "a whole image without a record. It is removed"),
    at("vdi-copy:into-noted", "a note of the copy; the VDI holds what it held. It is copied"),
    at("vdi-copy:into-filled", "the VDI holds the copy, its record not its size. It is copied once more"),
    at("vdi-move:noted", "a note of images to come; nothing is made. The note is removed"),
    at("vdi-move:copied", "whole images without records. They are removed, the VDIs stay where they are"),
    at("vdi-move:switched", "a VDI is elsewhere, its old image and record are there. They are removed"),
    at("gc:garbage-gone", "records of base copies that are gone. They are removed"),
    at("gc:grown", "a base copy that is larger than its record says. The record is corrected"),
    at("gc:copied", "a base copy that is in its parent, and in its chains. The next collection goes on"),
    at(
        "gc:relinked",
        "a record of a base copy that is gone, others name it. It is removed, they are corrected",
    ),
    at("gc:frozen", "a base copy without a record. It gets one"),
    at("gc:leaf-merged", "a record of a base copy that has become a disk. It is removed"),
    at("vdi-introduce:noted", "a note of an image to be taken in. The note is removed"),
    at("vdi-introduce:image-taken", "an image without a record. It gets its record"),
];

#[cfg(test)]
mod tests {
    use super::STEPS;

    #[test]
    fn names_are_there_once_and_said_in_full() {
        for (at, step) in STEPS.iter().enumerate() {
            assert!(!STEPS[..at].iter().any(|other| other.name == step.name), "{}", step.name);
            assert!(step.name.contains(':') && step.half_done.ends_with(char::is_alphanumeric), "{step:?}");
        }
    }
}
