//! This host's place in the pool: its key, its vote, and what it knows of the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tapio_model::ApiError;
use tapio_store::{Lease, StoreError, Taken};
use uuid::Uuid;

use super::version::{self, Version};
use super::{Destination, Member, Pool};
use crate::db::reference_of;

/// The key of a host is this with its UUID.
const HOSTS: &str = "hosts/";

/// The key of the host that decides.
pub(super) const COORDINATOR: &str = "coordinator";

/// The key with the host that is to decide next, while one gives it up.
pub(super) const NEXT: &str = "next";

/// How often a host shows that it lives.
const BEAT: Duration = Duration::from_secs(1);

/// How this host holds its keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holding {
    pub(super) lease: Lease,
    /// The number of the holding of its own key.
    pub(super) number: u64,
    /// When it was surely held last.
    pub(super) since: Instant,
}

/// What a host tells others in its key.
#[derive(Serialize, Deserialize)]
struct Card {
    address: String,
    /// DER, two digits a byte.
    certificate: String,
    /// The daemon's.
    #[serde(default)]
    version: String,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    if !hex.is_ascii() || !hex.len().is_multiple_of(2) {
        return None;
    }
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok()).collect()
}

/// What this host tells, with a certificate (DER).
fn card_of(member: &Member, certificate: &[u8]) -> Result<String, StoreError> {
    let version = Version::own().to_string();
    let card = Card { address: member.address.clone(), certificate: hex(certificate), version };
    serde_json::to_string(&card).map_err(|error| StoreError::Failed(error.to_string()))
}

/// Takes the key of this host, where the versions of those that live let it. A daemon that ended without giving it up
/// may still have it: this one runs in its place.
pub(super) fn hold_host(member: &Member) -> Result<Holding, StoreError> {
    let card = card_of(member, &member.certificate)?;
    let name = format!("{HOSTS}{}", member.access.host);
    let since = Instant::now();
    let lease = member.etcd.grant(member.lease)?;
    loop {
        member.etcd.release(&name, None)?;
        if let Taken::Held(number) = member.etcd.hold(&name, &card, lease)? {
            member.etcd.fence_by(&[(&name, number)]);
            if let Some(why) = refusal(member)? {
                member.etcd.release(&name, Some(number))?;
                return Err(StoreError::Failed(why));
            }
            // Nor does this process decide by what an earlier one held, which ends with that one's lease.
            let decides = member.etcd.holder(COORDINATOR)?;
            if let Some((_, old)) = decides.filter(|(host, _)| *host == member.access.host.to_string()) {
                member.etcd.release(COORDINATOR, Some(old))?;
            }
            return Ok(Holding { lease, number, since });
        }
    }
}

/// Why this version may not be beside those of the hosts that live. Its own key is there already: of two that start at
/// once, one sees the other.
fn refusal(member: &Member) -> Result<Option<String>, StoreError> {
    let holders = member.etcd.holders(HOSTS)?;
    let mut cards = holders.iter().filter_map(|(_, card, _)| serde_json::from_str::<Card>(card).ok());
    Ok(cards.find_map(|card| Version::own().refusal(card.version.parse().ok()?, &card.address)))
}

impl Pool {
    /// Begins to follow the pool; this goes on until the toolstack has gone.
    ///
    /// # Errors
    /// There is no thread.
    pub fn follow(self: &Arc<Self>) -> Result<(), ApiError> {
        if self.member.get().is_none() {
            return Ok(());
        }
        if let (Some(member), Some(own)) = (self.member.get(), self.db.own_host()) {
            self.db.set("host", own, "address", member.address.as_str())?;
        }
        // Once before any call is answered: who decides is known then.
        self.turn();
        let pool = Arc::downgrade(self);
        let following = move || {
            while let Some(pool) = pool.upgrade() {
                pool.turn();
                drop(pool);
                std::thread::sleep(BEAT);
            }
        };
        let thread = std::thread::Builder::new().name("pool".to_owned()).spawn(following);
        thread.map(drop).map_err(|error| ApiError::internal(format!("no thread for the pool: {error}")))
    }

    fn turn(self: &Arc<Self>) {
        let Some(member) = self.member.get() else { return };
        let turning = self.turning.lock();
        if let Err(error) = self.beat(member) {
            let holds = self.state.read().holds_until.is_some_and(|until| Instant::now() < until);
            if !holds {
                self.lose();
            }
            tracing::warn!(%error, holds, "the database of the pool does not answer");
            return;
        }
        if let Err(error) = self.look(member) {
            tracing::warn!(%error, "what other hosts do is not known");
            return;
        }
        drop(turning);
        if self.decides()
            && let Err(error) = self.decide(member)
        {
            tracing::warn!(%error, "the pool's records are not up to date");
        }
        if self.is_started.load(Ordering::Acquire) {
            self.reach_shared_srs();
        }
    }

    /// Whether this host decides for the pool.
    pub fn decides(&self) -> bool {
        self.member.get().is_none() || self.state.read().own.is_some()
    }

    fn lose(&self) {
        let mut state = self.state.write();
        state.own = None;
        state.holds_until = None;
    }

    /// Shows that this host lives.
    fn beat(&self, member: &Member) -> Result<(), StoreError> {
        let held = *self.holding.lock();
        let now = Instant::now();
        let Some(held) = held else { return Ok(()) };
        if !member.etcd.beat(held.lease, now + member.lease / 2)? || !member.etcd.is_in()? {
            self.lose();
            tracing::error!(
                "this host lost its place in the pool: what it does is broken off, and it starts again"
            );
            // Operations that began before the loss must not go on behind it. Their notes say what is half done; disks
            // and guests go on. Until the daemon has started again it writes nothing.
            if let Some(link) = self.link.get() {
                link.restart_now();
            }
            return Err(StoreError::Fenced(HOSTS.to_owned()));
        }
        self.state.write().holds_until = Some(now + member.lease);
        self.announce(member, held)
    }

    /// Tells the others of a certificate that this host shows since: they know it by that alone.
    fn announce(&self, member: &Member, held: Holding) -> Result<(), StoreError> {
        let Some(link) = self.link.get() else { return Ok(()) };
        let (shown, fingerprint) = link.certificate();
        let mut announced = self.announced.lock();
        if *announced.as_ref().unwrap_or(&member.certificate) == shown {
            return Ok(());
        }
        let name = format!("{HOSTS}{}", member.access.host);
        if member.etcd.note(&name, &card_of(member, &shown)?, held.lease, held.number)? {
            tracing::info!(%fingerprint, "the pool knows another certificate of this host");
            *announced = Some(shown);
        }
        Ok(())
    }

    /// Learns who lives and who decides; votes for itself where no host does.
    pub(super) fn look(&self, member: &Member) -> Result<(), StoreError> {
        let Some(held) = *self.holding.lock() else { return Ok(()) };
        let own = member.access.host;
        let mut decides = member.etcd.holder(COORDINATOR)?;
        if decides.is_none() {
            let next = member.etcd.holder(NEXT)?.and_then(|(next, _)| Uuid::parse_str(&next).ok());
            if next.is_none_or(|next| next == own) {
                self.campaign(member, held)?;
            }
            decides = member.etcd.holder(COORDINATOR)?;
        }
        let mut hosts = BTreeMap::new();
        for (uuid, card, _) in member.etcd.holders(HOSTS)? {
            let card = serde_json::from_str::<Card>(&card).ok();
            let known = Uuid::parse_str(&uuid).ok().zip(card);
            let Some((uuid, card)) = known else { continue };
            let Some(certificate) = bytes_of(&card.certificate) else { continue };
            hosts.insert(uuid, Destination { address: card.address, certificate: Some(certificate) });
        }
        let coordinator = decides.as_ref().and_then(|(uuid, _)| Uuid::parse_str(uuid).ok());
        let number = decides.filter(|_| coordinator == Some(own)).map(|(_, number)| number);
        self.fence(member, held, number);
        if let Some(link) = self.link.get() {
            link.trust(hosts.values().filter_map(|host| host.certificate.clone()).collect());
        }
        let redirect = coordinator.filter(|host| *host != own);
        let redirect = redirect.and_then(|host| Some(hosts.get(&host)?.address.clone()));
        self.sessions.send_to(redirect);
        let mut state = self.state.write();
        let was = state.own;
        (state.hosts, state.coordinator, state.own) = (hosts, coordinator, number);
        drop(state);
        if was != number {
            tracing::info!(decides = number.is_some(), "who decides for the pool has changed");
        }
        Ok(())
    }

    /// From now on this host writes only while it holds its own key, and that of the coordinator if it has it.
    pub(super) fn fence(&self, member: &Member, held: Holding, coordinator: Option<u64>) {
        let own = format!("{HOSTS}{}", member.access.host);
        let mut keys = vec![(own.as_str(), held.number)];
        keys.extend(coordinator.map(|number| (COORDINATOR, number)));
        member.etcd.fence_by(&keys);
    }

    /// Takes the key of the host that decides, if no host has it. While this host has it, it writes only by it.
    pub(super) fn campaign(&self, member: &Member, held: Holding) -> Result<bool, StoreError> {
        let own = member.access.host.to_string();
        match member.etcd.hold(COORDINATOR, &own, held.lease)? {
            Taken::Held(_) => Ok(true),
            Taken::By(other) => Ok(other == own),
        }
    }

    /// What the host that decides does: the records say who that is, and which hosts live. What a host that died left
    /// half done is finished or undone.
    fn decide(self: &Arc<Self>, member: &Member) -> Result<(), ApiError> {
        let own = reference_of(member.access.host);
        let live: Vec<String> = self.state.read().hosts.keys().map(|host| reference_of(*host)).collect();
        let pools = self.db.all("pool");
        let is_told = pools.iter().all(|pool| pool.text("master") == own);
        let hosts = self.db.all("host");
        let metrics = |host: &crate::db::Object| self.db.get("host_metrics", host.text("metrics")).ok();
        let changed: Vec<(String, bool)> = hosts
            .iter()
            .filter_map(|host| {
                let (metrics, lives) = (metrics(host)?, live.contains(&host.reference));
                (metrics.bool("live") != lives).then(|| (metrics.reference.clone(), lives))
            })
            .collect();
        if !is_told || !changed.is_empty() {
            self.db.change(|change| {
                for pool in &pools {
                    change.set("pool", &pool.reference, "master", own.as_str())?;
                }
                for (metrics, lives) in &changed {
                    change.set("host_metrics", metrics, "live", *lives)?;
                }
                Ok(())
            })?;
        }
        version::tell(&self.db, &hosts)?;
        for host in hosts.iter().filter(|host| !live.contains(&host.reference)) {
            self.finish_for(&host.uuid()?)?;
        }
        Ok(())
    }
}
