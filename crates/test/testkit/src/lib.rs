//! Fuzz targets and tools for the tests.
//!
//! [`fuzz`] has a function for every parser of foreign bytes: any bytes go in, and nothing may panic, hang, or break
//! a guarantee of the parser. `fuzz/` at the top of the repository lets libFuzzer call them; the test `corpora` calls
//! them with every file of `fuzz/corpus` and with mutations of them.

pub mod fuzz;
