//! The block ring of a Xen guest, in the words of all crates that deal with it.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a guest's data is moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Movement {
    /// The hypervisor copies it, many pages by one call.
    #[default]
    Copy,
    /// Pages stay mapped; the guest uses the same ones again (`feature-persistent`).
    Persistent,
    /// The pages of each request are mapped and unmapped.
    Map,
    /// As `map`, and the processor copies between them and the process's own memory: what blktap2 did.
    Bounce,
}

impl Movement {
    /// The word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Persistent => "persistent",
            Self::Map => "map",
            Self::Bounce => "bounce",
        }
    }
}

impl FromStr for Movement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Copy, Self::Persistent, Self::Map, Self::Bounce]
            .into_iter()
            .find(|movement| movement.name() == text)
            .ok_or_else(|| format!("'{text}' moves no data: copy, persistent, map or bounce"))
    }
}

/// Where a ring stands. The numbers run freely modulo 2^32 (blkif.h, `struct blkif_sring`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RingState {
    /// Slots.
    pub size: u32,
    /// Requests the guest has produced.
    pub req_prod: u32,
    /// Requests taken.
    pub req_cons: u32,
    /// Request at which the guest shall notify.
    pub req_event: u32,
    /// Responses the guest can see.
    pub rsp_prod: u32,
    /// Responses written, perhaps not yet shown.
    pub rsp_pvt: u32,
    /// Response at which the guest wants to be notified.
    pub rsp_event: u32,
}

impl RingState {
    /// Requests in the ring that have no response yet.
    pub const fn used(&self) -> u32 {
        self.req_prod.wrapping_sub(self.rsp_prod)
    }
}
