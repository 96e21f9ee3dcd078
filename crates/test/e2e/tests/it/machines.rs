//! Real guests under the daemon, by `xe` as a person types it: disks at the start and later, a snapshot of a moment
//! under load, and what the guest read compared with what lies in the images.

use std::path::PathBuf;
use std::time::Duration;

use tapio_e2e::client::{copy_out, sha256};
use tapio_e2e::disk::{DiskOptions, assert_vhd_valid};
use tapio_e2e::process::{poll_until, run_with_input, run_within};
use tapio_e2e::world::World;

/// Bytes of a record that a guest writes, and how many it writes before it begins anew.
const RECORD: usize = 4096;
const SLOTS: usize = 2000;
/// How much of each disk is filled with a pattern, in MiB.
const PATTERN_MIB: u64 = 2;

/// A VM of the daemon's, with a shell on its console.
pub struct Guest {
    pub world: World,
    limit: Duration,
    sr: String,
}

impl Guest {
    /// Installs a VM with three disks; `more` are further words for `vm-param-set`.
    #[track_caller]
    pub fn install(template: &str, limit: Duration, more: &[&str]) -> Self {
        // The kernel of the QEMU lane lies in no directory for kernels.
        let kernels = match tapio_e2e::guest::Qemu::kernel() {
            Ok(dir) => format!("kernel-dirs={}", dir.display()),
            Err(_) => "kernel-dirs=none".into(),
        };
        Self::install_with(template, limit, more, &kernels)
    }

    /// The same, with a setting of the daemon that says where kernels lie.
    #[track_caller]
    pub fn install_with(template: &str, limit: Duration, more: &[&str], kernels: &str) -> Self {
        let world = World::with(|options| options.arg("--set").arg(kernels));
        let mut guest = Self { world, limit, sr: String::new() };
        guest.sr = guest.value(&["sr-list", "--minimal"]);
        let vm = guest.value(&["vm-install", &format!("template={template}"), "new-name-label=guest"]);
        if !more.is_empty() {
            guest.ok(&[&["vm-param-set", &format!("uuid={vm}")], more].concat());
        }
        for place in 1..3 {
            guest.ok(&["vm-disk-add", "vm=guest", "disk-size=32MiB", &format!("device={place}")]);
        }
        guest
    }

    #[track_caller]
    pub fn ok(&self, words: &[&str]) -> String {
        run_within(self.world.xe().args(words), self.limit).ok()
    }

    #[track_caller]
    pub fn value(&self, words: &[&str]) -> String {
        self.ok(words).trim_end_matches('\n').to_owned()
    }

    /// Types a line into the guest's shell; the lines of the answer that begin with `= `, without that.
    #[track_caller]
    pub fn shell(&self, line: &str) -> Vec<String> {
        let typed = self.world.scratch.join("typed");
        // What the console echoes must not look like an answer.
        let mark = std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_nanos();
        std::fs::write(&typed, format!("echo be''gin{mark}; {line}\necho e''nd{mark}\n")).expect("written");
        let mut command = self.world.xe();
        let (until, timeout) = (format!("until=end{mark}"), format!("timeout={}", self.limit.as_secs()));
        command.args(["console", "vm=guest", &until, &timeout]);
        let input = std::fs::File::open(&typed).expect("opened");
        let said = run_with_input(&mut command, Some(input), self.limit * 2).ok();
        let said = said.replace('\r', "");
        // Behind the mark may stand a piece of what the console still echoes.
        let answer = said.split_once(&format!("begin{mark}"));
        let (_, answer) = answer.unwrap_or_else(|| panic!("no answer to '{line}': {said}"));
        answer.lines().filter_map(|line| line.strip_prefix("= ")).map(str::to_owned).collect()
    }

    /// Starts it, and waits until it can be talked to.
    #[track_caller]
    pub fn start(&self) {
        self.ok(&["vm-start", "vm=guest"]);
        // An empty line asks the shell for its prompt: the one that it shows by itself is lost where no client is
        // connected at that moment.
        let typed = self.world.scratch.join("typed");
        std::fs::write(&typed, "\n").expect("written");
        let awake = poll_until(self.limit, || {
            let mut command = self.world.xe();
            let input = std::fs::File::open(&typed).expect("opened");
            command.args(["console", "vm=guest", "timeout=1"]);
            let said = run_with_input(&mut command, Some(input), self.limit);
            said.stdout.contains("tapio#").then_some(())
        });
        assert!(awake.is_some(), "no shell: {}", self.world.daemon().process.log());
    }

    pub fn vdi_at(&self, place: usize) -> String {
        let place = format!("userdevice={place}");
        self.value(&["vbd-list", "vm-name-label=guest", &place, "params=vdi-uuid", "--minimal"])
    }

    /// What a VDI's chain holds, read through a disk process of its own.
    #[track_caller]
    pub fn content(&self, vdi: &str) -> PathBuf {
        let image = self.world.scratch.join("sr").join(format!("{vdi}.vhd"));
        assert_vhd_valid(&image);
        let disk = DiskOptions::vhd(&image).nbd().arg("--read-only").start(self.world.scratch.path());
        let copy = self.world.scratch.join(&format!("{vdi}.raw"));
        copy_out(&disk.uri(), &copy);
        disk.stop();
        copy
    }

    #[track_caller]
    fn pattern_of(&self, vdi: &str) -> String {
        let copy = self.content(vdi);
        let file = std::fs::File::options().write(true).open(&copy).expect("the copy");
        file.set_len(PATTERN_MIB << 20).expect("cut");
        sha256(&copy)
    }

    /// The number of the last record in a VDI, after a look at all of them: it holds what was written up to one moment.
    #[track_caller]
    fn last_record(&self, vdi: &str) -> u64 {
        let copy = self.content(vdi);
        let bytes = std::fs::read(&copy).expect("the copy");
        let mut found = Vec::new();
        for (slot, record) in bytes.chunks(RECORD).take(SLOTS).enumerate() {
            if record.iter().all(|&byte| byte == 0) {
                break;
            }
            let line = std::str::from_utf8(record).expect("whole records are text").trim_end();
            let number: u64 =
                line.parse().unwrap_or_else(|_| panic!("slot {slot} of {vdi} is torn: {line:?}"));
            assert_eq!(number as usize % SLOTS, slot);
            found.push(number);
        }
        let last = found.iter().copied().max().expect("some records");
        for (slot, number) in (0_u64..).zip(&found) {
            let expected = (last - slot) / SLOTS as u64 * SLOTS as u64 + slot;
            assert_eq!(*number, expected, "slot {slot} of {vdi} when {last} was the last");
        }
        assert_eq!(found.len() as u64, (last + 1).min(SLOTS as u64), "none is missing in {vdi}");
        assert!(bytes[SLOTS * RECORD..].iter().all(|&byte| byte == 0), "nothing else was written to {vdi}");
        last
    }
}

/// The story.
pub fn verified_disks_and_a_moment(guest: &Guest) {
    guest.start();
    let disks = guest.shell("for d in /sys/block/vd*; do echo \"= ${d##*/} $(cat $d/size)\"; done");
    assert_eq!(disks.len(), 3, "{disks:?}");
    assert_eq!(disks[1..], ["vdb 65536", "vdc 65536"]);
    let uuid = format!("uuid={}", guest.value(&["vm-list", "name-label=guest", "--minimal"]));
    let memory = ["vm-param-get", &uuid, "param-name=memory"];
    let known = poll_until(guest.limit, || guest.value(&memory).contains("total: ").then_some(()));
    assert!(known.is_some(), "the guest's agent reports its memory");
    // A fourth comes while it runs, and is there when the command has ended.
    let vdi = guest.value(&[
        "vdi-create",
        &format!("sr-uuid={}", guest.sr),
        "name-label=hot",
        "virtual-size=16MiB",
    ]);
    let vm = guest.value(&["vm-list", "name-label=guest", "--minimal"]);
    let (vm, of) = (format!("vm-uuid={vm}"), format!("vdi-uuid={vdi}"));
    let vbd = guest.value(&["vbd-create", &vm, &of, "device=3"]);
    let vbd = format!("uuid={vbd}");
    guest.ok(&["vbd-plug", &vbd]);
    let seen = guest.shell("echo \"= $(cat /sys/block/vdd/size)\"");
    assert_eq!(seen, ["32768"]);
    // Patterns on three of them: written, dropped from the guest's memory, read back.
    let sums = guest.shell(&format!(
        "for d in vda vdb vdd; do dd if=/dev/urandom of=/tmp/p bs=1M count={PATTERN_MIB} 2>/dev/null; \
         dd if=/tmp/p of=/dev/$d bs=64k conv=fsync 2>/dev/null; echo 3 >/proc/sys/vm/drop_caches; \
         dd if=/dev/$d bs=1M count={PATTERN_MIB} 2>/dev/null | cmp - /tmp/p && set -- $(sha256sum /tmp/p) && echo \"= $1\"; done"
    ));
    assert_eq!(sums.len(), 3, "each was read back as it was written: {sums:?}");
    // The hot one goes, and what the guest wrote lies in its image while the others are in use.
    guest.ok(&["vbd-unplug", &vbd]);
    assert_eq!(guest.shell("[ -e /sys/block/vdd ] || echo '= gone'"), ["gone"]);
    assert_eq!(guest.pattern_of(&vdi), sums[2]);
    guest.ok(&["vbd-plug", &vbd]);
    assert_eq!(
        guest.shell(
            "dd if=/dev/vdd bs=1M count=2 2>/dev/null >/tmp/q; set -- $(sha256sum /tmp/q); echo \"= $1\""
        )[0],
        sums[2]
    );

    // One record after another, each on the disk before the next, and snapshots of all disks meanwhile.
    guest.shell(&format!(
        "(n=0; while [ ! -e /tmp/stop ]; do printf '%0{}d\\n' $n | dd of=/dev/vdc bs={RECORD} seek=$((n % {SLOTS})) \
         conv=notrunc,fsync 2>/dev/null || echo $n >/tmp/failed; n=$((n + 1)); echo $n >/tmp/n; done; touch /tmp/done) &",
        RECORD - 1
    ));
    let written = || {
        let said = guest.shell("echo \"= $(cat /tmp/n)\"");
        said.first().and_then(|number| number.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let loaded = vdi_and_snapshots(guest, &written);
    let ended = guest.shell(
        "touch /tmp/stop; while [ ! -e /tmp/done ]; do usleep 10000; done; [ -e /tmp/failed ] || echo \"= $(cat /tmp/n)\"",
    );
    let total: u64 = ended.first().expect("no write failed").trim().parse().expect("a number");
    let places: Vec<String> = (0..2).map(|place| guest.vdi_at(place)).collect();
    guest.ok(&["vm-shutdown", "vm=guest"]);
    assert_eq!(guest.value(&["vm-list", "name-label=guest", "params=power-state", "--minimal"]), "halted");
    // Off: every image holds what the guest saw.
    assert_eq!(guest.pattern_of(&places[0]), sums[0]);
    assert_eq!(guest.pattern_of(&places[1]), sums[1]);
    assert_eq!(guest.pattern_of(&vdi), sums[2]);
    let (disk, snapshots) = loaded;
    let mut before = 0;
    for (snapshot, least) in &snapshots {
        let last = guest.last_record(snapshot);
        assert!(
            last >= before.max(least - 1) && last < total,
            "{last} of {total}, after {before} and {least}"
        );
        before = last;
    }
    assert_eq!(guest.last_record(&disk), total - 1, "the disk holds all that was written");
    println!("{total} records, snapshots at {snapshots:?}");
    assert_eq!(guest.ok(&["vm-uninstall", "vm=guest", "--force"]), "All objects destroyed\n");
}

/// The disk under load, and its snapshots: each with how many records had been written for sure before it.
fn vdi_and_snapshots(guest: &Guest, written: &dyn Fn() -> u64) -> (String, Vec<(String, u64)>) {
    let disk = guest.vdi_at(2);
    let mut snapshots = Vec::new();
    let mut before = 0;
    for round in 0..3 {
        let now = poll_until(Duration::from_secs(30), || Some(written()).filter(|now| *now >= before + 20));
        let now = now.unwrap_or_else(|| panic!("the load does not get on after {before}"));
        let snapshot = if round == 1 {
            // The whole VM at once.
            let kept = guest.value(&["vm-snapshot", "vm=guest", "new-name-label=kept"]);
            let (kept, place) = (format!("vm-uuid={kept}"), "userdevice=2");
            guest.value(&["vbd-list", &kept, place, "params=vdi-uuid", "--minimal"])
        } else {
            guest.value(&["vdi-snapshot", &format!("uuid={disk}")])
        };
        snapshots.push((snapshot, now));
        before = written();
    }
    (disk, snapshots)
}
