//! Commands to the driver. Each runs [aside](crate::device::aside): some wait for requests that this process answers.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use tapio_ring::uring::CommandRing;

use super::CONTROL;
use super::uapi::{Control, INFO_LEN, Info, PARAMS_LEN, control};
use crate::device::aside::Aside;

/// How long the driver may take for anything but stopping a device: starting one reads its partition table.
const COMMAND_MAX: Duration = Duration::from_secs(30);

/// The driver behind [`CONTROL`].
pub(super) struct Driver;

fn begin(operation: u32, command: Control, data: Vec<u8>) -> io::Result<Aside<Vec<u8>>> {
    Aside::start(move || {
        let device = OpenOptions::new().read(true).write(true).open(CONTROL)?;
        let ring = CommandRing::new()?;
        let command = Control { len: data.len() as u16, ..command };
        let make =
            |address| Control { address: if command.len > 0 { address } else { 0 }, ..command }.bytes();
        let (_, _, data) =
            ring.run(device.as_raw_fd(), operation, data.into_boxed_slice(), make, COMMAND_MAX)?;
        Ok(data.into_vec())
    })
}

fn run(operation: u32, command: Control, data: Vec<u8>) -> io::Result<Vec<u8>> {
    match begin(operation, command, data)?.wait(COMMAND_MAX) {
        Some(result) => result,
        None => Err(io::ErrorKind::TimedOut.into()),
    }
}

fn of(device: u32) -> Control {
    Control { device, ..Control::default() }
}

fn with_value(device: u32, value: u64) -> Control {
    Control { device, value, ..Control::default() }
}

fn own_pid() -> u64 {
    u64::from(std::process::id())
}

impl Driver {
    /// What the driver can do.
    pub(super) fn features() -> io::Result<u64> {
        let answer = run(control::GET_FEATURES, of(u32::MAX), vec![0; 8])?;
        Ok(answer.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes)))
    }

    /// Where a device stands.
    pub(super) fn info(device: u32) -> io::Result<Info> {
        let answer = run(control::GET_DEV_INFO, of(device), vec![0; INFO_LEN])?;
        Info::parse(&answer).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Adds a device; gives it as the driver made it.
    pub(super) fn add(info: Info) -> io::Result<Info> {
        let answer = run(control::ADD_DEV, of(info.device), info.bytes().to_vec())?;
        Info::parse(&answer).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    pub(super) fn set_params(device: u32, params: &[u8; PARAMS_LEN]) -> io::Result<()> {
        run(control::SET_PARAMS, of(device), params.to_vec()).map(drop)
    }

    /// Lets the block device appear. Every tag must have fetched.
    pub(super) fn start(device: u32) -> io::Result<()> {
        run(control::START_DEV, with_value(device, own_pid()), Vec::new()).map(drop)
    }

    /// Begins to stop a device: it waits for the requests in flight.
    pub(super) fn stop(device: u32) -> io::Result<Aside<Vec<u8>>> {
        begin(control::STOP_DEV, of(device), Vec::new())
    }

    /// Deletes a device that has stopped. Does not wait for programs that still have its node open.
    pub(super) fn delete(device: u32) -> io::Result<()> {
        run(control::DEL_DEV_ASYNC, of(device), Vec::new()).map(drop)
    }

    /// Begins to take over a device whose process died.
    pub(super) fn recover(device: u32) -> io::Result<()> {
        run(control::START_USER_RECOVERY, of(device), Vec::new()).map(drop)
    }

    /// The device is served again. Every tag must have fetched.
    pub(super) fn recovered(device: u32) -> io::Result<()> {
        run(control::END_USER_RECOVERY, with_value(device, own_pid()), Vec::new()).map(drop)
    }

    /// Changes a device's size, in sectors.
    pub(super) fn resize(device: u32, sectors: u64) -> io::Result<()> {
        run(control::UPDATE_SIZE, with_value(device, sectors), Vec::new()).map(drop)
    }
}
