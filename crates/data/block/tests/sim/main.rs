//! The disk on the simulator, against a plain model of sectors.
//!
//! Every run is drawn from a seed, which a failure prints: `TAPIO_SEED=n cargo test -p tapio-block --test sim` runs
//! that seed
//! alone, `TAPIO_SEEDS=n` runs that many. Between two crashes random requests run side by side; then the
//! power goes or the process dies, often after a chosen number of changes to the files, or the disk is closed; then
//!
//! - every image is valid by the rules of `vhd-util check`, before and after it is opened again;
//! - after a power cut every sector holds its last flushed content or something written later;
//! - after the death of the process alone every sector holds its last answered content or something in flight.

mod beneath;
mod changes;
mod exhaustive;
mod foreign;
mod grow;
mod late;
mod limits;
mod logged;
mod mirror;
mod model;
mod pages;
mod remote;
mod rig;
mod room;
mod space;
mod story;
mod taps;
mod threads;

use rig::RigKind;

/// Seeds for each kind of chain in an ordinary test run.
const SEEDS: u64 = 60;

fn seeds() -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match (number("TAPIO_SEED"), number("TAPIO_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, Some(count)) => 0..count,
        (None, None) => 0..SEEDS,
    }
}

fn try_seeds(kind: RigKind) {
    for seed in seeds() {
        if let Err(why) = story::run(kind, seed) {
            panic!("{kind:?} fails with TAPIO_SEED={seed}: {why}");
        }
    }
}

#[test]
fn raw() {
    try_seeds(RigKind::Raw);
}

#[test]
fn fixed() {
    try_seeds(RigKind::Fixed);
}

#[test]
fn dynamic() {
    try_seeds(RigKind::Dynamic);
}

#[test]
fn dynamic_on_a_device() {
    try_seeds(RigKind::Device);
}

#[test]
fn chain_of_two() {
    try_seeds(RigKind::Two);
}

#[test]
fn chain_of_three() {
    try_seeds(RigKind::Three);
}

#[test]
fn child_of_a_raw_image() {
    try_seeds(RigKind::OnRaw);
}

#[test]
fn child_of_a_remote_export() {
    try_seeds(RigKind::OnRemote);
}

#[test]
fn child_on_a_device() {
    try_seeds(RigKind::DeviceOnFile);
}

/// Clients of sectors of 512 bytes on a disk with sectors of 4096.
#[test]
fn on_long_sectors() {
    RigKind::LONG.into_iter().for_each(try_seeds);
}

#[test]
fn a_log_of_changed_blocks_is_right_after_a_close_and_known_after_a_death() {
    for seed in seeds() {
        taps::logged(seed).unwrap_or_else(|why| panic!("fails with TAPIO_SEED={seed}: {why}"));
    }
}

#[test]
fn a_log_of_changed_blocks_never_lacks_one_whenever_the_power_goes_or_the_process_dies() {
    for kind in [RigKind::Dynamic, RigKind::Two] {
        logged::at_every_change(kind).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

#[test]
fn no_log_lacks_a_block_of_its_leaf_when_both_are_swapped_and_something_dies() {
    for kind in [RigKind::Dynamic, RigKind::Two] {
        logged::swapped_at_every_change(kind).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

#[test]
fn each_log_has_the_blocks_of_its_leaf_when_both_are_swapped_under_load() {
    for seed in seeds() {
        logged::swapped_under_load(seed).unwrap_or_else(|why| panic!("fails with TAPIO_SEED={seed}: {why}"));
    }
}

#[test]
fn a_mirror_fills_an_empty_image_in_the_order_of_the_disk() {
    for seed in seeds() {
        mirror::in_order(seed).unwrap_or_else(|why| panic!("fails with TAPIO_SEED={seed}: {why}"));
    }
}

#[test]
fn logs_that_do_not_fit_are_refused() {
    taps::refused().unwrap_or_else(|why| panic!("{why}"));
}

#[test]
fn a_standby_takes_over_from_a_full_leaf() {
    for seed in seeds() {
        taps::standby(seed, None).unwrap_or_else(|why| panic!("fails with TAPIO_SEED={seed}: {why}"));
    }
}

#[test]
fn a_standby_that_took_over_is_found_again_whenever_the_power_goes_or_the_process_dies() {
    for seed in seeds().take(24) {
        let found = taps::standby_at_every_change(seed);
        found.unwrap_or_else(|why| panic!("fails with TAPIO_SEED={seed}: {why}"));
    }
}

fn try_mirror(fate: mirror::Fate) {
    // Each takes some ten times as long as a seed of the others.
    for seed in seeds().take(60) {
        if let Err(why) = mirror::run(fate, seed, None) {
            panic!("{fate:?} fails with TAPIO_SEED={seed}: {why}");
        }
    }
}

#[test]
fn mirror_and_switch_over() {
    try_mirror(mirror::Fate::Pivot);
}

#[test]
fn mirror_whose_first_side_fails() {
    try_mirror(mirror::Fate::NearFails);
}

#[test]
fn mirror_and_a_power_cut_at_the_switch_over() {
    try_mirror(mirror::Fate::CutAtPivot);
}

#[test]
fn mirror_whose_second_side_fails() {
    try_mirror(mirror::Fate::Loss(tapio_ring::sim::Broken::Failing));
}

#[test]
fn mirror_whose_second_side_is_stuck() {
    try_mirror(mirror::Fate::Loss(tapio_ring::sim::Broken::Stuck));
}

#[test]
fn mirror_cancelled_or_paused() {
    try_mirror(mirror::Fate::Cancel);
    try_mirror(mirror::Fate::Pause);
}

#[test]
fn mirror_and_the_death_of_the_process() {
    try_mirror(mirror::Fate::Kill);
}

#[test]
fn mirror_and_a_power_cut() {
    try_mirror(mirror::Fate::PowerCut);
}

/// Everything that can happen to a mirror, at every one of its first steps.
#[test]
fn mirror_at_every_step() {
    for fate in mirror::Fate::ALL {
        for step in 0..mirror::STEPS {
            if let Err(why) = mirror::run(fate, 1, Some(step + 1)) {
                panic!("{fate:?} at step {step} fails: {why}");
            }
        }
    }
}

/// What a flush promises on a leaf whose server is lost and restarted.
#[test]
fn a_flush_on_a_remote_leaf_promises_what_it_says_or_fails() {
    for seed in seeds() {
        remote::run(seed).unwrap_or_else(|why| panic!("fails with TAPIO_SEED={seed}: {why}"));
    }
}

#[test]
fn encrypted() {
    try_seeds(RigKind::Encrypted);
}

#[test]
fn encrypted_child_of_a_plain_image() {
    try_seeds(RigKind::EncryptedOnPlain);
}

/// What was promised to be zero stays so, although a discard took its block away meanwhile and the process died.
#[test]
fn zeroes_stay_whatever_a_discard_beside_them_gives_back() {
    let plain = [RigKind::Raw, RigKind::Dynamic, RigKind::Device, RigKind::Encrypted];
    for kind in plain.into_iter().chain([RigKind::LongRaw, RigKind::LongDynamic, RigKind::LongDevice]) {
        for seed in seeds().take(20) {
            beneath::run(kind, seed)
                .unwrap_or_else(|why| panic!("{kind:?} fails with TAPIO_SEED={seed}: {why}"));
        }
    }
}

/// A disk that grows is as it was or as it will be, whatever happens.
#[test]
fn a_disk_grows_at_every_write_boundary() {
    let plain = [RigKind::Raw, RigKind::Dynamic, RigKind::Device, RigKind::Two, RigKind::Encrypted];
    for kind in plain.into_iter().chain([RigKind::LongRaw, RigKind::LongDynamic, RigKind::LongDevice]) {
        grow::run(kind).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

/// Writes to new blocks wait for the storage's flush only where there is no space yet.
#[test]
fn writes_to_new_blocks_find_space_in_time() {
    for kind in [RigKind::Dynamic, RigKind::Two, RigKind::Encrypted] {
        space::new_blocks(kind).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

/// Writes that leave records wait for the rest of one batch of metadata where they come too fast.
#[test]
fn writes_to_new_sectors_wait_for_one_batch_at_most() {
    for kind in [RigKind::Two, RigKind::Encrypted] {
        space::new_sectors(kind).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

/// Space for new blocks is made ahead and given back, whatever happens meanwhile.
#[test]
fn space_is_made_and_given_back_at_every_write_boundary() {
    for kind in [RigKind::Dynamic, RigKind::Two, RigKind::Encrypted] {
        space::made_and_given_back(kind).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

/// Every sequence of a few operations on a disk of a few sectors, with every end.
#[test]
fn all_short_histories() {
    exhaustive::run();
}

/// A request that is stuck in the kernel holds up itself and no other request.
#[test]
fn a_stuck_request_holds_up_no_other() {
    for kind in RigKind::ALL {
        story::stuck(kind).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

/// A request that the storage holds longer than it may is answered, and does no harm when it ends at last.
#[test]
fn a_request_that_takes_too_long_is_answered() {
    for kind in RigKind::ALL {
        late::told(kind).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

/// One that the kernel can give up fails at its time, and leaves nothing behind.
#[test]
fn a_request_that_can_be_cancelled_is() {
    for kind in RigKind::ALL {
        late::cancelled(kind).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

#[test]
fn a_change_that_waits_in_vain_names_the_request() {
    late::named().unwrap_or_else(|why| panic!("{why}"));
}

/// A short fixed story with EIO at every single operation that it makes, once and for a while.
#[test]
fn eio_at_every_operation_loses_nothing_that_was_flushed() {
    for kind in RigKind::all() {
        let operations = story::count_operations(kind, 1).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
        for before in 0..operations {
            for count in [1, 3, 40] {
                if let Err(why) = story::eio_at(kind, 1, before, count) {
                    panic!("{kind:?} with EIO for {count} operations after {before} of {operations}: {why}");
                }
            }
        }
    }
}

/// A short fixed story with the power cut at every single change that it makes.
#[test]
fn power_cut_at_every_write_boundary() {
    for kind in RigKind::all() {
        let changes = story::count_changes(kind, 1).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
        for cut in 1..=changes {
            // Several draws of what survives each cut.
            for draw in 0..4 {
                if let Err(why) = story::cut_at(kind, 1 + draw, cut) {
                    panic!("{kind:?} with the power cut at change {cut} of {changes}, draw {draw}: {why}");
                }
            }
        }
    }
}

/// Snapshots and commits while clients work, with every end.
fn try_changes(kind: RigKind) {
    for seed in seeds() {
        if let Err(why) = changes::run(kind, seed) {
            panic!("{kind:?} fails with TAPIO_SEED={seed}: {why}");
        }
    }
}

#[test]
fn chains_change_on_a_dynamic_disk() {
    try_changes(RigKind::Dynamic);
}

#[test]
fn chains_change_on_long_sectors() {
    for kind in [RigKind::LongTwo, RigKind::LongDevice] {
        try_changes(kind);
    }
}

#[test]
fn chains_change_on_a_chain_of_two() {
    try_changes(RigKind::Two);
}

#[test]
fn chains_change_on_a_raw_base() {
    try_changes(RigKind::OnRaw);
}

#[test]
fn chains_change_on_a_fixed_base() {
    try_changes(RigKind::Fixed);
}

#[test]
fn chains_change_on_a_device() {
    try_changes(RigKind::Device);
}

/// A short story of a snapshot and a commit with the power cut, and the process killed, at every change it makes.
#[test]
fn a_change_of_the_chain_survives_at_every_write_boundary() {
    for kind in [RigKind::Two, RigKind::OnRaw, RigKind::LongTwo] {
        changes::at_every_change(kind, changes::INNER, 3).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

/// The same for snapshots by which images change their names, and for commits of what they left.
#[test]
fn a_swap_of_the_leaf_survives_at_every_write_boundary() {
    for (kind, left) in [(RigKind::Dynamic, 1), (RigKind::Two, 2), (RigKind::OnRaw, 2)] {
        changes::at_every_change(kind, changes::SWAPS, left).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

/// The same while storages fail for a while.
#[test]
fn a_swap_of_the_leaf_survives_eio_at_every_operation() {
    changes::eio_at_every_operation(RigKind::Two, changes::SWAPS).unwrap_or_else(|why| panic!("{why}"));
}

/// The same for commits of the leaf.
#[test]
fn a_commit_of_the_leaf_survives_at_every_write_boundary() {
    for kind in [RigKind::Two, RigKind::OnRaw, RigKind::DeviceOnFile, RigKind::LongDeviceOnFile] {
        changes::at_every_change(kind, changes::LEAF, 1).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

/// A commit of the leaf whose storages fail for a while.
#[test]
fn a_commit_of_the_leaf_survives_eio_at_every_operation() {
    for kind in [RigKind::Two, RigKind::OnRaw] {
        changes::eio_at_every_operation(kind, changes::LEAF).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    }
}

/// Two hosts whose processes are killed have an image in turn; each has intent logs of its own.
#[test]
fn a_log_of_another_host_is_not_believed() {
    for kind in [RigKind::Dynamic, RigKind::Device, RigKind::Two, RigKind::Encrypted] {
        for seed in seeds() {
            foreign::run(kind, seed, false)
                .unwrap_or_else(|why| panic!("{kind:?} fails with TAPIO_SEED={seed}: {why}"));
        }
    }
}

/// The same, and a program that knows nothing of intent logs writes the image between two processes.
#[test]
fn a_log_from_before_a_foreign_writer_is_not_believed() {
    for kind in [RigKind::Dynamic, RigKind::Device] {
        for seed in seeds() {
            foreign::run(kind, seed, true)
                .unwrap_or_else(|why| panic!("{kind:?} fails with TAPIO_SEED={seed}: {why}"));
        }
    }
}

#[test]
fn a_device_becomes_longer_before_a_writer_has_to_wait() {
    room::in_time().unwrap_or_else(|why| panic!("{why}"));
    room::nothing_to_ask().unwrap_or_else(|why| panic!("{why}"));
}

#[test]
fn writes_wait_for_the_owner_of_a_device_that_is_too_short() {
    for tells in [true, false] {
        room::no_owner(tells).unwrap_or_else(|why| panic!("told: {tells}: {why}"));
    }
}

#[test]
fn a_device_that_becomes_longer_loses_nothing_at_any_write_boundary() {
    room::killed().unwrap_or_else(|why| panic!("{why}"));
}

#[test]
fn a_device_that_becomes_shorter_loses_nothing_at_any_write_boundary() {
    room::shortened().unwrap_or_else(|why| panic!("{why}"));
}
