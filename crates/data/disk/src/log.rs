//! Messages to an operator: standard error in the foreground, the system's log in the background.

use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};

static TO_SYSLOG: AtomicBool = AtomicBool::new(false);

/// From now on messages go to the system's log.
pub fn use_syslog() {
    TO_SYSLOG.store(true, Ordering::Relaxed);
}

/// Writes one line. Only for changes of state and failures, never for requests.
pub fn line(text: &str) {
    if !TO_SYSLOG.load(Ordering::Relaxed) {
        eprintln!("tapio-disk: {text}");
        return;
    }
    let text = format!("tapio-disk[{}]: {}", std::process::id(), text.replace('\0', " "));
    if let Ok(text) = CString::new(text) {
        // SAFETY: the format takes one string, which ends with NUL and lives across the call.
        unsafe { libc::syslog(libc::LOG_DAEMON | libc::LOG_NOTICE, c"%s".as_ptr(), text.as_ptr()) };
    }
}
