//! A vhost-user front end with one or several queues, each loaded by a thread of its own.

use std::path::Path;

use tapio_front::vhost_user::driver::{Driver, DriverOptions, DriverQueue};
use tapio_load::{Load, LoadReport};

use super::workload::Workload;

/// Descriptors of each virtqueue.
const QUEUE_SIZE: u16 = 128;

/// The front end and its queues, which are stopped by [`Virtqueues::stop`].
#[derive(Debug)]
pub struct Virtqueues {
    driver: Driver,
    queues: Vec<DriverQueue>,
}

impl Virtqueues {
    /// Connects, and starts as many queues as the workload has lanes.
    pub fn start(socket: &Path, workload: &Workload) -> Result<Self, String> {
        let options = DriverOptions {
            queues: workload.lanes,
            queue_size: QUEUE_SIZE,
            depth: u16::try_from(workload.depth).unwrap_or(u16::MAX),
            buffer_len: workload.block_len,
            ..DriverOptions::default()
        };
        let said = |error: std::io::Error| error.to_string();
        let driver = Driver::connect(socket, options).map_err(said)?;
        let queues = (0..workload.lanes).map(|index| driver.start(index)).collect::<Result<_, _>>();
        Ok(Self { queues: queues.map_err(said)?, driver })
    }

    /// Runs a load on each queue at the same time.
    pub fn run(&mut self, load: &Load) -> Result<LoadReport, String> {
        let load = Load { span_len: load.span_len.min(self.driver.capacity()), ..*load };
        if let [queue] = self.queues.as_mut_slice() {
            return load.run(queue).map_err(|error| error.to_string());
        }
        std::thread::scope(|scope| {
            let mut threads = Vec::with_capacity(self.queues.len());
            for (index, queue) in (0u64..).zip(&mut self.queues) {
                let load = Load { seed: load.seed.wrapping_add(index * 0x9e37_79b9), ..load };
                threads.push(scope.spawn(move || load.run(queue)));
            }
            let mut all = LoadReport::default();
            for thread in threads {
                let report = thread.join().map_err(|_| "a load thread panicked".to_owned())?;
                all.add(&report.map_err(|error| error.to_string())?);
            }
            Ok(all)
        })
    }

    /// Stops the queues.
    pub fn stop(self) -> Result<(), String> {
        for index in (0..).take(self.queues.len()) {
            self.driver.stop(index).map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}
