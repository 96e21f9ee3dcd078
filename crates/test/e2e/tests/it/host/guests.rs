//! What an account that may make and start VMs (`vm-admin`) can make the host do: nothing.

use std::cell::RefCell;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::json;
use tapio_e2e::disk::text;
use tapio_e2e::process::run;
use tapio_e2e::toolstack::{DaemonOptions, Session};
use tapio_e2e::world::World;

/// A daemon with a directory for kernels, a VM, and a session of a `vm-admin`.
struct Attack {
    world: World,
    mallory: Session,
    vm: RefCell<String>,
}

impl Attack {
    fn new() -> Self {
        let world = World::with(DaemonOptions::own_kernels);
        world.daemon().add_user("mallory", "vm-admin", "let me in, please");
        let mallory = world.daemon().login_as("mallory", "let me in, please");
        let denied = mallory.fails("SR.forget", &[json!("OpaqueRef:NULL")]);
        assert_eq!(denied[0], "RBAC_PERMISSION_DENIED", "an account of this role: {denied:?}");
        let install = ["vm-install", "template=Tapio UML guest", "new-name-label=guest"];
        let uuid = run(world.xe().args(install)).ok();
        let vm = mallory.text("VM.get_by_uuid", &[json!(uuid.trim())]);
        Self { world, mallory, vm: RefCell::new(vm) }
    }

    fn vm(&self) -> String {
        self.vm.borrow().clone()
    }

    /// Gives the VM a value: the setter's error, if it has one. Then the VM has it all the same, as one that came with
    /// its record, so that the start is attacked, too.
    fn set(&self, field: &str, value: &str) -> Option<Vec<String>> {
        let answer = self.mallory.try_call(&format!("VM.set_{field}"), &[json!(self.vm()), json!(value)]);
        let error = answer.err();
        if let Some(error) = &error {
            assert!(error[0] == "INVALID_VALUE" && error[1] == field, "{error:?}");
            let uuid = self.mallory.text("VM.get_uuid", &[json!(self.vm())]);
            assert!(error[3].contains(&uuid), "{error:?}");
            let mut record = self.mallory.call("VM.get_record", &[json!(self.vm())]);
            record[field] = json!(value);
            let made = self.mallory.text("VM.create", &[record]);
            self.mallory.call("VM.destroy", &[json!(self.vm.replace(made))]);
        }
        error
    }

    /// Starts the VM, which must fail; code and parameters.
    #[track_caller]
    fn refused(&self) -> Vec<String> {
        let error = self.mallory.fails("VM.start", &[json!(self.vm()), json!(false), json!(false)]);
        assert_eq!(self.mallory.text("VM.get_power_state", &[json!(self.vm())]), "Halted");
        error
    }

    /// A file in the directory of kernels.
    fn kernel(&self, name: &str) -> PathBuf {
        self.world.scratch.join("kernels").join(name)
    }
}

#[test]
fn a_vm_admin_runs_no_program_of_the_host() {
    let attack = Attack::new();
    let target = attack.world.scratch.join("owned");
    // The daemon's own words are further arguments of find, and padding was to push them off the end.
    let exec = format!(
        "{} -maxdepth 0 -exec install -m 4755 /bin/sh {} ; -quit",
        text(attack.world.scratch.path()),
        text(&target)
    );
    let copy = attack.kernel("find");
    std::fs::copy("/usr/bin/find", &copy).expect("a copy of find");
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o755)).expect("changed");
    let link = attack.kernel("linux");
    std::os::unix::fs::symlink("/usr/bin/find", &link).expect("a link");
    for kernel in
        ["/usr/bin/find", text(&copy), text(&link), "/proc/self/exe", "/bin/sh", "find", "/usr/bin/find /"]
    {
        for padding in [0, 1500, 3500, 60_000] {
            let refused = attack.set("PV_kernel", kernel);
            assert!(refused.is_some(), "the setter takes {kernel}");
            attack.set("PV_args", &format!("{exec}{}", " -o -true".repeat(padding / 9)));
            let error = attack.refused();
            assert!(!target.exists(), "{kernel} ran as root");
            let is_argument_refused = error.iter().any(|word| word.contains("PV_args"));
            assert!(
                error[0] == "INVALID_VALUE" && error[1] == "PV_kernel" || is_argument_refused,
                "{error:?}"
            );
        }
        // Without arguments to look at, the kernel itself is refused.
        attack.set("PV_args", "");
        let error = attack.refused();
        assert_eq!(error[..3], ["INVALID_VALUE", "PV_kernel", kernel], "{error:?}");
    }
    attack.world.finish();
}

#[test]
fn a_vm_admin_reads_no_file_of_the_host() {
    let attack = Attack::new();
    let secret = attack.kernel("secret");
    std::fs::write(&secret, "root:*:19000:0:99999:7:::\n").expect("written");
    for driver in ["uml", "qemu"] {
        let key = [json!(attack.vm()), json!("driver")];
        attack.mallory.call("VM.remove_from_other_config", &key);
        attack.mallory.call("VM.add_to_other_config", &[key[0].clone(), key[1].clone(), json!(driver)]);
        for ramdisk in ["/etc/shadow", text(&secret), "/proc/kcore", "/dev/zero", "/etc/../etc/shadow"] {
            let refused = attack.set("PV_ramdisk", ramdisk).expect("the setter refuses it");
            assert_eq!(refused[2], ramdisk);
            let kernels = attack.kernel("");
            let is_inside = ramdisk.starts_with(text(&kernels));
            assert!(is_inside || refused[3].contains(text(&kernels).trim_end_matches('/')), "{refused:?}");
            let error = attack.refused();
            // A host without this emulator starts none of its guests, whatever they name.
            if !error.iter().any(|word| word.contains("install qemu")) {
                assert_eq!(error[..3], ["INVALID_VALUE", "PV_ramdisk", ramdisk], "{error:?}");
            }
        }
    }
    attack.world.finish();
}

#[test]
fn a_vm_admin_displaces_no_word_of_the_drivers() {
    let attack = Attack::new();
    for args in [
        "x".repeat(3900),
        " y".repeat(4000),
        "\"con1=fd:3\"".to_owned(),
        "mconsole=notify:/run/x".to_owned(),
        "a\u{a0}ubd0=/etc/shadow".to_owned(),
        "a\tubd0=/etc/shadow".to_owned(),
        "rootfstype=hostfs rootflags=/".to_owned(),
        "--help".to_owned(),
    ] {
        let refused = attack.set("PV_args", &args);
        assert!(refused.is_some(), "the setter takes {args:.40}");
        let error = attack.refused();
        assert!(error.iter().any(|word| word.contains("PV_args")), "{args:.40}: {error:?}");
    }
    attack.world.finish();
}
