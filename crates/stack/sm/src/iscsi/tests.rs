//! On a double of a host: its sysfs, its database of open-iscsi, and an iscsiadm that makes and removes sessions there.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::admin::Outside;
use super::*;
use crate::command::{Failure, Output};
use crate::traits::{Config, LiveDisk};

const PASSWORD: &str = "geheim-4711";

struct Calm;

impl Ctx for Calm {
    fn is_cancelled(&self) -> bool {
        false
    }
    fn progress(&self, _: f64) {}
    fn live(&self, _: Uuid) -> Option<Box<dyn LiveDisk>> {
        None
    }
    fn step(&self, _: &'static str) {}
}

/// What the double knows, and what it was asked.
#[derive(Debug, Default)]
struct World {
    /// LUNs of each target.
    targets: BTreeMap<String, u64>,
    /// Portals that take no connection.
    away: Vec<Portal>,
    /// The status of the next logins, where it is another one than success.
    refuses: Option<i32>,
    next: u32,
    commands: Vec<String>,
}

#[derive(Debug)]
struct Double {
    root: PathBuf,
    world: Mutex<World>,
}

fn put(path: &Path, bytes: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().expect("a file lies in a directory")).expect("made");
    fs::write(path, bytes).expect("written");
}

fn id_of(target: &str, lun: u64) -> [u8; 16] {
    use sha2::Digest as _;
    let sum = sha2::Sha256::digest(format!("{target} {lun}").as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&sum[..16]);
    id[0] = 0x60 | id[0] & 0xf;
    id
}

fn scsi_id(target: &str, lun: u64) -> String {
    id_of(target, lun).iter().fold("3".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

impl Double {
    fn host(world: World) -> (tempfile::TempDir, Arc<Self>, Initiator) {
        // In memory: each record is flushed, which takes a disk its time 256 times over.
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        let root = dir.path().to_path_buf();
        put(&root.join("etc/iscsi/initiatorname.iscsi"), "InitiatorName=iqn.2026-01.test:host\n");
        put(&root.join("proc/net/unix"), "Num\n0: 2 0 1 1 1 2 @ISCSIADM_ABSTRACT_NAMESPACE\n");
        let double = Arc::new(Self { root: root.clone(), world: Mutex::new(world) });
        let initiator = Initiator {
            tree: Tree::new(&root),
            run_dir: root.join("run"),
            outside: Arc::<Self>::clone(&double),
        };
        (dir, double, initiator)
    }

    fn sys(&self, rest: &str) -> PathBuf {
        self.root.join("sys").join(rest)
    }

    fn record(&self, name: &str, portal: &str) -> PathBuf {
        let portal = Portal::parse(portal).expect("a portal");
        self.root.join("etc/iscsi/nodes").join(name).join(format!("{},{}", portal.address, portal.port))
    }

    /// As the kernel shows a session with the LUNs of its target.
    fn begin(&self, world: &mut World, name: &str, portal: &str) {
        let (number, portal) = (world.next, Portal::parse(portal).expect("a portal"));
        world.next += 1;
        let session = self.sys(&format!("devices/platform/host{number}/session{number}"));
        put(&session.join("targetname"), format!("{name}\n"));
        let connection = self.sys(&format!("class/iscsi_connection/connection{number}:0"));
        put(&connection.join("persistent_address"), format!("{}\n", portal.address));
        put(&connection.join("persistent_port"), format!("{}\n", portal.port));
        put(&self.sys(&format!("class/scsi_host/host{number}/scan")), "");
        for lun in 0..world.targets.get(name).copied().unwrap_or(0) {
            let address = format!("{number}:0:0:{lun}");
            let device = session.join(format!("target{number}:0:0")).join(&address);
            put(&device.join("vpd_pg83"), [&[0, 0x83, 0, 20, 1, 3, 0, 16][..], &id_of(name, lun)].concat());
            put(&device.join("vpd_pg80"), b"\0\x80\0\x04SN 1");
            put(&device.join("vendor"), "LIO-ORG \n");
            put(&device.join("model"), "disk            \n");
            put(&device.join("state"), "running\n");
            put(&device.join(format!("block/sd{number}x{lun}/size")), "2048\n");
            let class = self.sys(&format!("class/scsi_device/{address}"));
            fs::create_dir_all(&class).expect("made");
            symlink(&device, class.join("device")).expect("a link");
        }
        let class = self.sys(&format!("class/iscsi_session/session{number}"));
        fs::create_dir_all(&class).expect("made");
        put(&class.join("targetname"), format!("{name}\n"));
        symlink(&session, class.join("device")).expect("a link");
    }

    fn end(&self, name: &str, portal: &str) {
        let portal = Portal::parse(portal).expect("a portal");
        let tree = Tree::new(&self.root);
        for session in Session::newest(&tree, name, |_| false) {
            if session.node.portal == portal {
                for disk in session.disks(&tree) {
                    let _ = fs::remove_dir_all(self.sys(&format!("class/scsi_device/{}", disk.address)));
                }
                fs::remove_dir_all(self.sys(&format!("class/iscsi_session/session{}", session.id)))
                    .expect("gone");
            }
        }
    }

    fn commands(&self) -> Vec<String> {
        std::mem::take(&mut self.world.lock().commands)
    }
}

impl Outside for Double {
    fn run(&self, program: &str, arguments: &[&str], _: Duration) -> Result<Output, Failure> {
        let said = format!("{program} {}", arguments.join(" "));
        assert!(!said.contains(PASSWORD), "a secret is an argument");
        let mut world = self.world.lock();
        let of = |flag: &str| {
            arguments
                .iter()
                .position(|found| *found == flag)
                .map_or("", |at| arguments.get(at + 1).unwrap_or(&""))
        };
        let (name, portal, op) = (of("-T"), of("-p"), of("-o"));
        let (mut status, mut stdout) = (0, String::new());
        if arguments.contains(&"--login") {
            match world.refuses {
                Some(refused) => status = refused,
                None => self.begin(&mut world, name, portal),
            }
        } else if arguments.contains(&"--logout") {
            self.end(name, portal);
        } else if op == "nonpersistent" {
            stdout = world.targets.keys().map(|name| format!("{portal},1 {name}\n")).collect();
        } else if op == "new" && of("-m") == "node" {
            put(&self.record(name, portal), "# BEGIN RECORD 2.1.8\nnode.startup = manual\n# END RECORD\n");
        } else if op == "new" {
            let portal = Portal::parse(portal).expect("a portal");
            let place = format!("etc/iscsi/send_targets/{},{}/st_config", portal.address, portal.port);
            put(&self.root.join(place), "# BEGIN RECORD 2.1.8\n# END RECORD\n");
        } else if op == "delete" {
            fs::remove_file(self.record(name, portal)).expect("there was one");
        }
        world.commands.push(said);
        Ok(Output { status: Some(status), stdout, stderr: String::new() })
    }

    fn reach(&self, portal: Portal) -> io::Result<()> {
        match self.world.lock().away.contains(&portal) {
            true => Err(io::ErrorKind::ConnectionRefused.into()),
            false => Ok(()),
        }
    }
}

fn target(pairs: &[(&str, &str)]) -> Target {
    let config: Config = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let mut target = Target::new(&config).expect("a target");
    target.named(&config).expect("a name");
    target
}

const NAME: &str = "iqn.2026-01.test:a";
const PLAIN: &[(&str, &str)] = &[("target", "10.0.0.1"), ("targetIQN", NAME)];

fn world(luns: u64) -> World {
    World { targets: BTreeMap::from([(NAME.to_owned(), luns)]), next: 1, ..World::default() }
}

#[test]
fn a_session_lasts_as_long_as_its_last_sr() {
    let (_dir, double, initiator) = Double::host(world(2));
    let (first, second) = (Uuid::from_u128(1), Uuid::from_u128(2));
    let target = target(PLAIN);
    let one = initiator.hold(&Calm, &target, first).expect("sessions");
    assert_eq!(double.commands().len(), 2, "a record, a login");
    let two = initiator.hold(&Calm, &target, second).expect("sessions");
    // Attached again, as by a daemon that was started anew.
    let again = initiator.hold(&Calm, &target, first).expect("sessions");
    assert_eq!(double.commands(), [""; 0], "the session is there");
    let mut users = initiator.users(&Calm, NAME).expect("users");
    users.sort();
    assert_eq!(users, [first, second]);
    assert_eq!(initiator.luns(&two).len(), 2);
    initiator.release(&one).expect("released");
    initiator.release(&again).expect("released");
    assert_eq!(double.commands(), [""; 0]);
    initiator.release(&two).expect("released");
    let said = double.commands();
    assert!(said.len() == 2 && said[0].contains("--logout") && said[1].contains("delete"), "{said:?}");
    assert!(initiator.luns(&two).is_empty());
    assert!(!double.record(NAME, "10.0.0.1:3260").exists());
}

#[test]
fn passwords_lie_in_files_of_root_alone_and_are_gone_afterwards() {
    let (_dir, double, initiator) = Double::host(world(1));
    let chap = [("chapuser", "host"), ("chappassword", PASSWORD)];
    let incoming = [("incoming_chapuser", "array"), ("incoming_chappassword", "zurueck-4711")];
    let target = target(&[PLAIN, &chap, &incoming].concat());
    let found = initiator.discover(&target).expect("targets");
    assert_eq!(found.len(), 1);
    assert!(!double.root.join("etc/iscsi/send_targets/10.0.0.1,3260").exists(), "no record stays");
    let hold = initiator.hold(&Calm, &target, Uuid::from_u128(1)).expect("sessions");
    let text = fs::read_to_string(double.record(NAME, "10.0.0.1:3260")).expect("a record");
    for line in [
        "node.session.auth.authmethod = CHAP",
        "node.session.auth.password = geheim-4711",
        "node.session.auth.username_in = array",
        "node.session.auth.password_in = zurueck-4711",
        "node.session.timeo.replacement_timeout = -1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
    initiator.release(&hold).expect("released");
    assert!(!double.record(NAME, "10.0.0.1:3260").exists());
}

#[test]
fn what_another_program_began_is_left_as_it_was() {
    let (_dir, double, initiator) = Double::host(world(1));
    let theirs = "# BEGIN RECORD 2.1.8\nnode.startup = automatic\n# END RECORD\n";
    put(&double.record(NAME, "10.0.0.1:3260"), theirs);
    let target = target(PLAIN);
    // A record without a session is borrowed.
    let hold = initiator.hold(&Calm, &target, Uuid::from_u128(1)).expect("sessions");
    assert_eq!(double.commands().len(), 1, "a login");
    initiator.release(&hold).expect("released");
    assert_eq!(double.commands().len(), 1, "a logout");
    assert_eq!(fs::read_to_string(double.record(NAME, "10.0.0.1:3260")).expect("a record"), theirs);
    // A session is shared.
    double.begin(&mut double.world.lock(), NAME, "10.0.0.1:3260");
    let hold = initiator.hold(&Calm, &target, Uuid::from_u128(1)).expect("sessions");
    initiator.release(&hold).expect("released");
    assert_eq!(double.commands(), [""; 0]);
    assert_eq!(initiator.luns(&hold).len(), 1, "it goes on");
}

#[test]
fn a_portal_that_is_away_is_passed_over_and_a_refusal_is_final() {
    let (_dir, double, initiator) = Double::host(world(1));
    let two = target(&[("target", "10.0.0.1,10.0.0.2"), ("targetIQN", NAME)]);
    double.world.lock().away = vec![Portal::parse("10.0.0.1:3260").expect("a portal")];
    let hold = initiator.hold(&Calm, &two, Uuid::from_u128(1)).expect("sessions");
    let shown: Vec<String> = hold.sessions.iter().map(|session| session.node.portal.to_string()).collect();
    assert_eq!(shown, ["10.0.0.2:3260"]);
    initiator.release(&hold).expect("released");
    double.commands();
    let code = |outcome: Result<Hold, ApiError>| outcome.expect_err("refused").code;
    double.world.lock().away.clear();
    double.world.lock().refuses = Some(24);
    assert_eq!(code(initiator.hold(&Calm, &two, Uuid::from_u128(1))), "SR_BACKEND_FAILURE_68");
    assert_eq!(double.commands().iter().filter(|said| said.contains("--login")).count(), 1);
    assert!(!double.record(NAME, "10.0.0.1:3260").exists(), "the record with the password is gone");
    // A connection that breaks is tried at the next.
    double.world.lock().refuses = Some(8);
    assert_eq!(code(initiator.hold(&Calm, &two, Uuid::from_u128(1))), "SR_BACKEND_FAILURE_141");
    assert_eq!(double.commands().iter().filter(|said| said.contains("--login")).count(), 2);
    double.world.lock().refuses = None;
    let other = target(&[("target", "10.0.0.1"), ("targetIQN", "*")]);
    double.world.lock().targets.clear();
    assert_eq!(code(initiator.hold(&Calm, &other, Uuid::from_u128(1))), "SR_BACKEND_FAILURE_83");
}

#[test]
fn several_sessions_need_something_that_makes_one_device_of_them() {
    let (_dir, double, initiator) = Double::host(world(1));
    let away = target(&[("target", "10.0.0.1"), ("targetIQN", NAME), ("multihomed", "true")]);
    let hold = initiator.hold(&Calm, &away, Uuid::from_u128(1)).expect("sessions");
    assert_eq!(hold.sessions.len(), 1);
    double.begin(&mut double.world.lock(), NAME, "10.0.0.2:3260");
    let both = Hold { sessions: Session::newest(&initiator.tree, NAME, |_| false), ..hold };
    let lun = initiator.lun(&Calm, &both, &scsi_id(NAME, 0)).expect("a LUN");
    assert_eq!(lun.paths.len(), 2);
    let error = lun.settled(&Calm, &initiator.tree).expect_err("no map");
    assert_eq!(error.code, "SR_BACKEND_FAILURE_433");
    // A map is there.
    let holder = double.sys(&format!("class/block/{}/holders/dm-3/x", lun.paths[0].name));
    put(&holder, "");
    put(&double.sys("class/block/dm-3/dm/uuid"), "mpath-3600\n");
    put(&double.sys("class/block/dm-3/dm/name"), "3600\n");
    assert_eq!(lun.settled(&Calm, &initiator.tree).expect("a map"), initiator.tree.dev("mapper/3600"));
}

#[test]
fn documents_are_what_clients_parse() {
    let (_dir, _double, initiator) = Double::host(world(1));
    let target = target(&[("target", "10.0.0.1"), ("targetIQN", NAME), ("port", "3261")]);
    let found = initiator.discover(&target).expect("targets");
    let flat = |xml: String| xml.split_whitespace().skip(3).collect::<String>();
    assert_eq!(
        flat(documents::targets(&target, &found)),
        format!(
            "<iscsi-target-iqns><TGT><Index>0</Index><IPAddress>10.0.0.1</IPAddress><Port>3261</Port>\
             <TargetIQN>{NAME}</TargetIQN></TGT><TGT><Index>1</Index><IPAddress>10.0.0.1</IPAddress>\
             <Port>3261</Port><TargetIQN>*</TargetIQN></TGT></iscsi-target-iqns>"
        )
    );
    let look = initiator.look(&Calm, &target).expect("sessions");
    let luns = initiator.settled_luns(&Calm, &look.hold).expect("LUNs");
    assert_eq!(
        flat(documents::luns(&initiator.tree, &luns)),
        format!(
            "<iscsi-target><LUN><vendor>LIO-ORG</vendor><serial>SN1</serial><LUNid>0</LUNid><size>1048576</size>\
             <SCSIid>{}</SCSIid></LUN></iscsi-target>",
            scsi_id(NAME, 0)
        )
    );
    let sr = Uuid::from_u128(7);
    assert_eq!(
        flat(documents::users(&target, &[sr])),
        format!(
            "<SRlist><SR><UUID>{sr}</UUID><Target>10.0.0.1</Target><TargetIQN>{NAME}</TargetIQN></SR></SRlist>"
        )
    );
    drop(look);
    assert!(initiator.luns_of(NAME).is_empty(), "a look ends its session");
}

impl Initiator {
    fn luns_of(&self, name: &str) -> Vec<Lun> {
        group(
            Session::newest(&self.tree, name, |_| false)
                .iter()
                .flat_map(|found| found.disks(&self.tree))
                .collect(),
        )
    }
}

/// The seed counts 256 SRs on a host.
const SRS: u64 = 256;

/// What an attach and a detach of each SR takes: files looked at, and commands.
fn work_of_each(
    double: &Double,
    initiator: &Initiator,
    of: impl Fn(u64) -> (Target, String),
) -> Vec<(u64, usize)> {
    let mut work = Vec::new();
    for number in 0..SRS {
        let (target, id) = of(number);
        let before = initiator.tree.looks();
        let hold = initiator.hold(&Calm, &target, Uuid::from_u128(u128::from(number) + 1)).expect("sessions");
        let lun = initiator.lun(&Calm, &hold, &id).expect("a LUN");
        assert_eq!(lun.scsi_id, id);
        lun.settled(&Calm, &initiator.tree).expect("a device");
        work.push((initiator.tree.looks() - before, double.commands().len()));
    }
    work
}

#[test]
fn the_256th_sr_takes_the_work_of_the_first() {
    // A target for each.
    let name = |number: u64| format!("iqn.2026-01.test:t{number}");
    let targets = (0..SRS).map(|number| (name(number), 1)).collect();
    let (_dir, double, initiator) = Double::host(World { targets, next: 1, ..World::default() });
    let of = |number: u64| {
        (target(&[("target", "10.0.0.1"), ("targetIQN", &name(number))]), scsi_id(&name(number), 0))
    };
    let work = work_of_each(&double, &initiator, of);
    assert!(work.iter().all(|each| *each == work[0]), "{work:?}");
    assert!(work[0].0 < 40 && work[0].1 == 2, "{:?}", work[0]);
    // After a restart of the daemon, nothing is run at all.
    let again = work_of_each(&double, &initiator, of);
    assert!(again.iter().all(|each| *each == again[0] && each.1 == 0), "{again:?}");

    // A LUN for each, on one target: the first attach looks at all of them, later ones at their own.
    let (_dir, double, initiator) = Double::host(world(SRS));
    let work = work_of_each(&double, &initiator, |number| (target(PLAIN), scsi_id(NAME, number)));
    assert!(work[1..].iter().all(|each| *each == work[1]), "{work:?}");
    assert!(work[1].0 < 20 && work[1].1 == 0, "{:?}", work[1]);
}
