//! The documented errors.
