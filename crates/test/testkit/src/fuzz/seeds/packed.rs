//! Packed rings to start from: size, features, where to read on, an in-flight region if there is one, memory.

use tapio_front::vhost_user::foreign::{DESC_F_AVAIL, DESC_F_NEXT, DESC_F_USED, Descriptor};

use super::Shelf;
use crate::fuzz::guest::GUEST;

const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const NEXT: u16 = DESC_F_NEXT;
const DATA: u64 = 0x2000;
const TABLE: u64 = 0x1a00;
/// Both wrap counters 1, both indices 0.
const START: u32 = 0x8000_8000;

fn request(sector: u8) -> [Descriptor; 3] {
    let data = GUEST + DATA;
    let id = sector.into();
    [
        Descriptor { at: data, len: 16, flags: NEXT, next: id },
        Descriptor { at: data + 512, len: 4096, flags: NEXT | WRITE, next: id },
        Descriptor { at: data + 16, len: 1, flags: WRITE, next: id },
    ]
}

fn memory(ring: &[Descriptor], table: &[Descriptor]) -> Vec<u8> {
    let mut memory = vec![0; DATA as usize];
    for (base, list) in [(0, ring), (TABLE as usize, table)] {
        for (index, descriptor) in list.iter().enumerate() {
            let at = base + 16 * index;
            memory[at..at + 16].copy_from_slice(&descriptor.to_packed_bytes());
        }
    }
    // The header of a read of sector 8.
    memory.extend([0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    memory
}

fn marked(list: &[Descriptor], wrap: bool) -> Vec<Descriptor> {
    let mark = if wrap { DESC_F_AVAIL } else { DESC_F_USED };
    list.iter().map(|descriptor| Descriptor { flags: descriptor.flags | mark, ..*descriptor }).collect()
}

pub fn put_into(shelf: &mut Shelf) {
    let mut put = |name: &str, (size, flags): (u8, u8), base: u32, rest: &[&[u8]]| {
        let head = [&[size - 1, flags][..], &base.to_le_bytes()].concat();
        shelf.put("packed_vring", name, [&head[..], &rest.concat()].concat());
    };
    let three: Vec<Descriptor> = (1..=3).flat_map(request).collect();
    let chains = memory(&marked(&three, true), &[]);
    put("chains", (12, 0), START, &[&chains]);
    put("chains-event-index", (9, 4), START, &[&chains]);
    let table = Descriptor { at: GUEST + TABLE, len: 48, flags: INDIRECT, next: 5 };
    let indirect = memory(&marked(&[table; 8], true), &request(5));
    put("indirect", (8, 0), START, &[&indirect]);
    put("indirect-refused", (8, 1), START, &[&indirect]);
    // One request across the end of the ring: its last descriptor is the first of the next round.
    let [header, data, status] = request(1);
    let mut around = marked(&[status], false);
    around.extend([Descriptor::default(), Descriptor::default()]);
    around.extend(marked(&[header, data], true));
    put("around-the-end", (5, 0), 0x8003_8003, &[&memory(&around, &[])]);
    put("new-without-counters", (8, 0), 0, &[&memory(&[], &[])]);
    let endless = Descriptor { flags: NEXT, ..header };
    put("endless", (8, 0), START, &[&memory(&marked(&[endless; 8], true), &[])]);
    put("nowhere", (8, 0), 0x8000_8009, &[&chains]);
    put("inflight-new", (9, 8), START, &[&vec![0; region_len(9)], &chains]);
    put("inflight", (9, 8), START, &[&left_behind(), &chains]);
}

fn region_len(size: usize) -> usize {
    (32 + 32 * size).next_multiple_of(64)
}

/// A region of nine entries with two requests of three and one descriptors in flight, taken in that order.
fn left_behind() -> Vec<u8> {
    let mut region = vec![0; region_len(9)];
    let mut put = |at: usize, bytes: &[u8]| region[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(1u64 << 34).to_ne_bytes());
    // Version, entries, free, free before, used, used before, both wrap counters.
    for (index, word) in [1u16, 9, 4, 4, 0, 0].into_iter().enumerate() {
        put(8 + 2 * index, &word.to_ne_bytes());
    }
    put(20, &[1, 1]);
    for entry in 0..9u16 {
        let at = 32 + 32 * usize::from(entry);
        put(at + 2, &(entry + 1).to_ne_bytes());
        let Some(descriptor) = request(3).get(usize::from(entry)).copied() else { continue };
        put(at + 16, &descriptor.next.to_ne_bytes());
        put(at + 18, &descriptor.flags.to_ne_bytes());
        put(at + 20, &descriptor.len.to_ne_bytes());
        put(at + 24, &descriptor.at.to_ne_bytes());
    }
    // In flight; last entry and number of entries; the counter.
    for (entry, last, count) in [(0, 2u16, 3u16), (3, 3, 1)] {
        let at = 32 + 32 * entry;
        put(at, &[1]);
        put(at + 4, &last.to_ne_bytes());
        put(at + 6, &count.to_ne_bytes());
        put(at + 8, &(entry as u64).to_ne_bytes());
    }
    region
}
