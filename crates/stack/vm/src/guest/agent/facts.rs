//! What the agent reports of its guest, and what it does with the guest's file systems.
//!
//! The agent may live in a tree of its own: names of the guest are looked at through the first program's root.

use super::files::{ANSWER_LEN_MAX, Answer, Name, each_entry, each_line};
use super::sys::{self, File};
use super::text::{Text, nth_word, word};

/// Mounts, addresses and names are told as long as there is room.
const ROOT: &[u8] = b"/proc/1/root";

/// Requests to a file system, and errors (`linux/fs.h`, `errno.h`).
const FIFREEZE: usize = 0xc004_5877;
const FITHAW: usize = 0xc004_5878;
const FITRIM: usize = 0xc018_5879;
const EOPNOTSUPP: usize = 95;

/// A word `KEY=VALUE` of the answer; blanks of the value become `%20`.
fn push_word(answer: &mut Answer, key: &[u8], value: &[u8]) {
    answer.push(b" ");
    answer.push(key);
    answer.push(b"=");
    for byte in value {
        match byte {
            b' ' => answer.push(b"%20"),
            0..b' ' | 0x7f.. => {}
            plain => answer.push(core::slice::from_ref(plain)),
        }
    }
}

/// The first line of a file as a word.
fn push_line(answer: &mut Answer, key: &[u8], file: &[u8]) {
    each_line(&mut Text::of(&[file]), |line| {
        push_word(answer, key, line);
        true
    });
}

/// `ok` and what there is to report, as `crates/stack/vm/src/facts.rs` reads it.
pub fn facts(answer: &mut Answer) {
    answer.push(b"ok");
    push_line(answer, b"kernel", b"/proc/sys/kernel/osrelease");
    push_line(answer, b"name", b"/proc/sys/kernel/hostname");
    each_line(&mut Text::of(&[b"/proc/meminfo"]), |line| {
        let (name, rest) = word(line);
        match name {
            b"MemTotal:" => push_word(answer, b"total", word(rest).0),
            b"MemAvailable:" => push_word(answer, b"free", word(rest).0),
            _ => {}
        }
        false
    });
    each_line(&mut Text::of(&[ROOT, b"/etc/os-release"]), |line| {
        let Some(at) = line.iter().position(|byte| *byte == b'=') else { return false };
        let (name, value) = (line.get(..at).unwrap_or_default(), line.get(at + 1..).unwrap_or_default());
        let value = value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(value);
        match name {
            b"PRETTY_NAME" => push_word(answer, b"os", value),
            b"ID" => push_word(answer, b"distro", value),
            b"VERSION_ID" => push_word(answer, b"release", value),
            _ => {}
        }
        false
    });
    // `|-- ADDRESS`, and below it `/32 host LOCAL` where it is one of this guest's.
    let mut address: Text<32> = Text::new();
    each_line(&mut Text::of(&[b"/proc/net/fib_trie"]), |line| {
        let (first, rest) = word(line);
        if first == b"|--" {
            address.clear();
            address.push(word(rest).0);
        } else if first == b"/32" && nth_word(rest, 1) == b"LOCAL" {
            push_word(answer, b"ip", address.bytes());
        }
        false
    });
    each_mount(|name, kind, mounted| {
        let value: Name = Text::of(&[name, b",", kind, b",", mounted]);
        push_word(answer, b"fs", value.bytes());
    });
}

/// Shows the mounts of disks: the name of the disk, the kind of the file system, and where it is.
fn each_mount(mut show: impl FnMut(&[u8], &[u8], &[u8])) {
    each_line(&mut Text::of(&[b"/proc/1/mountinfo"]), |line| {
        // NUMBER PARENT DEVICE ROOT MOUNT OPTIONS [MORE...] - KIND SOURCE OPTIONS
        let Some(mark) = (6..32).find(|at| nth_word(line, *at) == b"-") else { return false };
        let source = nth_word(line, mark + 2);
        // A part of a tree that is mounted elsewhere, too, is the same file system.
        if let Some(name) = source.strip_prefix(b"/dev/").filter(|_| nth_word(line, 3) == b"/") {
            show(name, nth_word(line, mark + 1), nth_word(line, 4));
        }
        false
    });
}

/// Opens a mount of the guest. The kernel writes blanks in its name as `\040`.
fn open(mounted: &[u8]) -> Result<File, usize> {
    let mut name: Name = Text::of(&[ROOT]);
    let mut rest = mounted;
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        match (first, after) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) => {
                name.push(&[((a - b'0') << 6) | ((b - b'0') << 3) | (c - b'0')]);
                rest = after;
            }
            _ => name.push(core::slice::from_ref(first)),
        }
    }
    File::open(name.name().ok_or(0_usize)?, sys::READ_ONLY)
}

/// Longest word about one disk, and what must be left of an answer behind all.
const DISK_LEN_MAX: usize = 256;
const REST_LEN: usize = 64;

/// The guest's disks and what they have counted, as `/sys/block/NAME/stat` has it: words `NAME,NUMBER,...`, from the
/// disk of this number on, as many as there is room for. None is the end.
pub fn disks(from: &[u8], answer: &mut Answer) {
    let digits = from.iter().filter(|byte| byte.is_ascii_digit());
    let first = digits.take(9).fold(0, |number, digit| number * 10 + usize::from(digit - b'0'));
    answer.push(b"ok");
    let mut at = 0;
    each_entry(&mut Text::of(&[b"/sys/block"]), |name| {
        if name.starts_with(b"ram") || name.starts_with(b"loop") {
            return false;
        }
        at += 1;
        if at <= first {
            return false;
        }
        let mut disk: Text<DISK_LEN_MAX> = Text::of(&[b" ", name]);
        each_line(&mut Text::of(&[b"/sys/block/", name, b"/stat"]), |line| {
            let (mut number, mut rest) = word(line);
            while !number.is_empty() {
                disk.push(b",");
                disk.push(number);
                (number, rest) = word(rest);
            }
            true
        });
        let fits = answer.bytes().len() + disk.bytes().len() + REST_LEN <= ANSWER_LEN_MAX;
        if fits {
            answer.push(disk.bytes());
        }
        !fits
    });
}

fn ok_number(answer: &mut Answer, number: usize) {
    answer.push(b"ok ");
    answer.push_number(number);
}

/// Freezes all file systems on disks, or none. Answers how many.
pub fn freeze(answer: &mut Answer) {
    let mut count = 0;
    let mut refused = false;
    each_mount(|name, _, mounted| {
        if refused {
            return;
        }
        match open(mounted).and_then(|root| root.request(FIFREEZE)) {
            Ok(()) => count += 1,
            // Frozen before, or a kind that cannot be.
            Err(sys::EBUSY | EOPNOTSUPP) => {}
            Err(error) => {
                refused = true;
                answer.push(b"no ");
                answer.push(name);
                answer.push(b" cannot be frozen: error ");
                answer.push_number(error);
            }
        }
    });
    if refused {
        thaw_all();
    } else {
        ok_number(answer, count);
    }
}

fn thaw_all() -> usize {
    let mut count = 0;
    each_mount(|_, _, mounted| {
        count += usize::from(open(mounted).and_then(|root| root.request(FITHAW)).is_ok());
    });
    count
}

/// Thaws all file systems. Answers how many were frozen.
pub fn thaw(answer: &mut Answer) {
    ok_number(answer, thaw_all());
}

/// Discards what the file systems do not use. Answers how many bytes.
pub fn trim(answer: &mut Answer) {
    let mut bytes: usize = 0;
    each_mount(|_, _, mounted| {
        // `struct fstrim_range`: from, length, least length; the kernel puts what it discarded into the second.
        let mut range = [0, u64::MAX, 0];
        if open(mounted).and_then(|root| root.request_with(FITRIM, &mut range)).is_ok() {
            bytes = bytes.saturating_add(range[1] as usize);
        }
    });
    ok_number(answer, bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_reports_itself() {
        let mut answer = Text::new();
        facts(&mut answer);
        let text = String::from_utf8_lossy(answer.bytes()).into_owned();
        let read = crate::facts::GuestFacts::of_words(text.strip_prefix("ok").unwrap());
        assert!(read.memory.0 > 1024 && !read.kernel.is_empty() && !read.host_name.is_empty(), "{text}");
    }

    #[test]
    fn all_disks_are_told_of_in_parts() {
        let (mut told, mut from) = (Vec::new(), 0);
        loop {
            let mut answer = Text::new();
            disks(from.to_string().as_bytes(), &mut answer);
            let text = String::from_utf8_lossy(answer.bytes()).into_owned();
            let part = crate::facts::GuestDisk::of_words(text.strip_prefix("ok").unwrap());
            if part.is_empty() {
                break;
            }
            from += part.len();
            told.extend(part.into_iter().map(|disk| disk.name));
        }
        let is_told = |name: &String| !name.starts_with("ram") && !name.starts_with("loop");
        let listed = std::fs::read_dir("/sys/block").unwrap();
        let listed = listed.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut listed: Vec<_> = listed.filter(is_told).collect();
        listed.sort();
        told.sort();
        assert_eq!(told, listed);
    }

    #[test]
    fn words_have_no_blanks() {
        let mut answer = Text::new();
        push_word(&mut answer, b"os", b"Debian GNU/Linux\t12\n\xff");
        assert_eq!(answer.bytes(), b" os=Debian%20GNU/Linux12");
    }

    #[test]
    fn names_of_mounts_are_read_as_the_kernel_writes_them() {
        // Through the first program's root, which is this one's where both may look.
        if std::fs::metadata("/proc/1/root/etc").is_err() {
            return;
        }
        assert!(open(b"/etc").is_ok() && open(b"/\\145tc").is_ok());
        assert!(open(b"/no\\040such").is_err());
    }
}
