//! Requests cost no allocation, on either side of a ring, whichever way their data is moved.

use tapio_fixtures::counting::{Counting, allocations};
use tapio_xen::blkfront::{Blkfront, Command, FrontOptions};
use tapio_xen::blkif::{BackRing, Request, Segment, op, status};
use tapio_xen::double::Guest;
use tapio_xen::{CopyBatch, Direction, Domain, GrantRef, Rights};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How a back end reaches data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Copy,
    Map,
}

/// What both sides keep.
struct Kept {
    batch: CopyBatch,
    segments: Vec<Segment>,
    data: Vec<u8>,
    answers: Vec<tapio_xen::blkfront::Completion>,
}

fn serve(ring: &mut BackRing, domain: &Domain, way: Way, kept: &mut Kept) {
    ring.look().expect("a ring that keeps the rules");
    while let Some(slot) = ring.take() {
        let request = Request::decode(&slot, ring.abi()).expect("a request");
        let count = usize::from(request.segments);
        if request.indirect {
            let pages = domain.map(request.indirect_pages(), Rights::Read).expect("pages of segments");
            // SAFETY: the pages hold as many.
            unsafe { Segment::copy_from_page(pages.as_ptr(), &mut kept.segments[..count]) };
        } else {
            kept.segments[..count].copy_from_slice(request.direct_segments());
        }
        let read = request.op == op::READ;
        match way {
            Way::Copy => {
                let direction = if read { Direction::ToDomain } else { Direction::FromDomain };
                kept.batch.clear();
                for (index, segment) in kept.segments[..count].iter().enumerate() {
                    let (offset, len) = segment.span().expect("inside the page");
                    let local = kept.data[index * 4096..].as_mut_ptr();
                    // SAFETY: there are 4096 bytes for each segment, and they outlive the copy.
                    unsafe { kept.batch.push(direction, 5, segment.grant, offset, local, len) };
                }
                domain.copy(&mut kept.batch).expect("the copy");
                assert!((0..count).all(|index| kept.batch.status(index).is_ok()));
            }
            Way::Map => {
                let mut grants = [GrantRef::default(); 32];
                for (grant, segment) in grants.iter_mut().zip(&kept.segments[..count]) {
                    *grant = segment.grant;
                }
                let rights = if read { Rights::Write } else { Rights::Read };
                drop(domain.map(&grants[..count], rights).expect("the pages"));
            }
        }
        ring.push(&request.response(status::OKAY));
    }
    let _ = ring.publish();
    let _ = ring.arm().expect("a ring that keeps the rules");
}

#[test]
fn requests_cost_none() {
    let direct = FrontOptions::default();
    let shapes = [
        direct.clone(),
        FrontOptions { split: Some(0), ..direct.clone() },
        FrontOptions { persistent: true, ..direct.clone() },
        FrontOptions { indirect: 32, buffer_len: 32 * 4096, ..direct },
    ];
    for (options, way) in
        shapes.into_iter().flat_map(|options| [Way::Copy, Way::Map].map(|way| (options.clone(), way)))
    {
        let mut front = Blkfront::new(options.clone()).expect("a front end");
        let invitation = front.invitation().expect("descriptors");
        let mut queue = front.take_queues().remove(0);
        let domain = Domain::Double(Guest::from_fd(invitation.memory, 5).expect("the double's memory"));
        let map = |grants: &[GrantRef]| domain.map(grants, Rights::Write).expect("the ring");
        let pages = &invitation.rings[0];
        let mut ring = if options.split.is_some() {
            BackRing::new_split(map(&pages.ring), map(&pages.responses)).expect("a ring")
        } else {
            BackRing::new(map(&pages.ring), invitation.abi).expect("a ring")
        };
        let mut kept = Kept {
            batch: CopyBatch::default(),
            segments: vec![Segment::default(); 32],
            data: vec![0; 32 * 4096],
            answers: Vec::with_capacity(32),
        };
        let mut turn = |queue: &mut tapio_xen::blkfront::FrontQueue, kept: &mut Kept| {
            let len = options.request_len_max();
            for command in [Command::Write { at: 0, len }, Command::Read { at: 0, len }] {
                while queue.submit(&command).expect("grants").is_some() {}
                queue.kick().expect("the channel");
                serve(&mut ring, &domain, way, kept);
                kept.answers.clear();
                queue.reap(&mut kept.answers).expect("answers");
                assert_eq!(kept.answers.len(), 32);
            }
        };
        // The batch of copies grows to its size once.
        turn(&mut queue, &mut kept);
        let before = allocations();
        (0..10).for_each(|_| turn(&mut queue, &mut kept));
        assert_eq!(allocations() - before, 0, "{options:?}, {way:?}");
        let _ = std::hint::black_box(Box::new(1));
        assert!(allocations() > before, "the counter counts");
    }
}
