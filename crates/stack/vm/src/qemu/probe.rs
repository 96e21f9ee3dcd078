//! Whether the processor's virtualisation really works. That /dev/kvm can be opened says little: some hosts have one
//! on which guests hang. A guest of a few instructions is run, once.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long the small guest may take. It takes some milliseconds.
const LIMIT: Duration = Duration::from_secs(3);

/// A firmware of 64 KiB ends below 4 GiB; the processor starts 16 bytes before its end.
const LEN: usize = 64 << 10;

/// What the guest writes to the port that ends it is `2 x value + 1` as an exit code.
const GOOD: i32 = 33;

/// The port that ends the guest.
const PORT: u8 = 0xf4;

/// The guest's bytes: from real to protected mode, then arithmetic in vector registers, which a host that emulates
/// instead of running natively refuses or hangs on.
fn firmware() -> Vec<u8> {
    // hlt everywhere else.
    let mut bytes = vec![0xf4; LEN];
    let mut put = |at: usize, code: &[u8]| bytes[at..at + code.len()].copy_from_slice(code);
    // jmp 0xff00
    put(0xfff0, &[0xe9, 0x0d, 0xff]);
    // cli; lgdt cs:[0xffe0]; mov eax, cr0; or al, 1; mov cr0, eax; ljmp 8:0xffffff40
    put(
        0xff00,
        &[0xfa, 0x2e, 0x66, 0x0f, 0x01, 0x16, 0xe0, 0xff, 0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f, 0x22, 0xc0],
    );
    put(0xff10, &[0x66, 0xea, 0x40, 0xff, 0xff, 0xff, 0x08, 0x00]);
    // mov ax, 16; mov ds, ax; mov eax, cr4; or eax, 0x200 (OSFXSR); mov cr4, eax
    put(
        0xff40,
        &[0x66, 0xb8, 0x10, 0x00, 0x8e, 0xd8, 0x0f, 0x20, 0xe0, 0x0d, 0, 0x02, 0, 0, 0x0f, 0x22, 0xe0],
    );
    // mov eax, cr0; and eax, ~4 (EM); or eax, 2 (MP); mov cr0, eax
    put(0xff51, &[0x0f, 0x20, 0xc0, 0x83, 0xe0, 0xfb, 0x83, 0xc8, 0x02, 0x0f, 0x22, 0xc0]);
    // pxor xmm0, xmm0; paddd xmm0, xmm0; mov al, 16; out PORT, al
    put(0xff5d, &[0x66, 0x0f, 0xef, 0xc0, 0x66, 0x0f, 0xfe, 0xc0, 0xb0, 0x10, 0xe6, PORT]);
    // Segments: none, code, data; all of 4 GiB. Then their table's length and place.
    put(0xffc8, &[0xff, 0xff, 0, 0, 0, 0x9b, 0xcf, 0, 0xff, 0xff, 0, 0, 0, 0x93, 0xcf, 0]);
    put(0xffc0, &[0; 8]);
    put(0xffe0, &[0x17, 0, 0xc0, 0xff, 0xff, 0xff]);
    bytes
}

/// Runs the small guest with an accelerator (`kvm`, `tcg`); `Err` says why it does not work. `dir` receives the
/// firmware.
pub(super) fn works(qemu: &Path, accel: &str, dir: &Path) -> Result<(), String> {
    let file = dir.join(format!("probe-{}.bin", std::process::id()));
    let told = |error: io::Error| format!("{}: {error}", file.display());
    fs::write(&file, firmware()).map_err(told)?;
    let mut command = Command::new(qemu);
    command.args(["-accel", accel, "-machine", "pc", "-m", "4", "-nodefaults", "-no-user-config"]);
    command.args(["-display", "none", "-bios"]).arg(&file);
    command.args(["-device", &format!("isa-debug-exit,iobase={PORT:#x},iosize=1")]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let answer = run(command);
    let _ = fs::remove_file(&file);
    answer
}

fn run(mut command: Command) -> Result<(), String> {
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let until = Instant::now() + LIMIT;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.code() == Some(GOOD) => return Ok(()),
            Ok(Some(status)) => return Err(format!("a small guest ended with {status}")),
            Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(5)),
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("a small guest has not ended within {LIMIT:?}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_starts_where_the_processor_does() {
        let bytes = firmware();
        assert_eq!(bytes.len(), LEN);
        // jmp is relative to the instruction after it.
        let to = i16::from_le_bytes([bytes[0xfff1], bytes[0xfff2]]);
        assert_eq!(0xfff3_i32 + i32::from(to), 0xff00);
    }

    #[test]
    fn a_program_that_is_no_emulator_works_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        assert!(works(Path::new("/no/such/emulator"), "tcg", dir.path()).is_err());
        assert!(works(Path::new("/bin/true"), "tcg", dir.path()).unwrap_err().contains("ended"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    }
}
