//! A storage that fails, delays and hangs when it is told to: nbdkit, mounted as a file by FUSE.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::disk::text;
use crate::process::{Running, run};
use crate::scratch::Scratch;
use crate::tools::missing;

/// How long a helper may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A file whose storage does as it is told; gone when dropped.
#[derive(Debug)]
pub struct Faulty {
    dir: PathBuf,
    file: PathBuf,
    device: Option<PathBuf>,
    // In the order in which they may go.
    _fuse: Running,
    _nbdkit: Running,
}

impl Faulty {
    /// A file of `len` zero bytes; `filters` are more arguments of nbdkit.
    ///
    /// # Errors
    /// What is missing on this host, for a skip message.
    pub fn start(scratch: &Scratch, len: u64, filters: &[&str]) -> Result<Self, String> {
        if let Some(tool) = missing(&["nbdkit", "nbdfuse", "umount"]) {
            return Err(format!("needs {tool}"));
        }
        if !Path::new("/dev/fuse").exists() {
            return Err("needs FUSE: there is no /dev/fuse".into());
        }
        let dir = scratch.join("faulty");
        fs::create_dir(&dir).map_err(|error| error.to_string())?;
        let path = |name: &str| dir.join(name);
        scratch.raw_image("faulty/data", len);
        let (data, hang, flush, socket) = (path("data"), path("hang"), path("flush"), path("sock"));
        let (data, hang, flush) = (text(&data), text(&hang), text(&flush));
        let wait = format!("while [ -e {hang} ]; do sleep 0.05; done");
        let mut nbdkit = Command::new("nbdkit");
        nbdkit
            .args(["-f", "-U", text(&socket), "--filter=error"])
            .args(filters.iter().filter(|f| f.starts_with("--")));
        nbdkit.args([
            "eval",
            "thread_model=echo parallel",
            &format!("get_size=echo {len}"),
            "can_flush=exit 0",
        ]);
        nbdkit.arg(format!(
            "pread={wait}; dd if={data} skip=$4 count=$3 iflag=skip_bytes,count_bytes bs=64k status=none"
        ));
        nbdkit.arg(format!(
            "pwrite={wait}; dd of={data} seek=$4 oflag=seek_bytes iflag=fullblock conv=notrunc bs=64k status=none"
        ));
        nbdkit.arg(format!("flush={wait}; if [ -e {flush} ]; then echo EIO told to >&2; exit 1; fi"));
        nbdkit.args(["error-rate=100%", &format!("error-file={}", text(&path("fail")))]);
        nbdkit.args(filters.iter().filter(|filter| !filter.starts_with("--")));
        let mut nbdkit = Running::start(&mut nbdkit, &path("nbdkit.log"));
        // A socket is there before it listens.
        nbdkit.wait_for("nbdkit's answer", START_LIMIT, || UnixStream::connect(&socket).ok());
        let file = path("disk");
        fs::write(&file, "").map_err(|error| error.to_string())?;
        let mut fuse = Command::new("nbdfuse");
        fuse.arg(&file).arg(format!("nbd+unix:///?socket={}", text(&socket)));
        let mut fuse = Running::start(&mut fuse, &path("nbdfuse.log"));
        let mounted = || fs::metadata(&file).is_ok_and(|data| data.len() == len).then_some(());
        let mut refused = false;
        fuse.wait_for("the mounted file, or a refusal", START_LIMIT, || {
            refused = fs::read_to_string(path("nbdfuse.log")).is_ok_and(|log| log.contains("mount failed"));
            mounted().or(refused.then_some(()))
        });
        if refused {
            return Err(format!("needs FUSE: {}", fuse.log().trim()));
        }
        Ok(Self { file, device: None, _fuse: fuse, _nbdkit: nbdkit, dir })
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The same storage as an export, without the file system between.
    pub fn export(&self) -> PathBuf {
        self.dir.join("sock")
    }

    /// A loop device over it, past the page cache: through it, the driver answers a write well of which the storage
    /// took only the beginning.
    ///
    /// # Errors
    /// Why there is none.
    pub fn device(&mut self) -> Result<PathBuf, String> {
        let out = run(Command::new("losetup").args(["--find", "--show", "--direct-io=on", text(&self.file)]));
        if !out.status.success() {
            return Err(format!("needs a loop device: {}", out.stderr.trim()));
        }
        let device = PathBuf::from(out.stdout.trim());
        self.device = Some(device.clone());
        let name = device.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_direct = fs::read_to_string(format!("/sys/block/{name}/loop/dio"));
        if is_direct.is_ok_and(|said| said.trim() == "1") {
            return Ok(device);
        }
        Err("needs a loop device that passes the page cache by".into())
    }

    fn set(&self, name: &str, on: bool) {
        let path = self.dir.join(name);
        let done = if on { fs::write(&path, "") } else { fs::remove_file(&path) };
        // Switching off what is off already is fine.
        let done = done.or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound if !on => Ok(()),
            _ => Err(error),
        });
        done.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// The file whose presence makes reads and writes fail, for scripts that do it themselves.
    pub fn fail_file(&self) -> PathBuf {
        self.dir.join("fail")
    }

    /// Reads and writes fail with EIO, or work again.
    pub fn fail(&self, on: bool) {
        self.set("fail", on);
    }

    /// Flushes fail with EIO, or work again.
    pub fn fail_flushes(&self, on: bool) {
        self.set("flush", on);
    }

    /// Nothing is answered, or everything again.
    pub fn hang(&self, on: bool) {
        self.set("hang", on);
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.dir.join("hang"));
        if let Some(device) = &self.device {
            run(Command::new("losetup").arg("--detach").arg(device));
        }
        // Lazy: a process that still holds the file is killed by its own guard, perhaps after this one.
        run(Command::new("umount").arg("-l").arg(&self.file));
    }
}
