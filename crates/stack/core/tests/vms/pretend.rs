//! Disk processes that only seem to be: for scale, and for times that are known.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tapio_control::{DiskInfo, PoolSpec};
use tapio_core::disks::{Backend, Offer, Process, Rights, Tuning};
use tapio_model::ApiError;
use tapio_sm::OpenSpec;
use tapio_stat::VbdId;
use tapio_types::Access;
use tapio_vm::FrontSpec;
use uuid::Uuid;

#[derive(Debug, Default)]
pub struct Pretend {
    /// Images that are being opened, and the most that were at a time.
    opening: AtomicUsize,
    pub most_opening: AtomicUsize,
    /// No images are open before so many were being opened at a time.
    pub together: AtomicUsize,
    /// No process starts while this is set.
    pub fails: AtomicBool,
    /// No process starts while a test holds this.
    pub starting: Mutex<()>,
    /// No disk is paused while a test holds this.
    pub pausing: Mutex<()>,
    /// So many pauses are not over in time: the disk ends its requests, and is paused when it is asked again.
    pub late: AtomicUsize,
    /// Whether the disk that was asked last is at a standstill: it ends its requests, or is paused.
    pub stands: AtomicBool,
    is_paused: AtomicBool,
    next: AtomicI32,
    alive: Mutex<BTreeMap<i32, Uuid>>,
}

impl Backend for Pretend {
    fn start(&self, vbd: Uuid, _: Rights, _: Instant) -> Result<Process, ApiError> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(ApiError::backend(453, "no process starts today", ""));
        }
        drop(self.starting.lock().expect("no panic"));
        // Below zero: no process of the host has such a number.
        let pid = -1 - self.next.fetch_add(1, Ordering::Relaxed);
        self.alive.lock().expect("no panic").insert(pid, vbd);
        Ok(Process { pid, started: 0 })
    }

    fn free_minor(&self, used: &dyn Fn(u16) -> bool) -> Result<u16, ApiError> {
        (0..u16::MAX).find(|minor| !used(*minor)).ok_or_else(|| ApiError::internal("no minor is free"))
    }

    fn open(
        &self,
        _: Process,
        _: u16,
        _: &OpenSpec,
        _: &PoolSpec,
        _: &Tuning,
        _: Instant,
    ) -> Result<DiskInfo, ApiError> {
        let opening = self.opening.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_opening.fetch_max(opening, Ordering::SeqCst);
        let until = Instant::now() + Duration::from_secs(60);
        while self.most_opening.load(Ordering::SeqCst) < self.together.load(Ordering::SeqCst) {
            if Instant::now() > until {
                return Err(ApiError::internal("too few are opened at a time"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // Time for one too many.
        std::thread::sleep(Duration::from_millis(2));
        self.opening.fetch_sub(1, Ordering::SeqCst);
        Ok(DiskInfo { sectors: 8192, sector_size: 512, info: 0 })
    }

    fn offer(
        &self,
        _: Process,
        _: u16,
        front: &FrontSpec,
        _: Access,
        _: Option<VbdId>,
        _: Instant,
    ) -> Result<Offer, ApiError> {
        let node = (*front == FrontSpec::Device).then(|| "/dev/null".into());
        Ok(Offer { id: None, node })
    }

    fn withdraw(&self, _: Process, _: u16, _: &Offer, _: bool, _: Instant) -> Result<(), ApiError> {
        Ok(())
    }

    fn end(&self, process: Process, _: Option<u16>, _: bool, _: Instant) -> Result<(), ApiError> {
        self.alive.lock().expect("no panic").remove(&process.pid);
        Ok(())
    }

    fn pause(&self, _: Process, _: u16, _: Instant) -> Result<(), ApiError> {
        drop(self.pausing.lock().expect("no panic"));
        self.stands.store(true, Ordering::SeqCst);
        let late = self.late.load(Ordering::SeqCst);
        if late > 0 {
            self.late.store(late - 1, Ordering::SeqCst);
            return Err(ApiError::backend(453, "its requests do not end in time", ""));
        }
        self.is_paused.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn resume(&self, _: Process, _: u16, _: &OpenSpec, _: Instant) -> Result<(), ApiError> {
        if !self.is_paused.swap(false, Ordering::SeqCst) {
            return Err(ApiError::backend(453, "the disk is draining, not paused", ""));
        }
        self.stands.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn grow(&self, _: Process, _: u16, _: u64, _: Instant) -> Result<(), ApiError> {
        Ok(())
    }

    fn tune(&self, _: Process, _: u16, _: &Tuning, _: Instant) -> Result<(), ApiError> {
        Ok(())
    }

    fn is_alive(&self, process: Process) -> bool {
        self.alive.lock().expect("no panic").contains_key(&process.pid)
    }

    fn serves(&self, process: Process, _: u16, _: Instant) -> bool {
        self.is_alive(process)
    }

    fn ours(&self) -> Vec<(Process, Uuid)> {
        let alive = self.alive.lock().expect("no panic");
        alive.iter().map(|(pid, vbd)| (Process { pid: *pid, started: 0 }, *vbd)).collect()
    }
}
