//! The front end against a small back end in memory: every way of using a disk, and being interrupted in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use tapio_load::{Load, Mix};

use super::*;
use crate::blkif::{BackRing, INDIRECT_PER_PAGE, Request, Segment, op, status};
use crate::channel::Channel;
use crate::domain::{CopyBatch, Direction, Domain, PAGE_LEN, Rights};
use crate::double::Guest;

/// Bytes of the disk.
const DISK_LEN: usize = 1 << 20;
const DOMID: u32 = 9;

/// A back end that copies, or maps.
struct Backend {
    domain: Domain,
    ring: BackRing,
    channel: Channel,
    disk: Arc<Vec<std::sync::Mutex<[u8; 512]>>>,
    map: bool,
    /// Answers the youngest request first.
    backwards: bool,
}

fn disk() -> Arc<Vec<std::sync::Mutex<[u8; 512]>>> {
    Arc::new((0..DISK_LEN / 512).map(|_| std::sync::Mutex::new([0; 512])).collect())
}

impl Backend {
    fn new(invitation: RingInvitation, memory: OwnedFd, abi: Abi) -> Self {
        let domain = Domain::Double(Guest::from_fd(memory, DOMID).unwrap());
        let requests = domain.map(&invitation.ring, Rights::Write).unwrap();
        let ring = if invitation.responses.is_empty() {
            BackRing::new(requests, abi).unwrap()
        } else {
            let responses = domain.map(&invitation.responses, Rights::Write).unwrap();
            BackRing::new_split(requests, responses).unwrap()
        };
        let channel = Channel::Double(invitation.wire);
        Self { domain, ring, channel, disk: disk(), map: false, backwards: false }
    }

    fn segments(&self, request: &Request) -> Vec<Segment> {
        if !request.indirect {
            return request.direct_segments().to_vec();
        }
        let pages = self.domain.map(request.indirect_pages(), Rights::Read).unwrap();
        assert_eq!(pages.len(), usize::from(request.segments).div_ceil(INDIRECT_PER_PAGE) * PAGE_LEN);
        let mut segments = vec![Segment::default(); request.segments.into()];
        // SAFETY: as many as fit into the pages.
        unsafe { Segment::copy_from_page(pages.as_ptr(), &mut segments) };
        segments
    }

    fn move_data(&self, request: &Request) {
        let to_disk = request.op != op::READ;
        let mut sector = request.sector as usize;
        for segment in self.segments(request) {
            let (offset, len) = segment.span().unwrap();
            let mut bytes = vec![0u8; len.into()];
            for (index, part) in bytes.chunks_mut(512).enumerate().filter(|_| !to_disk) {
                part.copy_from_slice(&*self.disk[sector + index].lock().unwrap());
            }
            if self.map {
                let rights = if to_disk { Rights::Read } else { Rights::Write };
                let page = self.domain.map(&[segment.grant], rights).unwrap();
                // SAFETY: the span lies inside the page, which is mapped.
                unsafe {
                    let at = page.as_ptr().add(offset.into());
                    if to_disk {
                        at.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
                    } else {
                        at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                    }
                }
            } else {
                let mut batch = CopyBatch::default();
                let direction = if to_disk { Direction::FromDomain } else { Direction::ToDomain };
                // SAFETY: the bytes outlive the copy.
                unsafe { batch.push(direction, DOMID, segment.grant, offset, bytes.as_mut_ptr(), len) };
                self.domain.copy(&mut batch).unwrap();
                assert_eq!(batch.status(0), Ok(()));
            }
            for (index, part) in bytes.chunks(512).enumerate().filter(|_| to_disk) {
                self.disk[sector + index].lock().unwrap().copy_from_slice(part);
            }
            sector += usize::from(len) / 512;
        }
    }

    /// Serves what is there; how many requests.
    fn turn(&mut self) -> usize {
        let waiting = self.ring.look().unwrap();
        let mut requests = Vec::new();
        for _ in 0..waiting {
            requests.push(Request::decode(&self.ring.take().unwrap(), self.ring.abi()).unwrap());
        }
        for request in &requests {
            if request.op == op::DISCARD {
                for sector in 0..request.discard_sectors {
                    *self.disk[(request.sector + sector) as usize].lock().unwrap() = [0; 512];
                }
            } else {
                self.move_data(request);
            }
        }
        if self.backwards {
            requests.reverse();
        }
        for request in &requests {
            self.ring.push(&request.response(status::OKAY));
        }
        if self.ring.publish() {
            self.channel.notify().unwrap();
        }
        requests.len()
    }

    /// Serves until told to end (and woken), asleep between. A sleep of ten seconds means that a wake-up is missing.
    fn run(mut self, stop: Arc<AtomicBool>) -> JoinHandle<()> {
        thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                if self.turn() > 0 || self.ring.arm().unwrap() {
                    continue;
                }
                let mut poll = libc::pollfd { fd: self.channel.raw_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: one descriptor, of ours.
                let ready = unsafe { libc::poll(&raw mut poll, 1, 10_000) };
                assert_eq!(ready, 1, "the back end was not woken: {:?}", self.ring.counters());
                let _ = self.channel.take().unwrap();
            }
        })
    }
}

/// A front end with one queue and the back end to it.
fn pair(options: FrontOptions) -> (Blkfront, FrontQueue, Backend) {
    let mut front = Blkfront::new(options).unwrap();
    let mut invitation = front.invitation().unwrap();
    let queue = front.take_queues().remove(0);
    let backend = Backend::new(invitation.rings.remove(0), invitation.memory, invitation.abi);
    (front, queue, backend)
}

/// All shapes of a front end.
fn shapes() -> Vec<FrontOptions> {
    let mut shapes = Vec::new();
    for abi in [Abi::X86_32, Abi::X86_64] {
        for order in 0..=3 {
            shapes.push(FrontOptions {
                abi,
                order,
                depth: 32 << order,
                buffer_len: 8192,
                ..FrontOptions::default()
            });
        }
    }
    for split in 0..=3 {
        shapes.push(FrontOptions {
            split: Some(split),
            depth: 128,
            buffer_len: 4096,
            ..FrontOptions::default()
        });
    }
    let wide = FrontOptions {
        indirect: 600,
        buffer_len: 600 * 512,
        segment_len: 512,
        depth: 2,
        ..FrontOptions::default()
    };
    shapes.push(wide.clone());
    shapes.push(FrontOptions { persistent: true, ..wide.clone() });
    shapes.push(FrontOptions {
        segment_len: 1024,
        buffer_len: 11264,
        persistent: true,
        ..FrontOptions::default()
    });
    shapes.push(FrontOptions { sector_size: 4096, abi: Abi::X86_32, ..wide.clone() }.within(&Offer {
        sector_size: 4096,
        indirect: 256,
        ..Offer::default()
    }));
    shapes
}

#[test]
fn what_is_written_is_read_back_in_every_shape() {
    for (number, options) in shapes().into_iter().enumerate() {
        let (_, mut queue, mut backend) = pair(options.clone());
        backend.map = number % 2 == 1;
        backend.backwards = number % 3 == 0;
        let sector = options.sector_size;
        let lens = [sector, options.request_len_max() / sector * sector, sector * 2];
        for (turn, len) in lens.into_iter().enumerate() {
            let len = len.min(options.request_len_max());
            let pattern = |at: usize| (at as u32).wrapping_mul(2_654_435_761).wrapping_add(turn as u32) as u8;
            let at = 8 * u64::from(sector) * turn as u64;
            let slot = queue.next_slot().unwrap();
            queue.buffer(slot)[..len as usize]
                .iter_mut()
                .enumerate()
                .for_each(|(at, byte)| *byte = pattern(at));
            let mut answers = Vec::new();
            for command in [Command::Write { at, len }, Command::Flush, Command::Read { at, len }] {
                if command == (Command::Read { at, len }) {
                    queue.buffer(queue.next_slot().unwrap()).fill(0xAA);
                }
                let id = queue.submit(&command).unwrap().unwrap();
                queue.kick().unwrap();
                assert_eq!(backend.turn(), 1, "{options:?}");
                assert!(queue.wait(std::time::Duration::from_secs(60)).unwrap());
                assert_eq!(queue.reap(&mut answers).unwrap(), 1);
                let answer = answers.pop().unwrap();
                assert_eq!((answer.id, answer.status), (id, status::OKAY), "{options:?}, {command:?}");
                assert_eq!(answer.slot, Some(slot));
            }
            let buffer = queue.buffer(slot);
            let good = (0..len as usize).all(|at| buffer[at] == pattern(at));
            assert!(good, "{options:?}: {len} bytes at {at}");
            assert!(buffer[len as usize..].iter().all(|byte| *byte == 0xAA), "and no more");
        }
        assert_eq!(queue.stuck_grants(), 0);
    }
}

#[test]
fn grants_live_as_long_as_they_should() {
    let grants_of =
        |bytes: &Request| bytes.direct_segments().iter().map(|segment| segment.grant).collect::<Vec<_>>();
    for persistent in [false, true] {
        let options = FrontOptions { persistent, buffer_len: 8192, depth: 1, ..FrontOptions::default() };
        let (front, mut queue, mut backend) = pair(options);
        let mut seen = Vec::new();
        for _ in 0..3 {
            queue.submit(&Command::Write { at: 0, len: 8192 }).unwrap();
            queue.kick().unwrap();
            backend.ring.look().unwrap();
            let request = Request::decode(&backend.ring.take().unwrap(), Abi::X86_64).unwrap();
            let grants = grants_of(&request);
            assert_eq!(grants.len(), 2);
            let writable = backend.domain.map(&grants, Rights::Write).is_ok();
            assert_eq!(writable, persistent, "what is written is granted for reading, unless it is kept");
            backend.ring.push(&request.response(0));
            let _ = backend.ring.publish();
            queue.reap(&mut Vec::new()).unwrap();
            let gone = grants.iter().all(|grant| backend.domain.map(&[*grant], Rights::Read).is_err());
            assert_eq!(gone, !persistent);
            seen.push(grants);
        }
        assert_eq!(seen[0] == seen[1] && seen[1] == seen[2], persistent);
        assert_eq!(front.vm().uses(seen[2][0]), 0);
    }
}

#[test]
fn a_back_end_that_keeps_a_page_is_noticed() {
    let (_, mut queue, mut backend) = pair(FrontOptions { buffer_len: 4096, ..FrontOptions::default() });
    queue.submit(&Command::Read { at: 0, len: 4096 }).unwrap();
    queue.kick().unwrap();
    backend.ring.look().unwrap();
    let request = Request::decode(&backend.ring.take().unwrap(), Abi::X86_64).unwrap();
    let kept = backend.domain.map(&[request.direct[0].grant], Rights::Write).unwrap();
    backend.ring.push(&request.response(0));
    let _ = backend.ring.publish();
    queue.reap(&mut Vec::new()).unwrap();
    assert_eq!(queue.stuck_grants(), 1);
    drop(kept);
}

#[test]
fn answers_to_what_was_not_asked_are_refused() {
    let (_, mut queue, mut backend) = pair(FrontOptions::default());
    for wrong in [1u64 << 32 | 7, 0, 3 << 32, 4 << 32 | 2] {
        let id = queue.submit(&Command::Flush).unwrap().unwrap();
        queue.kick().unwrap();
        backend.ring.look().unwrap();
        let mut request = Request::decode(&backend.ring.take().unwrap(), Abi::X86_64).unwrap();
        assert_eq!(request.id, id);
        request.id = wrong;
        backend.ring.push(&request.response(0));
        let _ = backend.ring.publish();
        let error = queue.reap(&mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("not in flight"), "{error}");
    }
    let raw = Request { id: RAW_ID | 5, op: op::FLUSH_DISKCACHE, ..Request::default() };
    assert!(queue.submit_raw(&raw.encode(0, Abi::X86_64)));
    queue.kick_always().unwrap();
    assert_eq!(backend.turn(), 1);
    let mut answers = Vec::new();
    queue.reap(&mut answers).unwrap();
    assert_eq!(answers, [Completion { id: RAW_ID | 5, slot: None, op: op::FLUSH_DISKCACHE, status: 0 }]);
}

#[test]
fn discards_and_barriers_are_asked_for() {
    let (_, mut queue, backend) = pair(FrontOptions::default());
    let disk = Arc::clone(&backend.disk);
    let stop = Arc::new(AtomicBool::new(false));
    let served = backend.run(Arc::clone(&stop));
    let slot = queue.next_slot().unwrap();
    queue.buffer(slot).fill(7);
    assert_eq!(queue.ask(&Command::Barrier { at: 4096, len: 8192 }).unwrap().op, op::WRITE_BARRIER);
    let byte = |sector: usize| disk[sector].lock().unwrap()[511];
    assert_eq!([7, 8, 23, 24].map(byte), [0, 7, 7, 0]);
    let discard = Command::Discard { at: 4096 + 512, len: 1024, secure: true };
    assert_eq!(queue.ask(&discard).unwrap().op, op::DISCARD);
    assert_eq!([8, 9, 10, 11].map(byte), [7, 0, 0, 7]);
    assert_eq!(queue.ask(&Command::Barrier { at: 0, len: 0 }).unwrap().status, 0);
    stop.store(true, Ordering::Relaxed);
    queue.kick_always().unwrap();
    served.join().unwrap();
}

#[test]
fn what_has_no_answer_is_asked_again_after_a_reconnect() {
    for split in [None, Some(0)] {
        let depth = if split.is_some() { 100 } else { 32 };
        let options = FrontOptions { depth, split, buffer_len: 512, ..FrontOptions::default() };
        let (front, mut queue, mut backend) = pair(options);
        let disk = Arc::clone(&backend.disk);
        let mut asked = Vec::new();
        while asked.len() < depth as usize {
            let slot = queue.next_slot().unwrap();
            queue.buffer(slot).fill(asked.len() as u8 + 1);
            let at = 512 * asked.len() as u64;
            match queue.submit(&Command::Write { at, len: 512 }).unwrap() {
                Some(id) => asked.push(id),
                None => {
                    queue.kick().unwrap();
                    backend.ring.look().unwrap();
                    while backend.ring.take().is_some() {}
                }
            }
        }
        queue.kick().unwrap();
        backend.ring.look().unwrap();
        let error = queue.reconnect().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "the old ring is mapped");
        // Killed: only the hypervisor unmaps for it.
        std::mem::forget(backend);
        front.vm().back_end_died();
        assert_eq!(queue.reconnect().unwrap(), depth);
        queue.kick().unwrap();
        let mut invitation = front.invitation_of(std::slice::from_ref(&queue)).unwrap();
        let mut backend = Backend::new(invitation.rings.remove(0), invitation.memory, invitation.abi);
        backend.disk = Arc::clone(&disk);
        let mut answers = Vec::new();
        while answers.len() < depth as usize {
            assert!(backend.turn() > 0, "{} answers", answers.len());
            queue.reap(&mut answers).unwrap();
        }
        let ids: Vec<u64> = answers.iter().map(|answer| answer.id).collect();
        assert_eq!(ids, asked, "in the order in which they were asked");
        for sector in 0..depth as usize {
            assert_eq!(disk[sector].lock().unwrap()[3], sector as u8 + 1);
        }
        assert_eq!(queue.room(), depth as usize);
    }
}

#[test]
fn loads_run_asleep_and_spinning() {
    for (spin, split) in [(false, None), (true, None), (false, Some(0)), (true, Some(1))] {
        let options = FrontOptions { depth: 16, split, buffer_len: 4096, ..FrontOptions::default() };
        let (_, mut queue, backend) = pair(options);
        let stop = Arc::new(AtomicBool::new(false));
        let served = backend.run(Arc::clone(&stop));
        for mix in [Mix::RandomRead, Mix::RandomWrite, Mix::SequentialRead, Mix::SequentialWrite] {
            let load = Load {
                mix,
                block_len: 4096,
                depth: 16,
                span_len: DISK_LEN as u64,
                time: std::time::Duration::from_secs(120),
                requests_max: 300,
                spin,
                seed: 1,
            };
            let report = load.run(&mut queue).unwrap();
            assert_eq!((report.count, report.errors), (300, 0));
            assert!(report.kicks <= 300, "once a request at most: {}", report.kicks);
            let (median, last) = (report.latencies.quantile_ns(0.5), report.latencies.quantile_ns(0.99));
            assert!(median > 0 && median <= last, "{median} {last}");
            assert!(report.rate() > 1.0);
        }
        assert!(queue.kicks > 0, "a back end that never polled is woken at least once");
        stop.store(true, Ordering::Relaxed);
        queue.kick_always().unwrap();
        served.join().unwrap();
    }
}

/// Both sides fall asleep after nearly every request; a notification that is not sent shows here.
#[test]
fn no_waiter_sleeps_through_a_notification() {
    for (split, depth) in [(None, 1), (None, 2), (Some(0), 1), (Some(0), 3)] {
        let options = FrontOptions { depth, split, buffer_len: 512, ..FrontOptions::default() };
        let (_, mut queue, backend) = pair(options);
        let stop = Arc::new(AtomicBool::new(false));
        let served = backend.run(Arc::clone(&stop));
        let load = Load {
            mix: Mix::SequentialRead,
            block_len: 512,
            depth,
            span_len: 512,
            // 4000 take a second on a quiet host.
            time: std::time::Duration::from_secs(20),
            requests_max: 4000,
            spin: false,
            seed: 1,
        };
        let report = load.run(&mut queue).unwrap();
        assert!(report.count > 100 && report.errors == 0, "{report:?}");
        stop.store(true, Ordering::Relaxed);
        queue.kick_always().unwrap();
        served.join().unwrap();
    }
}

#[test]
fn several_queues_share_a_domain() {
    let options = FrontOptions { queues: 3, depth: 4, buffer_len: 4096, ..FrontOptions::default() };
    let vm = crate::double::DoubleVm::new(2 * options.pages()).unwrap();
    let fronts = [0, 1].map(|_| Blkfront::on(vm.clone(), options.clone()).unwrap());
    assert!(Blkfront::on(vm.clone(), options.clone()).is_err(), "no pages left");
    let mut grants = Vec::new();
    for front in &fronts {
        let invitation = front.invitation().unwrap();
        assert_eq!(invitation.rings.len(), 3);
        grants.extend(invitation.rings.iter().flat_map(|ring| ring.ring.clone()));
    }
    grants.sort_unstable();
    grants.dedup();
    assert_eq!(grants.len(), 6);
}

#[test]
fn options_that_contradict_themselves_are_refused() {
    let good = FrontOptions::default();
    good.check().unwrap();
    let bad = [
        FrontOptions { order: 4, ..good.clone() },
        FrontOptions { split: Some(4), ..good.clone() },
        FrontOptions { split: Some(0), abi: Abi::X86_32, ..good.clone() },
        FrontOptions { queues: 0, ..good.clone() },
        FrontOptions { depth: 33, ..good.clone() },
        FrontOptions { depth: 0, ..good.clone() },
        FrontOptions { sector_size: 520, ..good.clone() },
        FrontOptions { segment_len: 8192, ..good.clone() },
        FrontOptions { segment_len: 256, ..good.clone() },
        FrontOptions { segment_len: 512, buffer_len: 4096 + 512, sector_size: 4096, ..good.clone() },
        FrontOptions { indirect: 4097, ..good.clone() },
        FrontOptions { buffer_len: 45057 + 511, ..good.clone() },
        FrontOptions { buffer_len: 100, ..good.clone() },
    ];
    for options in bad {
        assert_eq!(options.check().unwrap_err().kind(), io::ErrorKind::InvalidInput, "{options:?}");
    }
}

#[test]
fn a_front_end_asks_for_no_more_than_is_offered() {
    let wanted = FrontOptions {
        order: 3,
        split: Some(2),
        queues: 4,
        depth: 200,
        buffer_len: 1 << 20,
        indirect: 256,
        persistent: true,
        ..FrontOptions::default()
    };
    wanted.check().unwrap();
    let poor = wanted.within(&Offer::default());
    poor.check().unwrap();
    let want = FrontOptions {
        order: 0,
        split: None,
        queues: 1,
        depth: 32,
        buffer_len: 11 * 4096,
        indirect: 0,
        persistent: false,
        ..wanted.clone()
    };
    assert_eq!(poor, want);
    let all = Offer { order: 3, queues: 8, indirect: 4096, persistent: true, split: true, sector_size: 512 };
    assert_eq!(wanted.within(&all), wanted);
}
