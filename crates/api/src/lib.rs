//! The doors to the toolstack.
