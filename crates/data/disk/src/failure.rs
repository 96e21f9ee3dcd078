//! Failures of the data plane, in the words of the control protocol.

use tapio_block::{DiskFailure, Gone};
use tapio_control::{ControlError, Errno};
use tapio_format::FormatError;

pub fn bad_image(error: &FormatError) -> ControlError {
    ControlError::new(Errno::new(error.errno()), error.to_string())
}

pub fn failure(error: &DiskFailure) -> ControlError {
    match error {
        DiskFailure::Format(error) => bad_image(error),
        DiskFailure::Gone(gone) => unreachable_thread(*gone),
        DiskFailure::Host(_) => ControlError::new(Errno::new(error.errno()), error.to_string()),
    }
}

pub(crate) fn unreachable_thread(gone: Gone) -> ControlError {
    match gone {
        Gone::Ended => ControlError::new(Errno::ESHUTDOWN, gone.to_string()),
        Gone::TimedOut => ControlError::new(Errno::ETIMEDOUT, gone.to_string())
            .next("its storage may be stuck; 'tapio disk stats' shows what is in flight"),
    }
}
