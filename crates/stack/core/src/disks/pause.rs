//! Disks that a client has paused: their images are closed, and the guest's requests wait until it says go on.
//!
//! The pause is in the disk's note, so it outlives the daemon, and ends with the disk. No process takes the place of
//! one that dies meanwhile, and nothing changes the images: they may be what the client looks at.

use std::time::{Duration, Instant};

use tapio_model::ApiError;
use tapio_sm::OpenSpec;
use uuid::Uuid;

use super::busy::{Busy, Why, check_not_paused};
use super::{Disks, Phase, Process, ids, noted};
use crate::plan::steps::step;

/// How long a disk that was not paused in time may take to go on.
const BACK: Duration = Duration::from_secs(30);

impl Disks {
    /// What a client has to name to let the disk go on; none if none has paused it.
    pub fn pause_token(&self, vbd: Uuid) -> Option<String> {
        self.of_vbd(vbd).and_then(|note| note.paused)
    }

    /// Refuses what needs the images of a disk that a client has paused.
    ///
    /// # Errors
    /// `OPERATION_NOT_ALLOWED`.
    pub fn check_not_paused(&self, vbd: Uuid) -> Result<(), ApiError> {
        check_not_paused(&self.0, vbd)
    }

    /// Closes the images of a disk for a client, once the requests in flight have ended; answers the token of the
    /// pause.
    ///
    /// # Errors
    /// `OPERATION_NOT_ALLOWED`: one has paused it. Requests do not end in time: it goes on, or is
    /// paused when they have ended, and the note says so.
    pub fn pause_for_client(&self, vbd: Uuid, until: Instant) -> Result<String, ApiError> {
        let _busy = Busy::begin(&self.0, vbd, Why::Paused, until)?;
        let note = noted(&self.0.lock(), vbd)?;
        if note.phase != Phase::Running {
            return Err(ApiError::new("DEVICE_NOT_ATTACHED", [crate::db::reference_of(vbd)]));
        }
        let (process, minor) = ids(&note)?;
        let token = Uuid::new_v4().to_string();
        // The note comes first: a daemon that is started again ends what is half done.
        self.0.update_of(vbd, process, |note| note.paused = Some(token.clone()))?;
        step("vbd-pause:noted");
        if let Err(error) = self.0.backend.pause(process, minor, until) {
            return Err(self.not_paused_in_time(vbd, (process, minor), note.open_spec(), error));
        }
        step("vbd-pause:paused");
        Ok(token)
    }

    /// Takes back a pause that failed. A disk that still ends its requests stays noted: it is paused when they have
    /// ended.
    fn not_paused_in_time(
        &self,
        vbd: Uuid,
        (process, minor): (Process, u16),
        with: Option<OpenSpec>,
        error: ApiError,
    ) -> ApiError {
        let resume = |with| self.0.backend.resume(process, minor, &with, Instant::now() + BACK);
        let resumed = with.map(resume);
        if self.0.backend.is_alive(process) && !matches!(resumed, Some(Ok(()))) {
            return ApiError::internal(format!(
                "the disk of VBD {vbd} still ends its requests, and is paused when they have ended ({error}); let it \
                 go on with xe vbd-unpause uuid={vbd}"
            ));
        }
        self.0.update(vbd, |note| note.paused = None).err().unwrap_or(error)
    }

    /// Lets a disk that a client paused go on. An empty token stands for whichever the pause has. If its process has
    /// died, another takes its place.
    ///
    /// # Errors
    /// `OPERATION_NOT_ALLOWED`: it is not paused, or with another token. Its images cannot be opened: it stays paused.
    pub fn unpause(&self, vbd: Uuid, token: &str, until: Instant) -> Result<(), ApiError> {
        let _busy = Busy::begin_of_paused(&self.0, vbd, until)?;
        let note = noted(&self.0.lock(), vbd)?;
        let refused = |why: String| Err(ApiError::new("OPERATION_NOT_ALLOWED", [why]));
        match &note.paused {
            None => return refused(format!("the disk of VBD {vbd} is not paused; xe vbd-pause pauses it")),
            Some(known) if !token.is_empty() && token != known => {
                return refused(format!(
                    "the disk of VBD {vbd} was paused with another token than {token}: name the one that VBD.pause \
                     answered, or none"
                ));
            }
            Some(_) => {}
        }
        if let (Ok((process, minor)), Some(with)) = (ids(&note), note.open_spec()) {
            // One that a killed daemon had only noted, or had let go on, is paused first.
            let paused = self.0.backend.pause(process, minor, until);
            let resumed = paused.and_then(|()| self.0.backend.resume(process, minor, &with, until));
            if let Err(error) = resumed
                && self.0.backend.is_alive(process)
            {
                return Err(error);
            }
        }
        step("vbd-unpause:resumed");
        self.0.update(vbd, |note| note.paused = None)?;
        // A death that came meanwhile is followed now.
        self.look_at_deaths();
        Ok(())
    }

    /// Ends a pause of a client that a killed daemon may have left half done.
    pub(crate) fn stay_paused(&self, vbd: Uuid, until: Instant) {
        let note = self.of_vbd(vbd).filter(|note| note.paused.is_some());
        let Some((process, minor)) = note.and_then(|note| ids(&note).ok()) else { return };
        if let Err(error) = self.0.backend.pause(process, minor, until) {
            tracing::warn!(%vbd, %error, "a disk that a client paused could not be asked to stay so");
        }
    }
}
