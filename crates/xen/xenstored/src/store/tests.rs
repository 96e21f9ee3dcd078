//! The store against a model: every committed transaction must be what it would have been all at once at its commit.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits::NONE;

fn write(store: &mut Store, path: &str, value: &str) {
    store.view(&Caller::CONTROL, &LIMITS).write(path, value.as_bytes()).expect("a write");
}

fn read(store: &mut Store, path: &str) -> Option<String> {
    let mut view = store.view(&Caller::CONTROL, &LIMITS);
    view.read(path).ok().map(|value| String::from_utf8(value.to_vec()).expect("text"))
}

/// A request of a step.
#[derive(Clone, Debug)]
enum Ask {
    Write(String, u8),
    Mkdir(String),
    Remove(String),
    Read(String),
    List(String),
    Owner(String, u32),
}

#[derive(Clone, Debug)]
enum Step {
    Begin,
    /// In one of the open transactions, or outside.
    Do(Option<usize>, Ask),
    End(usize, bool),
}

/// What was answered.
type Answer = Result<String, Errno>;

/// A transaction, what the model made of it, and what was asked and answered.
type Open = (Transaction, Model, Vec<(Ask, Answer)>);

/// Paths, values and owners, cloned for every transaction: slow and plain.
#[derive(Clone, Debug, Default, PartialEq)]
struct Model(BTreeMap<String, (Vec<u8>, u32)>);

impl Model {
    fn parent(path: &str) -> &str {
        split(path).map_or("/", |(parent, _)| parent)
    }

    fn has(&self, path: &str) -> bool {
        path == "/" || self.0.contains_key(path)
    }

    fn make(&mut self, path: &str) {
        if !self.has(path) {
            self.make(Self::parent(path));
            let owner = self.0.get(Self::parent(path)).map_or(0, |node| node.1);
            self.0.insert(path.into(), (Vec::new(), owner));
        }
    }

    fn ask(&mut self, ask: &Ask) -> Answer {
        let ok = Ok(String::new());
        match ask {
            Ask::Write(path, value) => {
                self.make(path);
                if let Some(node) = self.0.get_mut(path) {
                    node.0 = vec![*value];
                }
                ok
            }
            Ask::Mkdir(path) => {
                self.make(path);
                ok
            }
            Ask::Remove(path) if !self.has(path) => {
                if self.has(Self::parent(path)) {
                    ok
                } else {
                    Err(Errno::ENOENT)
                }
            }
            Ask::Remove(path) => {
                let below = format!("{path}/");
                self.0.retain(|known, _| known != path && !known.starts_with(&below));
                ok
            }
            Ask::Read(path) => self.0.get(path).map(|node| format!("{:?}", node.0)).ok_or(Errno::ENOENT),
            Ask::List(path) if self.has(path) => {
                let children = self.0.keys().filter(|known| Self::parent(known) == path);
                Ok(children
                    .map(|known| known.rsplit('/').next().unwrap_or_default().to_owned() + " ")
                    .collect())
            }
            Ask::List(_) => Err(Errno::ENOENT),
            Ask::Owner(path, owner) => {
                self.0.get_mut(path).map(|node| node.1 = *owner).ok_or(Errno::ENOENT)?;
                ok
            }
        }
    }
}

fn ask(view: &mut View<'_>, ask: &Ask) -> Answer {
    match ask {
        Ask::Write(path, value) => view.write(path, &[*value]).map(drop),
        Ask::Mkdir(path) => view.mkdir(path).map(drop),
        Ask::Remove(path) => view.remove(path).map(drop),
        Ask::Owner(path, owner) => {
            let perm = crate::tree::Perm { access: Access::NONE, domid: *owner };
            view.set_perms(path, Perms::new(&[perm]).expect("one")).map(drop)
        }
        Ask::Read(path) => return view.read(path).map(|value| format!("{value:?}")),
        Ask::List(path) => {
            return view
                .directory(path)
                .map(|node| node.children.iter().map(|(name, _)| format!("{name} ")).collect());
        }
    }
    .map(|()| String::new())
}

fn asks() -> impl Strategy<Value = Ask> {
    let path = prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4)
        .prop_map(|parts| format!("/{}", parts.join("/")));
    (0u8..8, path, any::<u8>()).prop_map(|(what, path, value)| match what {
        0..=2 => Ask::Write(path, value),
        3 => Ask::Mkdir(path),
        4 => Ask::Remove(path),
        5 => Ask::Read(path),
        6 => Ask::List(path),
        _ => Ask::Owner(path, u32::from(value % 3)),
    })
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => Just(Step::Begin),
        4 => (prop::option::weighted(0.8, 0usize..4), asks()).prop_map(|(place, ask)| Step::Do(place, ask)),
        1 => (0usize..4, prop::bool::weighted(0.8)).prop_map(|(place, commit)| Step::End(place, commit)),
    ]
}

fn model_of(store: &Store) -> Model {
    let mut model = Model::default();
    crate::tree::walk("/", store.live.root(), |path, node| {
        if path != "/" {
            model.0.insert(path.into(), (node.value.to_vec(), node.perms.owner()));
        }
    });
    model
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn transactions_are_as_if_they_were_alone(steps in prop::collection::vec(steps(), 1..120)) {
        let mut store = Store::of(Tree::default(), 1);
        let mut model = Model::default();
        let mut open: Vec<Open> = Vec::new();
        for step in steps {
            match step {
                Step::Begin if open.len() < 4 => {
                    open.push((Transaction::new(&store.live), model.clone(), Vec::new()));
                }
                Step::Do(Some(place), asked) if place < open.len() => {
                    let (transaction, snapshot, history) = &mut open[place];
                    let answer = ask(&mut store.view_in(transaction, &Caller::CONTROL, &LIMITS), &asked);
                    // It sees its own snapshot and nothing of others.
                    prop_assert_eq!(&answer, &snapshot.ask(&asked), "{:?}", asked);
                    history.push((asked, answer));
                }
                Step::Do(_, asked) => {
                    let answer = ask(&mut store.view(&Caller::CONTROL, &LIMITS), &asked);
                    prop_assert_eq!(answer, model.ask(&asked), "{:?}", asked);
                }
                Step::End(place, commit) if place < open.len() => {
                    let (transaction, _, history) = open.remove(place);
                    let changes = !transaction.log.is_empty();
                    let alone = transaction.base.is(&store.live);
                    if !commit {
                        continue;
                    }
                    match store.commit(transaction, &Caller::CONTROL, &LIMITS) {
                        Ok(_) if changes => {
                            for (asked, answer) in history {
                                prop_assert_eq!(model.ask(&asked), answer, "{:?} at the commit", asked);
                            }
                        }
                        Ok(_) => {}
                        Err(errno) => prop_assert!(errno == Errno::EAGAIN && !alone),
                    }
                }
                _ => {}
            }
            prop_assert_eq!(&model_of(&store), &model);
            prop_assert_eq!(&usage_of(&store.live), &store.usage);
        }
    }
}

/// Runs one transaction that changes something while `meanwhile` happens outside of it.
fn commit(inside: &[Ask], meanwhile: &[Ask]) -> Result<Store, Errno> {
    let mut store = Store::default();
    write(&mut store, "/a/b", "1");
    write(&mut store, "/a/c/d", "1");
    let mut transaction = Transaction::new(&store.live);
    for asked in inside {
        let _ = ask(&mut store.view_in(&mut transaction, &Caller::CONTROL, &LIMITS), asked);
    }
    for asked in meanwhile {
        let _ = ask(&mut store.view(&Caller::CONTROL, &LIMITS), asked);
    }
    store.commit(transaction, &Caller::CONTROL, &LIMITS).map(|_| store)
}

#[test]
fn transactions_that_touch_different_nodes_merge() {
    let path = |path: &str| path.to_owned();
    // Two children of one directory, by two at once.
    let mut store =
        commit(&[Ask::Write(path("/a/x"), 1)], &[Ask::Write(path("/a/y"), 2)]).expect("no conflict");
    assert!(read(&mut store, "/a/x").is_some() && read(&mut store, "/a/y").is_some());
    // A value is read, another beside it changes.
    assert!(
        commit(&[Ask::Read(path("/a/b")), Ask::Write(path("/z"), 1)], &[Ask::Write(path("/a/c/d"), 2)])
            .is_ok()
    );
    // What was removed and what changed have nothing to do with each other.
    assert!(commit(&[Ask::Remove(path("/a/c"))], &[Ask::Write(path("/a/b"), 2)]).is_ok());
}

#[test]
fn transactions_that_saw_what_is_no_more_conflict() {
    let path = |path: &str| path.to_owned();
    let refused = |inside: &[Ask], meanwhile: &[Ask]| {
        assert_eq!(
            commit(inside, meanwhile).expect_err("a conflict"),
            Errno::EAGAIN,
            "{inside:?} {meanwhile:?}"
        );
    };
    let changed = Ask::Write(path("/z"), 1);
    refused(&[Ask::Read(path("/a/b")), changed.clone()], &[Ask::Write(path("/a/b"), 2)]);
    refused(&[Ask::Read(path("/a/x")), changed.clone()], &[Ask::Write(path("/a/x"), 2)]);
    refused(&[Ask::List(path("/a")), changed.clone()], &[Ask::Write(path("/a/x"), 2)]);
    refused(&[Ask::Read(path("/a/b")), changed.clone()], &[Ask::Remove(path("/a"))]);
    refused(&[Ask::Read(path("/a/b")), changed], &[Ask::Owner(path("/a/b"), 3)]);
    refused(&[Ask::Write(path("/a/b"), 3)], &[Ask::Write(path("/a/b"), 2)]);
    refused(&[Ask::Remove(path("/a/c"))], &[Ask::Write(path("/a/c/d/e"), 2)]);
    refused(&[Ask::Write(path("/a/n/m"), 3)], &[Ask::Mkdir(path("/a/n"))]);
}

#[test]
fn reading_and_dropping_a_transaction_copies_nothing() {
    let mut store = Store::default();
    for number in 0..1000 {
        write(&mut store, &format!("/a/n{number}"), "1");
    }
    let live = store.live.clone();
    let mut transaction = Transaction::new(&store.live);
    for number in 0..1000 {
        let path = format!("/a/n{number}");
        store.view_in(&mut transaction, &Caller::CONTROL, &LIMITS).read(&path).expect("a node");
    }
    assert!(transaction.tree.is(&live) && store.live.is(&live));
    // A reader alone never conflicts: it saw one moment.
    write(&mut store, "/a/n5", "2");
    assert!(store.commit(transaction, &Caller::CONTROL, &LIMITS).is_ok());
}

#[test]
fn what_a_transaction_changes_is_all_it_copies() {
    let mut store = Store::default();
    for number in 0..1000 {
        write(&mut store, &format!("/a/n{number}"), "1");
    }
    let mut transaction = Transaction::new(&store.live);
    store.view_in(&mut transaction, &Caller::CONTROL, &LIMITS).write("/a/n7", b"2").expect("a write");
    let same = (0..1000).filter(|number| {
        let path = format!("/a/n{number}");
        Rc::ptr_eq(transaction.tree.get(&path).expect("a node"), store.live.get(&path).expect("a node"))
    });
    assert_eq!(same.count(), 999);
}

#[test]
fn the_root_counts_like_every_node() {
    let mut store = Store::default();
    let mut view = store.view(&Caller::CONTROL, &LIMITS);
    view.write("/", b"a value").expect("a write");
    let perms = Perms::new(&[crate::tree::Perm { access: Access::READ, domid: 4 }]).expect("one");
    view.set_perms("/", perms).expect("the owner");
    assert_eq!(usage_of(&store.live), store.usage);
    store.force(&Caller::CONTROL, Op::Forget(4));
    assert_eq!((usage_of(&store.live), store.usage(4).nodes), (store.usage.clone(), 1));
}

#[test]
fn quotas_hold_in_and_out_of_transactions() {
    let mut store = Store::default();
    write(&mut store, "/home", "");
    let guest = Caller::guest(5);
    let perms = Perms::new(&[crate::tree::Perm { access: Access::NONE, domid: 5 }]).expect("one");
    store.view(&Caller::CONTROL, &LIMITS).set_perms("/home", perms.clone()).expect("the owner");
    let mut limits = Limits::default();
    assert!(limits.set("nodes", 4) && limits.set("node-size", 60) && limits.set("transaction-nodes", 6));
    for name in ["a", "b", "c"] {
        store.view(&guest, &limits).write(&format!("/home/{name}"), b"1").expect("within the quota");
    }
    assert_eq!(store.view(&guest, &limits).write("/home/d", b"").unwrap_err(), Errno::ENOSPC);
    assert_eq!(store.view(&guest, &limits).write("/home/a", &[0; 61]).unwrap_err(), Errno::ENOSPC);
    assert_eq!(store.view(&guest, &limits).write("/tool/x", b"").unwrap_err(), Errno::EACCES);
    assert_eq!(store.view(&guest, &limits).read("/nowhere").unwrap_err(), Errno::EACCES);
    store.view(&guest, &limits).remove("/home/a").expect("its own");
    // Two transactions, each within the quota, are beyond it together.
    let mut both = [Transaction::new(&store.live), Transaction::new(&store.live)];
    for (transaction, name) in both.iter_mut().zip(["d", "e"]) {
        let mut view = store.view_in(transaction, &guest, &limits);
        view.write(&format!("/home/{name}"), b"").expect("within the quota");
        assert_eq!(view.write("/home/x", b"").unwrap_err(), Errno::ENOSPC);
    }
    let [one, other] = both;
    assert!(store.commit(one, &guest, &limits).is_ok());
    assert_eq!(store.commit(other, &guest, &limits).unwrap_err(), Errno::ENOSPC);
    let mut transaction = Transaction::new(&store.live);
    let mut view = store.view_in(&mut transaction, &guest, &limits);
    let answers: Vec<_> = (0..9).map(|number| view.read(&format!("/home/n{number}")).unwrap_err()).collect();
    assert_eq!((answers[0], answers[8]), (Errno::ENOENT, Errno::ENOSPC));
    // The domain dies: what it owned goes, whatever others say about it too.
    store.force(&Caller::CONTROL, Op::Forget(5));
    assert!(read(&mut store, "/home").is_none() && store.usage(5) == Usage::default());
}
