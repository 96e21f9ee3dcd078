//! The offline tools on whole images: layout, tolerance, damage, power cuts, random work against a plain model.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod build;
mod codec;
mod crash;
mod damage;
mod interop;
mod layout;
mod model;
mod recorder;
mod resize;
mod tolerance;
