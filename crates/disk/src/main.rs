//! The disk process: one per plugged disk.
fn main() {}
