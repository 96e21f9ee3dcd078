//! Workers as processes.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use parking_lot::Mutex;

/// Starts workers.
pub trait Launch: Send + Sync + fmt::Debug {
    /// Starts one that calls [`super::serve()`] with this control socket.
    ///
    /// # Errors
    /// It cannot be started.
    fn launch(&self, control: OwnedFd) -> io::Result<Box<dyn Process>>;
}

/// A worker that was started.
pub trait Process: Send + Sync + fmt::Debug {
    /// Its number, for people.
    fn id(&self) -> u32;

    /// Ends it as soon as the kernel lets it end.
    fn kill(&self);

    /// Whether it has ended.
    fn has_ended(&self) -> bool;
}

/// A program that is a worker; its standard input is the control socket.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its file.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

#[derive(Debug)]
struct Running(u32, Mutex<Child>);

impl Launch for Program {
    fn launch(&self, control: OwnedFd) -> io::Result<Box<dyn Process>> {
        let child = Command::new(&self.path)
            .args(&self.arguments)
            .stdin(control)
            .stdout(Stdio::null())
            // A signal from a terminal is for the daemon, which ends in order.
            .process_group(0)
            .spawn()?;
        Ok(Box::new(Running(child.id(), Mutex::new(child))))
    }
}

impl Process for Running {
    fn id(&self) -> u32 {
        self.0
    }

    fn kill(&self) {
        // One that has ended is what was wanted.
        let _ = self.1.lock().kill();
    }

    fn has_ended(&self) -> bool {
        // An error says that there is no such child.
        !matches!(self.1.lock().try_wait(), Ok(None))
    }
}
