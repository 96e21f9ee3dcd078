//! The toolstack's driver for User-mode Linux.

use std::time::Duration;

use tapio_e2e::guest::Uml;
use tapio_e2e::needs;

use crate::conformance::{Lab, ends, whole_life};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_guest_lives_with_disks_that_come_and_go() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    whole_life(&mut Lab::new("uml", LIMIT, |_| ()));
}

#[test]
fn every_end_of_a_guest_is_told() {
    needs!(Uml::TOOLS[0], Uml::TOOLS[1]);
    ends(&mut Lab::new("uml", LIMIT, |_| ()));
}
