//! The double behaves as the hypervisor guarantees.

use super::*;
use crate::domain::{CopyBatch, Direction, Domain, GrantRef, PAGE_LEN, Rights, grant_status};

const US: u32 = 0;

fn world(pages: u32) -> (DoubleVm, Domain) {
    let vm = DoubleVm::new(pages).unwrap();
    let domain = Domain::Double(Guest::of(&vm, 5).unwrap());
    (vm, domain)
}

#[test]
fn a_mapping_shows_the_pages_in_the_order_of_the_grants() {
    let (vm, domain) = world(16);
    for page in 0..16 {
        vm.write(page, 0, &[page as u8; PAGE_LEN]);
    }
    for order in [vec![3, 4, 5], vec![9, 1, 2, 15, 0], vec![7], (0..16).rev().collect(), vec![2, 2, 2]] {
        let grants: Vec<_> = order.iter().map(|page| vm.grant(*page, Rights::Write, US).unwrap()).collect();
        let mapped = domain.map(&grants, Rights::Write).unwrap();
        assert_eq!(mapped.len(), order.len() * PAGE_LEN);
        for (index, page) in order.iter().enumerate() {
            // SAFETY: inside the mapping.
            let (first, last) = unsafe {
                let at = mapped.as_ptr().add(index * PAGE_LEN);
                (at.read_volatile(), at.add(PAGE_LEN - 1).read_volatile())
            };
            assert_eq!((first, last), (*page as u8, *page as u8), "{order:?}");
        }
        // SAFETY: inside the mapping.
        unsafe { mapped.as_ptr().add(100).write_volatile(0xEE) };
        let mut byte = [0];
        vm.read(order[0], 100, &mut byte);
        assert_eq!(byte, [0xEE], "what is written there is the domain's");
        vm.write(order[0], 100, &[order[0] as u8]);
    }
}

#[test]
fn a_grant_in_use_is_not_taken_back() {
    let (vm, domain) = world(64);
    let grants: Vec<_> = (0..40).map(|page| vm.grant(page, Rights::Write, US).unwrap()).collect();
    let (once, twice) =
        (domain.map(&grants, Rights::Write).unwrap(), domain.map(&grants[..2], Rights::Read).unwrap());
    assert_eq!(vm.revoke(grants[0]), Err(RevokeError::InUse(2)));
    assert_eq!(vm.revoke(grants[39]), Err(RevokeError::InUse(1)));
    drop(twice);
    assert_eq!(vm.uses(grants[0]), 1);
    drop(once);
    for grant in &grants {
        assert_eq!(vm.revoke(*grant), Ok(()));
        assert_eq!(vm.revoke(*grant), Err(RevokeError::Unknown));
    }
    assert!(domain.map(&grants[..1], Rights::Read).is_err(), "gone is gone");
}

#[test]
fn what_is_not_granted_is_not_mapped() {
    let (vm, domain) = world(4);
    let good = vm.grant(0, Rights::Write, US).unwrap();
    let for_another = vm.grant(1, Rights::Write, 7).unwrap();
    let read_only = vm.grant(2, Rights::Read, US).unwrap();
    let absent = vm.grant_absent(Rights::Write, US).unwrap();
    for bad in [for_another, read_only, absent, GrantRef(0), GrantRef(7), GrantRef(1000), GrantRef(u32::MAX)]
    {
        let error = domain.map(&[good, bad, good], Rights::Write).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{bad:?}");
        assert_eq!(vm.uses(good), 0, "nothing stays mapped");
    }
    assert!(domain.map(&[], Rights::Write).is_err());
    assert!(domain.map(&[read_only], Rights::Read).is_ok());
}

#[test]
fn a_batch_copies_both_ways_and_names_what_failed() {
    let (vm, domain) = world(8);
    vm.write(0, 512, &[7; 1024]);
    let source = vm.grant(0, Rights::Read, US).unwrap();
    let target = vm.grant(1, Rights::Write, US).unwrap();
    let absent = vm.grant_absent(Rights::Write, US).unwrap();
    let mut ours = vec![0u8; 8192];
    let mut theirs = [9u8; 512];
    let mut batch = CopyBatch::default();
    let (from, to) = (Direction::FromDomain, Direction::ToDomain);
    // SAFETY: all pieces lie inside `ours` and `theirs`, which outlive the copy.
    unsafe {
        batch.push(from, 5, source, 512, ours.as_mut_ptr(), 1024);
        batch.push(to, 5, target, 3584, theirs.as_mut_ptr(), 512);
        batch.push(to, 5, source, 0, theirs.as_mut_ptr(), 512);
        batch.push(from, 5, GrantRef(999), 0, ours.as_mut_ptr(), 512);
        batch.push(from, 6, source, 0, ours.as_mut_ptr(), 512);
        batch.push(from, 5, absent, 0, ours.as_mut_ptr(), 512);
    }
    domain.copy(&mut batch).unwrap();
    let statuses: Vec<_> = (0..batch.len()).map(|index| batch.status(index)).collect();
    assert_eq!(statuses[..2], [Ok(()), Ok(())]);
    assert_eq!(statuses[2], Err(grant_status::GENERAL_ERROR), "read-only");
    assert_eq!(statuses[3], Err(grant_status::BAD_GNTREF));
    assert_eq!(statuses[4], Err(grant_status::BAD_DOMAIN));
    assert_eq!(statuses[5], Err(grant_status::BAD_PAGE));
    assert!(ours[..1024].iter().all(|byte| *byte == 7) && ours[1024..].iter().all(|byte| *byte == 0));
    let mut page = [0; PAGE_LEN];
    vm.read(1, 0, &mut page);
    assert!(page[3584..] == [9; 512] && page[..3584] == [0; 3584]);
    assert_eq!((vm.uses(source), vm.uses(target)), (0, 0));
    vm.read(0, 0, &mut page);
    assert!(page[..512] == [0; 512], "a read-only page was not written");
}

#[test]
fn a_copy_across_the_border_of_a_page_fails_the_batch() {
    let (vm, domain) = world(2);
    let grant = vm.grant(0, Rights::Write, US).unwrap();
    let mut ours = [1u8; 1024];
    let mut batch = CopyBatch::default();
    // SAFETY: inside `ours`, which outlives the copy.
    unsafe {
        batch.push(Direction::ToDomain, 5, grant, 0, ours.as_mut_ptr(), 512);
        batch.push(Direction::ToDomain, 5, grant, 3600, ours.as_mut_ptr(), 512);
    }
    assert_eq!(domain.copy(&mut batch).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    let mut page = [0; PAGE_LEN];
    vm.read(0, 0, &mut page);
    assert_eq!(page, [0; PAGE_LEN], "nothing was copied");
}

#[test]
fn grants_run_out_and_come_back() {
    let vm = DoubleVm::new(1).unwrap();
    let mut grants = Vec::new();
    while let Ok(grant) = vm.grant(0, Rights::Read, US) {
        grants.push(grant);
    }
    assert_eq!(grants.len(), 1024 - 8, "eight are reserved");
    assert!(grants.iter().all(|grant| grant.0 >= 8));
    vm.revoke(grants[500]).unwrap();
    assert_eq!(vm.grant(0, Rights::Read, US).unwrap(), grants[500]);
    assert!(vm.grant(1, Rights::Read, US).is_err(), "a page that is not there");
}

#[test]
fn pages_are_set_aside_once() {
    let vm = DoubleVm::new(10).unwrap();
    assert_eq!(vm.take_pages(4), Some(0));
    assert_eq!(vm.take_pages(7), None);
    assert_eq!(vm.take_pages(6), Some(4));
    assert_eq!(vm.take_pages(1), None);
    assert_eq!(vm.take_pages(u32::MAX), None);
}

#[test]
fn only_the_memfd_of_a_domain_is_a_guest() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    assert!(Guest::from_fd(file.into(), 1).is_err(), "it could shrink below us");
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let file = std::fs::File::from(rustix::fs::memfd_create(c"none", flags).unwrap());
    file.set_len(1 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
    let error = Guest::from_fd(file.into(), 1).unwrap_err().to_string();
    assert!(error.contains("no memory of a double's domain"), "{error}");
}

#[test]
fn wires_wake_the_other_end_once() {
    let (left, right) = Wire::pair().unwrap();
    assert!(!left.take().unwrap() && !right.take().unwrap());
    left.notify().unwrap();
    left.notify().unwrap();
    assert!(!left.take().unwrap(), "one's own notifications are for the other");
    assert!(right.take().unwrap());
    assert!(!right.take().unwrap(), "two that were not taken are one");
    let (ours, theirs) = right.into_fds();
    let right = Wire::from_fds(ours, theirs);
    right.notify().unwrap();
    assert!(left.take().unwrap());
}
