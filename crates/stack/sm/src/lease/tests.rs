//! Hosts in one area, each with a run directory of its own, their keepers as threads.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tapio_types::Access;
use uuid::Uuid;

use super::member::Member;
use super::place::of_directory;
use super::{Fence, HOST, SHARED};
use crate::traits::{Config, Ctx, LiveDisk};

/// A caller without disks.
struct NoDisks;

impl Ctx for NoDisks {
    fn is_cancelled(&self) -> bool {
        false
    }

    fn progress(&self, _: f64) {}

    fn live(&self, _: Uuid) -> Option<Box<dyn LiveDisk>> {
        None
    }

    fn step(&self, _: &'static str) {}
}

const SR: Uuid = Uuid::from_u128(0x5e);

fn joined(run_dir: &Path, area: &Path, host: u128) -> Result<Member, tapio_types::ApiError> {
    let config = Config::from([
        (HOST.to_owned(), format!("{} h{host}", Uuid::from_u128(host))),
        (SHARED.to_owned(), "true".to_owned()),
        ("host-silence".to_owned(), "8".to_owned()),
    ]);
    of_directory(&NoDisks, (SR, area), run_dir, &config).map(|member| member.expect("there is an area"))
}

#[test]
fn hosts_take_turns_and_hold_what_no_other_holds() {
    let dirs: Vec<_> = (0..4).map(|_| tempfile::tempdir().expect("a directory")).collect();
    let area = dirs[0].path();
    let one = joined(dirs[1].path(), area, 1).expect("it joins");
    let two = joined(dirs[2].path(), area, 2).expect("it joins");
    assert!(two.number() > one.number(), "a later host has the greater number");
    let copied = joined(dirs[3].path(), area, 1).err().expect("its UUID is in use");
    assert!(copied.params[1].contains("was it copied"), "{copied}");

    let (disk, other) = (Uuid::from_u128(7), Uuid::from_u128(8));
    let hold = |host: &Member, vdi, access| host.hold(&host.lock(&NoDisks)?, vdi, access);
    hold(&one, disk, Access::ReadWrite).expect("it is free");
    hold(&one, other, Access::ReadOnly).expect("it is free");
    let refused = hold(&two, disk, Access::ReadOnly).expect_err("it is written elsewhere");
    assert!(refused.params[1].contains("open for writing on host h1"), "{refused}");
    hold(&two, other, Access::ReadOnly).expect("both read");
    assert!(hold(&two, other, Access::ReadWrite).is_err(), "one reads");
    one.let_go(disk).expect("it is let go");
    hold(&two, disk, Access::ReadWrite).expect("it is free");
    assert!(one.collector().expect("asked").is_none() && two.collector().expect("asked").is_some());

    // What changes the same thing without a lock of its own.
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    std::thread::scope(|scope| {
        for host in [&one, &two] {
            let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
            scope.spawn(move || {
                for _ in 0..10 {
                    let _held = host.lock(&NoDisks).expect("its turn comes");
                    most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::yield_now();
                    inside.fetch_sub(1, Ordering::SeqCst);
                }
            });
        }
    });
    assert_eq!(most.load(Ordering::SeqCst), 1);

    one.leave().expect("it leaves");
    assert!(one.lock(&NoDisks).is_err() && one.check().is_err(), "it has left");
    assert!(two.others().expect("asked").is_empty() && two.collector().expect("asked").is_none());
    let again = joined(dirs[1].path(), area, 1).expect("it is back");
    assert!(again.number() > two.number());
    again.leave().and_then(|()| two.end()).expect("they leave");
    assert_eq!(std::fs::read_dir(area).expect("the directory").count(), 0);
    let none = of_directory(&NoDisks, (SR, area), dirs[1].path(), &Config::new());
    assert!(none.is_ok_and(|none| none.is_none()), "a caller without a name has no other hosts");
}
