//! Build script of the programs that tests start thousands of times: a debug build is linked to a fixed address, so the
//! loader has no addresses to correct. Under User-mode Linux a start takes a third of the time.

fn main() {
    println!("cargo:rerun-if-changed=../../fixed-address.rs");
    if std::env::var("PROFILE").as_deref() == Ok("debug") {
        println!("cargo:rustc-link-arg-bins=-no-pie");
    }
}
