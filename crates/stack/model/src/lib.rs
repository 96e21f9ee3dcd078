//! The object model of XenAPI as data.
//!
//! One table says everything about a class: its fields, their access, its messages and the roles they need.
//! Records, getters, setters, dispatch, `xe`, events and the reference pages are made from it. This crate knows the
//! shapes and no behaviour.

mod answer;
mod classes;
pub mod columns;
pub mod datetime;
pub mod errors;
pub mod findings;
mod implied;
mod reference;
mod table;
#[cfg(test)]
mod tests;
pub mod thin;
mod transfer;
mod value;
pub mod xml;

pub use answer::{Answer, EVENTS, Large, Part, Shape};
pub use classes::{CLASSES, FOREIGN};
pub use implied::{Implied, ImpliedKind, implied, methods};
pub use reference::reference;
pub use table::{Class, ClassKind, Enum, Field, FieldAccess, Initial, Message, Param, Role, Source, Type};
pub use tapio_types::ApiError;
pub use transfer::{ArchiveCompression, Asked, Begun, ImageFormat, OtherHost, Transfer, TransferPlace};
pub use value::Value;

/// The reference to nothing.
pub const NULL_REF: &str = "OpaqueRef:NULL";

/// The class of this name, in any case as events spell it.
pub fn class(name: &str) -> Option<&'static Class> {
    CLASSES.iter().find(|class| class.name.eq_ignore_ascii_case(name)).copied()
}
