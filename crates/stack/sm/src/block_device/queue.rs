//! Queues of devices are set as SRs want them, and put back.
//!
//! What a queue was like is noted in the run directory before it is changed, and so is what each SR asked for. So the
//! daemon may die anywhere: the next one finds the note. It ends with the host's run, as the settings do. A disk may
//! serve several SRs, by its partitions: what was asked for last counts, and what was asked for counts before a
//! default.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::below::{Layer, layers};
use super::host::{BlockDevice, Host};
use super::settings::{Settings, default_schedulers};

/// How a queue is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// The I/O scheduler; none for a device that has none at all.
    pub scheduler: Option<String>,
    /// Its files in `queue/iosched`.
    pub tunables: BTreeMap<String, String>,
    /// Requests that it keeps.
    pub nr_requests: Option<u32>,
    /// KiB that are read ahead.
    pub read_ahead_kb: Option<u32>,
}

impl Queue {
    /// What an SR's `sm_config` shows.
    pub fn shown(&self) -> String {
        let mut words = vec![self.scheduler.clone().unwrap_or_else(|| "no scheduler".into())];
        words.extend(self.nr_requests.map(|number| format!("nr_requests={number}")));
        words.extend(self.read_ahead_kb.map(|number| format!("read_ahead_kb={number}")));
        words.join(" ")
    }
}

/// What became of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The device's name.
    pub device: String,
    /// How its queue is now.
    pub queue: Queue,
    /// What could not be set, as sentences.
    pub problems: Vec<String>,
}

/// What an SR asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Asked {
    settings: Settings,
    /// Schedulers that are good where it asked for none.
    defaults: Vec<String>,
    /// Later ones have larger numbers.
    order: u64,
}

/// What is remembered of a queue that was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    /// The kernel's number of this very device, which no later one of the same name has.
    sequence: Option<u64>,
    before: Queue,
    srs: BTreeMap<Uuid, Asked>,
}

/// Changes queues, and knows what they were.
#[derive(Debug)]
pub struct Queues {
    host: Host,
    notes: PathBuf,
    /// One change at a time.
    changing: Mutex<()>,
}

impl Queues {
    /// Those of `host`; notes are kept below `run_dir`.
    pub fn new(host: Host, run_dir: &Path) -> Self {
        Self { host, notes: run_dir.join("queues"), changing: Mutex::default() }
    }

    /// The host whose devices these are.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// How the queue of a disk is now.
    pub fn look(&self, name: &str) -> Queue {
        let queue = self.queue(name);
        let number =
            |file: &str| Host::number(&queue.join(file)).and_then(|number| u32::try_from(number).ok());
        let files = fs::read_dir(queue.join("iosched"));
        let files: Vec<fs::DirEntry> = files.map(|files| files.flatten().collect()).unwrap_or_default();
        let tunables = files
            .iter()
            .filter_map(|file| Some((file.file_name().into_string().ok()?, Host::text(&file.path())?)));
        Queue {
            scheduler: Host::text(&queue.join("scheduler")).and_then(|text| chosen(&text)),
            tunables: tunables.collect(),
            nr_requests: number("nr_requests"),
            read_ahead_kb: number("read_ahead_kb"),
        }
    }

    /// Sets the queues of an SR's devices, and of the disks that these are made of, and puts back those that are no
    /// longer concerned. What cannot be set is told and left.
    pub fn apply(
        &self,
        sr: Uuid,
        sr_type: &str,
        devices: &[BlockDevice],
        settings: &Settings,
    ) -> Vec<Applied> {
        let _changing = self.changing.lock();
        let mut below: Vec<Layer> = Vec::new();
        for layer in devices.iter().flat_map(|device| layers(&self.host, device)) {
            if !below.iter().any(|known| known.name == layer.name) {
                below.push(layer);
            }
        }
        let mut told = Vec::new();
        let mut concerned = Vec::new();
        for layer in below {
            let defaults: Vec<String> =
                default_schedulers(sr_type, &layer).iter().map(|name| (*name).to_owned()).collect();
            let mut wanted = settings.clone();
            if !layer.is_disk {
                // Only reading ahead is done above the disks.
                wanted = Settings { read_ahead_kb: settings.read_ahead_kb, ..Settings::default() };
            }
            if wanted.is_empty() && defaults.is_empty() {
                continue;
            }
            concerned.push(layer.name.clone());
            let problems = self.ask(&layer.name, sr, wanted, defaults);
            let is_shown = layer.is_disk || !problems.is_empty();
            if is_shown {
                told.push(Applied { queue: self.look(&layer.name), device: layer.name, problems });
            }
        }
        for name in self.noted() {
            if !concerned.contains(&name) {
                self.forget(&name, sr);
            }
        }
        told
    }

    /// Puts back what was changed for an SR.
    pub fn restore(&self, sr: Uuid) {
        let _changing = self.changing.lock();
        for name in self.noted() {
            self.forget(&name, sr);
        }
    }

    /// Puts back what was changed for SRs that are not `known`: their daemon died before it could.
    pub fn restore_unknown(&self, known: impl Fn(Uuid) -> bool) {
        let _changing = self.changing.lock();
        for name in self.noted() {
            let srs: Vec<_> = self.note(&name).map(|note| note.srs.into_keys().collect()).unwrap_or_default();
            for sr in srs.into_iter().filter(|sr| !known(*sr)) {
                self.forget(&name, sr);
            }
        }
    }

    /// Devices of an SR whose queues are no longer as the SR set them: their names, and what differs.
    pub fn differing(&self, sr: Uuid) -> Vec<(String, String)> {
        let _changing = self.changing.lock();
        let mut found = Vec::new();
        for name in self.noted() {
            let Some(note) = self.note(&name).filter(|note| note.srs.contains_key(&sr)) else { continue };
            let (is, wanted) = (self.look(&name), self.wanted(&name, &note));
            let mut differs = Vec::new();
            if let Some(scheduler) = wanted.scheduler.filter(|wanted| is.scheduler.as_ref() != Some(wanted)) {
                let is = is.scheduler.clone().unwrap_or_default();
                differs.push(format!("its scheduler is '{is}', not '{scheduler}'"));
            }
            for (tunable, value) in &wanted.tunables {
                if let Some(is) = is.tunables.get(tunable).filter(|is| *is != value) {
                    differs.push(format!("{tunable} is {is}, not {value}"));
                }
            }
            for (what, is, wanted) in [
                ("nr_requests", is.nr_requests, wanted.nr_requests),
                ("read_ahead_kb", is.read_ahead_kb, wanted.read_ahead_kb),
            ] {
                if let (Some(is), Some(wanted)) = (is, wanted)
                    && is != wanted
                {
                    differs.push(format!("{what} is {is}, not {wanted}"));
                }
            }
            if !differs.is_empty() {
                found.push((name, differs.join("; ")));
            }
        }
        found
    }

    fn queue(&self, name: &str) -> PathBuf {
        self.host.path("sys/class/block").join(name.replace('/', "!")).join("queue")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.notes.join(format!("{}.json", name.replace('/', "!")))
    }

    fn noted(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.notes);
        let names =
            entries.map(|entries| entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()));
        let mut names: Vec<_> = names
            .map(|names| {
                names.filter_map(|name| Some(name.strip_suffix(".json")?.replace('!', "/"))).collect()
            })
            .unwrap_or_default();
        names.sort();
        names
    }

    /// What is noted of the device that has this name now.
    fn note(&self, name: &str) -> Option<Note> {
        let text = fs::read(self.file(name)).ok()?;
        let note: Option<Note> = serde_json::from_slice(&text).ok();
        note.filter(|note| note.sequence == self.sequence(name))
    }

    fn sequence(&self, name: &str) -> Option<u64> {
        Host::number(&self.host.path("sys/class/block").join(name.replace('/', "!")).join("diskseq"))
    }

    fn keep(&self, name: &str, note: &Note) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.notes)?;
        let unfinished = self.notes.join(".unfinished");
        fs::write(&unfinished, serde_json::to_vec(note)?)?;
        fs::rename(unfinished, self.file(name))
    }

    fn ask(&self, name: &str, sr: Uuid, settings: Settings, defaults: Vec<String>) -> Vec<String> {
        let mut note = self.note(name).unwrap_or_else(|| Note {
            sequence: self.sequence(name),
            before: self.look(name),
            srs: BTreeMap::new(),
        });
        let last = note.srs.values().map(|asked| asked.order).max().unwrap_or(0);
        let same = note.srs.get(&sr).filter(|asked| asked.settings == settings && asked.defaults == defaults);
        let order = same.map_or(last + 1, |asked| asked.order);
        note.srs.insert(sr, Asked { settings, defaults, order });
        // What cannot be put back is not changed.
        if let Err(error) = self.keep(name, &note) {
            return vec![format!(
                "{name} stays as it is, because {} cannot be written: {error}",
                self.notes.display()
            )];
        }
        self.enact(name, &note)
    }

    fn forget(&self, name: &str, sr: Uuid) {
        let Some(mut note) = self.note(name) else {
            // Of a device that is no more.
            let _ = fs::remove_file(self.file(name));
            return;
        };
        if note.srs.remove(&sr).is_none() {
            return;
        }
        if note.srs.is_empty() {
            for problem in self.set(name, &note.before) {
                tracing::warn!("{problem}, which was its setting before the SR was attached");
            }
            let _ = fs::remove_file(self.file(name));
            return;
        }
        let kept = self.keep(name, &note);
        if let Err(error) = kept {
            tracing::warn!(%sr, %error, "the note of {name}'s queue still has an SR that is detached");
        }
        self.enact(name, &note);
    }

    /// What all SRs together want of a device that offers what it does.
    fn wanted(&self, name: &str, note: &Note) -> Queue {
        let mut asked: Vec<&Asked> = note.srs.values().collect();
        asked.sort_by_key(|asked| asked.order);
        let last =
            |pick: fn(&Settings) -> Option<u32>| asked.iter().rev().find_map(|asked| pick(&asked.settings));
        let explicit = asked.iter().rev().find_map(|asked| asked.settings.scheduler.clone());
        let offered = self.offered(name);
        let by_default = || {
            let mut all = asked.iter().rev().flat_map(|asked| &asked.defaults);
            all.find(|name| offered.contains(*name)).cloned()
        };
        let scheduler = explicit.or_else(by_default).or_else(|| note.before.scheduler.clone());
        let tunables: BTreeMap<_, _> =
            asked.iter().flat_map(|asked| asked.settings.tunables.clone()).collect();
        let is_same = scheduler == note.before.scheduler;
        Queue {
            tunables: match is_same {
                true => note.before.tunables.clone().into_iter().chain(tunables).collect(),
                false => tunables,
            },
            // Another scheduler has another number of its own.
            nr_requests: last(|settings| settings.nr_requests)
                .or(note.before.nr_requests.filter(|_| is_same)),
            read_ahead_kb: last(|settings| settings.read_ahead_kb).or(note.before.read_ahead_kb),
            scheduler,
        }
    }

    fn enact(&self, name: &str, note: &Note) -> Vec<String> {
        self.set(name, &self.wanted(name, note))
    }

    fn offered(&self, name: &str) -> Vec<String> {
        let text = Host::text(&self.queue(name).join("scheduler")).unwrap_or_default();
        let mut offered: Vec<String> =
            text.split_whitespace().map(|word| word.trim_matches(['[', ']']).to_owned()).collect();
        // Schedulers that are modules are not listed before their first use.
        let modules = ["bfq", "kyber-iosched"];
        for module in modules.iter().filter(|module| self.has_module(module)) {
            offered.push(module.trim_end_matches("-iosched").to_owned());
        }
        offered
    }

    fn has_module(&self, module: &str) -> bool {
        let release = Host::text(&self.host.path("proc/sys/kernel/osrelease")).unwrap_or_default();
        let list = self.host.path("lib/modules").join(release).join("modules.dep");
        fs::read_to_string(list).is_ok_and(|list| list.contains(&format!("/{module}.ko")))
    }

    /// Sets what differs; answers what could not be set.
    fn set(&self, name: &str, wanted: &Queue) -> Vec<String> {
        let (queue, mut problems) = (self.queue(name), Vec::new());
        let mut write = |file: &str, is: Option<&str>, wanted: &str| {
            if is == Some(wanted) {
                return;
            }
            let file = queue.join(file);
            if !file.exists() {
                problems.push(format!("{name} has no {}, which is to be {wanted}", file.display()));
            } else if let Err(error) = fs::write(&file, wanted) {
                problems.push(format!("{} cannot be set to {wanted}: {error}", file.display()));
            }
        };
        let is = self.look(name);
        if let Some(scheduler) = &wanted.scheduler {
            write("scheduler", is.scheduler.as_deref(), scheduler);
        }
        // Another scheduler comes with its own values.
        let is = self.look(name);
        for (tunable, value) in &wanted.tunables {
            write(&format!("iosched/{tunable}"), is.tunables.get(tunable).map(String::as_str), value);
        }
        for (file, is, wanted) in [
            ("nr_requests", is.nr_requests, wanted.nr_requests),
            ("read_ahead_kb", is.read_ahead_kb, wanted.read_ahead_kb),
        ] {
            if let Some(wanted) = wanted {
                write(file, is.map(|is| is.to_string()).as_deref(), &wanted.to_string());
            }
        }
        problems
    }
}

/// The scheduler that a line of sysfs marks, as `[none] mq-deadline`.
fn chosen(text: &str) -> Option<String> {
    let marked = text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    let only = (!text.contains(char::is_whitespace)).then_some(text);
    marked.or(only).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::super::host::tests::Made;
    use super::*;

    fn made() -> (Made, Queues) {
        let made = Made::new();
        let queue = [
            ("queue/scheduler", "[mq-deadline] none bfq"),
            ("queue/nr_requests", "256"),
            ("queue/read_ahead_kb", "128"),
            ("queue/iosched/read_expire", "500"),
            ("queue/rotational", "1"),
            ("diskseq", "7"),
        ];
        made.add("pci/block/sda", "8:0", &queue);
        let queues = Queues::new(made.host.clone(), &made.root().join("run"));
        (made, queues)
    }

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Settings::of(&pairs.collect()).unwrap()
    }

    #[test]
    fn a_queue_is_set_changed_and_put_back() {
        let (made, queues) = made();
        let (sr, device) = (Uuid::from_u128(1), [made.device("sda")]);
        let before = queues.look("sda");
        let applied = queues.apply(sr, "ext", &device, &Settings::default());
        assert_eq!((applied.len(), applied[0].queue.scheduler.as_deref()), (1, Some("bfq")), "{applied:?}");
        let wanted = settings(&[("scheduler", "deadline"), ("read_ahead_kb", "64"), ("nr_requests", "32")]);
        let applied = queues.apply(sr, "ext", &device, &wanted);
        assert_eq!(applied[0].queue.shown(), "mq-deadline nr_requests=32 read_ahead_kb=64");
        assert!(applied[0].problems.is_empty(), "{applied:?}");
        let tuned =
            settings(&[("scheduler", "mq-deadline"), ("scheduler-tunables", "read_expire=9,no_such=1")]);
        let applied = queues.apply(sr, "ext", &device, &tuned);
        assert!(applied[0].problems[0].contains("no_such"), "{applied:?}");
        let queue = &applied[0].queue;
        assert_eq!((queue.tunables["read_expire"].as_str(), queue.nr_requests), ("9", Some(256)));
        queues.restore(sr);
        assert_eq!((queues.look("sda"), queues.noted()), (before, Vec::new()));
    }

    #[test]
    fn a_disk_of_two_srs_is_put_back_after_the_last() {
        let (made, queues) = made();
        let (one, two, device) = (Uuid::from_u128(1), Uuid::from_u128(2), [made.device("sda")]);
        queues.apply(one, "ext", &device, &settings(&[("scheduler", "none")]));
        // The kernel goes on listing the others.
        let scheduler = made.root().join("sys/class/block/sda/queue/scheduler");
        fs::write(scheduler, "[none] mq-deadline bfq").unwrap();
        queues.apply(two, "lvm", &device, &Settings::default());
        assert_eq!(queues.look("sda").scheduler.as_deref(), Some("none"), "a default does not overrule");
        queues.restore(one);
        assert_eq!(queues.look("sda").scheduler.as_deref(), Some("bfq"));
        queues.restore(two);
        assert_eq!(queues.look("sda").scheduler.as_deref(), Some("mq-deadline"));
    }

    #[test]
    fn a_daemon_that_died_left_notes() {
        let (made, queues) = made();
        let sr = Uuid::from_u128(1);
        queues.apply(sr, "ext", &[made.device("sda")], &settings(&[("read_ahead_kb", "4")]));
        let next = Queues::new(made.host.clone(), &made.root().join("run"));
        // Its first look at the queue is not what the queue was.
        next.apply(sr, "ext", &[made.device("sda")], &settings(&[("read_ahead_kb", "8")]));
        next.restore_unknown(|known| known == sr);
        assert_eq!(next.look("sda").read_ahead_kb, Some(8));
        next.restore_unknown(|_| false);
        assert_eq!(next.look("sda").read_ahead_kb, Some(128));
        // A note of another device of the same name says nothing.
        next.apply(sr, "ext", &[made.device("sda")], &settings(&[("read_ahead_kb", "4")]));
        fs::write(made.root().join("sys/class/block/sda/diskseq"), "8").unwrap();
        next.restore(sr);
        assert_eq!((next.look("sda").read_ahead_kb, next.noted()), (Some(4), Vec::new()));
    }

    #[test]
    fn what_another_program_changed_is_told() {
        let (made, queues) = made();
        let sr = Uuid::from_u128(1);
        queues.apply(sr, "ext", &[made.device("sda")], &settings(&[("scheduler", "none")]));
        assert_eq!(queues.differing(sr), []);
        fs::write(made.root().join("sys/class/block/sda/queue/scheduler"), "none [bfq]").unwrap();
        let differing = queues.differing(sr);
        assert_eq!(differing, [("sda".to_owned(), "its scheduler is 'bfq', not 'none'".to_owned())]);
        assert_eq!(queues.differing(Uuid::from_u128(2)), []);
    }
}
