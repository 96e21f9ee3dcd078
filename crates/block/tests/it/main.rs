//! A disk on a real ring and real files.

mod on_files;
mod rig;
