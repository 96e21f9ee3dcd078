//! The seeded simulator.
