//! Many VMs at a time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tapio_core::disks::Backend;
use tapio_core::plan::Limits;
use tapio_model::Value;

use crate::pretend::Pretend;
use crate::rig::{MIB, Rig};

/// A VM whose disks all read one VDI.
fn vm_reading(rig: &Rig, vdi: &str, disks: usize) -> String {
    let vm = rig.make_vm(&[]);
    for place in 0..disks {
        let more = [("mode", Value::string("RO")), ("userdevice", Value::string(place.to_string()))];
        rig.call("VBD.create", vec![Rig::vbd_record(&vm, vdi, &more)]);
    }
    vm
}

#[test]
fn a_storm_of_a_hundred_and_twenty_five_vms_with_eight_disks() {
    let rig = Rig::pretended();
    let sr = rig.make_sr();
    let vdi = rig.make_vdi(&sr, MIB);
    let vms: Vec<String> = (0..125).map(|_| vm_reading(&rig, &vdi, 8)).collect();
    let storm = |method: &str, more: &[Value]| {
        let begun = Instant::now();
        let tasks: Vec<String> = vms
            .iter()
            .map(|vm| {
                rig.text(method, std::iter::once(Value::string(vm)).chain(more.iter().cloned()).collect())
            })
            .collect();
        for task in tasks {
            let ended = rig.finished(&task);
            assert_eq!(ended.text("status"), "success", "{ended:?}");
        }
        begun.elapsed()
    };
    let up = storm("Async.VM.start", &[false.into(), false.into()]);
    assert_eq!(rig.stack.disks.all().len(), 1_000);
    rig.check(None);
    let down = storm("Async.VM.hard_shutdown", &[]);
    assert_eq!(rig.stack.disks.all().len(), 0);
    rig.check(None);
    println!("125 VMs with 8 disks: up in {up:?}, down in {down:?}");
}

#[test]
fn disks_are_plugged_beside_each_other() {
    let backend = Arc::new(Pretend::default());
    let rig = Rig::with(Arc::clone(&backend) as Arc<dyn Backend>);
    let sr = rig.make_sr();
    let vdi = rig.make_vdi(&sr, MIB);
    let vm = vm_reading(&rig, &vdi, 20);
    for per_vm in [1, 10] {
        backend.most_opening.store(0, Ordering::SeqCst);
        backend.together.store(per_vm, Ordering::SeqCst);
        let host = Value::string(&rig.stack.db.all("host")[0].reference);
        let key = Value::string("max-parallel-per-vm");
        rig.call("host.remove_from_other_config", vec![host.clone(), key.clone()]);
        rig.call("host.add_to_other_config", vec![host, key, per_vm.to_string().into()]);
        rig.call("VM.start", vec![vm.as_str().into(), false.into(), false.into()]);
        assert_eq!(backend.most_opening.load(Ordering::SeqCst), per_vm);
        assert_eq!(rig.stack.plans.limits(), Limits { host: 16, vm: per_vm, sr: 14 });
        rig.call("VM.hard_shutdown", vec![vm.as_str().into()]);
    }
}
