use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::channel;

use super::*;
use crate::plan::Permits;
use crate::progress::Unwatched;

struct Task {
    cancelled: AtomicBool,
    fraction: Mutex<f64>,
}

impl Progress for Task {
    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn set(&self, fraction: f64) {
        *self.fraction.lock() = fraction;
    }

    fn task(&self) -> Option<&str> {
        Some("OpaqueRef:task")
    }
}

fn no_listener() -> Arc<dyn Progress> {
    Arc::new(Unwatched::default())
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn of(vm: &str) -> Permits {
    Permits { vm: Some(vm.into()), sr: None }
}

#[test]
fn steps_run_beside_each_other_up_to_the_limits() {
    let plans = Plans::new(8, 3);
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let steps = (0..30).map(|_| {
        let (now, most) = (Arc::clone(&now), Arc::clone(&most));
        Plan::leaf("meet", "VM 1", of("1"), move |_| {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            // The first ones wait for each other: on a busy host, too, so many run at once.
            until("three at once", || most.load(Ordering::SeqCst) >= 3);
            // And time for one too many.
            thread::sleep(Duration::from_millis(2));
            now.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        })
    });
    plans.run("test", Plan::Parallel(steps.collect()), &no_listener()).expect("all steps go well");
    assert_eq!(most.load(Ordering::SeqCst), 3);
}

#[test]
fn many_plans_with_few_permits_end() {
    let plans = Plans::new(3, 1);
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        for plan in 0..20 {
            let (plans, done) = (&plans, &done);
            scope.spawn(move || {
                let steps = (0..10).map(|_| Plan::leaf("work", "", of(&format!("{}", plan % 4)), |_| Ok(())));
                let both = Plan::Serial(vec![Plan::Parallel(steps.collect()), Plan::Parallel(Vec::new())]);
                plans.run("test", both, &no_listener()).expect("it goes well");
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
    });
    assert_eq!(done.load(Ordering::SeqCst), 20);
    assert_eq!(plans.load(), (0, 0));
}

#[test]
fn a_failure_is_answered_after_everything_was_undone() {
    let plans = Plans::new(4, 4);
    let undone = Arc::new(AtomicUsize::new(0));
    let step = |ok: bool| {
        let undone = Arc::clone(&undone);
        Plan::leaf("step", "VBD 1", of("1"), move |_| {
            if ok { Ok(()) } else { Err(ApiError::new("SR_FULL", ["9", "8"])) }
        })
        .undone_by(move |_| {
            undone.fetch_add(1, Ordering::SeqCst);
            Err(ApiError::internal("undoing has its own troubles"))
        })
    };
    let excused =
        Plan::leaf("excused", "", of("1"), |_| Err(ApiError::internal("not this one"))).best_effort();
    let task: Arc<dyn Progress> =
        Arc::new(Task { cancelled: AtomicBool::new(false), fraction: Mutex::new(0.0) });
    let plan = Plan::Serial(vec![excused, step(true), step(true), step(false), step(true)]);
    let error = plans.run("VM.start", plan, &task).expect_err("a step fails");
    assert_eq!(error.code, "SR_FULL");
    assert_eq!(undone.load(Ordering::SeqCst), 2);
    let timeline = plans.timeline("OpaqueRef:task").expect("it is kept");
    let results: Vec<&str> = timeline.steps.iter().map(|step| step.result.as_str()).collect();
    assert_eq!(results, ["failed", "undone", "undone", "failed", "skipped", "failed", "failed"]);
    assert!(timeline.steps[3].error.as_deref().is_some_and(|error| error.contains("SR_FULL")));
    assert_eq!(serde_json::from_str::<Timeline>(&timeline.json()).ok(), Some(timeline));
}

#[test]
fn a_cancelled_task_stops_at_the_next_step() {
    let plans = Plans::new(2, 2);
    let task = Arc::new(Task { cancelled: AtomicBool::new(false), fraction: Mutex::new(0.0) });
    let watched: Arc<dyn Progress> = Arc::clone(&task) as _;
    let wait = |task: &Arc<Task>| {
        let (task, plans) = (Arc::clone(task), plans.clone());
        Plan::leaf("wait", "", of("1"), move |doing| {
            assert!(!doing.is_cancelled());
            task.cancelled.store(true, Ordering::Relaxed);
            assert!(doing.is_cancelled(), "a step sees it at once");
            // The caller that waits for the plan sees it at its next look, and keeps the next step from beginning.
            until("the plan is cancelled", || {
                plans.0.lock().jobs.values().all(|job| job.cancelled.load(Ordering::Relaxed))
            });
            Ok(())
        })
    };
    let never = Plan::leaf("never", "", of("1"), |_| Err(ApiError::internal("it ran")));
    let error = plans.run("test", Plan::Serial(vec![wait(&task), never]), &watched).expect_err("cancelled");
    assert_eq!(error, ApiError::new("TASK_CANCELLED", ["OpaqueRef:task"]));
}

#[test]
fn limits_change_while_plans_run() {
    let plans = Plans::new(1, 1);
    let both = Arc::new(AtomicUsize::new(0));
    let steps = (0..2).map(|_| {
        let both = Arc::clone(&both);
        Plan::leaf("meet", "", of("1"), move |_| {
            both.fetch_add(1, Ordering::SeqCst);
            until("both are there", || both.load(Ordering::SeqCst) == 2);
            Ok(())
        })
    });
    let plan = Plan::Parallel(steps.collect());
    thread::scope(|scope| {
        let run = scope.spawn(|| plans.run("test", plan, &no_listener()));
        until("one runs and one waits", || plans.load() == (1, 1) && both.load(Ordering::SeqCst) == 1);
        plans.set_limits(Limits { host: 2, vm: 2, sr: 2 });
        run.join().expect("no panic").expect("both met");
    });
}

#[test]
fn a_plan_inside_a_step_is_refused_and_a_panic_is_an_error() {
    let plans = Arc::new(Plans::new(1, 1));
    let inner = Arc::clone(&plans);
    let plan = Plan::leaf("nest", "", of("1"), move |_| {
        inner.run("inner", Plan::Serial(Vec::new()), &no_listener())
    });
    let error = plans.run("outer", plan, &no_listener()).expect_err("refused");
    assert!(error.to_string().contains("inside a step"), "{error}");
    let plan = Plan::leaf("panic", "", of("1"), |_| panic!("on purpose"));
    assert_eq!(plans.run("outer", plan, &no_listener()).expect_err("caught").code, "INTERNAL_ERROR");
}

#[test]
fn a_part_of_a_step_runs_beside_it_and_is_in_the_timeline() {
    let plans = Plans::new(1, 1);
    let task: Arc<dyn Progress> =
        Arc::new(Task { cancelled: AtomicBool::new(false), fraction: Mutex::new(0.0) });
    let meet = Plan::leaf("meet", "VBD 1", of("1"), |doing| {
        let ((here, there), (hears, says)) = (channel(), channel());
        let part = move || {
            here.send(()).map_err(|_| ApiError::internal("the test has ended"))?;
            says.recv_timeout(Duration::from_secs(60))
                .map_err(|_| ApiError::internal("the test does not answer"))
        };
        let (part, rest) = doing.alongside("the part", part, || {
            let heard = there.recv_timeout(Duration::from_secs(60));
            hears.send(()).is_ok() && heard.is_ok()
        });
        assert!(rest, "both run at a time");
        part
    })
    .undone_by(|_| Ok(()));
    let fail = Plan::leaf("fail", "VBD 1", of("1"), |doing| {
        let (fine, number) = doing.alongside("fine", || Ok(()), || 7);
        assert_eq!((fine, number), (Ok(()), 7));
        doing.alongside("broken", || panic!("on purpose"), || ()).0
    });
    let error = plans.run("test", Plan::Serial(vec![meet, fail]), &task).expect_err("a part fails");
    assert!(error.to_string().contains("'broken' failed"), "{error}");
    let timeline = plans.timeline("OpaqueRef:task").expect("it is kept");
    let steps: Vec<_> =
        timeline.steps.iter().map(|step| (step.name.as_str(), step.result.as_str())).collect();
    let expected = [
        ("meet", "undone"),
        ("the part", "undone"),
        ("fail", "failed"),
        ("fine", "undone"),
        ("broken", "failed"),
        ("meet", "ok"),
    ];
    assert_eq!(steps, expected);
    assert_eq!(timeline.steps[0].parent, timeline.steps[1].parent);
}
