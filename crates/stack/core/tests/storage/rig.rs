//! A toolstack with a file SR in a scratch directory.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tapio_control::RunDir;
use tapio_core::call::Call;
use tapio_core::config::Config;
use tapio_core::db::{Db, Object};
use tapio_core::disks::{Disks, Processes};
use tapio_core::storage::Storage;
use tapio_core::{NoAccounts, Peer, Toolstack};
use tapio_model::{ApiError, Asked, ImageFormat, NULL_REF, Transfer, Value};
use tapio_stat::ShmRoot;

/// A toolstack and where it keeps things.
pub(crate) struct Rig {
    pub(crate) dir: PathBuf,
    pub(crate) stack: Arc<Toolstack>,
    pub(crate) host: String,
    session: String,
    _scratch: Option<tempfile::TempDir>,
}

pub(crate) fn config(dir: &Path) -> Config {
    let config = Config {
        run_dir: dir.join("run"),
        state_dir: dir.join("state"),
        mount_dir: dir.join("mount"),
        host_power: None,
        worker_pool_size: 8,
        per_vm_parallel: 4,
        polling: (8_000, 50),
        log_socket: None,
    };
    for made in [&config.run_dir, &config.state_dir, &config.mount_dir, &dir.join("sr")] {
        std::fs::create_dir_all(made).expect("a directory of the rig");
    }
    config
}

fn peer() -> Peer {
    Peer { superuser: true, address: "unix:uid=0".into(), certificate: None }
}

pub(crate) const MIB: i64 = 1 << 20;

/// What a start does with storage.
pub(crate) fn recover(stack: &Arc<Toolstack>) -> Result<(), ApiError> {
    tapio_core::storage::open(&stack.storage)?;
    tapio_core::storage::recover(
        &stack.storage,
        std::time::Instant::now() + std::time::Duration::from_secs(120),
    )
}

impl Rig {
    /// A new one on memory.
    pub(crate) fn new() -> Self {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let dir = scratch.path().to_path_buf();
        Self { _scratch: Some(scratch), ..Self::on(&dir, Db::default()) }
    }

    /// A new one on memory that has real disk processes, and plugs disks into this host.
    pub(crate) fn live() -> Self {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let dir = scratch.path().to_path_buf();
        let (config, shm) = (config(&dir), dir.join("shm"));
        std::fs::create_dir_all(&shm).expect("a directory for statistics");
        let exe = std::env::current_exe().expect("the test has a path");
        let beside =
            exe.ancestors().skip(1).take(2).map(|dir| dir.join("tapio-disk")).find(|path| path.exists());
        let program = beside.expect("the disk program is built first: cargo build -p tapio-disk");
        let owner = dir.display().to_string();
        let backend = Processes::new(program, RunDir::new(dir.join("ctl")), ShmRoot::new(shm), owner);
        let disks = Disks::with_backend(&config, Arc::new(backend));
        let drivers = tapio_vm::registry(&tapio_vm::Settings::new(&config.run_dir));
        let stack = Toolstack::with_disks(config, Db::default(), Box::new(NoAccounts), disks);
        drivers.into_iter().for_each(|driver| stack.vms.add_driver(driver));
        Self { _scratch: Some(scratch), ..Self::start(&dir, stack) }
    }

    /// One on this directory and database; its recovery has run.
    pub(crate) fn on(dir: &Path, db: Db) -> Self {
        Self::start(dir, Toolstack::new(config(dir), db))
    }

    fn start(dir: &Path, stack: Arc<Toolstack>) -> Self {
        stack.start().expect("nothing stands in the way");
        let host = stack.db.all("host")[0].reference.clone();
        let login = ["root", "", "1.0", "tests"].map(Value::string).to_vec();
        let session = stack.call(&peer(), "session.login_with_password", login).expect("root may");
        let session = session.as_str().expect("a session").to_owned();
        Self { dir: dir.to_path_buf(), stack, host, session, _scratch: None }
    }

    /// The session of its calls.
    pub(crate) fn session(&self) -> &str {
        &self.session
    }

    /// What a handler of the toolstack gets.
    pub(crate) fn own_call(&self) -> Call<Storage> {
        Call::own(&self.stack.storage)
    }

    /// Sends a message.
    pub(crate) fn call(&self, method: &str, params: Vec<Value>) -> Result<Value, ApiError> {
        self.stack.call(&peer(), method, [vec![Value::string(&self.session)], params].concat())
    }

    /// What a client gets that asks for a VDI as a raw disk.
    #[track_caller]
    pub(crate) fn export(&self, vdi: &str) -> Vec<u8> {
        let (mut ours, theirs) = UnixStream::pair().expect("a socket");
        let asked = Asked::Export { vdi: vdi.to_owned(), base: None, format: ImageFormat::Raw, start: 0 };
        let transfer = Transfer { session: self.session.clone(), task: None, asked: Ok(asked) };
        std::thread::scope(|scope| {
            let sending =
                scope.spawn(|| self.stack.transfer(&transfer, theirs.into(), &mut |_| {}, &|| true));
            let mut bytes = Vec::new();
            ours.read_to_end(&mut bytes).expect("it is sent");
            sending.join().expect("no panic").expect("an export");
            // A head for the server is before the disk.
            let size = usize::try_from(self.vdi(vdi).int("virtual_size")).expect("a size");
            bytes.split_off(bytes.len() - size)
        })
    }

    /// Sends a message that answers a text.
    pub(crate) fn text(&self, method: &str, params: Vec<Value>) -> Result<String, ApiError> {
        let answer = self.call(method, params)?;
        Ok(answer.as_str().unwrap_or_else(|| panic!("{method} answers text, not {answer:?}")).to_owned())
    }

    /// The code of the error that a message must answer, with its parameters.
    pub(crate) fn refused(&self, method: &str, params: Vec<Value>) -> (String, Vec<String>) {
        let error = self.call(method, params).expect_err("it must be refused");
        (error.code.into_owned(), error.params)
    }

    /// Makes a file SR in a directory of the rig.
    pub(crate) fn make_sr(&self, name: &str) -> String {
        let location = self.dir.join(name);
        std::fs::create_dir_all(&location).expect("a directory for the SR");
        let config = Value::string_map([("location", location.to_string_lossy().into_owned())]);
        self.text("SR.create", self.sr_params("file", config)).expect("an SR")
    }

    /// Parameters of `SR.create`.
    pub(crate) fn sr_params(&self, kind: &str, config: Value) -> Vec<Value> {
        let map = || Value::string_map::<&str, &str>([]);
        let host = Value::string(&self.host);
        vec![host, config, 0.into(), "files".into(), "".into(), kind.into(), "".into(), false.into(), map()]
    }

    /// Makes a VDI.
    pub(crate) fn make_vdi(&self, sr: &str, size: i64) -> String {
        self.try_vdi(sr, size, &[]).expect("a VDI")
    }

    /// Makes a VDI with this `sm_config`.
    pub(crate) fn try_vdi(&self, sr: &str, size: i64, sm: &[(&str, &str)]) -> Result<String, ApiError> {
        let record = [
            ("SR", sr.into()),
            ("virtual_size", size.into()),
            ("name_label", "disk".into()),
            ("name_description", "a disk".into()),
            ("type", "user".into()),
            ("other_config", Value::string_map([("kept", "yes")])),
            ("tags", Value::strings(["red", "blue"])),
            ("sm_config", Value::string_map(sm.iter().copied())),
        ];
        let record = record.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        self.text("VDI.create", vec![Value::Map(record)])
    }

    /// Takes a snapshot.
    pub(crate) fn snapshot(&self, vdi: &str) -> String {
        self.text("VDI.snapshot", vec![vdi.into(), Value::string_map::<&str, &str>([])]).expect("a snapshot")
    }

    /// Parameters of `VDI.copy` without `base_vdi` and `into_vdi`.
    pub(crate) fn copy_params(vdi: &str, sr: &str) -> Vec<Value> {
        vec![vdi.into(), sr.into(), NULL_REF.into(), NULL_REF.into()]
    }

    pub(crate) fn get(&self, class: &str, reference: &str) -> Arc<Object> {
        self.stack.db.get(class, reference).expect("the object is there")
    }

    pub(crate) fn vdi(&self, reference: &str) -> Arc<Object> {
        self.get("VDI", reference)
    }

    /// The one PBD of an SR.
    pub(crate) fn pbd(&self, sr: &str) -> String {
        self.stack.db.find("PBD", "SR", sr)[0].reference.clone()
    }

    /// Words of a set field.
    pub(crate) fn words(&self, class: &str, reference: &str, field: &str) -> Vec<String> {
        let object = self.get(class, reference);
        let words = object.get(field).as_set().unwrap_or_default().iter();
        words.filter_map(Value::as_str).map(str::to_owned).collect()
    }

    /// The file of a VDI.
    pub(crate) fn file(&self, sr_dir: &str, vdi: &str) -> PathBuf {
        let uuid = self.vdi(vdi).text("uuid").to_owned();
        let dir = self.dir.join(sr_dir);
        let found = ["vhd", "raw"].map(|kind| dir.join(format!("{uuid}.{kind}")));
        found.into_iter().find(|path| path.exists()).unwrap_or_else(|| panic!("no image {uuid} in {dir:?}"))
    }

    /// Images in the directory of an SR, and logs of changed blocks that are left of images.
    pub(crate) fn images(&self, sr_dir: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.join(sr_dir)).expect("the SR's directory");
        let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
        let mut names: Vec<_> = names.collect();
        let has_image = |log: &str| {
            names.iter().any(|name| *name == format!("{log}.vhd") || *name == format!("{log}.raw"))
        };
        let is_image = |name: &String| {
            let is_log_alone = name.strip_suffix(".cbtlog").is_some_and(|log| !has_image(log));
            name.ends_with(".vhd") || name.ends_with(".raw") || is_log_alone
        };
        let kept: Vec<_> = names.iter().map(is_image).collect();
        let mut kept = kept.into_iter();
        names.retain(|_| kept.next().unwrap_or(false));
        names.sort();
        names
    }

    /// Every image has a record that is not missing, every such record an image, and sums are right.
    pub(crate) fn check(&self, sr: &str, sr_dir: &str) {
        let mut recorded: Vec<_> = Vec::new();
        let mut sum = 0;
        for vdi in self.stack.db.find("VDI", "SR", sr) {
            assert!(!vdi.bool("missing"), "{vdi:?} has no image");
            recorded.push(vdi.text("uuid").to_owned());
            sum += if vdi.bool("managed") { vdi.int("virtual_size") } else { 0 };
            let running = vdi.get("current_operations").as_map().expect("a map");
            assert!(running.is_empty(), "nothing runs: {running:?}");
        }
        recorded.sort();
        let stem = |name: String| name.split('.').next().unwrap_or_default().to_owned();
        let mut images: Vec<_> = self.images(sr_dir).into_iter().map(stem).collect();
        images.sort();
        assert_eq!(images, recorded, "images, and what has a record");
        assert_eq!(self.get("SR", sr).int("virtual_allocation"), sum);
        let notes: Vec<_> = self.stack.db.notes("storage/").into_iter().map(|(key, _)| key).collect();
        let left: Vec<_> = notes.iter().filter(|key| !key.starts_with("storage/holder/")).collect();
        assert!(left.is_empty(), "nothing is half done: {left:?}");
    }
}
