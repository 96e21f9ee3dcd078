//! A toolstack with a file SR, guests that are simulated, and disk processes of either kind.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tapio_control::RunDir;
use tapio_core::config::Config;
use tapio_core::db::{Db, Object};
use tapio_core::disks::{Backend, Disks, Processes};
use tapio_core::{NoAccounts, Peer, Toolstack};
use tapio_model::{ApiError, ArchiveCompression, Asked, NULL_REF, Transfer, Value};
use tapio_stat::ShmRoot;
use tapio_store::Sqlite;

use crate::pretend::Pretend;

pub const MIB: i64 = 1 << 20;

/// A toolstack and a client of it.
pub struct Rig {
    pub dir: PathBuf,
    pub stack: Arc<Toolstack>,
    session: String,
    _scratch: Option<tempfile::TempDir>,
}

/// The program of disk processes that is built beside the tests.
pub fn disk_program() -> PathBuf {
    let exe = std::env::current_exe().expect("the test has a path");
    let beside = exe.ancestors().skip(1).take(2).map(|dir| dir.join("tapio-disk")).find(|path| path.exists());
    beside.expect("the disk program is built first: cargo build -p tapio-disk")
}

pub fn config(dir: &Path) -> Config {
    Config {
        run_dir: dir.join("run"),
        state_dir: dir.join("state"),
        mount_dir: dir.join("mount"),
        host_power: None,
        worker_pool_size: 16,
        per_vm_parallel: 10,
        polling: (8_000, 50),
        log_socket: None,
    }
}

impl Rig {
    /// On memory, with disk processes that only seem to be.
    pub fn pretended() -> Self {
        Self::with(Arc::new(Pretend::default()))
    }

    pub fn with(backend: Arc<dyn Backend>) -> Self {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let dir = scratch.path().to_path_buf();
        Self { _scratch: Some(scratch), ..Self::start(&dir, Db::default(), backend) }
    }

    /// On memory, with real disk processes.
    pub fn real() -> Self {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let dir = scratch.path().to_path_buf();
        let backend = Self::backend(&dir, disk_program());
        Self { _scratch: Some(scratch), ..Self::start(&dir, Db::default(), backend) }
    }

    /// On a store on disk in this directory, with real disk processes; what was there before is recovered.
    pub fn again(dir: &Path) -> Self {
        std::fs::create_dir_all(dir.join("state")).expect("a directory for the store");
        let store = Sqlite::open(&dir.join("state/store.db")).expect("a store");
        let db = Db::open(Arc::new(store)).expect("a database");
        Self::start(dir, db, Self::backend(dir, disk_program()))
    }

    /// With disk processes that a script starts: before each of them it does what the file `dir/before.sh` says.
    pub fn with_started_by_script(dir: &Path) -> Self {
        let (program, before) = (dir.join("tapio-disk"), dir.join("before.sh"));
        let script = format!("#!/bin/sh\n. {}\nexec {} \"$@\"\n", before.display(), disk_program().display());
        std::fs::write(&before, "").expect("a script");
        tapio_fixtures::program(&program, script.as_bytes());
        Self::start(dir, Db::default(), Self::backend(dir, program))
    }

    /// Disk processes that run, and their VBDs.
    pub fn processes(&self) -> Vec<(tapio_core::disks::Process, uuid::Uuid)> {
        self.real_backend().ours()
    }

    /// What asks real disk processes, as the toolstack does.
    pub fn real_backend(&self) -> Arc<dyn Backend> {
        Self::backend(&self.dir, disk_program())
    }

    /// What starts disk processes of the toolstack in `dir`, and finds them again.
    pub fn backend(dir: &Path, program: PathBuf) -> Arc<dyn Backend> {
        let shm = dir.join("shm");
        std::fs::create_dir_all(&shm).expect("a directory for statistics");
        let owner = dir.display().to_string();
        Arc::new(Processes::new(program, RunDir::new(dir.join("ctl")), ShmRoot::new(shm), owner))
    }

    fn start(dir: &Path, db: Db, backend: Arc<dyn Backend>) -> Self {
        let config = config(dir);
        for made in [&config.run_dir, &config.state_dir, &config.mount_dir, &dir.join("sr")] {
            std::fs::create_dir_all(made).expect("a directory of the rig");
        }
        let disks = Disks::with_backend(&config, backend);
        let drivers = tapio_vm::registry(&tapio_vm::Settings::new(&config.run_dir));
        let stack = Toolstack::with_disks(config, db, Box::new(NoAccounts), disks);
        drivers.into_iter().for_each(|driver| stack.vms.add_driver(driver));
        stack.start().expect("it starts");
        let peer = Peer { superuser: true, address: "test".into(), certificate: None };
        let login = vec![Value::string("root"), Value::string("")];
        let session = stack.call(&peer, "session.login_with_password", login).expect("a session");
        let session = session.as_str().expect("a reference").to_owned();
        Self { dir: dir.to_path_buf(), stack, session, _scratch: None }
    }

    pub fn try_call(&self, method: &str, params: Vec<Value>) -> Result<Value, ApiError> {
        let peer = Peer { superuser: true, address: "test".into(), certificate: None };
        let params = std::iter::once(Value::string(&self.session)).chain(params).collect();
        self.stack.call(&peer, method, params)
    }

    #[track_caller]
    pub fn call(&self, method: &str, params: Vec<Value>) -> Value {
        self.try_call(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    #[track_caller]
    pub fn text(&self, method: &str, params: Vec<Value>) -> String {
        self.call(method, params).as_str().expect("a text").to_owned()
    }

    #[track_caller]
    pub fn refused(&self, method: &str, params: Vec<Value>) -> ApiError {
        match self.try_call(method, params) {
            Ok(answer) => panic!("{method} was not refused but answered {answer:?}"),
            Err(error) => error,
        }
    }

    fn transfer(&self, asked: Asked, data: UnixStream) -> Result<(), ApiError> {
        let transfer = Transfer { session: self.session.clone(), task: None, asked: Ok(asked) };
        self.stack.transfer(&transfer, OwnedFd::from(data), &mut |_| {}, &|| true)
    }

    /// A VM as an archive.
    pub fn export(&self, vm: &str) -> Vec<u8> {
        self.export_with(vm, false)
    }

    /// The same, with its state or without.
    pub fn export_with(&self, vm: &str, preserve_power_state: bool) -> Vec<u8> {
        let (mut ours, theirs) = UnixStream::pair().expect("a socket");
        let compression = ArchiveCompression::None;
        let asked = Asked::ExportVm { vm: vm.to_owned(), compression, preserve_power_state };
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| self.transfer(asked, theirs));
            let mut archive = Vec::new();
            ours.read_to_end(&mut archive).expect("it is sent");
            sending.join().expect("no panic").expect("an export");
            archive
        })
    }

    /// Makes VMs of an archive.
    pub fn import(&self, archive: &[u8]) -> Vec<String> {
        let before: Vec<String> = self.stack.db.all("VM").iter().map(|vm| vm.reference.clone()).collect();
        self.try_import(archive).expect("an import");
        let after = self.stack.db.all("VM").into_iter().map(|vm| vm.reference.clone());
        after.filter(|vm| !before.contains(vm)).collect()
    }

    /// Makes VMs of an archive, or not.
    pub fn try_import(&self, archive: &[u8]) -> Result<(), ApiError> {
        let sr = self.stack.db.find("SR", "type", "file")[0].reference.clone();
        let asked = Asked::ImportVm { sr: Some(sr), restore: false, force: false };
        let (mut ours, theirs) = UnixStream::pair().expect("a socket");
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // One that is refused is not read to its end.
                let _ = ours.write_all(archive);
            });
            self.transfer(asked, theirs)
        })
    }

    /// Waits for a task; answers its record.
    #[track_caller]
    pub fn finished(&self, task: &str) -> Arc<Object> {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let record = self.get("task", task);
            if !["pending", "cancelling"].contains(&record.text("status")) {
                return record;
            }
            assert!(Instant::now() < until, "the task does not end: {record:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[track_caller]
    pub fn get(&self, class: &str, reference: &str) -> Arc<Object> {
        self.stack.db.get(class, reference).expect("the object is there")
    }

    pub fn make_sr(&self) -> String {
        self.make_sr_in("sr")
    }

    /// A file SR in a directory of the rig.
    pub fn make_sr_in(&self, dir: &str) -> String {
        let location = self.dir.join(dir).display().to_string();
        let host = self.stack.db.all("host")[0].reference.clone();
        let map = || Value::string_map::<&str, &str>([]);
        self.text(
            "SR.create",
            vec![
                host.into(),
                Value::string_map([("location", location)]),
                0.into(),
                "files".into(),
                "".into(),
                "file".into(),
                "user".into(),
                false.into(),
                map(),
            ],
        )
    }

    pub fn make_vdi(&self, sr: &str, bytes: i64) -> String {
        let record = [
            ("SR", Value::string(sr)),
            ("virtual_size", Value::Int(bytes)),
            ("name_label", Value::string("disk")),
            ("type", Value::string("user")),
        ];
        self.text("VDI.create", vec![record_of(record)])
    }

    /// A simulated VM.
    /// The image of a VDI.
    pub fn file(&self, vdi: &str) -> PathBuf {
        self.dir.join("sr").join(format!("{}.vhd", self.get("VDI", vdi).text("uuid")))
    }

    pub fn make_vm(&self, platform: &[(&str, &str)]) -> String {
        let record = [
            ("name_label", Value::string("guest")),
            ("platform", Value::string_map(platform.iter().copied())),
            ("other_config", Value::string_map([("driver", "sim")])),
            ("memory_static_max", Value::Int(64 * MIB)),
            ("memory_dynamic_max", Value::Int(64 * MIB)),
            ("memory_dynamic_min", Value::Int(64 * MIB)),
            ("memory_static_min", Value::Int(0)),
        ];
        self.text("VM.create", vec![record_of(record)])
    }

    pub fn vbd_record(vm: &str, vdi: &str, more: &[(&'static str, Value)]) -> Value {
        let mut record = BTreeMap::from([
            ("VM".to_owned(), Value::string(vm)),
            ("VDI".to_owned(), Value::string(vdi)),
            ("userdevice".to_owned(), Value::string("autodetect")),
            ("mode".to_owned(), Value::string("RW")),
            ("type".to_owned(), Value::string("Disk")),
        ]);
        record.extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        Value::Map(record)
    }

    pub fn make_vbd(&self, vm: &str, vdi: &str) -> String {
        self.text("VBD.create", vec![Self::vbd_record(vm, vdi, &[])])
    }

    pub fn make_empty_cd(&self, vm: &str) -> String {
        let more = [("type", "CD".into()), ("mode", "RO".into()), ("empty", true.into())];
        self.text("VBD.create", vec![Self::vbd_record(vm, NULL_REF, &more)])
    }

    pub fn control_domain(&self) -> String {
        let all = self.stack.db.all("VM");
        all.into_iter().find(|vm| vm.bool("is_control_domain")).expect("the host's VM").reference.clone()
    }

    /// Nothing runs, nothing is half done, and records, notes and processes agree.
    #[track_caller]
    pub fn check(&self, backend: Option<&dyn Backend>) {
        let notes = self.stack.disks.all();
        for vbd in self.stack.db.all("VBD") {
            let is_noted = notes.iter().any(|note| note.spec.vbd.to_string() == vbd.text("uuid"));
            let is_plugged = vbd.bool("currently_attached") && !vbd.bool("empty");
            assert_eq!(is_plugged, is_noted, "{} and its note", vbd.text("uuid"));
            assert!(vbd.get("current_operations").as_map().expect("a map").is_empty());
        }
        for note in &notes {
            assert_eq!(note.phase, tapio_core::disks::Phase::Running, "{note:?}");
            assert!(self.stack.disks.serves(note.spec.vbd), "{note:?}");
        }
        let mut held: Vec<String> =
            self.stack.storage.holders().into_iter().map(|(_, holder, _)| holder).collect();
        let mut known: Vec<String> =
            notes.iter().map(|note| format!("OpaqueRef:{}", note.spec.vbd)).collect();
        held.sort();
        known.sort();
        assert_eq!(held, known, "holders of VDIs, and VBDs that have a disk");
        let left = self.stack.db.notes("machines/");
        assert!(left.is_empty(), "nothing is half done: {left:?}");
        if let Some(backend) = backend {
            let mut wanted: Vec<_> = notes.iter().filter_map(|note| note.process).collect();
            wanted.sort();
            // A process that was being started when its daemon was killed ends by itself: nothing reads its first line.
            let until = Instant::now() + Duration::from_secs(60);
            loop {
                let mut runs: Vec<_> = backend.ours().into_iter().map(|(process, _)| process).collect();
                runs.sort();
                if runs == wanted {
                    break;
                }
                assert!(Instant::now() < until, "{runs:?} run, and {wanted:?} are known");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        for vm in self.stack.db.all("VM") {
            assert!(vm.get("current_operations").as_map().expect("a map").is_empty());
            if vm.text("power_state") == "Halted" {
                assert_eq!(vm.int("domid"), -1, "{}", vm.text("name_label"));
            }
        }
    }

    /// [`Self::check`], and the processes of the host too.
    #[track_caller]
    pub fn check_real(&self) {
        self.check(Some(&*Self::backend(&self.dir, disk_program())));
    }
}

pub fn record_of<const N: usize>(record: [(&str, Value); N]) -> Value {
    Value::Map(record.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}
