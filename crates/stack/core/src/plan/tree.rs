//! What a plan is.

use std::fmt;

use tapio_model::ApiError;

use super::doing::Doing;
use super::schedule::{Permits, Shape};

/// What a leaf does.
pub type Work = Box<dyn FnOnce(&Doing) -> Result<(), ApiError> + Send>;

/// A tree of steps.
#[derive(Debug)]
pub enum Plan {
    /// One after the other.
    Serial(Vec<Plan>),
    /// All at a time, as far as permits allow.
    Parallel(Vec<Plan>),
    /// Its failure is undone, logged and forgotten.
    BestEffort(Box<Plan>),
    /// A step.
    Leaf(Leaf),
}

/// A step.
pub struct Leaf {
    /// What is done: a verb phrase.
    pub name: &'static str,
    /// To what: `VBD <uuid>`, for people.
    pub subject: String,
    /// The permits that it needs in addition to the host's.
    pub permits: Permits,
    /// Does it; when it fails it leaves nothing behind.
    pub run: Work,
    /// Takes it back.
    pub undo: Option<Work>,
}

impl fmt::Debug for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.name, self.subject)
    }
}

impl Plan {
    /// A step that cannot be taken back, or need not.
    pub fn leaf(
        name: &'static str,
        subject: impl Into<String>,
        permits: Permits,
        run: impl FnOnce(&Doing) -> Result<(), ApiError> + Send + 'static,
    ) -> Self {
        Self::Leaf(Leaf { name, subject: subject.into(), permits, run: Box::new(run), undo: None })
    }

    /// The same step, which `undo` takes back. For anything but a leaf: the same plan.
    #[must_use]
    pub fn undone_by(mut self, undo: impl FnOnce(&Doing) -> Result<(), ApiError> + Send + 'static) -> Self {
        if let Self::Leaf(leaf) = &mut self {
            leaf.undo = Some(Box::new(undo));
        }
        self
    }

    /// The plan, whose failure is no failure.
    #[must_use]
    pub fn best_effort(self) -> Self {
        Self::BestEffort(Box::new(self))
    }

    /// Its shape, and its leaves in the order of the shape.
    pub(super) fn split(self, leaves: &mut Vec<Leaf>) -> Shape {
        match self {
            Self::Serial(parts) => Shape::Serial(parts.into_iter().map(|part| part.split(leaves)).collect()),
            Self::Parallel(parts) => {
                Shape::Parallel(parts.into_iter().map(|part| part.split(leaves)).collect())
            }
            Self::BestEffort(part) => Shape::BestEffort(Box::new(part.split(leaves))),
            Self::Leaf(leaf) => {
                let shape = Shape::Leaf { permits: leaf.permits.clone(), undo: leaf.undo.is_some() };
                leaves.push(leaf);
                shape
            }
        }
    }
}
