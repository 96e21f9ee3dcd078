//! A disk that a guest uses, as storage drivers see it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_model::ApiError;
use tapio_sm::LiveDisk;
use tapio_types::{Access, ChainSpec, ImageKind, LayerSpec};
use uuid::Uuid;

use super::{Note, Table, ids};

/// How long a guest's requests may take to end.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Live {
    table: Arc<Table>,
    vbd: Uuid,
}

impl Live {
    pub(super) fn new(table: Arc<Table>, note: &Note) -> Self {
        Self { table, vbd: note.spec.vbd }
    }

    fn note(&self) -> Result<Note, ApiError> {
        let gone = || ApiError::internal(format!("the disk of VBD {} was unplugged meanwhile", self.vbd));
        self.table.lock().get(&self.vbd).cloned().ok_or_else(gone)
    }

    fn keep(&self, chain: ChainSpec) -> Result<(), ApiError> {
        self.table.update(self.vbd, |note| note.chain = Some(chain)).map(drop)
    }
}

impl LiveDisk for Live {
    fn pause(&self) -> Result<(), ApiError> {
        let (process, minor) = ids(&self.note()?)?;
        self.table.backend.pause(process, minor, Instant::now() + PATIENCE)
    }

    fn resume(&self, chain: &ChainSpec) -> Result<(), ApiError> {
        let (process, minor) = ids(&self.note()?)?;
        self.table.backend.resume(process, minor, chain, Instant::now() + PATIENCE)?;
        self.keep(chain.clone())
    }

    fn put_on_top(&self, leaf: &Path) -> Result<(), ApiError> {
        let note = self.note()?;
        let (process, minor) = ids(&note)?;
        let unknown = || ApiError::internal(format!("the images of VBD {} are not known", self.vbd));
        let before = note.chain.clone().ok_or_else(unknown)?;
        let mut after = before.clone();
        after.layers.insert(0, LayerSpec { kind: ImageKind::Vhd, path: leaf.to_path_buf() });
        let until = Instant::now() + PATIENCE;
        if !leaf.exists() {
            // The process makes it, opens it, and exchanges the leaf between two requests.
            self.table.backend.snapshot(process, minor, leaf, until)?;
            return self.keep(after);
        }
        self.table.backend.pause(process, minor, until)?;
        match self.table.backend.resume(process, minor, &after, until) {
            Ok(()) => self.keep(after),
            Err(error) => {
                self.table.backend.resume(process, minor, &before, until)?;
                Err(error)
            }
        }
    }

    fn access(&self) -> Access {
        let chain = self.note().ok().and_then(|note| note.chain);
        chain.map_or(Access::ReadWrite, |chain| chain.access)
    }

    fn grow(&self, bytes: u64) -> Result<(), ApiError> {
        let (process, minor) = ids(&self.note()?)?;
        self.table.backend.grow(process, minor, bytes, Instant::now() + PATIENCE)?;
        self.table.update(self.vbd, |note| note.size = note.size.max(bytes)).map(drop)
    }
}
