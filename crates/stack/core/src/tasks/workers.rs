//! Threads for calls without a waiting client: started when needed, ended when idle, limited in number.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// A thread without work ends after so long.
const IDLE: Duration = Duration::from_secs(20);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    threads_max: usize,
    jobs_max: usize,
}

/// The threads, and the jobs that wait for one.
#[derive(Clone)]
pub(crate) struct Workers(Arc<Shared>);

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").finish_non_exhaustive()
    }
}

impl Workers {
    /// At most so many threads, and jobs that wait for one.
    pub(crate) fn new(threads_max: usize, jobs_max: usize) -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), work: Condvar::new(), threads_max, jobs_max }))
    }

    /// Runs a job on a thread, as soon as there is one; false when too many wait already, or no thread can be made.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) -> bool {
        let mut state = self.0.state.lock();
        if state.jobs.len() >= self.0.jobs_max {
            return false;
        }
        state.jobs.push_back(Box::new(job));
        if state.jobs.len() > state.idle && state.threads < self.0.threads_max {
            let workers = self.clone();
            let made = std::thread::Builder::new().name("call".to_owned()).spawn(move || workers.work());
            if made.is_ok() {
                state.threads += 1;
            } else if state.threads == 0 {
                state.jobs.pop_back();
                return false;
            }
        }
        drop(state);
        self.0.work.notify_one();
        true
    }

    fn work(&self) {
        let mut state = self.0.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.0.state.lock();
                continue;
            }
            state.idle += 1;
            let wait = self.0.work.wait_for(&mut state, IDLE);
            state.idle -= 1;
            if wait.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier, mpsc};

    use super::Workers;

    #[test]
    fn so_many_run_and_so_many_wait() {
        let workers = Workers::new(3, 5);
        let gate = Arc::new(Barrier::new(4));
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (done, all_done) = mpsc::channel();
        for _ in 0..3 {
            let (gate, running, most, done) = (gate.clone(), running.clone(), most.clone(), done.clone());
            assert!(workers.run(move || {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                gate.wait();
                running.fetch_sub(1, Ordering::SeqCst);
                done.send(()).expect("the test listens");
            }));
        }
        while running.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        for _ in 0..5 {
            let (running, most, done) = (running.clone(), most.clone(), done.clone());
            assert!(workers.run(move || {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                running.fetch_sub(1, Ordering::SeqCst);
                done.send(()).expect("the test listens");
            }));
        }
        assert!(!workers.run(|| ()), "a sixth must not wait");
        gate.wait();
        for _ in 0..8 {
            all_done.recv_timeout(std::time::Duration::from_secs(20)).expect("every job runs");
        }
        assert_eq!(most.load(Ordering::SeqCst), 3);
    }
}
