//! A disk that grows while clients are connected.

use std::fs::File;

use tapio_front::nbd::client::{ClientError, Haggle};
use tapio_front::nbd::wire::{command, error};

use super::{Rig, TIMEOUT, pattern};

/// SEND_RESIZE of the experimental extension: the client may ask for another size.
const SEND_RESIZE: u16 = 1 << 9;

#[test]
fn a_new_client_sees_the_new_size_and_an_old_one_can_use_it() {
    let rig = Rig::new(1 << 20);
    let mut client = rig.client();
    assert_eq!(client.export().len, 1 << 20);
    let behind = client.read(1 << 20, 4096);
    assert!(matches!(behind, Err(ClientError::Request { error: error::INVAL, .. })), "{behind:?}");
    File::options().write(true).open(&rig.path).unwrap().set_len(2 << 20).unwrap();
    rig.disk.pause(TIMEOUT).unwrap();
    rig.disk.resume(rig.spec(), TIMEOUT).unwrap();
    // INFO asks without entering.
    let asked = Haggle::begin(&rig.address(), TIMEOUT).unwrap();
    assert_eq!(asked.info("disk").unwrap().len, 2 << 20);
    asked.abort().unwrap();
    // GO.
    let mut newcomer = rig.client();
    assert_eq!(newcomer.export().len, 2 << 20);
    // The client that was connected is not told, for which the protocol has no word, but may go there.
    let bytes = pattern(1, 64 << 10);
    client.write(3 << 19, &bytes, true).unwrap();
    assert!(newcomer.read(3 << 19, 64 << 10).unwrap() == bytes);
    assert_eq!(client.allocation(0, 2 << 20).unwrap().iter().map(|(len, _)| len).sum::<u64>(), 2 << 20);
    // The other direction, a client that wants another size, is an extension that is not offered.
    assert_eq!(newcomer.export().flags & SEND_RESIZE, 0);
    let resize = newcomer.call(command::RESIZE, 0, 0, 4 << 20, &[]).unwrap();
    assert_eq!(resize.error.map(|(number, _)| number), Some(error::INVAL));
}
