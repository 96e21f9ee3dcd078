//! How a disk runs: polling, limits, transfers, traces.

use tapio_block::Owner;
use tapio_control::command::{
    Call, Done, Handle, Limits, SetLimits, SetPolling, SetShare, SetTransfers, TraceStart, TraceStop,
};
use tapio_control::{LimitsReport, PoolShare, Result, ShareReport, ShareSpec, TraceReport};

use crate::counter::Counter;
use crate::failure::unreachable_thread;
use crate::host::Host;
use crate::limits::REPLY_TIMEOUT;
use crate::table::Table;

impl Handle<SetPolling> for Table<Host> {
    fn handle(&self, command: SetPolling, _: &mut Call<'_>) -> Result<Done> {
        self.opened(command.minor)?.set_polling(command.polling()).map(|()| Done {})
    }
}

impl Handle<SetLimits> for Table<Host> {
    fn handle(&self, command: SetLimits, _: &mut Call<'_>) -> Result<Done> {
        let set = move |data_thread: &Owner| {
            data_thread.admission().set_limits(&command.limits);
            Counter::refresh(data_thread);
        };
        self.opened(command.minor)?.remote.call(REPLY_TIMEOUT, set).map_err(unreachable_thread)?;
        Ok(Done {})
    }
}

impl Handle<SetShare> for Table<Host> {
    fn handle(&self, command: SetShare, _: &mut Call<'_>) -> Result<Done> {
        let disk = self.opened(command.minor)?;
        let (weight, latency_us) = (command.weight, command.latency_us);
        {
            let mut spec = disk.share.lock();
            *spec = ShareSpec { weight, latency_us, ..*spec };
        }
        let set =
            move |data_thread: &Owner| data_thread.core().with_share(|share| share.set(weight, latency_us));
        disk.remote.call(REPLY_TIMEOUT, set).map_err(unreachable_thread)?;
        Ok(Done {})
    }
}

impl Handle<SetTransfers> for Table<Host> {
    fn handle(&self, command: SetTransfers, _: &mut Call<'_>) -> Result<Done> {
        let set = move |data_thread: &Owner| data_thread.core().set_transfers(command.sizes);
        self.opened(command.minor)?.remote.call(REPLY_TIMEOUT, set).map_err(unreachable_thread)?;
        Ok(Done {})
    }
}

impl Handle<Limits> for Table<Host> {
    fn handle(&self, command: Limits, _: &mut Call<'_>) -> Result<LimitsReport> {
        let disk = self.opened(command.minor)?;
        let status = disk.ask_status()?;
        let spec = *disk.share.lock();
        let share = match status.share {
            Some(share) => ShareReport {
                spec,
                device: share.device,
                not_shared: None,
                disks: share.disks,
                limit: share.limit,
                even_percent: share.even_percent,
                waited: share.waited,
                waited_ns: share.waited_ns,
            },
            None => {
                ShareReport { spec, not_shared: disk.not_shared.lock().clone(), ..ShareReport::default() }
            }
        };
        Ok(LimitsReport {
            limits: status.limits,
            delayed: status.delays.requests,
            delay_ns: status.delays.time_ns,
            waiting: status.delays.waiting,
            pool: status.pool.map(|pool| PoolShare { name: pool.name, pages: pool.pages, held: pool.held }),
            share: Some(share),
            transfers: status.transfers,
        })
    }
}

impl Handle<TraceStart> for Table<Host> {
    fn handle(&self, command: TraceStart, _: &mut Call<'_>) -> Result<TraceReport> {
        let disk = self.opened(command.minor)?;
        disk.trace.start(&disk.remote, &disk.memory, command.minor, command.events)
    }
}

impl Handle<TraceStop> for Table<Host> {
    fn handle(&self, command: TraceStop, _: &mut Call<'_>) -> Result<TraceReport> {
        let disk = self.opened(command.minor)?;
        disk.trace.stop(&disk.remote, command.minor, command.forget)
    }
}
