//! One command that answers to several names.
fn main() {}
