//! Which VMs may start now: by their order, a few at a time, and without a wait for ever for one that hangs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A place in the order: VMs without a promise come last, then the order that each VM has.
pub(super) type Place = (bool, i64);

/// How many VMs start at a time.
const AT_ONCE: usize = 8;

/// How long others wait for a start. A host that hangs in one must not keep all other VMs from starting.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts that are under way, by the VM's reference.
#[derive(Debug, Default)]
pub(super) struct Starts {
    running: BTreeMap<String, (Place, Instant)>,
    /// VMs behind this place wait until then: one at it asked for a pause (`start_delay`).
    pause: Option<(Place, Instant)>,
}

impl Starts {
    /// Takes those that may start now out of the VMs that are to be started. The caller starts them all, and says when
    /// each start has ended.
    pub(super) fn admit(&mut self, groups: BTreeMap<Place, Vec<String>>, now: Instant) -> Vec<String> {
        let mut admitted = Vec::new();
        for (place, vms) in groups {
            if self.is_held(place, now) {
                break;
            }
            for vm in vms {
                if self.running.values().filter(|(_, since)| now - *since < PATIENCE).count() >= AT_ONCE {
                    return admitted;
                }
                if !self.running.contains_key(&vm) {
                    self.running.insert(vm.clone(), (place, now));
                    admitted.push(vm);
                }
            }
        }
        admitted
    }

    fn is_held(&self, place: Place, now: Instant) -> bool {
        let waits = self.running.values().any(|(other, since)| *other < place && now - *since < PATIENCE);
        waits || self.pause.is_some_and(|(other, until)| other < place && now < until)
    }

    /// A start has ended; after one that succeeded, `pause` is what the VM asked for.
    pub(super) fn ended(&mut self, vm: &str, now: Instant, pause: Option<Duration>) {
        let Some((place, _)) = self.running.remove(vm) else { return };
        let until = now + pause.unwrap_or_default();
        if until > now && self.pause.is_none_or(|(_, other)| other < until) {
            self.pause = Some((place, until));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(of: &[(Place, &[&str])]) -> BTreeMap<Place, Vec<String>> {
        of.iter().map(|(place, vms)| (*place, vms.iter().map(|vm| (*vm).to_owned()).collect())).collect()
    }

    #[test]
    fn vms_start_by_their_order_and_after_the_pause_that_one_asks_for() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        let all = groups(&[((false, 0), &["a", "b"]), ((false, 1), &["c"]), ((true, 0), &["d"])]);
        assert_eq!(starts.admit(all.clone(), now), ["a", "b"]);
        assert!(starts.admit(all, now).is_empty(), "they are under way");
        let rest = groups(&[((false, 1), &["c"]), ((true, 0), &["d"])]);
        starts.ended("a", now, None);
        assert!(starts.admit(rest.clone(), now).is_empty(), "one of the first is under way");
        starts.ended("b", now, Some(Duration::from_secs(5)));
        assert!(starts.admit(rest.clone(), now).is_empty(), "it asked for a pause");
        let later = now + Duration::from_secs(5);
        assert_eq!(starts.admit(rest, later), ["c"]);
        starts.ended("c", later, None);
        assert_eq!(starts.admit(groups(&[((true, 0), &["d"])]), later), ["d"]);
    }

    #[test]
    fn a_start_that_hangs_keeps_others_for_a_while_only_and_is_not_begun_twice() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        let many: Vec<String> = (0..=AT_ONCE).map(|at| format!("vm{at}")).collect();
        let all = BTreeMap::from([((false, 0), many.clone()), ((false, 1), vec!["last".to_owned()])]);
        assert_eq!(starts.admit(all.clone(), now), many[..AT_ONCE]);
        assert!(starts.admit(all.clone(), now + PATIENCE / 2).is_empty());
        assert_eq!(starts.admit(all.clone(), now + PATIENCE), many[AT_ONCE..], "the order is kept");
        assert_eq!(starts.admit(all, now + PATIENCE * 2), ["last"]);
    }
}
