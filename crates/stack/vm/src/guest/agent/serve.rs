//! What the agent answers: a line `NUMBER COMMAND...` by `NUMBER ok TEXT` or `NUMBER no TEXT`, as the daemon's side
//! in `crates/stack/vm/src/agent.rs` expects.
//!
//! | command | what |
//! |---|---|
//! | `ping` | answers |
//! | `bind DEVICE` | a device of User-mode Linux whose disk has come gets its driver; `ok NAME` of the disk |
//! | `unbind DEVICE [force]` | loses it again, unless something uses the disk |
//! | `appears PATH` | waits for the disk of a device that the emulator has added; `ok NAME` |
//! | `idle PATH` | whether nothing uses the disk of a device |
//! | `facts` | `ok` and what the guest is: words `KEY=VALUE` |
//! | `disks FROM` | `ok` and what disks have counted, from that number on: words `NAME,NUMBER,...` |
//! | `freeze`, `thaw` | the file systems on disks; `ok` and how many |
//! | `trim` | discards what the file systems do not use; `ok` and how many bytes |
//! | `poweroff`, `reboot` | answers, then ends the guest by `/init --end` |

use super::facts;
use super::files::{Answer, Lines, Name, each_entry, each_line};
use super::sys::{self, File};
use super::text::{Text, nth_word, word};

/// Longest command; what is longer is passed over.
const LINE_LEN_MAX: usize = 1024;
/// How long a device may take until it has its disk, and how often that is looked at.
const APPEARS_MS: u32 = 5000;
const LOOK_MS: u32 = 2;

const DRIVER: &[u8] = b"/sys/bus/platform/drivers/virtio-uml/";
const DEVICES: &[u8] = b"/sys/bus/platform/devices/";

/// Answers on a serial line, whose name ends with NUL, until it is closed. False where it cannot be opened.
pub fn serve(line: &[u8]) -> bool {
    let Ok(line) = File::open(line, sys::READ_WRITE | sys::NO_TERMINAL) else { return false };
    // A line that is no terminal is raw by nature.
    let _ = line.make_raw();
    let mut agent = Agent { line, last: Text::new(), answer: Text::new() };
    let _ = agent.line.write(b"0 ok agent\n");
    let mut lines = Lines::<LINE_LEN_MAX>::new();
    while let Some(command) = lines.next(&agent.line) {
        agent.hear(command);
    }
    true
}

struct Agent {
    line: File,
    /// The number of the last command.
    last: Text<32>,
    answer: Answer,
}

impl Agent {
    fn hear(&mut self, line: &[u8]) {
        let (number, command) = word(line);
        if number.is_empty() {
            return;
        }
        let mut end = None;
        // Asked again because the first answer was lost or late: answered again, not done again.
        if number != self.last.bytes() {
            self.answer.clear();
            end = obey(command, &mut self.answer);
            self.last.clear();
            self.last.push(number);
        }
        let mut whole: Answer = Text::of(&[number, b" ", self.answer.bytes()]);
        // The end of the line must be there, whatever was left out.
        whole.push(b"\n");
        let _ = self.line.write(whole.bytes());
        // After the reply: the end of the guest would lose it.
        if let Some(how) = end {
            let _ = sys::start([b"/bin/sh\0", b"/init\0", b"--end\0", how]);
        }
    }
}

/// Does a command; answers how the guest shall end, if it shall.
fn obey(command: &[u8], answer: &mut Answer) -> Option<&'static [u8]> {
    let (what, rest) = word(command);
    let (subject, rest) = word(rest);
    match what {
        b"ping" => answer.push(b"ok"),
        b"bind" => bind(subject, answer),
        b"unbind" => unbind(subject, word(rest).0 == b"force", answer),
        b"appears" => appears(subject, subject, answer),
        b"idle" => {
            if may_go(subject, answer) {
                answer.push(b"ok");
            }
        }
        b"facts" => facts::facts(answer),
        b"disks" => facts::disks(subject, answer),
        b"freeze" => facts::freeze(answer),
        b"thaw" => facts::thaw(answer),
        b"trim" => facts::trim(answer),
        b"poweroff" | b"reboot" => {
            answer.push(b"ok");
            return Some(if what == b"reboot" { b"reboot\0" } else { b"poweroff\0" });
        }
        _ => {
            answer.push(b"no ");
            answer.push(what.get(..what.len().min(64)).unwrap_or_default());
            answer.push(b" is not known");
        }
    }
    None
}

/// Writes a device's name to its driver's file; on failure answers why.
fn tell_driver(file: &[u8], device: &[u8], answer: &mut Answer) -> bool {
    let mut name: Name = Text::of(&[DRIVER, file]);
    let told = name.name().ok_or(0).and_then(|name| File::open(name, sys::WRITE_ONLY)?.write(device));
    if let Err(error) = told {
        answer.push(b"no ");
        answer.push(device);
        answer.push(b": the driver's ");
        answer.push(file);
        answer.push(b" failed with error ");
        answer.push_number(error);
    }
    told.is_ok()
}

fn is_bound(device: &[u8]) -> bool {
    let mut name: Name = Text::of(&[DRIVER, device]);
    name.name().is_some_and(sys::exists)
}

fn bind(device: &[u8], answer: &mut Answer) {
    let path: Name = Text::of(&[DEVICES, device]);
    // Told at once rather than looked at first: a device has no driver as a rule.
    if tell_driver(b"bind", device, answer) || is_bound(device) {
        answer.clear();
        appears(path.bytes(), device, answer);
    }
}

fn unbind(device: &[u8], is_forced: bool, answer: &mut Answer) {
    if !is_bound(device) {
        answer.push(b"ok");
        return;
    }
    let path: Name = Text::of(&[DEVICES, device]);
    if (is_forced || may_go(path.bytes(), answer)) && tell_driver(b"unbind", device, answer) {
        answer.push(b"ok");
    }
}

/// Waits for the disk of a device.
fn appears(path: &[u8], device: &[u8], answer: &mut Answer) {
    let mut waited = 0;
    let mut disk = Text::new();
    while !disk_of(path, &mut disk) {
        if waited >= APPEARS_MS {
            answer.push(b"no ");
            answer.push(device);
            answer.push(b" has no disk");
            return;
        }
        sys::sleep(LOOK_MS);
        waited += LOOK_MS;
    }
    answer.push(b"ok ");
    answer.push(disk.bytes());
}

/// Whether nothing uses the disk of a device; else answers what does.
fn may_go(path: &[u8], answer: &mut Answer) -> bool {
    let mut disk = Text::new();
    !disk_of(path, &mut disk) || !is_used(disk.bytes(), answer)
}

/// The name of the disk of a device: below it is a device of virtio, and below that its disk.
fn disk_of(path: &[u8], disk: &mut Text<64>) -> bool {
    let mut below: Name = Text::of(&[path]);
    let mut device: Text<64> = Text::new();
    let is_virtio = |name: &[u8]| name.starts_with(b"virtio");
    if !each_entry(&mut below, |name| is_virtio(name).then(|| device.push(name)).is_some()) {
        return false;
    }
    let mut below: Name = Text::of(&[path, b"/", device.bytes(), b"/block"]);
    disk.clear();
    each_entry(&mut below, |name| {
        disk.push(name);
        true
    })
}

/// Whether something in the guest uses a disk or its partitions, and what.
fn is_used(disk: &[u8], answer: &mut Answer) -> bool {
    let mut place: Name = Text::of(&[b"/sys/class/block/", disk]);
    if is_part_used(&place, disk, answer) {
        return true;
    }
    let mut has_partitions = false;
    let mut dir: Name = Text::of(&[place.bytes()]);
    let is_one_used = each_entry(&mut dir, |name| {
        if !name.starts_with(disk) {
            return false;
        }
        let mut below: Name = Text::of(&[place.bytes(), b"/", name, b"/dev"]);
        if !below.name().is_some_and(sys::exists) {
            return false;
        }
        has_partitions = true;
        is_part_used(&Text::of(&[place.bytes(), b"/", name]), name, answer)
    });
    if is_one_used {
        return true;
    }
    // A program that opened the disk for itself alone is in no list above; nor is one that has a partition open.
    place.clear();
    place.push(b"/dev/");
    place.push(disk);
    let claimed = match place.name().map(|name| File::open(name, sys::READ_ONLY | sys::EXCLUSIVE)) {
        Some(Ok(file)) => has_partitions && file.request(sys::BLKRRPART) == Err(sys::EBUSY),
        Some(Err(error)) => error == sys::EBUSY,
        None => false,
    };
    if claimed {
        answer.push(b"no ");
        answer.push(disk);
        answer.push(b" is in use");
    }
    claimed
}

/// Whether a disk or partition, which the kernel shows at `place`, is mounted, swap space, or part of another device.
fn is_part_used(place: &Name, name: &[u8], answer: &mut Answer) -> bool {
    let mut told = |words: &[&[u8]]| {
        answer.push(b"no ");
        answer.push(name);
        words.iter().for_each(|word| answer.push(word));
        true
    };
    let mut file: Name = Text::of(&[place.bytes(), b"/dev"]);
    let mut number: Text<32> = Text::new();
    each_line(&mut file, |line| {
        number.push(word(line).0);
        true
    });
    let mut mounts: Name = Text::of(&[b"/proc/1/mountinfo"]);
    let is_mounted = each_line(&mut mounts, |line| {
        !number.bytes().is_empty()
            && nth_word(line, 2) == number.bytes()
            && told(&[b" is mounted at ", nth_word(line, 4)])
    });
    if is_mounted {
        return true;
    }
    let node: Name = Text::of(&[b"/dev/", name]);
    let mut swaps: Name = Text::of(&[b"/proc/swaps"]);
    if each_line(&mut swaps, |line| word(line).0 == node.bytes() && told(&[b" is swap space"])) {
        return true;
    }
    let mut holders: Name = Text::of(&[place.bytes(), b"/holders"]);
    each_entry(&mut holders, |holder| told(&[b" is used by ", holder]))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_disk_of_a_device_is_two_directories_below_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("driver")).unwrap();
        let mut disk = Text::new();
        assert!(!disk_of(dir.path().to_str().unwrap().as_bytes(), &mut disk));
        fs::create_dir_all(dir.path().join("virtio7/block/vdh")).unwrap();
        assert!(disk_of(dir.path().to_str().unwrap().as_bytes(), &mut disk));
        assert_eq!(disk.bytes(), b"vdh");
    }

    #[test]
    fn commands_are_answered() {
        let answered = |command: &[u8]| {
            let mut answer = Text::new();
            let end = obey(command, &mut answer);
            (String::from_utf8(answer.bytes().to_vec()).unwrap(), end)
        };
        assert_eq!(answered(b" ping"), ("ok".into(), None));
        assert_eq!(answered(b" dance"), ("no dance is not known".into(), None));
        assert_eq!(answered(b" idle /no/such/device"), ("ok".into(), None));
        assert_eq!(answered(b" unbind no-such-device"), ("ok".into(), None));
        assert_eq!(answered(b" poweroff"), ("ok".into(), Some(&b"poweroff\0"[..])));
        let (refused, _) = answered(b" bind no-such-device");
        assert!(refused.starts_with("no no-such-device: the driver's bind failed with error "), "{refused}");
    }

    /// The program itself, as a guest runs it: it answers, answers again, and ends with its line.
    #[test]
    fn the_program_speaks_over_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let (program, line) = (dir.path().join("agent"), dir.path().join("line"));
        tapio_fixtures::program(&program, crate::guest::AGENT);
        fs::write(&line, "7 ping\n7 dance\n8 dance\n").unwrap();
        let mut child = std::process::Command::new(&program).arg(&line).spawn().unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if std::time::Instant::now() > until {
                child.kill().unwrap();
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        };
        // A file is read and written at one place: the greeting lies over the commands' beginning.
        let text = fs::read_to_string(&line).unwrap();
        assert!(status.success() && text.starts_with("0 ok agent\n"), "{status}: {text:?}");
        let status = std::process::Command::new(&program).status().unwrap();
        assert_eq!(status.code(), Some(1), "no line is named");
    }
}
