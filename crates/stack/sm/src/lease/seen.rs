//! Which hosts are alive: what this host has seen of their beats, by its own clock. No two clocks are compared.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::layout::Beat;

/// The beat that was seen last in a slot, and when it was seen first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sight {
    /// The host; nil in what an earlier version noted.
    #[serde(default)]
    pub host: Uuid,
    /// The generation of the host.
    pub generation: u64,
    /// Its counter.
    pub counter: u64,
    /// By the clock of this host, in milliseconds since it was started.
    pub since_ms: u64,
}

/// How another host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// There is none, or it has left.
    Away,
    /// It was seen so long ago.
    Alive(Duration),
    /// It was silent for so long that it counts as dead.
    Dead(Duration),
}

/// What was seen, by slot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen(pub BTreeMap<u8, Sight>);

impl Seen {
    /// Takes in a look at a slot.
    pub fn look(&mut self, slot: u8, beat: Option<&Beat>, now_ms: u64) {
        let Some(beat) = beat.filter(|beat| !beat.has_left) else {
            self.0.remove(&slot);
            return;
        };
        let (generation, counter) = (beat.generation, beat.counter);
        match self.0.get(&slot) {
            Some(known) if (known.generation, known.counter) == (generation, counter) => {}
            _ => drop(self.0.insert(slot, Sight { host: beat.host, generation, counter, since_ms: now_ms })),
        }
    }

    /// Hosts that do not count as dead.
    pub fn alive(&self, (now_ms, silence_ms): (u64, u64)) -> impl Iterator<Item = Uuid> {
        let alive = self.0.values().filter(move |sight| now_ms.saturating_sub(sight.since_ms) < silence_ms);
        alive.map(|sight| sight.host)
    }

    /// How the host of a slot is. `beat` is what lies there now: one that was not seen yet is alive.
    pub fn health(&self, slot: u8, beat: Option<&Beat>, (now_ms, silence_ms): (u64, u64)) -> Health {
        let Some(beat) = beat.filter(|beat| !beat.has_left) else { return Health::Away };
        let known = self.0.get(&slot);
        let same = known.filter(|known| (known.generation, known.counter) == (beat.generation, beat.counter));
        let silent_ms = same.map_or(0, |known| now_ms.saturating_sub(known.since_ms));
        let silent = Duration::from_millis(silent_ms);
        if silent_ms >= silence_ms { Health::Dead(silent) } else { Health::Alive(silent) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat(generation: u64, counter: u64) -> Beat {
        Beat { host: Uuid::from_u128(1), generation, counter, has_left: false, name: String::new() }
    }

    #[test]
    fn a_host_is_dead_after_its_silence_and_alive_again_with_the_next_beat() {
        let mut seen = Seen::default();
        let silence_ms = 40_000;
        let first = beat(1, 1);
        let at = |seen: &Seen, beat: &Beat, now_ms| seen.health(3, Some(beat), (now_ms, silence_ms));
        assert_eq!(at(&seen, &first, 999_999), Health::Alive(Duration::ZERO), "never seen before");
        seen.look(3, Some(&first), 1_000);
        seen.look(3, Some(&first), 30_000);
        assert_eq!(at(&seen, &first, 40_999), Health::Alive(Duration::from_millis(39_999)));
        assert_eq!(at(&seen, &first, 41_000), Health::Dead(Duration::from_secs(40)));
        let alive = |now_ms| seen.alive((now_ms, silence_ms)).collect::<Vec<_>>();
        assert_eq!((alive(40_999), alive(41_000)), (vec![first.host], vec![]));
        // What lies there now says more than what was seen.
        assert_eq!(at(&seen, &beat(1, 2), 41_000), Health::Alive(Duration::ZERO));
        seen.look(3, Some(&beat(1, 2)), 41_000);
        assert_eq!(at(&seen, &beat(1, 2), 42_000), Health::Alive(Duration::from_secs(1)));
        // The same counter of another generation is another beat.
        assert_eq!(at(&seen, &beat(2, 2), 999_999), Health::Alive(Duration::ZERO));
    }

    #[test]
    fn a_host_that_left_is_away_and_a_clock_that_goes_back_kills_none() {
        let mut seen = Seen::default();
        seen.look(0, Some(&beat(1, 1)), 50_000);
        assert_eq!(seen.health(0, Some(&beat(1, 1)), (10, 2_000)), Health::Alive(Duration::ZERO));
        let left = Beat { has_left: true, ..beat(1, 1) };
        assert_eq!(seen.health(0, Some(&left), (99_000, 2_000)), Health::Away);
        seen.look(0, Some(&left), 60_000);
        assert_eq!(seen.0.len(), 0);
        assert_eq!(seen.health(0, None, (99_000, 2_000)), Health::Away);
    }
}
