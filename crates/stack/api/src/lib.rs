//! The servers of the toolstack's API.

pub mod accounts;
pub mod backend;
mod files;
pub mod jsonrpc;
pub mod limits;
pub mod server;
pub mod tls;
pub mod writer;
pub mod xmlrpc;

#[cfg(test)]
mod testing;
