//! Kill tests.
