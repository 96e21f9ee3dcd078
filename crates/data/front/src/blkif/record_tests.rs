use super::*;

fn slot(mark: u8) -> Slot {
    Slot([mark; REQUEST_LEN_MAX])
}

fn marks(left: &Left) -> Vec<u8> {
    left.iter().map(|(_, slot)| slot.0[111]).collect()
}

/// One step of serving, as single stores: what a kill can come between.
#[derive(Clone, Copy, Debug)]
enum Store {
    Copy(u32, u8),
    Taken(u32, u8),
    Number(u32, u32),
    Answered(u32, u32),
    Ring(u32),
    Free(u32),
    Shown(u32),
}

/// Carries out the first stores of a story and gives where the ring then stands.
fn cut(record: &Record, stores: &[Store]) -> u32 {
    let mut queue = record.queue(0);
    queue.begin(7, 0);
    let mut ring = 0;
    for store in stores {
        let at = |index| queue.entry(index);
        match *store {
            // The bytes alone: the state is not yet stored.
            Store::Copy(index, mark) => {
                let line = u64::from(mark);
                queue.memory.u64(at(index) + AT_LINE).store(line, Ordering::Relaxed);
                for word in 0..REQUEST_LEN_MAX / 8 {
                    let value = u64::from_ne_bytes([mark; 8]);
                    queue.memory.u64(at(index) + AT_REQUEST + word * 8).store(value, Ordering::Relaxed);
                }
            }
            Store::Taken(index, _) => queue.state(index).store(TAKEN, Ordering::Release),
            Store::Number(index, response) => {
                queue.memory.u32(at(index) + AT_RESPONSE).store(response, Ordering::Relaxed);
            }
            Store::Answered(index, _) => queue.state(index).store(ANSWERED, Ordering::Release),
            Store::Ring(rsp_prod) => ring = rsp_prod,
            Store::Free(index) => queue.state(index).store(FREE, Ordering::Release),
            Store::Shown(rsp_prod) => queue.shown().store(rsp_prod, Ordering::Release),
        }
    }
    ring
}

#[test]
fn a_cut_at_every_store_repeats_what_the_guest_has_not_seen_and_nothing_else() {
    // Three requests, answered out of order in two batches; then a fourth in the place of the first.
    let story = [
        Store::Copy(0, 1),
        Store::Taken(0, 1),
        Store::Copy(1, 2),
        Store::Taken(1, 2),
        Store::Copy(2, 3),
        Store::Taken(2, 3),
        Store::Number(2, 0),
        Store::Answered(2, 3),
        Store::Number(0, 1),
        Store::Answered(0, 1),
        Store::Ring(2),
        Store::Shown(2),
        Store::Free(2),
        Store::Free(0),
        Store::Copy(0, 4),
        Store::Taken(0, 4),
        Store::Number(1, 2),
        Store::Answered(1, 2),
        Store::Ring(3),
        Store::Shown(3),
        Store::Free(1),
    ];
    for cut_at in 0..=story.len() {
        let record = Record::private(1, 4).unwrap();
        let done = &story[..cut_at];
        let ring = cut(&record, done);
        // What the model says: taken, and not among the batches that the ring showed.
        let mut want: Vec<u8> = Vec::new();
        let mut batch: Vec<u8> = Vec::new();
        for store in done {
            match store {
                Store::Taken(_, mark) => want.push(*mark),
                Store::Answered(_, mark) => batch.push(*mark as u8),
                Store::Ring(_) => {
                    want.retain(|mark| !batch.contains(mark));
                    batch.clear();
                }
                _ => {}
            }
        }
        let left = record.queue(0).recover(7, ring).unwrap();
        assert_eq!(marks(&left), want, "cut before store {cut_at}: {:?}", story.get(cut_at));
        // Requests that were never taken are read from the ring: those in flight are as many as the model has.
        // And a process that dies while recovering has lost nothing.
        assert_eq!(record.queue(0).recover(7, ring), Ok(left), "cut before store {cut_at}, again");
    }
}

#[test]
fn the_steps_of_serving_are_those_of_the_story() {
    let record = Record::private(2, 4).unwrap();
    let mut queue = record.queue(1);
    queue.begin(9, u32::MAX);
    for (index, mark) in [(3, 1), (0, 2), (1, 3)] {
        queue.take(index, &slot(mark));
    }
    queue.answer(0, u32::MAX);
    queue.answer(3, 0);
    let left = record.queue(1).recover(9, u32::MAX).unwrap();
    assert_eq!(marks(&left), [1, 2, 3], "nothing was shown");
    queue.answer(0, u32::MAX);
    queue.answer(3, 0);
    let left = record.queue(1).recover(9, 1).unwrap();
    assert_eq!(marks(&left), [3], "both were shown, and their entries not yet free");
    queue.published(&[0, 3], 1);
    let mut next = record.queue(1);
    assert_eq!(marks(&next.recover(9, 1).unwrap()), [3]);
    next.take(2, &slot(4));
    assert_eq!(marks(&record.queue(1).recover(9, 1).unwrap()), [3, 4], "the line goes on");
    assert_eq!(record.queue(0).recover(9, 1), Err(Mismatch::Identity));
}

#[test]
fn what_belongs_to_another_ring_is_not_repeated() {
    let record = Record::private(1, 8).unwrap();
    let mut queue = record.queue(0);
    queue.begin(1, 40);
    queue.take(0, &slot(1));
    assert_eq!(record.queue(0).recover(2, 40), Err(Mismatch::Identity));
    for rsp_prod in [39, 41, 0, u32::MAX] {
        assert_eq!(
            record.queue(0).recover(1, rsp_prod),
            Err(Mismatch::Numbers { shown: 40, rsp_prod }),
            "nothing was being answered"
        );
    }
    assert_eq!(marks(&record.queue(0).recover(1, 40).unwrap()), [1]);
}

#[test]
fn a_file_outlives_its_process_and_has_one_owner() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("5-51712");
    let record = Record::open(&path, 1, 32, true).unwrap();
    assert!(!record.is_inherited());
    record.queue(0).begin(3, 0);
    record.queue(0).take(5, &slot(6));
    let refused = Record::open(&path, 1, 32, true).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists, "{refused}");
    drop(record);
    let record = Record::open(&path, 1, 32, true).unwrap();
    assert!(record.is_inherited());
    let left = record.queue(0).recover(3, 0).unwrap();
    assert_eq!((left[0].0, marks(&left)), (5, vec![6]));
    drop(record);
    // Another shape is another device's; a fresh start wants nothing of it.
    assert!(!Record::open(&path, 2, 32, true).unwrap().is_inherited());
    let record = Record::open(&path, 2, 32, false).unwrap();
    assert!(!record.is_inherited());
    record.remove();
    assert!(!path.exists());
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    assert!(Record::open(&path, 1, 32, true).is_err(), "a link is not followed");
}

#[test]
fn any_bytes_in_a_record_are_survived() {
    for fill in [0u8, 1, 2, 3, 0x7f, 0xff] {
        let record = Record::private(1, 16).unwrap();
        let mut queue = record.queue(0);
        for at in (queue.base..queue.memory.len()).step_by(8) {
            queue.memory.u64(at).store(u64::from_ne_bytes([fill; 8]), Ordering::Relaxed);
        }
        let identity = u64::from_ne_bytes([fill; 8]);
        for rsp_prod in [0, 1, u32::from_ne_bytes([fill; 4])] {
            if let Ok(left) = queue.recover(identity, rsp_prod) {
                assert!(left.len() <= 16);
            }
        }
    }
}
