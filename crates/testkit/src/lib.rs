//! Oracles, fault plans and tools for the tests.
