//! Moving memory of this process, which belongs to the operation until its end.

use std::future::Future;

use tapio_format::Result;
use tapio_ring::{Memory, MemoryMut, Storage, lend};
use tapio_types::Span;

use super::Chain;
use crate::meter::Meter;

impl<S: Storage> Chain<S> {
    /// [`Chain::read`] into the beginning of `memory`, which comes back with the result.
    pub fn read_into<B: MemoryMut>(
        &self,
        span: Span,
        memory: B,
        meter: &Meter,
    ) -> impl Future<Output = (B, Result<()>)> {
        // SAFETY: a chain hands the memory to its storages alone, and waits for their futures in its own.
        unsafe { lend(memory, 0..span.len as usize, move |into| self.read(span, into, meter)) }
    }

    /// [`Chain::write`] of the beginning of `memory`, which comes back with the result.
    pub fn write_from<B: Memory>(
        &self,
        span: Span,
        memory: B,
        meter: &Meter,
    ) -> impl Future<Output = (B, Result<()>)> {
        // SAFETY: as above.
        unsafe { lend(memory, 0..span.len as usize, move |from| self.write(span, from, meter)) }
    }
}
