//! A guest of QEMU whose shell a test types into, and which writes all the while.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::rig::{Host, LIMIT};

/// What a guest may take for an answer on a busy host, emulated.
const ANSWER: Duration = Duration::from_secs(240);

/// Blocks of 64 KiB that the guest writes in turn.
const BLOCKS: usize = 64;

/// Where `scripts/lane-kernel` unpacks the kernel of guests; none, and a word about it, where it is not.
pub fn kernel() -> Option<PathBuf> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| here.join("../../../target"), PathBuf::from);
    // The daemon takes kernels by their directory as it is, without steps upwards.
    let dir = target.join("lanes/kernel");
    let dir = dir.canonicalize().unwrap_or(dir);
    let is_there = dir.join("vmlinuz").exists() && PathBuf::from("/usr/bin/qemu-system-x86_64").exists();
    if !is_there {
        let why = b"\nskipped: needs a guest kernel and qemu-system-x86_64 (scripts/setup guest) [tapiod]\n";
        let _ = std::io::stderr().write_all(why);
    }
    is_there.then_some(dir)
}

/// Makes a VM with a disk, which starts the kernel.
pub fn make_vm(host: &Host, kernel: &std::path::Path, disks: &[&Value]) -> Value {
    let record = json!({
        "name_label": "guest", "platform": { "accel": "tcg", "max_disks": "4" }, "other_config": { "driver": "qemu" },
        "PV_kernel": kernel.join("vmlinuz"), "memory_static_max": "134217728", "memory_dynamic_max": "134217728",
        "memory_dynamic_min": "134217728", "memory_static_min": "0", "VCPUs_max": "3", "VCPUs_at_startup": "1"
    });
    let vm = host.done("VM.create", json!([record]));
    for (at, disk) in disks.iter().enumerate() {
        let place = json!({
            "VM": vm, "VDI": disk, "userdevice": at.to_string(), "bootable": false, "mode": "RW", "type": "Disk",
            "empty": false, "other_config": {}, "qos_algorithm_type": "", "qos_algorithm_params": {}
        });
        host.done("VBD.create", json!([place]));
    }
    vm
}

/// A shell in a guest.
pub struct Guest {
    /// `VM.uuid`, as directories are named.
    uuid: String,
}

impl Guest {
    pub fn of(host: &Host, vm: &Value) -> Self {
        let uuid = host.done("VM.get_uuid", json!([vm]));
        Self { uuid: uuid.as_str().unwrap().replace('-', "") }
    }

    fn console(&self, host: &Host) -> Option<UnixStream> {
        let stream = UnixStream::connect(host.dir.join("run/vm").join(&self.uuid).join("g/console")).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
        Some(stream)
    }

    /// The emulators of the VM on a host: none or one.
    pub fn emulators(&self, host: &Host) -> usize {
        let dir = host.dir.join("run/vm").join(&self.uuid);
        let Ok(pid) = std::fs::read_to_string(dir.join("pid")) else { return 0 };
        let name = std::fs::read(format!("/proc/{}/cmdline", pid.trim())).unwrap_or_default();
        usize::from(String::from_utf8_lossy(&name).contains("qemu-system"))
    }

    /// Waits for the shell.
    pub fn wait(&self, host: &Host) {
        host.until("the guest has a shell", || {
            let Some(mut console) = self.console(host) else { return false };
            let _ = console.write_all(b"\n");
            let mut said = [0; 4096];
            let until = Instant::now() + Duration::from_secs(3);
            while Instant::now() < until {
                let count = console.read(&mut said).unwrap_or(0);
                if String::from_utf8_lossy(&said[..count]).contains("tapio#") {
                    return true;
                }
            }
            false
        });
    }

    /// Types a line; the lines of the answer that begin with `= `, without that.
    #[track_caller]
    pub fn shell(&self, host: &Host, line: &str) -> Vec<String> {
        let mark = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        let until = Instant::now() + ANSWER;
        let mut said = String::new();
        let mut console = loop {
            assert!(Instant::now() < until, "no console at {}; its log:\n{}", host.dir.display(), host.log());
            match self.console(host) {
                Some(console) => break console,
                None => std::thread::sleep(Duration::from_millis(100)),
            }
        };
        // What the console echoes must not look like an answer.
        let typed = format!("echo be''gin{mark}; {line}\necho e''nd{mark}\n");
        console.write_all(typed.as_bytes()).unwrap();
        let mut bytes = [0; 4096];
        while !said.contains(&format!("end{mark}")) {
            assert!(Instant::now() < until, "no answer to '{line}' but {said:?}; the log:\n{}", host.log());
            let count = console.read(&mut bytes).unwrap_or(0);
            said.push_str(&String::from_utf8_lossy(&bytes[..count]).replace('\r', ""));
        }
        let (_, answer) = said.split_once(&format!("begin{mark}")).unwrap_or_else(|| panic!("{said}"));
        answer.lines().filter_map(|line| line.strip_prefix("= ")).map(str::to_owned).collect()
    }

    /// Begins to write blocks of random bytes, which it keeps in memory too, and reads each again from the disk.
    pub fn begin_to_write(&self, host: &Host) {
        let script = format!(
            "mkdir -p /tmp/m; (i=0; while [ ! -e /tmp/m/stop ]; do s=$((i % {BLOCKS})); \
             dd if=/dev/urandom of=/tmp/m/b$s bs=64k count=1 2>/dev/null; \
             dd if=/tmp/m/b$s of=/dev/vda bs=64k seek=$s count=1 conv=notrunc,fsync 2>/dev/null \
             || echo $i >>/tmp/m/bad; i=$((i + 1)); echo $i >/tmp/m/n; done; echo >/tmp/m/done) &"
        );
        self.shell(host, &script);
        self.goes_on(host);
    }

    /// The number of blocks that it has written.
    #[track_caller]
    fn written(&self, host: &Host) -> u64 {
        let said = self.shell(host, "echo \"= $(cat /tmp/m/n)\"");
        said.first().and_then(|word| word.parse().ok()).unwrap_or(0)
    }

    /// Waits until it has written more.
    #[track_caller]
    pub fn goes_on(&self, host: &Host) {
        let before = self.written(host);
        let until = Instant::now() + LIMIT;
        while self.written(host) < before + 3 {
            assert!(Instant::now() < until, "the guest writes nothing; the log:\n{}", host.log());
        }
    }

    /// Ends the writes, and compares what the disk holds with what the memory does: the number of blocks.
    #[track_caller]
    pub fn verify(&self, host: &Host) -> u64 {
        let script = format!(
            "touch /tmp/m/stop; while [ ! -e /tmp/m/done ]; do usleep 100000; done; sync; \
             echo 3 >/proc/sys/vm/drop_caches; \
             s=0; bad=0; seen=0; while [ $s -lt {BLOCKS} ]; do if [ -e /tmp/m/b$s ]; then seen=$((seen + 1)); \
             dd if=/dev/vda of=/tmp/m/r bs=64k skip=$s count=1 2>/dev/null; \
             cmp -s /tmp/m/r /tmp/m/b$s || bad=$((bad + 1)); \
             fi; s=$((s + 1)); done; echo \"= $seen $bad $(cat /tmp/m/bad 2>/dev/null | wc -l)\"; \
             rm -f /tmp/m/stop /tmp/m/done"
        );
        let said = self.shell(host, &script);
        let numbers: Vec<u64> = said
            .first()
            .map(|line| line.split(' ').filter_map(|word| word.parse().ok()).collect())
            .unwrap_or_default();
        assert!(
            matches!(numbers[..], [seen, 0, 0] if seen > 0),
            "blocks, wrong ones, failed writes: {said:?}"
        );
        numbers[0]
    }
}
