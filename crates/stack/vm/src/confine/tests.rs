use std::time::{Duration, Instant};

use uuid::Uuid;

use super::*;
use crate::process::Process;

/// What a guest's process would try, and what it may do; each line that it prints is something that worked.
const SCRIPT: &str = "
    for file in /etc/shadow /etc/passwd /etc/hostname /root /home /var/lib ../machine.json ../secret $OUTSIDE; do
        { cat $file || ls $file/; } >/dev/null 2>&1 && echo reads $file
    done
    (echo x >../machine.json) 2>/dev/null && echo writes above
    (echo x >$OUTSIDE) 2>/dev/null && echo writes outside
    ln -s /etc/shadow link 2>/dev/null && echo links
    ln ../emulator.log hard 2>/dev/null && echo links hard
    kill -0 $DAEMON 2>/dev/null && echo signals the daemon
    ls /proc/$DAEMON/fd >/dev/null 2>&1 && echo sees the daemon
    chroot . true 2>/dev/null && echo changes its root
    unshare -U true 2>/dev/null && echo makes a namespace
    mount -t tmpfs none . 2>/dev/null && echo mounts
    echo own >own && [ \"$(cat own)\" = own ] && echo has a directory
    echo user $(id -u) $(id -G)
";

/// Runs the script as a guest's process; what worked.
fn tried(change: impl FnOnce(&mut Settings, &mut Confinement)) -> Option<Vec<String>> {
    if !is_root() || landlock::version().is_none() {
        eprintln!("skipped: needs root and Landlock");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    // Without a root of its own, its user must get to its directory.
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let outside = dir.path().join("outside");
    fs::write(&outside, "").unwrap();
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o666)).unwrap();
    let (mut settings, vm) = (Settings::new(dir.path()), Uuid::new_v4());
    let place = Place::of(&settings, vm).unwrap();
    place.make(&settings).unwrap();
    for name in ["machine.json", "secret"] {
        fs::write(place.join(name), "{}").unwrap();
        fs::set_permissions(place.join(name), fs::Permissions::from_mode(0o600)).unwrap();
    }
    let needs = Needs {
        emulator: Emulator::Qemu,
        programs: Vec::new(),
        files: Vec::new(),
        written: Vec::new(),
        disks: Vec::new(),
        devices: Vec::new(),
        memory: 0,
    };
    let mut confinement = Confinement::of(&settings, &place, &needs).unwrap();
    change(&mut settings, &mut confinement);
    let user = place.user().unwrap().0;
    let mut command = Command::new("/bin/sh");
    command.args(["-c", SCRIPT]).env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
    command.env("OUTSIDE", &outside).env("DAEMON", std::process::id().to_string());
    let process = Process::spawn(&place, vm, command, &[], confinement).unwrap();
    assert!(process.wait(Instant::now() + Duration::from_secs(60)), "it ends");
    let said = fs::read_to_string(place.join("emulator.log")).unwrap();
    let mut lines: Vec<String> = said.lines().map(str::to_owned).collect();
    assert_eq!(lines.pop(), Some(format!("user {user} {user}")), "{said}");
    Some(lines)
}

#[test]
fn a_guests_process_can_touch_nothing_but_its_own() {
    let Some(worked) = tried(|_, _| ()) else { return };
    assert_eq!(worked, ["has a directory"]);
}

#[test]
fn landlock_and_the_filter_hold_where_there_are_no_namespaces() {
    let Some(worked) = tried(|_, confinement| confinement.root = None) else { return };
    assert_eq!(worked, ["has a directory"]);
}

#[test]
fn the_trial_would_notice_a_guest_that_is_not_confined() {
    let worked = tried(|_, confinement| {
        *confinement =
            Confinement { dir: confinement.dir.clone(), user: confinement.user, ..Default::default() };
    });
    let Some(worked) = worked else { return };
    for expected in ["reads /etc/passwd", "writes outside", "links", "has a directory"] {
        assert!(worked.iter().any(|line| line == expected), "{expected}: {worked:?}");
    }
}

#[test]
fn what_the_settings_require_is_there_or_the_guest_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = Settings::new(dir.path());
    settings.guest_sandbox = GuestSandbox::Require;
    settings.guest_users = None;
    let place = Place::of(&settings, Uuid::new_v4()).unwrap();
    place.make(&settings).unwrap();
    let needs = Needs {
        emulator: Emulator::Uml,
        programs: Vec::new(),
        files: Vec::new(),
        written: Vec::new(),
        disks: Vec::new(),
        devices: Vec::new(),
        memory: 0,
    };
    let why = Confinement::of(&settings, &place, &needs).unwrap_err();
    assert!(why.contains("guest-sandbox is 'require'"), "{why}");
}

#[test]
fn a_file_that_a_guests_user_may_not_read_is_copied_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings::new(dir.path());
    let place = Place::of(&settings, Uuid::new_v4()).unwrap();
    place.make(&settings).unwrap();
    let file = dir.path().join("vmlinuz");
    fs::write(&file, "kernel").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(readable(&place, &file, "kernel").unwrap(), file);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let read = readable(&place, &file, "kernel").unwrap();
    if place.user().is_some() {
        assert_eq!((read.clone(), fs::read(read).unwrap()), (place.join("kernel"), b"kernel".to_vec()));
    }
}
