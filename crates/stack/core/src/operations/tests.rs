use tapio_fixtures::waiting::Caller;

use super::*;
use crate::progress::Unwatched;

fn enter(operations: &Arc<Operations>, targets: &[Target<'_>]) -> Result<Held, ApiError> {
    operations.enter(&Unwatched::default(), targets, || Ok(()))
}

const fn on_vbd<'a>(reference: &'a str, op: &'static str) -> Target<'a> {
    Target { class: "VBD", reference, op }
}

#[test]
fn what_would_harm_each_other_does_not_run_together() {
    let operations = Arc::default();
    let first =
        enter(&operations, &[on_sr("s", "vdi_snapshot"), on_vdi("a", "snapshot")]).expect("nothing runs");
    let second =
        enter(&operations, &[on_sr("s", "vdi_resize"), on_vdi("a", "resize")]).expect_err("a is busy");
    assert_eq!(second.code, "OTHER_OPERATION_IN_PROGRESS");
    assert_eq!(second.params, ["VDI", "a", "snapshot", first.task()]);
    // Nothing of the refused one is left, and another VDI of the SR is free.
    let other = enter(&operations, &[on_sr("s", "vdi_resize"), on_vdi("b", "resize")]).expect("b is free");
    let unplug = enter(&operations, &[on_sr("s", "unplug")]).expect_err("the SR is busy");
    assert_eq!(unplug.params[..2], ["SR".to_owned(), "s".to_owned()]);
    drop((first, other));
    enter(&operations, &[on_sr("s", "unplug")]).expect("nothing runs any more");
    assert!(operations.table.lock().is_empty());
}

#[test]
fn copies_of_one_vdi_run_together_and_are_seen() {
    let operations = Arc::default();
    let one = enter(&operations, &[on_vdi("a", "copy")]).expect("nothing runs");
    let _two = enter(&operations, &[on_vdi("a", "copy")]).expect("copies only read");
    assert_eq!(operations.current("a").len(), 2);
    one.is_ending();
    assert_eq!(operations.current("a").len(), 1);
    assert!(!operations.could_begin("VDI", "a", "destroy"));
    assert!(operations.could_begin("VDI", "a", "copy"));
}

#[test]
fn a_plug_waits_for_a_snapshot() {
    let operations = Arc::default();
    let snapshot = enter(&operations, &[on_vdi("a", "snapshot")]).expect("nothing runs");
    let caller = Caller::default();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| caller.calls(|| enter(&operations, &[on_vdi("a", ACTIVATE)]).map(drop)));
        caller.until_it_waits();
        drop(snapshot);
        waiting.join().expect("no panic").expect("the snapshot is over");
    });
}

#[test]
fn what_a_check_refuses_holds_nothing() {
    let operations: Arc<Operations> = Arc::default();
    let refused = operations
        .enter(&Unwatched::default(), &[on_vdi("a", "destroy")], || Err(ApiError::bare("VDI_IN_USE")))
        .expect_err("the check refuses");
    assert_eq!(refused.code, "VDI_IN_USE");
    assert!(operations.table.lock().is_empty());
}

#[test]
fn a_vbd_is_held_once_and_can_be_taken_over() {
    let operations = Arc::default();
    let plug = enter(&operations, &[on_vbd("v", "plug")]).expect("nothing runs");
    let second = enter(&operations, &[on_vbd("v", "plug")]).expect_err("it is held");
    assert_eq!(second.params, ["VBD", "v", "plug", plug.task()]);
    assert_eq!(operations.check_free("VBD", "v").expect_err("it is held"), second);
    let (task, claim) = operations.claims("v").remove(0);
    assert_eq!(&*task, plug.task());
    assert!(!claim.take_if_yielding(), "it does not wait for a guest");
    assert!(claim.take() && operations.remove("v", &claim));
    assert!(plug.claim().hold().is_none(), "it changes nothing any more");
    let force = enter(&operations, &[on_vbd("v", "unplug_force")]).expect("the VBD was taken over");
    // The end of the first one gives back nothing of the second.
    assert!(!plug.release());
    drop(plug);
    assert_eq!(operations.check_free("VBD", "v").expect_err("it is held").params[2], "unplug_force");
    drop(force);
    operations.check_free("VBD", "v").expect("nothing holds it");
}

#[test]
fn an_operation_that_has_ended_cannot_be_taken_over() {
    let operations = Arc::default();
    let plug = enter(&operations, &[on_vbd("v", "plug")]).expect("nothing runs");
    let (_, claim) = operations.claims("v").remove(0);
    drop(plug);
    assert!(!claim.take());
}
