//! The doors to the toolstack.

pub mod base64;
pub mod datetime;
pub mod jsonrpc;
pub mod limits;
pub mod xmlrpc;

#[cfg(test)]
mod testing;
