//! What is compared: variants of a guest and its disk, under some loads.

use tapio_load::Mix;
use tapio_types::Movement;
use tapio_xen::blkfront::FrontOptions;

/// Bytes of a page, and of a segment.
pub const PAGE: u32 = 4096;
/// Segments that a direct request holds.
const DIRECT: u32 = 11;

/// What a disk reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A file with data, in memory unless another directory was named.
    Raw,
    /// Nothing: reads are zeroes made in memory, so that the ring's own costs are seen.
    Nothing,
}

/// One load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    pub name: &'static str,
    pub mix: Mix,
    pub block_len: u32,
    /// Requests in flight on each ring; 0: as many as the ring holds.
    pub depth: u32,
    pub backing: Backing,
}

/// One way of doing it. The first of a part is what the others are compared to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    pub name: &'static str,
    pub movement: Movement,
    pub order: u32,
    /// A ring of responses apart, of so many pages as a power of two.
    pub split: Option<u32>,
    /// Segments of a request, at most.
    pub segments: u32,
    pub queues: u32,
    pub polls: bool,
}

/// A comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub name: &'static str,
    pub title: &'static str,
    pub variants: Vec<Variant>,
    pub works: Vec<Work>,
}

const COPY: Variant = Variant {
    name: "copy",
    movement: Movement::Copy,
    order: 0,
    split: None,
    segments: DIRECT,
    queues: 1,
    polls: false,
};

const fn work(name: &'static str, mix: Mix, block_len: u32, depth: u32, backing: Backing) -> Work {
    Work { name, mix, block_len, depth, backing }
}

const NULL_Q32: Work = work("null-4k-q32", Mix::RandomRead, PAGE, 32, Backing::Nothing);
const READ_Q1: Work = work("read-4k-q1", Mix::RandomRead, PAGE, 1, Backing::Raw);
const READ_Q32: Work = work("read-4k-q32", Mix::RandomRead, PAGE, 32, Backing::Raw);
const WRITE_Q32: Work = work("write-4k-q32", Mix::RandomWrite, PAGE, 32, Backing::Raw);

/// All comparisons of single guests, in the order in which they run.
pub fn parts() -> Vec<Part> {
    let of = |movement: Movement| Variant { name: movement.name(), movement, ..COPY };
    let movements: Vec<_> = movements().into_iter().map(of).collect();
    let large = movements.iter().map(|variant| Variant { segments: 256, order: 2, ..*variant }).collect();
    vec![
        Part {
            name: "movement",
            title: "ways of moving data, ring of one page, direct requests",
            variants: movements,
            works: vec![
                NULL_Q32,
                READ_Q1,
                READ_Q32,
                WRITE_Q32,
                work("read-44k-q16", Mix::RandomRead, DIRECT * PAGE, 16, Backing::Raw),
            ],
        },
        Part {
            name: "large",
            title: "ways of moving data, ring of four pages, requests of 1 MiB",
            variants: large,
            works: vec![
                work("read-1m-q4", Mix::SequentialRead, 256 * PAGE, 4, Backing::Raw),
                work("write-1m-q4", Mix::SequentialWrite, 256 * PAGE, 4, Backing::Raw),
            ],
        },
        Part {
            name: "order",
            title: "size of the ring, as many requests in flight as it holds",
            variants: vec![
                Variant { name: "order-0", ..COPY },
                Variant { name: "order-1", order: 1, ..COPY },
                Variant { name: "order-2", order: 2, ..COPY },
                Variant { name: "order-3", order: 3, ..COPY },
            ],
            works: vec![
                work("null-4k-full", Mix::RandomRead, PAGE, 0, Backing::Nothing),
                work("read-4k-full", Mix::RandomRead, PAGE, 0, Backing::Raw),
            ],
        },
        Part {
            name: "segments",
            title: "segments of a request, 2 MiB in flight; the first are direct requests",
            variants: vec![
                Variant { name: "11", order: 1, ..COPY },
                Variant { name: "32", order: 1, segments: 32, ..COPY },
                Variant { name: "64", order: 1, segments: 64, ..COPY },
                Variant { name: "128", order: 1, segments: 128, ..COPY },
                Variant { name: "256", order: 1, segments: 256, ..COPY },
            ],
            // Length and depth follow from the segments.
            works: vec![
                work("read", Mix::SequentialRead, 0, 0, Backing::Raw),
                work("write", Mix::SequentialWrite, 0, 0, Backing::Raw),
            ],
        },
        Part {
            name: "polling",
            title: "the disk process spins for requests, up to 32 us, or sleeps",
            variants: vec![
                Variant { name: "sleeping", ..COPY },
                Variant { name: "polling", polls: true, ..COPY },
            ],
            works: vec![NULL_Q32, READ_Q1, READ_Q32],
        },
        Part {
            name: "split",
            title: "requests and responses in one ring or in two",
            variants: vec![
                Variant { name: "one-ring", ..COPY },
                Variant { name: "split-0", split: Some(0), ..COPY },
                Variant { name: "one-ring-2", order: 2, ..COPY },
                Variant { name: "split-2", order: 2, split: Some(2), ..COPY },
            ],
            works: vec![
                NULL_Q32,
                work("null-4k-full", Mix::RandomRead, PAGE, 0, Backing::Nothing),
                work("read-4k-full", Mix::RandomRead, PAGE, 0, Backing::Raw),
            ],
        },
        Part {
            name: "queues",
            title: "rings of one device, 32 requests in flight on each",
            variants: vec![
                Variant { name: "1-ring", ..COPY },
                Variant { name: "2-rings", queues: 2, ..COPY },
                Variant { name: "3-rings", queues: 3, ..COPY },
            ],
            works: vec![NULL_Q32, READ_Q32],
        },
    ]
}

/// The ways of moving data, the usual one first: those of these names that there are.
pub fn movements() -> Vec<Movement> {
    ["copy", "persistent", "map", "bounce"].iter().filter_map(|name| name.parse().ok()).collect()
}

impl Variant {
    /// The load on each of its rings: bytes of a request, and requests in flight.
    pub fn shape(&self, work: &Work) -> (u32, u32) {
        let block_len = if work.block_len == 0 { self.segments * PAGE } else { work.block_len };
        let full = self.options(block_len, 1).ring_size();
        let depth = match (work.depth, work.block_len) {
            (0, 0) => (2 << 20) / block_len,
            (0, _) => full,
            (depth, _) => depth,
        };
        (block_len, depth.clamp(1, full.min(1024)))
    }

    /// What its guest asks for.
    pub fn options(&self, block_len: u32, depth: u32) -> FrontOptions {
        FrontOptions {
            order: self.order,
            split: self.split,
            queues: self.queues,
            ..front(self.movement, self.segments, block_len, depth)
        }
    }
}

/// A front end with one small ring: how its data is moved, the most segments and bytes of a request, and the most
/// requests in flight.
pub fn front(movement: Movement, segments: u32, block_len: u32, depth: u32) -> FrontOptions {
    FrontOptions {
        depth,
        buffer_len: block_len,
        indirect: if segments > DIRECT { segments as u16 } else { 0 },
        persistent: movement == Movement::Persistent,
        ..FrontOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_variant_can_carry_every_work_of_its_part() {
        let names: BTreeSet<_> = parts().iter().map(|part| part.name).collect();
        assert_eq!(names.len(), parts().len());
        for part in parts() {
            let variants: BTreeSet<_> = part.variants.iter().map(|variant| variant.name).collect();
            assert_eq!(variants.len(), part.variants.len(), "{}", part.name);
            for (variant, work) in
                part.variants.iter().flat_map(|one| part.works.iter().map(move |work| (one, work)))
            {
                let (block_len, depth) = variant.shape(work);
                let options = variant.options(block_len, depth);
                options
                    .check()
                    .unwrap_or_else(|error| panic!("{} {} {}: {error}", part.name, variant.name, work.name));
                let segments = block_len.div_ceil(PAGE);
                assert!(
                    segments <= variant.segments && options.request_len_max() == block_len,
                    "{}",
                    variant.name
                );
            }
        }
    }

    #[test]
    fn a_full_ring_is_as_full_as_it_can_be() {
        let order = parts().into_iter().find(|part| part.name == "order").expect("there is one");
        let depths: Vec<_> = order.variants.iter().map(|variant| variant.shape(&order.works[0]).1).collect();
        assert_eq!(depths, [32, 64, 128, 256]);
        let segments = parts().into_iter().find(|part| part.name == "segments").expect("there is one");
        let under_way: Vec<_> = segments
            .variants
            .iter()
            .map(|variant| variant.shape(&segments.works[0]))
            .map(|(len, depth)| len * depth)
            .collect();
        assert!(under_way.iter().all(|bytes| (2 << 20) - bytes < (44 << 10)), "{under_way:?}");
    }
}
