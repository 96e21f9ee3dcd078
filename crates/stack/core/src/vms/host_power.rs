//! This host is shut down or rebooted: its VMs end first, all beside each other and in a bounded time.
//!
//! ```text
//! 1  every guest is asked to end, until it has had its shutdown-timeout or the host's is over
//! 2  those that have not ended, or are busy with something else, are ended by force
//! 3  the disks of each are unplugged by force, all of a VM until one common deadline
//! 4  the program of the setting host-power is run
//! ```
//!
//! What cannot be ended keeps the host from nothing: its log says so, and the program ends it with everything else. A
//! daemon that is killed before 4 finishes what it finds begun at its next start, and the host stays up.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tapio_model::{ApiError, Value};

use super::evacuate::running_vms;
use super::{Call, Handlers, lookup, power};
use crate::args::Args;
use crate::basics::this_host;
use crate::operations::Target;
use crate::progress::Unwatched;

/// How long the guests of a host may take to end, all together, in seconds, where its `other_config:shutdown-timeout`
/// says nothing.
const GUESTS_SECONDS: u64 = 300;
/// VMs that end at a time: each waits in a thread.
const TOGETHER_MAX: usize = 100;
/// How long the program may take. It tells the service manager, and waits for nothing.
const PROGRAM: Duration = Duration::from_secs(60);
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(20);

pub fn register(handlers: &mut Handlers<'_>) {
    handlers.on("host.shutdown", |call, args| end_host(call, args, "shutdown", "-h"));
    handlers.on("host.reboot", |call, args| end_host(call, args, "reboot", "-r"));
}

/// # Errors
/// `HOST_OFFLINE` for another host; `HOST_NOT_DISABLED`; `OPERATION_NOT_ALLOWED` if no program is set, or if it fails:
/// the VMs have ended then; `OTHER_OPERATION_IN_PROGRESS`; `TASK_CANCELLED` before all VMs have ended.
fn end_host(call: &Call, args: &Args, op: &'static str, word: &str) -> Result<Value, ApiError> {
    let host = call.part.db.get("host", args.text(0)?)?;
    if host.reference != this_host(&call.part.db) {
        return Err(ApiError::new("HOST_OFFLINE", [&host.reference]));
    }
    if host.bool("enabled") {
        return Err(ApiError::new::<&str>("HOST_NOT_DISABLED", []));
    }
    let program = call.part.config.host_power.clone().ok_or_else(|| {
        not_allowed("no program ends this host: set host-power of tapiod, as host-power = /sbin/shutdown")
    })?;
    let target = Target { class: "host", reference: &host.reference, op };
    let _held = call.part.operations.enter(&*call.progress, &[target], || Ok(()))?;
    let until = Instant::now() + lookup::seconds(&[&host], "shutdown-timeout", GUESTS_SECONDS);
    // A VM that was being started when the host was disabled is there only now.
    for _ in 0..2 {
        let vms = running_vms(&call.part, &host.reference);
        if vms.is_empty() {
            break;
        }
        end_all(call, &vms, until)?;
    }
    run(&program, word)
        .map_err(|why| not_allowed(&format!("the VMs have ended, and the host has not: {why}")))?;
    tracing::info!(program = %program.display(), word, "this host ends");
    Ok(Value::Void)
}

fn not_allowed(why: &str) -> ApiError {
    ApiError::new("OPERATION_NOT_ALLOWED", [why])
}

/// Ends VMs, each in a thread that waits for its guest.
fn end_all(call: &Call, vms: &[String], until: Instant) -> Result<(), ApiError> {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        let own = call.with(Arc::new(Unwatched::default()));
        while !call.progress.is_cancelled() {
            let Some(vm) = vms.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            if let Err(error) = power::shut_down_until(&own, vm, until) {
                tracing::warn!(%vm, %error, "a VM stays until the host ends");
            }
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            call.progress.set(done as f64 / vms.len() as f64);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..TOGETHER_MAX.min(vms.len()) {
            scope.spawn(work);
        }
    });
    if done.into_inner() < vms.len() {
        return Err(ApiError::new("TASK_CANCELLED", [call.progress.task().unwrap_or_default()]));
    }
    Ok(())
}

/// Runs the program with a word for what shall become of the host.
fn run(program: &Path, word: &str) -> Result<(), String> {
    let told = |error: std::io::Error| format!("{}: {error}", program.display());
    let mut command = Command::new(program);
    command.args([word, "now"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(told)?;
    let until = Instant::now() + PROGRAM;
    loop {
        match child.try_wait().map_err(told)? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("{} {word} now: {status}", program.display())),
            None if Instant::now() >= until => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("{} {word} now: it has not ended within {PROGRAM:?}", program.display()));
            }
            None => std::thread::sleep(LOOK),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_told_and_its_failure_too() {
        assert_eq!(run(Path::new("/bin/true"), "-h"), Ok(()));
        assert!(
            run(Path::new("/bin/false"), "-r").unwrap_err().contains("/bin/false -r now: exit status: 1")
        );
        assert!(run(Path::new("/no/such/program"), "-r").unwrap_err().contains("/no/such/program"));
    }
}
