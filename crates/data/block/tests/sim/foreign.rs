//! Other writers of an image whose process was killed: a process on another host, whose intent log is its own, and a
//! program that knows nothing of logs.
//!
//! After such a writer the records of the process that was killed are worth nothing: what it answered and did not
//! flush is lost as after a power cut, and what the other writer left is the truth. After a mere reader they count.

use std::path::PathBuf;
use std::sync::Arc;

use tapio_format::FormatErrorKind;
use tapio_format::live::vhd::HeapLogs;
use tapio_format::vhd::offline::{Chain, Image, Layer, OpenOptions};
use tapio_ring::sim::{Durable, Random};
use tapio_types::{ImageKind, SECTOR_LEN};

use crate::model::{fill, stamp_of};
use crate::rig::{Content, RigKind, ZONE_SECTORS, ZONES, place};
use crate::story::{End, World, prepared};

/// What a session is, and how it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Session {
    /// A process on one of the hosts.
    Ours { host: usize, end: End },
    /// A program that opens the image as XenServer's tapdisk does; it closes it, or is killed.
    Foreign { closes: bool },
    /// A program that reads the image and writes nothing.
    Reader,
}

fn draw(random: &mut Random, foreign: bool) -> Session {
    if foreign && random.chance(1, 3) {
        return match random.below(4) {
            0 => Session::Reader,
            1 => Session::Foreign { closes: false },
            _ => Session::Foreign { closes: true },
        };
    }
    let end = [End::Kill, End::Kill, End::Kill, End::Close, End::PowerCut][random.below(5) as usize];
    Session::Ours { host: random.below(2) as usize, end }
}

/// Two hosts and, with `foreign`, another program use one image in turn.
pub fn run(kind: RigKind, seed: u64, foreign: bool) -> Result<(), String> {
    let mut random = Random::new(seed ^ 0xf04e);
    let mut world = prepared(kind, seed)?;
    let mut logs: [Arc<HeapLogs>; 2] = [Arc::default(), Arc::default()];
    // Where the records of what was answered last are.
    let mut last: Option<usize> = None;
    for _ in 0..4 + random.below(4) {
        let session = draw(&mut random, foreign);
        let told = match session {
            Session::Ours { host, end } => {
                world.rig.memory = Arc::clone(&logs[host]);
                let told = ours(&mut world, &mut random, last.is_none_or(|last| last == host), end);
                // A power cut takes the host's memory with it.
                logs[host] = Arc::clone(&world.rig.memory);
                last = Some(host);
                told
            }
            Session::Foreign { closes } => {
                last = None;
                write(&mut world, &mut random, closes)
            }
            Session::Reader => chain(&leaf(&world).1, false).map(drop),
        };
        told.map_err(|why| format!("{session:?}: {why}"))?;
    }
    let host = last.unwrap_or(0);
    world.rig.memory = Arc::clone(&logs[host]);
    world.verify(End::Kill)
}

/// A process of ours: first it finds what it must, then it works.
fn ours(world: &mut World, random: &mut Random, knows_all: bool, end: End) -> Result<(), String> {
    // Of what the other host's process answered it knows what a power cut would have left.
    world.verify(if knows_all { End::Kill } else { End::PowerCut })?;
    let cut = (end != End::Close && random.chance(1, 2)).then(|| 1 + random.below(60));
    world.work(end, false, cut, None)?;
    if end != End::Kill {
        world.verify(end)?;
    }
    Ok(())
}

fn leaf(world: &World) -> (PathBuf, Durable, bool) {
    let (kind, path, is_device) = &world.rig.images[0];
    assert!(*kind == ImageKind::Vhd && world.rig.images.len() == 1, "the foreign program writes single VHDs");
    (path.clone(), world.rig.host.content(path), *is_device)
}

fn chain(content: &Durable, is_device: bool) -> Result<Chain<Content>, String> {
    let medium = Content(content.clone(), is_device);
    let image = Image::open_on(medium, "image".as_ref(), OpenOptions::READ).map_err(|why| why.to_string())?;
    Ok(Chain::new(vec![Layer::Vhd(Box::new(image))]))
}

/// Opens the image for writing as tapdisk does: what it sees is the truth from now on. It makes the footer at the end
/// unusable while it works; closing writes it behind the data, cuts the file there, and writes the copy anew.
fn write(world: &mut World, random: &mut Random, closes: bool) -> Result<(), String> {
    let (path, content, is_device) = leaf(world);
    let seen = chain(&content, is_device)?;
    let mut buffer = vec![0; (ZONE_SECTORS * SECTOR_LEN) as usize];
    let mut model = world.model.borrow_mut();
    for zone in ZONES {
        seen.read_at(zone * SECTOR_LEN, &mut buffer).map_err(|why| why.to_string())?;
        for (index, sector) in buffer.chunks_exact(SECTOR_LEN as usize).enumerate() {
            let stamp = stamp_of(sector)?;
            model.check_after_cut(zone + index as u64, stamp).map_err(|why| format!("at opening: {why}"))?;
        }
    }
    let medium = Content(content, is_device);
    let mut image = Image::open_on(medium, &path, OpenOptions::WRITE).map_err(|why| why.to_string())?;
    for _ in 0..random.below(6) {
        let sectors = place(random);
        let stamp = model.fresh_stamp();
        let mut data = vec![0; (sectors.end - sectors.start) as usize * SECTOR_LEN as usize];
        data.chunks_exact_mut(SECTOR_LEN as usize).for_each(|sector| fill(stamp, sector));
        let issued = model.begin(sectors.clone(), stamp, false);
        let at = sectors.start * SECTOR_LEN;
        let written = image.write_at(at, &data).and_then(|()| image.commit());
        model.end(sectors, issued, written.is_ok(), true);
        match written {
            // It puts new blocks at the end alone, and a device has one.
            Err(why) if why.kind() == FormatErrorKind::OutOfSpace => break,
            written => written.map_err(|why| why.to_string())?,
        }
    }
    if closes {
        image.write_footer().map_err(|why| why.to_string())?;
    }
    let mut medium = image.into_medium();
    if !closes {
        let end = medium.0.len();
        medium.0.write(end - SECTOR_LEN, &[0xc7; SECTOR_LEN as usize]);
    }
    world.rig.host.put_content(&path, medium.0, is_device);
    Ok(())
}
