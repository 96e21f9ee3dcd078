//! The toolstack as its clients see it: calls by name, with parameters as they come from the wire.

mod calls;
mod events;
mod restart;
mod sessions;
mod tasks;
mod world;
