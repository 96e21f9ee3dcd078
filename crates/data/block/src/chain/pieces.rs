//! Pieces of a request at the storages: one transfer each, from where the walk along the chain has found them.
//!
//! The only piece of a request may wait for its neighbours ([`Transfers::go`](crate::transfers::Transfers::go)).
//! Several are in flight beside each other, and go at once.

use tapio_format::live::{Extent as Mapped, Place};
use tapio_format::{FormatError, FormatErrorKind, Result};
use tapio_ring::{Segments, Storage};
use tapio_types::{SECTOR_LEN, Span};

use super::encrypted::decrypt;
use super::{Chain, Piece, Target};
use crate::meter::Meter;
use crate::transfers::{Way, in_pieces};

impl<S: Storage> Chain<S> {
    /// Reads a request's only piece.
    pub(super) async fn read_piece(
        &self,
        target: Target,
        at: u64,
        into: Segments,
        meter: &Meter,
    ) -> Result<()> {
        let Target::Data { layer, offset } = target else {
            into.fill_zero();
            return Ok(());
        };
        meter.issued(self.tasks.turn_ns());
        let result = self.transfers.go(self.links[layer].layer.store(), Way::Read, offset, into).await;
        self.has_read((layer, offset), at, into, result, meter)
    }

    /// Reads one of several pieces that are in flight beside each other.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn keeps its arguments twice, and a request has several"
    )]
    pub(super) fn read_beside(
        &self,
        target: Target,
        at: u64,
        into: Segments,
        meter: &Meter,
    ) -> impl Future<Output = Result<()>> {
        async move {
            let Target::Data { layer, offset } = target else {
                into.fill_zero();
                return Ok(());
            };
            let store = self.links[layer].layer.store();
            meter.issued(self.tasks.turn_ns());
            let result = match self.transfers.split_of(into.len()) {
                None => store.read(offset, into).await,
                Some(size) => Box::pin(in_pieces(store, Way::Read, (offset, into), size)).await,
            };
            self.has_read((layer, offset), at, into, result, meter)
        }
    }

    fn has_read(
        &self,
        (layer, offset): (usize, u64),
        at: u64,
        into: Segments,
        result: std::io::Result<()>,
        meter: &Meter,
    ) -> Result<()> {
        let link = &self.links[layer];
        meter.returned(self.tasks.turn_ns());
        link.count(|counters| match &result {
            Ok(()) => counters.sectors_read += into.len() / SECTOR_LEN,
            Err(_) => counters.reads_failed += 1,
        });
        if let (Ok(()), Some(cipher)) = (&result, link.layer.cipher()) {
            decrypt(cipher, at, into);
        }
        result.map_err(|error| link.failed("cannot read", offset, error))
    }

    /// Writes a request's only piece.
    pub(super) async fn write_piece(
        &self,
        extent: Mapped,
        span: Span,
        what: Piece,
        meter: &Meter,
    ) -> Result<()> {
        let (leaf, offset) = (self.leaf(), place_of(extent)?);
        meter.issued(self.tasks.turn_ns());
        let result = match (leaf.cipher(), what) {
            (None, Piece::Data(from)) => self.transfers.go(leaf.store(), Way::Write, offset, from).await,
            (None, Piece::Zero(how)) => {
                self.transfers.pass().await;
                leaf.store().zero(Span::new(offset, span.len), how).await
            }
            (Some(cipher), what) => {
                let place = (span, offset);
                Box::pin(async {
                    self.transfers.pass().await;
                    self.buffers.write(leaf, cipher, &self.tasks, place, what).await
                })
                .await
            }
        };
        if self.has_written(span, offset, result, meter)? { leaf.settle().await } else { Ok(()) }
    }

    /// Writes one of several pieces that are in flight beside each other.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn keeps its arguments twice, and a request has several"
    )]
    pub(super) fn write_beside(
        &self,
        extent: Mapped,
        span: Span,
        from: Segments,
        meter: &Meter,
    ) -> impl Future<Output = Result<()>> {
        async move {
            let (leaf, offset) = (self.leaf(), place_of(extent)?);
            meter.issued(self.tasks.turn_ns());
            let result = match (leaf.cipher(), self.transfers.split_of(from.len())) {
                (None, None) => leaf.store().write(offset, from).await,
                (None, Some(size)) => {
                    Box::pin(in_pieces(leaf.store(), Way::Write, (offset, from), size)).await
                }
                (Some(cipher), _) => {
                    let (place, what) = ((span, offset), Piece::Data(from));
                    Box::pin(self.buffers.write(leaf, cipher, &self.tasks, place, what)).await
                }
            };
            if self.has_written(span, offset, result, meter)? { leaf.settle().await } else { Ok(()) }
        }
    }

    /// Whether the leaf has to settle it.
    fn has_written(
        &self,
        span: Span,
        offset: u64,
        result: std::io::Result<()>,
        meter: &Meter,
    ) -> Result<bool> {
        let leaf = self.leaf();
        meter.returned(self.tasks.turn_ns());
        match result {
            Ok(()) => {
                self.links[0].count(|counters| counters.sectors_written += span.len / SECTOR_LEN);
                Ok(leaf.written(span, offset))
            }
            Err(error) => {
                self.links[0].count(|counters| counters.writes_failed += 1);
                leaf.not_written(span);
                Err(self.links[0].failed("cannot write", offset, error))
            }
        }
    }
}

/// Where the leaf has room for a write.
fn place_of(extent: Mapped) -> Result<u64> {
    match extent.place {
        Place::Data { offset } => Ok(offset),
        _ => Err(FormatError::new(FormatErrorKind::Corrupt, "a layer gave no place for a write")),
    }
}
