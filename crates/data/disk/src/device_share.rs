//! A disk's place among the disks of its device.

use tapio_control::{Result, ShareSpec};
use tapio_stat::ShmRoot;
use tapio_stat::share::{ShareMember, join};
use tapio_types::ChainSpec;

use crate::beneath::Sources;
use crate::failure::unreachable_thread;
use crate::host_disk::HostDisk;
use crate::limits::REPLY_TIMEOUT;
use crate::log;

/// The name of the device that the leaf of a chain is on, or why the disk shares none.
fn device_of(chain: &ChainSpec, spec: ShareSpec) -> std::result::Result<String, String> {
    if spec.off {
        return Err("because that is switched off".into());
    }
    let leaf = chain.layers.first().ok_or("because it has no image")?;
    let beneath = Sources::default().beneath(leaf);
    match &beneath.fair {
        Some(fair) => Err(format!("because the kernel does that: {fair}")),
        None => beneath.name().ok_or_else(|| format!("because the device of {leaf} is not known")),
    }
}

/// A place there.
fn place(device: &str, spec: ShareSpec, minor: u16) -> std::result::Result<ShareMember, String> {
    let joined = join(&ShmRoot::from_env(), &device.parse()?, minor.into());
    let mut member = joined.map_err(|error| format!("because of an error: {error}"))?;
    member.set(spec.weight, spec.latency_us);
    Ok(member)
}

impl HostDisk {
    /// Has the disk share the device of these images, which it has open. That it cannot is no reason not to serve it.
    pub(crate) fn share_device_of(&self, chain: &ChainSpec) -> Result<()> {
        let spec = *self.share.lock();
        let device = device_of(chain, spec);
        let shared = self.ask_status()?.share.map(|share| share.device);
        if shared.is_some() && shared.as_ref() == device.as_ref().ok() {
            return Ok(());
        }
        let member = device.and_then(|device| place(&device, spec, self.minor));
        if let Err(why) = &member {
            // A disk that is switched off, or alone in memory, has nothing to say about it.
            if why.contains("error") {
                log::line(&format!(
                    "disk {} takes what the kernel gives it of its device, {why}",
                    self.minor
                ));
            }
        }
        *self.not_shared.lock() = member.as_ref().err().cloned();
        let member = member.ok();
        if member.is_none() && shared.is_none() {
            return Ok(());
        }
        self.remote
            .call(REPLY_TIMEOUT, move |data_thread| data_thread.core().share_device(member))
            .map_err(unreachable_thread)
    }
}
