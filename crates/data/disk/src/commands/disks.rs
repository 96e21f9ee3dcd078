//! Disks as wholes: made, opened, paused, closed, looked at.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_control::command::{self, Attach, Call, Close, Detach, Done, FrontAdd, Handle, List};
use tapio_control::command::{Open, Pause, Quit, Resume, Stats};
use tapio_control::{
    ControlError, DiskEntry, DiskInfo, DiskReport, DiskReports, Errno, Front, ImageReport, Key, Result,
    VbdState,
};
use tapio_ring::dropped::dropped;

use crate::table::{
    OpenSpec, Opened, Plane, PlaneDisk, PlaneImage, Table, TapRequest, driver, not_open, word,
};

impl<P: Plane> Handle<List> for Table<P> {
    fn handle(&self, _: List, _: &mut Call<'_>) -> Result<Vec<DiskEntry>> {
        Ok(self.list())
    }
}

impl<P: Plane> Handle<Stats> for Table<P> {
    fn handle(&self, command: Stats, _: &mut Call<'_>) -> Result<DiskReports> {
        match command.minor {
            Some(minor) => Ok(DiskReports::One(Box::new(self.report(minor)?))),
            None => {
                let reports = self.list().into_iter().filter_map(|disk| self.report(disk.minor).ok());
                Ok(DiskReports::All(reports.collect()))
            }
        }
    }
}

impl<P: Plane> Handle<Attach> for Table<P> {
    fn handle(&self, command: Attach, _: &mut Call<'_>) -> Result<Done> {
        self.insert(command.minor, false).map(|()| Done {})
    }
}

impl<P: Plane> Handle<Detach> for Table<P> {
    fn handle(&self, command: Detach, _: &mut Call<'_>) -> Result<Done> {
        let disk = self.disk(command.minor)?;
        if disk.now.lock().open.is_some() {
            return Err(ControlError::new(Errno::EBUSY, format!("disk {} is open", command.minor))
                .next("close it first"));
        }
        self.forget(&disk).map(|()| Done {})
    }
}

impl<P: Plane> Handle<Open> for Table<P> {
    fn handle(&self, command: Open, call: &mut Call<'_>) -> Result<DiskInfo> {
        let limit = command.timeout_s.filter(|s| *s > 0).map(|s| Duration::from_secs(s.into()));
        self.open(&command, call.key.as_ref(), limit)
    }
}

impl<P: Plane> Handle<Close> for Table<P> {
    fn handle(&self, command: Close, call: &mut Call<'_>) -> Result<Done> {
        let disk = self.disk(command.minor)?;
        self.close_disk(&disk, command.force, &|| call.caller.gone()).map(|()| Done {})
    }
}

impl<P: Plane> Handle<Pause> for Table<P> {
    fn handle(&self, command: Pause, call: &mut Call<'_>) -> Result<Done> {
        let disk = self.disk(command.minor)?;
        let plane = disk.opened()?;
        if disk.state() == VbdState::Paused {
            return Ok(Done {});
        }
        disk.now.lock().state = VbdState::Pausing;
        disk.note_moved();
        disk.note_chain(&*plane);
        let paused = plane.pause(&|| call.caller.gone());
        if !disk.now.lock().is_of(&plane) {
            return paused.map(|()| Done {});
        }
        disk.now.lock().state = match &paused {
            Ok(()) => VbdState::Paused,
            // The drain goes on; a later caller sees it end.
            Err(error) if error.errno == Errno::ECANCELED => VbdState::Pausing,
            Err(_) if plane.status().is_ok_and(|status| status.paused) => VbdState::Paused,
            Err(_) => VbdState::Running,
        };
        paused.map(|()| Done {})
    }
}

impl<P: Plane> Handle<Resume> for Table<P> {
    fn handle(&self, command: Resume, _: &mut Call<'_>) -> Result<Done> {
        let Resume { minor, image, secondary, log } = command;
        let disk = self.disk(minor)?;
        // There is a disk, but nothing that could go on.
        let plane = disk.opened().map_err(|error| ControlError { errno: Errno::EINVAL, ..error })?;
        let mut taps = TapRequest::of(secondary.as_deref(), None, log)?;
        match disk.state() {
            VbdState::Paused | VbdState::ResumeFailed => {}
            state => {
                let why = format!("disk {minor} is {}, not paused", word(state));
                return Err(ControlError::new(Errno::EINVAL, why).next("pause it first"));
            }
        }
        // By a commit that came to its end while the disk was being paused.
        disk.note_moved();
        let before = || disk.now.lock().open.as_ref().map(|open| open.image.clone());
        let image = image.or_else(before).ok_or_else(|| not_open(minor))?;
        image.check()?;
        if secondary.is_none() && plane.status().is_ok_and(|status| status.standby_waited) {
            // No command said that the disk is to do without from now on.
            taps.secondary = disk.now.lock().open.as_ref().and_then(|open| open.secondary.clone());
        }
        let resumed = plane.resume(&image, &taps);
        let mut now = disk.now.lock();
        if !now.is_of(&plane) {
            // Closed by force, while its images were being opened.
            return resumed.map(|()| Done {});
        }
        now.state = if resumed.is_ok() { VbdState::Running } else { VbdState::ResumeFailed };
        if resumed.is_ok()
            && let Some(open) = &mut now.open
        {
            open.image = image;
            open.beside = taps.names();
            open.secondary = taps.secondary;
        }
        resumed.map(|()| Done {})
    }
}

impl<P: Plane> Handle<command::DiskInfo> for Table<P> {
    fn handle(&self, command: command::DiskInfo, _: &mut Call<'_>) -> Result<DiskInfo> {
        self.disk_info(command.minor)
    }
}

impl<P: Plane> Handle<Quit> for Table<P> {
    fn handle(&self, command: Quit, call: &mut Call<'_>) -> Result<Done> {
        let mut result = Ok(());
        let deadline = Instant::now() + self.quit_time;
        for disk in self.all() {
            let closed = match self.close_disk(&disk, command.force, &|| Instant::now() >= deadline) {
                Err(error) if error.errno == Errno::ECANCELED => {
                    crate::log::line(&format!("disk {}: {error}; closed by force", disk.minor));
                    self.close_disk(&disk, true, &|| true)
                }
                other => other,
            };
            result = result.and(closed);
            let minor = disk.minor;
            drop(disk);
            result = result.and(self.handle(Detach { minor }, call).map(drop));
        }
        result.map(|()| Done {})
    }
}

impl<P: Plane> Table<P> {
    /// Opens an image chain; `key` and `request_timeout` are what the command says or the command line said.
    ///
    /// # Errors
    /// `EINVAL` without such a disk, `EALREADY` if one is open, or why the chain cannot be opened.
    pub fn open(
        &self,
        command: &Open,
        key: Option<&Key>,
        request_timeout: Option<Duration>,
    ) -> Result<DiskInfo> {
        let minor = command.minor;
        let disk = self.disk(minor).map_err(|error| ControlError { errno: Errno::EINVAL, ..error })?;
        if let Some(open) = &disk.now.lock().open {
            let why = format!("disk {minor} has {} open already", open.image.text());
            return Err(ControlError::new(Errno::EALREADY, why)
                .next("close it first, or pause and unpause onto the other image"));
        }
        // Where a full storage of the disk is announced, if its second image stands by.
        let marker = command.standby.then(|| self.run.enospc_marker(minor));
        let taps = TapRequest::of(command.secondary.as_deref(), marker, command.log.clone())?;
        command.image.check()?;
        let mut stats = self.counters(minor)?;
        stats.set_image(&command.image.text());
        let view = stats.view();
        let spec = OpenSpec { command, request_timeout, taps: &taps, key };
        let plane = Arc::new(self.plane.open(&spec, stats)?);
        let info = plane.info();
        if !self.disk(minor).is_ok_and(|found| Arc::ptr_eq(&found, &disk)) {
            plane.close(true)?;
            return Err(ControlError::new(Errno::ESHUTDOWN, format!("disk {minor} was detached meanwhile")));
        }
        disk.now.lock().open = Some(Opened {
            plane,
            image: command.image.clone(),
            read_only: command.read_only,
            beside: taps.names(),
            secondary: taps.secondary,
            view,
            fronts: Vec::new(),
            published: Vec::new(),
            next_front: 1,
        });
        disk.now.lock().state = VbdState::Running;
        if command.default_nbd {
            let path = self.run.nbd_socket(std::process::id(), minor);
            let front =
                Front::NbdUnix { path, listener: None, export: String::new(), read_only: command.read_only };
            if let Err(error) = self.handle(FrontAdd { minor, front, vbd: None }, &mut Call::of_itself()) {
                // As it was before, or the disk could neither be reached nor opened again.
                self.close_disk(&disk, true, &|| false)?;
                return Err(error);
            }
        }
        Ok(info)
    }

    pub(crate) fn disk_info(&self, minor: u16) -> Result<DiskInfo> {
        let disk = self.disk(minor)?;
        let info = disk.opened()?.info();
        let read_only = disk.now.lock().open.as_ref().is_some_and(|open| open.read_only);
        Ok(if read_only { DiskInfo { info: info.info | DiskInfo::READ_ONLY, ..info } } else { info })
    }

    fn report(&self, minor: u16) -> Result<DiskReport> {
        let disk = self.disk(minor)?;
        let state = disk.state();
        let open = disk
            .now
            .lock()
            .open
            .as_ref()
            .map(|open| (Arc::clone(&open.plane), open.view.clone(), open.beside.clone()));
        let Some((plane, view, beside)) = open else {
            return Ok(DiskReport {
                minor,
                state,
                counters: None,
                in_flight: 0,
                stuck: 0,
                dropped: dropped(),
                requests: Vec::new(),
                images: Vec::new(),
                beside: Vec::new(),
                blkif: Vec::new(),
                room: None,
            });
        };
        let status = plane.status()?;
        let image = |image: PlaneImage| ImageReport {
            image: format!("{}:{}", driver(image.kind).name(), image.path),
            sectors_read: image.hits[0],
            sectors_written: image.hits[1],
        };
        Ok(DiskReport {
            minor,
            state,
            counters: Some(view.snapshot()),
            in_flight: status.in_flight,
            stuck: status.stuck,
            dropped: dropped(),
            requests: status.oldest,
            images: status.images.into_iter().map(image).collect(),
            beside,
            blkif: status.rings,
            room: status.room,
        })
    }
}
