//! Whether the volume of a disk has become longer, and its end before it becomes shorter.

use tapio_control::command::{Call, Handle, LookForRoom, Shorten};
use tapio_control::{Result, RoomReport};

use crate::host::Host;
use crate::limits::REPLY_TIMEOUT;
use crate::table::Table;

impl Handle<LookForRoom> for Table<Host> {
    fn handle(&self, command: LookForRoom, _: &mut Call<'_>) -> Result<Option<RoomReport>> {
        let disk = self.opened(command.minor)?;
        if disk.room.report().is_some() {
            // A disk that is paused looks when it goes on.
            let looked = disk
                .order(REPLY_TIMEOUT, |data_thread| async move { data_thread.core().look_for_room().await });
            if let Err(error) = looked
                && self.running(command.minor).is_ok()
            {
                return Err(error);
            }
        }
        Ok(disk.room.report())
    }
}

impl Handle<Shorten> for Table<Host> {
    fn handle(&self, Shorten { minor, from, to }: Shorten, _: &mut Call<'_>) -> Result<()> {
        let disk = self.running(minor)?;
        disk.order(
            REPLY_TIMEOUT,
            move |data_thread| async move { data_thread.core().shorten(from, to).await },
        )
    }
}
