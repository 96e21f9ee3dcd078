//! A storage repository, and a disk process that uses one of its VDIs.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tapio_control::command::SwapLeaf;
use tapio_control::{OwnClient, RunDir};
use tapio_e2e::disk::{Host, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::{poll_until, run};
use tapio_e2e::scratch::Scratch;
use tapio_format::vhd::offline::Chain;
use tapio_sm::{Config, Ctx, ForkKind, LeafSwap, LiveDisk, NewVdi, OpenSpec, Sr, registry};
use tapio_types::{Access, ApiError, ChainSpec};
use uuid::Uuid;

use super::MIB;
use super::control::start_recorder;

/// Bytes of a record of the recorder, and how many there are before they begin anew.
const RECORD: u64 = 4096;
const SLOTS: u64 = 6000;

/// The disk process of one VDI, by `tap-ctl`.
#[derive(Clone)]
struct Watch {
    host: Host,
    vdi: Uuid,
    disk: Option<[String; 2]>,
    /// Whether it goes on with a new leaf without a pause.
    swaps: bool,
}

struct Live {
    host: Host,
    disk: [String; 2],
    swaps: bool,
}

impl Ctx for Watch {
    fn is_cancelled(&self) -> bool {
        false
    }
    fn progress(&self, _: f64) {}
    fn live(&self, vdi: Uuid) -> Option<Box<dyn LiveDisk>> {
        let disk = self.disk.clone().filter(|_| vdi == self.vdi)?;
        Some(Box::new(Live { host: self.host.clone(), disk, swaps: self.swaps }))
    }
    fn step(&self, _: &'static str) {}
}

impl Live {
    fn ctl(&self, command: &str, args: &[&str]) {
        let [pid, minor] = &self.disk;
        self.host.tap_ctl(&[&[command, "-p", pid, "-m", minor], args].concat()).ok();
    }
}

impl LiveDisk for Live {
    fn pause(&self) -> Result<(), ApiError> {
        self.ctl("pause", &[]);
        Ok(())
    }
    fn resume(&self, with: &OpenSpec) -> Result<(), ApiError> {
        self.ctl("unpause", &["-a", &with.chain.layers[0].to_string()]);
        Ok(())
    }
    fn hold(&self, _: bool) -> Result<bool, ApiError> {
        Ok(self.swaps)
    }
    fn swap_leaf(&self, with: &OpenSpec, new_log: bool) -> Result<LeafSwap, ApiError> {
        let [pid, minor] = self.disk.each_ref().map(|number| number.parse::<i32>().expect("a number"));
        let run = RunDir::new(self.host.run_dir());
        let minor = u16::try_from(minor).expect("a minor number");
        let log = with.log.clone().filter(|_| new_log);
        let swap = SwapLeaf { log, ..SwapLeaf::of(minor, with.chain.layers.clone()) };
        let mut client = OwnClient::connect(&run, pid).expect("it answers");
        let report = client.call(&swap, &[], Some(Duration::from_secs(60))).expect("it has a new leaf");
        assert_eq!(report.leaf, with.chain.layers[0].to_string());
        println!("requests were held back for {} us", report.stalled_us);
        Ok(LeafSwap::Done)
    }
    fn grow(&self, bytes: u64) -> Result<(), ApiError> {
        let [_, minor] = &self.disk;
        let bytes = bytes.to_string();
        let mut command = self.host.tapio(&["disk", "grow", minor, &bytes]);
        tapio_e2e::process::run(&mut command).ok();
        Ok(())
    }
}

/// The number of the last record, after a look at all of them: what a disk holds is what had been written at one
/// moment, no more and no less.
fn last_record(chain: &ChainSpec) -> u64 {
    let chain = Chain::open_spec(chain).expect("the chain opens");
    let mut bytes = vec![0; RECORD as usize];
    let mut found = Vec::new();
    for slot in 0..SLOTS {
        chain.read_at(slot * RECORD, &mut bytes).expect("it can be read");
        let line = std::str::from_utf8(&bytes[..8]).expect("text");
        let Ok(number) = line.trim_end().parse::<u64>() else {
            assert!(bytes.iter().all(|&byte| byte == 0), "slot {slot} holds half a record");
            break;
        };
        assert!(bytes.chunks(8).all(|chunk| chunk == &bytes[..8]), "slot {slot} is torn");
        assert_eq!(number % SLOTS, slot);
        found.push(number);
    }
    let last = found.iter().copied().max().expect("some records");
    for (slot, number) in (0..).zip(&found) {
        let expected = (last - slot) / SLOTS * SLOTS + slot;
        assert_eq!(*number, expected, "slot {slot} when {last} was the last");
    }
    assert_eq!(found.len() as u64, (last + 1).min(SLOTS), "none is missing");
    last
}

#[test]
fn snapshots_of_a_busy_vdi_each_hold_one_moment() {
    needs!("nbdsh", "qemu-img");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let drivers = registry(&scratch.join("mount"), &scratch.join("run"));
    let driver = drivers.iter().find(|driver| driver.info().sr_type == "file").expect("directories");
    let config = Config::from([("location".to_string(), text(&scratch.join("images")).to_string())]);
    let (uuid, vdi) = (Uuid::new_v4(), Uuid::new_v4());
    let mut watch = Watch { host: host.clone(), vdi, disk: None, swaps: true };
    driver.create(&watch, uuid, &config, 0).expect("an SR");
    let sr: Box<dyn Sr> = driver.attach(&watch, uuid, &config).expect("an SR");
    let new = NewVdi {
        uuid: vdi,
        virtual_size: 32 * MIB,
        sm_config: std::collections::BTreeMap::new(),
        name_label: String::new(),
        name_description: String::new(),
    };
    sr.create(&watch, &new).expect("a VDI");
    let chain = sr.activate(&watch, vdi, Access::ReadWrite).expect("its images").chain;
    let tap = host.create(&chain.layers[0].to_string());
    watch.disk = Some([tap.pid.to_string(), tap.minor.to_string()]);
    let (mut recorder, stop) = start_recorder(&tap, &scratch);
    let count =
        |text: &str| text.lines().filter_map(|line| line.trim().parse::<u64>().ok()).next_back().unwrap_or(0);
    let mut snapshots = Vec::new();
    for number in 0..5 {
        // The last by a pause, on top of what swaps have left.
        watch.swaps = number < 4;
        let before = count(&recorder.log());
        let reached =
            poll_until(Duration::from_secs(60), || (count(&recorder.log()) >= before + 200).then_some(()));
        assert!(reached.is_some(), "the load does not get on: {}", recorder.log());
        let forked = sr.fork(&watch, vdi, Uuid::new_v4(), ForkKind::Snapshot).expect("a snapshot");
        snapshots.push(forked.made.uuid);
        assert_eq!(tap.row().expect("it is listed").args, Some(chain.layers[0].to_string()), "its own name");
    }
    // Longer under its feet, by a pause of the process's own: its names still lead to the right images.
    assert_eq!(sr.resize(&watch, vdi, 4096 * MIB).expect("longer").virtual_size, 4096 * MIB);
    std::fs::write(&stop, "").expect("the stop file");
    assert!(recorder.wait(Duration::from_secs(60)).success(), "{}", recorder.log());
    assert!(recorder.log().contains("verified"), "{}", recorder.log());
    println!("records and longest wait in ms: {}", recorder.log().lines().last().unwrap_or_default());
    tap.destroy();
    watch.disk = None;
    sr.deactivate(&watch, vdi).expect("closed");
    let mut before = 0;
    let is_quiet = |path: &Path| {
        let said = vhd_util(&["check", "-n", text(path)]).ok();
        assert_eq!(said.trim(), format!("{} is valid", text(path)));
        let other = run(Command::new("qemu-img").args(["info", "--output=json", text(path)])).ok();
        let other: serde_json::Value = serde_json::from_str(&other).expect("JSON");
        assert_eq!(other["format"], "vpc", "{other}");
    };
    for uuid in snapshots.iter().chain([&vdi]) {
        let chain = sr.activate(&watch, *uuid, Access::ReadOnly).expect("its images").chain;
        let last = last_record(&chain);
        assert!(last > before, "{last} after {before}");
        before = last;
        chain.layers.iter().for_each(|layer| is_quiet(&layer.path));
        sr.deactivate(&watch, *uuid).expect("closed");
    }
    assert_eq!(sr.scan(&watch).expect("a scan").len(), 2 * 5 + 1);
    sr.detach(&watch).map_err(|(_, error)| error).expect("detached");
}
