//! Every moment at which a daemon can be killed or the power can fail.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::*;
use crate::quota::Limits;

/// A file: what is in it, and how much of that survives a power cut.
#[derive(Clone, Debug, Default)]
struct Content {
    bytes: Vec<u8>,
    synced: usize,
}

/// A directory in memory that dies at one operation and remembers what a disk would have.
#[derive(Clone, Debug, Default)]
struct Disk {
    files: BTreeMap<String, Content>,
    /// The names that survive a power cut, with the file each was of.
    durable: BTreeMap<String, String>,
    /// Operations until it dies.
    left: Option<usize>,
    done: usize,
}

#[derive(Clone, Debug, Default)]
struct Shared(Rc<RefCell<Disk>>);

impl Shared {
    /// One operation more; false when it is the one that does not come to its end.
    fn step(&self) -> bool {
        let mut disk = self.0.borrow_mut();
        disk.done += 1;
        match &mut disk.left {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => true,
        }
    }

    fn dead() -> io::Error {
        io::Error::other("the power is gone")
    }
}

impl Files for Shared {
    fn names(&mut self) -> io::Result<Vec<String>> {
        Ok(self.0.borrow().files.keys().cloned().collect())
    }

    fn read(&mut self, name: &str) -> io::Result<Vec<u8>> {
        Ok(self.0.borrow().files.get(name).ok_or_else(Self::dead)?.bytes.clone())
    }

    fn write_new(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let whole = self.step();
        let len = if whole { bytes.len() } else { bytes.len() / 2 };
        let content = Content { bytes: bytes[..len].to_vec(), synced: 0 };
        self.0.borrow_mut().files.insert(name.into(), content);
        if whole { Ok(()) } else { Err(Self::dead()) }
    }

    fn append(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let whole = self.step();
        let len = if whole { bytes.len() } else { bytes.len() / 2 };
        let mut disk = self.0.borrow_mut();
        disk.files.get_mut(name).ok_or_else(Self::dead)?.bytes.extend_from_slice(&bytes[..len]);
        if whole { Ok(()) } else { Err(Self::dead()) }
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        if !self.step() {
            return Err(Self::dead());
        }
        let mut disk = self.0.borrow_mut();
        let content = disk.files.get_mut(name).ok_or_else(Self::dead)?;
        content.synced = content.bytes.len();
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        if !self.step() {
            return Err(Self::dead());
        }
        let mut disk = self.0.borrow_mut();
        let content = disk.files.remove(from).ok_or_else(Self::dead)?;
        disk.files.insert(to.into(), content);
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        if !self.step() {
            return Err(Self::dead());
        }
        self.0.borrow_mut().files.remove(name).map(drop).ok_or_else(Self::dead)
    }

    fn sync_names(&mut self) -> io::Result<()> {
        if !self.step() {
            return Err(Self::dead());
        }
        let mut disk = self.0.borrow_mut();
        disk.durable = disk.files.keys().map(|name| (name.clone(), name.clone())).collect();
        Ok(())
    }
}

impl Disk {
    /// What is there after the power came back: names that were synced, or all of them (a directory may reach the disk
    /// by itself), and of each file what was synced and perhaps some of the rest.
    fn after_power_cut(&self, all_names: bool, more: usize) -> Shared {
        let mut disk = Self::default();
        for (name, content) in &self.files {
            if all_names || self.durable.contains_key(name) {
                let len = (content.synced + more).min(content.bytes.len());
                let content = Content { bytes: content.bytes[..len].to_vec(), synced: len };
                disk.files.insert(name.clone(), content);
            }
        }
        Shared(Rc::new(RefCell::new(disk)))
    }
}

fn text(store: &Store) -> String {
    let mut text = String::new();
    crate::tree::walk("/", store.live.root(), |path, node| {
        text += &format!("{path}={:?}{:?} ", node.value, node.perms.owner());
    });
    text
}

/// Steps of the story; after each the journal commits.
fn step(store: &mut Store, number: usize) {
    let limits = Limits::NONE;
    let mut view = store.view(&Caller::CONTROL, &limits);
    match number {
        3 => drop(view.remove("/a/1")),
        5 => {
            let mut transaction = crate::store::Transaction::new(&store.live);
            for path in ["/t/one", "/t/two", "/t/three"] {
                let mut view = store.view_in(&mut transaction, &Caller::CONTROL, &limits);
                view.write(path, b"together").expect("a write");
            }
            store.commit(transaction, &Caller::CONTROL, &limits).expect("alone");
        }
        _ => drop(view.write(&format!("/a/{number}"), &[number as u8; 40])),
    }
}

const STEPS: usize = 8;

/// Runs the story on a disk; the tree that was acknowledged last, and the one after it that was tried.
fn story(shared: &Shared, turn_at: usize) -> (String, Option<String>) {
    let mut acknowledged = text(&Store::default());
    let Ok((mut journal, mut store)) = Journal::open(shared.clone(), Sync::Always, Store::default()) else {
        return (acknowledged, None);
    };
    for number in 0..STEPS {
        step(&mut store, number);
        let tried = text(&store);
        if number == turn_at {
            // As when the log has become long.
            journal.log_len = u64::MAX / 2;
        }
        if journal.commit(&mut store).is_err() {
            return (acknowledged, Some(tried));
        }
        acknowledged = tried;
    }
    (acknowledged, None)
}

#[test]
fn what_was_acknowledged_is_there_whenever_the_power_fails() {
    let whole = Shared::default();
    let (last, _) = story(&whole, 4);
    let operations = whole.0.borrow().done;
    assert!(operations > 20 && last.contains("/t/three"), "{operations}");
    let mut both = [false; 2];
    for left in 0..operations {
        let shared = Shared::default();
        shared.0.borrow_mut().left = Some(left);
        let (acknowledged, tried) = story(&shared, 4);
        let disk = shared.0.borrow().clone();
        for (all_names, more) in [(false, 0), (true, 0), (true, 10), (true, 1 << 20)] {
            let again = disk.after_power_cut(all_names, more);
            let opened = Journal::open(again, Sync::Always, Store::default());
            let (_, store) = opened.unwrap_or_else(|error| panic!("after operation {left}: {error}"));
            let found = text(&store);
            let new = Some(&found) == tried.as_ref();
            assert!(
                found == acknowledged || new,
                "after operation {left}: {found}\nnot {acknowledged}\nnor {tried:?}"
            );
            both[usize::from(new)] = true;
        }
    }
    assert_eq!(both, [true; 2], "a step that was not acknowledged is there as a whole or not at all");
}

#[test]
fn a_daemon_that_was_killed_goes_on_with_what_it_wrote() {
    let scratch = tempfile::tempdir().expect("a directory");
    let mut texts = Vec::new();
    for round in 0..3 {
        let dir = Dir::open(scratch.path()).expect("the directory");
        assert!(Dir::open(scratch.path()).is_err(), "one daemon at a time");
        let (mut journal, mut store) = Journal::open(dir, Sync::Never, Store::default()).expect("a tree");
        texts.push(text(&store));
        for number in 0..STEPS {
            step(&mut store, number + 10 * round);
            journal.commit(&mut store).expect("room");
        }
        texts.push(text(&store));
    }
    assert_eq!((texts[2] == texts[1], texts[4] == texts[3]), (true, true));
    let files: Vec<_> = std::fs::read_dir(scratch.path()).expect("the directory").flatten().collect();
    assert_eq!(files.len(), 3, "the lock, a tree and a log: {files:?}");
}

#[test]
fn a_tree_that_is_damaged_is_named_and_left_alone() {
    let scratch = tempfile::tempdir().expect("a directory");
    let open = || Journal::open(Dir::open(scratch.path())?, Sync::Never, Store::default());
    drop(open().expect("a tree"));
    let path = scratch.path().join("tree.1");
    let mut bytes = std::fs::read(&path).expect("the tree");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, &bytes).expect("room");
    let error = open().expect_err("it is damaged").to_string();
    assert!(error.contains("tree.1") && error.contains("checksum"), "{error}");
    assert_eq!(std::fs::read(&path).expect("still there"), bytes);
}

#[test]
fn checksums_are_those_that_everybody_has() {
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
}
