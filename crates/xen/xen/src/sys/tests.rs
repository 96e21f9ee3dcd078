//! What can be said of the devices without a hypervisor; the example `on_xen` tries the rest where there is one.

use std::os::fd::OwnedFd;
use std::path::Path;

use super::grant::CopyArgument;
use super::present::{is_control_domain_below, is_xen_below};
use super::*;
use crate::domain::{CopyBatch, Direction, Domain, GrantRef, Rights};

#[test]
fn requests_have_the_numbers_of_the_kernels_headers() {
    // As the macros of the headers come out.
    assert_eq!(request::MAP_GRANT_REF, 0x0018_4700);
    assert_eq!(request::UNMAP_GRANT_REF, 0x0010_4701);
    assert_eq!(request::SET_MAX_GRANTS, 0x0004_4703);
    assert_eq!(request::SET_UNMAP_NOTIFY, 0x0010_4707);
    assert_eq!(request::GRANT_COPY, 0x0010_4708);
    assert_eq!(request::ALLOC_GREF, 0x0018_4705);
    assert_eq!(request::DEALLOC_GREF, 0x0010_4706);
    assert_eq!(request::BIND_INTERDOMAIN, 0x0008_4501);
    assert_eq!(request::BIND_UNBOUND_PORT, 0x0004_4502);
    assert_eq!(request::UNBIND, 0x0004_4503);
    assert_eq!(request::NOTIFY, 0x0004_4504);
    assert_eq!(request::RESET, 0x0000_4505);
    assert_eq!(request::RESTRICT_DOMID, 0x0002_4506);
}

#[test]
fn a_copy_lies_as_the_kernel_reads_it() {
    assert_eq!((size_of::<CopySegment>(), align_of::<CopySegment>()), (24, 8));
    assert_eq!(size_of::<CopyArgument>(), 16);
    let local = 0x7000_1234_5678 as *mut u8;
    let bytes = |segment: CopySegment| -> Vec<u8> {
        // SAFETY: the first 22 bytes have no gaps.
        unsafe { std::slice::from_raw_parts((&raw const segment).cast::<u8>(), 22) }.to_vec()
    };
    let address = 0x7000_1234_5678u64.to_le_bytes().to_vec();
    let foreign = vec![0x44, 0x33, 0x22, 0x11, 0x00, 0x0e, 0x05, 0x00];
    let (grant, offset) = (GrantRef(0x1122_3344), 0x0e00);
    let from = CopySegment::new(Direction::FromDomain, 5, grant, offset, local, 512);
    assert_eq!(bytes(from), [foreign.clone(), address.clone(), vec![0, 2, 1, 0, 0, 0]].concat());
    assert_eq!(from.parts(), (Direction::FromDomain, 5, grant, offset, local));
    let to = CopySegment::new(Direction::ToDomain, 5, grant, offset, local, 512);
    assert_eq!(bytes(to), [address, foreign, vec![0, 2, 2, 0, 0, 0]].concat());
    assert_eq!(to.parts(), (Direction::ToDomain, 5, grant, offset, local));
    assert!(to.is_well_formed());
    assert!(!CopySegment::new(Direction::ToDomain, 5, grant, offset, local, 513).is_well_formed());
}

fn no_device() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

#[test]
fn a_descriptor_of_something_else_fails_and_does_no_harm() {
    let device = GrantDevice::from_fd(no_device(), 3);
    assert!(!device.set_max_grants(10).unwrap(), "no such request, as with a new kernel");
    let domain = Domain::Xen(device);
    assert_eq!(domain.id(), 3);
    for count in [1, 32, 33, 4096] {
        let error = domain.map(&vec![GrantRef(8); count], Rights::Write).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
    assert_eq!(domain.map(&[], Rights::Read).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    let mut batch = CopyBatch::default();
    domain.copy(&mut batch).unwrap();
    let mut byte = 0u8;
    // SAFETY: the byte outlives the call.
    unsafe { batch.push(Direction::FromDomain, 3, GrantRef(8), 0, &raw mut byte, 1) };
    assert_eq!(domain.copy(&mut batch).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    let error = EventDevice::bind_on(no_device(), 3, 14).unwrap_err().to_string();
    assert!(error.contains("event channel 14 of domain 3") && error.contains("alive"), "{error}");
    let channel = EventDevice::from_fd(no_device(), 14);
    assert!(channel.notify().is_err() && channel.restrict(3).is_err());
    assert!(!channel.take().unwrap(), "nothing to read is no event");
}

#[test]
fn where_there_is_no_xen_the_error_says_so() {
    if is_xen() {
        assert!(GrantDevice::open(0).is_ok() && EventDevice::open_device().is_ok());
        return;
    }
    let errors = [
        GrantDevice::open(1).unwrap_err(),
        EventDevice::bind(1, 1).unwrap_err(),
        SharedPages::new(0, 1, Rights::Write).unwrap_err(),
    ];
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("/dev/xen/") && text.contains("does not run on Xen"), "{text}");
    }
    assert!(
        SharedPages::new(0, 0, Rights::Write).is_err() && SharedPages::new(0, 1025, Rights::Read).is_err()
    );
}

#[test]
fn the_hypervisor_is_known_by_its_files() {
    let root = tempfile::tempdir().unwrap();
    let put = |path: &str, text: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).unwrap();
        std::fs::write(path, text).unwrap();
    };
    assert!(!is_xen_below(root.path()) && !is_control_domain_below(root.path()));
    put("sys/hypervisor/type", "kvm\n");
    assert!(!is_xen_below(root.path()));
    put("sys/hypervisor/type", "xen\n");
    assert!(is_xen_below(root.path()) && !is_control_domain_below(root.path()));
    put("proc/xen/capabilities", "\n");
    assert!(!is_control_domain_below(root.path()));
    put("proc/xen/capabilities", "control_d\n");
    assert!(is_control_domain_below(root.path()));
}
