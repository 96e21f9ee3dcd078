//! Writes the seeds of the fuzz targets into `fuzz/corpus`: `cargo run -p tapio-testkit --example seeds`.
//!
//! Files of other names, which were found later, stay.

use std::fs;
use std::io;
use std::path::Path;

use tapio_testkit::fuzz::seeds;

fn main() -> io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../fuzz/corpus");
    let all = seeds::all();
    for seed in &all {
        let dir = corpus.join(seed.target);
        fs::create_dir_all(&dir)?;
        fs::write(dir.join(&seed.name), &seed.bytes)?;
    }
    println!("{} files", all.len());
    Ok(())
}
