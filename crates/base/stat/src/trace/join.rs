//! From events to requests: where each of them spent its time.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::{Event, Point, Rate, TAG_ALL, TraceData};
use crate::RequestKind;

/// A part of a request's way. Together they are all of it, without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// From the front end's submit until the disk process took it: notification, wake-up, its turn.
    ToBackEnd,
    /// Until its data was copied from the guest, or mapped.
    CopyIn,
    /// Until the disk began with it: limits, page pool, its turn.
    Admission,
    /// In the image layer: lookup, metadata, space. All of a request that needs no storage.
    Image,
    /// From the first transfer put into the ring until the kernel was entered.
    Submit,
    /// Until the thread saw what the kernel has completed.
    Kernel,
    /// Until the request's own task had the result of its last transfer.
    Wake,
    /// Until the disk was done with it: metadata that had to follow.
    Finish,
    /// Until its data was copied to the guest.
    CopyOut,
    /// Until its answer was visible, or sent.
    Publish,
    /// Until the front end had seen it.
    ToFrontEnd,
}

/// Steps of a request.
pub const STEPS: usize = 11;

impl Step {
    /// All of them, in their order.
    pub const ALL: [Self; STEPS] = [
        Self::ToBackEnd,
        Self::CopyIn,
        Self::Admission,
        Self::Image,
        Self::Submit,
        Self::Kernel,
        Self::Wake,
        Self::Finish,
        Self::CopyOut,
        Self::Publish,
        Self::ToFrontEnd,
    ];

    /// As reports name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ToBackEnd => "to-back-end",
            Self::CopyIn => "copy-in",
            Self::Admission => "admission",
            Self::Image => "image",
            Self::Submit => "submit",
            Self::Kernel => "kernel",
            Self::Wake => "wake",
            Self::Finish => "finish",
            Self::CopyOut => "copy-out",
            Self::Publish => "publish",
            Self::ToFrontEnd => "to-front-end",
        }
    }
}

/// One request from its first to its last point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedRequest {
    /// What the front end calls it, in its lowest 32 bits.
    pub id: u32,
    /// The queue or connection it came by.
    pub client: u8,
    /// What it does.
    pub kind: RequestKind,
    /// Bytes.
    pub len: u64,
    /// Whether its front end was traced too: without that the first and the last step are not known, and zero.
    pub front: bool,
    /// When it was first seen, in ticks.
    pub begin: u64,
    /// How long each step took, in nanoseconds, in the order of [`Step::ALL`].
    pub steps_ns: [u64; STEPS],
    /// How long it took together, in nanoseconds.
    pub total_ns: u64,
}

/// What is known of a request in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Partial {
    id: u32,
    taken: u64,
    copied_in: Option<u64>,
    started: Option<u64>,
    kind: Option<RequestKind>,
    len: u64,
    issued: Option<u64>,
    returned: Option<u64>,
    ended: Option<u64>,
    copied_out: Option<u64>,
    /// Parts that the disk has and that have not ended.
    parts: u32,
}

/// The requests whose way through the disk is complete in `disk`, in the order of their answers. With the events of
/// their front end also the way there and back is known; both must be of the same clock.
pub fn requests(disk: &TraceData, front: Option<&TraceData>) -> Vec<TracedRequest> {
    let front = front.filter(|front| front.clock == disk.clock).map(Front::of);
    let mut join =
        Join { front, rate: disk.rate, open: BTreeMap::new(), entering: Vec::new(), woke: Vec::new() };
    let mut done = Vec::new();
    for event in &disk.events {
        join.take(event, &mut done);
    }
    done
}

struct Join {
    front: Option<Front>,
    rate: Rate,
    open: BTreeMap<(u8, u16), Partial>,
    entering: Vec<u64>,
    woke: Vec<u64>,
}

impl Join {
    fn take(&mut self, event: &Event, done: &mut Vec<TracedRequest>) {
        let key = (event.client, event.tag);
        match event.point {
            Point::FrontSubmit | Point::FrontSaw => {}
            Point::Entering => self.entering.push(event.stamp),
            Point::Woke => self.woke.push(event.stamp),
            Point::Taken => {
                let partial = Partial { id: event.aux, taken: event.stamp, ..Partial::default() };
                // The request that had this tag before was answered without the disk, or as a part of a larger request.
                if let Some((before, ended)) =
                    self.open.insert(key, partial).and_then(|old| Some((old, old.ended?)))
                {
                    done.extend(self.whole(event.client, &before, before.copied_out.unwrap_or(ended)));
                }
            }
            Point::CopiedIn => self.each(key, |partial| {
                if partial.started.is_none() {
                    partial.copied_in.get_or_insert(event.stamp);
                }
            }),
            Point::Started => self.each(key, |partial| {
                let (kind, len) = event.kind_and_len();
                partial.started.get_or_insert(event.stamp);
                partial.kind.get_or_insert(kind);
                partial.len = partial.len.saturating_add(len);
                partial.parts += 1;
            }),
            Point::Issued => self.each(key, |partial| {
                partial.issued.get_or_insert(event.stamp);
            }),
            Point::Returned => self.each(key, |partial| partial.returned = Some(event.stamp)),
            Point::Ended => self.each(key, |partial| {
                partial.ended = Some(event.stamp);
                partial.parts = partial.parts.saturating_sub(1);
            }),
            Point::CopiedOut => self.each(key, |partial| {
                if partial.ended.is_some() && partial.parts == 0 {
                    partial.copied_out = Some(event.stamp);
                }
            }),
            Point::Published => self.publish(key, event.stamp, done),
        }
    }

    /// The requests that an event is about.
    fn each(&mut self, (client, tag): (u8, u16), mut change: impl FnMut(&mut Partial)) {
        if tag == TAG_ALL {
            self.open.range_mut((client, 0)..=(client, TAG_ALL)).for_each(|(_, partial)| change(partial));
        } else if let Some(partial) = self.open.get_mut(&(client, tag)) {
            change(partial);
        }
    }

    fn publish(&mut self, (client, tag): (u8, u16), stamp: u64, done: &mut Vec<TracedRequest>) {
        let is_over = |partial: &Partial| partial.ended.is_some() && partial.parts == 0;
        if tag == TAG_ALL {
            let range = (client, 0)..=(client, TAG_ALL);
            let over: Vec<_> =
                self.open.range(range).filter(|(_, partial)| is_over(partial)).map(|(key, _)| *key).collect();
            for key in over {
                let partial = self.open.remove(&key);
                done.extend(partial.and_then(|partial| self.whole(client, &partial, stamp)));
            }
        } else if self.open.get(&(client, tag)).is_some_and(is_over) {
            let partial = self.open.remove(&(client, tag));
            done.extend(partial.and_then(|partial| self.whole(client, &partial, stamp)));
        }
    }

    fn whole(&self, client: u8, partial: &Partial, published: u64) -> Option<TracedRequest> {
        let (started, ended) = (partial.started?, partial.ended?);
        let pair = self.front.as_ref().and_then(|front| front.pair(partial.id, started, ended));
        // A front end on another processor may see an answer before its own point is written.
        let published = pair.map_or(published, |pair| published.min(pair.1));
        // A request that needed no storage spent all its time in the image layer.
        let returned = partial.returned.unwrap_or(ended);
        let issued = partial.issued.unwrap_or(returned);
        let entering = first_from(&self.entering, issued).filter(|at| *at <= returned).unwrap_or(issued);
        let woke = last_until(&self.woke, returned).filter(|at| *at >= entering).unwrap_or(returned);
        let mut at = [
            pair.map_or(partial.taken, |pair| pair.0),
            partial.taken,
            partial.copied_in.unwrap_or(partial.taken),
            started,
            issued,
            entering,
            woke,
            returned,
            ended,
            partial.copied_out.unwrap_or(ended),
            published,
            pair.map_or(published, |pair| pair.1),
        ];
        // Two processors' counters may differ by some ticks, and nothing ends before it begins.
        for index in 1..at.len() {
            at[index] = at[index].max(at[index - 1]);
        }
        Some(TracedRequest {
            id: partial.id,
            client,
            kind: partial.kind.unwrap_or(RequestKind::Read),
            len: partial.len,
            front: pair.is_some(),
            begin: at[0],
            steps_ns: std::array::from_fn(|step| self.rate.ns(at[step], at[step + 1])),
            total_ns: self.rate.ns(at[0], at[STEPS]),
        })
    }
}

/// The first of these ascending stamps that is not before `at`.
fn first_from(stamps: &[u64], at: u64) -> Option<u64> {
    stamps.get(stamps.partition_point(|stamp| *stamp < at)).copied()
}

/// The last of these ascending stamps that is not after `at`.
fn last_until(stamps: &[u64], at: u64) -> Option<u64> {
    stamps.partition_point(|stamp| *stamp <= at).checked_sub(1).and_then(|index| stamps.get(index)).copied()
}

/// A front end's own points: by id, when requests were submitted and their answers seen.
struct Front(HashMap<u32, Vec<(u64, u64)>>);

impl Front {
    fn of(data: &TraceData) -> Self {
        let (mut open, mut pairs) = (HashMap::new(), HashMap::<u32, Vec<(u64, u64)>>::new());
        for event in &data.events {
            match event.point {
                Point::FrontSubmit => drop(open.insert(event.aux, event.stamp)),
                Point::FrontSaw => {
                    if let Some(submitted) = open.remove(&event.aux) {
                        pairs.entry(event.aux).or_default().push((submitted, event.stamp));
                    }
                }
                _ => {}
            }
        }
        Self(pairs)
    }

    /// When the request that the disk began at `started` and ended at `ended` was submitted, and its answer seen: in
    /// between, the name was no other request's.
    fn pair(&self, id: u32, started: u64, ended: u64) -> Option<(u64, u64)> {
        let pairs = self.0.get(&id)?;
        let index = pairs.partition_point(|pair| pair.1 < ended);
        pairs.get(index).filter(|pair| pair.0 <= started).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Clock;
    use super::*;

    fn data(events: &[(u64, Point, u8, u16, u32)]) -> TraceData {
        let event = |&(stamp, point, client, tag, aux): &(u64, Point, u8, u16, u32)| Event {
            stamp,
            point,
            client,
            tag,
            aux,
        };
        TraceData {
            pid: 1,
            minor: 0,
            clock: Clock::Tsc,
            rate: Rate { ns_per_tick: 1.0 },
            running: false,
            lost: 0,
            events: events.iter().map(event).collect(),
        }
    }

    const ABOUT: u32 = Event::about(RequestKind::Write, 4096);

    #[test]
    fn every_step_is_the_time_between_two_points() {
        use Point::*;
        let disk = data(&[
            (110, Taken, 1, 5, 77),
            (120, CopiedIn, 1, TAG_ALL, 0),
            (150, Started, 1, 5, ABOUT),
            (190, Entering, 0, TAG_ALL, 0),
            (250, Woke, 0, TAG_ALL, 0),
            // Written when the request has ended, with the stamps of when it was.
            (170, Issued, 1, 5, 0),
            (255, Returned, 1, 5, 0),
            (262, Ended, 1, 5, 0),
            (270, CopiedOut, 1, TAG_ALL, 0),
            (272, Published, 1, TAG_ALL, 0),
        ]);
        let front = data(&[(100, FrontSubmit, 0, 0, 77), (300, FrontSaw, 0, 0, 77)]);
        let both = requests(&disk, Some(&front));
        let [request] = both.as_slice() else { panic!("{both:?}") };
        assert_eq!(request.steps_ns, [10, 10, 30, 20, 20, 60, 5, 7, 8, 2, 28]);
        assert_eq!((request.total_ns, request.id, request.len), (200, 77, 4096));
        assert_eq!((request.kind, request.client, request.front), (RequestKind::Write, 1, true));
        let alone = requests(&disk, None);
        assert_eq!((alone[0].total_ns, alone[0].front), (162, false));
        assert_eq!((alone[0].steps_ns[0], alone[0].steps_ns[10]), (0, 0));
        let other = TraceData { clock: Clock::Monotonic, ..front };
        assert!(!requests(&disk, Some(&other))[0].front, "clocks that cannot be compared are not");
    }

    #[test]
    fn a_request_without_storage_is_all_image() {
        use Point::*;
        let disk = data(&[
            (10, Taken, 3, 0, 1),
            (20, Started, 3, 0, ABOUT),
            (50, Ended, 3, 0, 0),
            (60, Published, 3, 0, 0),
        ]);
        assert_eq!(requests(&disk, None)[0].steps_ns, [0, 0, 10, 30, 0, 0, 0, 0, 0, 10, 0]);
    }

    #[test]
    fn what_is_not_whole_is_left_out_and_disturbs_no_other() {
        use Point::*;
        let disk = data(&[
            // Its beginning was overwritten.
            (5, Ended, 1, 1, 0),
            (6, Published, 1, TAG_ALL, 0),
            // Answered without the disk; its tag is used again.
            (10, Taken, 1, 1, 8),
            (20, Taken, 1, 1, 9),
            (21, Started, 1, 1, ABOUT),
            // Of two parts, of which one has ended.
            (22, Taken, 1, 2, 10),
            (23, Started, 1, 2, ABOUT),
            (24, Started, 1, 2, ABOUT),
            (30, Ended, 1, 1, 0),
            (31, Ended, 1, 2, 0),
            (32, Published, 1, TAG_ALL, 0),
            (33, Published, 2, TAG_ALL, 0),
            (34, Ended, 1, 2, 0),
            (35, Published, 1, TAG_ALL, 0),
            (36, Taken, 1, 3, 11),
            // Answered as a part of another, and the tag goes on.
            (37, Started, 1, 3, ABOUT),
            (40, Ended, 1, 3, 0),
            (50, Taken, 1, 3, 12),
        ]);
        let found: Vec<_> = requests(&disk, None).iter().map(|one| (one.id, one.len, one.total_ns)).collect();
        assert_eq!(found, [(9, 4096, 12), (10, 8192, 13), (11, 4096, 4)]);
    }

    #[test]
    fn a_front_end_may_be_faster_than_the_points_of_the_disk() {
        use Point::*;
        // The batch was stamped before the front end put this request into it, and its answer after that was seen.
        let disk = data(&[
            (90, Taken, 1, 0, 7),
            (110, Started, 1, 0, ABOUT),
            (120, Ended, 1, 0, 0),
            (150, Published, 1, TAG_ALL, 0),
        ]);
        let front = data(&[
            (80, FrontSubmit, 0, 0, 7),
            (85, FrontSaw, 0, 0, 7),
            (100, FrontSubmit, 0, 0, 7),
            (130, FrontSaw, 0, 0, 7),
        ]);
        let found = requests(&disk, Some(&front));
        assert_eq!((found[0].front, found[0].total_ns), (true, 30));
        assert_eq!(found[0].steps_ns, [0, 0, 10, 10, 0, 0, 0, 0, 0, 10, 0]);
    }

    #[test]
    fn an_id_that_is_used_again_finds_its_own_pair() {
        use Point::*;
        let life = |at: u64| {
            [
                (at + 1, Taken, 1, 0, 7),
                (at + 2, Started, 1, 0, ABOUT),
                (at + 3, Ended, 1, 0, 0),
                (at + 4, Published, 1, TAG_ALL, 0),
            ]
        };
        let disk = data(&[life(100), life(200), life(300)].concat());
        // The front end's ring has lost the first, and the third was not seen yet.
        let front =
            data(&[(199, FrontSubmit, 0, 0, 7), (209, FrontSaw, 0, 0, 7), (299, FrontSubmit, 0, 0, 7)]);
        let found: Vec<_> =
            requests(&disk, Some(&front)).iter().map(|one| (one.front, one.total_ns)).collect();
        assert_eq!(found, [(false, 3), (true, 10), (false, 3)]);
    }
}
