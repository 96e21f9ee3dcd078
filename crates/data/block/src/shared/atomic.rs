//! What `gate` and `mailbox` are made of; the model checker puts its own in their place (`tests/loom`).

pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

pub(super) use parking_lot::Mutex;
