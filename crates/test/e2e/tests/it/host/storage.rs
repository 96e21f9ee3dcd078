//! A storage repository, and a disk process that uses one of its VDIs.

use std::time::Duration;

use tapio_e2e::disk::{Host, assert_vhd_valid, text};
use tapio_e2e::needs;
use tapio_e2e::process::poll_until;
use tapio_e2e::scratch::Scratch;
use tapio_format::vhd::offline::Chain;
use tapio_sm::{Config, Ctx, ForkKind, LiveDisk, NewVdi, OpenSpec, Sr, registry};
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
}

struct Live {
    host: Host,
    disk: [String; 2],
}

impl Ctx for Watch {
    fn is_cancelled(&self) -> bool {
        false
    }
    fn progress(&self, _: f64) {}
    fn live(&self, vdi: Uuid) -> Option<Box<dyn LiveDisk>> {
        let disk = self.disk.clone().filter(|_| vdi == self.vdi)?;
        Some(Box::new(Live { host: self.host.clone(), disk }))
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
    needs!("nbdsh");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let drivers = registry(&scratch.join("mount"), &scratch.join("run"));
    let driver = drivers.iter().find(|driver| driver.info().sr_type == "file").expect("directories");
    let config = Config::from([("location".to_string(), text(&scratch.join("images")).to_string())]);
    let (uuid, vdi) = (Uuid::new_v4(), Uuid::new_v4());
    let mut watch = Watch { host: host.clone(), vdi, disk: None };
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
    for _ in 0..4 {
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
    for uuid in snapshots.iter().chain([&vdi]) {
        let chain = sr.activate(&watch, *uuid, Access::ReadOnly).expect("its images").chain;
        let last = last_record(&chain);
        assert!(last > before, "{last} after {before}");
        before = last;
        chain.layers.iter().for_each(|layer| assert_vhd_valid(&layer.path));
        sr.deactivate(&watch, *uuid).expect("closed");
    }
    assert_eq!(sr.scan(&watch).expect("a scan").len(), 2 * 4 + 1);
    sr.detach(&watch).map_err(|(_, error)| error).expect("detached");
}
