//! SRs on real directories and devices, through the traits alone.

mod basic;
mod changes;
mod support;
