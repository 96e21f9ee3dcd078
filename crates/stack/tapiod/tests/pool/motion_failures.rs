//! Failures while a guest goes to another host of its pool.

use serde_json::{Value, json};

use super::motion::Two;
use super::rig::{Failure, Host};

const EMULATOR: &str = "qemu-system";

fn kill(host: &Host, program: &str, signal: i32) -> usize {
    let all = host.running(program);
    for pid in &all {
        // SAFETY: a process of a host of this test.
        unsafe { libc::kill(*pid, signal) };
    }
    all.len()
}

/// Moves the guest to the second host; the emulator there is stopped, so that the memory stays on its way until
/// `meanwhile` is done.
pub fn stalled(two: &mut Two, vm: &Value, meanwhile: impl FnOnce(&Two, &Value)) -> Result<Value, Failure> {
    two.b.kill();
    two.b.start(&[("TAPIO_STOP_AT", "vm-arrive:made")]);
    two.at_rest();
    let two = &*two;
    // Asked of the receiver, which has it done by the sender.
    let task = two.b.done("Async.VM.pool_migrate", json!([vm, two.at_b, {}]));
    two.b.until("the receiver has made the VM", || two.b.is_stopped());
    assert_eq!(kill(&two.b, EMULATOR, libc::SIGSTOP), 1);
    two.b.signal(libc::SIGCONT);
    two.a.until("its memory is on its way", || {
        let found = two.a.call("task.get_by_name_label", json!(["Memory of a VM"])).unwrap_or_default();
        let is_pending = |task: &Value| two.a.call("task.get_status", json!([task])) == Ok(json!("pending"));
        found.as_array().is_some_and(|all| all.iter().any(is_pending))
    });
    meanwhile(two, &task);
    // It may have ended by now.
    kill(&two.b, EMULATOR, libc::SIGCONT);
    let status = || two.b.call("task.get_status", json!([task])).unwrap_or_default();
    two.b.until("the task has ended", || {
        status().as_str().is_some_and(|status| !matches!(status, "pending" | "cancelling"))
    });
    if status() == json!("success") {
        return Ok(Value::Null);
    }
    let words = two.b.done("task.get_error_info", json!([task]));
    Err(words.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect())
}
