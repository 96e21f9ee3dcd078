//! The inputs that every target starts from: one for each thing that a parser knows, small, the same on every host.
//!
//! `cargo run -p tapio-testkit --example seeds` writes them into `fuzz/corpus`.

mod api;
mod blkif;
mod bugreport;
mod database;
mod device;
mod etcd;
mod facts;
mod history;
mod images;
mod log_writes;
mod luns;
mod ova;
mod packed;
mod query;
mod rbd;
mod room;
mod screen;
mod storage;
mod store;
mod talk;
mod thin;
mod xenstore;
mod xenstored;
mod xva;

pub(super) use database::{HOST, whole_dump};
pub use images::dynamic_image;

/// An input of a target.
#[derive(Clone, Debug)]
pub struct Seed {
    /// The target.
    pub target: &'static str,
    /// The file's name.
    pub name: String,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// All of them.
pub fn all() -> Vec<Seed> {
    let mut shelf = Shelf(Vec::new());
    api::put_into(&mut shelf);
    blkif::put_into(&mut shelf);
    bugreport::put_into(&mut shelf);
    device::put_into(&mut shelf);
    etcd::put_into(&mut shelf);
    database::put_into(&mut shelf);
    facts::put_into(&mut shelf);
    images::put_into(&mut shelf);
    ova::put_into(&mut shelf);
    luns::put_into(&mut shelf);
    talk::put_into(&mut shelf);
    thin::put_into(&mut shelf);
    packed::put_into(&mut shelf);
    query::put_into(&mut shelf);
    rbd::put_into(&mut shelf);
    log_writes::put_into(&mut shelf);
    room::put_into(&mut shelf);
    screen::put_into(&mut shelf);
    storage::put_into(&mut shelf);
    store::put_into(&mut shelf);
    xenstored::put_into(&mut shelf);
    xenstore::put_into(&mut shelf);
    xva::put_into(&mut shelf);
    history::put_into(&mut shelf);
    shelf.0
}

struct Shelf(Vec<Seed>);

impl Shelf {
    fn put(&mut self, target: &'static str, name: &str, bytes: impl Into<Vec<u8>>) {
        self.0.push(Seed { target, name: name.into(), bytes: bytes.into() });
    }
}
