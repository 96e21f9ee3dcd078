//! Operations as plans of small steps.

/// Steps that run and wait.
#[derive(Debug)]
pub struct Plans {}

impl Plans {
    /// So many steps at a time on this host, and so many for one machine.
    pub fn new(_host: usize, _per_vm: usize) -> Self {
        Self {}
    }
}
