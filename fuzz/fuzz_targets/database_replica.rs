#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tapio_testkit::fuzz::run("database_replica", bytes));
