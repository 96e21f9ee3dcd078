//! Random changes by several threads, and many listeners: each one's picture is the database in the end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tapio_core::db::Db;
use tapio_load::Random;
use tapio_model::Value;

use crate::world::{Client, map, needed, stack_on, text};

const CLASSES: [&str; 4] = ["VM", "VDI", "VBD", "task"];

fn seed() -> u64 {
    let told = std::env::var("TAPIO_SEED").ok().and_then(|text| text.parse().ok());
    let seed = told.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(1, |now| now.subsec_nanos().into())
    });
    eprintln!("TAPIO_SEED={seed}");
    seed
}

type Picture = BTreeMap<String, Value>;

/// Takes a batch into a picture; anything that does not fit it is a loss or a repetition.
fn replay(picture: &mut Picture, batch: &Value, listener: &str) -> String {
    let batch = map(batch);
    let mut seen = std::collections::BTreeSet::new();
    for event in batch["events"].as_set().expect("a set") {
        let event = map(event);
        let reference = text(&event["ref"]);
        assert!(seen.insert(reference.clone()), "{listener}: {reference} came twice");
        let snapshot = event.get("snapshot").cloned();
        match (text(&event["operation"]).as_str(), snapshot) {
            ("add", Some(snapshot)) => {
                assert!(
                    picture.insert(reference.clone(), snapshot).is_none(),
                    "{listener}: {reference} was added before"
                );
            }
            ("mod", Some(snapshot)) => {
                assert!(
                    picture.insert(reference.clone(), snapshot).is_some(),
                    "{listener}: {reference} was never added"
                );
            }
            ("del", None) => {
                assert!(picture.remove(&reference).is_some(), "{listener}: {reference} was not there");
            }
            other => panic!("{listener}: {other:?}"),
        }
    }
    text(&batch["token"])
}

fn truth(db: &Db, classes: &[String]) -> Picture {
    let wants =
        |class: &str| classes.iter().any(|wanted| wanted == "*" || wanted.eq_ignore_ascii_case(class));
    let all = tapio_model::CLASSES.iter().filter(|class| class.name != "session" && wants(class.name));
    let objects = all.flat_map(|class| db.all(class.name));
    objects.map(|object| (object.reference.clone(), db.record(&object))).collect()
}

/// One random change.
fn change(db: &Db, random: &mut Random) {
    let class = CLASSES[random.below(4) as usize];
    let objects = db.all(class);
    let pick = |random: &mut Random, class: &str| {
        let all = db.all(class);
        if all.is_empty() {
            return tapio_model::NULL_REF.to_owned();
        }
        all[random.below(all.len() as u64) as usize].reference.clone()
    };
    // Others change the same objects: what is gone is gone.
    let done = match random.below(10) {
        0..=3 => {
            let (vm, vdi) = (pick(random, "VM"), pick(random, "VDI"));
            let given = match class {
                "VBD" => vec![("VM", vm.into()), ("VDI", vdi.into()), ("userdevice", "0".into())],
                "VDI" => vec![("snapshot_of", vdi.into())],
                _ => vec![],
            };
            let fields = needed(class, &given);
            db.change(|change| {
                if class == "task" && random.below(2) == 0 {
                    return change.create_volatile(class, &fields).map(drop);
                }
                change.create(class, &fields).map(drop)
            })
        }
        4 | 5 if objects.len() > 5 => db.destroy(class, &pick(random, class)),
        6 if objects.len() > 30 => {
            let (one, other) = (pick(random, class), pick(random, class));
            db.change(|change| {
                change.destroy(class, &one)?;
                change.destroy(class, &other)
            })
        }
        _ => {
            let value = random.below(1000).to_string();
            let reference = pick(random, class);
            match random.below(3) {
                0 if class == "VBD" => db.set(class, &reference, "VDI", pick(random, "VDI")),
                1 if class == "task" => {
                    db.set(class, &reference, "progress", random.below(100) as f64 / 100.0)
                }
                1 => db.set(
                    class,
                    &reference,
                    "current_operations",
                    Value::string_map([(value.as_str(), "x")]),
                ),
                _ => db.set(class, &reference, "other_config", Value::string_map([("k", value.as_str())])),
            }
        }
    };
    if let Err(error) = done {
        assert_eq!(error.code, "HANDLE_INVALID", "{error}");
    }
}

#[test]
fn every_picture_is_the_database_in_the_end() {
    const LISTENERS: u64 = 50;
    let seed = seed();
    let dir = tempfile::tempdir().expect("a scratch directory");
    let store = tapio_store::Sqlite::open(&dir.path().join("db")).expect("a new store");
    let (_dir, stack) = stack_on(Db::open(Arc::new(store)).expect("an empty store opens"));
    let client = Client::login(&stack, "pool-admin");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let listeners: Vec<_> = (0..LISTENERS)
            .map(|number| {
                let (client, is_over, stack) = (&client, &is_over, &stack);
                scope.spawn(move || {
                    let mut random = Random::new(seed ^ (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                    let mut classes = Vec::new();
                    for class in CLASSES {
                        if random.below(2) == 0 {
                            classes.push(if random.below(2) == 0 {
                                class.to_lowercase()
                            } else {
                                class.to_owned()
                            });
                        }
                    }
                    if classes.is_empty() {
                        classes.push("*".into());
                    }
                    let listener = format!("seed {seed}, listener {number} of {classes:?}");
                    let (mut token, mut picture) = (String::new(), Picture::new());
                    let mut listen = |token: &mut String, timeout: f64| {
                        let params = vec![
                            Value::strings(classes.iter().cloned()),
                            token.as_str().into(),
                            timeout.into(),
                        ];
                        let batch = client.call("event.from", params);
                        *token = replay(&mut picture, &batch, &listener);
                        map(&batch)["valid_ref_counts"].clone()
                    };
                    while !is_over.load(Ordering::SeqCst) {
                        listen(&mut token, random.below(40) as f64 / 1000.0);
                        std::thread::sleep(Duration::from_millis(random.below(30)));
                    }
                    let counts = listen(&mut token, 0.0);
                    let truth = truth(&stack.db, &classes);
                    assert_eq!(
                        map(&counts).values().filter_map(Value::as_int).sum::<i64>(),
                        truth.len() as i64,
                        "{listener}"
                    );
                    assert!(picture == truth, "{listener}: its picture is not the database");
                    picture.len()
                })
            })
            .collect();
        let changers: Vec<_> = (0..6_u64)
            .map(|number| {
                let db = &stack.db;
                scope.spawn(move || {
                    let mut random = Random::new(seed ^ (number + 100).wrapping_mul(0x2545_f491_4f6c_dd1d));
                    // For a while, and a busy host must have come to some.
                    let until = Instant::now() + Duration::from_millis(2500);
                    let mut changes = 0;
                    while Instant::now() < until || changes < 100 {
                        change(db, &mut random);
                        changes += 1;
                    }
                })
            })
            .collect();
        let changed: Vec<_> = changers.into_iter().map(|changer| changer.join()).collect();
        // Listeners must end, whatever happened.
        is_over.store(true, Ordering::SeqCst);
        assert!(changed.iter().all(Result::is_ok), "a change ended in a panic");
        for listener in listeners {
            assert!(listener.join().expect("no panic") > 0);
        }
    });
}
