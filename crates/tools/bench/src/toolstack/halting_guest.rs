//! A guest that does nothing at all: a kernel of a hundred bytes that lets a USB controller run, where there is one,
//! as the drivers of systems do while a device at it is open, and halts with its own timers off. What its emulator does
//! then is what its devices cost.

use std::fs;
use std::path::{Path, PathBuf};

/// Where the code of a kernel begins, behind its first sector, and the code of this one, behind the fields.
const SETUP: usize = 0x200;
const CODE: usize = 0x230;
/// First sector, one of setup, and one that would be the kernel.
const LEN: usize = 3 * 512;

/// 8086 with 32-bit operands; interfaces: PCI BIOS 2.1, UHCI 1.1.
const PROGRAM: [u8; 101] = [
    // cli; the clock (channel 0 of the timer) stops: mov al,0x30; out 0x43,al; no interrupts: mov al,0xff; out
    // 0x21,al; out 0xa1,al
    0xfa, 0xb0, 0x30, 0xe6, 0x43, 0xb0, 0xff, 0xe6, 0x21, 0xe6, 0xa1,
    // Find a UHCI by its class: mov ax,0xb103; mov ecx,0x0c0300; xor si,si; int 0x1a; jc halt
    0xb8, 0x03, 0xb1, 0x66, 0xb9, 0x00, 0x03, 0x0c, 0x00, 0x31, 0xf6, 0xcd, 0x1a, 0x72, 0x47,
    // Its ports are in BAR4: mov ax,0xb10a; mov di,0x20; int 0x1a; and cx,0xffe0; mov bp,cx
    0xb8, 0x0a, 0xb1, 0xbf, 0x20, 0x00, 0xcd, 0x1a, 0x83, 0xe1, 0xe0, 0x89, 0xcd,
    // Ports and bus mastering: mov ax,0xb10c; mov di,4; mov cx,5; int 0x1a
    0xb8, 0x0c, 0xb1, 0xbf, 0x04, 0x00, 0xb9, 0x05, 0x00, 0xcd, 0x1a,
    // A list of 1024 empty frames at 0x30000: mov ax,0x3000; mov es,ax; xor di,di; mov cx,1024; mov eax,1; rep stosd
    0xb8, 0x00, 0x30, 0x8e, 0xc0, 0x31, 0xff, 0xb9, 0x00, 0x04, 0x66, 0xb8, 0x01, 0x00, 0x00, 0x00, 0x66,
    0xf3, 0xab, // Stop: mov dx,bp; xor ax,ax; out dx,ax
    0x89, 0xea, 0x31, 0xc0, 0xef, // The list: add dx,8; mov eax,0x30000; out dx,eax
    0x83, 0xc2, 0x08, 0x66, 0xb8, 0x00, 0x00, 0x03, 0x00, 0x66, 0xef,
    // From its beginning: sub dx,2; xor ax,ax; out dx,ax
    0x83, 0xea, 0x02, 0x31, 0xc0, 0xef, // Run: mov dx,bp; mov ax,0x81; out dx,ax
    0x89, 0xea, 0xb8, 0x81, 0x00, 0xef, // halt: cli; hlt; jmp halt
    0xfa, 0xf4, 0xeb, 0xfc,
];

/// The kernel's file, as Linux has it (the x86 boot protocol 2.3).
fn image() -> Vec<u8> {
    let mut image = vec![0; LEN];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]); // sectors of setup
    put(0x1fe, &[0x55, 0xaa]);
    put(SETUP, &[0xeb, (CODE - SETUP - 2) as u8]);
    put(0x202, b"HdrS\x03\x02");
    put(0x211, &[1]); // the kernel is loaded high
    put(0x22c, &0x37ff_ffff_u32.to_le_bytes()); // highest place of a ramdisk
    put(CODE, &PROGRAM);
    image
}

/// Writes the kernel.
pub fn write(dir: &Path) -> Result<PathBuf, String> {
    let file = dir.join("halting-guest");
    fs::write(&file, image()).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_lead_to_places_in_the_program() {
        let image = image();
        // The first jump leads to the program, and the one over the controller to its end.
        assert_eq!(SETUP + 2 + usize::from(image[SETUP + 1]), CODE);
        let over = PROGRAM.iter().position(|byte| *byte == 0x72).unwrap();
        assert_eq!(over + 2 + usize::from(PROGRAM[over + 1]), PROGRAM.len() - 4);
        assert!(CODE + PROGRAM.len() <= 2 * 512, "setup is one sector");
    }
}
