//! What the loop of a data thread asks of those that meet it in shared memory.

/// The calls that [`crate::Executor`] makes around its turns. A front end in shared memory (vhost-user, blkif) lives
/// behind them; one on sockets is made of service tasks and needs none.
pub trait Hooks {
    /// Pull what is new; returns whether anything was.
    fn turn(&mut self) -> bool {
        false
    }
    /// Make completions visible and notify, once for all of them.
    fn publish(&mut self) {}
    /// The kernel was asked, and its completions are collected: their tasks run next.
    fn turned(&mut self) {}
    /// Whether work is waiting: a load or two, called while spinning.
    fn peek(&self) -> bool {
        false
    }
    /// Ask to be woken again; true if work slipped in, so that the loop must look once more before it sleeps.
    fn arm(&mut self) -> bool {
        false
    }
    /// Wake-ups are not needed for now.
    fn disarm(&mut self) {}
    /// The thread has been without work for a second: give back memory that only work needs.
    fn rest(&mut self) {}
}

/// No hooks: everything is a task.
impl Hooks for () {}
