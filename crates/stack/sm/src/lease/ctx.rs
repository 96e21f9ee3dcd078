//! What a driver asks of its caller, with other hosts in view: a disk that another host has open is live, and no
//! step is done once the lease is lost.

use tapio_types::{Access, ApiError};
use uuid::Uuid;

use super::Fence;
use super::end::lost;
use super::member::{Elsewhere, Member};
use crate::errors;
use crate::traits::{ApiSession, Ctx, LiveDisk, Notice, OpenSpec, Shortened, SrStat, VdiInfo};

/// A caller, fenced.
pub(crate) struct Fenced<'a> {
    pub(crate) inner: &'a dyn Ctx,
    pub(crate) member: &'a Member,
}

impl Fenced<'_> {
    fn other(&self, vdi: Uuid) -> Option<Elsewhere> {
        // The SR is being destroyed, and no other host is there.
        if self.member.has_left() {
            return None;
        }
        match self.member.elsewhere(vdi) {
            Ok(found) => found,
            Err(error) => {
                // Not known is not the same as nowhere.
                lost(self.member, &error);
            }
        }
    }
}

impl Ctx for Fenced<'_> {
    fn is_cancelled(&self) -> bool {
        self.inner.is_cancelled()
    }

    fn progress(&self, fraction: f64) {
        self.inner.progress(fraction);
    }

    fn live(&self, vdi: Uuid) -> Option<Box<dyn LiveDisk>> {
        let here = self.inner.live(vdi);
        here.or_else(|| self.other(vdi).map(|other| Box::new(Away(other)) as Box<dyn LiveDisk>))
    }

    fn elsewhere(&self, vdi: Uuid) -> Option<String> {
        self.other(vdi).map(|other| other.text())
    }

    fn is_managed(&self, vdi: Uuid) -> bool {
        self.inner.is_managed(vdi)
    }

    fn notice(&self, vdi: Uuid, notice: Notice, why: &str) {
        self.inner.notice(vdi, notice, why);
    }

    fn step(&self, name: &'static str) {
        self.inner.step(name);
        if self.member.has_left() {
            return;
        }
        // After it: a test may have stopped the process there.
        if let Err(error) = self.member.check() {
            lost(self.member, &error);
        }
    }

    fn holders(&self, vdi: Uuid) -> usize {
        self.inner.holders(vdi)
    }

    fn api(&self, sr: Option<Uuid>) -> Result<Box<dyn ApiSession>, ApiError> {
        self.inner.api(sr)
    }

    fn records(&self, sr: Uuid, vdi: Option<Uuid>) -> Result<Vec<VdiInfo>, ApiError> {
        self.inner.records(sr, vdi)
    }

    fn sizes(&self, sr: Uuid) -> Result<SrStat, ApiError> {
        self.inner.sizes(sr)
    }
}

/// A disk that another host has open: nothing here can do anything with it.
struct Away(Elsewhere);

impl Away {
    fn refused<T>(&self) -> Result<T, ApiError> {
        Err(errors::fail(46, self.0.text()))
    }
}

impl LiveDisk for Away {
    fn pause(&self) -> Result<(), ApiError> {
        self.refused()
    }

    fn resume(&self, _: &OpenSpec) -> Result<(), ApiError> {
        self.refused()
    }

    fn hold(&self, _: bool) -> Result<bool, ApiError> {
        self.refused()
    }

    fn shorten(&self, _: u64, _: u64) -> Result<Shortened, ApiError> {
        self.refused()
    }

    fn access(&self) -> Access {
        self.0.access
    }

    fn grow(&self, _: u64) -> Result<(), ApiError> {
        self.refused()
    }
}
