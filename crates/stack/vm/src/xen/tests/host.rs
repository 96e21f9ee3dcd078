//! A host to test on: xenstored in a thread, and in another one a hypervisor of which xl is a shell script, guests
//! that behave as they are told, and their back ends.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tapio_xenstore::wire::{Access, Permission};
use tapio_xenstore::{Client, Nodes};
use tapio_xenstored::domains::Life;
use tapio_xenstored::{Caller, Server};
use uuid::Uuid;

use super::super::Xen;
use crate::poll::poll;
use crate::settings::Settings;
use crate::traits::VmSpec;

/// How guests behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// They take and give disks, and end when asked.
    Willing,
    /// They say that they use what they are asked for.
    Refuse,
    /// They say that they cannot take a disk.
    Complain,
    /// They do nothing.
    Silent,
}

#[derive(Clone, Debug)]
struct Domain {
    uuid: Uuid,
    is_paused: bool,
    /// xl's letter for why it shut down.
    ended: Option<String>,
}

#[derive(Debug)]
struct Shared {
    is_over: AtomicBool,
    habit: Mutex<Habit>,
    refuses: Mutex<Option<String>>,
    domains: Mutex<BTreeMap<u32, Domain>>,
}

impl Shared {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

pub struct Host {
    pub dir: tempfile::TempDir,
    pub settings: Settings,
    shared: Arc<Shared>,
    client: Mutex<Client>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            assert!(thread.join().is_ok() || std::thread::panicking(), "a double of the host panicked");
        }
    }
}

fn pause() {
    poll(&mut [], Instant::now() + Duration::from_millis(1));
}

impl Host {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("asked")).unwrap();
        fs::write(at("capabilities"), "control_d\n").unwrap();
        let mut kernel = vec![0; 520];
        kernel[510..518].copy_from_slice(b"\x55\xaa\0\0HdrS");
        fs::write(at("kernel"), kernel).unwrap();
        fs::write(at("ramdisk"), "070701").unwrap();
        let script = format!(
            "#!/bin/sh\n\
             me={}/$$\n\
             printf '%s\\n' \"$@\" >$me.new && mv $me.new $me.ask\n\
             until [ -e $me.answer ]; do [ -d ${{me%/*}} ] || exit 1; sleep 0.005; done\n\
             read -r status <$me.answer\n\
             [ \"$status\" = 0 ] && tail -n +2 $me.answer || tail -n +2 $me.answer >&2\n\
             rm $me.answer\n\
             exit $status\n",
            at("asked").display()
        );
        tapio_fixtures::program(&at("xl"), script.as_bytes());
        let mut settings = Settings::new(&at("run"));
        settings.kernel_dirs = vec![dir.path().into()];
        settings.xen.xl = at("xl");
        settings.xen.capabilities = at("capabilities");
        settings.xen.store = Some(at("store"));
        settings.xen.tapback = None;
        let shared = Arc::new(Shared {
            is_over: AtomicBool::new(false),
            habit: Mutex::new(Habit::Willing),
            refuses: Mutex::default(),
            domains: Mutex::default(),
        });
        let listener = UnixListener::bind(at("store")).unwrap();
        let (first, second) = (Arc::clone(&shared), Arc::clone(&shared));
        let mut threads = vec![std::thread::spawn(move || store(&first, &listener))];
        let (asked, client) = (at("asked"), Client::connect(&at("store")).unwrap());
        threads.push(std::thread::spawn(move || Hypervisor { shared: second, asked, client, next: 1 }.run()));
        let client = Mutex::new(Client::connect(&at("store")).unwrap());
        Self { settings, shared, client, threads, dir }
    }

    pub fn driver(&self) -> Xen {
        Xen::new(&self.settings)
    }

    pub fn spec(&self, name: &str) -> VmSpec {
        VmSpec {
            uuid: Uuid::new_v4(),
            name: name.into(),
            memory: 64 << 20,
            vcpus: 1,
            kernel: Some(self.dir.path().join("kernel")),
            ramdisk: Some(self.dir.path().join("ramdisk")),
            kernel_args: String::new(),
            platform: BTreeMap::new(),
            drives: Vec::new(),
        }
    }

    pub fn behave(&self, habit: Habit) {
        *self.shared.habit.lock() = habit;
    }

    /// The next domains are refused with these words.
    pub fn refuse_creation(&self, words: &str) {
        *self.shared.refuses.lock() = Some(words.into());
    }

    /// A domain ends by itself: xl's letter for how, or `gone`.
    pub fn end(&self, domid: u32, how: &str) {
        let mut domains = self.shared.domains.lock();
        if how != "gone" {
            domains.get_mut(&domid).unwrap().ended = Some(how.into());
            return;
        }
        let domain = domains.remove(&domid).unwrap();
        drop(domains);
        vanish(&mut self.client.lock(), domid, domain.uuid);
    }

    pub fn domains(&self) -> usize {
        self.shared.domains.lock().len()
    }

    pub fn read(&self, path: &str) -> Option<String> {
        self.client.lock().read_text(path).unwrap()
    }

    pub fn permissions(&self, path: &str) -> String {
        let all = self.client.lock().permissions(path).unwrap().unwrap_or_default();
        let letter = |access| match access {
            Access::None => 'n',
            Access::Read => 'r',
            Access::Write => 'w',
            Access::Both => 'b',
        };
        all.iter().map(|p| format!("{}{}", letter(p.access), p.domid)).collect::<Vec<_>>().join(" ")
    }

    /// Names of a directory, in order.
    pub fn names(&self, path: &str) -> Vec<String> {
        let mut names = self.client.lock().directory(path).unwrap().unwrap_or_default();
        names.sort();
        names
    }

    /// Keys of a directory with their values.
    pub fn directory(&self, path: &str) -> BTreeMap<String, String> {
        let names = self.names(path);
        names.into_iter().map(|name| (name.clone(), self.read(&format!("{path}/{name}")).unwrap())).collect()
    }
}

/// xenstored: one turn a millisecond is plenty.
fn store(shared: &Shared, listener: &UnixListener) {
    listener.set_nonblocking(true).unwrap();
    let mut server = Server::default();
    let mut clients: Vec<(usize, UnixStream)> = Vec::new();
    while !shared.is_over() {
        while let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true).unwrap();
            clients.push((server.connect(Caller::CONTROL), stream));
        }
        let lives = shared.domains.lock().clone();
        server.domains_changed(|domid| match lives.get(&domid) {
            Some(Domain { ended: Some(_), .. }) => Life::Shutdown,
            _ => Life::Running,
        });
        let mut is_idle = true;
        clients.retain_mut(|(id, stream)| {
            let mut bytes = [0; 8192];
            match stream.read(&mut bytes) {
                Ok(0) => {
                    server.disconnect(*id);
                    return false;
                }
                Ok(count) => {
                    is_idle = false;
                    server.receive(*id, &bytes[..count]);
                }
                Err(_) => {}
            }
            true
        });
        for (id, stream) in &mut clients {
            while let unsent @ [_, ..] = server.unsent(*id) {
                let Ok(count) = stream.write(unsent) else { break };
                server.sent(*id, count);
                server.go_on(*id);
            }
        }
        if is_idle {
            pause();
        }
    }
}

fn vanish(client: &mut Client, domid: u32, uuid: Uuid) {
    client.remove(&format!("/local/domain/{domid}")).unwrap();
    client.remove(&format!("/vm/{uuid}")).unwrap();
    client.release(domid).unwrap();
}

struct Hypervisor {
    shared: Arc<Shared>,
    asked: PathBuf,
    client: Client,
    next: u32,
}

impl Hypervisor {
    fn run(mut self) {
        while !self.shared.is_over() {
            for entry in fs::read_dir(&self.asked).unwrap().flatten() {
                let path = entry.path();
                if path.extension().is_some_and(|end| end == "ask") {
                    let question = fs::read_to_string(&path).unwrap();
                    fs::remove_file(&path).unwrap();
                    let words: Vec<&str> = question.lines().collect();
                    let text = match self.answer(&words) {
                        Ok(said) => format!("0\n{said}"),
                        Err(why) => format!("1\n{why}\n"),
                    };
                    let fresh = path.with_extension("fresh");
                    fs::write(&fresh, text).unwrap();
                    fs::rename(&fresh, path.with_extension("answer")).unwrap();
                }
            }
            let domains = self.shared.domains.lock().clone();
            for (domid, domain) in domains {
                if !domain.is_paused && domain.ended.is_none() {
                    self.live(domid);
                }
            }
            pause();
        }
    }

    fn answer(&mut self, words: &[&str]) -> Result<String, String> {
        let number = |word: &str| word.parse::<u32>().map_err(|_| format!("{word} is no domain"));
        let hold = |word: &str, is_paused: bool| {
            let mut domains = self.shared.domains.lock();
            let domain = domains.get_mut(&number(word)?).ok_or("there is no such domain")?;
            domain.is_paused = is_paused;
            Ok(String::new())
        };
        match words {
            ["list", "-v"] => Ok(self.list()),
            ["create", "-p", "-e", config] => self.create(config),
            ["pause", domid] => hold(domid, true),
            ["unpause", domid] => hold(domid, false),
            ["destroy", domid] => {
                let domid = number(domid)?;
                let domain = self.shared.domains.lock().remove(&domid).ok_or("there is no such domain")?;
                vanish(&mut self.client, domid, domain.uuid);
                Ok(String::new())
            }
            _ => Err(format!("xl does not know {words:?}")),
        }
    }

    fn list(&self) -> String {
        let mut text = String::from("Name ID Mem VCPUs\tState\tTime(s) UUID Reason-Code\tSecurity Label\n");
        for (domid, domain) in &*self.shared.domains.lock() {
            let paused = if domain.is_paused { 'p' } else { '-' };
            let ended = domain.ended.as_ref().map_or_else(|| "--".to_owned(), |letter| format!("s{letter}"));
            let uuid = domain.uuid;
            text.push_str(&format!("a name {domid} 64 1 --{paused}{ended}- 0.1 {uuid} 0 -\n"));
        }
        text
    }

    fn create(&mut self, config: &str) -> Result<String, String> {
        if let Some(words) = self.shared.refuses.lock().clone() {
            return Err(words);
        }
        let text = fs::read_to_string(config).map_err(|error| error.to_string())?;
        let uuid = text.lines().find_map(|line| line.strip_prefix("uuid = \"")?.strip_suffix('"'));
        let uuid = Uuid::try_parse(uuid.ok_or("no uuid")?).map_err(|error| error.to_string())?;
        let domid = self.next;
        self.next += 1;
        let home = format!("/local/domain/{domid}");
        self.client
            .transaction(|t| {
                t.mkdir(&home)?;
                let guest = Permission { access: Access::Read, domid };
                t.set_permissions(&home, &[Permission { access: Access::None, domid: 0 }, guest])?;
                t.write_many(&[
                    (format!("{home}/vm"), format!("/vm/{uuid}")),
                    (format!("{home}/console/tty"), format!("/dev/pts/{domid}")),
                    (format!("{home}/control/shutdown"), String::new()),
                    (format!("{home}/device"), String::new()),
                    (format!("/vm/{uuid}/uuid"), uuid.to_string()),
                ])
            })
            .unwrap();
        self.client.introduce(domid, 1, 1).unwrap();
        self.shared.domains.lock().insert(domid, Domain { uuid, is_paused: true, ended: None });
        Ok(String::new())
    }

    /// A guest and its back ends do what there is to do.
    fn live(&mut self, domid: u32) {
        // Looked at after what it answers to: a test changes the habit first, and then asks for something.
        let habit = |shared: &Shared| *shared.habit.lock();
        let backs = format!("/local/domain/0/backend/vbd3/{domid}");
        let fronts = format!("/local/domain/{domid}/device/vbd");
        let control = format!("/local/domain/{domid}/control/shutdown");
        let devices = self.client.directory(&backs).unwrap().unwrap_or_default();
        for device in devices {
            let (back, front) = (format!("{backs}/{device}"), format!("{fronts}/{device}"));
            let complaint = format!("/local/domain/{domid}/error/device/vbd/{device}/error");
            self.client
                .transaction(|t| {
                    let paths = [format!("{front}/state"), format!("{back}/state"), format!("{back}/online")];
                    let values: Vec<String> = t
                        .read_many(&paths)?
                        .into_iter()
                        .map(|value| String::from_utf8(value.unwrap_or_default()).unwrap())
                        .collect();
                    let both = |state: &str| {
                        vec![(paths[0].clone(), state.to_owned()), (paths[1].clone(), state.into())]
                    };
                    let one = |path: &String, value: &str| (path.clone(), value.to_owned());
                    let changes = match (
                        habit(&self.shared),
                        values[0].as_str(),
                        values[1].as_str(),
                        values[2].as_str(),
                    ) {
                        (Habit::Willing, "1", "1", "1") => both("4"),
                        (Habit::Willing, "4", "5", "0") => both("6"),
                        (Habit::Refuse, "4", "5", "0") => {
                            vec![one(&complaint, "16 Device in use; refusing to close")]
                        }
                        (Habit::Complain, "1", ..) => {
                            vec![one(&complaint, "12 no memory for the ring"), one(&paths[0], "5")]
                        }
                        _ => Vec::new(),
                    };
                    t.write_many(&changes)
                })
                .unwrap();
        }
        let asked = self.client.read_text(&control).unwrap();
        if habit(&self.shared) == Habit::Willing && asked.as_deref() == Some("poweroff") {
            self.client.write(&control, "").unwrap();
            if let Some(domain) = self.shared.domains.lock().get_mut(&domid) {
                domain.ended = Some("-".into());
            }
        }
    }
}
