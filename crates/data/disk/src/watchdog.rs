//! The service manager's watchdog: it hears that the process lives as long as all its disks answer.

use tapio_control::notify;

use crate::host::Host;
use crate::log;
use crate::table::Table;

/// Runs `serve`, with a thread beside it that tells the manager that the disks' threads answer, if it asked for that.
/// A storage that hangs does not keep a thread from answering; a fault of this program does.
pub fn watched<T>(table: &Table<Host>, serve: impl FnOnce() -> T) -> T {
    let Some(interval) = notify::watchdog_interval() else { return serve() };
    std::thread::scope(|scope| {
        let (ended, over) = std::sync::mpsc::sync_channel::<()>(0);
        let beat = move || {
            while over.recv_timeout(interval) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                if table.list().iter().all(|disk| table.stats(disk.minor).is_ok()) {
                    notify::alive();
                }
            }
        };
        let thread = std::thread::Builder::new().name("watchdog".into()).stack_size(128 << 10);
        if let Err(error) = thread.spawn_scoped(scope, beat) {
            log::line(&format!("no thread for the service manager's watchdog: {error}"));
        }
        notify::alive();
        let result = serve();
        drop(ended);
        result
    })
}
