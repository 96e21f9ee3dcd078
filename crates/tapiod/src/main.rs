//! The toolstack's daemon.

fn main() {}
