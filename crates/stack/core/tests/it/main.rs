//! The toolstack as its clients see it: calls by name, with parameters as they come from the wire.

mod backup;
mod calls;
mod db;
mod events;
mod listeners;
mod restart;
mod revoked;
mod rights;
mod sessions;
mod tasks;
mod world;
